//! Byte-pair encoding of one word: of all neighbours that the merge list knows, the pair that stands first in the list becomes
//! one token, the leftmost of equals first, until no pair is left.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::pairs::{Merge, NEVER, Pairs};
use super::simd::Level;

/// Longest word, in symbols, whose pairs are searched for the best rather than kept in a heap.
const SHORT: usize = 64;
/// Most merges a list may have: rank and position share 32 bits in short words.
pub const MOST_MERGES: usize = 1 << 25;

/// Room for the work.
#[derive(Default)]
pub struct Merger {
    heap: BinaryHeap<Reverse<u64>>,
    /// For each symbol its pair with the next one; [`NEVER`] for those that are gone or have none.
    rank: Vec<u32>,
    id: Vec<u32>,
    previous: Vec<u32>,
    next: Vec<u32>,
}

impl Merger {
    /// Merges `symbols` in place. `first(two, i)` is the merge of the untouched symbols i and i + 1, which are `two`.
    pub fn merge(&mut self, level: Level, pairs: &Pairs, symbols: &mut Vec<u32>, first: impl Fn(&[u32], usize) -> Merge) {
        let count = symbols.len();
        if count > SHORT {
            self.long(pairs, symbols, first);
        } else if count > 1 {
            let (mut keys, mut ids) = ([NEVER; SHORT], [0; SHORT]);
            for i in 0..count - 1 {
                let merge = first(&symbols[i..i + 2], i);
                keys[i] = key(merge, i);
                ids[i] = merge.id;
            }
            let alive = match level {
                Level::Portable => short(pairs, symbols, &mut keys, &mut ids),
                #[cfg(target_arch = "x86_64")]
                // SAFETY: `Level::detect` found what the function is compiled for.
                Level::Avx2 | Level::Avx512 => unsafe { short_avx2(pairs, symbols, &mut keys, &mut ids) },
            };
            let mut i = 0;
            symbols.retain(|_| {
                i += 1;
                alive >> (i - 1) & 1 == 1
            });
        }
    }

    fn long(&mut self, pairs: &Pairs, symbols: &mut Vec<u32>, first: impl Fn(&[u32], usize) -> Merge) {
        let count = symbols.len();
        assert!(count < NEVER as usize, "words are parts of texts below 4 GiB");
        self.rank.clear();
        self.id.clear();
        for i in 0..count {
            let merge = if i + 1 < count { first(&symbols[i..i + 2], i) } else { super::pairs::NO_MERGE };
            self.rank.push(merge.rank);
            self.id.push(merge.id);
        }
        self.previous.clear();
        self.previous.extend((0..count as u32).map(|i| i.wrapping_sub(1)));
        self.next.clear();
        self.next.extend(1..=count as u32);
        let entry = |rank: u32, at: usize| Reverse((rank as u64) << 32 | at as u64);
        let known = self.rank.iter().enumerate().filter(|(_, rank)| **rank != NEVER);
        let mut entries = std::mem::take(&mut self.heap).into_vec();
        entries.clear();
        entries.extend(known.map(|(i, rank)| entry(*rank, i)));
        self.heap = BinaryHeap::from(entries);
        while let Some(Reverse(top)) = self.heap.pop() {
            let at = top as u32 as usize;
            // Entries stay in the heap when their pair is gone.
            if self.rank[at] != (top >> 32) as u32 {
                continue;
            }
            symbols[at] = self.id[at];
            let gone = self.next[at] as usize;
            symbols[gone] = NEVER;
            self.rank[gone] = NEVER;
            let after = self.next[gone] as usize;
            self.next[at] = after as u32;
            self.rank[at] = NEVER;
            if after < count {
                self.previous[after] = at as u32;
                self.update(pairs, at, symbols[at], symbols[after]);
            }
            let before = self.previous[at] as usize;
            if before < count {
                self.update(pairs, before, symbols[before], symbols[at]);
            }
        }
        symbols.retain(|id| *id != NEVER);
    }

    fn update(&mut self, pairs: &Pairs, at: usize, left: u32, right: u32) {
        let merge = pairs.get(left, right);
        (self.rank[at], self.id[at]) = (merge.rank, merge.id);
        if merge.rank != NEVER {
            self.heap.push(Reverse((merge.rank as u64) << 32 | at as u64));
        }
    }

    /// Gives memory back after an unusually long word.
    pub fn shrink(&mut self, keep: usize) {
        if self.rank.capacity() > keep {
            *self = Self::default();
        }
    }
}

/// Rank and position as one number, so that the least is the leftmost of the best.
#[inline(always)]
fn key(merge: Merge, at: usize) -> u32 {
    if merge.rank == NEVER { NEVER } else { merge.rank << 6 | at as u32 }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt")]
fn short_avx2(pairs: &Pairs, symbols: &mut [u32], keys: &mut [u32; SHORT], ids: &mut [u32; SHORT]) -> u64 {
    short(pairs, symbols, keys, ids)
}

/// Returns which symbols are left, one bit each.
#[inline(always)]
fn short(pairs: &Pairs, symbols: &mut [u32], keys: &mut [u32; SHORT], ids: &mut [u32; SHORT]) -> u64 {
    const LANES: usize = 8;
    let count = symbols.len();
    let mut alive = if count == 64 { !0 } else { (1u64 << count) - 1 };
    let vectors = count.div_ceil(LANES);
    loop {
        let mut least = [NEVER; LANES];
        for lane in keys.as_chunks::<LANES>().0[..vectors].iter() {
            for (least, key) in least.iter_mut().zip(lane) {
                *least = (*least).min(*key);
            }
        }
        let best = least.into_iter().min().unwrap_or(NEVER);
        if best == NEVER {
            return alive;
        }
        let at = (best & 63) as usize;
        let above = alive & !(2u64 << at).wrapping_sub(1);
        let gone = above.trailing_zeros() as usize & 63;
        let id = ids[at];
        symbols[at] = id;
        alive &= !(1 << gone);
        keys[gone] = NEVER;
        let after = above & above.wrapping_sub(1);
        keys[at] = NEVER;
        if after != 0 {
            let merge = pairs.get(id, symbols[after.trailing_zeros() as usize]);
            (keys[at], ids[at]) = (key(merge, at), merge.id);
        }
        let before = alive & ((1 << at) - 1);
        if before != 0 {
            let left = 63 - before.leading_zeros() as usize;
            let merge = pairs.get(symbols[left], id);
            (keys[left], ids[left]) = (key(merge, left), merge.id);
        }
    }
}
