//! The words that a worker has seen, and their ids.
//!
//! A word of up to 15 bytes is its own key: the bytes with their number on top, as 128 bits, compared whole. Its slot of 32
//! bytes holds up to three ids, so that one cache line answers. Longer words and longer answers lie in side tables. When the
//! memory allowed is used up, everything is forgotten.

use super::bytemap::{self, ByteMap, mix};
use super::pages::Pages;
use super::simd::prefetch;

/// Longest word with a slot of its own.
pub const SHORT: usize = 15;
/// Longest word that is remembered at all.
const LONGEST: usize = 512;
const FIRST_SLOTS: usize = 1 << 14;

/// A word of 1 to [`SHORT`] bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Key {
    low: u64,
    high: u64,
}

/// `MASKS[n]` keeps n bytes of 16.
static MASKS: [[u64; 2]; 16] = {
    let mut masks = [[0; 2]; 16];
    let mut n = 1;
    while n < 16 {
        let low = if n >= 8 { !0 } else { (1 << (8 * n)) - 1 };
        let high = if n > 8 { (1 << (8 * (n - 8))) - 1 } else { 0 };
        masks[n] = [low, high];
        n += 1;
    }
    masks
};

impl Key {
    /// No word's.
    pub const NONE: Self = Self { low: !0, high: !0 };

    /// Of the first `len` of 16 bytes; `len` is 1 to 15.
    #[inline(always)]
    pub fn new(bytes: &[u8; 16], len: usize) -> Self {
        let word = u128::from_le_bytes(*bytes);
        let [low, high] = MASKS[len & 15];
        Self { low: word as u64 & low, high: (word >> 64) as u64 & high | (len as u64) << 56 }
    }

    pub fn of(word: &[u8]) -> Self {
        let mut bytes = [0; 16];
        bytes[..word.len()].copy_from_slice(word);
        Self::new(&bytes, word.len())
    }

    /// The word's bytes, and how many they are.
    pub fn bytes(self) -> ([u8; 16], usize) {
        (((self.high as u128) << 64 | self.low as u128).to_le_bytes(), (self.high >> 56) as usize & SHORT)
    }

    /// The same bytes as a part of a word, where that makes a difference.
    pub fn as_part(self) -> Self {
        Self { high: self.high | 1 << 63, ..self }
    }

    #[inline(always)]
    pub fn hash(self) -> u64 {
        mix(self.low, self.high)
    }
}

/// `[low, high, id | id << 32, id | count << 32]`; count 0: free; above 3: 4 + where the ids are in `spill`.
type Slot = [u64; 4];

/// The slots of a cache as it is: where a word is looked for first.
#[derive(Clone, Copy)]
pub struct FirstSlots<'a> {
    slots: &'a [Slot],
}

impl FirstSlots<'_> {
    /// Asks for the memory that [`FirstSlots::get_few`] will look at.
    #[inline(always)]
    pub fn prefetch(self, hash: u64) {
        prefetch(self.slots.as_ptr().wrapping_add(hash as usize & (self.slots.len() - 1)));
    }

    /// Up to three ids and their number, if the word's first slot has them: the usual case.
    #[inline(always)]
    pub fn get_few(self, key: Key, hash: u64) -> Option<([u32; 4], usize)> {
        let [low, high, two, last] = self.slots[hash as usize & (self.slots.len() - 1)];
        let count = (last >> 32) as usize;
        let hit = low == key.low && high == key.high && count <= 3;
        hit.then_some(([two as u32, (two >> 32) as u32, last as u32, 0], count))
    }
}

pub struct Cache {
    slots: Pages<Slot>,
    used: usize,
    most_slots: usize,
    /// Lists of ids, each after its length.
    spill: Vec<u32>,
    long: ByteMap,
    /// Most bytes of `spill` and `long` together.
    most_aside: usize,
}

impl Cache {
    /// A cache of about `size_bytes` at most (while it grows, half as much again).
    pub fn new(size_bytes: usize) -> Self {
        let most_slots = (size_bytes / 2 / size_of::<Slot>()).max(FIRST_SLOTS);
        let most_slots = 1 << most_slots.ilog2();
        Self {
            slots: Pages::zeroed(FIRST_SLOTS),
            used: 0,
            most_slots,
            spill: Vec::new(),
            long: ByteMap::new(),
            most_aside: (size_bytes / 2).min(1 << 30),
        }
    }

