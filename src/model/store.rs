//! One buffer per entry of the parameter table: weights, gradients or an optimizer's moments.

use std::ops::{Index, IndexMut};

use anyhow::Result;

use super::params::{ParamId, ParamSpec, ParamTable};
use crate::tensor::Backend;

/// Buffers in table order.
pub struct ParamStore<B: Backend> {
    bufs: Vec<B::Buf>,
}

impl<B: Backend> ParamStore<B> {
    /// All zero.
    pub fn zeros(backend: &B, table: &ParamTable) -> Result<Self> {
        Self::zeros_of(backend, table, |_| true)
    }

    /// Zeros of the parameters that `holds` names; the others are empty.
    pub fn zeros_of(backend: &B, table: &ParamTable, holds: impl Fn(ParamId) -> bool) -> Result<Self> {
        let zeros = |(id, s): (ParamId, &ParamSpec)| {
            let [rows, cols] = s.matrix_shape();
            backend.zeros(if holds(id) { rows } else { 0 }, cols)
        };
        Ok(Self { bufs: table.specs.iter().enumerate().map(zeros).collect::<Result<_>>()? })
    }

    /// Zeros of the same shapes.
    pub fn zeros_like(&self, backend: &B) -> Result<Self> {
        let zeros = |b: &B::Buf| backend.zeros(backend.shape(b)[0], backend.shape(b)[1]);
        Ok(Self { bufs: self.bufs.iter().map(zeros).collect::<Result<_>>()? })
    }

    /// Each parameter from the host, in table order.
    pub fn from_host(backend: &B, table: &ParamTable, values: impl FnMut(ParamId) -> Result<Vec<f32>>) -> Result<Self> {
        Self::from_host_of(backend, table, |_| true, values)
    }

    /// The parameters that `holds` names from the host; the others are empty, and not asked for.
    pub fn from_host_of(
        backend: &B,
        table: &ParamTable,
        holds: impl Fn(ParamId) -> bool,
        mut values: impl FnMut(ParamId) -> Result<Vec<f32>>,
    ) -> Result<Self> {
        let upload = |(id, s): (ParamId, &ParamSpec)| {
            let [rows, cols] = s.matrix_shape();
            if holds(id) { backend.upload(&values(id)?, rows, cols) } else { backend.zeros(0, cols) }
        };
        Ok(Self { bufs: table.specs.iter().enumerate().map(upload).collect::<Result<_>>()? })
    }

    /// `self += other`, of equal shapes.
    pub fn add_assign(&mut self, backend: &B, other: &Self) -> Result<()> {
        self.bufs.iter_mut().zip(&other.bufs).try_for_each(|(a, b)| backend.add_assign(a, b))
    }

    /// Sets every buffer to zero.
    pub fn clear(&mut self, backend: &B) -> Result<()> {
        self.bufs.iter_mut().try_for_each(|b| backend.clear(b))
    }

    /// Several different buffers at once, to be written together.
    pub fn many_mut<const N: usize>(&mut self, ids: [ParamId; N]) -> [&mut B::Buf; N] {
        self.bufs.get_disjoint_mut(ids).expect("ids of one layer are distinct entries of the table")
    }

    /// `count` consecutive entries.
    pub fn range(&self, first: ParamId, count: usize) -> &[B::Buf] {
        &self.bufs[first..first + count]
    }

    pub fn range_mut(&mut self, first: ParamId, count: usize) -> &mut [B::Buf] {
        &mut self.bufs[first..first + count]
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut B::Buf> {
        self.bufs.iter_mut()
    }

    pub fn len(&self) -> usize {
        self.bufs.len()
    }

    pub fn is_empty(&self) -> bool {
        self.bufs.is_empty()
    }
}

impl<B: Backend> Index<ParamId> for ParamStore<B> {
    type Output = B::Buf;
    fn index(&self, id: ParamId) -> &B::Buf {
        &self.bufs[id]
    }
}

impl<B: Backend> IndexMut<ParamId> for ParamStore<B> {
    fn index_mut(&mut self, id: ParamId) -> &mut B::Buf {
        &mut self.bufs[id]
    }
}
