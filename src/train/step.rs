//! One optimizer step: gradients of a global batch, clipping, Muon and AdamW, expert balancing.

use anyhow::{Result, bail};

use super::engine::Engine;
use super::state::TrainState;
use super::stop::Votes;
use crate::failpoint::{self, NumberFault};
use crate::optim::update::{Clipping, OptimizerConfig, grad_squares};
use crate::parallel::{Group, Sharing};
use crate::tensor::backend::{Batch, Loss};
use crate::tensor::trace;

/// Name of the part of a step that computes its gradients, in a recording.
pub const FORWARD_BACKWARD: &str = "forward and backward";

/// Factor of the failpoint action `spike`.
const SPIKE: f32 = 1e4;

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

/// Who is asked while a step is on its way. The same on all ranks, but for the signals that each of them got.
pub struct Watch<'a> {
    /// Number of the global batch among all that the run has drawn, counted from 0.
    pub batch: u64,
    /// This rank's reasons to end the run before this step.
    pub votes: &'a dyn Fn() -> Votes,
    /// Whether this rank would give the step up between two micro-batches.
    pub interrupted: &'a dyn Fn() -> bool,
    /// Whether this rank takes the step for a long one: then all ranks agree between its micro-batches, too, on whether to give it up.
    pub long: bool,
    /// Whether finite numbers are good enough: mean loss, gradient norm. Of the whole batch, so that all ranks say the same.
    pub judge: &'a dyn Fn(f64, f64) -> Option<String>,
}

impl Watch<'_> {
    /// Nobody interferes.
    pub const NONE: Self = Self { batch: 0, votes: &Votes::default, interrupted: &|| false, long: false, judge: &|_, _| None };
}

/// What became of a step.
#[derive(Debug, Clone)]
pub enum Attempt {
    Done(StepReport),
    /// Some rank wants the run to end. Nothing has changed on any, nor with what follows.
    Stopped(Votes),
    /// Given up between two micro-batches.
    Interrupted,
    /// The numbers are not to be trusted.
    Refused(Refusal),
}

impl Attempt {
    /// The report of a step that nobody was to interfere with.
    ///
    /// # Errors
    /// When the step was not done.
    pub fn done(self) -> Result<StepReport> {
        match self {
            Self::Done(report) => Ok(report),
            Self::Refused(refusal) => bail!("the step was refused: {}", refusal.why),
            Self::Stopped(_) | Self::Interrupted => bail!("the step was interrupted"),
        }
    }
}

/// A batch whose gradient was not applied.
#[derive(Debug, Clone)]
pub struct Refusal {
    /// Whether loss and gradient were numbers at all.
    pub finite: bool,
    /// In words, numbers included.
    pub why: String,
    /// Mean per token, nats.
    pub loss: f64,
    pub grad_norm: f64,
}

/// What a step tells.
#[derive(Debug, Clone)]
pub struct StepReport {
    /// Summed over the global batch.
    pub loss: Loss,
    /// Before clipping.
    pub grad_norm: f64,
    /// Experts whose gradient was clipped by `expert_clip`.
    pub clipped_experts: usize,
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
        mean(self.loss)
    }
}

fn mean(loss: Loss) -> f64 {
    if loss.count == 0 { 0.0 } else { loss.sum / loss.count as f64 }
}

