//! The text of a JSON line, found and unescaped fast.
//!
//! Lines of a corpus are nearly all of one kind: an object of some fields, one of them a long string. [`text_of`] finds its way through
//! such a line by itself and leaves all others to `serde_json`, which decides what is JSON; what it takes, it reads as `serde_json` does.

use serde::de::IgnoredAny;

/// Bytes that are looked at together.
const WIDE: usize = 64;

/// What a backslash and a letter mean; 0 where that is not one byte.
static SHORT_ESCAPES: [u8; 256] = {
    let mut table = [0; 256];
    let (letters, bytes) = (b"ntrbf\"\\/", b"\n\t\r\x08\x0c\"\\/");
    let mut i = 0;
    while i < letters.len() {
        table[letters[i] as usize] = bytes[i];
        i += 1;
    }
    table
};

/// Raw bytes of the string that the object `line` has under `field`, written into `room`. None: `line` is no such object, or an unusual
/// one.
pub fn text_of<'r>(line: &[u8], field: &[u8], room: &'r mut Vec<u8>) -> Option<&'r [u8]> {
    // Unescaped text is never longer, and is written in steps of `WIDE`.
    if room.len() < line.len() + WIDE {
        room.resize(line.len() + WIDE, 0);
    }
    let mut length = None;
    let mut at = after(line, skip_space(line, 0), b'{')?;
    loop {
        at = after(line, skip_space(line, at), b'"')?;
        let key = &line[at..][..memchr::memchr2(b'"', b'\\', &line[at..])?];
        at = after(line, at + key.len(), b'"')?;
        at = skip_space(line, after(line, skip_space(line, at), b':')?);
        if key == field {
            let (end, bytes) = unescape(line, after(line, at, b'"')?, room)?;
            // The last one counts.
            (at, length) = (end, Some(bytes));
        } else {
            at += value_length(&line[at..])?;
        }
        at = skip_space(line, at);
        match line.get(at)? {
            b',' => at += 1,
            b'}' => break,
            _ => return None,
        }
    }
    if skip_space(line, at + 1) < line.len() {
        return None;
    }
    Some(&room[..length?])
}

fn skip_space(line: &[u8], at: usize) -> usize {
    at + line[at..].iter().take_while(|b| matches!(b, b' ' | b'\t' | b'\r' | b'\n')).count()
}

/// The place behind `byte`, which must stand at `at`.
fn after(line: &[u8], at: usize, byte: u8) -> Option<usize> {
    (*line.get(at)? == byte).then_some(at + 1)
}

/// Bytes of the value that `rest` begins with.
fn value_length(rest: &[u8]) -> Option<usize> {
    let mut values = serde_json::Deserializer::from_slice(rest).into_iter::<IgnoredAny>();
    values.next()?.ok()?;
    Some(values.byte_offset())
}

/// Unescapes the string whose first byte is at `at`. Returns the place behind its closing quote, and how many bytes it has in `room`.
fn unescape(line: &[u8], mut at: usize, room: &mut [u8]) -> Option<(usize, usize)> {
    let mut to = 0;
    loop {
        // The end of the line is looked at as if more followed.
        let mut last = [0; 3 * WIDE];
        let block = line[at..].first_chunk().unwrap_or_else(|| {
            last[..line.len() - at].copy_from_slice(&line[at..]);
            &last
        });
        // What is plain is copied in steps of `WIDE` bytes, however long it is: the branches that are left are those that the processor
        // foresees.
        let (mut from, mut marks) = (0, marks(block));
        let escape = loop {
            if marks == 0 {
                break None;
            }
            let mark = marks.trailing_zeros() as usize;
            copy(block, from, room, to);
            to += mark - from;
            if block[mark] == b'"' {
                return Some((at + mark + 1, to));
            }
            let byte = SHORT_ESCAPES[block[mark + 1] as usize];
            if byte == 0 {
                break Some(mark + 1);
            }
            room[to] = byte;
            (to, from) = (to + 1, mark + 2);
            // Neither the backslash nor what it escapes.
            marks &= (marks - 1) & !(2 << mark);
        };
        match escape {
            None => {
                copy(block, from, room, to);
                to += WIDE.saturating_sub(from);
                at += from.max(WIDE);
                if at >= line.len() {
                    return None;
                }
            }
            Some(letter) => {
                let (char, bytes) = character(line.get(at + letter..)?.strip_prefix(b"u")?)?;
                to += char.encode_utf8(&mut room[to..]).len();
                at += letter + 1 + bytes;
            }
        }
    }
}

#[inline(always)]
fn copy(block: &[u8; 3 * WIDE], from: usize, room: &mut [u8], to: usize) {
    room[to..to + WIDE].copy_from_slice(&block[from..from + WIDE]);
}

/// The character behind `\u`, and how many bytes it takes there. None for half of one.
fn character(rest: &[u8]) -> Option<(char, usize)> {
    let first = hex(rest)?;
    match char::from_u32(first) {
        Some(char) => Some((char, 4)),
        None => {
            let second = hex(rest[4..].strip_prefix(b"\\u")?)?;
            let is_pair = first < 0xdc00 && (0xdc00..0xe000).contains(&second);
            let code = is_pair.then(|| 0x10000 + ((first - 0xd800) << 10) + (second - 0xdc00))?;
            Some((char::from_u32(code)?, 10))
        }
    }
}

