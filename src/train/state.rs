//! Everything that changes while training, tensor by tensor as a checkpoint names it.

use std::borrow::Cow;
use std::collections::HashSet;
use std::ops::Range;

use anyhow::{Context, Result, ensure};

use crate::checkpoint::{self, Checkpoint, Meta, TensorInfo};
use crate::model::params::{OptimKind, ParamId};
use crate::model::{ModelConfig, ParamStore, ParamTable};
use crate::optim::balance::{BalanceConfig, Balancer};
use crate::optim::update::OptimizerState;
use crate::parallel::{Group, Ownership};
use crate::tensor::Backend;

pub struct TrainState<B: Backend> {
    pub table: ParamTable,
    pub params: ParamStore<B>,
    pub grads: ParamStore<B>,
    pub optimizer: OptimizerState<B>,
    pub balancer: Balancer,
    /// What of all this is here.
    ownership: Ownership,
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
        let whole = Ownership::whole(&ParamTable::new(cfg));
        Self::shared(backend, cfg, balance, &whole, values)
    }

    /// What one rank holds and updates of it.
    pub fn shared(
        backend: &B,
        cfg: &ModelConfig,
        balance: &BalanceConfig,
        ownership: &Ownership,
        values: impl FnMut(ParamId) -> Result<Vec<f32>>,
    ) -> Result<Self> {
        let table = ParamTable::new(cfg);
        let holds = |id| ownership.holds(id);
        let params = ParamStore::from_host_of(backend, &table, holds, values)?;
        let biases = table.blocks.iter().map(|b| backend.download(&params[b.moe.balancing_biases]));
        let balancer = Balancer::new(*balance, &biases.collect::<Result<Vec<_>>>()?);
        Ok(Self {
            params,
            grads: ParamStore::zeros_of(backend, &table, holds)?,
            optimizer: OptimizerState::zeros(backend, &table, ownership)?,
            ownership: ownership.clone(),
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

    /// A tensor of a state that is here as a whole.
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

    /// The numbers of all tensors of a state that is here as a whole, in the order of `tensors`.
    pub fn views<'a>(&'a self, backend: &B) -> Result<Vec<Cow<'a, [f32]>>> {
        let mut out = Vec::new();
        for id in 0..self.table.specs.len() {
            out.push(backend.view(&self.params[id])?);
        }
        for (id, spec) in self.table.specs.iter().enumerate() {
            for (_, buf) in self.optimizer.moments[id].named() {
                out.push(backend.view(buf)?);
            }
            if spec.optim == OptimKind::Balance {
                let block = spec.block.context("balancing biases outside of a block")?;
                let slots = self.balancer.config().rule.slots().len();
                out.extend((0..slots).map(|slot| Cow::Borrowed(self.balancer.slot(block, slot))));
            }
        }
        Ok(out)
    }

    /// A tensor of a state that is spread over the ranks of `world`, whole at member 0 (empty at the others). All call it
    /// together, with weights that have arrived.
    pub fn collect(&self, backend: &B, world: &Group, name: &str) -> Result<Vec<f32>> {
        let (id, part) = self.find(name)?;
        let spec = &self.table.specs[id];
        let own: Option<(Vec<Range<usize>>, Vec<f32>)> = match part {
            // Everybody has it.
            Part::Weight if spec.expert.is_none() => None,
            // From those that update its rows: exactly one each.
            Part::Weight => {
                let (rows, cols) = (self.ownership.rows(id), spec.matrix_shape()[1]);
                let weights = if rows.is_empty() { Vec::new() } else { backend.download(&self.params[id])? };
                let own = rows.iter().flat_map(|rows| &weights[rows.start * cols..rows.end * cols]).copied().collect();
                Some((rows.to_vec(), own))
            }
            Part::Optimizer { slot } => match self.optimizer.moments[id].named().into_iter().find(|(n, _)| *n == slot) {
                Some((_, buf)) => Some((self.ownership.rows(id).to_vec(), backend.download(buf)?)),
                None => None,
            },
        };
        match own {
            None if world.index() == 0 => self.read(backend, name),
            None => Ok(Vec::new()),
            Some((rows, values)) => gather_rows(world, spec.matrix_shape(), &rows, &values),
        }
    }

    fn write(&mut self, backend: &B, name: &str, values: &[f32]) -> Result<()> {
        let (id, part) = self.find(name)?;
        let [rows, cols] = self.table.specs[id].matrix_shape();
        match part {
            Part::Weight if !self.ownership.holds(id) => {}
            Part::Weight => self.params[id] = backend.upload(values, rows, cols)?,
            Part::Optimizer { slot } => {
                if let Some((_, buf)) = self.optimizer.moments[id].named_mut().into_iter().find(|(n, _)| *n == slot) {
                    let own = self.ownership.rows(id).iter().flat_map(|rows| &values[rows.start * cols..rows.end * cols]);
                    let own: Vec<f32> = own.copied().collect();
                    *buf = backend.upload(&own, self.ownership.num_rows(id), cols)?;
                } else {
                    let (block, slot) = self.balancer_slot(id, slot)?;
                    self.balancer.slot_mut(block, slot).copy_from_slice(values);
                }
            }
        }
        Ok(())
    }

    /// The buffers that hold a tensor of a checkpoint as it is there, with its name.
    fn places(&mut self) -> Vec<(String, &mut B::Buf)> {
        let Self { table, params, optimizer, ownership, .. } = self;
        let mut places = Vec::new();
        for (id, buf) in params.iter_mut().enumerate().filter(|(id, _)| ownership.holds(*id)) {
            places.push((table.specs[id].name.clone(), buf));
        }
        for (id, moments) in optimizer.moments.iter_mut().enumerate() {
            let spec = &table.specs[id];
            if ownership.num_rows(id) == spec.matrix_shape()[0] {
                places.extend(moments.named_mut().into_iter().map(|(slot, buf)| (checkpoint::opt_name(&spec.name, slot), buf)));
            }
        }
        places
    }

    /// Whether any of a tensor is here.
    fn needs(&self, name: &str) -> Result<bool> {
        let (id, part) = self.find(name)?;
        Ok(match part {
            Part::Weight => self.ownership.holds(id),
            Part::Optimizer { .. } => self.table.specs[id].optim == OptimKind::Balance || self.ownership.num_rows(id) > 0,
        })
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
        self.load_all_but_step(backend, from)?;
        (self.step, self.tokens_seen) = (from.meta().step, from.meta().tokens_seen);
        Ok(())
    }

    /// Takes the weights of a checkpoint; what moves them stays as it is.
    pub fn load_weights(&mut self, backend: &B, from: &Checkpoint) -> Result<()> {
        for t in self.tensors().iter().filter(|t| checkpoint::split_opt_name(&t.name).is_none()) {
            self.write(backend, &t.name, &from.read_shaped(&t.name, &t.shape)?)?;
        }
        Ok(())
    }

    /// Takes weights, optimizer and balancing from a checkpoint, but not how far its run had come.
    pub fn load_all_but_step(&mut self, backend: &B, from: &Checkpoint) -> Result<()> {
        let tensors = self.tensors();
        from.expect(&tensors)?;
        let (names, places): (Vec<String>, Vec<&mut B::Buf>) = self.places().into_iter().unzip();
        backend.overwrite(places, &|i, numbers| from.read_into(&names[i], numbers))?;
        let taken: HashSet<&str> = names.iter().map(String::as_str).collect();
        for t in tensors.iter().filter(|t| !taken.contains(t.name.as_str())) {
            if self.needs(&t.name)? {
                self.write(backend, &t.name, &from.read(&t.name)?)?;
            }
        }
        let meta = from.meta();
        self.optimizer.updates = meta.get_u64(UPDATES)?;
        self.optimizer.router_updates = meta.get_u64(ROUTER_UPDATES)?;
        self.balancer.set_updates(meta.get_u64(BALANCE_UPDATES)?);
        Ok(())
    }
}

