//! A whole run: start or resume, the loop, saving, stopping.

mod guarding;
mod saving;
mod uploading;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::Serialize;

use super::backend::{self, Fitted};
use super::benchmarks::Benchmarks;
use super::candle_engine::Candle;
use super::config::{balance_config, loader_config, source_specs};
use super::context_report::Measure;
use super::engine::Engine;
use super::extend::Extend;
use super::gpu;
use super::guards::Guards;
use super::lock::RunLock;
use super::prefetch::{DataTime, Prefetch};
use super::profile::{DATA, Profile, STEP};
use super::ranks;
use super::report::{self, Timing};
use super::spans::Spans;
use super::stages::{self, DataState, Ended, Kept, Leg};
use super::start::{
    check_tokenizer, claim, open_init, open_validation, refuse_other_tokenizer, refuse_short_data, tell_changes, tell_shares,
};
use super::state::TrainState;
use super::step::{Attempt, StepConfig, StepReport, Watch, agree, step};
use super::stop::{Outcome, Stop};
use super::uploader::Uploader;
use super::validate::{NamedSet, Score, score};
use super::writer::Writer;
use crate::checkpoint::{CKPT_DIR, Checkpoint};
use crate::data::Loader;
use crate::error::bad_input;
use crate::failpoint;
use crate::machine;
use crate::model::ParamTable;
use crate::model::init::initial_values;
use crate::monitor::metrics::METRICS_FILE;
use crate::monitor::progress::Shown;
use crate::monitor::{MetricsWriter, Progress};
use crate::optim::schedule::Schedule;
use crate::parallel::{Alone, Group, Sharing, launch};
use crate::plan::flops::Flops;
use crate::print::set_silent;
use crate::recipe::Recipe;
use crate::tensor::backend::Batch;
use crate::tensor::cpu::par;
use crate::tensor::trace;

/// Who computes loss and gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineKind {
    Cpu,
    Hip,
    Candle,
}

pub(crate) use saving::is_staged;

/// A signal may wait for so long until the step is done. Where steps take longer, it is heard between micro-batches.
const LONG_STEP_S: f64 = 5.0;

/// What the command line adds to a recipe.
#[derive(Debug, Clone)]
pub struct Options {
    pub engine: EngineKind,
    /// Ranks of this run, as threads of this process.
    pub ranks: usize,
    pub resume: bool,
    /// Where a run whose directory holds no checkpoint yet fetches one from: a store's URL or a folder. Goes with `resume`.
    pub resume_from: Option<String>,
    pub stop_at: Option<u64>,
    pub time_limit: Option<Duration>,
    /// Hugging Face directory whose weights a new run starts from.
    pub init_from: Option<PathBuf>,
    /// Checkpoint of another run that a new run of longer context starts from.
    pub extend: Option<Extend>,
    /// Where the trace of a few steps goes.
    pub profile: Option<PathBuf>,
}

/// The resolved recipe in a run directory.
pub const RECIPE_FILE: &str = "recipe.toml";
/// The run's tokenizer in a run directory, so that what it trained can be used without the recipe's files.
pub const TOKENIZER_FILE: &str = "tokenizer.json";

