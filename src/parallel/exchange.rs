//! Buckets on their way: gradients to the ranks that own them while the backward still runs, updated weights back to all while
//! the next forward already runs.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;

use super::carrier::Carrier;
use super::group::Group;
use super::mesh::Mesh;
use super::zero::{Bucket, Shared};
use crate::model::params::ParamId;
use crate::model::peers::{Stage, Stages};
use crate::model::{ParamStore, ParamTable};
use crate::tensor::Backend;

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
struct Flight<C: Carrier> {
    /// Buffers of the buckets, when nobody is at them.
    buffers: Vec<Option<C::Buffer>>,
    gradients: Vec<Option<C::Pending>>,
    weights: Vec<Option<C::Pending>>,
    /// Weights that wait for rows, and how many buckets still bring some.
    arriving: HashMap<ParamId, (C::Arriving, usize)>,
    waits: Waits,
}

pub struct Exchange<C: Carrier> {
    carrier: C,
    mesh: Arc<Mesh>,
    buckets: Vec<Bucket>,
    /// Width of a row, by parameter.
    cols: Vec<usize>,
    num_blocks: usize,
    /// Whether gradients that become complete are to be reduced: they are in the last micro-batch.
    reducing: Cell<bool>,
    flight: RefCell<Flight<C>>,
}

impl<C: Carrier> Exchange<C> {
    pub fn new(carrier: C, mesh: Arc<Mesh>, table: &ParamTable, buckets: Vec<Bucket>) -> Result<Self> {
        let none = || (0..buckets.len()).map(|_| None).collect();
        let flight = Flight {
            buffers: buckets.iter().map(|b| carrier.buffer(b.len()).map(Some)).collect::<Result<_>>()?,
            gradients: none(),
            weights: none(),
            arriving: HashMap::new(),
            waits: Waits::default(),
        };
        Ok(Self {
            carrier,
            mesh,
            cols: table.specs.iter().map(|s| s.matrix_shape()[1]).collect(),
            num_blocks: table.blocks.len(),
            buckets,
            reducing: Cell::new(false),
            flight: RefCell::new(flight),
        })
    }

