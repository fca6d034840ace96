//! Words and their ids in tables that many threads read and add to at the same time, without a lock.
//!
//! What was once added never changes, and a word is there when the last of its numbers is: that one is stored with `Release` and read
//! with `Acquire` before the others. Two threads that learn the same word at once may both add it; either has the same ids.
//!
//! A word of up to 15 bytes is its own key. Two slots of 32 bytes, each with up to three ids, share a cache line: there, one look
//! answers nearly always. Longer words and longer answers lie in records: a row of numbers that holds the word and its ids.

use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use bytemuck::Zeroable;

use super::bytemap;
use super::key::Key;
use super::pages::Pages;
use super::simd::prefetch;

/// Longest word that is remembered at all.
const LONGEST: usize = 512;
/// Slots of the smallest table.
const FEWEST_SLOTS: usize = 1 << 14;
/// Ids that a slot itself can hold.
const FEW: usize = 3;
/// For as many slots, a table has this many numbers in its records, and half a slot for long words.
const NUMBERS_A_SLOT: usize = 3;
const BYTES_A_SLOT: usize = size_of::<Slot>() + 8 * NUMBERS_A_SLOT + 8 / 2;

/// A short word with its ids.
struct Slot {
    low: AtomicU64,
    /// 0 until a thread has claimed the slot.
    high: AtomicU64,
    /// Two ids.
    two: AtomicU64,
    /// The third, and above it their count; above three: that and where their record is. 0 until the slot is complete.
    last: AtomicU64,
}

impl Slot {
    #[inline(always)]
    fn is_of(&self, key: Key) -> bool {
        self.low.load(Ordering::Relaxed) == key.low && self.high.load(Ordering::Relaxed) == key.high
    }
}

#[repr(align(64))]
struct Bucket([Slot; 2]);

// SAFETY: plain numbers without gaps; all zeros are free slots.
unsafe impl Zeroable for Bucket {}

/// A number that begins as 0.
struct Cell(AtomicU64);

// SAFETY: 0 is a number.
unsafe impl Zeroable for Cell {}

/// There is no room left.
#[derive(Debug)]
pub struct Full;

/// The slots where a short word is looked for first.
#[derive(Clone, Copy)]
pub struct FirstSlots<'a> {
    buckets: &'a [Bucket],
}

impl FirstSlots<'_> {
    /// Asks for the memory that [`FirstSlots::get_few`] will look at.
    #[inline(always)]
    pub fn prefetch(self, hash: u64) {
        prefetch(self.buckets.as_ptr().wrapping_add(hash as usize & (self.buckets.len() - 1)));
    }

    /// Up to three ids and their number, if one of the word's first slots has them: the usual case.
    #[inline(always)]
    pub fn get_few(self, key: Key, hash: u64) -> Option<([u32; 4], usize)> {
        let Bucket(slots) = &self.buckets[hash as usize & (self.buckets.len() - 1)];
        // Chosen without a branch, which nothing could foresee.
        let slot = &slots[usize::from(slots[1].is_of(key))];
        let last = slot.last.load(Ordering::Acquire);
        let count = (last >> 32) as usize;
        let hit = slot.is_of(key) && (1..=FEW).contains(&count);
        let two = slot.two.load(Ordering::Relaxed);
        hit.then_some(([two as u32, (two >> 32) as u32, last as u32, 0], count))
    }
}

pub struct Table {
    buckets: Pages<Bucket>,
    /// Of long words: where its record begins, and above it the high half of its hash. 0: free.
    long: Pages<Cell>,
    /// Records, each `count of ids << 32 | bytes of the word`, the word in numbers of eight bytes, two ids in each further number.
    /// The first number is none's, so that 0 is no place.
    records: Pages<Cell>,
    used_slots: AtomicUsize,
    used_long: AtomicUsize,
    used_records: AtomicUsize,
}

