//! The thread that writes a checkpoint while training goes on. One save is in flight at a time.

use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use rayon::ThreadPoolBuilder;

use super::staging::Staging;
use crate::checkpoint::{self, Meta, RetainPolicy, SaveOptions, Saved, TensorInfo};
use crate::model::ParamTable;
use crate::model::params::{OptimKind, ParamGroup};

/// Seconds that training stood still for a save.
#[derive(Debug, Clone, Copy, Default)]
pub struct Stall {
    /// All of it.
    pub whole_s: f64,
    /// Of that: the wait for the save before.
    pub wait_s: f64,
}

/// How a save ended.
pub struct Finished {
    pub step: u64,
    pub stall: Stall,
    pub saved: Result<Saved>,
    /// What retention has to say.
    pub notes: Vec<String>,
}

/// What a save needs beside the numbers, all of it by value.
pub struct Order {
    pub root: PathBuf,
    pub meta: Meta,
    pub options: SaveOptions,
    /// None: all checkpoints are kept.
    pub retain: Option<RetainPolicy>,
}

impl Order {
    /// Commits the checkpoint, then deletes old ones and what they alone held.
    pub fn carry_out(&self, save: impl FnOnce(&Self) -> Result<Saved>) -> (Result<Saved>, Vec<String>) {
        let saved = save(self);
        let mut notes = Vec::new();
        if saved.is_err() {
            return (saved, notes);
        }
        if let Some(policy) = &self.retain {
            match checkpoint::retain(&self.root, policy) {
                Ok(done) => notes = done.notes,
                Err(e) => notes.push(format!("old checkpoints could not be looked through: {e:#}")),
            }
        }
        match checkpoint::collect_garbage(&self.root) {
            Ok(more) => notes.extend(more),
            Err(e) => notes.push(format!("the pool could not be looked through: {e:#}")),
        }
        (saved, notes)
    }
}

/// Of a training state: whole, and only of finite numbers. Such a state trains no further; saved, it would be the one to resume from, and
/// push good ones out. With a pool, what may stand still (routers that are frozen, balancing biases between updates) lies apart from what moves
/// in every step.
pub fn save_options(pool: bool, table: &ParamTable, tensors: &[TensorInfo]) -> SaveOptions {
    let group = |t: &TensorInfo| {
        let param = checkpoint::split_opt_name(&t.name).map_or(t.name.as_str(), |(param, _)| param);
        let spec = table.find(param).map(|id| &table.specs[id]);
        match spec.map(|spec| (spec.group, spec.optim)) {
            Some((_, OptimKind::Balance)) => 2,
            Some((ParamGroup::Router, _)) => 1,
            _ => 0,
        }
    };
    let groups = if pool { tensors.iter().map(group).collect() } else { Vec::new() };
    SaveOptions { finite: true, pool, groups, ..SaveOptions::default() }
}

struct InFlight {
    step: u64,
    stall: Stall,
    outcome: Receiver<(Staging, Result<Saved>, Vec<String>)>,
    thread: JoinHandle<()>,
}

/// Writes copies of the state. Dropping it waits for the one that is being written.
#[derive(Default)]
pub struct Writer {
    /// Here while nothing is in flight.
    staging: Option<Staging>,
    in_flight: Option<InFlight>,
}

/// What waiting brought.
pub enum Waited {
    /// Nothing is in flight.
    Idle,
    /// It is still being written.
    Busy,
    Done(Box<Finished>),
}

impl Writer {
    /// Takes the memory for copies of these tensors.
    ///
    /// # Errors
    /// As [`Staging::new`].
    pub fn reserve(&mut self, tensors: Vec<TensorInfo>) -> Result<()> {
        self.staging = Some(Staging::new(tensors)?);
        Ok(())
    }

    /// The copy that is to be filled next; of nothing that is in flight. Memory that a failure has lost is taken anew.
    ///
    /// # Errors
    /// As [`Staging::new`].
    pub fn staging(&mut self, tensors: &[TensorInfo]) -> Result<&mut Staging> {
        debug_assert!(self.in_flight.is_none(), "one save at a time");
        if self.staging.is_none() {
            self.reserve(tensors.to_vec())?;
        }
        self.staging.as_mut().context("a copy that was just made")
    }

    /// Begins to write what was copied.
    ///
    /// # Errors
    /// When no copy was made, or the thread cannot be started.
    pub fn start(&mut self, order: Order, stall: Stall) -> Result<()> {
        let staging = self.staging.take().context("nothing was copied for this checkpoint")?;
        let step = order.meta.step;
        let (done, outcome) = channel();
        let body = move || {
            let (saved, notes) = write(&order, &staging);
            // Nobody listens when the run has been abandoned.
            let _ = done.send((staging, saved, notes));
        };
        let thread = std::thread::Builder::new().name("checkpoint".into()).spawn(body).context("starting the writing thread")?;
        self.in_flight = Some(InFlight { step, stall, outcome, thread });
        Ok(())
    }

    /// Waits for what is in flight, at most so long.
    pub fn wait(&mut self, at_most: Duration) -> Waited {
        let Some(in_flight) = self.in_flight.take() else { return Waited::Idle };
        let received = match at_most {
            Duration::ZERO => in_flight.outcome.try_recv().map_err(|e| e == TryRecvError::Empty),
            some => in_flight.outcome.recv_timeout(some).map_err(|e| e == RecvTimeoutError::Timeout),
        };
        if let Err(true) = received {
            self.in_flight = Some(in_flight);
            return Waited::Busy;
        }
        let InFlight { step, stall, thread, .. } = in_flight;
        // Without an outcome it has panicked, and the hook has told why.
        let _ = thread.join();
        let (saved, notes) = match received {
            Ok((staging, saved, notes)) => {
                self.staging = Some(staging);
                (saved, notes)
            }
            Err(_) => (Err(anyhow!("the thread that wrote the checkpoint panicked")), Vec::new()),
        };
        Waited::Done(Box::new(Finished { step, stall, saved, notes }))
    }
}

fn write(order: &Order, staging: &Staging) -> (Result<Saved>, Vec<String>) {
    let carry_out =
        || order.carry_out(|o| checkpoint::save_slices(&o.root, &o.meta, staging.tensors(), &staging.slices(), &o.options));
    // What verifies an old checkpoint is to stay on one thread: the others compute.
    match ThreadPoolBuilder::new().num_threads(1).build() {
        Ok(pool) => pool.install(carry_out),
        Err(_) => carry_out(),
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        if let Some(in_flight) = self.in_flight.take() {
            let _ = in_flight.thread.join();
        }
    }
}