    pub fn carrier(&self) -> &C {
        &self.carrier
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
    pub fn group(&self, bucket: &Bucket) -> &Group {
        match bucket.shared {
            Shared::World => &self.mesh.background_world,
            Shared::ExpertData => &self.mesh.background_expert_data,
        }
    }

    /// Where each unit lies in the buffer of its bucket.
    fn units<'a>(&'a self, bucket: &'a Bucket) -> impl Iterator<Item = (ParamId, Range<usize>, Range<usize>)> + 'a {
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
    pub fn pack(&self, bucket: &Bucket, grads: &ParamStore<C::B>) -> Result<C::Buffer> {
        let mut buffer = self.carrier.buffer(bucket.len())?;
        self.pack_into(bucket, grads, &mut buffer)?;
        Ok(buffer)
    }

    fn pack_into(&self, bucket: &Bucket, grads: &ParamStore<C::B>, buffer: &mut C::Buffer) -> Result<()> {
        self.units(bucket).try_for_each(|(param, rows, at)| self.carrier.pack(&grads[param], rows, buffer, at.start))
    }

    /// Puts the piece of a bucket that this rank owns where it belongs. Of the buffer it begins at `from`.
    pub fn unpack_own(&self, bucket: &Bucket, buffer: &C::Buffer, from: usize, grads: &mut ParamStore<C::B>) -> Result<()> {
        let own = &bucket.pieces[self.group(bucket).index()];
        for (param, rows, at) in self.units(bucket).filter(|(_, _, at)| is_in(at, own)) {
            let at = at.start - own.start + from..at.end - own.start + from;
            self.carrier.unpack(buffer, at, &mut grads[param], rows.start)?;
        }
        Ok(())
    }

    /// Starts to reduce bucket `i`.
    fn reduce(&self, flight: &mut Flight<C>, i: usize, grads: &ParamStore<C::B>) -> Result<()> {
        let bucket = &self.buckets[i];
        let mut buffer = flight.buffers[i].take().expect("a bucket is reduced once a step");
        self.pack_into(bucket, grads, &mut buffer)?;
        flight.gradients[i] = Some(self.carrier.reduce(bucket, buffer)?);
        Ok(())
    }

    /// Waits for all gradients; the own rows of `grads` then hold their sums.
    pub fn reduced(&self, grads: &mut ParamStore<C::B>) -> Result<()> {
        let mut flight = self.flight.borrow_mut();
        let flight = &mut *flight;
        for (i, bucket) in self.buckets.iter().enumerate() {
            if flight.gradients[i].is_none() && flight.buffers[i].is_some() {
                self.reduce(flight, i, grads)?;
            }
            let begun = Instant::now();
            let pending = flight.gradients[i].take().expect("every bucket is on its way");
            let buffer = self.carrier.wait(pending)?;
            flight.waits.gradients += begun.elapsed();
            let own = bucket.pieces[self.group(bucket).index()].start;
            self.unpack_own(bucket, &buffer, own, grads)?;
            flight.buffers[i] = Some(buffer);
        }
        let begun = Instant::now();
        self.carrier.settle()?;
        flight.waits.gradients += begun.elapsed();
        Ok(())
    }

    /// Starts to gather all weights, those that the forward needs first first.
    pub fn updated(&self, params: &mut ParamStore<C::B>) -> Result<()> {
        let mut flight = self.flight.borrow_mut();
        let flight = &mut *flight;
        for (i, bucket) in self.buckets.iter().enumerate().rev() {
            let mut buffer = flight.buffers[i].take().expect("weights are gathered once a step");
            let own = &bucket.pieces[self.group(bucket).index()];
            for (param, rows, at) in self.units(bucket) {
                let (arriving, missing) =
                    flight.arriving.entry(param).or_insert_with(|| (self.carrier.open(&mut params[param]), 0));
                *missing += 1;
                if is_in(&at, own) {
                    self.carrier.pack_open(&params[param], arriving, rows, &mut buffer, at.start)?;
                }
            }
            flight.weights[i] = Some(self.carrier.gather(bucket, buffer)?);
        }
        Ok(())
    }

    /// Waits for the weights of the buckets of stage `from_stage` and of those after it, which the forward reads earlier.
    fn arrived(&self, from_stage: usize, params: &ParamStore<C::B>) -> Result<()> {
        let mut flight = self.flight.borrow_mut();
        let flight = &mut *flight;
        for (i, bucket) in self.buckets.iter().enumerate().rev() {
            if bucket.stage < from_stage {
                break;
            }
            let Some(pending) = flight.weights[i].take() else { continue };
            let begun = Instant::now();
            let buffer = self.carrier.wait(pending)?;
            flight.waits.weights += begun.elapsed();
            let own = &bucket.pieces[self.group(bucket).index()];
            for (param, rows, at) in self.units(bucket) {
                let (arriving, missing) = flight.arriving.get_mut(&param).expect("weights on their way");
                // The own ones are what was sent.
                if !is_in(&at, own) {
                    self.carrier.arrive(&buffer, at, &params[param], arriving, rows.start)?;
                }
                *missing -= 1;
                if *missing == 0
                    && let Some((arriving, _)) = flight.arriving.remove(&param)
                {
                    self.carrier.close(&params[param], arriving);
                }
            }
            flight.buffers[i] = Some(buffer);
        }
        Ok(())
    }

    pub fn settle(&self, params: &ParamStore<C::B>) -> Result<()> {
        self.arrived(0, params)?;
        self.carrier.settle()
    }
}

/// Whether a unit's numbers lie in a piece.
fn is_in(at: &Range<usize>, piece: &Range<usize>) -> bool {
    piece.start <= at.start && at.end <= piece.end
}

impl<B: Backend, C: Carrier<B = B>> Stages<B> for Exchange<C> {
    fn reach(&self, stage: Stage, params: &ParamStore<B>, grads: Option<&ParamStore<B>>) -> Result<()> {
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
                self.reduce(&mut flight, i, grads)?;
            }
        }
        Ok(())
    }
}
