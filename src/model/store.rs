//! One buffer per entry of the parameter table: weights, gradients or an optimizer's moments.

use std::ops::{Index, IndexMut};

use anyhow::Result;

use super::params::{ParamId, ParamTable};
use crate::tensor::Backend;

/// Buffers in table order.
pub struct ParamStore<B: Backend> {
    bufs: Vec<B::Buf>,
}

impl<B: Backend> ParamStore<B> {
    /// All zero.
    pub fn zeros(backend: &B, table: &ParamTable) -> Result<Self> {
        let bufs = table.specs.iter().map(|s| backend.zeros(s.matrix_shape()[0], s.matrix_shape()[1])).collect::<Result<_>>()?;
        Ok(Self { bufs })
    }

    /// Each parameter from the host, in table order.
    pub fn from_host(backend: &B, table: &ParamTable, mut values: impl FnMut(ParamId) -> Result<Vec<f32>>) -> Result<Self> {
        let upload = |(id, s): (usize, &super::params::ParamSpec)| {
            let [rows, cols] = s.matrix_shape();
            backend.upload(&values(id)?, rows, cols)
        };
        Ok(Self { bufs: table.specs.iter().enumerate().map(upload).collect::<Result<_>>()? })
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
