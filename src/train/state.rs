//! Everything that changes while training, tensor by tensor as a checkpoint names it.

use anyhow::{Context, Result};

use crate::checkpoint::{self, Checkpoint, Meta, TensorInfo};
use crate::model::params::ParamId;
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

/// Names of the counters in a checkpoint.
const UPDATES: &str = "optimizer.updates";
const ROUTER_UPDATES: &str = "optimizer.router_updates";
const BALANCE_UPDATES: &str = "balance.updates";

/// Which part of the state a tensor of a checkpoint is.
enum Part<'a> {
    Weight,
    Optimizer { slot: &'a str },
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
        let params = ParamStore::from_host(backend, &table, values)?;
        let biases = table.blocks.iter().map(|b| backend.download(&params[b.moe.balancing_biases]));
        let balancer = Balancer::new(*balance, &biases.collect::<Result<Vec<_>>>()?);
        Ok(Self {
            params,
            grads: ParamStore::zeros(backend, &table)?,
            optimizer: OptimizerState::zeros(backend, &table)?,
            balancer,
            table,
            step: 0,
            tokens_seen: 0,
        })
    }

    /// Moves the balancing biases of every router by the global batch's expert counts.
    pub fn balance(&mut self, backend: &B, counts: &[Vec<u64>]) -> Result<()> {
        let mut biases = self.balancing_biases(backend)?;
        self.balancer.update(&mut biases, counts)?;
        for (block, biases) in self.table.blocks.iter().zip(&biases) {
            self.params[block.moe.balancing_biases] = backend.upload(biases, 1, biases.len())?;
        }
        Ok(())
    }

    /// Balancing biases of each block, the skip class last.
    pub fn balancing_biases(&self, backend: &B) -> Result<Vec<Vec<f32>>> {
        self.table.blocks.iter().map(|b| backend.download(&self.params[b.moe.balancing_biases])).collect()
    }

    /// Names and shapes of all tensors of the state.
    pub fn tensors(&self) -> Vec<TensorInfo> {
        checkpoint::training_tensors(&self.table, &self.balancer.config().rule)
    }

    fn find<'a>(&self, name: &'a str) -> Result<(ParamId, Part<'a>)> {
        let (param, part) = match checkpoint::split_opt_name(name) {
            Some((param, slot)) => (param, Part::Optimizer { slot }),
            None => (name, Part::Weight),
        };
        let id = self.table.find(param).with_context(|| format!("the model has no parameter `{param}`"))?;
        Ok((id, part))
    }

    /// Block and slot of a balancing controller's state.
    fn balancer_slot(&self, id: ParamId, slot: &str) -> Result<(usize, usize)> {
        let block = self.table.specs[id].block.context("balancing biases outside of a block")?;
        let slots = self.balancer.config().rule.slots();
        let at = slots.iter().position(|s| *s == slot).with_context(|| format!("the balancing rule keeps no `{slot}`"))?;
        Ok((block, at))
    }

    pub fn read(&self, backend: &B, name: &str) -> Result<Vec<f32>> {
        let (id, part) = self.find(name)?;
        match part {
            Part::Weight => backend.download(&self.params[id]),
            Part::Optimizer { slot } => match self.optimizer.moments[id].named().into_iter().find(|(n, _)| *n == slot) {
                Some((_, buf)) => backend.download(buf),
                None => {
                    let (block, slot) = self.balancer_slot(id, slot)?;
                    Ok(self.balancer.slot(block, slot).to_vec())
                }
            },
        }
    }

    fn write(&mut self, backend: &B, name: &str, values: &[f32]) -> Result<()> {
        let (id, part) = self.find(name)?;
        let [rows, cols] = self.table.specs[id].matrix_shape();
        match part {
            Part::Weight => self.params[id] = backend.upload(values, rows, cols)?,
            Part::Optimizer { slot } => {
                if let Some((_, buf)) = self.optimizer.moments[id].named_mut().into_iter().find(|(n, _)| *n == slot) {
                    *buf = backend.upload(values, rows, cols)?;
                } else {
                    let (block, slot) = self.balancer_slot(id, slot)?;
                    self.balancer.slot_mut(block, slot).copy_from_slice(values);
                }
            }
        }
        Ok(())
    }

    /// Step, tokens and counters, for a manifest.
    pub fn describe(&self, meta: &mut Meta) {
        (meta.step, meta.tokens_seen) = (self.step, self.tokens_seen);
        meta.set_u64(UPDATES, self.optimizer.updates);
        meta.set_u64(ROUTER_UPDATES, self.optimizer.router_updates);
        meta.set_u64(BALANCE_UPDATES, self.balancer.updates());
    }

    /// Takes everything from a checkpoint, which must hold exactly this state's tensors.
    pub fn load(&mut self, backend: &B, from: &Checkpoint) -> Result<()> {
        let tensors = self.tensors();
        from.expect(&tensors)?;
        for t in &tensors {
            self.write(backend, &t.name, &from.read_shaped(&t.name, &t.shape)?)?;
        }
        let meta = from.meta();
        (self.step, self.tokens_seen) = (meta.step, meta.tokens_seen);
        self.optimizer.updates = meta.get_u64(UPDATES)?;
        self.optimizer.router_updates = meta.get_u64(ROUTER_UPDATES)?;
        self.balancer.set_updates(meta.get_u64(BALANCE_UPDATES)?);
        Ok(())
    }
}
