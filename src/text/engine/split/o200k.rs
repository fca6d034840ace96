//! o200k:
//! `[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|`
//! `[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|`
//! `\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+`.

use super::super::padded::Padded;
use super::super::simd::Wide;
use super::super::unicode::{Classes, LETTER, LOWER, NUMBER, SPACE, UPPER};
use super::kinds::{Detail, Kinds, below};
use super::scalar::{Scan, is_newline};
use super::{Rule, white};

#[derive(Clone, Copy)]
pub struct O200k;

/// End of `[upper]*[lower]+` at `at`, as a backtracking matcher finds it: as many of the upper part as leave one for the
/// lower part.
fn small_word(scan: Scan<'_>, at: usize) -> Option<usize> {
    let (mut upper_end, mut after_lower) = (at, None);
    while let Some((class, next)) = scan.char_at(upper_end) {
        if class & UPPER == 0 {
            break;
        }
        upper_end = next;
        if class & LOWER != 0 {
            after_lower = Some(next);
        }
    }
    let end = scan.run(upper_end, |c| c & LOWER != 0);
    // Without a small letter behind them, the upper part gives back as far as its last that may stand in the lower part.
    if end > upper_end { Some(end) } else { after_lower }
}

/// End of `[upper]+[lower]*` at `at`.
fn capital_word(scan: Scan<'_>, at: usize) -> Option<usize> {
    let end = scan.run(at, |c| c & UPPER != 0);
    (end > at).then(|| scan.run(end, |c| c & LOWER != 0))
}

impl Rule for O200k {
    fn next(self, text: Padded<'_>, at: usize) -> usize {
        let scan = Scan::new(text);
        let Some((class, next)) = scan.char_at(at) else { return at };
        let is = |class: u8, bits: u8| class & bits != 0;
        // With the optional character in front where it can be one, else, if that fails, without.
        let prefix = (!is_newline(scan.byte(at)) && !is(class, LETTER | NUMBER)).then_some(next);
        for word in [small_word, capital_word] {
            if let Some(end) = prefix.and_then(|start| word(scan, start)).or_else(|| word(scan, at)) {
                return scan.contraction(end, true).unwrap_or(end);
            }
        }
        if is(class, NUMBER) {
            return scan.numbers(at, 3);
        }
        let other = |class: u8| !is(class, LETTER | NUMBER | SPACE);
        let following = scan.char_at(next).map_or(SPACE, |(class, _)| class);
        if other(class) || (scan.byte(at) == b' ' && other(following)) {
            return scan.run_bytes(scan.run(next, other), |b| is_newline(b) || b == b'/');
        }
        scan.white_space(at, true, |c| is(c, SPACE))
    }

    #[inline(always)]
    fn ends<W: Wide>(self, classes: &Classes, text: Padded<'_>, at: usize) -> u64 {
        let mut kinds = Kinds::of::<W>(classes, text, at, Detail::Case);
        // A capital behind a letter that has no case: which part that letter stands in depends on what follows.
        let unclear = kinds.letter & kinds.upper & kinds.both << 1;
        let mut certain = kinds.certain(kinds.space | kinds.blank | kinds.newline);
        if unclear != 0 {
            let first = unclear.trailing_zeros();
            let run_start = 64 - (!kinds.letter & below(first)).leading_zeros();
            certain &= below(run_start + 1);
        }
        let blanks = kinds.space | kinds.blank;
        let absorbed = flood(kinds.newline & kinds.other << 1, kinds.newline | kinds.slash);
        kinds.other &= !absorbed;
        let white = white::ends(blanks, kinds.newline, absorbed);
        let other_starts = kinds.other & !(kinds.other << 1) & !(kinds.space << 1);
        let joined = blanks << 1 | kinds.after_other(other_starts);
        let capital = kinds.letter & kinds.upper;
        let after_small = capital & (kinds.letter & !kinds.upper) << 1;
        let letter_starts = (kinds.letter & !(kinds.letter << 1) & !joined) | after_small;
        let numbers = white::number_starts::<3>(kinds.number);
        let mut ends = white | other_starts | letter_starts | numbers;
        // An apostrophe behind a letter may belong to the word.
        let mut apostrophes = kinds.apostrophe & kinds.letter << 1;
        while apostrophes != 0 {
            let i = apostrophes.trailing_zeros();
            apostrophes &= apostrophes - 1;
            if i + 3 > kinds.known {
                certain &= below(i);
            } else if let Some(end) = Scan::new(text).contraction(at + i as usize, true) {
                let end = (end - at) as u32;
                // Inside the contraction no piece starts; behind it one does.
                ends &= !(below(end) & !below(i));
                ends |= 1u64.checked_shl(end).unwrap_or(0);
                if end < kinds.known && kinds.apostrophe >> end & 1 == 1 {
                    // `a's's`: the second one is no part of a word.
                    certain &= below(end + 1);
                    break;
                }
            }
        }
        ends & certain
    }
}

/// `starts` and all bits of `of` that a run of `of` joins to them from below.
#[inline(always)]
fn flood(starts: u64, of: u64) -> u64 {
    if starts == 0 {
        return 0;
    }
    let (mut filled, mut open) = (starts, of);
    for shift in [1, 2, 4, 8, 16, 32] {
        filled |= open & filled << shift;
        open &= open << shift;
    }
    filled
}
