//! The stages of a run, one after the other.
//!
//! A stage has its own engine, groups of ranks, order of data and learning rates. What trains is handed on through the checkpoint that
//! is always written where a stage ends: a run that goes on by itself does what a resumed one does, and so ends in the same bits.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};

use super::lock::RunLock;
use super::profile::Profile;
use super::report;
use super::run::{First, Options};
use super::spans::Spans;
use super::start::{claim_existing, find_start, refuse_other_run};
use super::stop::Outcome;
use super::uploader::Uploader;
use crate::checkpoint::{self, CKPT_DIR, Checkpoint};
use crate::data::MixtureState;
use crate::monitor::metrics::METRICS_FILE;
use crate::parallel::{Group, bucket};
use crate::recipe::Recipe;

/// Name of the message by which the first rank says that it still looks for a checkpoint.
const STILL_LOOKING: &str = "search for a checkpoint to go on from";

/// Part of a run that one engine trains: a stage, from its start or from where a checkpoint stands.
pub(super) struct Leg<'a> {
    /// The recipe of all stages.
    pub whole: &'a Recipe,
    pub stage: usize,
    /// What to go on from; None = step 0.
    pub from: Option<Checkpoint>,
    pub kept: Kept,
}

/// What goes on from stage to stage, beside what a checkpoint holds.
#[derive(Default)]
pub(super) struct Kept {
    /// Of a run directory that was there already.
    pub lock: Option<RunLock>,
    /// None of other ranks than the first, and before the run's first leg has begun.
    pub first: Option<First>,
    /// Step that this process has resumed at; its checkpoint is not deleted.
    pub resumed_from: Option<u64>,
    pub checkpoint_failures: u64,
    /// Of the first rank, where the recipe wants uploads.
    pub uploader: Option<Uploader>,
    pub upload_failures: u64,
    /// Whether this process has trained a stage already.
    pub under_way: bool,
    /// Of the first rank, until the run ends.
    pub profile: Option<Profile>,
    /// What was measured for the size of buckets, and is not in the metrics yet.
    pub buckets: Option<bucket::Found>,
}

/// How a leg ended.
pub(super) struct Ended {
    /// None: the stage is done and saved, and the next one follows.
    pub outcome: Option<Outcome>,
    pub kept: Kept,
}

/// Where the data of a run stands, as a checkpoint stores it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct DataState {
    /// Within the stage that was trained last.
    #[serde(flatten)]
    pub mixture: MixtureState,
    /// That stage. Only runs of several stages say it, and what follows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stage: Option<usize>,
    /// Tokens of each source that the stages before have used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub earlier_tokens: Option<Vec<u64>>,
    /// Batches that were drawn and not trained on, by their number in the run.
    #[serde(default, skip_serializing_if = "Spans::is_empty")]
    pub refused: Spans,
}

impl DataState {
    pub(super) fn of(from: &Checkpoint) -> Result<Self> {
        serde_json::from_value(from.meta().loader.clone())
            .with_context(|| format!("{}: the loader's state in the manifest", from.dir().display()))
    }
}

/// How a stage's data begins: tokens of each source that earlier stages have used, and where the stage itself stands.
pub(super) struct DataStart {
    pub earlier_tokens: Vec<u64>,
    /// None at the stage's first step.
    pub mixture: Option<MixtureState>,
    /// Batches that were drawn and not trained on.
    pub refused: Spans,
}

impl Leg<'_> {
    /// Steps of the run before this stage.
    pub fn steps_before(&self) -> u64 {
        self.stage.checked_sub(1).map_or(0, |last| self.whole.stage_ends()[last])
    }

    /// The recipe of the stage alone.
    pub fn recipe(&self) -> Result<Recipe> {
        self.whole.stage(self.stage).with_context(|| format!("the recipe has no stage {}", self.stage))
    }

    pub fn data_start(&self) -> Result<DataStart> {
        let sources = self.whole.data.sources.len();
        let Some(from) = &self.from else {
            return Ok(DataStart { earlier_tokens: vec![0; sources], mixture: None, refused: Spans::default() });
        };
        let state = DataState::of(from)?;
        let refused = state.refused;
        let trained = state.stage.unwrap_or(0);
        let mut earlier_tokens = state.earlier_tokens.unwrap_or_else(|| vec![0; sources]);
        let fits = earlier_tokens.len() == sources && state.mixture.counts.len() == sources;
        if trained == self.stage && earlier_tokens.len() == sources {
            return Ok(DataStart { earlier_tokens, mixture: Some(state.mixture), refused });
        }
        let stage = self.whole.stage(trained).filter(|_| fits && trained + 1 == self.stage);
        let stage = stage.with_context(|| {
            format!(
                "{}: the data state in the manifest is of stage {trained} and {} sources, and does not lead to stage {} of {sources} sources; \
                 the manifest is not that of a run of this recipe",
                from.dir().display(),
                earlier_tokens.len(),
                self.stage
            )
        })?;
        let ends = self.whole.stage_ends();
        let before = trained.checked_sub(1).map_or(0, |last| ends[last]);
        // A step each, and what was refused in between.
        let batches = refused.after_steps(ends[trained]) - refused.after_steps(before);
        let samples = batches * stage.train.sequences_per_step();
        ensure!(
            state.mixture.samples == samples,
            "{}: stage {trained} ends after {samples} samples, but the data state in the manifest is at {}",
            from.dir().display(),
            state.mixture.samples
        );
        for (tokens, count) in earlier_tokens.iter_mut().zip(&state.mixture.counts) {
            *tokens += count * stage.train.seq_len as u64;
        }
        Ok(DataStart { earlier_tokens, mixture: None, refused })
    }
}

