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

    /// Where `byte` stands.
    fn equal(block: &[u8; 64], byte: u8) -> u64;

    /// Where bytes of `set` stand.
    fn within(block: &[u8; 64], set: &ByteSet) -> u64;
}

/// A set of bytes, so that vectors can look 32 of them up at once.
pub struct ByteSet {
    /// For the low half of a byte: which high halves go with it, those below 8 and those from 8 on.
    low: [[u8; 16]; 2],
    all: [bool; 256],
}

impl ByteSet {
    pub fn new(bytes: &[u8]) -> Self {
        let mut set = Self { low: [[0; 16]; 2], all: [false; 256] };
        for byte in bytes {
            set.low[(byte >> 7) as usize][(byte & 15) as usize] |= 1 << (byte >> 4 & 7);
            set.all[*byte as usize] = true;
        }
        set
    }
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

    fn equal(block: &[u8; 64], byte: u8) -> u64 {
        block.iter().enumerate().fold(0, |mask, (i, b)| mask | ((*b == byte) as u64) << i)
    }

    fn within(block: &[u8; 64], set: &ByteSet) -> u64 {
        block.iter().enumerate().fold(0, |mask, (i, b)| mask | (set.all[*b as usize] as u64) << i)
    }
}

#[cfg(target_arch = "x86_64")]
pub use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{AsciiMasks, ByteSet, Wide};

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

        #[inline(always)]
        fn equal(block: &[u8; 64], byte: u8) -> u64 {
            // SAFETY: as above.
            unsafe { half_equal(block.as_ptr(), byte) | half_equal(block[32..].as_ptr(), byte) << 32 }
        }

        #[inline(always)]
        fn within(block: &[u8; 64], set: &ByteSet) -> u64 {
            // SAFETY: as above.
            unsafe { half_within(block.as_ptr(), set) | half_within(block[32..].as_ptr(), set) << 32 }
        }
    }

    /// Where `byte` stands among 32 bytes.
    ///
    /// # Safety
    /// 32 bytes can be read at `from`, and the machine has AVX2.
    #[inline(always)]
    unsafe fn half_equal(from: *const u8, byte: u8) -> u64 {
        // SAFETY: what this function asks for.
        unsafe {
            let equal = _mm256_cmpeq_epi8(_mm256_loadu_si256(from.cast()), _mm256_set1_epi8(byte as i8));
            _mm256_movemask_epi8(equal) as u32 as u64
        }
    }

    /// The bit that stands for the high half of a byte.
    static BIT_OF_HIGH: [u8; 16] = [1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128];

    /// Where bytes of `set` stand among 32 bytes.
    ///
    /// # Safety
    /// 32 bytes can be read at `from`, and the machine has AVX2.
    #[inline(always)]
    unsafe fn half_within(from: *const u8, set: &ByteSet) -> u64 {
        // SAFETY: what this function asks for; tables have 16 bytes.
        unsafe {
            let below = _mm256_broadcastsi128_si256(_mm_loadu_si128(set.low[0].as_ptr().cast()));
            let above = _mm256_broadcastsi128_si256(_mm_loadu_si128(set.low[1].as_ptr().cast()));
            let bit_of_high = _mm256_broadcastsi128_si256(_mm_loadu_si128(BIT_OF_HIGH.as_ptr().cast()));
            let v = _mm256_loadu_si256(from.cast());
            // A table gives 0 for bytes from 128 on: so each of the two answers for its half.
            let flipped = _mm256_xor_si256(v, _mm256_set1_epi8(-128));
            let known = _mm256_or_si256(_mm256_shuffle_epi8(below, v), _mm256_shuffle_epi8(above, flipped));
            let high = _mm256_and_si256(_mm256_srli_epi16::<4>(v), _mm256_set1_epi8(15));
            let hit = _mm256_and_si256(known, _mm256_shuffle_epi8(bit_of_high, high));
            !_mm256_movemask_epi8(_mm256_cmpeq_epi8(hit, _mm256_setzero_si256())) as u32 as u64
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

        #[inline(always)]
        fn equal(block: &[u8; 64], byte: u8) -> u64 {
            // SAFETY: as above.
            unsafe { _mm512_cmpeq_epi8_mask(_mm512_loadu_si512(block.as_ptr().cast()), _mm512_set1_epi8(byte as i8)) }
        }

        #[inline(always)]
        fn within(block: &[u8; 64], set: &ByteSet) -> u64 {
            // Two halves cost little, and what has AVX-512 has AVX2.
            Avx2::within(block, set)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_sets<W: Wide>() {
        let lists: [&[u8]; 5] = [b"\n\t<[\xe2", b"", &[0, 15, 16, 127, 128, 143, 255], b"az", &[0x7f, 0x80]];
        for list in lists {
            let set = ByteSet::new(list);
            for first in 0..=255u8 {
                let block: [u8; 64] = std::array::from_fn(|i| first.wrapping_add((i * 5) as u8));
                let (within, equal) = (W::within(&block, &set), W::equal(&block, first));
                for (i, byte) in block.iter().enumerate() {
                    assert_eq!(within >> i & 1 == 1, list.contains(byte), "{byte}");
                    assert_eq!(equal >> i & 1 == 1, *byte == first, "{byte}");
                }
            }
        }
    }

    /// Every byte at every place, against definitions spelt out byte by byte.
    fn check<W: Wide>() {
        check_sets::<W>();
        check_masks(W::ascii);
    }

    fn check_masks(ascii: impl Fn(&[u8; 64]) -> AsciiMasks) {
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
                Level::Portable => check::<Portable>(),
                #[cfg(target_arch = "x86_64")]
                Level::Avx2 => check::<Avx2>(),
                #[cfg(target_arch = "x86_64")]
                Level::Avx512 => check::<Avx512>(),
            }
        }
    }
}