/// Bytes as numbers of eight, the last one filled up with zeros.
fn eights(bytes: &[u8]) -> impl Iterator<Item = u64> {
    let (chunks, rest) = bytes.as_chunks::<8>();
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    chunks.iter().copied().chain((!rest.is_empty()).then_some(last)).map(u64::from_le_bytes)
}

/// What a long word is found by.
pub fn hash_long(word: &[u8]) -> u64 {
    bytemap::hash(&word[..word.len().min(LONGEST)])
}

impl Table {
    pub fn smallest() -> Self {
        Self::with_slots(FEWEST_SLOTS)
    }

    fn with_slots(slots: usize) -> Self {
        Self {
            buckets: Pages::zeroed(slots / 2),
            long: Pages::zeroed(slots / 2),
            records: Pages::zeroed(slots * NUMBERS_A_SLOT),
            used_slots: AtomicUsize::new(0),
            used_long: AtomicUsize::new(0),
            used_records: AtomicUsize::new(1),
        }
    }

    /// An empty one of the same size.
    pub fn emptied(&self) -> Self {
        Self::with_slots(self.slots())
    }

    /// One of twice the size with the same words. None if that would take more than `most_bytes`.
    pub fn doubled(&self, most_bytes: usize) -> Option<Self> {
        let slots = self.slots() * 2;
        (slots * BYTES_A_SLOT <= most_bytes).then(|| {
            let larger = Self::with_slots(slots);
            self.copy_to(&larger);
            larger
        })
    }

    fn slots(&self) -> usize {
        self.buckets.len() * 2
    }

    /// Memory that all of it takes when it is full.
    #[cfg(test)]
    pub fn size_bytes(&self) -> usize {
        self.slots() * BYTES_A_SLOT
    }

    fn copy_to(&self, larger: &Self) {
        let (mut ids, mut word) = (Vec::new(), Vec::new());
        // What is full, or added meanwhile by others, is not copied: it will be learnt again.
        for slot in self.buckets.iter().flat_map(|bucket| &bucket.0) {
            let last = slot.last.load(Ordering::Acquire);
            if last != 0 {
                let key = Key { low: slot.low.load(Ordering::Relaxed), high: slot.high.load(Ordering::Relaxed) };
                ids.clear();
                self.append_ids(slot, last, &mut ids);
                let _ = larger.insert(key, &ids);
            }
        }
        for cell in self.long.iter() {
            let entry = cell.0.load(Ordering::Acquire);
            if entry != 0 {
                ids.clear();
                word.clear();
                let at = entry as u32 as usize;
                let bytes = self.number(at) as u32 as usize;
                word.extend((0..bytes.div_ceil(8)).flat_map(|i| self.number(at + 1 + i).to_le_bytes()));
                self.append_record(at, &mut ids);
                let _ = larger.insert_long(&word[..bytes], &ids);
            }
        }
    }

