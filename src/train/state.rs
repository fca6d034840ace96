//! Everything that changes while training, and its names in a checkpoint.

use anyhow::Result;

use crate::model::params::{OptimKind, ParamId};
use crate::model::{ModelConfig, ParamStore, ParamTable};
use crate::optim::balance::{BalanceConfig, Balancer};
use crate::optim::update::OptimizerState;
use crate::tensor::Backend;

pub struct TrainState<B: Backend> {
    pub table: ParamTable,
    pub params: ParamStore<B>,
    pub grads: ParamStore<B>,
    pub optimizer: OptimizerState<B>,
    pub balancer: Balancer,
    /// Steps done.
    pub step: u64,
    pub tokens_seen: u64,
}

impl<B: Backend> TrainState<B> {
    /// At step 0, with weights from `values` (table order) and empty moments.
    pub fn new(
        backend: &B,
        cfg: &ModelConfig,
        balance: &BalanceConfig,
        values: impl FnMut(ParamId) -> Result<Vec<f32>>,
    ) -> Result<Self> {
        let table = ParamTable::new(cfg);
        Ok(Self {
            params: ParamStore::from_host(backend, &table, values)?,
            grads: ParamStore::zeros(backend, &table)?,
            optimizer: OptimizerState::zeros(backend, &table)?,
            balancer: Balancer::new(*balance, cfg.num_blocks(), cfg.num_experts),
            table,
            step: 0,
            tokens_seen: 0,
        })
    }

    /// Moves the balancing biases of every router by the global batch's expert counts.
    pub fn balance(&mut self, backend: &B, counts: &[Vec<u64>]) -> Result<()> {
        let ids: Vec<ParamId> = self.table.blocks.iter().map(|b| b.moe.balancing_biases).collect();
        let mut biases = ids.iter().map(|id| backend.download(&self.params[*id])).collect::<Result<Vec<_>>>()?;
        self.balancer.update(&mut biases, counts)?;
        for (id, biases) in ids.iter().zip(&biases) {
            self.params[*id] = backend.upload(biases, 1, biases.len())?;
        }
        Ok(())
    }

    /// Balancing biases of each block, the skip class last.
    pub fn balancing_biases(&self, backend: &B) -> Result<Vec<Vec<f32>>> {
        self.table.blocks.iter().map(|b| backend.download(&self.params[b.moe.balancing_biases])).collect()
    }

    /// Names and shapes of all state tensors, in the order of a checkpoint.
    pub fn entries(&self) -> Vec<StateEntry> {
        let mut out = Vec::new();
        for (id, spec) in self.table.specs.iter().enumerate() {
            let mut add = |name: String, part: Part| out.push(StateEntry { name, shape: spec.shape.clone(), id, part });
            add(spec.name.clone(), Part::Weight);
            match spec.optim {
                OptimKind::Balance => {
                    for (slot, name) in self.balancer.config().rule.slots().iter().enumerate() {
                        add(format!("opt/{}/{name}", spec.name), Part::Balancer { block: spec.block.unwrap_or(0), slot });
                    }
                }
                OptimKind::Muon | OptimKind::AdamW => {
                    for (slot, (name, _)) in self.optimizer.moments[id].named().iter().enumerate() {
                        add(format!("opt/{}/{name}", spec.name), Part::Moment { slot });
                    }
                }
            }
        }
        out
    }

    pub fn read(&self, backend: &B, entry: &StateEntry) -> Result<Vec<f32>> {
        match entry.part {
            Part::Weight => backend.download(&self.params[entry.id]),
            Part::Moment { slot } => backend.download(self.optimizer.moments[entry.id].named()[slot].1),
            Part::Balancer { block, slot } => Ok(self.balancer.slot(block, slot).to_vec()),
        }
    }

    pub fn write(&mut self, backend: &B, entry: &StateEntry, values: &[f32]) -> Result<()> {
        let [rows, cols] = self.table.specs[entry.id].matrix_shape();
        match entry.part {
            Part::Weight => self.params[entry.id] = backend.upload(values, rows, cols)?,
            Part::Moment { slot } => {
                let mut moments = self.optimizer.moments[entry.id].named_mut();
                *moments[slot].1 = backend.upload(values, rows, cols)?;
            }
            Part::Balancer { block, slot } => self.balancer.slot_mut(block, slot).copy_from_slice(values),
        }
        Ok(())
    }
}

/// One tensor of the state.
#[derive(Debug, Clone)]
pub struct StateEntry {
    /// `layers.0.attn.q` or `opt/layers.0.attn.q/mom`
    pub name: String,
    pub shape: Vec<usize>,
    id: ParamId,
    part: Part,
}

#[derive(Debug, Clone, Copy)]
enum Part {
    Weight,
    Moment { slot: usize },
    Balancer { block: usize, slot: usize },
}
