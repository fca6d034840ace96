//! One thread's way through texts.

use std::sync::Arc;

use super::added::Matcher;
use super::batch::{BATCH, Batch, Piece};
use super::cache::Cache;
use super::key::{Key, SHORT};
use super::model::Memory;
use super::padded::{Buffer, Padded};
use super::table::hash_long;
use super::{Cutter, Engine, nfc};

/// Longest text, also when normalization makes it three times as long: places in it have 32 bits.
const LONGEST: usize = (u32::MAX as usize - 64) / 3;
/// Buffers that grew larger are given back after the text.
const KEEP: usize = 64 << 20;
/// Ids that the cache answers with at once, used or not.
const MOST_FEW: usize = 4;

/// Encodes texts, with a cache of the words that it and others have seen. Not to be used with another engine.
pub struct Worker {
    batch: Batch,
    /// Of each piece its key, if it is short, and its hash.
    probes: Box<[(Key, u64); BATCH]>,
    /// Which pieces are not short.
    longs: Box<[u16; BATCH]>,
    memory: Memory,
    text: Buffer,
    normal: Buffer,
}

impl Worker {
    /// A worker with a cache, which serves no other engine.
    pub fn new(cache: Arc<Cache>) -> Self {
        Self {
            batch: Batch::default(),
            probes: Box::new([(Key::default(), 0); BATCH]),
            longs: Box::new([0; BATCH]),
            memory: Memory::new(cache),
            text: Buffer::default(),
            normal: Buffer::default(),
        }
    }

    /// This is the cache that the worker was made with.
    pub fn has(&self, cache: &Arc<Cache>) -> bool {
        self.memory.words.are_of(cache)
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
        let word = |piece: &Piece| &text.bytes()[piece.start as usize..][..piece.len as usize];
        self.memory.words.refresh();
        let table = self.memory.words.table();
        let (slots, mut longs) = (table.first_slots(), 0);
        for (i, (piece, probe)) in pieces.iter().zip(self.probes.iter_mut()).enumerate() {
            let length = piece.len as usize;
            if (1..=SHORT).contains(&length) {
                let key = Key::new(text.sixteen(piece.start as usize), length);
                let hash = key.hash();
                slots.prefetch(hash);
                *probe = (key, hash);
            } else if length == 0 {
                *probe = (Key::NONE, 0);
            } else {
                let hash = hash_long(word(piece));
                table.prefetch_long(hash);
                *probe = (Key::NONE, hash);
                self.longs[longs] = i as u16;
                longs += 1;
            }
        }
        self.longs[..longs].iter().for_each(|i| table.prefetch_record(self.probes[*i as usize].1));
        let mut done = 0;
        while done < pieces.len() {
            ids.reserve((pieces.len() - done) * MOST_FEW);
            let (slots, mut end) = (self.memory.words.table().first_slots(), ids.len());
            for (key, hash) in &self.probes[done..pieces.len()] {
                let Some((few, count)) = slots.get_few(*key, *hash) else { break };
                // SAFETY: each piece that is left has room for `few`, of which the first `count` are then counted.
                unsafe { ids.as_mut_ptr().add(end).cast::<[u32; MOST_FEW]>().write_unaligned(few) };
                (end, done) = (end + count, done + 1);
            }
            // SAFETY: up to there ids have been written.
            unsafe { ids.set_len(end) };
            let Some(piece) = pieces.get(done) else { break };
            if piece.len == 0 {
                ids.push(piece.start);
            } else {
                let (key, hash) = self.probes[done];
                engine.model.encode(word(piece), key, hash, &mut self.memory, ids);
            }
            done += 1;
        }
        self.batch.clear();
    }
}
