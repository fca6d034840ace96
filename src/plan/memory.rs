//! Memory that training takes on one process, part by part.

use anyhow::Result;

use crate::checkpoint::training_tensors;
use crate::model::params::{OptimKind, ParamTable};
use crate::parallel::{Cutting, Layout};
use crate::recipe::Recipe;
use crate::tensor::cpu::Packing;
use crate::train::backend::Step;
use crate::train::config::{balance_config, optimizer_config};
use crate::train::is_staged;
use crate::train::staging::Staging;

#[derive(Debug, Clone, PartialEq)]
pub struct MemoryPart {
    pub name: &'static str,
    pub bytes: u64,
}

/// Name of the part that is one region.
pub const WORKING: &str = "working memory of a step";

/// Bytes of that part.
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

fn parts_of(recipe: &Recipe, table: &ParamTable, step: Step) -> Result<Vec<MemoryPart>> {
    let own = step.ownership(table, recipe.model.num_experts);
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
    let working = step.working_bytes(&recipe.model, &optimizer_config(recipe))?;
    let mut parts = vec![
        MemoryPart { name: "weights (f32)", bytes: held * F32 },
        MemoryPart { name: "gradients (f32)", bytes: held * F32 },
        MemoryPart { name: "optimizer state (f32)", bytes: moments * F32 },
        MemoryPart { name: WORKING, bytes: working as u64 },
    ];
    if step.packing == Packing::Kept {
        parts.push(MemoryPart { name: "weights packed for products", bytes: step.packed_bytes(table, &own) as u64 });
    }
    if step.sharing.is_some() {
        parts.push(MemoryPart { name: "gradients and weights on their way", bytes: held * F32 });
    }
    if is_staged(recipe) {
        let tensors = training_tensors(table, &balance_config(recipe).rule);
        parts.push(MemoryPart { name: "checkpoint staging (f32)", bytes: Staging::bytes(&tensors) });
    }
    Ok(parts)
}
