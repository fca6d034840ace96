//! The merge list: which two tokens become which third, and how early.

use super::bytemap::mix;
use super::pages::Pages;

/// No merge.
pub const NEVER: u32 = u32::MAX;

/// What two neighbours become.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Merge {
    /// Place in the merge list; lower goes first. [`NEVER`] if there is none.
    pub rank: u32,
    pub id: u32,
}

pub const NO_MERGE: Merge = Merge { rank: NEVER, id: NEVER };

#[derive(Clone, Copy)]
#[repr(C, align(16))]
struct Slot {
    left: u32,
    right: u32,
    merge: Merge,
}

// SAFETY: four numbers without gaps.
unsafe impl bytemuck::Zeroable for Slot {}

const FREE: Slot = Slot { left: NEVER, right: NEVER, merge: NO_MERGE };
/// Bits of the filter: 2^21 are 256 KiB, which the second-level cache keeps.
const FILTER_LOG2: u32 = 21;

/// Pairs of ids to merges. Most pairs have none: a filter of one bit a pair answers those without touching the table.
pub struct Pairs {
    slots: Pages<Slot>,
    filter: Vec<u64>,
}

impl Pairs {
    /// `merges` in the order of the list. Of a pair that stands twice the last counts, as with `tokenizers`.
    pub fn new(merges: &[(u32, u32, u32)]) -> Self {
        let size = (merges.len() * 2).next_power_of_two().max(16);
        let mut pairs = Self { slots: Pages::zeroed(size), filter: vec![0; 1 << (FILTER_LOG2 - 6)] };
        pairs.slots.fill(FREE);
        for (rank, (left, right, id)) in merges.iter().enumerate() {
            pairs.insert(*left, *right, Merge { rank: rank as u32, id: *id });
        }
        pairs
    }

    fn insert(&mut self, left: u32, right: u32, merge: Merge) {
        let hash = hash(left, right);
        let bit = (hash >> (64 - FILTER_LOG2)) as usize;
        self.filter[bit >> 6] |= 1 << (bit & 63);
        let mask = self.slots.len() - 1;
        let mut i = hash as usize & mask;
        while self.slots[i].left != NEVER && (self.slots[i].left, self.slots[i].right) != (left, right) {
            i = (i + 1) & mask;
        }
        self.slots[i] = Slot { left, right, merge };
    }

    #[inline(always)]
    pub fn get(&self, left: u32, right: u32) -> Merge {
        let hash = hash(left, right);
        let bit = (hash >> (64 - FILTER_LOG2)) as usize;
        if self.filter[bit >> 6] >> (bit & 63) & 1 == 0 {
            return NO_MERGE;
        }
        let mask = self.slots.len() - 1;
        let mut i = hash as usize & mask;
        loop {
            let slot = &self.slots[i];
            if slot.left == left && slot.right == right {
                return slot.merge;
            }
            if slot.left == NEVER {
                return NO_MERGE;
            }
            i = (i + 1) & mask;
        }
    }
}

#[inline(always)]
fn hash(left: u32, right: u32) -> u64 {
    mix((left as u64) << 32 | right as u64, 0)
}