/// Four hexadecimal digits.
fn hex(rest: &[u8]) -> Option<u32> {
    rest.get(..4)?.iter().try_fold(0, |number, byte| Some(number << 4 | char::from(*byte).to_digit(16)?))
}

/// Bit i: byte i is a quote or a backslash; of the first `WIDE`.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn marks(block: &[u8; 3 * WIDE]) -> u64 {
    use std::arch::x86_64::{__m128i, _mm_cmpeq_epi8, _mm_loadu_si128, _mm_movemask_epi8, _mm_or_si128, _mm_set1_epi8};
    (0..4).fold(0, |marks, part| {
        // SAFETY: every x86-64 has SSE2, and a part has 16 bytes.
        let found = unsafe {
            let bytes = _mm_loadu_si128(block[16 * part..][..16].as_ptr().cast::<__m128i>());
            let equal = |byte: u8| _mm_cmpeq_epi8(bytes, _mm_set1_epi8(byte as i8));
            _mm_movemask_epi8(_mm_or_si128(equal(b'"'), equal(b'\\')))
        };
        marks | (found as u64) << (16 * part)
    })
}

/// Bit i: byte i is a quote or a backslash; of the first `WIDE`.
#[cfg(not(target_arch = "x86_64"))]
fn marks(block: &[u8; 3 * WIDE]) -> u64 {
    block[..WIDE].iter().rev().fold(0, |marks, byte| marks << 1 | u64::from(matches!(byte, b'"' | b'\\')))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::engine::fuzz::{Random, document};
    use crate::text::record::json_field;

    fn found(line: &[u8]) -> Option<String> {
        let mut room = b"what the line before has left".to_vec();
        text_of(line, b"text", &mut room).map(|text| String::from_utf8(text.to_vec()).unwrap())
    }

    #[test]
    fn ordinary_lines_are_taken_and_others_left() {
        let long = "abc\"\\\n\u{e9}\u{1f600}".repeat(50);
        for (text, others) in
            [("", ""), ("a", "\"id\": [1, {\"text\": null}], "), (&long, "\"text\":\"not the last\" ,\t\"\":-1.5e3,")]
        {
            let escaped: String = text.encode_utf16().map(|unit| format!("\\u{unit:04x}")).collect();
            for string in [serde_json::to_string(text).unwrap(), format!("\"{escaped}\"")] {
                for line in
                    [format!("{{{others}\"text\":{string}}}"), format!(" {{ {others}\"text\" : {string} ,\"z\":\"\"}} \r")]
                {
                    assert_eq!(found(line.as_bytes()).as_deref(), Some(text), "{line}");
                }
            }
        }
        for line in [
            "",
            "{",
            "{}",
            "[]",
            "null",
            "{\"text\":1}",
            "{\"text\":\"a",
            "{\"text\":\"a\"",
            "{\"text\":\"a\"}}",
            "{\"text\":\"a\",}",
            "{\"other\":\"a\"}",
            "{\"text\":\"\\ud800\"}",
            "{\"text\":\"\\ud800\\ud800\"}",
            "{\"text\":\"\\x\"}",
            "{\"text\":\"\\",
            "{\"text\":\"\\u12g4\"}",
            "{\"a\":01,\"text\":\"a\"}",
            "{\"a\":[1,\"text\":\"a\"}",
            "{\"text\" \"a\"}",
            "{\"a\":1 \"text\":\"a\"}",
        ] {
            assert_eq!(found(line.as_bytes()), None, "{line}");
        }
    }

    /// Lines that were changed at random: whatever is taken is what `serde_json` reads.
    #[test]
    fn what_is_taken_is_what_serde_json_reads() {
        let mut random = Random(5);
        let mut taken = 0;
        for _ in 0..20_000 {
            let text = document(&mut random, &[]);
            let value = serde_json::json!({ "n": [1, -2.5e-3, { "text": null }], "text": text, "url": "http://x/\u{7}" });
            let mut line = serde_json::to_vec(&value).unwrap();
            assert_eq!(found(&line).as_deref(), Some(text.as_str()));
            for _ in 0..random.below(3) {
                let (at, marks) = (random.below(line.len()), b"\"\\{}[],:u0dtn \x01");
                match random.below(3) {
                    0 => line[at] = marks[random.below(marks.len())],
                    1 => line.insert(at, marks[random.below(marks.len())]),
                    _ => drop(line.remove(at)),
                }
            }
            let mut room = Vec::new();
            if let Some(text) = text_of(&line, b"text", &mut room) {
                taken += 1;
                let by_serde = json_field(&line, "text", &[]).map(|(text, _)| text);
                assert_eq!(by_serde.as_deref(), Ok(text), "{}", String::from_utf8_lossy(&line));
            }
        }
        assert!(taken > 10_000, "{taken}");
    }
}
