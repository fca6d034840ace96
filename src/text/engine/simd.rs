//! What the 64 bytes of a block are, one bit a byte, by the widest vectors that the machine has.

/// Which vector instructions to use; found once per engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Level {
    /// The best that this machine runs.
    pub fn detect() -> Self {
        Self::usable().pop().unwrap_or(Self::Portable)
    }

    /// All that this machine runs, best last.
    pub fn usable() -> Vec<Self> {
        let mut levels = vec![Self::Portable];
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("bmi1")
            && is_x86_feature_detected!("bmi2")
            && is_x86_feature_detected!("lzcnt")
            && is_x86_feature_detected!("popcnt")
        {
            levels.push(Self::Avx2);
            if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512vl")
            {
                levels.push(Self::Avx512);
            }
        }
        levels
    }
}

/// Asks for the memory at an address, which need not be one.
#[inline(always)]
pub fn prefetch<T>(at: *const T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch reads nothing, whatever the address; every x86-64 has it.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// Bit i tells of byte i.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AsciiMasks {
    /// `A-Za-z`
    pub letter: u64,
    /// `A-Z`
    pub upper: u64,
    /// `0-9`
    pub digit: u64,
    /// U+0020
    pub space: u64,
    /// Tab, vertical tab, form feed.
    pub blank: u64,
    /// LF and CR.
    pub newline: u64,
    /// U+0027
    pub apostrophe: u64,
    /// `/`
    pub slash: u64,
    /// U+0000 to U+0008, U+000E to U+001F and U+007F.
    pub control: u64,
    /// Bytes of characters that are not ASCII.
    pub high: u64,
}

/// A way to look at 64 bytes at once. An implementation for vectors must only run where the machine has them: its methods are
/// inlined into functions compiled for those vectors, which are called after [`Level::detect`] found them.
pub trait Wide: Copy {
    fn ascii(block: &[u8; 64]) -> AsciiMasks;
}

/// For every machine.
#[derive(Clone, Copy)]
pub struct Portable;

const LETTER: u16 = 1;
const UPPER: u16 = 2;
const DIGIT: u16 = 4;
const SPACE: u16 = 8;
const BLANK: u16 = 16;
const NEWLINE: u16 = 32;
const APOSTROPHE: u16 = 64;
const SLASH: u16 = 128;
const HIGH: u16 = 256;
const CONTROL: u16 = 512;

static BITS: [u16; 256] = {
    let mut table = [0; 256];
    let mut i = 0;
    while i < 256 {
        table[i] = match i as u8 {
            b'a'..=b'z' => LETTER,
            b'A'..=b'Z' => LETTER | UPPER,
            b'0'..=b'9' => DIGIT,
            b' ' => SPACE,
            b'\t' | 11 | 12 => BLANK,
            b'\n' | b'\r' => NEWLINE,
            b'\'' => APOSTROPHE,
            b'/' => SLASH,
            0..=8 | 14..=31 | 127 => CONTROL,
            128.. => HIGH,
            _ => 0,
        };
        i += 1;
    }
    table
};

impl Wide for Portable {
    #[inline(always)]
    fn ascii(block: &[u8; 64]) -> AsciiMasks {
        let mut m = AsciiMasks::default();
        for (i, byte) in block.iter().enumerate() {
            let bits = BITS[*byte as usize];
            let at = |bit: u16| ((bits & bit != 0) as u64) << i;
            m.letter |= at(LETTER);
            m.upper |= at(UPPER);
            m.digit |= at(DIGIT);
            m.space |= at(SPACE);
            m.blank |= at(BLANK);
            m.newline |= at(NEWLINE);
            m.apostrophe |= at(APOSTROPHE);
            m.slash |= at(SLASH);
            m.control |= at(CONTROL);
            m.high |= at(HIGH);
        }
        m
    }
}

