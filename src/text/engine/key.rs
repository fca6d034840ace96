//! A short word as a number.

use super::bytemap::mix;

/// Longest word that is its own key.
pub const SHORT: usize = 15;

/// A word of 1 to [`SHORT`] bytes: the bytes with their number on top, as 128 bits. So keys are compared whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Key {
    pub(super) low: u64,
    /// Never 0 in a word's key.
    pub(super) high: u64,
}

/// `MASKS[n]` keeps n bytes of 16.
static MASKS: [[u64; 2]; 16] = {
    let mut masks = [[0; 2]; 16];
    let mut n = 1;
    while n < 16 {
        let low = if n >= 8 { !0 } else { (1 << (8 * n)) - 1 };
        let high = if n > 8 { (1 << (8 * (n - 8))) - 1 } else { 0 };
        masks[n] = [low, high];
        n += 1;
    }
    masks
};

impl Key {
    /// No word's.
    pub const NONE: Self = Self { low: !0, high: !0 };

    /// Of the first `len` of 16 bytes; `len` is 1 to 15.
    #[inline(always)]
    pub fn new(bytes: &[u8; 16], len: usize) -> Self {
        let word = u128::from_le_bytes(*bytes);
        let [low, high] = MASKS[len & 15];
        Self { low: word as u64 & low, high: (word >> 64) as u64 & high | (len as u64) << 56 }
    }

    pub fn of(word: &[u8]) -> Self {
        let mut bytes = [0; 16];
        bytes[..word.len()].copy_from_slice(word);
        Self::new(&bytes, word.len())
    }

    /// The word's bytes, and how many they are.
    pub fn bytes(self) -> ([u8; 16], usize) {
        (((self.high as u128) << 64 | self.low as u128).to_le_bytes(), (self.high >> 56) as usize & SHORT)
    }

    /// The same bytes as a part of a word, where that makes a difference.
    pub fn as_part(self) -> Self {
        Self { high: self.high | 1 << 63, ..self }
    }

    #[inline(always)]
    pub fn hash(self) -> u64 {
        mix(self.low, self.high)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_that_share_a_beginning_or_a_length_are_different() {
        let mut keys = std::collections::HashSet::new();
        for n in 1..=SHORT {
            for last in [0, b'a', 255] {
                let mut word = vec![0; n];
                word[n - 1] = last;
                let key = Key::of(&word);
                assert!(keys.insert((key.low, key.high)));
                assert!(keys.insert((key.as_part().low, key.as_part().high)));
                assert!(key.high != 0 && key != Key::NONE);
            }
        }
    }
}
