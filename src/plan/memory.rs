//! Memory that training takes on one process, part by part.

use anyhow::Result;

use crate::model::params::{OptimKind, ParamTable};
use crate::recipe::Recipe;
use crate::train::backend::Step;
use crate::train::config::optimizer_config;

#[derive(Debug, Clone, PartialEq)]
pub struct MemoryPart {
    pub name: &'static str,
    pub bytes: u64,
}

const F32: u64 = 4;

/// Parts of the peak of the CPU backend on the current pool's threads. They are exact; what else a process takes (the program,
/// data loading, a checkpoint being written) comes to some tens of megabytes.
pub fn parts(recipe: &Recipe, table: &ParamTable) -> Result<Vec<MemoryPart>> {
    let of_kind = |kind: OptimKind| -> u64 { table.specs.iter().filter(|s| s.optim == kind).map(|s| s.numel() as u64).sum() };
    let (muon, adamw, balance) = (of_kind(OptimKind::Muon), of_kind(OptimKind::AdamW), of_kind(OptimKind::Balance));
    let numbers = muon + adamw + balance;
    let step = Step::of(recipe);
    let working = step.working_bytes(&recipe.model, &optimizer_config(recipe))?;
    Ok(vec![
        MemoryPart { name: "weights (f32)", bytes: numbers * F32 },
        MemoryPart { name: "weights packed for products", bytes: step.packed_bytes(table) as u64 },
        MemoryPart { name: "gradients (f32)", bytes: numbers * F32 },
        MemoryPart { name: "optimizer state (f32)", bytes: (muon + 2 * adamw + 2 * balance) * F32 },
        MemoryPart { name: "working memory of a step", bytes: working as u64 },
    ])
}
