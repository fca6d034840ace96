//! The CPU backend of a run, and the working memory that a step of it takes.

use std::sync::Arc;

use anyhow::{Context as _, Result, bail};
use memmap2::MmapMut;

use super::engine::{Engine, Native};
use crate::error::bad_input;
use crate::model::params::{OptimKind, ParamTable};
use crate::model::peers::{ContextPeers, ExpertPeers, Peers};
use crate::model::{Model, ModelConfig, ParamStore};
use crate::optim::update::{OptimizerConfig, OptimizerState};
use crate::parallel::context::Context;
use crate::parallel::experts::Experts;
use crate::parallel::{Cutting, Layout, Mesh, Ownership, zero};
use crate::plan::memory;
use crate::recipe::{Precision, Recipe, Recompute};
use crate::tensor::backend::{Backend, Batch};
use crate::tensor::cpu::{Cpu, Packing};

/// A run's model on a backend that has taken the working memory of a step from the system. `sharing`: as in [`Step`].
pub fn native(recipe: &Recipe, sharing: Option<(Layout, Cutting)>) -> Result<Native<Cpu>> {
    let (step, parts) = memory::parts(recipe, &ParamTable::new(&recipe.model), sharing)?;
    reserved(recipe, step.packing, memory::working_bytes(&parts)?)
}

/// A run's model on a backend that has taken `working_bytes` from the system.
fn reserved(recipe: &Recipe, packing: Packing, working_bytes: usize) -> Result<Native<Cpu>> {
    let train = &recipe.train;
    let backend = Cpu::with_head(train.precision, train.head_precision).with_packing(packing);
    backend.reserve(working_bytes)?;
    Ok(Native { backend, model: Model::new(recipe.model.clone()).with_recompute(train.recompute) })
}

/// The matrix units that the kernels are written for work on bf16 numbers.
pub fn require_bf16(precision: Precision) -> Result<()> {
    match precision {
        Precision::Bf16 => Ok(()),
        Precision::F32 => Err(bad_input("--backend hip computes products in bfloat16: set train.precision = \"bf16\"")),
    }
}

/// What a process takes beside the planned parts: data, threads, a tensor on its way into a checkpoint.
const PROCESS_BYTES: usize = 48 << 20;

/// A run that fits into memory.
pub struct Fitted<B: Backend> {
    pub engine: Native<B>,
    /// As given, but for a smaller micro-batch where that was needed.
    pub recipe: Recipe,
    /// The recipe's micro-batch, where it is no longer that.
    pub reduced_from: Option<usize>,
}

/// As `native`, with the micro-batch halved until a step fits into `train.memory_limit_mib` and into what the system gives. `agree`:
/// whether it fits on all ranks, given whether it fits here.
pub fn fitting(recipe: &Recipe, sharing: Option<(Layout, Cutting)>, agree: impl Fn(bool) -> Result<bool>) -> Result<Fitted<Cpu>> {
    Halving { recipe, what: "memory" }.until_it_fits(agree, |recipe| try_fit(recipe, sharing))
}

/// The search for a micro-batch that fits.
pub(super) struct Halving<'a> {
    pub recipe: &'a Recipe,
    /// What it is to fit into, in words.
    pub what: &'a str,
}

impl Halving<'_> {
    /// `try_fit`: an engine that has taken the memory of a step of the recipe. `agree` as in [`fitting`].
    pub fn until_it_fits<B: Backend>(
        &self,
        agree: impl Fn(bool) -> Result<bool>,
        try_fit: impl Fn(&Recipe) -> Result<Native<B>>,
    ) -> Result<Fitted<B>> {
        let mut recipe = self.recipe.clone();
        let asked = recipe.train.micro_batch;
        loop {
            let tried = try_fit(&recipe);
            let fits = agree(tried.is_ok())?;
            match tried {
                Ok(engine) if fits => {
                    let micro = recipe.train.micro_batch;
                    let reduced_from = (micro != asked).then_some(asked);
                    if reduced_from.is_some() {
                        tell!(
                            "note: the micro-batch is {micro} sequences in place of {asked}, so that a step fits into {}; the global \
                             batch stays at {} tokens",
                            self.what,
                            recipe.train.global_batch_tokens
                        );
                    }
                    return Ok(Fitted { engine, recipe, reduced_from });
                }
                // Smaller ones would change nothing.
                Err(e) if recipe.train.sequences_at_once() == 1 => return Err(e),
                // No room on another rank, which will say so.
                Ok(_) if recipe.train.sequences_at_once() == 1 => {
                    bail!("another rank has no room in {} for a micro-batch of one sequence", self.what)
                }
                _ => recipe.train.micro_batch /= 2,
            }
        }
    }
}

/// A recipe as it is, if it fits.
fn try_fit(recipe: &Recipe, sharing: Option<(Layout, Cutting)>) -> Result<Native<Cpu>> {
    let (step, parts) = memory::parts(recipe, &ParamTable::new(&recipe.model), sharing)?;
    let (all, working) = (parts.iter().map(|p| p.bytes).sum::<u64>(), memory::working_bytes(&parts)?);
    refuse_above_limit(recipe, all)?;
    let engine = reserved(recipe, step.packing, working)?;
    refuse_without_room(recipe, all - working as u64)?;
    Ok(engine)
}

