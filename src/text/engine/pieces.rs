//! The words that a vocabulary is learned from.

use super::batch::{Batch, Piece};
use super::padded::{Buffer, Padded};
use super::simd::Level;
use super::split::Splitter;

/// Cuts texts by GPT-2's regular expression.
pub struct Pieces {
    level: Level,
    text: Buffer,
    batch: Batch,
}

/// Longest text: places in it have 32 bits.
const LONGEST: usize = u32::MAX as usize - 64;
/// A buffer that grew larger is given back after the text.
const KEEP: usize = 64 << 20;

impl Pieces {
    pub fn new() -> Self {
        Self { level: Level::detect(), text: Buffer::default(), batch: Batch::default() }
    }

    /// Hands the pieces of `text` to `each`, some at a time. False, and nothing is done, if the text is too long (4 GiB).
    pub fn cut(&mut self, text: &str, mut each: impl FnMut(Padded<'_>, &[Piece])) -> bool {
        if text.len() > LONGEST {
            return false;
        }
        self.text.set(text);
        let padded = self.text.text();
        let mut at = 0;
        while at < padded.len() {
            at = Splitter::Gpt2.fill(self.level, padded, at, &mut self.batch);
            each(padded, self.batch.pieces());
            self.batch.clear();
        }
        self.text.shrink(KEEP);
        true
    }
}

/// Parts of `text` of about `bytes` each, which have the same pieces as the whole: they end between a character that is no
/// white space and a space or a newline, where a piece always ends, whatever follows.
pub fn parts(text: &str, bytes: usize) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let from = bytes.min(rest.len());
        let mut gaps = memchr::memchr2_iter(b' ', b'\n', &rest.as_bytes()[from..]).map(|at| from + at);
        let after_word = |at: &usize| rest[..*at].chars().next_back().is_some_and(|c| !c.is_whitespace());
        let (part, other) = rest.split_at(gaps.find(after_word).unwrap_or(rest.len()));
        rest = other;
        Some(part)
    })
}

#[cfg(test)]
mod tests {
    use super::super::fuzz::{Random, document};
    use super::*;

    fn pieces(text: &str) -> Vec<String> {
        let mut all = Vec::new();
        let whole = Pieces::new().cut(text, |padded, pieces| {
            let bytes = |p: &Piece| padded.bytes()[p.start as usize..][..p.len as usize].to_vec();
            all.extend(pieces.iter().map(|p| String::from_utf8(bytes(p)).unwrap()));
        });
        assert!(whole);
        all
    }

    #[test]
    fn parts_have_the_pieces_of_the_whole() {
        let mut random = Random(9);
        let mut cuts = 0;
        for _ in 0..300 {
            let text: String = (0..4).map(|_| document(&mut random, &[])).collect();
            let whole = pieces(&text);
            for bytes in [1, 7, 64, 1000] {
                let parts: Vec<&str> = parts(&text, bytes).collect();
                cuts += parts.len() - 1;
                assert_eq!(parts.concat(), text);
                assert_eq!(parts.iter().flat_map(|part| pieces(part)).collect::<Vec<_>>(), whole, "{text:?} {bytes}");
            }
        }
        assert!(cuts > 5000, "{cuts}");
    }
}