/// Trains the stages that are left; `run` trains one. `world`: all ranks, of which each calls this.
pub(super) fn each(
    whole: &Recipe,
    options: &Options,
    world: Option<&Group>,
    mut run: impl FnMut(Leg<'_>) -> Result<Ended>,
) -> Result<Outcome> {
    let mut leg = begin(whole, options, world)?;
    let ends = whole.stage_ends();
    loop {
        let stage = leg.stage;
        let Ended { outcome, kept } = run(leg)?;
        if let Some(outcome) = outcome {
            return Ok(outcome);
        }
        if let Some(world) = world {
            // Nobody looks for the border's checkpoint unless it could be saved.
            world.barrier("end of a stage")?;
        }
        leg = Leg { whole, stage: stage + 1, from: Some(open(whole, ends[stage])?), kept };
    }
}

/// What the first rank finds in the run directory, made known to all.
fn begin<'a>(whole: &'a Recipe, options: &Options, world: Option<&Group>) -> Result<Leg<'a>> {
    let dir = &whole.run.dir;
    let is_first = world.is_none_or(|world| world.index() == 0);
    let mut leg = Leg { whole, stage: 0, from: None, kept: Kept::default() };
    if is_first {
        leg.kept.lock = claim_existing(dir, options)?;
        leg.from = patiently(world, whole.parallel.timeout, || find_start(whole, options))?;
        if leg.kept.lock.is_none() && leg.from.is_some() {
            // Fetched into a directory that was not there before.
            leg.kept.lock = Some(RunLock::take(dir)?);
        }
        if let Some(from) = &leg.from {
            refuse_other_run(whole, from.meta(), &from.dir().display().to_string())?;
            leg.stage = stage_to_enter(whole, from)?;
        }
    }
    if let Some(world) = world {
        if !is_first {
            wait_for_first(world)?;
        }
        // All ranks go on from what the first one found.
        let mut found = [leg.from.as_ref().map_or(u64::MAX, |c| c.meta().step), leg.stage as u64];
        world.broadcast("step and stage to go on from", 0, &mut found)?;
        leg.stage = found[1] as usize;
        if !is_first && found[0] != u64::MAX {
            leg.from = Some(open(whole, found[0])?);
        }
    }
    leg.kept.resumed_from = leg.from.as_ref().map(|c| c.meta().step);
    Ok(leg)
}

/// Does something that may take long, such as fetching a checkpoint, and lets the other ranks know meanwhile that it still goes on. The
/// others are in [`wait_for_first`].
fn patiently<T: Send>(world: Option<&Group>, timeout: Duration, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    let Some(world) = world else { return work() };
    std::thread::scope(|threads| {
        let (done, outcome) = channel();
        threads.spawn(move || done.send(work()));
        loop {
            match outcome.recv_timeout(timeout / 4) {
                Ok(found) => {
                    // What failed here ends the others by itself.
                    if found.is_ok() {
                        world.broadcast(STILL_LOOKING, 0, &mut [0u64])?;
                    }
                    return found;
                }
                Err(RecvTimeoutError::Timeout) => world.broadcast(STILL_LOOKING, 0, &mut [1u64])?,
                Err(RecvTimeoutError::Disconnected) => bail!("looking for a checkpoint panicked"),
            }
        }
    })
}

fn wait_for_first(world: &Group) -> Result<()> {
    let mut still = [1u64];
    while still[0] > 0 {
        world.broadcast(STILL_LOOKING, 0, &mut still)?;
    }
    Ok(())
}

fn open(whole: &Recipe, step: u64) -> Result<Checkpoint> {
    Checkpoint::open(&whole.run.dir.join(CKPT_DIR).join(checkpoint::step_dir(step)))
}

/// The stage whose turn it is at a checkpoint. At a border that is the later stage, unless the earlier one's last validation, or its
/// benchmark tasks, were cut short: they are made up for as that stage makes them.
fn stage_to_enter(whole: &Recipe, from: &Checkpoint) -> Result<usize> {
    let step = from.meta().step;
    let next = whole.stage_at(step);
    let last = DataState::of(from)?.stage.unwrap_or(next);
    let metrics = whole.run.dir.join(METRICS_FILE);
    if last == next || !metrics.is_file() {
        return Ok(next);
    }
    let validated = whole.eval.every.is_none() || whole.data.validation.is_empty();
    let validated = validated || report::without_validation(&metrics, step)?.is_none();
    let asked = whole.eval.tasks.is_empty() || report::has_benchmarks(&metrics, step)?;
    Ok(if validated && asked { next } else { last })
}
