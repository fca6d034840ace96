//! How often each word stands in a corpus. Memory follows the number of different words.

use std::sync::{Mutex, MutexGuard};

use anyhow::{Result, anyhow};
use rayon::prelude::*;

use super::super::engine::{BATCH, ByteMap, Key, Padded, Piece, Pieces, SHORT, hash_bytes, parts, prefetch};
use crate::error::bad_input;

/// Documents are taken from the corpus until they have so many bytes for each thread ...
const GROUP_BYTES: usize = 4 << 20;
/// ... and are counted in parts of about this size, so that one long text keeps all threads busy.
const PART_BYTES: usize = 256 << 10;
/// Words that a thread counts by itself before it adds them to what all have counted.
const OWN_WORDS: usize = 1 << 15;
/// Bytes of long words likewise.
const OWN_LONG_BYTES: usize = 1 << 20;
/// Threads seldom wait for one of so many maps.
const SHARDS: usize = 64;

/// Byte strings with their counts.
#[derive(Default)]
pub struct Words {
    /// Where in `counts` a word's count stands.
    index: ByteMap,
    counts: Vec<u64>,
}

impl Words {
    /// False if the map has no room for another word.
    pub fn add(&mut self, word: &[u8], times: u64) -> bool {
        match self.index.get(word) {
            Some(at) => self.counts[at as usize] += times,
            None if self.index.has_room(word) => {
                self.index.insert(word, self.counts.len() as u32);
                self.counts.push(times);
            }
            None => return false,
        }
        true
    }

    pub fn len(&self) -> usize {
        self.counts.len()
    }

    /// Bytes of all words.
    pub fn bytes(&self) -> usize {
        self.index.key_bytes()
    }

    pub fn iter(&self) -> impl Iterator<Item = (&[u8], u64)> {
        self.index.iter().map(|(word, at)| (word, self.counts[at as usize]))
    }
}

/// What all threads have counted: each word in one of several maps, by its hash.
struct Shared(Vec<Mutex<Words>>);

impl Shared {
    fn add(&self, word: &[u8], times: u64) -> Result<()> {
        // The map takes its slots by the low bits of the same hash.
        let shard = (hash_bytes(word) >> 40) as usize % SHARDS;
        match lock(&self.0[shard]).add(word, times) {
            true => Ok(()),
            false => {
                Err(bad_input("the corpus has too many different words (4 GiB of them in one of 64 parts): learn from a sample"))
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("nothing panics while it holds this lock")
}

/// One thread's words since it last handed them on.
struct Own {
    /// Short words, by hash; free where the count is 0.
    slots: Vec<(Key, u64)>,
    used: usize,
    long: Words,
}

impl Own {
    fn new() -> Self {
        Self { slots: vec![(Key::NONE, 0); 2 * OWN_WORDS], used: 0, long: Words::default() }
    }

    fn prefetch(&self, hash: u64) {
        prefetch(self.slots.as_ptr().wrapping_add(hash as usize & (self.slots.len() - 1)));
    }

    #[inline(always)]
    fn add(&mut self, key: Key, hash: u64) {
        let mask = self.slots.len() - 1;
        let mut i = hash as usize & mask;
        loop {
            let slot = &mut self.slots[i];
            if slot.0 == key {
                slot.1 += 1;
                return;
            }
            if slot.1 == 0 {
                *slot = (key, 1);
                self.used += 1;
                return;
            }
            i = (i + 1) & mask;
        }
    }

    fn count(&mut self, text: Padded<'_>, pieces: &[Piece], shared: &Shared) -> Result<()> {
        let mut probes = [(Key::NONE, 0); BATCH];
        for (piece, probe) in pieces.iter().zip(&mut probes) {
            if piece.len as usize <= SHORT {
                let key = Key::new(text.sixteen(piece.start as usize), piece.len as usize);
                *probe = (key, key.hash());
                self.prefetch(probe.1);
            }
        }
        for (piece, (key, hash)) in pieces.iter().zip(probes) {
            if piece.len as usize <= SHORT {
                self.add(key, hash);
            } else {
                let word = &text.bytes()[piece.start as usize..][..piece.len as usize];
                if !self.long.add(word, 1) {
                    shared.add(word, 1)?;
                }
            }
        }
        // The slots have room for another batch.
        if self.used >= OWN_WORDS || self.long.bytes() >= OWN_LONG_BYTES { self.hand_on(shared) } else { Ok(()) }
    }

    fn hand_on(&mut self, shared: &Shared) -> Result<()> {
        for (key, count) in &mut self.slots {
            if *count > 0 {
                let (bytes, length) = key.bytes();
                shared.add(&bytes[..length], *count)?;
                (*key, *count) = (Key::NONE, 0);
            }
        }
        self.used = 0;
        for (word, count) in std::mem::take(&mut self.long).iter() {
            shared.add(word, count)?;
        }
        Ok(())
    }
}

/// Counts the words of `documents`, as GPT-2's expression cuts them, on all threads of the current pool. Each word is in one
/// of the maps returned.
///
/// # Errors
/// The first error among the documents; words too many or too long to count (4 GiB).
pub fn count(documents: impl Iterator<Item = Result<String>> + Send) -> Result<Vec<Words>> {
    let shared = Shared((0..SHARDS).map(|_| Mutex::default()).collect());
    let threads = rayon::current_num_threads();
    // A thread that counts a part does nothing else meanwhile: nobody waits for its place here.
    let own: Vec<Mutex<(Pieces, Own)>> = (0..threads).map(|_| Mutex::new((Pieces::new(), Own::new()))).collect();
    let mut documents = documents.fuse();
    let mut group = || take_group(&mut documents, threads * GROUP_BYTES);
    let mut texts = group()?;
    while !texts.is_empty() {
        let counted = || {
            let parts: Vec<&str> = texts.iter().flat_map(|text| parts(text, PART_BYTES)).collect();
            parts.par_iter().try_for_each(|part| {
                let (pieces, own) = &mut *lock(&own[rayon::current_thread_index().unwrap_or(0)]);
                let mut outcome = Ok(());
                let short_enough = pieces.cut(part, |text, pieces| {
                    if outcome.is_ok() {
                        outcome = own.count(text, pieces, &shared);
                    }
                });
                if short_enough { outcome } else { Err(bad_input("the corpus has a word of more than 4 GiB")) }
            })
        };
        let (next, done) = rayon::join(&mut group, counted);
        done?;
        texts = next?;
    }
    own.par_iter().try_for_each(|own| lock(own).1.hand_on(&shared))?;
    let whole = |shard: Mutex<Words>| shard.into_inner().map_err(|_| anyhow!("a thread that counted words failed"));
    shared.0.into_iter().map(whole).collect()
}

/// Documents of about `bytes`; none when there are no more.
fn take_group(documents: &mut impl Iterator<Item = Result<String>>, bytes: usize) -> Result<Vec<String>> {
    let (mut group, mut size) = (Vec::new(), 0);
    while size < bytes
        && let Some(text) = documents.next()
    {
        let text = text?;
        size += text.len();
        // Many empty documents are no group without end.
        if !text.is_empty() {
            group.push(text);
        }
    }
    Ok(group)
}
