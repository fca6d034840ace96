//! A packed right operand.

use super::pack::{self, Source};
use super::{Core, KC};
use crate::tensor::cpu::par::{self, Shared};

/// Layout of a packed right operand `[k, n]`: blocks of `KC` along k, in each block panels of `nr` columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    pub k: usize,
    pub n: usize,
    nr: usize,
    per_slot: usize,
}

impl Layout {
    pub fn new(core: &Core, k: usize, n: usize) -> Self {
        Self { k, n, nr: core.nr, per_slot: core.format.per_slot() }
    }

    pub fn num_blocks(&self) -> usize {
        self.k.div_ceil(KC)
    }

    pub fn num_panels(&self) -> usize {
        self.n.div_ceil(self.nr)
    }

    /// First number of block `b` along k, and how many it has.
    pub fn block(&self, b: usize) -> (usize, usize) {
        (b * KC, KC.min(self.k - b * KC))
    }

    pub fn block_slots(&self, b: usize) -> usize {
        self.block(b).1.div_ceil(self.per_slot)
    }

    /// Slots before panel `panel` of block `b`.
    pub fn offset(&self, b: usize, panel: usize) -> usize {
        let width = self.num_panels() * self.nr;
        b * KC.div_ceil(self.per_slot) * width + self.block_slots(b) * self.nr * panel
    }

    /// Panels of all blocks.
    pub fn num_units(&self) -> usize {
        self.num_blocks() * self.num_panels()
    }

    /// Place of unit `unit` (panel `unit % panels` of block `unit / panels`): first slot and length.
    pub fn unit(&self, unit: usize) -> (usize, usize) {
        let (b, panel) = (unit / self.num_panels(), unit % self.num_panels());
        (self.offset(b, panel), self.block_slots(b) * self.nr)
    }

    /// Slots in all.
    pub fn len(&self) -> usize {
        (0..self.num_blocks()).map(|b| self.block_slots(b)).sum::<usize>() * self.num_panels() * self.nr
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A packed right operand that lies in `data`.
#[derive(Clone, Copy)]
pub struct Panels<'a> {
    pub layout: Layout,
    pub data: &'a [u32],
}

impl<'a> Panels<'a> {
    pub fn new(layout: Layout, data: &'a [u32]) -> Self {
        assert!(data.len() >= layout.len(), "packed operand is too short");
        Self { layout, data }
    }

    /// Panels from `panel` on of block `b`.
    pub fn from(&self, b: usize, panel: usize) -> &'a [u32] {
        let end = self.layout.offset(b, self.layout.num_panels());
        &self.data[self.layout.offset(b, panel)..end]
    }
}

/// Packs unit `unit` of `source` `[k, n]` into `out`, which is that unit's place.
pub fn pack_unit(core: &Core, layout: Layout, source: Source, unit: usize, out: &mut [u32]) {
    let (b, panel) = (unit / layout.num_panels(), unit % layout.num_panels());
    let (k0, k) = layout.block(b);
    let j0 = panel * core.nr;
    pack::panel(core.format, source.from(k0, j0), k, core.nr.min(layout.n - j0), out, core.nr);
}

/// Packs all of `source` `[k, n]` into `out`, on the calling thread.
pub fn pack_all(core: &Core, layout: Layout, source: Source, out: &mut [u32]) {
    for unit in 0..layout.num_units() {
        let (start, len) = layout.unit(unit);
        pack_unit(core, layout, source, unit, &mut out[start..start + len]);
    }
}

/// As `pack_all`, on all threads.
pub fn pack_on_threads(core: &Core, layout: Layout, source: Source, out: &mut [u32]) {
    let out = Shared::new(out);
    par::tasks(layout.num_units(), |unit| {
        let (start, len) = layout.unit(unit);
        // SAFETY: units do not overlap.
        pack_unit(core, layout, source, unit, unsafe { out.range(start, len) });
    });
}
