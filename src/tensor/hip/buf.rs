//! A matrix in device memory, of f32 or bf16 numbers.

use std::sync::{Arc, Mutex, PoisonError};

use super::arena::Block;

/// How numbers are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    F32,
    Bf16,
}

impl Kind {
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }
}

/// A row-major matrix. Weights, gradients and optimizer state are f32; activations are what the spec's table of precisions says.
#[derive(Debug)]
pub struct Buf {
    block: Block,
    rows: usize,
    cols: usize,
    kind: Kind,
    /// The bf16 copy that products of a weight read, made at the first use after every change.
    half: Mutex<Option<Arc<Buf>>>,
}

impl Buf {
    pub(super) fn new(block: Block, rows: usize, cols: usize, kind: Kind) -> Self {
        debug_assert!(block.bytes() >= rows * cols * kind.bytes());
        Self { block, rows, cols, kind, half: Mutex::default() }
    }

    pub fn rows(&self) -> usize {
        self.rows
    }
    pub fn cols(&self) -> usize {
        self.cols
    }
    pub fn kind(&self) -> Kind {
        self.kind
    }
    /// Numbers in it.
    pub fn len(&self) -> usize {
        self.rows * self.cols
    }
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Where the numbers are, to be read by what is queued.
    pub(super) fn at(&self) -> *const f32 {
        self.block.address() as *const f32
    }

    /// Where row `row` begins.
    pub(super) fn row(&self, row: usize) -> *const f32 {
        (self.block.address() + row * self.cols * self.kind.bytes()) as *const f32
    }

    /// Where the numbers are, to be changed by what is queued: a bf16 copy is out of date then.
    pub(super) fn at_mut(&mut self) -> *mut f32 {
        *self.half.get_mut().unwrap_or_else(PoisonError::into_inner) = None;
        self.block.address() as *mut f32
    }

    /// The numbers change: a bf16 copy is out of date.
    pub(super) fn forget_half(&self) {
        *self.half.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// The bf16 copy, made by `make` where there is none.
    pub(super) fn half(&self, make: impl FnOnce() -> anyhow::Result<Buf>) -> anyhow::Result<Arc<Buf>> {
        let mut half = self.half.lock().unwrap_or_else(PoisonError::into_inner);
        match &*half {
            Some(half) => Ok(half.clone()),
            None => Ok(half.insert(Arc::new(make()?)).clone()),
        }
    }
}
