//! The HIP backend of a run, with the device memory that a step of it takes.

use anyhow::{Context as _, Result};

use super::backend::{Fitted, Halving, Step, require_bf16};
use super::config::optimizer_config;
use super::engine::{Engine, Native};
use crate::error::bad_input;
use crate::model::params::ParamTable;
use crate::model::peers::{ContextPeers, Peers};
use crate::model::stack::MicroBatch;
use crate::model::{Model, ModelConfig, ParamStore};
use crate::optim::update::{OptimizerConfig, OptimizerState};
use crate::parallel::rccl::DeviceContext;
use crate::parallel::{Cutting, Layout, Ownership};
use crate::recipe::Recipe;
use crate::tensor::backend::{Batch, Loss};
use crate::tensor::hip::Hip;
use crate::tensor::trace;

/// Beside what was planned: the workspace that hipBLASLt's products may ask for (64 MiB at most, of which the plan has what our own kernels
/// take in its place), tables whose contents are only known when a step runs, and gaps where a run goes another way than the plan (a
/// validation before the first step).
const SLACK_BYTES: usize = 80 << 20;
/// Memory of a device that is left to the libraries: hipBLASLt's and RCCL's buffers, code.
const LIBRARIES_BYTES: usize = 64 << 20;

/// Device memory of a step, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DevicePlan {
    /// Weights, gradients and optimizer state.
    pub held: usize,
    /// What the first steps leave behind: bf16 copies of weights, tables.
    pub kept: usize,
    /// What is used and given back, gaps between blocks included.
    pub working: usize,
    /// Buckets of gradients and weights on their way between ranks.
    pub buckets: usize,
}

impl DevicePlan {
    pub fn total(&self) -> usize {
        self.held + self.kept + self.working + self.buckets
    }

    /// What a run takes from the device at its start.
    pub fn reserved(&self) -> usize {
        self.total() + SLACK_BYTES
    }
}

/// What steps take, told by two of them on a backend without memory, by the code that trains. Of several ranks, the first one's share of
/// weights and optimizer. Where ranks share the experts, the work is that of the rank's own ones when the routers send as many tokens to
/// each rank.
pub fn plan(step: &Step, model: &ModelConfig, optimizer: &OptimizerConfig) -> Result<DevicePlan> {
    let table = ParamTable::new(model);
    let own = step.ownership(&table, model.num_experts);
    let holds = |id| own.holds(id);
    let buckets = match step.sharing {
        Some(_) => table.specs.iter().enumerate().filter(|(id, _)| holds(*id)).map(|(_, spec)| 4 * spec.numel()).sum(),
        None => 0,
    };
    let ep = step.sharing.map_or(1, |(layout, _)| layout.ep);
    if ep == 1 {
        return Ok(DevicePlan { buckets, ..steps(step, model, optimizer, &own)? });
    }
    let hip = Hip::planning();
    let _shared = (
        ParamStore::zeros_of(&hip, &table, holds)?,
        ParamStore::zeros_of(&hip, &table, holds)?,
        OptimizerState::zeros(&hip, &table, &own)?,
    );
    let held = hip.arena_use().used;
    let local = ModelConfig { num_experts: model.num_experts.div_ceil(ep), ..model.clone() };
    Ok(DevicePlan { held, buckets, ..steps(step, &local, optimizer, &Ownership::whole(&ParamTable::new(&local)))? })
}

/// Of a rank that owns and computes as `own` says.
fn steps(step: &Step, model: &ModelConfig, optimizer: &OptimizerConfig, own: &Ownership) -> Result<DevicePlan> {
    let hip = Hip::planning();
    let engine = Native { backend: hip.clone(), model: Model::new(model.clone()).with_recompute(step.recompute) };
    let table = ParamTable::new(model);
    let holds = |id| own.holds(id);
    let (mut params, mut grads) = (ParamStore::zeros_of(&hip, &table, holds)?, ParamStore::zeros_of(&hip, &table, holds)?);
    let mut state = OptimizerState::zeros(&hip, &table, own)?;
    let held = hip.arena_use().used;
    let tokens = step.micro_batch * step.seq_len;
    let (ids, labels) = (vec![0; tokens], vec![0; tokens]);
    let mut batch = Batch { batch: step.micro_batch, seq: step.seq_len, ids, labels, ..Batch::default() };
    let context = match step.sharing {
        Some((layout, cutting)) if layout.cp > 1 => {
            batch = cutting.cut(&batch, 0)?;
            Some(DeviceContext::planned(cutting))
        }
        _ => None,
    };
    let peers = Peers { context: context.as_ref().map(|c| c as &dyn ContextPeers<Hip>), ..Peers::none() };
    let scales = vec![1.0; table.specs.len()];
    for _ in 0..2 {
        engine.forward_backward(&params, &mut grads, &batch, 1.0, peers)?;
        state.update(&hip, &table, &mut params, &grads, own, optimizer, 1.0, &scales, false)?;
    }
    let after = hip.arena_use();
    Ok(DevicePlan { held, kept: after.used - held, working: after.peak - after.used, buckets: 0 })
}

