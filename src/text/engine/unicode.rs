//! Classes of code points, as the regular expressions of tokenizers name them.
//!
//! The tables are those of `regex-syntax`, whose Unicode version is the same as the one that `tokenizers` matches with (a test
//! compares every code point).

use std::sync::LazyLock;

use regex_syntax::hir::{Class, HirKind};

/// `\p{L}`
pub const LETTER: u8 = 1;
/// `\p{N}`
pub const NUMBER: u8 = 2;
/// `\s`
pub const SPACE: u8 = 4;
/// `[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]`: what o200k lets stand in the capital part of a word.
pub const UPPER: u8 = 8;
/// `[\p{Ll}\p{Lm}\p{Lo}\p{M}]`: what o200k lets stand in the small part of a word.
pub const LOWER: u8 = 16;
/// `[\p{P}\p{S}]`
pub const PUNCTUATION: u8 = 32;
/// `\p{M}`
pub const MARK: u8 = 64;
/// `[一-龥぀-ゟ゠-ヿ]`: what DeepSeek sets apart.
pub const KANA_OR_HAN: u8 = 128;

const PATTERNS: [(u8, &str); 8] = [
    (LETTER, r"\p{L}"),
    (NUMBER, r"\p{N}"),
    (SPACE, r"\s"),
    (UPPER, r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"),
    (LOWER, r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"),
    (PUNCTUATION, r"[\p{P}\p{S}]"),
    (MARK, r"\p{M}"),
    (KANA_OR_HAN, r"[\u{4e00}-\u{9fa5}\u{3040}-\u{309f}\u{30a0}-\u{30ff}]"),
];

const PAGE: usize = 256;

/// Class bits of every code point, in pages of 256 of which equal ones are kept once.
pub struct Classes {
    page: Vec<u16>,
    bits: Vec<[u8; PAGE]>,
}

static CLASSES: LazyLock<Classes> = LazyLock::new(Classes::build);

impl Classes {
    /// The one table of this process.
    pub fn get() -> &'static Self {
        &CLASSES
    }

    fn build() -> Self {
        let mut flat = vec![0u8; char::MAX as usize + 1];
        for (bit, pattern) in PATTERNS {
            let parsed = regex_syntax::parse(pattern).expect("the patterns above are valid");
            let HirKind::Class(Class::Unicode(class)) = parsed.kind() else { unreachable!("the patterns above are classes") };
            for range in class.iter() {
                for entry in &mut flat[range.start() as usize..=range.end() as usize] {
                    *entry |= bit;
                }
            }
        }
        let mut classes = Self { page: Vec::new(), bits: Vec::new() };
        for chunk in flat.as_chunks::<PAGE>().0 {
            let known = classes.bits.iter().position(|b| b == chunk);
            let index = known.unwrap_or_else(|| {
                classes.bits.push(*chunk);
                classes.bits.len() - 1
            });
            classes.page.push(index as u16);
        }
        classes
    }

    /// Class bits of a code point (0 for what is none).
    #[inline(always)]
    pub fn of(&self, code: u32) -> u8 {
        match self.page.get((code >> 8) as usize) {
            // SAFETY: `page` holds indices of `bits` alone.
            Some(page) => unsafe { self.bits.get_unchecked(*page as usize)[(code & 255) as usize] },
            None => 0,
        }
    }
}

/// The code point that starts at `at`, and its length in bytes. `bytes` is UTF-8 with a character starting there.
#[inline(always)]
pub fn decode(bytes: &[u8], at: usize) -> (u32, usize) {
    let next = |i: usize| (bytes[at + i] & 0x3f) as u32;
    match bytes[at] as u32 {
        a @ 0..0x80 => (a, 1),
        a @ 0x80..0xe0 => ((a & 0x1f) << 6 | next(1), 2),
        a @ 0xe0..0xf0 => ((a & 0x0f) << 12 | next(1) << 6 | next(2), 3),
        a => ((a & 0x07) << 18 | next(1) << 12 | next(2) << 6 | next(3), 4),
    }
}

/// Bytes of a character, by its first byte.
#[inline(always)]
pub fn char_len(first: u8) -> usize {
    match first {
        0..0x80 => 1,
        0x80..0xe0 => 2,
        0xe0..0xf0 => 3,
        _ => 4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
    use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer, SplitDelimiterBehavior};

    /// The regular expressions of `tokenizers` are the reference, over every code point there is.
    #[test]
    fn classes_are_those_of_tokenizers() {
        let text: String = (0..=char::MAX as u32).filter_map(char::from_u32).collect();
        for (bit, pattern) in PATTERNS {
            // Oniguruma writes code points as \x{...}.
            let pattern = SplitPattern::Regex(format!("(?:{})+", pattern.replace(r"\u{", r"\x{")));
            let split = Split::new(pattern, SplitDelimiterBehavior::Removed, true).unwrap();
            let mut cut = PreTokenizedString::from(text.as_str());
            split.pre_tokenize(&mut cut).unwrap();
            let mut expected = vec![false; char::MAX as usize + 1];
            for (piece, _, _) in cut.get_splits(OffsetReferential::Original, OffsetType::None) {
                piece.chars().for_each(|c| expected[c as usize] = true);
            }
            assert!(expected.contains(&true));
            for c in text.chars() {
                assert_eq!(
                    Classes::get().of(c as u32) & bit != 0,
                    expected[c as usize],
                    "{pattern:?} {c:?}",
                    pattern = split.pattern
                );
            }
        }
    }

    #[test]
    fn decoding_agrees_with_the_standard_library() {
        for c in (0..=char::MAX as u32).filter_map(char::from_u32) {
            let mut bytes = [0; 4];
            let length = c.encode_utf8(&mut bytes).len();
            assert_eq!(decode(&bytes, 0), (c as u32, length));
            assert_eq!(char_len(bytes[0]), length);
        }
    }
}