#[cfg(target_arch = "x86_64")]
pub use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{AsciiMasks, Wide};

    #[derive(Clone, Copy)]
    pub struct Avx2;

    #[derive(Clone, Copy)]
    pub struct Avx512;

    impl Wide for Avx2 {
        #[inline(always)]
        fn ascii(block: &[u8; 64]) -> AsciiMasks {
            // SAFETY: the machine has AVX2, as `Wide` asks.
            let halves = unsafe { [half(block.as_ptr()), half(block[32..].as_ptr())] };
            let join = |of: fn(&[u32; 10]) -> u32| of(&halves[0]) as u64 | (of(&halves[1]) as u64) << 32;
            AsciiMasks {
                letter: join(|h| h[0]),
                upper: join(|h| h[1]),
                digit: join(|h| h[2]),
                space: join(|h| h[3]),
                blank: join(|h| h[4]),
                newline: join(|h| h[5]),
                apostrophe: join(|h| h[6]),
                slash: join(|h| h[7]),
                control: join(|h| h[8]),
                high: join(|h| h[9]),
            }
        }
    }

    /// The masks of 32 bytes, in the order of the fields of [`AsciiMasks`].
    ///
    /// # Safety
    /// 32 bytes can be read at `from`, and the machine has AVX2.
    #[inline(always)]
    unsafe fn half(from: *const u8) -> [u32; 10] {
        // SAFETY: what this function asks for.
        unsafe {
            let v = _mm256_loadu_si256(from.cast());
            let is = |byte: u8| _mm256_cmpeq_epi8(v, _mm256_set1_epi8(byte as i8));
            let within = |v: __m256i, first: u8, count: u8| {
                let above = _mm256_sub_epi8(v, _mm256_set1_epi8(first as i8));
                _mm256_cmpeq_epi8(_mm256_min_epu8(above, _mm256_set1_epi8(count as i8 - 1)), above)
            };
            let mask = |v: __m256i| _mm256_movemask_epi8(v) as u32;
            let letter = mask(within(_mm256_or_si256(v, _mm256_set1_epi8(0x20)), b'a', 26));
            let newline = mask(_mm256_or_si256(is(b'\n'), is(b'\r')));
            let white = mask(within(v, 9, 5));
            [
                letter,
                mask(within(v, b'A', 26)),
                mask(within(v, b'0', 10)),
                mask(is(b' ')),
                white & !newline,
                newline,
                mask(is(b'\'')),
                mask(is(b'/')),
                mask(_mm256_or_si256(within(v, 0, 32), is(127))) & !white,
                mask(v),
            ]
        }
    }

    impl Wide for Avx512 {
        #[inline(always)]
        fn ascii(block: &[u8; 64]) -> AsciiMasks {
            // SAFETY: the machine has AVX-512 F and BW, as `Wide` asks; 64 bytes can be read at `block`.
            unsafe {
                let v = _mm512_loadu_si512(block.as_ptr().cast());
                let is = |byte: u8| _mm512_cmpeq_epi8_mask(v, _mm512_set1_epi8(byte as i8));
                let within = |v: __m512i, first: u8, count: u8| {
                    _mm512_cmplt_epu8_mask(_mm512_sub_epi8(v, _mm512_set1_epi8(first as i8)), _mm512_set1_epi8(count as i8))
                };
                let newline = is(b'\n') | is(b'\r');
                AsciiMasks {
                    letter: within(_mm512_or_si512(v, _mm512_set1_epi8(0x20)), b'a', 26),
                    upper: within(v, b'A', 26),
                    digit: within(v, b'0', 10),
                    space: is(b' '),
                    blank: within(v, 9, 5) & !newline,
                    newline,
                    apostrophe: is(b'\''),
                    slash: is(b'/'),
                    control: (within(v, 0, 32) | is(127)) & !within(v, 9, 5),
                    high: _mm512_movepi8_mask(v),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every byte at every place, against definitions spelt out byte by byte.
    fn check(ascii: impl Fn(&[u8; 64]) -> AsciiMasks) {
        let mut block = [0u8; 64];
        for round in 0..256usize {
            for (i, byte) in block.iter_mut().enumerate() {
                *byte = (round + i * 7) as u8;
            }
            let masks = ascii(&block);
            for (i, byte) in block.iter().enumerate() {
                let bit = |mask: u64| mask >> i & 1 == 1;
                assert_eq!(bit(masks.letter), byte.is_ascii_alphabetic(), "{byte}");
                assert_eq!(bit(masks.upper), byte.is_ascii_uppercase(), "{byte}");
                assert_eq!(bit(masks.digit), byte.is_ascii_digit(), "{byte}");
                assert_eq!(bit(masks.space), *byte == b' ', "{byte}");
                assert_eq!(bit(masks.blank), [9, 11, 12].contains(byte), "{byte}");
                assert_eq!(bit(masks.newline), [10, 13].contains(byte), "{byte}");
                assert_eq!(bit(masks.apostrophe), *byte == b'\'', "{byte}");
                assert_eq!(bit(masks.slash), *byte == b'/', "{byte}");
                assert_eq!(bit(masks.control), byte.is_ascii_control() && !(9..14).contains(byte), "{byte}");
                assert_eq!(bit(masks.high), *byte >= 128, "{byte}");
            }
        }
    }

    #[test]
    fn masks_are_right_at_every_level_this_machine_has() {
        for level in Level::usable() {
            match level {
                Level::Portable => check(Portable::ascii),
                #[cfg(target_arch = "x86_64")]
                Level::Avx2 => check(Avx2::ascii),
                #[cfg(target_arch = "x86_64")]
                Level::Avx512 => check(Avx512::ascii),
            }
        }
    }
}
