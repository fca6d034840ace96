//! The CPU backend of a run, and the working memory that a step of it takes.

use anyhow::Result;

use super::config::optimizer_config;
use super::engine::{Engine, Native};
use crate::model::params::{OptimKind, ParamTable};
use crate::model::{Model, ModelConfig, ParamStore};
use crate::optim::update::{OptimizerConfig, OptimizerState};
use crate::recipe::{Precision, Recipe, Recompute};
use crate::tensor::backend::Batch;
use crate::tensor::cpu::Cpu;

/// A run's model on a backend that has taken the working memory of a step from the system.
pub fn native(recipe: &Recipe) -> Result<Native<Cpu>> {
    let step = Step::of(recipe);
    let backend = Cpu::with_head(step.precision, step.head_precision);
    backend.reserve(step.working_bytes(&recipe.model, &optimizer_config(recipe))?)?;
    Ok(Native { backend, model: Model::new(recipe.model.clone()).with_recompute(step.recompute) })
}

/// What decides the working memory of a step, beside the model and the number of threads.
#[derive(Debug, Clone, Copy)]
pub struct Step {
    pub micro_batch: usize,
    pub seq_len: usize,
    pub precision: Precision,
    pub head_precision: Precision,
    pub recompute: Recompute,
}

impl Step {
    pub fn of(r: &Recipe) -> Self {
        let t = &r.train;
        Self {
            micro_batch: t.micro_batch,
            seq_len: t.seq_len,
            precision: t.precision,
            head_precision: t.head_precision,
            recompute: t.recompute,
        }
    }

    /// Bytes that a step works in beside weights, gradients and optimizer state: forward, backward and update are run on a
    /// backend without memory. Depends on the number of threads of the current pool.
    pub fn working_bytes(&self, model: &ModelConfig, optimizer: &OptimizerConfig) -> Result<usize> {
        let backend = Cpu::planning(self.precision, self.head_precision);
        let cpu = backend.clone();
        let engine = Native { backend, model: Model::new(model.clone()).with_recompute(self.recompute) };
        let table = ParamTable::new(model);
        let (mut params, mut grads) = (ParamStore::zeros(&cpu, &table)?, ParamStore::zeros(&cpu, &table)?);
        let tokens = self.micro_batch * self.seq_len;
        let (ids, labels) = (vec![0; tokens], vec![0; tokens]);
        let batch = Batch { batch: self.micro_batch, seq: self.seq_len, ids, labels, ..Batch::default() };
        engine.forward_backward(&params, &mut grads, &batch, 1.0)?;
        OptimizerState::zeros(&cpu, &table)?.update(&cpu, &table, &mut params, &grads, optimizer, 1.0, 1.0, false)?;
        Ok(cpu.arena_use().peak)
    }

    /// Bytes of the packed copies of the weights that products keep.
    pub fn packed_bytes(&self, table: &ParamTable) -> usize {
        let cpu = Cpu::planning(self.precision, self.head_precision);
        let maps = table.specs.iter().filter(|s| s.optim == OptimKind::Muon).map(|s| s.matrix_shape());
        let [rows, cols] = table.specs[table.embed].matrix_shape();
        maps.map(|[rows, cols]| cpu.pack_bytes(rows, cols)).sum::<usize>() + cpu.head_pack_bytes(rows, cols)
    }
}
