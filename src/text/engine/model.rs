//! A vocabulary and its merges, ready to encode pieces of text.

use std::sync::Arc;

use rayon::prelude::*;

use super::bridge::{Bridges, Memo};
use super::bytemap::ByteMap;
use super::cache::{Cache, Words};
use super::key::{Key, SHORT};
use super::merge::Merger;
use super::pairs::{Merge, NEVER, Pairs};
use super::runs::Runs;
use super::sentence::SPACE_MARK;
use super::simd::Level;
use super::unicode::decode;

/// What a piece of text is before anything is merged.
pub enum Alphabet {
    /// One symbol a byte.
    Bytes {
        ids: [u32; 256],
        /// Merges of two bytes (first * 256 + second).
        merges: Vec<Merge>,
        bridges: Bridges,
    },
    /// One symbol a character where the vocabulary has it, else one a byte; a space is its mark.
    Characters {
        /// By code point; [`NEVER`] where the vocabulary does not have it.
        ids: Vec<u32>,
        bytes: [u32; 256],
    },
}

/// Set in [`Model::words`] for entries that only stand for a whole piece, as their merges lead elsewhere.
const WHOLE_ONLY: u32 = 1 << 31;
/// Ids are smaller.
pub const MOST_IDS: u32 = WHOLE_ONLY;

pub struct Model {
    level: Level,
    alphabet: Alphabet,
    pairs: Pairs,
    /// Pieces that are known to become one token.
    words: ByteMap,
    ignore_merges: bool,
    /// Pieces that are added tokens.
    runs: Runs,
}

/// A worker's own part: its hold of what all have learnt, and room for its work.
pub struct Memory {
    pub words: Words,
    merger: Merger,
    symbols: Vec<u32>,
    memo: Memo,
}

impl Memory {
    pub fn new(cache: Arc<Cache>) -> Self {
        Self { words: Words::new(cache), merger: Merger::default(), symbols: Vec::new(), memo: Memo::default() }
    }

    /// Gives memory back after an unusually long piece.
    pub fn shrink(&mut self, keep: usize) {
        self.merger.shrink(keep);
        if self.symbols.capacity() > keep {
            self.symbols = Vec::new();
        }
    }
}

impl Model {
    /// `vocabulary`: text of every entry that a piece can be, and its id.
    pub fn new(level: Level, alphabet: Alphabet, pairs: Pairs, vocabulary: &[(Vec<u8>, u32)], ignore_merges: bool) -> Self {
        let mut model = Self { level, alphabet, pairs, words: ByteMap::new(), ignore_merges, runs: Runs::default() };
        let by_merges: Vec<bool> = vocabulary
            .par_iter()
            .map_init(
                || (Merger::default(), Vec::new()),
                |(merger, symbols), (text, id)| {
                    model.merge(text, merger, symbols);
                    symbols[..] == [*id]
                },
            )
            .collect();
        for ((text, id), by_merges) in vocabulary.iter().zip(by_merges) {
            if by_merges || ignore_merges {
                model.words.insert(text, *id | if by_merges { 0 } else { WHOLE_ONLY });
            }
        }
        model
    }

    pub fn set_runs(&mut self, runs: Runs) {
        self.runs = runs;
    }

    /// What the merges make of `text`.
    fn merge(&self, text: &[u8], merger: &mut Merger, symbols: &mut Vec<u32>) {
        symbols.clear();
        match &self.alphabet {
            Alphabet::Bytes { ids, merges, .. } => {
                symbols.extend(text.iter().map(|b| ids[*b as usize]));
                merger.merge(self.level, &self.pairs, symbols, |_, i| merges[(text[i] as usize) << 8 | text[i + 1] as usize]);
            }
            Alphabet::Characters { ids, bytes } => {
                let mut at = 0;
                while at < text.len() {
                    let (code, length) = decode(text, at);
                    let code = if code == ' ' as u32 { SPACE_MARK as u32 } else { code };
                    match ids.get(code as usize) {
                        Some(id) if *id != NEVER => symbols.push(*id),
                        // A space that the vocabulary lacks falls back on the bytes of its mark.
                        _ if code == SPACE_MARK as u32 => {
                            let mut mark = [0; 4];
                            symbols.extend(SPACE_MARK.encode_utf8(&mut mark).bytes().map(|b| bytes[b as usize]));
                        }
                        _ => symbols.extend(text[at..at + length].iter().map(|b| bytes[*b as usize])),
                    }
                    at += length;
                }
                merger.merge(self.level, &self.pairs, symbols, |two, _| self.pairs.get(two[0], two[1]));
            }
        }
    }

    /// Appends the ids of a piece that has no slot with few ids in the cache. `key` is its key if it is short, `hash` what the cache finds
    /// it by.
    #[inline(never)]
    pub fn encode(&self, piece: &[u8], key: Key, hash: u64, memory: &mut Memory, ids: &mut Vec<u32>) {
        if piece.len() <= SHORT {
            if !memory.words.table().get(key, hash, ids) {
                let first = ids.len();
                self.whole(piece, memory, ids);
                memory.words.insert(key, &ids[first..]);
            }
        } else if !memory.words.table().get_long(piece, hash, ids) {
            let first = ids.len();
            match &self.alphabet {
                Alphabet::Bytes { bridges, .. } if self.words.get(piece).is_none() => {
                    let mut at = 0;
                    while at < piece.len() {
                        let end = bridges.part_end(&mut memory.memo, piece, at);
                        self.part(&piece[at..end], memory, ids);
                        at = end;
                    }
                }
                _ => self.whole(piece, memory, ids),
            }
            memory.words.insert_long(piece, &ids[first..]);
        }
    }

    fn whole(&self, piece: &[u8], memory: &mut Memory, ids: &mut Vec<u32>) {
        if self.runs.encode(piece, ids) {
            return;
        }
        match self.words.get(piece) {
            Some(id) => ids.push(id & !WHOLE_ONLY),
            None => self.by_merges(piece, memory, ids),
        }
    }

    /// A part of a piece: as a piece of its own, but for entries that stand for whole pieces only.
    fn part(&self, part: &[u8], memory: &mut Memory, ids: &mut Vec<u32>) {
        if part.len() > SHORT {
            return self.by_merges(part, memory, ids);
        }
        let key = Key::of(part);
        let key = if self.ignore_merges { key.as_part() } else { key };
        if !memory.words.table().get(key, key.hash(), ids) {
            let first = ids.len();
            match self.words.get(part) {
                Some(id) if id & WHOLE_ONLY == 0 => ids.push(id),
                _ => self.by_merges(part, memory, ids),
            }
            memory.words.insert(key, &ids[first..]);
        }
    }

    fn by_merges(&self, text: &[u8], memory: &mut Memory, ids: &mut Vec<u32>) {
        self.merge(text, &mut memory.merger, &mut memory.symbols);
        ids.extend_from_slice(&memory.symbols);
    }
}
