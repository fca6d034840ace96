//! Who computes loss and gradients: the hand-written model on a backend, or the candle reference on its autograd.

use anyhow::Result;

use crate::model::peers::Peers;
use crate::model::{Cx, Model, ParamStore, stack::MicroBatch};
use crate::tensor::backend::{Backend, Batch, Loss};

/// Loss and gradients of micro-batches. Weights, gradients and the optimizer live on `Self::B` whoever computes.
pub trait Engine {
    type B: Backend;

    fn backend(&self) -> &Self::B;

    /// Adds the gradient of `grad_scale * sum of losses` to `grads`.
    fn forward_backward(
        &self,
        params: &ParamStore<Self::B>,
        grads: &mut ParamStore<Self::B>,
        batch: &Batch,
        grad_scale: f32,
        peers: Peers<'_, Self::B>,
    ) -> Result<MicroBatch>;

    /// Loss alone.
    fn loss(&self, params: &ParamStore<Self::B>, batch: &Batch, peers: Peers<'_, Self::B>) -> Result<Loss>;
}

/// The model with hand-written backward.
pub struct Native<B: Backend> {
    pub backend: B,
    pub model: Model,
}

impl<B: Backend> Engine for Native<B> {
    type B = B;

    fn backend(&self) -> &B {
        &self.backend
    }

    fn forward_backward(
        &self,
        params: &ParamStore<B>,
        grads: &mut ParamStore<B>,
        batch: &Batch,
        grad_scale: f32,
        peers: Peers<'_, B>,
    ) -> Result<MicroBatch> {
        let rows = self.backend.rows(batch)?;
        let cx = Cx { peers, ..Cx::new(&self.backend, params, &rows) };
        Ok(self.model.forward_backward(&cx, grads, grad_scale)?.0)
    }

    fn loss(&self, params: &ParamStore<B>, batch: &Batch, peers: Peers<'_, B>) -> Result<Loss> {
        let rows = self.backend.rows(batch)?;
        self.model.loss(&Cx { peers, ..Cx::new(&self.backend, params, &rows) })
    }
}
