//! A whole run: start or resume, the loop, saving, stopping.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde::Serialize;

use super::backend::{self, Fitted};
use super::candle_engine::Candle;
use super::config::{balance_config, loader_config, source_specs};
use super::engine::Engine;
use super::lock::RunLock;
use super::profile::{DATA, Profile, STEP};
use super::ranks;
use super::report::{self, Timing};
use super::start::{check_resume, check_tokenizer, claim, claim_existing, find_start, open_init, open_validation};
use super::state::TrainState;
use super::step::{StepConfig, StepReport, agree, step};
use super::stop::{Outcome, Stop};
use super::validate::{NamedSet, Score, score};
use crate::checkpoint::{self, CKPT_DIR, Checkpoint, Meta, RetainPolicy, SaveOptions, Saved};
use crate::data::{Loader, MixtureState};
use crate::error::bad_input;
use crate::failpoint;
use crate::machine;
use crate::model::ParamTable;
use crate::model::init::initial_values;
use crate::monitor::metrics::{METRICS_FILE, last_step};
use crate::monitor::progress::Shown;
use crate::monitor::{MetricsWriter, Progress};
use crate::optim::schedule::Schedule;
use crate::parallel::{Alone, Group, Layout, Sharing, launch};
use crate::plan::flops::Flops;
use crate::print::set_silent;
use crate::recipe::{Deterministic, Recipe};
use crate::tensor::backend::Batch;
use crate::tensor::cpu::par;
use crate::tensor::trace;

/// Who computes loss and gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineKind {
    Cpu,
    Candle,
}

/// What the command line adds to a recipe.
#[derive(Debug, Clone)]
pub struct Options {
    pub engine: EngineKind,
    /// Ranks of this run, as threads of this process.
    pub ranks: usize,
    pub resume: bool,
    pub stop_at: Option<u64>,
    pub time_limit: Option<Duration>,
    /// Hugging Face directory whose weights a new run starts from.
    pub init_from: Option<PathBuf>,
    /// Where the trace of a few steps goes.
    pub profile: Option<PathBuf>,
}

/// Name of the message by which the first rank asks the others for a tensor.
const TENSOR_TO_SAVE: &str = "number of the tensor to save";

/// The resolved recipe in a run directory.
pub const RECIPE_FILE: &str = "recipe.toml";
/// The run's tokenizer in a run directory, so that what it trained can be used without the recipe's files.
pub const TOKENIZER_FILE: &str = "tokenizer.json";

/// Trains as `recipe` says, on as many ranks as `options` say.
pub fn run(recipe: &Recipe, options: &Options) -> Result<Outcome> {
    let variable = |name: &str| std::env::var(name).ok();
    let launch = launch::detect(variable)?;
    if !cfg!(feature = "mpi") || options.ranks > 1 {
        launch::refuse_many_ranks(variable, launch::Alone::Build)?;
    }
    // Of processes, too, one speaks for all.
    set_silent(launch.is_some_and(|l| l.rank > 0));
    // First of all, so that a signal while data and weights are read is also one that saves and ends.
    let stop = Stop::install(options.time_limit.or(recipe.run.time_limit))?;
    #[cfg(feature = "mpi")]
    if let Some(launch) = launch {
        return ranks::on_mpi(recipe, options, stop, launch);
    }
    if options.ranks > 1 {
        return ranks::on_threads(recipe, options, stop);
    }
    ranks::layout(recipe, 1)?;
    par::pool(recipe.train.threads)?.install(|| {
        let table = ParamTable::new(&recipe.model);
        let alone = Alone::new(&table);
        match options.engine {
            EngineKind::Cpu => {
                let Fitted { engine, recipe, reduced_from } = backend::fitting(recipe, None, Ok)?;
                Run::start(engine, &alone, &recipe, options, stop, reduced_from)?.train()
            }
            EngineKind::Candle => {
                let engine = Candle::new(recipe.model.clone(), recipe.train.precision)?;
                Run::start(engine, &alone, recipe, options, stop, None)?.train()
            }
        }
    })
}

