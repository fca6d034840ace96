//! What the rules have in common, on the bits of a block: white space, numbers.

use super::kinds::runs_from;

/// The runs of `of` that follow directly on a bit of `before`, where no bit is in both.
#[inline(always)]
pub fn run_after(before: u64, of: u64) -> u64 {
    runs_from(of & before << 1, of)
}

/// First bits of the pieces of `\s*[\r\n]+|\s+(?!\S)|\s+`. Newlines that are `absorbed` belong to the piece before.
///
/// A run of white space is a piece up to its last newline. Of the blanks behind that, all but the last are a piece, and the
/// last is one, or the start of one, as what follows is no white space.
#[inline(always)]
pub fn ends(blanks: u64, newlines: u64, absorbed: u64) -> u64 {
    let newlines_left = newlines & !absorbed;
    let run = blanks | newlines_left;
    let run_starts = run & !(run << 1);
    let last = blanks & !((blanks | newlines) >> 1) & run << 1;
    run_starts | last | after_last_newline(blanks, newlines_left)
}

/// First bits of the runs of blanks between the last newline of a run of white space and what is no white space.
#[inline(always)]
fn after_last_newline(blanks: u64, newlines: u64) -> u64 {
    let mut starts = blanks & newlines << 1;
    let after = blanks.wrapping_add(starts) & !blanks;
    if after & newlines == 0 {
        return starts;
    }
    let mut last = 0;
    while starts != 0 {
        let start = starts & starts.wrapping_neg();
        if blanks.wrapping_add(start) & !blanks & newlines == 0 {
            last |= start;
        }
        starts &= starts - 1;
    }
    last
}

/// First bits of the pieces of `\p{N}{1,DIGITS}`.
#[inline(always)]
pub fn number_starts<const DIGITS: usize>(numbers: u64) -> u64 {
    let mut starts = numbers & !(numbers << 1);
    match DIGITS {
        1 => numbers,
        3 => {
            let three = numbers & numbers << 1 & numbers << 2;
            let mut next = (starts << 3) & three;
            while next != 0 {
                starts |= next;
                next = (next << 3) & three;
            }
            starts
        }
        _ => unreachable!("the rules have pieces of one or three numbers"),
    }
}
