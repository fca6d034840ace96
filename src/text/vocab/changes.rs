//! Counts of pairs, and what one merge changes about them.

use super::super::engine::{mix, prefetch};

/// A pair of ids as one number, which rises as the pair does.
pub fn pack(left: u32, right: u32) -> u64 {
    (left as u64) << 32 | right as u64
}

pub fn unpack(pair: u64) -> (u32, u32) {
    ((pair >> 32) as u32, pair as u32)
}

/// No pair: ids are smaller.
const FREE: u64 = u64::MAX;

/// Pairs to their counts. Pairs that are not there count 0.
pub struct Counts {
    slots: Vec<(u64, i64)>,
    used: usize,
}

impl Default for Counts {
    fn default() -> Self {
        Self { slots: vec![(FREE, 0); 1 << 12], used: 0 }
    }
}

impl Counts {
    fn find(&self, pair: u64) -> usize {
        let mask = self.slots.len() - 1;
        let mut i = mix(pair, 0) as usize & mask;
        while self.slots[i].0 != pair && self.slots[i].0 != FREE {
            i = (i + 1) & mask;
        }
        i
    }

    pub fn get(&self, pair: u64) -> u64 {
        self.slots[self.find(pair)].1 as u64
    }

    /// Returns the new count.
    pub fn add(&mut self, pair: u64, change: i64) -> u64 {
        if self.used * 4 >= self.slots.len() * 3 {
            self.make_room();
        }
        let i = self.find(pair);
        let slot = &mut self.slots[i];
        self.used += usize::from(slot.0 == FREE);
        *slot = (pair, slot.1 + change);
        slot.1 as u64
    }

    /// Forgets pairs that count 0, and doubles the slots if that does not help.
    fn make_room(&mut self) {
        self.used = self.slots.iter().filter(|slot| slot.1 != 0).count();
        let size = if self.used * 2 > self.slots.len() { self.slots.len() * 2 } else { self.slots.len() };
        for slot in std::mem::replace(&mut self.slots, vec![(FREE, 0); size]) {
            if slot.1 != 0 {
                let i = self.find(slot.0);
                self.slots[i] = slot;
            }
        }
    }

    fn prefetch(&self, pair: u64) {
        prefetch(self.slots.as_ptr().wrapping_add(mix(pair, 0) as usize & (self.slots.len() - 1)));
    }
}

#[derive(Clone, Copy)]
struct Change {
    pair: u64,
    by: i64,
    /// In how many words the pair appears, and the last of them.
    words: u32,
    last: u32,
    /// Where it stands in the table.
    slot: u32,
}

/// What a merge changes. Few pairs are concerned at a time: their small table stays in the cache.
pub struct Changes {
    /// Place in `list` + 1; 0 where free.
    slots: Vec<u32>,
    list: Vec<Change>,
    /// (place in `list`, word in which the pair appears)
    appears: Vec<(u32, u32)>,
    /// For each change, where its next word goes.
    next: Vec<usize>,
}

impl Default for Changes {
    fn default() -> Self {
        Self { slots: vec![0; 1 << 10], list: Vec::new(), appears: Vec::new(), next: Vec::new() }
    }
}

impl Changes {
    fn slot(&self, pair: u64) -> usize {
        let mask = self.slots.len() - 1;
        let mut i = mix(pair, 0) as usize & mask;
        while self.slots[i] != 0 && self.list[self.slots[i] as usize - 1].pair != pair {
            i = (i + 1) & mask;
        }
        i
    }

    fn of(&mut self, pair: u64) -> usize {
        let mut i = self.slot(pair);
        if self.slots[i] == 0 {
            if self.list.len() * 2 >= self.slots.len() {
                self.slots = vec![0; self.slots.len() * 2];
                for at in 0..self.list.len() {
                    let i = self.slot(self.list[at].pair);
                    self.slots[i] = at as u32 + 1;
                    self.list[at].slot = i as u32;
                }
                i = self.slot(pair);
            }
            self.list.push(Change { pair, by: 0, words: 0, last: 0, slot: i as u32 });
            self.slots[i] = self.list.len() as u32;
        }
        self.slots[i] as usize - 1
    }

    /// A pair is gone from one place of a word that stands `count` times in the corpus.
    pub fn fewer(&mut self, pair: u64, count: u64) {
        let at = self.of(pair);
        self.list[at].by -= count as i64;
    }

    /// A pair appears in one place of a word.
    pub fn more(&mut self, pair: u64, count: u64, word: u32) {
        let at = self.of(pair);
        let change = &mut self.list[at];
        change.by += count as i64;
        if change.words == 0 || change.last != word {
            (change.words, change.last) = (change.words + 1, word);
            self.appears.push((at as u32, word));
        }
    }

    /// Adds all changes to `counts`. For each pair that has appeared, its words go to `lists`, after their number, and `queue` is
    /// told the pair, its count and where that list begins.
    pub fn settle(&mut self, counts: &mut Counts, lists: &mut Vec<u32>, mut queue: impl FnMut(u64, u64, usize)) {
        const AHEAD: usize = 8;
        const NOWHERE: usize = usize::MAX;
        self.next.clear();
        for (i, change) in self.list.iter().enumerate() {
            if let Some(later) = self.list.get(i + AHEAD) {
                counts.prefetch(later.pair);
            }
            let count = counts.add(change.pair, change.by);
            if change.words == 0 || count == 0 {
                self.next.push(NOWHERE);
                continue;
            }
            let start = lists.len();
            queue(change.pair, count, start);
            lists.push(change.words);
            lists.resize(start + 1 + change.words as usize, 0);
            self.next.push(start + 1);
        }
        for (at, word) in self.appears.drain(..) {
            let next = &mut self.next[at as usize];
            if *next != NOWHERE {
                lists[*next] = word;
                *next += 1;
            }
        }
        for change in self.list.drain(..) {
            self.slots[change.slot as usize] = 0;
        }
    }
}
