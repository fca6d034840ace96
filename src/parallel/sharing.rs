//! How the ranks of a mesh share one training step: who is asked for what, and where gradients and weights go.

use std::borrow::Cow;
use std::cell::RefCell;

use anyhow::Result;

use super::exchange::Waits;
use super::forest::Forest;
use super::mesh::{Layout, Mesh};
use super::transport::Place;
use super::zero::Ownership;
use crate::model::peers::Peers;
use crate::model::{ParamStore, ParamTable};
use crate::tensor::Backend;
use crate::tensor::backend::Batch;

/// What the training step asks of parallelism. [`Alone`] is a rank without others.
pub trait Sharing<B: Backend> {
    /// None = there are no others.
    fn mesh(&self) -> Option<&Mesh>;

    fn ownership(&self) -> &Ownership;

    /// Sizes of the mesh, and which of its ranks this is.
    fn place(&self) -> (Layout, usize) {
        self.mesh().map_or((Layout::SINGLE, 0), |mesh| (mesh.layout, mesh.rank))
    }

    /// Says where the rank is from now on, for messages: in `phase` of step `step`, counted from 1.
    fn at(&self, step: u64, phase: &'static str) {
        if let Some(mesh) = self.mesh() {
            mesh.comm.at(|place| *place = Place { step, layer: None, phase });
        }
    }

    /// This rank's part of whole sequences.
    fn cut<'b>(&self, batch: &'b Batch) -> Result<Cow<'b, Batch>>;

    /// For passes over a micro-batch that complete no gradients.
    fn peers(&self) -> Peers<'_, B>;

    /// For the last micro-batch of a step: gradients are reduced as they become complete.
    fn last_peers(&self) -> Peers<'_, B>;

    /// Where sums are taken over sequences: takes the gradients of the micro-batch that is done, the rank's `nth` and, if there is
    /// any, sequence `sequence` of the global batch, out of `grads`, which are zero after this.
    fn leaf(&self, backend: &B, nth: usize, sequence: Option<usize>, grads: &mut ParamStore<B>) -> Result<()>;

    /// Waits for the reduction. Then `grads` holds, in the rows that this rank owns, sums over all ranks.
    fn reduced(&self, backend: &B, grads: &mut ParamStore<B>) -> Result<()>;

    /// Sends updated rows to whoever needs them, and receives theirs; weights may be on their way after this.
    fn updated(&self, params: &mut ParamStore<B>) -> Result<()>;

    /// How long this rank stood still for others since this was asked last; None of a rank alone.
    fn take_waits(&self) -> Option<Waits> {
        None
    }

    /// Waits until all weights have arrived.
    fn settle(&self, params: &ParamStore<B>) -> Result<()>;
}

/// A single rank.
pub struct Alone<B: Backend> {
    ownership: Ownership,
    forest: RefCell<Forest<ParamStore<B>>>,
}

impl<B: Backend> Alone<B> {
    pub fn new(table: &ParamTable) -> Self {
        Self { ownership: Ownership::whole(table), forest: RefCell::default() }
    }

    /// Of a rank that updates nothing.
    pub fn evaluating() -> Self {
        Self { ownership: Ownership::default(), forest: RefCell::default() }
    }
}

impl<B: Backend> Sharing<B> for Alone<B> {
    fn mesh(&self) -> Option<&Mesh> {
        None
    }

    fn ownership(&self) -> &Ownership {
        &self.ownership
    }

    fn cut<'b>(&self, batch: &'b Batch) -> Result<Cow<'b, Batch>> {
        Ok(Cow::Borrowed(batch))
    }

    fn peers(&self) -> Peers<'_, B> {
        Peers::none()
    }

    fn last_peers(&self) -> Peers<'_, B> {
        Peers::none()
    }

    fn leaf(&self, backend: &B, _: usize, sequence: Option<usize>, grads: &mut ParamStore<B>) -> Result<()> {
        let Some(sequence) = sequence else { return Ok(()) };
        let leaf = std::mem::replace(grads, grads.zeros_like(backend)?);
        self.forest.borrow_mut().push(sequence, leaf, |a, b| a.add_assign(backend, &b))
    }

    fn reduced(&self, backend: &B, grads: &mut ParamStore<B>) -> Result<()> {
        if let Some(sum) = self.forest.take().into_sum(|a, b| a.add_assign(backend, &b))? {
            *grads = sum;
        }
        Ok(())
    }

    fn updated(&self, _: &mut ParamStore<B>) -> Result<()> {
        Ok(())
    }

    fn settle(&self, _: &ParamStore<B>) -> Result<()> {
        Ok(())
    }
}