/// Whether the system gives what a run takes beside the working memory of a step, which is taken already. Weights and the like are
/// taken piece by piece later, where a refusal would end the process.
fn refuse_without_room(recipe: &Recipe, rest: u64) -> Result<()> {
    let bytes = usize::try_from(rest)?.saturating_add(PROCESS_BYTES);
    MmapMut::map_anon(bytes).map(drop).with_context(|| {
        format!(
            "asking the system for {} MiB for weights, gradients and optimizer state, beside the working memory of micro-batches of {}",
            bytes >> 20,
            recipe.train.sequences_at_once()
        )
    })
}

fn refuse_above_limit(recipe: &Recipe, bytes: u64) -> Result<()> {
    let Some(limit) = recipe.train.memory_limit_mib else { return Ok(()) };
    let needed = bytes.div_ceil(1 << 20);
    if needed > limit {
        return Err(bad_input(format!(
            "train.memory_limit_mib is {limit}, but a step needs {needed} MiB even with a micro-batch of {}. Set train.recompute = \"all\", \
             share the work among more ranks, or raise the limit (--dry-run lists what takes it)",
            recipe.train.sequences_at_once()
        )));
    }
    Ok(())
}

/// What decides the working memory of a step, beside the model and the number of threads.
#[derive(Debug, Clone, Copy)]
pub struct Step {
    pub micro_batch: usize,
    pub seq_len: usize,
    pub precision: Precision,
    pub head_precision: Precision,
    pub recompute: Recompute,
    pub packing: Packing,
    /// How several ranks share the work; None = one does it all.
    pub sharing: Option<(Layout, Cutting)>,
}

impl Step {
    pub fn of(r: &Recipe, sharing: Option<(Layout, Cutting)>) -> Self {
        let t = &r.train;
        let micro_batches = match sharing {
            None => t.micro_batches_per_step() as usize,
            Some((layout, _)) => layout.micro_batches(0, t.sequences_per_step() as usize, t.sequences_at_once()).len(),
        };
        Self {
            micro_batch: t.sequences_at_once(),
            seq_len: t.seq_len,
            precision: t.precision,
            head_precision: t.head_precision,
            recompute: t.recompute,
            // Copies are kept where a step uses them more than once.
            packing: if micro_batches > 1 { Packing::Kept } else { Packing::EachUse },
            sharing,
        }
    }

    /// Bytes that a step works in beside weights, gradients and optimizer state: forward, backward and update are run on a
    /// backend without memory. Depends on the number of threads of the current pool. Of several ranks, the first one's, when the
    /// routers send as many tokens to each of them.
    pub fn working_bytes(&self, model: &ModelConfig, optimizer: &OptimizerConfig) -> Result<usize> {
        let backend = Cpu::planning(self.precision, self.head_precision).with_packing(self.packing);
        let cpu = backend.clone();
        let engine = Native { backend, model: Model::new(model.clone()).with_recompute(self.recompute) };
        let table = ParamTable::new(model);
        let own = self.ownership(&table, model.num_experts);
        let holds = |id| own.holds(id);
        let (mut params, mut grads) = (ParamStore::zeros_of(&cpu, &table, holds)?, ParamStore::zeros_of(&cpu, &table, holds)?);
        let tokens = self.micro_batch * self.seq_len;
        let (ids, labels) = (vec![0; tokens], vec![0; tokens]);
        let batch = Batch { batch: self.micro_batch, seq: self.seq_len, ids, labels, ..Batch::default() };
        match self.sharing {
            None => engine.forward_backward(&params, &mut grads, &batch, 1.0, Peers::none())?,
            Some((layout, cutting)) => {
                let mesh = Arc::new(Mesh::planned(layout));
                let (context, experts) = (Context::new(mesh.clone(), cutting), Experts::new(mesh, model.num_experts));
                let peers = Peers {
                    context: (layout.cp > 1).then_some(&context as &dyn ContextPeers<Cpu>),
                    experts: (layout.ep > 1).then_some(&experts as &dyn ExpertPeers<Cpu>),
                    stages: None,
                };
                let part = if layout.cp > 1 { cutting.cut(&batch, 0)? } else { batch };
                engine.forward_backward(&params, &mut grads, &part, 1.0, peers)?
            }
        };
        let mut state = OptimizerState::zeros(&cpu, &table, &own)?;
        let scales = vec![1.0; table.specs.len()];
        state.update(&cpu, &table, &mut params, &grads, &own, optimizer, 1.0, &scales, false)?;
        Ok(cpu.arena_use().peak)
    }

    /// What the first rank holds and updates.
    pub fn ownership(&self, table: &ParamTable, num_experts: usize) -> Ownership {
        match self.sharing {
            None => Ownership::whole(table),
            Some((layout, _)) => zero::plan(table, layout, num_experts, 0, usize::MAX).1,
        }
    }

    /// Bytes of the packed copies of the weights, where they are kept.
    pub fn packed_bytes(&self, table: &ParamTable, own: &Ownership) -> usize {
        let cpu = Cpu::planning(self.precision, self.head_precision);
        let held = table.specs.iter().enumerate().filter(|(id, s)| s.optim == OptimKind::Muon && own.holds(*id));
        let maps = held.map(|(_, s)| s.matrix_shape());
        let [rows, cols] = table.specs[table.embed].matrix_shape();
        maps.map(|[rows, cols]| cpu.pack_bytes(rows, cols)).sum::<usize>() + cpu.head_pack_bytes(rows, cols)
    }
}