/// Trains as `recipe` says, on as many ranks as `options` say.
pub fn run(recipe: &Recipe, options: &Options) -> Result<Outcome> {
    let variable = |name: &str| std::env::var(name).ok();
    let launch = launch::detect(variable)?;
    let on_gpus = options.engine == EngineKind::Hip;
    if options.ranks > 1 || !(cfg!(feature = "mpi") || on_gpus) {
        launch::refuse_many_ranks(variable, launch::Alone::Build)?;
    }
    // Of processes, too, one speaks for all.
    set_silent(launch.is_some_and(|l| l.rank > 0));
    // First of all, so that a signal while data and weights are read is also one that saves and ends.
    let stop = Stop::install(options.time_limit.or(recipe.run.time_limit))?;
    if let Some(launch) = launch.filter(|_| on_gpus) {
        return ranks::on_gpus(recipe, options, stop, launch);
    }
    #[cfg(feature = "mpi")]
    if let Some(launch) = launch {
        return ranks::on_mpi(recipe, options, stop, launch);
    }
    if options.ranks > 1 {
        return ranks::on_threads(recipe, options, stop);
    }
    ranks::check_layouts(recipe, 1)?;
    par::pool(recipe.train.threads)?.install(|| {
        stages::each(recipe, options, None, |leg| {
            let recipe = leg.recipe()?;
            let table = ParamTable::new(&recipe.model);
            let alone = Alone::new(&table);
            match options.engine {
                EngineKind::Cpu => {
                    let Fitted { engine, recipe, reduced_from } = backend::fitting(&recipe, None, Ok)?;
                    Run::start(engine, &alone, &recipe, leg, options, &stop, reduced_from)?.train()
                }
                EngineKind::Hip => {
                    let Fitted { engine, recipe, reduced_from } = gpu::fitting(&recipe, 0, None, Ok)?;
                    let engine = gpu::Repeating::new(engine, recipe.train.gpu_graphs);
                    Run::start(engine, &Alone::new(&table), &recipe, leg, options, &stop, reduced_from)?.train()
                }
                EngineKind::Candle => {
                    let engine = Candle::new(recipe.model.clone(), recipe.train.precision)?;
                    Run::start(engine, &alone, &recipe, leg, options, &stop, None)?.train()
                }
            }
        })
    })
}

/// A save that failed because other ranks are lost.
#[derive(Debug)]
struct RanksLost;

impl std::fmt::Display for RanksLost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("other ranks were lost while a checkpoint was being saved")
    }
}

/// What only the first rank has.
pub(super) struct First {
    metrics: MetricsWriter,
    _lock: RunLock,
}

/// One stage of a run as one of its ranks sees it. All ranks go through it together; the first one speaks, writes and saves.
pub(super) struct Run<'a, E: Engine> {
    engine: E,
    sharing: &'a dyn Sharing<E::B>,
    /// Of the stage.
    recipe: &'a Recipe,
    whole: &'a Recipe,
    stage: usize,
    /// Steps of the stages before.
    steps_before: u64,
    /// Tokens of each source that the stages before have used.
    earlier_tokens: Vec<u64>,
    options: &'a Options,
    stop: &'a Stop,
    state: TrainState<E::B>,
    data: Prefetch,
    /// Batches that were drawn and not trained on, by their number in the run.
    refused: Spans,
    /// Batches that the recipe wants passed over.
    to_skip: Spans,
    guards: Guards,
    validation: Vec<NamedSet>,
    benchmarks: Option<Benchmarks>,
    tokenizer_hash: Option<String>,
    data_fingerprint: String,
    kept: Kept,
    /// Whether there was a checkpoint to begin with.
    resumed: bool,
    /// How far the newest checkpoint is: what `next_batch` was then, which no two states of a run share.
    saved: Option<u64>,
    /// The same of the save that was begun last.
    saving: u64,
    /// Of the first rank: writes checkpoints while training goes on.
    writer: Writer,
}