/// What only the first rank has.
struct First {
    metrics: MetricsWriter,
    _lock: RunLock,
}

/// A run as one of its ranks sees it. All ranks go through it together; the first one speaks, writes and saves.
pub(super) struct Run<'a, E: Engine> {
    engine: E,
    sharing: &'a dyn Sharing<E::B>,
    recipe: &'a Recipe,
    options: &'a Options,
    stop: Stop,
    state: TrainState<E::B>,
    loader: Loader,
    validation: Vec<NamedSet>,
    tokenizer_hash: Option<String>,
    data_fingerprint: String,
    first: Option<First>,
    /// Step that the run was resumed from; its checkpoint is not deleted.
    resumed_from: Option<u64>,
    /// Step of the newest checkpoint of this state.
    saved_step: Option<u64>,
    checkpoint_failures: u64,
}

impl<'a, E: Engine> Run<'a, E> {
    pub(super) fn start(
        engine: E,
        sharing: &'a dyn Sharing<E::B>,
        recipe: &'a Recipe,
        options: &'a Options,
        stop: Stop,
        reduced_from: Option<usize>,
    ) -> Result<Self> {
        let dir = &recipe.run.dir;
        let world = sharing.mesh().map(|mesh| &mesh.world);
        let is_first = world.is_none_or(|world| world.index() == 0);
        let (mut lock, mut from) = (None, None);
        if is_first {
            lock = claim_existing(dir, options)?;
            from = find_start(dir, options)?;
            if let Some(from) = &from {
                check_resume(recipe, from)?;
            }
        }
        if let Some(world) = world {
            // All ranks go on from what the first one found.
            let mut step = [from.as_ref().map_or(u64::MAX, |c: &Checkpoint| c.meta().step)];
            world.broadcast("step to go on from", 0, &mut step)?;
            if !is_first && step[0] != u64::MAX {
                from = Some(Checkpoint::open(&dir.join(CKPT_DIR).join(checkpoint::step_dir(step[0])))?);
            }
        }
        let loader = Loader::open(loader_config(recipe), &source_specs(&recipe.data.sources))?;
        let validation = open_validation(recipe)?;
        let tokenizer_hash = check_tokenizer(recipe, &loader, &validation)?;
        let data_fingerprint = loader.fingerprint();

        let table = ParamTable::new(&recipe.model);
        let seed = recipe.run.seed;
        if from.is_some() && options.init_from.is_some() {
            tell!("note: --init-from is for step 0 only: the weights are those of the checkpoint");
        }
        let init = options.init_from.as_deref().filter(|_| from.is_none());
        let hf = init.map(|dir| open_init(dir, recipe)).transpose()?;
        let (backend, balance) = (engine.backend(), balance_config(recipe));
        let mut state = TrainState::shared(backend, &recipe.model, &balance, sharing.ownership(), |id| match (&hf, &from) {
            (Some(model), _) => model.read(id),
            // About to be overwritten by the checkpoint.
            (None, Some(_)) => Ok(vec![0.0; table.specs[id].numel()]),
            (None, None) => Ok(initial_values(&table.specs[id], &recipe.model, seed)),
        })?;
        if let Some(from) = &from {
            let meta = from.meta();
            if meta.data_fingerprint.as_deref() != Some(data_fingerprint.as_str()) {
                return Err(bad_input(format!(
                    "resuming {}: the data sources hold other tokens than when the run was started (the shards' sizes, indices \
                     or tokens differ). Put the old shards back, or start a new run with another run.dir",
                    from.dir().display()
                )));
            }
            state.load(engine.backend(), from).with_context(|| format!("resuming from {}", from.dir().display()))?;
            let loader_state: MixtureState = serde_json::from_value(meta.loader.clone())
                .with_context(|| format!("{}: the loader's state in the manifest", from.dir().display()))?;
            loader.restore(state.step, &loader_state)?;
        }
        if let Some(world) = world {
            // Nothing is written before all ranks are ready.
            world.barrier("start of training")?;
        }
        let first = match is_first {
            true => {
                let lock = match lock {
                    Some(lock) => lock,
                    None => claim(dir)?,
                };
                Some(First { metrics: MetricsWriter::append(&dir.join(METRICS_FILE))?, _lock: lock })
            }
            false => None,
        };
        let step = from.as_ref().map(|_| state.step);
        let mut run = Self {
            engine,
            sharing,
            recipe,
            options,
            stop,
            state,
            loader,
            validation,
            tokenizer_hash,
            data_fingerprint,
            first,
            resumed_from: step,
            saved_step: step,
            checkpoint_failures: 0,
        };
        if let Some(asked) = reduced_from {
            run.write_metrics(&report::micro_batch_reduced(run.state.step, asked, recipe.train.micro_batch));
        }
        Ok(run)
    }

