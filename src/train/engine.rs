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

    /// Rows whose label is the most likely token. None where the engine does not tell.
    fn top1(&self, _: &ParamStore<Self::B>, _: &Batch, _: Peers<'_, Self::B>) -> Result<Option<u64>> {
        Ok(None)
    }
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

    fn top1(&self, params: &ParamStore<B>, batch: &Batch, peers: Peers<'_, B>) -> Result<Option<u64>> {
        let rows = self.backend.rows(batch)?;
        // Other ranks may need this one, whether or not it has labels.
        let hidden = self.model.hidden(&Cx { peers, ..Cx::new(&self.backend, params, &rows) })?;
        let labels: Vec<(usize, u32)> =
            batch.labels.iter().enumerate().filter_map(|(row, l)| Some((row, u32::try_from(*l).ok()?))).collect();
        if labels.is_empty() {
            return Ok(Some(0));
        }
        // Logits of these rows alone: those of whole sequences would not fit.
        let (values, width) = (self.backend.download(&hidden)?, self.model.config.hidden_size);
        let own: Vec<f32> = labels.iter().flat_map(|(row, _)| &values[row * width..(row + 1) * width]).copied().collect();
        let own = self.backend.upload(&own, labels.len(), width)?;
        let logits = self.backend.download(&self.backend.logits(&own, &params[self.model.table.embed])?)?;
        let likeliest = |row: &[f32]| (0..row.len()).max_by(|a, b| row[*a].total_cmp(&row[*b]));
        let rows = logits.chunks_exact(self.model.config.vocab_size);
        Ok(Some(rows.zip(&labels).filter(|(row, (_, label))| likeliest(row) == Some(*label as usize)).count() as u64))
    }
}
