//! Normalization form C for the few places of a text that need it.
//!
//! A character that is its own normal form, combines with nothing before it and has no combining class starts a part that can
//! be normalized by itself. Parts of such characters alone are left as they are.

use std::sync::LazyLock;

use unicode_normalization_alignments::char::canonical_combining_class;
use unicode_normalization_alignments::{IsNormalized, UnicodeNormalization, is_nfc_quick};

use super::padded::Buffer;

/// Bit i of word w: code point 64 w + i starts such a part.
static STARTS: LazyLock<Vec<u64>> = LazyLock::new(|| {
    let mut bits = vec![0u64; (char::MAX as usize + 1) / 64];
    for c in (0..=char::MAX as u32).filter_map(char::from_u32) {
        if canonical_combining_class(c) == 0 && is_nfc_quick(std::iter::once(c)) == IsNormalized::Yes {
            bits[c as usize / 64] |= 1 << (c as usize % 64);
        }
    }
    bits
});

/// No character below changes or combines with what is before it.
const FIRST: char = '\u{300}';

fn starts(c: char) -> bool {
    c < FIRST || STARTS[c as usize / 64] >> (c as usize % 64) & 1 == 1
}

/// The text may change.
pub fn may_change(text: &str) -> bool {
    // First bytes of characters from U+0300 on are 0xCC and more.
    text.bytes().any(|b| b >= 0xcc) && !text.chars().all(starts)
}

/// The normal form of a text, as `tokenizers` makes it.
pub fn normalize(text: &str, into: &mut Buffer) {
    into.clear();
    let mut copied = 0;
    let mut part_start = 0;
    let mut chars = text.char_indices().peekable();
    let mut encoded = [0; 4];
    while let Some((at, c)) = chars.next() {
        if starts(c) {
            part_start = at;
            continue;
        }
        while chars.next_if(|(_, c)| !starts(*c)).is_some() {}
        let end = chars.peek().map_or(text.len(), |(at, _)| *at);
        into.push(&text[copied..part_start]);
        for (c, _) in text[part_start..end].nfc() {
            into.push(c.encode_utf8(&mut encoded));
        }
        (copied, part_start) = (end, end);
    }
    into.push(&text[copied..]);
    into.finish();
}

/// The normal form of a short text.
pub fn normalized(text: &str) -> String {
    text.nfc().map(|(c, _)| c).collect()
}

#[cfg(test)]
mod tests {
    use super::super::padded::Buffer;
    use super::*;

    #[test]
    fn parts_normalize_to_what_the_whole_does() {
        let letters: Vec<char> = "aé e\u{301}\u{327}\u{300}ㅎ\u{1112}\u{1161}\u{11ab}한가\u{11a8}\u{9c7}\u{9be}\u{212b}\u{f73}\u{f71}\u{344}中Ω\u{2126}\u{37e}\u{1d15e}".chars().collect();
        let mut state = 1u64;
        let mut changed = 0;
        for _ in 0..20_000 {
            let mut text = String::new();
            for _ in 0..1 + state % 9 {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                text.push(letters[(state >> 33) as usize % letters.len()]);
            }
            let expected: String = text.nfc().map(|(c, _)| c).collect();
            let mut buffer = Buffer::default();
            normalize(&text, &mut buffer);
            let padded = buffer.text();
            assert_eq!(&padded.bytes()[..padded.len()], expected.as_bytes(), "{text:?}");
            if expected != text {
                changed += 1;
                assert!(may_change(&text), "{text:?}");
            }
        }
        assert!(changed > 1000);
    }
}
