//! Steps of the slow, exact way: one character after another.

use super::super::padded::Padded;
use super::super::unicode::{Classes, NUMBER, decode};

/// A text and the classes of its characters.
#[derive(Clone, Copy)]
pub struct Scan<'a> {
    pub text: Padded<'a>,
    classes: &'static Classes,
}

impl<'a> Scan<'a> {
    pub fn new(text: Padded<'a>) -> Self {
        Self { text, classes: Classes::get() }
    }

    /// Class bits of the character at `at` and where the next one starts; nothing at the end.
    #[inline(always)]
    pub fn char_at(self, at: usize) -> Option<(u8, usize)> {
        if at >= self.text.len() {
            return None;
        }
        let (code, length) = decode(self.text.bytes(), at);
        Some((self.classes.of(code), at + length))
    }

    /// The byte at `at`, 0 past the end.
    #[inline(always)]
    pub fn byte(self, at: usize) -> u8 {
        if at < self.text.len() { self.text.bytes()[at] } else { 0 }
    }

    /// End of the run of characters from `at` whose class bits satisfy `fits`.
    #[inline(always)]
    pub fn run(self, mut at: usize, fits: impl Fn(u8) -> bool) -> usize {
        while let Some((class, next)) = self.char_at(at) {
            if !fits(class) {
                break;
            }
            at = next;
        }
        at
    }

    /// End of the run of bytes from `at` that satisfy `fits` (ASCII only).
    #[inline(always)]
    pub fn run_bytes(self, mut at: usize, fits: impl Fn(u8) -> bool) -> usize {
        while at < self.text.len() && fits(self.text.bytes()[at]) {
            at += 1;
        }
        at
    }

    /// End of at most `count` numbers from `at`.
    pub fn numbers(self, mut at: usize, count: usize) -> usize {
        for _ in 0..count {
            match self.char_at(at) {
                Some((class, next)) if class & NUMBER != 0 => at = next,
                _ => break,
            }
        }
        at
    }

    /// End of `'s|'t|'re|'ve|'m|'ll|'d` at `at`; without regard to case, U+017F is an s too.
    pub fn contraction(self, at: usize, any_case: bool) -> Option<usize> {
        if self.byte(at) != b'\'' {
            return None;
        }
        let fold = |b: u8| if any_case { b.to_ascii_lowercase() } else { b };
        match (fold(self.byte(at + 1)), fold(self.byte(at + 2))) {
            (b's' | b't' | b'm' | b'd', _) => Some(at + 2),
            (b'r' | b'v', b'e') | (b'l', b'l') => Some(at + 3),
            (0xc5, 0xbf) if any_case => Some(at + 3),
            _ => None,
        }
    }

    /// End of the piece of white space at `at`, where none of a rule's other alternatives matches: `\s*[\r\n]+` (where
    /// `newlines`), else `\s+(?!\S)`, else `\s+`. `space` are the class bits that count as space.
    pub fn white_space(self, at: usize, newlines: bool, fits: impl Fn(u8) -> bool) -> usize {
        let (mut end, mut last, mut newline) = (at, at, None);
        while let Some((class, next)) = self.char_at(end) {
            if !fits(class) {
                break;
            }
            last = end;
            if newlines && is_newline(self.byte(end)) {
                newline = Some(next);
            }
            end = next;
        }
        match newline {
            Some(after) => after,
            None if end == self.text.len() || last == at => end,
            None => last,
        }
    }
}

pub fn is_newline(byte: u8) -> bool {
    byte == b'\n' || byte == b'\r'
}