impl<'a, E: Engine> Run<'a, E> {
    /// `recipe`: of the leg's stage, as it fits into memory.
    pub(super) fn start(
        engine: E,
        sharing: &'a dyn Sharing<E::B>,
        recipe: &'a Recipe,
        mut leg: Leg<'a>,
        options: &'a Options,
        stop: &'a Stop,
        reduced_from: Option<usize>,
    ) -> Result<Self> {
        let dir = &recipe.run.dir;
        let world = sharing.mesh().map(|mesh| &mesh.world);
        let is_first = world.is_none_or(|world| world.index() == 0);
        let entered = !leg.kept.under_way;
        let (data, steps_before) = (leg.data_start()?, leg.steps_before());
        let Leg { whole, stage, ref from, .. } = leg;
        if let Some(from) = from.as_ref().filter(|_| entered && is_first) {
            tell_changes(if whole.num_stages() > 1 { whole } else { recipe }, from)?;
        }
        let loader = Loader::open(loader_config(recipe), &source_specs(recipe, &data.earlier_tokens))?;
        let validation = open_validation(recipe)?;
        let tokenizer_hash = check_tokenizer(recipe, &loader, &validation)?;
        let benchmarks = Benchmarks::open(recipe)?;
        let data_fingerprint = loader.fingerprint();

        let table = ParamTable::new(&recipe.model);
        let seed = recipe.run.seed;
        if from.is_some() && entered && options.init_from.is_some() {
            tell!("note: --init-from is for step 0 only: the weights are those of the checkpoint");
        }
        let init = options.init_from.as_deref().filter(|_| from.is_none());
        let hf = init.map(|dir| open_init(dir, recipe)).transpose()?;
        let (backend, balance) = (engine.backend(), balance_config(recipe));
        let mut state = TrainState::shared(backend, &recipe.model, &balance, sharing.ownership(), |id| match (&hf, from) {
            (Some(model), _) => model.read(id),
            // About to be overwritten by the checkpoint.
            (None, Some(_)) => Ok(vec![0.0; table.specs[id].numel()]),
            (None, None) if options.extend.is_some() => Ok(vec![0.0; table.specs[id].numel()]),
            (None, None) => Ok(initial_values(&table.specs[id], &recipe.model, seed)),
        })?;
        let source = options.extend.as_ref().filter(|_| from.is_none());
        if let Some(Extend { from: dir, reset_optimizer }) = source {
            let source = Checkpoint::open(dir)?;
            refuse_other_tokenizer(&source, tokenizer_hash.as_deref())?;
            match reset_optimizer {
                true => state.load_weights(backend, &source),
                false => state.load_all_but_step(backend, &source),
            }
            .with_context(|| format!("starting from {}", dir.display()))?;
        }
        let mut guards = Guards::new(&recipe.guards);
        if let Some(from) = from {
            let meta = from.meta();
            if meta.data_fingerprint.as_deref() != Some(data_fingerprint.as_str()) {
                return Err(bad_input(format!(
                    "resuming {}: the data sources hold other tokens than when the run was started (the shards' sizes, indices \
                     or tokens differ). Put the old shards back, or start a new run with another run.dir",
                    from.dir().display()
                )));
            }
            state.load(engine.backend(), from).with_context(|| format!("resuming from {}", from.dir().display()))?;
            guards.restore(&meta.guards).with_context(|| format!("resuming from {}", from.dir().display()))?;
            if let Some(mixture) = &data.mixture {
                // In batches of the stage, those that were refused included.
                let batches = state.step + data.refused.count() - data.refused.after_steps(steps_before);
                if loader.restore(batches, mixture)? && is_first {
                    tell_shares(&loader, &mixture.counts);
                }
            }
        }
        let batches =
            recipe.train.steps + data.refused.count() - data.refused.after_steps(steps_before).saturating_sub(steps_before);
        refuse_short_data(&loader, batches, recipe)?;
        let mut writer = Writer::default();
        if is_first && is_staged(recipe) {
            writer.reserve(state.tensors())?;
        }
        if let Some(world) = world {
            // Nothing is written before all ranks are ready.
            world.barrier("start of training")?;
        }
        if is_first && leg.kept.first.is_none() {
            let lock = match leg.kept.lock.take() {
                Some(lock) => lock,
                None => claim(dir)?,
            };
            if let Some(url) = &recipe.checkpoint.upload {
                leg.kept.uploader = Some(Uploader::start(&dir.join(CKPT_DIR), url, recipe.checkpoint.upload_retry)?);
            }
            leg.kept.first = Some(First { metrics: MetricsWriter::append(&dir.join(METRICS_FILE))?, _lock: lock });
        }
        let resumed = from.is_some();
        let saving = state.step + data.refused.count();
        let mut run = Self {
            engine,
            sharing,
            recipe,
            whole,
            stage,
            steps_before,
            earlier_tokens: data.earlier_tokens,
            options,
            stop,
            state,
            data: Prefetch::new(loader),
            refused: data.refused,
            to_skip: recipe.guards.skip_batches.iter().copied().collect(),
            guards,
            validation,
            benchmarks,
            tokenizer_hash,
            data_fingerprint,
            kept: leg.kept,
            resumed,
            saved: resumed.then_some(saving),
            saving,
            writer,
        };
        if resumed && entered {
            run.offer_start(run.state.step);
        }
        if let Some(found) = run.kept.buckets.take() {
            run.write_metrics(&report::buckets_sized(run.state.step, &found));
        }
        if let Some(asked) = reduced_from {
            run.write_metrics(&report::micro_batch_reduced(run.state.step, asked, recipe.train.micro_batch));
        }
        Ok(run)
    }

