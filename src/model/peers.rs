//! What a layer asks of other ranks. The model knows nothing of messages: `parallel` implements these.

use std::ops::Range;

use anyhow::Result;

use super::params::ParamId;
use super::store::ParamStore;
use crate::tensor::backend::{Backend, CcaIn, Halo, SkipMode};

/// The ranks that a model runs on together with this one. None of everything: it runs alone.
pub struct Peers<'a, B: Backend> {
    pub context: Option<&'a dyn ContextPeers<B>>,
    pub experts: Option<&'a dyn ExpertPeers<B>>,
    pub stages: Option<&'a dyn Stages<B>>,
}

impl<B: Backend> Clone for Peers<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for Peers<'_, B> {}

impl<B: Backend> Peers<'_, B> {
    pub const fn none() -> Self {
        Self { context: None, experts: None, stages: None }
    }
}

/// Ranks that hold the other chunks of the same sequences (context parallelism, spec 4.4).
pub trait ContextPeers<B: Backend> {
    /// Rows before each chunk, from where they are.
    fn halo(&self, backend: &B, rows: &B::Rows, x: CcaIn<&B::Buf>) -> Result<Halo<B::Buf>>;

    /// The way back: adds the gradients of halos to those of the rows that they are copies of.
    fn return_halo(&self, backend: &B, rows: &B::Rows, d_halo: Halo<B::Buf>, d: &mut CcaIn<B::Buf>) -> Result<()>;

    /// Keys and values of whole sequences, in order.
    fn gather(&self, backend: &B, rows: &B::Rows, k: &B::Buf, v: &B::Buf) -> Result<(B::Buf, B::Buf)>;

    /// The way back: sums gradients of whole sequences over all ranks, and keeps the own rows.
    fn scatter(&self, backend: &B, rows: &B::Rows, dk: B::Buf, dv: B::Buf) -> Result<(B::Buf, B::Buf)>;
}

/// Rows that came from other ranks to the own experts, and what their backward needs.
pub struct Exchanged<B: Backend> {
    /// All of them together, or those of each member of the expert group apart.
    pub parts: Vec<Arrived<B>>,
    /// Rows of the expert group that go from member i to member j: `counts[i * size + j]`.
    pub counts: Vec<usize>,
}

/// Rows that go through the experts together.
pub struct Arrived<B: Backend> {
    pub h: B::Buf,
    pub routing: B::Routing,
    pub saved: B::ExpertSaved,
}

/// Ranks that hold the other experts (expert parallelism).
pub trait ExpertPeers<B: Backend> {
    /// Experts of every block that are here.
    fn local(&self) -> Range<usize>;

    /// As `Backend::expert_ffn`; `experts`: the local ones.
    fn forward(
        &self,
        backend: &B,
        rows: &B::Rows,
        h: &B::Buf,
        routing: &B::Routing,
        experts: &[B::Buf],
        skip: SkipMode,
    ) -> Result<(B::Buf, Exchanged<B>)>;

    /// As `Backend::expert_ffn_backward`. `first`: table entry of the first local expert.
    #[allow(clippy::too_many_arguments)]
    fn backward(
        &self,
        backend: &B,
        h: &B::Buf,
        routing: &B::Routing,
        experts: &[B::Buf],
        skip: SkipMode,
        saved: &Exchanged<B>,
        dy: &B::Buf,
        first: ParamId,
        grads: &mut ParamStore<B>,
    ) -> Result<(B::Buf, B::Buf)>;
}

/// Parts of a pass, in the order they come: who waits for weights or for gradients acts between them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// The embedding is about to be read.
    Enter,
    /// The forward of a block is about to begin.
    Forward(usize),
    /// The final norm and the head.
    Head,
    /// The gradients of a block are complete, its first norm's apart, which are complete one stage later.
    Backward(usize),
    /// All gradients are complete.
    Complete,
}

/// Is told of every stage.
pub trait Stages<B: Backend> {
    fn reach(&self, stage: Stage, params: &ParamStore<B>, grads: Option<&ParamStore<B>>) -> Result<()>;
}
