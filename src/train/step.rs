//! One optimizer step: gradients of a global batch, clipping, Muon and AdamW, expert balancing.

use anyhow::{Result, bail};

use super::engine::Engine;
use super::state::TrainState;
use crate::failpoint;
use crate::optim::update::{OptimizerConfig, clip_factor, grad_norm};
use crate::tensor::backend::{Batch, Loss};
use crate::tensor::trace;

/// Name of the part of a step that computes its gradients, in a recording.
pub const FORWARD_BACKWARD: &str = "forward and backward";

/// What does not change from step to step.
#[derive(Debug, Clone)]
pub struct StepConfig {
    pub optimizer: OptimizerConfig,
    /// The routers' weights stay as they are until this many tokens were seen. Balancing goes on.
    pub router_freeze_tokens: u64,
}

/// What a step tells.
#[derive(Debug, Clone)]
pub struct StepReport {
    /// Summed over the global batch.
    pub loss: Loss,
    /// Before clipping.
    pub grad_norm: f64,
    pub lr: f64,
    /// Real tokens per router class (experts, then skip), for each block, over the global batch.
    pub expert_counts: Vec<Vec<u64>>,
    pub tokens: u64,
    /// False when no token of the batch had a label: nothing was changed but the step's number.
    pub updated: bool,
}

impl StepReport {
    /// Mean loss per token, nats. 0 for a batch without labels.
    pub fn mean_loss(&self) -> f64 {
        if self.loss.count == 0 { 0.0 } else { self.loss.sum / self.loss.count as f64 }
    }
}

/// Runs one step on the micro-batches of a global batch. Gradients are sums over all tokens with one division by the
/// number of labels, so the way the batch is cut does not enter the mathematics. None when `interrupted` said so between
/// two micro-batches: then nothing has changed.
pub fn step<E: Engine>(
    engine: &E,
    state: &mut TrainState<E::B>,
    cfg: &StepConfig,
    micro_batches: &[Batch],
    lr: f64,
    interrupted: &dyn Fn() -> bool,
) -> Result<Option<StepReport>> {
    let backend = engine.backend();
    let labels: u64 = micro_batches.iter().map(Batch::num_labels).sum();
    let tokens: u64 = micro_batches.iter().map(|b| b.tokens() as u64).sum();
    let grad_scale = if labels == 0 { 0.0 } else { (1.0 / labels as f64) as f32 };
    let gradients = trace::phase(FORWARD_BACKWARD);
    state.grads.clear(backend)?;
    let mut loss = Loss::default();
    let mut expert_counts: Vec<Vec<u64>> = Vec::new();
    for batch in micro_batches {
        if interrupted() {
            return Ok(None);
        }
        failpoint::hit("micro_batch")?;
        let result = engine.forward_backward(&state.params, &mut state.grads, batch, grad_scale)?;
        loss.sum += result.loss.sum;
        loss.count += result.loss.count;
        if expert_counts.is_empty() {
            expert_counts = result.expert_counts;
        } else {
            for (total, new) in expert_counts.iter_mut().flatten().zip(result.expert_counts.iter().flatten()) {
                *total += new;
            }
        }
    }
    drop(gradients);
    let router_frozen = state.tokens_seen < cfg.router_freeze_tokens;
    let norm = grad_norm(backend, &state.table, &state.grads, router_frozen)?;
    if !loss.sum.is_finite() || !norm.is_finite() {
        bail!(
            "step {}: the loss ({}) or the gradient norm ({norm}) is not a finite number; nothing of this step was applied. \
             Resume from the last checkpoint with a lower learning rate, or look at the data of this step",
            state.step + 1,
            loss.sum
        );
    }
    let updated = labels > 0;
    if updated {
        state.optimizer.update(
            backend,
            &state.table,
            &mut state.params,
            &state.grads,
            &cfg.optimizer,
            lr,
            clip_factor(norm, cfg.optimizer.clip),
            router_frozen,
        )?;
        state.balance(backend, &expert_counts)?;
    }
    state.step += 1;
    state.tokens_seen += tokens;
    Ok(Some(StepReport { loss, grad_norm: norm, lr, expert_counts, tokens, updated }))
}