/// A run's model on the GPU of this rank, whose memory for a step is taken already: with the micro-batch halved until a step fits into
/// the device and `train.memory_limit_mib`. `agree`: whether it fits on all ranks, given whether it fits here.
///
/// # Errors
/// When there is no GPU, the recipe asks for what the backend does not do, or not even one sequence fits.
pub fn fitting(
    recipe: &Recipe,
    local_rank: usize,
    sharing: Option<(Layout, Cutting)>,
    agree: impl Fn(bool) -> Result<bool>,
) -> Result<Fitted<Hip>> {
    require_bf16(recipe.train.precision)?;
    let backend = Hip::open(local_rank)?;
    Halving { recipe, what: "the GPU's memory" }.until_it_fits(agree, |recipe| {
        let step = Step::of(recipe, sharing);
        let plan = plan(&step, &recipe.model, &optimizer_config(recipe))?;
        refuse_above_limit(recipe, &plan)?;
        backend.reserve(plan.reserved()).with_context(|| too_little(&backend, recipe, &plan))?;
        Ok(Native { backend: backend.clone(), model: Model::new(recipe.model.clone()).with_recompute(recipe.train.recompute) })
    })
}

/// The model on a GPU, whose launches of a micro-batch are repeated as graphs where micro-batches are alike.
pub struct Repeating {
    native: Native<Hip>,
    graphs: bool,
}

impl Repeating {
    /// `graphs`: whether launches are repeated at all.
    pub fn new(native: Native<Hip>, graphs: bool) -> Self {
        Self { native, graphs }
    }

    /// Other ranks' numbers come in between launches, and a recording times each of them.
    fn can_repeat(&self, peers: &Peers<'_, Hip>) -> bool {
        self.graphs && peers.context.is_none() && peers.experts.is_none() && peers.stages.is_none() && !trace::is_on()
    }
}

impl Engine for Repeating {
    type B = Hip;

    fn backend(&self) -> &Hip {
        &self.native.backend
    }

    fn forward_backward(
        &self,
        params: &ParamStore<Hip>,
        grads: &mut ParamStore<Hip>,
        batch: &Batch,
        grad_scale: f32,
        peers: Peers<'_, Hip>,
    ) -> Result<MicroBatch> {
        let native = &self.native;
        match self.can_repeat(&peers) {
            true => native.backend.repeat(|| native.forward_backward(params, grads, batch, grad_scale, Peers::none())),
            false => native.forward_backward(params, grads, batch, grad_scale, peers),
        }
    }

    fn loss(&self, params: &ParamStore<Hip>, batch: &Batch, peers: Peers<'_, Hip>) -> Result<Loss> {
        match self.can_repeat(&peers) {
            true => self.native.backend.repeat(|| self.native.loss(params, batch, Peers::none())),
            false => self.native.loss(params, batch, peers),
        }
    }

    fn top1(&self, params: &ParamStore<Hip>, batch: &Batch, peers: Peers<'_, Hip>) -> Result<Option<u64>> {
        self.native.top1(params, batch, peers)
    }
}

fn mib(bytes: usize) -> usize {
    bytes.div_ceil(1 << 20)
}

fn too_little(backend: &Hip, recipe: &Recipe, plan: &DevicePlan) -> String {
    let micro = recipe.train.sequences_at_once();
    let free = backend.free_bytes().map_or_else(|_| "it did not say how much".into(), |free| format!("{} MiB", mib(free)));
    format!(
        "a step with a micro-batch of {micro} takes {} MiB of the GPU's memory ({} MiB of weights, gradients and optimizer state, {} MiB \
         of bf16 copies, {} MiB of working memory and of buckets between ranks), of which {free} are free. Set train.recompute = \"all\" or a shorter train.seq_len, \
         end what else uses the GPU, or share the work among more ranks (--dry-run --backend hip lists what takes it)",
        mib(plan.reserved()),
        mib(plan.held),
        mib(plan.kept),
        mib(plan.working + plan.buckets),
    )
}

fn refuse_above_limit(recipe: &Recipe, plan: &DevicePlan) -> Result<()> {
    match recipe.train.memory_limit_mib {
        Some(limit) if mib(plan.reserved()) as u64 > limit => Err(bad_input(format!(
            "train.memory_limit_mib is {limit}, but a step needs {} MiB of the GPU's memory even with a micro-batch of {}. Set \
             train.recompute = \"all\", share the work among more ranks, or raise the limit (--dry-run --backend hip lists what takes it)",
            mib(plan.reserved()),
            recipe.train.sequences_at_once()
        ))),
        _ => Ok(()),
    }
}

/// Memory that a run could take of a GPU of this machine, in bytes: that of the first one. None where there is none.
pub fn available_bytes() -> Option<usize> {
    let library = hip_sys::Hip::open().ok().filter(|library| library.device_count().is_ok_and(|n| n > 0))?;
    library.set_device(0).ok()?;
    Some(library.memory_info().ok()?.free_bytes.saturating_sub(LIBRARIES_BYTES))
}
