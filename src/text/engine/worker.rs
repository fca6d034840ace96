//! One thread's way through texts.

use super::added::Matcher;
use super::batch::{BATCH, Batch};
use super::cache::{Key, SHORT};
use super::model::Memory;
use super::padded::{Buffer, Padded};
use super::{Cutter, Engine, nfc};

/// Longest text, also when normalization makes it three times as long: places in it have 32 bits.
const LONGEST: usize = (u32::MAX as usize - 64) / 3;
/// Buffers that grew larger are given back after the text.
const KEEP: usize = 64 << 20;

/// Encodes texts, with a cache of the words it has seen. Not to be used with another engine.
pub struct Worker {
    batch: Batch,
    probes: Box<[(Key, u64); BATCH]>,
    memory: Memory,
    text: Buffer,
    normal: Buffer,
}

impl Worker {
    /// A worker whose cache takes up to about `cache_bytes`.
    pub fn new(cache_bytes: usize) -> Self {
        Self {
            batch: Batch::default(),
            probes: Box::new([(Key::default(), 0); BATCH]),
            memory: Memory::new(cache_bytes),
            text: Buffer::default(),
            normal: Buffer::default(),
        }
    }

    /// Appends the ids of `text` to `ids`. False, and nothing appended, if the text is too long (over 1.4 GB).
    pub fn encode(&mut self, engine: &Engine, text: &str, ids: &mut Vec<u32>) -> bool {
        if text.len() > LONGEST {
            return false;
        }
        let mut buffer = std::mem::take(&mut self.text);
        buffer.set(text);
        let padded = buffer.text();
        let mut at = 0;
        loop {
            let found = engine.raw.as_ref().and_then(|matcher| matcher.next(engine.level, padded, at));
            let end = found.map_or(text.len(), |found| found.start);
            if engine.nfc && nfc::may_change(&text[at..end]) {
                // The batch speaks of the one text or of the other.
                self.flush(engine, padded, ids);
                let mut normal = std::mem::take(&mut self.normal);
                nfc::normalize(&text[at..end], &mut normal);
                let (normal_text, length) = (normal.text(), normal.text().len());
                self.cut(engine, normal_text, 0, length, ids);
                self.flush(engine, normal_text, ids);
                normal.shrink(KEEP);
                self.normal = normal;
            } else {
                self.cut(engine, padded, at, end, ids);
            }
            let Some(found) = found else { break };
            self.push_token(engine, padded, found.id, ids);
            at = found.end;
        }
        self.flush(engine, padded, ids);
        buffer.shrink(KEEP);
        self.text = buffer;
        self.memory.shrink(KEEP / 4);
        true
    }

    /// Cuts normalized text between added tokens of the first kind.
    fn cut(&mut self, engine: &Engine, text: Padded<'_>, mut at: usize, end: usize, ids: &mut Vec<u32>) {
        let text = text.until(end);
        if let Some(matcher) = &engine.normalized {
            let next = |at: usize| Matcher::next(matcher, engine.level, text, at);
            while let Some(found) = next(at) {
                self.fill(engine, text.until(found.start), at, ids);
                self.push_token(engine, text, found.id, ids);
                at = found.end;
            }
        }
        self.fill(engine, text, at, ids);
    }

    fn push_token(&mut self, engine: &Engine, text: Padded<'_>, id: u32, ids: &mut Vec<u32>) {
        if self.batch.room() == 0 {
            self.flush(engine, text, ids);
        }
        self.batch.push_token(id);
    }

    /// Cuts plain text into pieces.
    fn fill(&mut self, engine: &Engine, text: Padded<'_>, mut at: usize, ids: &mut Vec<u32>) {
        while at < text.len() {
            at = match &engine.cutter {
                Cutter::Rule(splitter) => splitter.fill(engine.level, text, at, &mut self.batch),
                Cutter::Sentence(sentence) => sentence.fill(engine.level, text, at, &mut self.batch),
            };
            if at < text.len() {
                self.flush(engine, text, ids);
            }
        }
    }

    /// Turns the pieces of the batch into ids.
    fn flush(&mut self, engine: &Engine, text: Padded<'_>, ids: &mut Vec<u32>) {
        let pieces = self.batch.pieces();
        for (piece, probe) in pieces.iter().zip(self.probes.iter_mut()) {
            let length = piece.len as usize;
            if (1..=SHORT).contains(&length) {
                let key = Key::new(text.sixteen(piece.start as usize), length);
                let hash = key.hash();
                self.memory.cache.prefetch(hash);
                *probe = (key, hash);
            } else {
                *probe = (Key::NONE, 0);
            }
        }
        ids.reserve(pieces.len() * 4);
        for (piece, (key, hash)) in pieces.iter().zip(self.probes.iter()) {
            if let Some((few, count)) = self.memory.cache.get_few(*key, *hash) {
                let end = ids.len();
                ids.reserve(4);
                // SAFETY: there is room for four more ids, of which the first `count` (at most 3) are then counted.
                unsafe {
                    ids.as_mut_ptr().add(end).cast::<[u32; 4]>().write_unaligned(few);
                    ids.set_len(end + count);
                }
            } else if piece.len == 0 {
                ids.push(piece.start);
            } else {
                let word = &text.bytes()[piece.start as usize..][..piece.len as usize];
                engine.model.encode(word, &mut self.memory, ids);
            }
        }
        self.batch.clear();
    }
}
