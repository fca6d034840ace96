//! DeepSeek V3: three rules one after another, each within the pieces of the one before: `\p{N}{1,3}`; `[一-龥぀-ゟ゠-ヿ]+`; and
//! ``[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|``
//! `\s+(?!\S)|\s+`. What none matches is a piece as it stands between two that are.

use super::super::padded::Padded;
use super::super::simd::Wide;
use super::super::unicode::{Classes, KANA_OR_HAN, LETTER, MARK, NUMBER, PUNCTUATION, SPACE};
use super::kinds::{Detail, Kinds};
use super::scalar::{Scan, is_newline};
use super::{Rule, white};

#[derive(Clone, Copy)]
pub struct DeepSeek;

/// What the first two rules take away from the third.
const BARRIER: u8 = NUMBER | KANA_OR_HAN;

/// End of the third rule's match at `at`, if it has one. The text that it sees ends at a barrier.
fn third(scan: Scan<'_>, at: usize) -> Option<usize> {
    let is = |class: u8, bits: u8| class & bits != 0;
    let inside = |class: u8, bits: u8| is(class, bits) && !is(class, BARRIER);
    let (class, next) = scan.char_at(at).filter(|(class, _)| !is(*class, BARRIER))?;
    let byte = scan.byte(at);
    if byte.is_ascii_punctuation() && scan.byte(next).is_ascii_alphabetic() {
        return Some(scan.run_bytes(next, |b| b.is_ascii_alphabetic()));
    }
    let word = |from: usize| {
        let end = scan.run(from, |c| inside(c, LETTER | MARK));
        (end > from).then_some(end)
    };
    let prefix = !is_newline(byte) && !is(class, LETTER | PUNCTUATION);
    if let Some(end) = prefix.then(|| word(next)).flatten().or_else(|| word(at)) {
        return Some(end);
    }
    let following = scan.char_at(next).map_or(0, |(class, _)| class);
    if is(class, PUNCTUATION) || (byte == b' ' && inside(following, PUNCTUATION)) {
        return Some(scan.run_bytes(scan.run(next, |c| inside(c, PUNCTUATION)), is_newline));
    }
    is(class, SPACE).then(|| {
        let end = scan.run(at, |c| inside(c, SPACE));
        // A barrier ends the text, so that all of the white space before it is one piece.
        Scan::new(scan.text.until(if scan.char_at(end).is_some_and(|(c, _)| is(c, BARRIER)) { end } else { scan.text.len() }))
            .white_space(at, true, |c| inside(c, SPACE))
    })
}

impl Rule for DeepSeek {
    fn next(self, text: Padded<'_>, at: usize) -> usize {
        let scan = Scan::new(text);
        let Some((class, _)) = scan.char_at(at) else { return at };
        if class & NUMBER != 0 {
            return scan.numbers(at, 3);
        }
        if class & KANA_OR_HAN != 0 {
            return scan.run(at, |c| c & KANA_OR_HAN != 0);
        }
        if let Some(end) = third(scan, at) {
            return end;
        }
        // Unmatched up to where something matches.
        let mut end = at;
        while let Some((class, next)) = scan.char_at(end) {
            if class & BARRIER != 0 || (end > at && third(scan, end).is_some()) {
                break;
            }
            end = next;
        }
        end
    }

    #[inline(always)]
    fn ends<W: Wide>(self, classes: &Classes, text: Padded<'_>, at: usize) -> u64 {
        let mut kinds = Kinds::of::<W>(classes, text, at, Detail::AsciiOnly);
        // Control characters are neither punctuation nor anything else that the third rule knows.
        kinds.end_at(kinds.control);
        let blanks = kinds.space | kinds.blank;
        let absorbed = white::run_after(kinds.other, kinds.newline);
        let before_number = kinds.number >> 1;
        let white = white::ends(blanks, kinds.newline, absorbed) & !(blanks & before_number & blanks << 1);
        kinds.other &= !absorbed;
        let other_starts = kinds.other & !(kinds.other << 1) & !(kinds.space << 1);
        let joined = blanks << 1 | other_starts << 1;
        let letter_starts = kinds.letter & !(kinds.letter << 1) & !joined;
        let numbers = white::number_starts::<3>(kinds.number);
        (white | other_starts | letter_starts | numbers) & kinds.certain(blanks | kinds.newline)
    }
}
