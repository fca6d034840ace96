//! `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`,
//! of cl100k and Llama 3; with `\p{N}` for the numbers, of Qwen.

use super::super::padded::Padded;
use super::super::simd::Wide;
use super::super::unicode::{Classes, LETTER, NUMBER, SPACE};
use super::kinds::{Detail, Kinds, below};
use super::scalar::{Scan, is_newline};
use super::{Rule, white};

/// `DIGITS`: how many numbers a piece holds at most.
#[derive(Clone, Copy)]
pub struct Cl100k<const DIGITS: usize>;

impl<const DIGITS: usize> Rule for Cl100k<DIGITS> {
    fn next(self, text: Padded<'_>, at: usize) -> usize {
        let scan = Scan::new(text);
        let Some((class, next)) = scan.char_at(at) else { return at };
        if let Some(end) = scan.contraction(at, true) {
            return end;
        }
        let is = |class: u8, bits: u8| class & bits != 0;
        if is(class, LETTER) {
            return scan.run(next, |c| is(c, LETTER));
        }
        if is(class, NUMBER) {
            return scan.numbers(at, DIGITS);
        }
        let following = scan.char_at(next).map_or(SPACE, |(class, _)| class);
        if !is_newline(scan.byte(at)) && is(following, LETTER) {
            return scan.run(next, |c| is(c, LETTER));
        }
        let other = |class: u8| !is(class, LETTER | NUMBER | SPACE);
        if other(class) || (scan.byte(at) == b' ' && other(following)) {
            return scan.run_bytes(scan.run(next, other), is_newline);
        }
        scan.white_space(at, true, |c| is(c, SPACE))
    }

    #[inline(always)]
    fn ends<W: Wide>(self, classes: &Classes, text: Padded<'_>, at: usize) -> u64 {
        let kinds = Kinds::of::<W>(classes, text, at, Detail::Plain);
        let blanks = kinds.space | kinds.blank;
        let absorbed = white::run_after(kinds.other, kinds.newline);
        let white = white::ends(blanks, kinds.newline, absorbed);
        let other_starts = kinds.other & !(kinds.other << 1) & !(kinds.space << 1);
        let joined = blanks << 1 | kinds.after_other(other_starts);
        let letter_starts = kinds.letter & !(kinds.letter << 1) & !joined;
        let numbers = white::number_starts::<DIGITS>(kinds.number);
        let mut certain = kinds.certain(blanks | kinds.newline);
        let mut ends = white | other_starts | letter_starts | numbers;
        let mut apostrophes = kinds.apostrophe & other_starts & kinds.letter >> 1;
        while apostrophes != 0 {
            let i = apostrophes.trailing_zeros();
            apostrophes &= apostrophes - 1;
            if i + 3 > kinds.known {
                certain &= below(i + 1);
            } else if let Some(end) = Scan::new(text).contraction(at + i as usize, true) {
                ends |= 1u64.checked_shl((end - at) as u32).unwrap_or(0);
            }
        }
        ends & certain
    }
}