/// Rows of a matrix that lie on several ranks, whole at member 0.
fn gather_rows(world: &Group, [rows, cols]: [usize; 2], own: &[Range<usize>], values: &[f32]) -> Result<Vec<f32>> {
    let ranges: Vec<u64> = own.iter().flat_map(|r| [r.start as u64, r.end as u64]).collect();
    let all_ranges = world.gather_to_first("rows of a tensor's parts", &ranges)?.concat();
    let all_values = world.gather_to_first("a tensor's parts", values)?.concat();
    if world.index() != 0 {
        return Ok(Vec::new());
    }
    ensure!(all_values.len() == rows * cols, "{} numbers of a matrix of {rows} x {cols} were found", all_values.len());
    let (mut out, mut rest) = (vec![0.0; rows * cols], &all_values[..]);
    for range in all_ranges.chunks_exact(2) {
        let (start, end) = (range[0] as usize * cols, range[1] as usize * cols);
        let (part, after) = rest.split_at(end - start);
        out[start..end].copy_from_slice(part);
        rest = after;
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::init::initial_values;
    use crate::model::presets;
    use crate::optim::balance::Rule;
    use crate::tensor::backend::Precision;
    use crate::tensor::cpu::Cpu;

    #[test]
    fn views_are_the_tensors_in_their_order() {
        let (backend, model) = (Cpu::with_head(Precision::F32, Precision::F32), presets::demo_6m());
        let table = ParamTable::new(&model);
        let adamw = Rule::AdamW { lr: 0.1, beta1: 0.9, beta2: 0.99, eps: 1e-8 };
        for rule in [adamw, Rule::Sign { step: 0.1 }, Rule::Pid { kp: 0.1, ki: 0.1, kd: 0.1 }] {
            let balance = BalanceConfig { rule, warmup: 0, include_skip: false };
            let values = |id| Ok(initial_values(&table.specs[id], &model, 3));
            let state = TrainState::new(&backend, &model, &balance, values).unwrap();
            let views = state.views(&backend).unwrap();
            let tensors = state.tensors();
            assert_eq!(views.len(), tensors.len());
            for (tensor, view) in tensors.iter().zip(views) {
                assert!(state.read(&backend, &tensor.name).unwrap() == *view, "{}", tensor.name);
            }
        }
    }
}
