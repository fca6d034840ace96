//! A matrix of the CPU backend, and the packed copies that a weight keeps of itself.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::arena::Block;
use super::packed::{Core, Format, Layout, Panels, Source, pack_on_threads};

/// A row-major matrix.
#[derive(Debug)]
pub struct Buf {
    store: Store,
    pub(super) rows: usize,
    pub(super) cols: usize,
    packs: Mutex<Vec<Arc<KeptPack>>>,
}

#[derive(Debug)]
enum Store {
    /// Weights, gradients, optimizer state, and what the host brings. Empty while its numbers are on their way from other ranks.
    Own(OnceLock<Vec<f32>>),
    /// What verbs return.
    Arena(Block<f32>),
    /// A matrix of a plan: only its shape is known.
    Planned,
}

/// Which side of a product a weight `[out, in]` is packed for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// `x wᵀ`: inner dimension `in`.
    Forward,
    /// `dy w`: inner dimension `out`.
    Backward,
}

/// How long the packed copies of weights live.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Packing {
    /// From one change of the weight to the next: for steps of many micro-batches.
    #[default]
    Kept,
    /// As long as one verb, in working memory: a step of one micro-batch uses each copy once.
    EachUse,
}

/// A packed copy that a weight keeps, made on first use after every change.
#[derive(Debug)]
pub struct KeptPack {
    side: Side,
    format: Format,
    layout: Layout,
    data: Vec<u32>,
    stale: bool,
}

/// A weight as a packed right operand.
#[derive(Debug)]
pub enum Pack {
    Kept(Arc<KeptPack>),
    EachUse(Layout, Block<u32>),
    /// Of a plan, where a real one would be kept.
    Planned,
}

impl Pack {
    pub fn panels(&self) -> Panels<'_> {
        match self {
            Self::Kept(pack) => Panels::new(pack.layout, &pack.data),
            Self::EachUse(layout, data) => Panels::new(*layout, data),
            Self::Planned => unreachable!("a planned weight has no numbers"),
        }
    }
}

impl Buf {
    fn new(store: Store, rows: usize, cols: usize) -> Self {
        Self { store, rows, cols, packs: Mutex::new(Vec::new()) }
    }

    pub(super) fn own(data: Vec<f32>, rows: usize, cols: usize) -> Self {
        debug_assert_eq!(data.len(), rows * cols);
        Self::new(Store::Own(OnceLock::from(data)), rows, cols)
    }

    pub(super) fn in_arena(block: Block<f32>, rows: usize, cols: usize) -> Self {
        debug_assert_eq!(block.len(), rows * cols);
        Self::new(Store::Arena(block), rows, cols)
    }

    pub(super) fn planned(rows: usize, cols: usize) -> Self {
        Self::new(Store::Planned, rows, cols)
    }

    pub fn data(&self) -> &[f32] {
        match &self.store {
            Store::Own(data) => data.get().expect("weights have arrived before they are read"),
            Store::Arena(block) => block,
            Store::Planned => unreachable!("a planned matrix has no numbers"),
        }
    }

    /// The numbers, to be changed: packed copies go stale.
    pub fn data_mut(&mut self) -> &mut [f32] {
        self.forget_packs();
        match &mut self.store {
            Store::Own(data) => data.get_mut().expect("weights have arrived before they are changed"),
            Store::Arena(block) => block,
            Store::Planned => unreachable!("a planned matrix has no numbers"),
        }
    }

    /// Takes the numbers out of a buffer of the host's making, until `put` brings them back.
    pub fn take(&mut self) -> Vec<f32> {
        self.forget_packs();
        match &mut self.store {
            Store::Own(data) => data.take().expect("numbers are taken once"),
            _ => unreachable!("only buffers of their own lose their numbers"),
        }
    }

    /// Brings numbers back that were taken.
    pub fn put(&self, data: Vec<f32>) {
        assert_eq!(data.len(), self.rows * self.cols, "a buffer of {} x {}", self.rows, self.cols);
        match &self.store {
            Store::Own(place) => place.set(data).expect("numbers that are there were not taken"),
            _ => unreachable!("only buffers of their own lose their numbers"),
        }
    }

    fn forget_packs(&mut self) {
        let packs = self.packs.get_mut().unwrap_or_else(PoisonError::into_inner);
        for pack in packs {
            // Nobody holds one beyond a verb, and verbs that read a weight do not run beside one that writes it.
            Arc::get_mut(pack).expect("packed weights are in use").stale = true;
        }
    }

    /// Bytes that the packed copies of a `[out, in]` weight take, both sides.
    pub fn pack_bytes(core: &Core, rows: usize, cols: usize) -> usize {
        (Layout::new(core, cols, rows).len() + Layout::new(core, rows, cols).len()) * size_of::<u32>()
    }

    /// Packs this `[out, in]` weight as a right operand, on all threads.
    pub(super) fn pack_into(&self, core: &Core, side: Side, room: &mut [u32]) {
        pack_on_threads(core, self.layout(core, side), self.source(side), room);
    }

    /// This weight as a packed right operand, kept. Packs it unless that was done since its last change.
    pub(super) fn packed(&self, core: &Core, side: Side) -> Pack {
        let mut packs = self.packs.lock().unwrap_or_else(PoisonError::into_inner);
        let at = packs.iter().position(|p| p.side == side && p.format == core.format).unwrap_or_else(|| {
            let layout = self.layout(core, side);
            packs.push(Arc::new(KeptPack { side, format: core.format, layout, data: vec![0; layout.len()], stale: true }));
            packs.len() - 1
        });
        if packs[at].stale {
            let pack = Arc::get_mut(&mut packs[at]).expect("a stale pack is held by nobody");
            pack_on_threads(core, pack.layout, self.source(side), &mut pack.data);
            pack.stale = false;
        }
        Pack::Kept(packs[at].clone())
    }

    pub(super) fn layout(&self, core: &Core, side: Side) -> Layout {
        match side {
            Side::Forward => Layout::new(core, self.cols, self.rows),
            Side::Backward => Layout::new(core, self.rows, self.cols),
        }
    }

    fn source(&self, side: Side) -> Source<'_> {
        match side {
            Side::Forward => Source::transposed(self.data(), self.cols),
            Side::Backward => Source::rows(self.data(), self.cols),
        }
    }
}
