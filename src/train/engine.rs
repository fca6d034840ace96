//! Who computes loss and gradients: the hand-written model on a backend, or the candle reference on its autograd.

use anyhow::Result;

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
    ) -> Result<MicroBatch>;

    /// Loss alone.
    fn loss(&self, params: &ParamStore<Self::B>, batch: &Batch) -> Result<Loss>;
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
    ) -> Result<MicroBatch> {
        let rows = self.backend.rows(batch)?;
        Ok(self.model.forward_backward(&Cx::new(&self.backend, params, &rows), grads, grad_scale)?.0)
    }

    fn loss(&self, params: &ParamStore<B>, batch: &Batch) -> Result<Loss> {
        let rows = self.backend.rows(batch)?;
        self.model.loss(&Cx::new(&self.backend, params, &rows))
    }
}