    /// For many lookups between two changes.
    #[inline(always)]
    pub fn first_slots(&self) -> FirstSlots<'_> {
        FirstSlots { slots: &self.slots }
    }

    /// Appends the word's ids to `ids`; false if it is not known. `hash` is the key's.
    pub fn get(&self, key: Key, hash: u64, ids: &mut Vec<u32>) -> bool {
        let mask = self.slots.len() - 1;
        let mut i = hash as usize & mask;
        loop {
            let [low, high, two, last] = self.slots[i];
            let count = (last >> 32) as usize;
            if count == 0 {
                return false;
            }
            if low == key.low && high == key.high {
                match self.spilled(count) {
                    Some(list) => ids.extend_from_slice(list),
                    None => ids.extend_from_slice(&[two as u32, (two >> 32) as u32, last as u32][..count]),
                }
                return true;
            }
            i = (i + 1) & mask;
        }
    }

    /// The ids of a word whose slot does not hold them itself, by the slot's count.
    fn spilled(&self, count: usize) -> Option<&[u32]> {
        let at = count.checked_sub(4)?;
        Some(&self.spill[at + 1..][..self.spill[at] as usize])
    }

    /// Remembers a word that [`Cache::get`] does not know.
    pub fn insert(&mut self, key: Key, ids: &[u32]) {
        if ids.is_empty() {
            return;
        }
        self.make_room();
        let (two, last) = if ids.len() <= 3 {
            let id = |i: usize| ids.get(i).copied().unwrap_or(0) as u64;
            (id(0) | id(1) << 32, id(2) | (ids.len() as u64) << 32)
        } else {
            (0, (self.spill(ids) as u64 + 4) << 32)
        };
        self.place([key.low, key.high, two, last]);
        self.used += 1;
    }

    fn spill(&mut self, ids: &[u32]) -> u32 {
        let at = self.spill.len() as u32;
        self.spill.push(ids.len() as u32);
        self.spill.extend_from_slice(ids);
        at
    }

    fn place(&mut self, slot: Slot) {
        let mask = self.slots.len() - 1;
        let mut i = Key { low: slot[0], high: slot[1] }.hash() as usize & mask;
        while self.slots[i][3] >> 32 != 0 {
            i = (i + 1) & mask;
        }
        self.slots[i] = slot;
    }

    fn make_room(&mut self) {
        if self.spill.len() * 4 + self.long.size_bytes() > self.most_aside {
            self.forget();
        }
        if self.used * 2 < self.slots.len() {
            return;
        }
        if self.slots.len() >= self.most_slots {
            self.forget();
            return;
        }
        let larger = Pages::zeroed(self.slots.len() * 2);
        for slot in std::mem::replace(&mut self.slots, larger).iter() {
            if slot[3] >> 32 != 0 {
                self.place(*slot);
            }
        }
    }

    fn forget(&mut self) {
        self.slots.fill([0; 4]);
        self.used = 0;
        self.spill.clear();
        self.long.clear();
    }

    /// What [`Cache::get_long`] finds a word by. Asks for the memory that it will look at first.
    pub fn prefetch_long(&self, word: &[u8]) -> u64 {
        let hash = bytemap::hash(&word[..word.len().min(LONGEST)]);
        self.long.prefetch(hash);
        hash
    }

    /// When that memory is there: asks for what it will look at then.
    pub fn prefetch_ids(&self, hash: u64) {
        if let Some(at) = self.long.prefetch_key(hash) {
            prefetch(self.spill.as_ptr().wrapping_add(at as usize));
        }
    }

    /// Appends the ids of a word of more than [`SHORT`] bytes; false if it is not known.
    pub fn get_long(&self, word: &[u8], hash: u64, ids: &mut Vec<u32>) -> bool {
        if word.len() > LONGEST {
            return false;
        }
        let Some(list) = self.long.get_hashed(word, hash).and_then(|at| self.spilled(at as usize + 4)) else { return false };
        ids.extend_from_slice(list);
        true
    }

    /// Remembers a word that [`Cache::get_long`] does not know.
    pub fn insert_long(&mut self, word: &[u8], ids: &[u32]) {
        if word.len() > LONGEST {
            return;
        }
        self.make_room();
        let at = self.spill(ids);
        self.long.insert(word, at);
    }

    /// Memory in use.
    #[cfg(test)]
    fn size_bytes(&self) -> usize {
        self.slots.len() * size_of::<Slot>() + self.spill.capacity() * 4 + self.long.size_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn word(i: u32) -> Vec<u8> {
        let mut word = format!("{i:x}").into_bytes();
        word.resize(1 + i as usize % 40, b'.');
        word.extend(i.to_le_bytes());
        word
    }

    #[test]
    fn what_is_found_is_what_was_put_there_and_memory_stays_bounded() {
        let limit = 1 << 20;
        let mut cache = Cache::new(limit);
        let answer = |i: u32| (0..1 + i % 6).map(|k| i + k).collect::<Vec<_>>();
        let find = |cache: &Cache, word: &[u8]| {
            let mut ids = Vec::new();
            let known = if word.len() <= SHORT {
                let key = Key::of(word);
                cache.get(key, key.hash(), &mut ids)
            } else {
                let hash = cache.prefetch_long(word);
                cache.prefetch_ids(hash);
                cache.get_long(word, hash, &mut ids)
            };
            known.then_some(ids)
        };
        let mut forgotten = 0;
        for i in (0..100_000).chain((0..100_000).rev()) {
            let word = word(i);
            match find(&cache, &word) {
                Some(ids) => assert_eq!(ids, answer(i)),
                None => {
                    forgotten += 1;
                    if word.len() <= SHORT {
                        cache.insert(Key::of(&word), &answer(i));
                    } else {
                        cache.insert_long(&word, &answer(i));
                    }
                    assert_eq!(find(&cache, &word), Some(answer(i)));
                }
            }
            assert!(cache.size_bytes() < 2 * limit, "{}", cache.size_bytes());
        }
        // The second half meets words that had to go.
        assert!(forgotten > 100_000, "{forgotten}");
    }

    #[test]
    fn words_that_share_a_beginning_or_a_length_are_different() {
        let mut keys = std::collections::HashSet::new();
        for n in 1..=SHORT {
            for last in [0, b'a', 255] {
                let mut word = vec![0; n];
                word[n - 1] = last;
                let key = Key::of(&word);
                assert!(keys.insert((key.low, key.high)));
                assert!(keys.insert((key.as_part().low, key.as_part().high)));
            }
        }
    }
}