    fn world(&self) -> Option<&'a Group> {
        self.sharing.mesh().map(|mesh| &mesh.world)
    }

    /// Says where the rank is, for messages.
    fn at(&self, phase: &'static str) {
        self.sharing.at(self.state.step + 1, phase);
    }

    /// Why to end now, agreed by all ranks, where no step is about to be made.
    fn agreed_reason(&self) -> Result<Option<Outcome>> {
        let mut votes = self.stop.votes();
        if let Some(world) = self.world() {
            self.at("between steps");
            world.all_reduce("reasons to stop", &mut votes.0)?;
        }
        Ok(votes.reason())
    }

    /// Step after which the stage ends.
    fn stage_end(&self) -> u64 {
        self.steps_before + self.recipe.train.steps
    }

    /// Name of the stage, where the recipe has stages.
    fn stage_name(&self) -> Option<&'a str> {
        self.recipe.stages.first().map(|stage| stage.name.as_str())
    }

    /// What is written of the recipe: what the run is resumed with.
    fn written_recipe(&self) -> &'a Recipe {
        // Of one stage with the micro-batch that fits into memory.
        if self.whole.num_stages() > 1 { self.whole } else { self.recipe }
    }

    pub(super) fn train(mut self) -> Result<Ended> {
        let outcome = self.train_stage();
        if outcome.is_err() {
            self.abandon_save();
        }
        let outcome = outcome?;
        if outcome.is_some() {
            self.finish_uploads();
        }
        self.kept.under_way = true;
        Ok(Ended { outcome, kept: self.kept })
    }

    /// None when the stage is done and others follow.
    fn train_stage(&mut self) -> Result<Option<Outcome>> {
        let total = self.whole.stage_ends().last().copied().unwrap_or(0);
        let of_run = self.options.stop_at.map_or(total, |s| s.min(total));
        let until = of_run.min(self.stage_end());
        let end = match () {
            () if of_run > until => None,
            () if of_run < total => Some(Outcome::StopAt),
            () => Some(Outcome::Finished),
        };
        let entered = !self.kept.under_way;
        match self.resumed {
            true => {
                let step = self.state.step;
                if entered {
                    tell!("resuming at step {step} of {total}, {} tokens seen", self.state.tokens_seen);
                }
                if entered && !(self.finish_validation(step)? && self.finish_benchmarks(step)?) {
                    return Ok(self.agreed_reason()?.or(end));
                }
                if step >= until {
                    if end.is_some() {
                        tell!("nothing left to do: step {step} is done, and the run ends at step {until}");
                    }
                    return Ok(end);
                }
            }
            false => tell!("starting at step 0 of {total}"),
        }
        if self.whole.num_stages() > 1 {
            self.tell_stage();
        }
        if self.kept.first.is_some() {
            self.write_files()?;
        }
        if self.state.step == self.steps_before && self.options.extend.is_some() {
            self.report_context("before")?;
        }
        let cfg = StepConfig::of(self.recipe);
        let schedule = Schedule::of(self.recipe);
        let flops_per_token = Flops::of(self.recipe, &self.state.table).per_token();
        let ranks = self.world().map_or(1, Group::size) as f64;
        let peak_flops = match self.recipe.train.peak_flops {
            Some(given) => given,
            // Only the first rank tells how much of it is used.
            None if self.kept.first.is_none() => 1.0,
            None => machine::peak_flops(self.recipe.train.precision) * ranks,
        };
        let mut progress = self.kept.first.is_some().then(|| Progress::new(total, self.state.step));
        let start = self.state.step;
        if let Some(path) = self.options.profile.clone().filter(|_| self.kept.first.is_some()) {
            // It goes on from stage to stage.
            self.kept.profile.get_or_insert_with(|| Profile::new(path, of_run.saturating_sub(start)));
        }

        let (mut validated, mut last_step_s) = (true, None);
        let outcome = loop {
            if self.state.step >= until {
                // A validation that was cut short is made up for by whoever resumes.
                break if validated { end } else { self.agreed_reason()?.or(end) };
            }
            self.pass_over_named();
            failpoint::hit_at("step", self.state.step)?;
            self.kept.profile.iter_mut().for_each(Profile::before);
            let recorded = trace::phase(STEP);
            let started = Instant::now();
            let reading = trace::phase(DATA);
            let (batches, data) = self.micro_batches()?;
            drop(reading);
            let lr = schedule.lr_at(self.state.step - self.steps_before);
            let batch = self.next_batch();
            let (stop, guards) = (self.stop, &self.guards);
            let watch = Watch {
                batch,
                votes: &|| stop.votes(),
                interrupted: &|| stop.signalled().is_some(),
                long: last_step_s.is_none_or(|s| s > LONG_STEP_S),
                judge: &|loss, norm| guards.judge(loss, norm),
            };
            let attempt = step(&self.engine, &mut self.state, &cfg, self.sharing, &batches, lr, &watch);
            let report = match attempt.inspect_err(|_| self.sync_metrics())? {
                Attempt::Done(report) => report,
                Attempt::Stopped(votes) => break votes.reason(),
                // The step has not happened, and what interrupted it is seen before the next one.
                Attempt::Interrupted => continue,
                Attempt::Refused(refusal) => {
                    self.refuse(&refusal).inspect_err(|_| self.sync_metrics())?;
                    continue;
                }
            };
            drop(recorded);
            last_step_s = Some(started.elapsed().as_secs_f64());
            if report.updated {
                self.accept(report.mean_loss(), report.grad_norm);
            }
            self.kept.profile.iter_mut().for_each(Profile::after);
            let waits = self.sharing.take_waits();
            let timing = Timing { step_s: started.elapsed().as_secs_f64(), data, flops_per_token, peak_flops, waits };
            let now = self.state.step;

            let due = self.validation_due(now);
            let scores = if due { self.validate()? } else { Some(Vec::new()) };
            validated = scores.is_some();
            let scores = scores.unwrap_or_default();
            if let Some(progress) = &mut progress {
                self.show(progress, &report, &timing, &scores);
            }
            if due || now >= until || now.is_multiple_of(self.recipe.metrics.every) {
                let line = report::line(
                    now,
                    self.stage_name(),
                    self.state.tokens_seen,
                    &report,
                    &timing,
                    &scores,
                    self.kept.checkpoint_failures,
                );
                self.write_metrics(&line);
            }
            validated &= self.run_benchmarks(now)?;
            if now < until && now.is_multiple_of(self.recipe.checkpoint.every) {
                self.save()?;
            }
            self.look_at_save()?;
            self.look_at_uploads();
        };
        progress.iter().for_each(Progress::finish);
        self.finish_save()?;
        // Only the first rank knows what is saved.
        if agree(self.world(), self.kept.first.is_some() && self.saved != Some(self.next_batch()))? {
            self.save_now(true)?;
        }
        if self.state.step == self.stage_end() && self.options.extend.is_some() {
            self.report_context("after")?;
        }
        self.sync_metrics();
        // Not between stages: there it goes on.
        if let Some((profile, outcome)) = outcome.and_then(|outcome| Some((self.kept.profile.take()?, outcome))) {
            match outcome {
                Outcome::Signal(_) => profile.abandon(),
                _ => profile.report(self.recipe.train.precision),
            }
        }
        Ok(outcome)
    }

    /// The recipe and the tokenizer, for whoever uses the run directory later.
    fn write_files(&self) -> Result<()> {
        let dir = &self.recipe.run.dir;
        write_whole(&dir.join(RECIPE_FILE), self.written_recipe().to_toml().as_bytes())?;
        if let Some(tokenizer) = &self.recipe.tokenizer {
            let text = std::fs::read(tokenizer).with_context(|| format!("reading {}", tokenizer.display()))?;
            write_whole(&dir.join(TOKENIZER_FILE), &text)?;
        }
        Ok(())
    }

    /// A line that cannot be written (a full disk) does not end the run either.
    fn write_metrics(&mut self, line: &impl Serialize) {
        let Some(first) = &mut self.kept.first else { return };
        if let Err(e) = first.metrics.write(line) {
            tell!("warning: {e:#}; training goes on without this line of metrics");
        }
    }

    fn sync_metrics(&self) {
        let Some(first) = &self.kept.first else { return };
        if let Err(e) = first.metrics.sync() {
            tell!("warning: {e:#}");
        }
    }

    /// This rank's part of the global batch of the next step, cut into micro-batches.
    fn micro_batches(&mut self) -> Result<(Vec<Batch>, DataTime)> {
        let train = &self.recipe.train;
        let sequences = train.sequences_per_step() as usize;
        let (layout, rank) = self.sharing.place();
        let next = self.next_of_stage();
        self.data.take(next, &layout.micro_batches(rank, sequences, train.sequences_at_once()))
    }

    /// A function of the recipe and the step, not of where the run is stopped.
    fn validation_due(&self, step: u64) -> bool {
        let last = step == self.stage_end();
        !self.validation.is_empty() && self.recipe.eval.every.is_some_and(|n| last || step.is_multiple_of(n))
    }

    /// Scores of all held-out sets; None when a signal came.
    fn validate(&self) -> Result<Option<Vec<Score>>> {
        let (tokens, train) = (self.recipe.eval.tokens, &self.recipe.train);
        let interrupted = || self.stop.signalled().is_some();
        let (engine, params, sharing) = (&self.engine, &self.state.params, self.sharing);
        let micro = train.sequences_at_once();
        let one = |set| score(engine, params, sharing, set, tokens, micro, train.seq_len, &interrupted);
        self.validation.iter().map(one).collect()
    }

    /// Runs, tells and records the benchmark tasks that are due at `step`. False when a signal cuts them short.
    fn run_benchmarks(&mut self, step: u64) -> Result<bool> {
        let last = step == self.stage_end();
        let Some(benchmarks) = self.benchmarks.as_ref().filter(|b| b.due(step, last)) else { return Ok(true) };
        let interrupted = || self.stop.signalled().is_some();
        let results = benchmarks.run((step, last), &self.engine, &self.state.params, self.sharing, &interrupted)?;
        let Some(results) = results else { return Ok(false) };
        results.sentences().iter().for_each(|s| tell!("step {step}  {s}"));
        self.write_metrics(&report::benchmarks(step, self.stage_name(), &results));
        Ok(true)
    }

    /// As `finish_validation`, of benchmark tasks.
    fn finish_benchmarks(&mut self, step: u64) -> Result<bool> {
        let missing = match &self.kept.first {
            Some(first) if self.benchmarks.is_some() => !report::has_benchmarks(first.metrics.path(), step)?,
            _ => false,
        };
        if !agree(self.world(), missing)? {
            return Ok(true);
        }
        self.run_benchmarks(step)
    }

    /// Tells and records what the model makes of long context now. Without held-out data there is nothing to tell it by.
    fn report_context(&mut self, when: &str) -> Result<()> {
        if self.validation.is_empty() {
            tell!("note: the recipe has no data.validation, so the loss by position and retrieval are not measured");
            return Ok(());
        }
        let (engine, params, sharing) = (&self.engine, &self.state.params, self.sharing);
        let (train, interrupted) = (&self.recipe.train, &|| self.stop.signalled().is_some());
        let (micro_batch, seq_len, seed) = (train.micro_batch, train.seq_len, self.recipe.run.seed);
        let vocab_size = self.recipe.model.vocab_size;
        let measure = Measure { engine, params, sharing, micro_batch, seq_len, vocab_size, seed, interrupted };
        if let Some(report) = measure.report(&self.validation, self.recipe.eval.tokens)? {
            report.tell(when);
            self.write_metrics(&report::context(self.state.step, self.stage_name(), when, &report));
        }
        Ok(())
    }

    /// Makes up for a validation that a signal cut short before the run was saved at `step`: the step's line of metrics is
    /// written again, complete. False when a signal cuts it short once more.
    fn finish_validation(&mut self, step: u64) -> Result<bool> {
        if !self.validation_due(step) {
            return Ok(true);
        }
        let unfinished = match &self.kept.first {
            Some(first) => report::without_validation(first.metrics.path(), step)?,
            None => None,
        };
        if !agree(self.world(), unfinished.is_some())? {
            return Ok(true);
        }
        let Some(scores) = self.validate()? else { return Ok(false) };
        if let (Some(first), Some(text)) = (&mut self.kept.first, unfinished) {
            // The text itself: numbers that were read might come back changed in their last digit.
            let scores = serde_json::to_string(&report::validation(&scores))?;
            let start = text.strip_suffix('}').context("a line of metrics without an end")?;
            first.metrics.write_text(&format!("{start},{}", &scores[1..]))?;
        }
        Ok(true)
    }

    fn data_state(&self) -> Result<DataState> {
        let several = self.whole.num_stages() > 1;
        Ok(DataState {
            mixture: self.data.loader().state_at(self.next_of_stage())?,
            stage: several.then_some(self.stage),
            earlier_tokens: several.then(|| self.earlier_tokens.clone()),
            refused: self.refused.clone(),
        })
    }

    /// Steps at which one stage ends and another begins.
    fn borders(&self) -> Vec<u64> {
        let mut ends = self.whole.stage_ends();
        ends.pop();
        ends
    }

    fn tell_stage(&self) {
        let (t, p) = (&self.recipe.train, &self.recipe.parallel);
        tell!(
            "stage {} of {}, `{}`: steps {} to {}, {} sequences of {} tokens a step, RoPE base {}, cp {}, ep {}",
            self.stage + 1,
            self.whole.num_stages(),
            self.stage_name().unwrap_or(""),
            self.steps_before + 1,
            self.stage_end(),
            t.sequences_per_step(),
            t.seq_len,
            self.recipe.model.rope.theta,
            p.cp,
            p.ep
        );
    }

    fn show(&self, progress: &mut Progress, report: &StepReport, timing: &Timing, scores: &[Score]) {
        let step = self.state.step;
        if !report.updated {
            progress.println(&format!("warning: step {step}: no token of the batch has a label; nothing was updated"));
        }
        for s in scores {
            let bpb = s.bits_per_byte().map_or(String::new(), |b| format!("  {b:.4} bits per byte"));
            progress.println(&format!("step {step}  validation {}: loss {:.4}{bpb}", s.name, s.mean_loss()));
        }
        progress.step(Shown {
            step,
            loss: report.mean_loss(),
            tokens_per_s: timing.tokens_per_s(report.tokens),
            tokens_seen: self.state.tokens_seen,
        });
    }
}

/// Writes a small file under a temporary name, then renames it into place.
pub(super) fn write_whole(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut tmp = path.as_os_str().to_owned();
    tmp.push(".tmp");
    std::fs::write(&tmp, bytes).and_then(|()| std::fs::rename(&tmp, path)).with_context(|| format!("writing {}", path.display()))
}
