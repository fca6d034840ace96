//! What becomes of batches that are refused (`docs/GUARDS.md`): the run ends, passes over them, or goes back to its last checkpoint.

use anyhow::{Context, Result, bail};

use super::Run;
use crate::checkpoint::{self, CKPT_DIR, Checkpoint, Contents};
use crate::failpoint;
use crate::recipe::{Remedy, SpikePolicy};
use crate::train::engine::Engine;
use crate::train::report;
use crate::train::stages::DataState;
use crate::train::step::Refusal;

/// In place of a step: there is no checkpoint to go back to.
const NOTHING: u64 = u64::MAX;

impl<E: Engine> Run<'_, E> {
    /// Number, among all batches of the run, of the one that is drawn next: a step each, and those that were refused.
    pub(super) fn next_batch(&self) -> u64 {
        self.state.step + self.refused.count()
    }

    /// The same, counted from the stage's first one.
    pub(super) fn next_of_stage(&self) -> u64 {
        self.next_batch() - self.refused.after_steps(self.steps_before)
    }

    /// Passes over the batches that the recipe names.
    pub(super) fn pass_over_named(&mut self) {
        while self.to_skip.contains(self.next_batch()) {
            let batch = self.next_batch();
            tell!("step {}: batch {batch} is passed over, as guards.skip_batches says", self.state.step + 1);
            let line = report::batch_refused(self.state.step, batch, "named by guards.skip_batches", Remedy::Skip.name(), None);
            self.write_metrics(&line);
            self.refused.insert([batch, batch]);
        }
    }

    /// Takes note of a step that was applied.
    pub(super) fn accept(&mut self, loss: f64, grad_norm: f64) {
        if self.recipe.guards.spike == SpikePolicy::Tell
            && let Some(why) = self.guards.spike(loss, grad_norm)
        {
            tell!("warning: step {}: {why}; it was applied, as guards.spike = \"tell\" says", self.state.step);
            self.write_metrics(&report::spike(self.state.step, &why, loss, grad_norm));
        }
        self.guards.accept(loss, grad_norm);
    }

    /// Does what the recipe says of a batch that was refused. All ranks come here with the same numbers.
    pub(super) fn refuse(&mut self, refusal: &Refusal) -> Result<()> {
        let (remedy, key) = match (refusal.finite, self.recipe.guards.spike) {
            (false, _) => (self.recipe.guards.non_finite, "non_finite"),
            (true, SpikePolicy::Refuse(remedy)) => (remedy, "spike"),
            (true, _) => bail!("step {}: {}", self.state.step + 1, refusal.why),
        };
        let (batch, done) = (self.next_batch(), self.state.step);
        let numbers = Some((refusal.loss, refusal.grad_norm));
        self.write_metrics(&report::batch_refused(done, batch, &refusal.why, remedy.name(), numbers));
        let what = format!("step {}: {}; nothing of batch {batch} was applied", done + 1, refusal.why);
        if remedy == Remedy::Stop {
            bail!(
                "{what}. Resume from the last checkpoint with a lower learning rate, look at the data of this step, or let the run go on by \
                 itself: guards.{key} = \"skip\" or \"rollback\""
            );
        }
        self.guards.refuse().with_context(|| what.clone())?;
        if remedy == Remedy::Rollback {
            self.finish_save()?;
            if let Some(from) = self.last_checkpoint()? {
                return self.roll_back(&from, batch, &what);
            }
            tell!("warning: {what}. There is no checkpoint of this stage to go back to: the run goes on with the next batch");
        } else {
            tell!("warning: {what}; the run goes on with the next batch");
        }
        self.refused.insert([batch, batch]);
        Ok(())
    }

    /// The newest valid checkpoint of this stage or of its beginning, the same one on all ranks.
    fn last_checkpoint(&self) -> Result<Option<Checkpoint>> {
        let root = self.recipe.run.dir.join(CKPT_DIR);
        let mut step = [NOTHING];
        if self.kept.first.is_some() {
            let found = checkpoint::latest_valid(&root)?;
            found.skipped.iter().for_each(|s| tell!("warning: {s}"));
            let of_stage = self.steps_before..=self.state.step;
            let good = found.checkpoint.filter(|c| c.contents() == Contents::Training && of_stage.contains(&c.meta().step));
            step[0] = good.map_or(NOTHING, |c| c.meta().step);
        }
        if let Some(world) = self.world() {
            world.broadcast("checkpoint to go back to", 0, &mut step)?;
        }
        (step[0] != NOTHING).then(|| Checkpoint::open(&root.join(checkpoint::step_dir(step[0])))).transpose()
    }

    /// Goes back to a checkpoint, and on with the batch after `bad`.
    fn roll_back(&mut self, from: &Checkpoint, bad: u64, what: &str) -> Result<()> {
        failpoint::hit("guard.rollback")?;
        let done = self.state.step;
        self.sharing.settle(&self.state.params)?;
        let place = || format!("going back to {}", from.dir().display());
        self.state.load(self.engine.backend(), from).with_context(place)?;
        self.guards.go_back_to(&from.meta().guards).with_context(place)?;
        let first = from.meta().step + DataState::of(from)?.refused.count();
        self.refused.insert([first, bad]);
        let to = self.state.step;
        self.kept.resumed_from = Some(to);
        tell!("warning: {what}; the run goes back from step {done} to step {to}, and on with batch {}", bad + 1);
        self.write_metrics(&report::rolled_back(done, to, [first, bad]));
        Ok(())
    }
}
