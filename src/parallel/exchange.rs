//! Buckets on their way: gradients to the ranks that own them while the backward still runs, updated weights back to all while
//! the next forward already runs. On the host's buffers.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;

use super::background::{Background, Pending};
use super::group::Group;
use super::mesh::Mesh;
use super::zero::{Bucket, Shared};
use crate::model::params::ParamId;
use crate::model::peers::{Stage, Stages};
use crate::model::{ParamStore, ParamTable};
use crate::tensor::cpu::Cpu;

/// Time that a rank spent on others in a step, in place of computing.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Waits {
    pub gradients: Duration,
    pub weights: Duration,
    /// In operations that the computation cannot go on without: halos, keys and values, tokens of experts, agreements. Moving their data
    /// is counted too.
    pub operations: Duration,
}

/// What is where.
struct Flight {
    /// Buffers of the buckets, when nobody is at them.
    buffers: Vec<Option<Vec<f32>>>,
    gradients: Vec<Option<Pending<Vec<f32>>>>,
    weights: Vec<Option<Pending<Vec<f32>>>>,
    /// Weights that wait for rows: their numbers, and how many buckets still bring some.
    arriving: HashMap<ParamId, (Vec<f32>, usize)>,
    waits: Waits,
}

pub struct Exchange {
    mesh: Arc<Mesh>,
    background: Background,
    buckets: Vec<Bucket>,
    /// Width of a row, by parameter.
    cols: Vec<usize>,
    num_blocks: usize,
    /// Whether gradients that become complete are to be reduced: they are in the last micro-batch.
    reducing: Cell<bool>,
    flight: RefCell<Flight>,
}

impl Exchange {
    pub fn new(mesh: Arc<Mesh>, table: &ParamTable, buckets: Vec<Bucket>) -> Result<Self> {
        let n = buckets.len();
        let none = || (0..n).map(|_| None).collect();
        let flight = Flight {
            buffers: buckets.iter().map(|b| Some(vec![0.0; b.len()])).collect(),
            gradients: none(),
            weights: (0..n).map(|_| None).collect(),
            arriving: HashMap::new(),
            waits: Waits::default(),
        };
        Ok(Self {
            background: Background::start(mesh.rank)?,
            mesh,
            buckets,
            cols: table.specs.iter().map(|s| s.matrix_shape()[1]).collect(),
            num_blocks: table.blocks.len(),
            reducing: Cell::new(false),
            flight: RefCell::new(flight),
        })
    }

    pub fn set_reducing(&self, reducing: bool) {
        self.reducing.set(reducing);
    }

    /// Time stood still since this was asked last.
    pub fn take_waits(&self) -> Waits {
        let waits = std::mem::take(&mut self.flight.borrow_mut().waits);
        Waits { operations: self.mesh.comm.take_spent(), ..waits }
    }

    /// The ranks that share a bucket.
    pub fn group(&self, bucket: &Bucket) -> Arc<Group> {
        match bucket.shared {
            Shared::World => self.mesh.background_world.clone(),
            Shared::ExpertData => self.mesh.background_expert_data.clone(),
        }
    }