    #[inline(always)]
    pub fn first_slots(&self) -> FirstSlots<'_> {
        FirstSlots { buckets: &self.buckets }
    }

    /// All slots in the order in which a word of this hash takes the first free one.
    fn slots_from(&self, hash: u64) -> impl Iterator<Item = &Slot> {
        let mask = self.buckets.len() - 1;
        (0..self.buckets.len()).flat_map(move |i| &self.buckets[(hash as usize + i) & mask].0)
    }

    /// Appends the word's ids to `ids`; false if it is not known. `hash` is the key's.
    pub fn get(&self, key: Key, hash: u64, ids: &mut Vec<u32>) -> bool {
        for slot in self.slots_from(hash) {
            let last = slot.last.load(Ordering::Acquire);
            if last == 0 {
                return false;
            }
            if slot.is_of(key) {
                self.append_ids(slot, last, ids);
                return true;
            }
        }
        false
    }

    fn append_ids(&self, slot: &Slot, last: u64, ids: &mut Vec<u32>) {
        let count = (last >> 32) as usize;
        if let Some(at) = count.checked_sub(FEW + 1) {
            return self.append_record(at, ids);
        }
        let two = slot.two.load(Ordering::Relaxed);
        ids.extend_from_slice(&[two as u32, (two >> 32) as u32, last as u32][..count]);
    }

    /// Remembers a word, if nobody else does at the same time.
    pub fn insert(&self, key: Key, ids: &[u32]) -> Result<(), Full> {
        if ids.is_empty() {
            return Ok(());
        }
        if self.used_slots.load(Ordering::Relaxed) * 2 >= self.slots() {
            return Err(Full);
        }
        let (two, last) = if ids.len() <= FEW {
            let id = |i: usize| ids.get(i).copied().unwrap_or(0) as u64;
            (id(0) | id(1) << 32, id(2) | (ids.len() as u64) << 32)
        } else {
            (0, ((self.record(&[], ids)? + FEW + 1) as u64) << 32)
        };
        let claim = |slot: &&Slot| slot.high.compare_exchange(0, key.high, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        let slot = self.slots_from(key.hash()).find(claim).ok_or(Full)?;
        slot.low.store(key.low, Ordering::Relaxed);
        slot.two.store(two, Ordering::Relaxed);
        slot.last.store(last, Ordering::Release);
        self.used_slots.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    #[inline(always)]
    fn number(&self, at: usize) -> u64 {
        self.records[at].0.load(Ordering::Relaxed)
    }

    /// Writes a record that nobody knows of yet. Returns its place.
    fn record(&self, word: &[u8], ids: &[u32]) -> Result<usize, Full> {
        let all = 1 + word.len().div_ceil(8) + ids.len().div_ceil(2);
        let at = self.used_records.fetch_add(all, Ordering::Relaxed);
        let place = self.records.get(at..at + all).ok_or(Full)?;
        let twos = ids.chunks(2).map(|two| two[0] as u64 | (two.get(1).copied().unwrap_or(0) as u64) << 32);
        let head = (ids.len() as u64) << 32 | word.len() as u64;
        for (cell, number) in place.iter().zip([head].into_iter().chain(eights(word)).chain(twos)) {
            cell.0.store(number, Ordering::Relaxed);
        }
        Ok(at)
    }

    fn append_record(&self, at: usize, ids: &mut Vec<u32>) {
        let head = self.number(at);
        let (bytes, count) = (head as u32 as usize, (head >> 32) as usize);
        let first = at + 1 + bytes.div_ceil(8);
        let place = &self.records[first..first + count.div_ceil(2)];
        // Room for whole twos, the last of which may be one too many.
        ids.reserve(2 * place.len());
        for (to, cell) in ids.spare_capacity_mut().as_chunks_mut().0.iter_mut().zip(place) {
            let two = cell.0.load(Ordering::Relaxed);
            *to = [two as u32, (two >> 32) as u32].map(MaybeUninit::new);
        }
        // SAFETY: so many have been written.
        unsafe { ids.set_len(ids.len() + count) };
    }

    /// The record at `at` is the word's.
    fn is_record_of(&self, at: usize, word: &[u8]) -> bool {
        self.number(at) as u32 as usize == word.len()
            && eights(word).enumerate().all(|(i, number)| self.number(at + 1 + i) == number)
    }

    fn long_from(&self, hash: u64) -> impl Iterator<Item = &AtomicU64> {
        let mask = self.long.len() - 1;
        (0..self.long.len()).map(move |i| &self.long[(hash as usize + i) & mask].0)
    }

    /// Asks for the memory that a long word is first looked for in.
    pub fn prefetch_long(&self, hash: u64) {
        prefetch(self.long.as_ptr().wrapping_add(hash as usize & (self.long.len() - 1)));
    }

    /// When that memory is there: asks for the record that may be the word's.
    pub fn prefetch_record(&self, hash: u64) {
        let entry = self.long[hash as usize & (self.long.len() - 1)].0.load(Ordering::Relaxed);
        if entry >> 32 == hash >> 32 {
            prefetch(self.records.as_ptr().wrapping_add(entry as u32 as usize));
        }
    }

    /// Appends the ids of a word with a record of its own; false if it is not known. `hash` is [`hash_long`] of it.
    pub fn get_long(&self, word: &[u8], hash: u64, ids: &mut Vec<u32>) -> bool {
        if word.len() > LONGEST {
            return false;
        }
        for cell in self.long_from(hash) {
            let entry = cell.load(Ordering::Acquire);
            if entry == 0 {
                return false;
            }
            let at = entry as u32 as usize;
            if entry >> 32 == hash >> 32 && self.is_record_of(at, word) {
                self.append_record(at, ids);
                return true;
            }
        }
        false
    }

    /// Remembers a long word, if nobody else does at the same time.
    pub fn insert_long(&self, word: &[u8], ids: &[u32]) -> Result<(), Full> {
        if word.len() > LONGEST {
            return Ok(());
        }
        if self.used_long.load(Ordering::Relaxed) * 2 >= self.long.len() {
            return Err(Full);
        }
        let hash = hash_long(word);
        let entry = hash >> 32 << 32 | self.record(word, ids)? as u64;
        let add = |cell: &&AtomicU64| cell.compare_exchange(0, entry, Ordering::Release, Ordering::Relaxed).is_ok();
        self.long_from(hash).find(add).ok_or(Full)?;
        self.used_long.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// Twos of numbers whose words, as `hash` tells, are first looked for in the same place.
    fn rivals(hash: impl Fn(u32) -> u64) -> Vec<[u32; 2]> {
        let mut places: BTreeMap<usize, Vec<u32>> = BTreeMap::new();
        (0..60_000).for_each(|i| places.entry(hash(i) as usize & (FEWEST_SLOTS / 2 - 1)).or_default().push(i));
        places.into_values().filter_map(|list| list.first_chunk().copied()).collect()
    }

    /// Two threads, round by round in step, each with a word for the slot that the other wants too.
    #[test]
    fn two_that_claim_the_same_slot_both_get_one() {
        let key = |i: u32| Key::of(format!("short {i}").as_bytes());
        let long = |i: u32| format!("a word that is long {i}").into_bytes();
        let twos = rivals(|i| key(i).hash()).into_iter().zip(rivals(|i| hash_long(&long(i))));
        // No table is more than half full.
        let twos: Vec<_> = twos.take(FEWEST_SLOTS / 8 - 1).collect();
        for _ in 0..8 {
            let (table, arrived) = (Table::smallest(), AtomicUsize::new(0));
            let both_are_there = |count: &mut usize| {
                *count += 2;
                arrived.fetch_add(1, Ordering::SeqCst);
                let mut looks = 0;
                while arrived.load(Ordering::SeqCst) < *count {
                    looks += 1;
                    if looks % 1000 == 0 { std::thread::yield_now() } else { std::hint::spin_loop() }
                }
            };
            std::thread::scope(|scope| {
                for t in 0..2 {
                    let (table, twos, both_are_there) = (&table, &twos, &both_are_there);
                    scope.spawn(move || {
                        let mut count = 0;
                        for (short, lengthy) in twos {
                            let (i, k) = (short[t], lengthy[t]);
                            let word = long(k);
                            both_are_there(&mut count);
                            table.insert(key(i), &[i, i + 1]).unwrap();
                            both_are_there(&mut count);
                            table.insert_long(&word, &[k; 5]).unwrap();
                        }
                    });
                }
            });
            let mut ids = Vec::new();
            for (short, lengthy) in &twos {
                for (i, k) in short.iter().copied().zip(lengthy.iter().copied()) {
                    ids.clear();
                    assert!(table.get(key(i), key(i).hash(), &mut ids), "{i}");
                    assert_eq!(ids, [i, i + 1]);
                    ids.clear();
                    assert!(table.get_long(&long(k), hash_long(&long(k)), &mut ids), "{k}");
                    assert_eq!(ids, [k; 5]);
                }
            }
        }
    }
}
