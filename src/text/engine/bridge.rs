//! Where a long word of a byte-level vocabulary can be cut without changing its tokens.
//!
//! A merge across the boundary of two characters makes a token that holds the end of the one and the start of the other. Where
//! no token does, nothing is ever merged, and the parts to both sides can be encoded apart. Long runs of Chinese, say, fall into
//! short parts that the word cache knows.

use std::collections::HashSet;

use super::bytemap::mix;
use super::unicode::char_len;

/// Boundaries that some token holds: (end of a character, start of the next), whole or as much of them as the token has.
pub struct Bridges {
    known: HashSet<u64>,
}

/// Up to four bytes as a number, different for different byte strings.
fn pack(bytes: &[u8]) -> u64 {
    bytes.iter().fold(1, |number, byte| number << 8 | *byte as u64)
}

/// A whole character as a number of 32 bits.
fn pack_char(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |number, byte| number << 8 | *byte as u64)
}

/// Both as one number. Two pairs may share one: then a boundary counts as held that is not, which costs a cut and nothing else.
fn both(left: &[u8], right: &[u8]) -> u64 {
    mix(pack(left), pack(right))
}

impl Bridges {
    /// `tokens` are the bytes of what the merges make.
    pub fn new<'a>(tokens: impl Iterator<Item = &'a [u8]>) -> Self {
        let mut known = HashSet::new();
        for token in tokens {
            let mut left = &token[..0];
            let mut at = token.iter().take_while(|b| **b & 0xc0 == 0x80).count();
            if at > 0 {
                left = &token[..at];
            }
            while at < token.len() {
                let end = (at + char_len(token[at])).min(token.len());
                let right = &token[at..end];
                if !left.is_empty() {
                    known.insert(both(left, right));
                }
                (left, at) = (right, end);
            }
        }
        Self { known }
    }

    /// Some token may hold the boundary between these two characters.
    fn is_bridged(&self, left: &[u8], right: &[u8]) -> bool {
        (0..left.len()).any(|from| (1..=right.len()).any(|to| self.known.contains(&both(&left[from..], &right[..to]))))
    }

    /// End of the part of `word` that starts at `at`: the next boundary of characters that no token holds.
    pub fn part_end(&self, memo: &mut Memo, word: &[u8], at: usize) -> usize {
        let mut left = at;
        let mut right = at + char_len(word[at]);
        while right < word.len() {
            let next = right + char_len(word[right]);
            let pair = (&word[left..right], &word[right..next]);
            if !memo.get(pair.0, pair.1, || self.is_bridged(pair.0, pair.1)) {
                return right;
            }
            (left, right) = (right, next);
        }
        word.len()
    }
}

/// Remembers answers about pairs of characters.
pub struct Memo {
    /// The pair and, in the bit [`ANSWER`], the answer.
    slots: Vec<u64>,
}

const MEMO_LOG2: u32 = 14;
/// Bit 27 of the left character, which is 0 in the first byte of every character of four bytes (11110xxx).
const ANSWER: u64 = 1 << 59;

impl Default for Memo {
    fn default() -> Self {
        Self { slots: vec![0; 1 << MEMO_LOG2] }
    }
}

impl Memo {
    fn get(&mut self, left: &[u8], right: &[u8], find: impl FnOnce() -> bool) -> bool {
        let pair = pack_char(left) << 32 | pack_char(right);
        let slot = &mut self.slots[(mix(pair, 0) >> (64 - MEMO_LOG2)) as usize];
        if *slot & !ANSWER != pair || pair == 0 {
            *slot = pair | if find() { ANSWER } else { 0 };
        }
        *slot & ANSWER != 0
    }
}
