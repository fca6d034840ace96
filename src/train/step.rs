//! One optimizer step: gradients of a global batch, clipping, Muon and AdamW, expert balancing.

use anyhow::{Result, bail};

use super::engine::Engine;
use super::state::TrainState;
use crate::failpoint;
use crate::optim::update::{OptimizerConfig, clip_factor, grad_norm};
use crate::parallel::{Group, Sharing};
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
    /// Sums of gradients are taken over a fixed tree of sequences, so that every layout without context parallelism gives the same
    /// bits: the sequences of a global batch. Micro-batches then hold one sequence each. None = as is fastest.
    pub by_sequence: Option<usize>,
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

/// Runs one step on this rank's micro-batches of a global batch; every rank has as many, of whole sequences. Gradients are sums
/// over all tokens with one division by the number of labels, so the way the batch is cut does not enter the mathematics. None when
/// `interrupted` said so on some rank between two micro-batches: then nothing has changed on any.
#[allow(clippy::too_many_arguments)]
pub fn step<E: Engine>(
    engine: &E,
    state: &mut TrainState<E::B>,
    cfg: &StepConfig,
    sharing: &dyn Sharing<E::B>,
    micro_batches: &[Batch],
    lr: f64,
    interrupted: &dyn Fn() -> bool,
) -> Result<Option<StepReport>> {
    let backend = engine.backend();
    let world = sharing.mesh().map(|mesh| &mesh.world);
    let next = state.step + 1;
    sharing.at(next, "start");
    let mut totals = [0, 0];
    let mut batches = Vec::with_capacity(micro_batches.len());
    for batch in micro_batches {
        // The ranks of a context group hold the same sequences.
        totals[1] += if sharing.mesh().is_none_or(|mesh| mesh.context.index() == 0) { batch.tokens() as u64 } else { 0 };
        let part = sharing.cut(batch)?;
        totals[0] += part.num_labels();
        batches.push(part);
    }
    if let Some(world) = world {
        world.all_reduce("counts of labels and tokens", &mut totals)?;
    }
    let [labels, tokens] = totals;
    let grad_scale = if labels == 0 { 0.0 } else { (1.0 / labels as f64) as f32 };
    let gradients = trace::phase(FORWARD_BACKWARD);
    state.grads.clear(backend)?;
    let mut loss = Loss::default();
    // By sequence, where sums are taken so.
    let mut losses = vec![0.0; cfg.by_sequence.unwrap_or(0)];
    let (layout, rank) = sharing.place();
    let own_sequences = cfg.by_sequence.map(|sequences| layout.micro_batches(rank, sequences, 1));
    let mut expert_counts: Vec<Vec<u64>> = Vec::new();
    for (i, batch) in batches.iter().enumerate() {
        // Of several ranks, reasons to stop have just been agreed on when a step begins.
        let asks = world.is_none() || i > 0;
        if asks && agree(world, interrupted())? {
            return Ok(None);
        }
        failpoint::hit("micro_batch")?;
        let peers = if i + 1 == batches.len() { sharing.last_peers() } else { sharing.peers() };
        let result = engine.forward_backward(&state.params, &mut state.grads, batch, grad_scale, peers)?;
        loss.sum += result.loss.sum;
        loss.count += result.loss.count;
        if let Some(own) = &own_sequences {
            let sequence = own.get(i).filter(|own| !own.is_empty()).map(|own| own.start);
            sequence.iter().for_each(|sequence| losses[*sequence] = result.loss.sum);
            sharing.leaf(backend, i, sequence, &mut state.grads)?;
        }
        if expert_counts.is_empty() {
            expert_counts = result.expert_counts;
        } else {
            for (total, new) in expert_counts.iter_mut().flatten().zip(result.expert_counts.iter().flatten()) {
                *total += new;
            }
        }
    }
    drop(gradients);
    sharing.at(next, "reduction");
    if let Some(world) = world {
        share_results(world, &mut loss, &mut expert_counts)?;
    }
    if cfg.by_sequence.is_some() {
        world.map_or(Ok(()), |world| world.all_reduce("losses of sequences", &mut losses))?;
        loss.sum = losses.iter().sum();
    }
    sharing.reduced(backend, &mut state.grads)?;
    let router_frozen = state.tokens_seen < cfg.router_freeze_tokens;
    let share = |sums: &mut [f64]| world.map_or(Ok(()), |world| world.all_reduce("squares of gradients", sums));
    let norm = grad_norm(backend, &state.table, &state.grads, sharing.ownership(), router_frozen, share)?;
    if !loss.sum.is_finite() || !norm.is_finite() {
        bail!(
            "step {}: the loss ({}) or the gradient norm ({norm}) is not a finite number; nothing of this step was applied. \
             Resume from the last checkpoint with a lower learning rate, or look at the data of this step",
            next,
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
            sharing.ownership(),
            &cfg.optimizer,
            lr,
            clip_factor(norm, cfg.optimizer.clip),
            router_frozen,
        )?;
        sharing.updated(&mut state.params)?;
        state.balance(backend, &expert_counts)?;
    }
    state.step = next;
    state.tokens_seen += tokens;
    Ok(Some(StepReport { loss, grad_norm: norm, lr, expert_counts, tokens, updated }))
}

/// Whether any rank says yes.
pub fn agree(world: Option<&Group>, yes: bool) -> Result<bool> {
    let Some(world) = world else { return Ok(yes) };
    let mut count = [u64::from(yes)];
    world.all_reduce("agreement to go on", &mut count)?;
    Ok(count[0] > 0)
}

/// Adds up what all ranks counted.
pub(super) fn share_results(world: &Group, loss: &mut Loss, expert_counts: &mut [Vec<u64>]) -> Result<()> {
    let mut sum = [loss.sum];
    world.all_reduce("sum of losses", &mut sum)?;
    let mut counts = vec![loss.count];
    counts.extend(expert_counts.iter().flatten());
    world.all_reduce("counts of losses and experts", &mut counts)?;
    *loss = Loss { sum: sum[0], count: counts[0] };
    expert_counts.iter_mut().flatten().zip(&counts[1..]).for_each(|(to, count)| *to = *count);
    Ok(())
}
