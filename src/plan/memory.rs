//! Memory that training takes on one process, part by part.

use anyhow::Result;

use crate::checkpoint::training_tensors;
use crate::model::params::{OptimKind, ParamTable};
use crate::parallel::{Cutting, Layout, Ownership};
use crate::recipe::Recipe;
use crate::tensor::cpu::Packing;
use crate::train::backend::Step;
use crate::train::config::{balance_config, optimizer_config};
use crate::train::gpu;
use crate::train::is_staged;
use crate::train::staging::Staging;

#[derive(Debug, Clone, PartialEq)]
pub struct MemoryPart {
    pub name: &'static str,
    pub bytes: u64,
}

/// Name of the part that is one region.
pub const WORKING: &str = "working memory of a step";

/// Name of the part that several ranks need.
const ON_THEIR_WAY: &str = "gradients and weights on their way";

/// Name of the part that lies in the host's memory whatever computes.
pub const STAGING: &str = "checkpoint staging (f32)";
const WEIGHTS: &str = "weights (f32)";
const GRADIENTS: &str = "gradients (f32)";
const OPTIMIZER: &str = "optimizer state (f32)";

/// Bytes of the working memory.
pub fn working_bytes(parts: &[MemoryPart]) -> Result<usize> {
    Ok(usize::try_from(parts.iter().filter(|p| p.name == WORKING).map(|p| p.bytes).sum::<u64>())?)
}

const F32: u64 = 4;

/// Parts of the peak of the CPU backend on the current pool's threads; of several ranks, of the first one. They are exact; what else
/// a process takes (the program, data loading, a checkpoint being written) comes to some tens of megabytes.
///
/// Packed weights are not kept where that would take a step beyond `train.memory_limit_mib`: the step says.
pub fn parts(recipe: &Recipe, table: &ParamTable, sharing: Option<(Layout, Cutting)>) -> Result<(Step, Vec<MemoryPart>)> {
    let step = Step::of(recipe, sharing);
    let parts = parts_of(recipe, table, step)?;
    let too_much = |limit: u64| parts.iter().map(|p| p.bytes).sum::<u64>() > limit << 20;
    if step.packing == Packing::Kept && recipe.train.memory_limit_mib.is_some_and(too_much) {
        let step = Step { packing: Packing::EachUse, ..step };
        return Ok((step, parts_of(recipe, table, step)?));
    }
    Ok((step, parts))
}

/// Parts of a GPU's memory that a step takes: of what `train::gpu` takes at its start. Exact, but for what the libraries of the GPU take
/// for themselves.
pub fn device_parts(recipe: &Recipe, table: &ParamTable, sharing: Option<(Layout, Cutting)>) -> Result<Vec<MemoryPart>> {
    let step = Step::of(recipe, sharing);
    let plan = gpu::plan(&step, &recipe.model, &optimizer_config(recipe))?;
    let (held, moments) = numbers(table, &step.ownership(table, recipe.model.num_experts));
    let named = (2 * held + moments) * F32;
    let mut parts = vec![
        MemoryPart { name: WEIGHTS, bytes: held * F32 },
        MemoryPart { name: GRADIENTS, bytes: held * F32 },
        MemoryPart { name: OPTIMIZER, bytes: moments * F32 },
        MemoryPart { name: "bf16 copies of weights, tables", bytes: ((plan.held + plan.kept) as u64).saturating_sub(named) },
        MemoryPart { name: WORKING, bytes: plan.working as u64 },
        MemoryPart { name: "set aside for what is not planned", bytes: (plan.reserved() - plan.total()) as u64 },
    ];
    if plan.buckets > 0 {
        parts.push(MemoryPart { name: ON_THEIR_WAY, bytes: plan.buckets as u64 });
    }
    Ok(parts)
}

/// Numbers of the weights that a rank holds, and of the optimizer's state.
fn numbers(table: &ParamTable, own: &Ownership) -> (u64, u64) {
    let (mut held, mut moments) = (0, 0);
    for (id, spec) in table.specs.iter().enumerate() {
        let updated = (own.num_rows(id) * spec.matrix_shape()[1]) as u64;
        held += if own.holds(id) { spec.numel() as u64 } else { 0 };
        moments += match spec.optim {
            OptimKind::Muon => updated,
            OptimKind::AdamW => 2 * updated,
            OptimKind::Balance => 2 * spec.numel() as u64,
        };
    }
    (held, moments)
}

/// The checkpoint on its way from a step to the disk, in the host's memory; 0 where it is not copied.
pub fn staging_bytes(recipe: &Recipe, table: &ParamTable) -> u64 {
    if is_staged(recipe) { Staging::bytes(&training_tensors(table, &balance_config(recipe).rule)) } else { 0 }
}

fn parts_of(recipe: &Recipe, table: &ParamTable, step: Step) -> Result<Vec<MemoryPart>> {
    let own = step.ownership(table, recipe.model.num_experts);
    let (held, moments) = numbers(table, &own);
    let working = step.working_bytes(&recipe.model, &optimizer_config(recipe))?;
    let mut parts = vec![
        MemoryPart { name: WEIGHTS, bytes: held * F32 },
        MemoryPart { name: GRADIENTS, bytes: held * F32 },
        MemoryPart { name: OPTIMIZER, bytes: moments * F32 },
        MemoryPart { name: WORKING, bytes: working as u64 },
    ];
    if step.packing == Packing::Kept {
        parts.push(MemoryPart { name: "weights packed for products", bytes: step.packed_bytes(table, &own) as u64 });
    }
    if step.sharing.is_some() {
        parts.push(MemoryPart { name: ON_THEIR_WAY, bytes: held * F32 });
    }
    let staging = staging_bytes(recipe, table);
    if staging > 0 {
        parts.push(MemoryPart { name: STAGING, bytes: staging });
    }
    Ok(parts)
}