/// Runs one step on this rank's micro-batches of a global batch; every rank has as many, of whole sequences. Gradients are sums
/// over all tokens with one division by the number of labels, so the way the batch is cut does not enter the mathematics.
///
/// Ranks agree once, before the step, on whether it is made and on what it is divided by; the sums after the backward tell each of them
/// whether it is applied.
pub fn step<E: Engine>(
    engine: &E,
    state: &mut TrainState<E::B>,
    cfg: &StepConfig,
    sharing: &dyn Sharing<E::B>,
    micro_batches: &[Batch],
    lr: f64,
    watch: &Watch,
) -> Result<Attempt> {
    let backend = engine.backend();
    let world = sharing.mesh().map(|mesh| &mesh.world);
    let next = state.step + 1;
    sharing.at(next, "start");
    let (mut own_labels, mut own_tokens) = (0, 0);
    let mut batches = Vec::with_capacity(micro_batches.len());
    for batch in micro_batches {
        // The ranks of a context group hold the same sequences.
        own_tokens += if sharing.mesh().is_none_or(|mesh| mesh.context.index() == 0) { batch.tokens() as u64 } else { 0 };
        let part = sharing.cut(batch)?;
        own_labels += part.num_labels();
        batches.push(part);
    }
    let [a, b, c] = (watch.votes)().0;
    let mut start = [own_labels, own_tokens, u64::from(watch.long), a, b, c];
    if let Some(world) = world {
        world.all_reduce("counts of labels and tokens, reasons to stop", &mut start)?;
    }
    let [labels, tokens, long, a, b, c] = start;
    let votes = Votes([a, b, c]);
    if votes.any() {
        return Ok(Attempt::Stopped(votes));
    }
    let scale = if labels == 0 { 0.0 } else { (1.0 / labels as f64) as f32 };
    let gradients = trace::phase(FORWARD_BACKWARD);
    state.grads.clear(backend)?;
    let mut loss = Loss::default();
    // By sequence, where sums are taken so.
    let mut losses = vec![0.0; cfg.by_sequence.unwrap_or(0)];
    let (layout, rank) = sharing.place();
    let own_sequences = cfg.by_sequence.map(|sequences| layout.micro_batches(rank, sequences, 1));
    let mut expert_counts: Vec<Vec<u64>> = Vec::new();
    for (i, batch) in batches.iter().enumerate() {
        // One rank alone need not ask anybody.
        if i > 0 && (world.is_none() || long > 0) && agree(world, (watch.interrupted)())? {
            return Ok(Attempt::Interrupted);
        }
        failpoint::hit("micro_batch")?;
        let grad_scale = match failpoint::hit_number("gradient", watch.batch)? {
            NumberFault::None => scale,
            NumberFault::NaN => f32::NAN,
            NumberFault::Spike => scale * SPIKE,
        };
        let peers = if i + 1 == batches.len() { sharing.last_peers() } else { sharing.peers() };
        let mut result = engine.forward_backward(&state.params, &mut state.grads, batch, grad_scale, peers)?;
        match failpoint::hit_number("loss", watch.batch)? {
            NumberFault::None => {}
            NumberFault::NaN => result.loss.sum = f64::NAN,
            NumberFault::Spike => result.loss.sum *= f64::from(SPIKE),
        }
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
    sharing.reduced(backend, &mut state.grads)?;
    let router_frozen = state.tokens_seen < cfg.router_freeze_tokens;
    let mut squares = grad_squares(backend, &state.table, &state.grads, sharing.ownership(), router_frozen)?;
    if let Some(world) = world {
        share_results(
            world,
            "loss, counts and squares of gradients",
            &mut loss,
            &mut expert_counts,
            &mut [&mut losses, &mut squares],
        )?;
    }
    if cfg.by_sequence.is_some() {
        loss.sum = losses.iter().sum();
    }
    let clipping = Clipping::of(&state.table, &squares, router_frozen, &cfg.optimizer);
    let norm = clipping.norm;
    let finite = loss.sum.is_finite() && norm.is_finite();
    let why = match finite {
        false => Some(format!("the loss ({}) or the gradient norm ({norm}) is not a finite number", mean(loss))),
        true if labels == 0 => None,
        true => (watch.judge)(mean(loss), norm),
    };
    if let Some(why) = why {
        return Ok(Attempt::Refused(Refusal { finite, why, loss: mean(loss), grad_norm: norm }));
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
            &clipping.scales,
            router_frozen,
        )?;
        sharing.updated(&mut state.params)?;
        state.balance(backend, &expert_counts)?;
    }
    state.step = next;
    state.tokens_seen += tokens;
    let clipped_experts = clipping.clipped_experts;
    Ok(Attempt::Done(StepReport { loss, grad_norm: norm, clipped_experts, lr, expert_counts, tokens, updated }))
}

/// Whether any rank says yes.
pub fn agree(world: Option<&Group>, yes: bool) -> Result<bool> {
    let Some(world) = world else { return Ok(yes) };
    let mut count = [u64::from(yes)];
    world.all_reduce("agreement to go on", &mut count)?;
    Ok(count[0] > 0)
}

/// Adds up what all ranks counted, and further sums, in one operation. Counts are exact in f64 up to 2^53.
pub(super) fn share_results(
    world: &Group,
    name: &'static str,
    loss: &mut Loss,
    expert_counts: &mut [Vec<u64>],
    more: &mut [&mut [f64]],
) -> Result<()> {
    let mut sums = vec![loss.sum, loss.count as f64];
    sums.extend(expert_counts.iter().flatten().map(|count| *count as f64));
    more.iter().for_each(|more| sums.extend(more.iter()));
    world.all_reduce(name, &mut sums)?;
    *loss = Loss { sum: sums[0], count: sums[1] as u64 };
    let mut rest = sums.into_iter().skip(2);
    expert_counts.iter_mut().flatten().zip(&mut rest).for_each(|(to, sum)| *to = sum as u64);
    more.iter_mut().flat_map(|more| more.iter_mut()).zip(rest).for_each(|(to, sum)| *to = sum);
    Ok(())
}
