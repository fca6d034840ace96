//! `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`, of GPT-2 and of the byte-level pre-tokenizer.

use super::super::padded::Padded;
use super::super::simd::Wide;
use super::super::unicode::{Classes, LETTER, NUMBER, SPACE};
use super::kinds::{Detail, Kinds, below};
use super::scalar::Scan;
use super::{Rule, white};

#[derive(Clone, Copy)]
pub struct Gpt2;

impl Rule for Gpt2 {
    fn next(self, text: Padded<'_>, at: usize) -> usize {
        let scan = Scan::new(text);
        let Some((mut class, mut next)) = scan.char_at(at) else { return at };
        if let Some(end) = scan.contraction(at, false) {
            return end;
        }
        if scan.byte(at) == b' '
            && let Some((after, end)) = scan.char_at(next)
            && after & SPACE == 0
        {
            (class, next) = (after, end);
        }
        match class & (LETTER | NUMBER | SPACE) {
            SPACE => scan.white_space(at, false, |c| c & SPACE != 0),
            kind => scan.run(next, |c| c & (LETTER | NUMBER | SPACE) == kind),
        }
    }

    #[inline(always)]
    fn ends<W: Wide>(self, classes: &Classes, text: Padded<'_>, at: usize) -> u64 {
        let kinds = Kinds::of::<W>(classes, text, at, Detail::Plain);
        let spaces = kinds.space | kinds.blank | kinds.newline;
        let starts = |of: u64| of & !(of << 1) & !(kinds.space << 1);
        let other_starts = starts(kinds.other);
        let mut ends = white::ends(spaces, 0, 0) | other_starts | starts(kinds.letter) | starts(kinds.number);
        let mut certain = kinds.certain(spaces);
        let mut apostrophes = kinds.apostrophe & other_starts & kinds.letter >> 1;
        while apostrophes != 0 {
            let i = apostrophes.trailing_zeros();
            apostrophes &= apostrophes - 1;
            if i + 3 > kinds.known {
                certain &= below(i + 1);
            } else if let Some(end) = Scan::new(text).contraction(at + i as usize, false) {
                ends &= !(2 << i);
                ends |= 1u64.checked_shl((end - at) as u32).unwrap_or(0);
            }
        }
        ends & certain
    }
}