    fn world(&self) -> Option<&'a Group> {
        self.sharing.mesh().map(|mesh| &mesh.world)
    }

    /// Why to end now, agreed by all ranks.
    fn agreed_reason(&self) -> Result<Option<Outcome>> {
        let Some(world) = self.world() else { return Ok(self.stop.reason()) };
        let codes = world.all_gather_values("reasons to stop", self.stop.code())?;
        Ok(Stop::reason_of(codes.into_iter().max().unwrap_or(0)))
    }

    pub(super) fn train(mut self) -> Result<Outcome> {
        let total = self.recipe.train.steps;
        let until = self.options.stop_at.map_or(total, |s| s.min(total));
        let end = if until < total { Outcome::StopAt } else { Outcome::Finished };
        match self.resumed_from {
            Some(step) => {
                tell!("resuming at step {step} of {total}, {} tokens seen", self.state.tokens_seen);
                if !self.finish_validation(step)? {
                    return Ok(self.agreed_reason()?.unwrap_or(end));
                }
                if step >= until {
                    tell!("nothing left to do: step {step} is done, and the run ends at step {until}");
                    return Ok(end);
                }
            }
            None => tell!("starting at step 0 of {total}"),
        }
        if self.first.is_some() {
            self.write_files()?;
        }
        let cfg = StepConfig::of(self.recipe);
        let schedule = Schedule::of(self.recipe);
        let flops_per_token = Flops::of(self.recipe, &self.state.table).per_token();
        let ranks = self.world().map_or(1, Group::size) as f64;
        let peak_flops = match self.recipe.train.peak_flops {
            Some(given) => given,
            // Only the first rank tells how much of it is used.
            None if self.first.is_none() => 1.0,
            None => machine::peak_flops(self.recipe.train.precision) * ranks,
        };
        let mut progress = self.first.is_some().then(|| Progress::new(total, self.state.step));
        let start = self.state.step;
        let profiled = self.options.profile.clone().filter(|_| self.first.is_some());
        let mut profile = profiled.map(|path| Profile::new(path, until.saturating_sub(start)));

        let mut validated = true;
        let outcome = loop {
            if self.state.step >= until && validated {
                break end;
            }
            if let Some(reason) = self.agreed_reason()? {
                break reason;
            }
            failpoint::hit_at("step", self.state.step)?;
            let nth = self.state.step + 1 - start;
            profile.iter_mut().for_each(|p| p.before(nth));
            let recorded = trace::phase(STEP);
            let started = Instant::now();
            let reading = trace::phase(DATA);
            let batches = self.micro_batches()?;
            drop(reading);
            let data_s = started.elapsed().as_secs_f64();
            let lr = schedule.lr_at(self.state.step);
            let interrupted = || self.stop.signalled().is_some();
            let done = step(&self.engine, &mut self.state, &cfg, self.sharing, &batches, lr, &interrupted);
            // Interrupted between two micro-batches: the step has not happened.
            let Some(report) = done.inspect_err(|_| self.sync_metrics())? else { continue };
            drop(recorded);
            profile.iter_mut().for_each(|p| p.after(nth));
            let waits = self.sharing.take_waits();
            let timing = Timing { step_s: started.elapsed().as_secs_f64(), data_s, flops_per_token, peak_flops, waits };
            let now = self.state.step;

            let due = self.validation_due(now);
            let scores = if due { self.validate()? } else { Some(Vec::new()) };
            validated = scores.is_some();
            let scores = scores.unwrap_or_default();
            if let Some(progress) = &mut progress {
                self.show(progress, &report, &timing, &scores);
            }
            if due || now >= until || now.is_multiple_of(self.recipe.metrics.every) {
                let line = report::line(now, self.state.tokens_seen, &report, &timing, &scores, self.checkpoint_failures);
                self.write_metrics(&line);
            }
            if now < until && now.is_multiple_of(self.recipe.checkpoint.every) {
                self.save(false)?;
            }
        };
        progress.iter().for_each(Progress::finish);
        if self.saved_step != Some(self.state.step) {
            self.save(true)?;
        }
        self.sync_metrics();
        match (profile, outcome) {
            (Some(profile), Outcome::Signal(_)) => profile.abandon(),
            (Some(profile), _) => profile.report(self.recipe.train.precision),
            (None, _) => {}
        }
        Ok(outcome)
    }

    /// The recipe and the tokenizer, for whoever uses the run directory later.
    fn write_files(&self) -> Result<()> {
        let dir = &self.recipe.run.dir;
        write_whole(&dir.join(RECIPE_FILE), self.recipe.to_toml().as_bytes())?;
        if let Some(tokenizer) = &self.recipe.tokenizer {
            let text = std::fs::read(tokenizer).with_context(|| format!("reading {}", tokenizer.display()))?;
            write_whole(&dir.join(TOKENIZER_FILE), &text)?;
        }
        Ok(())
    }

    /// A line that cannot be written (a full disk) does not end the run either.
    fn write_metrics(&mut self, line: &impl Serialize) {
        let Some(first) = &mut self.first else { return };
        if let Err(e) = first.metrics.write(line) {
            tell!("warning: {e:#}; training goes on without this line of metrics");
        }
    }

    fn sync_metrics(&self) {
        let Some(first) = &self.first else { return };
        if let Err(e) = first.metrics.sync() {
            tell!("warning: {e:#}");
        }
    }

    /// This rank's part of the global batch of the next step, cut into micro-batches.
    fn micro_batches(&self) -> Result<Vec<Batch>> {
        let train = &self.recipe.train;
        let sequences = train.sequences_per_step() as usize;
        let micro = if train.deterministic == Deterministic::Layout { 1 } else { train.micro_batch };
        let mesh = self.sharing.mesh();
        let (layout, rank) = mesh.map_or((Layout::SINGLE, 0), |mesh| (mesh.layout, mesh.rank));
        layout.micro_batches(rank, sequences, micro).into_iter().map(|s| self.loader.batch(self.state.step, s)).collect()
    }

    /// A function of the recipe and the step, not of where the run is stopped.
    fn validation_due(&self, step: u64) -> bool {
        let last = step == self.recipe.train.steps;
        !self.validation.is_empty() && self.recipe.eval.every.is_some_and(|n| last || step.is_multiple_of(n))
    }

    /// Scores of all held-out sets; None when a signal came.
    fn validate(&self) -> Result<Option<Vec<Score>>> {
        let (tokens, train) = (self.recipe.eval.tokens, &self.recipe.train);
        let interrupted = || self.stop.signalled().is_some();
        let (engine, params, sharing) = (&self.engine, &self.state.params, self.sharing);
        let one = |set| score(engine, params, sharing, set, tokens, train.micro_batch, train.seq_len, &interrupted);
        self.validation.iter().map(one).collect()
    }

    /// Makes up for a validation that a signal cut short before the run was saved at `step`: the step's line of metrics is
    /// written again, complete. False when a signal cuts it short once more.
    fn finish_validation(&mut self, step: u64) -> Result<bool> {
        if !self.validation_due(step) {
            return Ok(true);
        }
        let unfinished = match &self.first {
            Some(first) => last_step(first.metrics.path())?
                .filter(|(_, line)| line["step"] == step && !line.contains_key(report::VAL_LOSS))
                .map(|(text, _)| text),
            None => None,
        };
        if !agree(self.world(), unfinished.is_some())? {
            return Ok(true);
        }
        let Some(scores) = self.validate()? else { return Ok(false) };
        if let (Some(first), Some(text)) = (&mut self.first, unfinished) {
            // The text itself: numbers that were read might come back changed in their last digit.
            let scores = serde_json::to_string(&report::validation(&scores))?;
            let start = text.strip_suffix('}').context("a line of metrics without an end")?;
            first.metrics.write_text(&format!("{start},{}", &scores[1..]))?;
        }
        Ok(true)
    }

    /// Saves a checkpoint. A failed save does not end a run that goes on (the next one may work), only one that ends here.
    fn save(&mut self, must: bool) -> Result<()> {
        let root = self.recipe.run.dir.join(CKPT_DIR);
        self.sharing.settle(&self.state.params)?;
        if let Some(world) = self.world().filter(|world| world.index() != 0) {
            self.bring_tensors(world)?;
            self.saved_step = Some(self.state.step);
            return Ok(());
        }
        // A checkpoint means that the lines of all its steps are safe.
        self.sync_metrics();
        match self.try_save(&root) {
            Ok(saved) => {
                self.saved_step = Some(self.state.step);
                saved.notes.iter().for_each(|n| tell!("warning: {n}"));
                self.retain(&root);
                Ok(())
            }
            Err(e) => {
                self.checkpoint_failures += 1;
                let e = e.context(format!("step {} could not be saved", self.state.step));
                self.write_metrics(&report::checkpoint_failed(self.state.step, self.checkpoint_failures, &e));
                if must {
                    return Err(e);
                }
                tell!("warning: {e:#}; training goes on, and the next checkpoint is tried as usual");
                Ok(())
            }
        }
    }

    fn try_save(&self, root: &Path) -> Result<Saved> {
        let mut meta = Meta {
            tokenizer_hash: self.tokenizer_hash.clone(),
            data_fingerprint: Some(self.data_fingerprint.clone()),
            loader: serde_json::to_value(self.loader.state_at(self.state.step)?)?,
            recipe: self.recipe.to_toml(),
            ..Meta::new(self.recipe.model.clone())
        };
        self.state.describe(&mut meta);
        let tensors = self.state.tensors();
        let (world, backend) = (self.world(), self.engine.backend());
        let mut read = |i: usize| {
            let values = match world {
                None => self.state.read(backend, &tensors[i].name)?,
                Some(world) => {
                    world.broadcast(TENSOR_TO_SAVE, 0, &mut [i as u64])?;
                    self.state.collect(backend, world, &tensors[i].name)?
                }
            };
            // Such a state trains no further; saved, it would be the one to resume from, and push good ones out.
            ensure!(values.iter().all(|x| x.is_finite()), "`{}` holds numbers that are not finite", tensors[i].name);
            Ok(values)
        };
        let saved = checkpoint::save(root, &meta, &tensors, &mut read, &SaveOptions::default());
        if let Some(world) = world {
            world.broadcast(TENSOR_TO_SAVE, 0, &mut [u64::MAX])?;
        }
        saved
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

    fn retain(&self, root: &Path) {
        let c = &self.recipe.checkpoint;
        let Some(keep_last) = c.keep_last else { return };
        let policy = RetainPolicy {
            keep_last: keep_last as usize,
            keep_every: c.keep_every.unwrap_or(0),
            protected: self.resumed_from.into_iter().collect(),
        };
        match checkpoint::retain(root, &policy) {
            Ok(done) => done.notes.iter().for_each(|n| tell!("warning: {n}")),
            Err(e) => tell!("warning: old checkpoints could not be looked through: {e:#}"),
        }
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
