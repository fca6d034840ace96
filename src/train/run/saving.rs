//! Checkpoints of a run: when training waits for them, who writes them, what is told of them.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::{RanksLost, Run};
use crate::checkpoint::{self, CKPT_DIR, Meta, RetainPolicy, TensorInfo};
use crate::parallel::Group;
use crate::recipe::Recipe;
use crate::train::engine::Engine;
use crate::train::report;
use crate::train::uploader::Uploader;
use crate::train::writer::{Finished, Order, Stall, Waited, save_options};

/// Name of the message by which the first rank asks the others for a tensor.
const TENSOR_TO_SAVE: &str = "number of the tensor to save";
/// Name of the message by which the first rank tells the others that it waits for a save, and that it does no more.
const WAIT_FOR_SAVE: &str = "wait for the checkpoint that is being written";
/// The wait of a single rank is cut into pieces of this length.
const PATIENCE: Duration = Duration::from_secs(3600);

/// Whether a run of this recipe ever writes a checkpoint while training goes on. The one at the end is written from the state itself.
pub(crate) fn is_staged(recipe: &Recipe) -> bool {
    recipe.checkpoint.asynchronous && recipe.checkpoint.every < recipe.train.steps
}

impl<E: Engine> Run<'_, E> {
    /// Saves a checkpoint on the way. One that fails does not end the run: the next one may work.
    pub(super) fn save(&mut self) -> Result<()> {
        if !is_staged(self.recipe) {
            return self.save_now(false);
        }
        let began = Instant::now();
        self.finish_save()?;
        let wait_s = began.elapsed().as_secs_f64();
        self.sharing.settle(&self.state.params)?;
        // A checkpoint means that the lines of all its steps are safe.
        self.sync_metrics();
        self.at("saving");
        self.stage()?;
        if self.kept.first.is_none() {
            return Ok(());
        }
        let stall = Stall { whole_s: began.elapsed().as_secs_f64(), wait_s };
        let step = self.state.step;
        self.saving = self.next_batch();
        if let Err(e) = self.order().and_then(|order| self.writer.start(order, stall)) {
            self.told(Finished { step, stall, saved: Err(e), notes: Vec::new() }, false)?;
        }
        Ok(())
    }

    /// Copies the state. All ranks take part, and bring the first one what it has not.
    fn stage(&mut self) -> Result<()> {
        let tensors = self.state.tensors();
        let (state, backend) = (&self.state, self.engine.backend());
        let Some(world) = self.sharing.mesh().map(|mesh| &mesh.world) else {
            return self.writer.staging(&tensors)?.copy(&state.views(backend)?);
        };
        if world.index() != 0 {
            return tensors.iter().try_for_each(|t| state.collect(backend, world, &t.name).map(drop));
        }
        let slices = self.writer.staging(&tensors)?.slices_mut();
        for (tensor, slice) in tensors.iter().zip(slices) {
            slice.copy_from_slice(&state.collect(backend, world, &tensor.name)?);
        }
        Ok(())
    }

    /// Tells how the save in flight ended, if it has.
    pub(super) fn look_at_save(&mut self) -> Result<()> {
        match self.writer.wait(Duration::ZERO) {
            Waited::Done(finished) => self.told(*finished, false),
            Waited::Idle | Waited::Busy => Ok(()),
        }
    }

    /// Waits for the save in flight, on all ranks together.
    pub(super) fn finish_save(&mut self) -> Result<()> {
        if !is_staged(self.recipe) {
            return Ok(());
        }
        let world = self.world();
        if let Some(world) = world.filter(|world| world.index() != 0) {
            let mut waits = [1u64];
            while waits[0] > 0 {
                world.broadcast(WAIT_FOR_SAVE, 0, &mut waits)?;
            }
            return Ok(());
        }
        // The others hear of it before they give up on this rank.
        let patience = world.map_or(PATIENCE, |_| self.recipe.parallel.timeout / 4);
        let waited = loop {
            match (self.writer.wait(patience), world) {
                (Waited::Busy, Some(world)) => world.broadcast(WAIT_FOR_SAVE, 0, &mut [1u64])?,
                (Waited::Busy, None) => {}
                (done, _) => break done,
            }
        };
        if let Some(world) = world {
            world.broadcast(WAIT_FOR_SAVE, 0, &mut [0u64])?;
        }
        match waited {
            Waited::Done(finished) => self.told(*finished, false),
            Waited::Idle | Waited::Busy => Ok(()),
        }
    }

    /// Waits for the save in flight of a run that has failed, whatever became of the other ranks.
    pub(super) fn abandon_save(&mut self) {
        loop {
            match self.writer.wait(PATIENCE) {
                Waited::Busy => {}
                Waited::Idle => break,
                Waited::Done(finished) => {
                    // It fails only as the last one.
                    let _ = self.told(*finished, false);
                }
            }
        }
    }

    /// Saves a checkpoint from the state itself, while training waits. Of a run that ends here, `last`, a failure is the run's.
    pub(super) fn save_now(&mut self, last: bool) -> Result<()> {
        let began = Instant::now();
        self.sharing.settle(&self.state.params)?;
        if let Some(world) = self.world().filter(|world| world.index() != 0) {
            return self.bring_tensors(world);
        }
        // A checkpoint means that the lines of all its steps are safe.
        self.sync_metrics();
        self.at("saving");
        let tensors = self.state.tensors();
        let order = self.order();
        let (saved, notes) = match &order {
            Ok(order) => order.carry_out(|o| {
                let mut read = |i: usize| self.read_tensor(&tensors, i);
                checkpoint::save(&o.root, &o.meta, &tensors, &mut read, &o.options)
            }),
            Err(e) => (Err(anyhow::anyhow!("{e:#}")), Vec::new()),
        };
        let told = self.world().map_or(Ok(()), |world| world.broadcast(TENSOR_TO_SAVE, 0, &mut [u64::MAX]));
        // What is saved is saved; that other ranks are lost shows in the next operation.
        let saved = saved.or_else(|e| told.map_err(|lost| lost.context(RanksLost)).and(Err(e)));
        let stall = Stall { whole_s: began.elapsed().as_secs_f64(), wait_s: 0.0 };
        self.saving = self.next_batch();
        self.told(Finished { step: self.state.step, stall, saved, notes }, last)
    }

    fn read_tensor(&self, tensors: &[TensorInfo], i: usize) -> Result<Vec<f32>> {
        let backend = self.engine.backend();
        match self.world() {
            None => self.state.read(backend, &tensors[i].name),
            Some(world) => {
                let asked = world.broadcast(TENSOR_TO_SAVE, 0, &mut [i as u64]);
                asked.and_then(|()| self.state.collect(backend, world, &tensors[i].name)).context(RanksLost)
            }
        }
    }

    /// While the first rank saves: sends it the parts of the tensors it asks for.
    fn bring_tensors(&self, world: &Group) -> Result<()> {
        let tensors = self.state.tensors();
        loop {
            let mut next = [0u64];
            world.broadcast(TENSOR_TO_SAVE, 0, &mut next)?;
            match tensors.get(next[0] as usize) {
                Some(tensor) => drop(self.state.collect(self.engine.backend(), world, &tensor.name)?),
                None => return Ok(()),
            }
        }
    }

    /// Everything that a checkpoint of the present step says, by value.
    fn order(&self) -> Result<Order> {
        let recipe = self.recipe;
        let mut meta = Meta {
            tokenizer_hash: self.tokenizer_hash.clone(),
            data_fingerprint: Some(self.data_fingerprint.clone()),
            loader: serde_json::to_value(self.data_state()?)?,
            guards: self.guards.to_value()?,
            recipe: self.written_recipe().to_toml(),
            ..Meta::new(recipe.model.clone())
        };
        self.state.describe(&mut meta);
        let uploading = self.kept.uploader.as_ref().map_or(Vec::new(), Uploader::needed);
        let retain = recipe.checkpoint.keep_last.map(|keep_last| RetainPolicy {
            keep_last: keep_last as usize,
            keep_every: recipe.checkpoint.keep_every.unwrap_or(0),
            // And where stages end: what follows may be done again in another way.
            protected: self.kept.resumed_from.into_iter().chain(self.borders()).chain(uploading).collect(),
        });
        let options = save_options(recipe.checkpoint.incremental, &self.state.table, &self.state.tensors());
        Ok(Order { root: recipe.run.dir.join(CKPT_DIR), meta, options, retain })
    }

    /// Tells of a save that has ended. The failure of the last one is returned.
    fn told(&mut self, finished: Finished, last: bool) -> Result<()> {
        let Finished { step, stall, saved, notes } = finished;
        match saved {
            Ok(saved) => {
                self.saved = Some(self.saving);
                self.offer_upload(step);
                saved.notes.iter().chain(&notes).for_each(|n| tell!("warning: {n}"));
                self.write_metrics(&report::checkpoint_saved(step, stall, &saved));
                Ok(())
            }
            // Not a matter of the disk: the run cannot go on.
            Err(e) if e.is::<RanksLost>() => Err(e),
            Err(e) => {
                self.kept.checkpoint_failures += 1;
                let e = e.context(format!("step {step} could not be saved"));
                self.write_metrics(&report::checkpoint_failed(step, self.kept.checkpoint_failures, &e));
                if last {
                    return Err(e);
                }
                tell!("warning: {e:#}; training goes on, and the next checkpoint is tried as usual");
                Ok(())
            }
        }
    }
}