    /// Where each unit lies in the buffer of its bucket.
    fn units<'a>(
        &'a self,
        bucket: &'a Bucket,
    ) -> impl Iterator<Item = (ParamId, std::ops::Range<usize>, std::ops::Range<usize>)> + 'a {
        let mut at = 0;
        bucket.units.iter().map(move |u| {
            let cols = self.cols[u.param];
            let len = u.rows.len() * cols;
            at += len;
            (u.param, u.rows.start * cols..u.rows.end * cols, at - len..at)
        })
    }

    pub fn buckets(&self) -> &[Bucket] {
        &self.buckets
    }

    /// The numbers of a bucket, as they lie in its buffer.
    pub fn pack(&self, bucket: &Bucket, grads: &ParamStore<Cpu>) -> Vec<f32> {
        let mut buffer = vec![0.0; bucket.len()];
        self.pack_into(bucket, grads, &mut buffer);
        buffer
    }

    fn pack_into(&self, bucket: &Bucket, grads: &ParamStore<Cpu>, buffer: &mut [f32]) {
        for (param, rows, at) in self.units(bucket) {
            buffer[at].copy_from_slice(&grads[param].data()[rows]);
        }
    }

    /// Puts the piece of a bucket that member `index` of its group owns where it belongs.
    pub fn unpack_own(&self, bucket: &Bucket, index: usize, piece: &[f32], grads: &mut ParamStore<Cpu>) {
        let own = &bucket.pieces[index];
        for (param, rows, at) in self.units(bucket) {
            if own.start <= at.start && at.end <= own.end {
                grads[param].data_mut()[rows].copy_from_slice(&piece[at.start - own.start..at.end - own.start]);
            }
        }
    }

    /// Starts to reduce bucket `i`.
    fn reduce(&self, flight: &mut Flight, i: usize, grads: &ParamStore<Cpu>) {
        let bucket = &self.buckets[i];
        let mut buffer = flight.buffers[i].take().expect("a bucket is reduced once a step");
        self.pack_into(bucket, grads, &mut buffer);
        let (group, pieces) = (self.group(bucket), bucket.pieces.clone());
        flight.gradients[i] = Some(self.background.submit(move || {
            group.reduce_scatter("reduce-scatter of gradients", &mut buffer, &pieces)?;
            Ok(buffer)
        }));
    }

    /// Waits for all gradients; the own rows of `grads` then hold their sums.
    pub fn reduced(&self, grads: &mut ParamStore<Cpu>) -> Result<()> {
        let mut flight = self.flight.borrow_mut();
        let flight = &mut *flight;
        for (i, bucket) in self.buckets.iter().enumerate() {
            if flight.gradients[i].is_none() && flight.buffers[i].is_some() {
                self.reduce(flight, i, grads);
            }
            let begun = Instant::now();
            let pending = flight.gradients[i].take().expect("every bucket is on its way");
            let buffer = pending.wait()?;
            flight.waits.gradients += begun.elapsed();
            let index = self.group(bucket).index();
            self.unpack_own(bucket, index, &buffer[bucket.pieces[index].clone()], grads);
            flight.buffers[i] = Some(buffer);
        }
        Ok(())
    }

    /// Starts to gather all weights, those that the forward needs first first.
    pub fn updated(&self, params: &mut ParamStore<Cpu>) -> Result<()> {
        let mut flight = self.flight.borrow_mut();
        let flight = &mut *flight;
        for (i, bucket) in self.buckets.iter().enumerate().rev() {
            let mut buffer = flight.buffers[i].take().expect("weights are gathered once a step");
            let group = self.group(bucket);
            let own = bucket.pieces[group.index()].clone();
            for (param, rows, at) in self.units(bucket) {
                let (weights, missing) = flight.arriving.entry(param).or_insert_with(|| (params[param].take(), 0));
                *missing += 1;
                if own.start <= at.start && at.end <= own.end {
                    buffer[at].copy_from_slice(&weights[rows]);
                }
            }
            let pieces = bucket.pieces.clone();
            flight.weights[i] = Some(self.background.submit(move || {
                group.all_gather("all-gather of weights", &mut buffer, &pieces)?;
                Ok(buffer)
            }));
        }
        Ok(())
    }

    /// Waits for the weights of the buckets of stage `from_stage` and of those after it, which the forward reads earlier.
    fn arrived(&self, from_stage: usize, params: &ParamStore<Cpu>) -> Result<()> {
        let mut flight = self.flight.borrow_mut();
        let flight = &mut *flight;
        for (i, bucket) in self.buckets.iter().enumerate().rev() {
            if bucket.stage < from_stage {
                break;
            }
            let Some(pending) = flight.weights[i].take() else { continue };
            let begun = Instant::now();
            let buffer = pending.wait()?;
            flight.waits.weights += begun.elapsed();
            for (param, rows, at) in self.units(bucket) {
                let (weights, missing) = flight.arriving.get_mut(&param).expect("weights on their way");
                weights[rows].copy_from_slice(&buffer[at]);
                *missing -= 1;
                if *missing == 0
                    && let Some((weights, _)) = flight.arriving.remove(&param)
                {
                    params[param].put(weights);
                }
            }
            flight.buffers[i] = Some(buffer);
        }
        Ok(())
    }

    pub fn settle(&self, params: &ParamStore<Cpu>) -> Result<()> {
        self.arrived(0, params)
    }
}

impl Stages<Cpu> for Exchange {
    fn reach(&self, stage: Stage, params: &ParamStore<Cpu>, grads: Option<&ParamStore<Cpu>>) -> Result<()> {
        let (layer, phase) = match stage {
            Stage::Enter | Stage::Head => (None, "forward"),
            Stage::Forward(block) => (Some(block), "forward"),
            // Stages of the backward end with it.
            Stage::Backward(block) => (block.checked_sub(1), "backward"),
            Stage::Complete => (None, "update"),
        };
        self.mesh.comm.at(|place| (place.layer, place.phase) = (layer, phase));
        let done = match stage {
            Stage::Enter => return self.arrived(self.num_blocks, params),
            Stage::Forward(block) => return self.arrived(self.num_blocks - 1 - block, params),
            Stage::Head => {
                self.mesh.comm.at(|place| (place.layer, place.phase) = (self.num_blocks.checked_sub(1), "backward"));
                return Ok(());
            }
            Stage::Backward(block) => self.num_blocks - 1 - block,
            Stage::Complete => self.num_blocks,
        };
        let Some(grads) = grads.filter(|_| self.reducing.get()) else { return Ok(()) };
        let mut flight = self.flight.borrow_mut();
        for (i, bucket) in self.buckets.iter().enumerate() {
            if bucket.stage <= done && flight.gradients[i].is_none() && flight.buffers[i].is_some() {
                self.reduce(&mut flight, i, grads);
            }
        }
        Ok(())
    }
}
