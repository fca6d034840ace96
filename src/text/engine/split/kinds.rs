//! The bytes of a block by what the regular expressions tell apart.

use super::super::padded::Padded;
use super::super::simd::Wide;
use super::super::unicode::{Classes, LETTER, LOWER, MARK, NUMBER, SPACE, UPPER, decode};

/// Bit i tells of byte i of the block; all bytes of a character have its kind. Bytes from `known` on have no kind: the text
/// ends there, or what stands there is left to the slow way.
#[derive(Default)]
pub struct Kinds {
    pub letter: u64,
    /// ASCII letters A-Z, and with [`Detail::Case`] all that may not stand in the small part of a word.
    pub upper: u64,
    /// Letters that may stand in either part of a word ([`Detail::Case`] only).
    pub both: u64,
    /// ASCII digits.
    pub number: u64,
    pub space: u64,
    /// Tab, vertical tab, form feed.
    pub blank: u64,
    pub newline: u64,
    pub apostrophe: u64,
    pub slash: u64,
    /// ASCII control characters that are no white space.
    pub control: u64,
    /// None of the above classes of characters.
    pub other: u64,
    /// First bytes of `other` characters that are 2, 3, 4 bytes long.
    pub other_long: [u64; 3],
    pub known: u32,
}

/// What becomes of characters that are not ASCII.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Detail {
    /// The block ends at the first.
    AsciiOnly,
    /// Letters and others are told apart; the block ends at the first number or space.
    Plain,
    /// So, and letters by the part of a word they may stand in; the block ends at a mark too.
    Case,
}

/// Bits below `count` (64 and more: all).
#[inline(always)]
pub fn below(count: u32) -> u64 {
    if count >= 64 { !0 } else { (1 << count) - 1 }
}

impl Kinds {
    /// Of the block at `at`.
    #[inline(always)]
    pub fn of<W: Wide>(classes: &Classes, text: Padded<'_>, at: usize, detail: Detail) -> Self {
        let masks = W::ascii(text.block(at));
        let left = text.len() - at;
        let mut kinds = Self {
            letter: masks.letter,
            upper: masks.upper,
            number: masks.digit,
            space: masks.space,
            blank: masks.blank,
            newline: masks.newline,
            apostrophe: masks.apostrophe,
            slash: masks.slash,
            control: masks.control,
            known: left.min(64) as u32,
            ..Self::default()
        };
        let high = masks.high & below(kinds.known);
        if high != 0 {
            if detail == Detail::AsciiOnly {
                kinds.known = high.trailing_zeros();
            } else {
                kinds.add_high(classes, text, at, high, detail == Detail::Case);
            }
        }
        kinds.forget_unknown();
        kinds
    }

    #[inline(always)]
    fn forget_unknown(&mut self) {
        let known = below(self.known);
        self.letter &= known;
        self.number &= known;
        self.space &= known;
        self.blank &= known;
        self.newline &= known;
        self.apostrophe &= known;
        self.control &= known;
        self.other = known & !(self.letter | self.number | self.space | self.blank | self.newline);
    }

    /// Leaves what stands at the first bit of `stops`, and all behind it, to the slow way.
    #[inline(always)]
    pub fn end_at(&mut self, stops: u64) {
        if stops != 0 {
            self.known = stops.trailing_zeros();
            self.forget_unknown();
        }
    }

    fn add_high(&mut self, classes: &Classes, text: Padded<'_>, at: usize, mut high: u64, case: bool) {
        while high != 0 {
            let i = high.trailing_zeros();
            let (code, length) = decode(text.bytes(), at + i as usize);
            let length = length as u32;
            let class = classes.of(code);
            if i + length > self.known || class & (NUMBER | SPACE) != 0 || (case && class & MARK != 0) {
                self.known = i;
                return;
            }
            let bytes = below(length) << i;
            if class & LETTER != 0 {
                self.letter |= bytes;
                if class & LOWER == 0 {
                    self.upper |= bytes;
                } else if class & UPPER != 0 {
                    self.both |= bytes;
                }
            } else {
                self.other_long[length as usize - 2] |= 1 << i;
            }
            high &= !bytes;
        }
    }

    /// Where the characters after those `other` characters that start at a bit of `starts` start.
    #[inline(always)]
    pub fn after_other(&self, starts: u64) -> u64 {
        let [two, three, four] = self.other_long;
        let long = starts & (two | three | four);
        ((starts & !long) << 1) | (starts & two) << 2 | (starts & three) << 3 | (starts & four) << 4
    }

    /// Boundaries (bits) that do not depend on anything after the known bytes, given all spaces of the block: the space at the
    /// end of what is known may go on.
    #[inline(always)]
    pub fn certain(&self, spaces: u64) -> u64 {
        let settled = below(self.known) & !spaces;
        if settled == 0 {
            return 0;
        }
        let tail = 64 - settled.leading_zeros();
        below(tail + 1) & below(self.known) & !1
    }
}

/// Whole runs of `of` that start at the bits `starts`, which are first bits of runs.
#[inline(always)]
pub fn runs_from(starts: u64, of: u64) -> u64 {
    of & !of.wrapping_add(starts)
}
