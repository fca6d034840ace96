//! What two ranks tell each other before any data moves: which operation they are in, and how much each sends and expects. So a
//! disagreement is found before it can do harm, at both ends. Short messages ride along.

use std::hash::Hasher;

use twox_hash::XxHash3_64;

use super::transport::Op;

/// Room for one head.
pub const ROOM: usize = 2048;
const NUMBERS: usize = 8 * 8;
const TEXT: usize = 192;
/// What a rank sends another in one operation rides along if it is not longer than this.
pub const SHORT: usize = ROOM - NUMBERS - TEXT;

/// The messages from one rank to another in one operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    pub messages: u64,
    pub bytes: u64,
    /// Of each message's length.
    hash: u64,
}

impl Sizes {
    pub fn of(lengths: impl Iterator<Item = usize>) -> Self {
        let (mut messages, mut bytes, mut hash) = (0, 0, XxHash3_64::new());
        for length in lengths {
            messages += 1;
            bytes += length as u64;
            hash.write(&(length as u64).to_le_bytes());
        }
        Self { messages, bytes, hash: hash.finish() }
    }

    /// "12 bytes", or how many messages make them up where that is not plain.
    pub fn words(&self) -> String {
        match self.messages {
            0 | 1 => format!("{} bytes", self.bytes),
            n => format!("{} bytes in {n} messages", self.bytes),
        }
    }
}

/// A head as it is read.
pub struct Head<'a> {
    pub key: u64,
    /// What its sender sends.
    pub sends: Sizes,
    /// What its sender expects.
    pub expects: Sizes,
    /// The operation in words.
    pub text: &'a [u8],
    pub short: &'a [u8],
}

/// A hash of what both ends must have in common.
pub fn key(op: &Op) -> u64 {
    let (group, sequence, name) = op.key();
    XxHash3_64::oneshot(format!("{group}\0{sequence}\0{name}").as_bytes())
}

/// Writes a head into `room`. What rides along is to be put behind it.
pub fn write(room: &mut [u8], key: u64, sends: Sizes, expects: Sizes, text: &str) {
    // Cut where it is too long: it is only read by people.
    let text = &text.as_bytes()[..text.len().min(TEXT)];
    let numbers =
        [key, sends.messages, sends.bytes, sends.hash, expects.messages, expects.bytes, expects.hash, text.len() as u64];
    for (place, n) in room.chunks_exact_mut(8).zip(numbers) {
        place.copy_from_slice(&n.to_le_bytes());
    }
    room[NUMBERS..NUMBERS + text.len()].copy_from_slice(text);
}

/// Length of a head with this text, without what rides along.
pub fn len(text: &str) -> usize {
    NUMBERS + text.len().min(TEXT)
}

/// None: this is no head.
pub fn read(message: &[u8]) -> Option<Head<'_>> {
    let (numbers, rest) = message.split_at_checked(NUMBERS)?;
    let mut n = numbers.chunks_exact(8).map(|n| u64::from_le_bytes(n.try_into().expect("8 bytes")));
    let mut next = || n.next().expect("as many as NUMBERS has room for");
    let key = next();
    let mut sizes = || Sizes { messages: next(), bytes: next(), hash: next() };
    let (sends, expects) = (sizes(), sizes());
    let (text, short) = rest.split_at_checked(usize::try_from(next()).ok()?)?;
    Some(Head { key, sends, expects, text, short })
}

#[cfg(test)]
mod tests {
    use super::super::transport::{Channel, Place};
    use super::*;

    #[test]
    fn a_head_is_read_as_it_was_written() {
        let op = Op { channel: Channel::Main, group: "world", sequence: 3, name: "gradients", place: Place::default() };
        let (sends, expects) = (Sizes::of([3, 4].into_iter()), Sizes::of([7].into_iter()));
        assert!(sends.bytes == expects.bytes && sends != expects && Sizes::of([4, 3].into_iter()) != sends);
        let mut room = [0; ROOM];
        for text in [String::new(), op.to_string(), "x".repeat(1000)] {
            write(&mut room, key(&op), sends, expects, &text);
            let len = len(&text);
            room[len..len + 3].copy_from_slice(b"abc");
            let head = read(&room[..len + 3]).unwrap();
            assert_eq!((head.key, head.sends, head.expects, head.short), (key(&op), sends, expects, &b"abc"[..]));
            assert!(text.as_bytes().starts_with(head.text) && head.text.len() == text.len().min(TEXT));
        }
        assert!(read(&room[..NUMBERS - 1]).is_none());
        assert_ne!(key(&op), key(&Op { sequence: 4, ..op }));
    }
}
