//! A whole run: start or resume, the loop, saving, stopping.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::candle_engine::Candle;
use super::config::{balance_config, loader_config, source_specs};
use super::engine::{Engine, Native};
use super::launcher::refuse_many_ranks;
use super::peak::measured_peak_flops;
use super::report::{self, Timing};
use super::state::TrainState;
use super::step::{StepConfig, StepReport, step};
use super::stop::{Outcome, Stop};
use super::validate::{NamedSet, Score, score};
use crate::checkpoint::{self, CKPT_DIR, Checkpoint, Contents, Meta, RetainPolicy, SaveOptions};
use crate::data::{Loader, MixtureState, ValidationSet};
use crate::error::bad_input;
use crate::failpoint;
use crate::hf;
use crate::model::init::initial_values;
use crate::model::{Model, ParamTable};
use crate::monitor::progress::Shown;
use crate::monitor::{MetricsWriter, Progress, metrics::METRICS_FILE};
use crate::optim::schedule::Schedule;
use crate::plan::flops::Flops;
use crate::recipe::{self, Recipe};
use crate::tensor::cpu::Cpu;

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
    pub resume: bool,
    pub stop_at: Option<u64>,
    pub time_limit: Option<Duration>,
    /// Hugging Face directory whose weights a new run starts from.
    pub init_from: Option<PathBuf>,
}

/// The resolved recipe in a run directory.
pub const RECIPE_FILE: &str = "recipe.toml";
/// The run's tokenizer in a run directory, so that what it trained can be used without the recipe's files.
pub const TOKENIZER_FILE: &str = "tokenizer.json";

/// Trains as `recipe` says, in a thread pool of its own.
pub fn run(recipe: &Recipe, options: &Options) -> Result<Outcome> {
    refuse_many_ranks(|name| std::env::var(name).ok())?;
    let mut pool = rayon::ThreadPoolBuilder::new();
    if let Some(n) = recipe.train.threads {
        pool = pool.num_threads(n);
    }
    pool.build().context("starting the threads")?.install(|| match options.engine {
        EngineKind::Cpu => {
            let backend = Cpu::new(recipe.train.precision);
            Run::start(Native { backend, model: Model::new(recipe.model.clone()) }, recipe, options)?.train()
        }
        EngineKind::Candle => Run::start(Candle::new(recipe.model.clone(), recipe.train.precision)?, recipe, options)?.train(),
    })
}

struct Run<'a, E: Engine> {
    engine: E,
    recipe: &'a Recipe,
    options: &'a Options,
    state: TrainState<E::B>,
    loader: Loader,
    validation: Vec<NamedSet>,
    tokenizer_hash: Option<String>,
    data_fingerprint: String,
    /// Step that the run was resumed from; its checkpoint is not deleted.
    resumed_from: Option<u64>,
    /// Step of the newest checkpoint of this state.
    saved_step: Option<u64>,
    checkpoint_failures: u64,
}

impl<'a, E: Engine> Run<'a, E> {
    fn start(engine: E, recipe: &'a Recipe, options: &'a Options) -> Result<Self> {
        let root = recipe.run.dir.join(CKPT_DIR);
        let from = find_start(&root, options)?;
        if let Some(from) = &from {
            check_resume(recipe, from)?;
        }
        let loader = Loader::open(loader_config(recipe), &source_specs(&recipe.data.sources))?;
        let validation = open_validation(recipe)?;
        let tokenizer_hash = check_tokenizer(recipe, &loader, &validation)?;
        let data_fingerprint = loader.fingerprint();

        let table = ParamTable::new(&recipe.model);
        let seed = recipe.run.seed;
        let init = options.init_from.as_deref().filter(|_| from.is_none());
        let hf = init.map(|dir| open_init(dir, recipe)).transpose()?;
        let mut state = TrainState::new(engine.backend(), &recipe.model, &balance_config(recipe), |id| match (&hf, &from) {
            (Some(model), _) => model.read(id),
            // About to be overwritten by the checkpoint.
            (None, Some(_)) => Ok(vec![0.0; table.specs[id].numel()]),
            (None, None) => Ok(initial_values(&table.specs[id], &recipe.model, seed)),
        })?;
        if let Some(from) = &from {
            let meta = from.meta();
            if meta.data_fingerprint.as_deref() != Some(data_fingerprint.as_str()) {
                return Err(bad_input(format!(
                    "resuming {}: the data sources hold other tokens than when the run was started (the shards' sizes or \
                     indices differ). Put the old shards back, or start a new run with another run.dir",
                    from.dir().display()
                )));
            }
            state.load(engine.backend(), from).with_context(|| format!("resuming from {}", from.dir().display()))?;
            let loader_state: MixtureState = serde_json::from_value(meta.loader.clone())
                .with_context(|| format!("{}: the loader's state in the manifest", from.dir().display()))?;
            loader.restore(state.step, &loader_state)?;
        }
        let step = from.as_ref().map(|_| state.step);
        Ok(Self {
            engine,
            recipe,
            options,
            state,
            loader,
            validation,
            tokenizer_hash,
            data_fingerprint,
            resumed_from: step,
            saved_step: step,
            checkpoint_failures: 0,
        })
    }

    fn train(mut self) -> Result<Outcome> {
        let total = self.recipe.train.steps;
        let until = self.options.stop_at.map_or(total, |s| s.min(total));
        match self.resumed_from {
            Some(step) => eprintln!("resuming at step {step} of {total}, {} tokens seen", self.state.tokens_seen),
            None => eprintln!("starting at step 0 of {total}"),
        }
        if self.state.step >= until {
            eprintln!("nothing left to do: step {} is done, and the run ends at step {until}", self.state.step);
            return Ok(if until < total { Outcome::StopAt } else { Outcome::Finished });
        }
        let dir = &self.recipe.run.dir;
        std::fs::create_dir_all(dir).with_context(|| format!("creating the run directory {}", dir.display()))?;
        write_whole(&dir.join(RECIPE_FILE), self.recipe.to_toml().as_bytes())?;
        if let Some(tokenizer) = &self.recipe.tokenizer {
            let text = std::fs::read(tokenizer).with_context(|| format!("reading {}", tokenizer.display()))?;
            write_whole(&dir.join(TOKENIZER_FILE), &text)?;
        }
        let mut metrics = MetricsWriter::append(&dir.join(METRICS_FILE))?;
        let stop = Stop::install(self.options.time_limit.or(self.recipe.run.time_limit))?;
        let cfg = StepConfig::of(self.recipe);
        let schedule = Schedule::of(self.recipe);
        let flops_per_token = Flops::of(self.recipe, &self.state.table).per_token();
        let peak_flops = self.recipe.train.peak_flops.unwrap_or_else(measured_peak_flops);
        let mut progress = Progress::new(total, self.state.step);

        let outcome = loop {
            if let Some(reason) = stop.reason() {
                break reason;
            }
            failpoint::hit_at("step", self.state.step)?;
            let started = Instant::now();
            let batches = self.micro_batches()?;
            let data_s = started.elapsed().as_secs_f64();
            let lr = schedule.lr_at(self.state.step);
            let interrupted = || stop.signalled().is_some();
            let done = step(&self.engine, &mut self.state, &cfg, &batches, lr, &interrupted);
            let done = match done {
                Ok(done) => done,
                Err(e) => {
                    metrics.sync()?;
                    return Err(e);
                }
            };
            // Interrupted between two micro-batches: the step has not happened.
            let Some(report) = done else { continue };
            let timing = Timing { step_s: started.elapsed().as_secs_f64(), data_s, flops_per_token, peak_flops };
            let now = self.state.step;
            let last = now >= until;

            let scores = if last || self.recipe.eval.every.is_some_and(|n| now.is_multiple_of(n)) {
                self.validate(&interrupted)?
            } else {
                Vec::new()
            };
            if last || now.is_multiple_of(self.recipe.checkpoint.every) {
                self.save(last)?;
            }
            self.show(&mut progress, &report, &timing, &scores);
            if last || !scores.is_empty() || now.is_multiple_of(self.recipe.metrics.every) {
                let line = report::line(now, self.state.tokens_seen, &report, &timing, &scores, self.checkpoint_failures);
                metrics.write(&line)?;
            }
            if last {
                break if until < total { Outcome::StopAt } else { Outcome::Finished };
            }
        };
        progress.finish();
        if self.saved_step != Some(self.state.step) {
            self.save(true)?;
        }
        metrics.sync()?;
        Ok(outcome)
    }

    /// The global batch of the next step, cut into micro-batches.
    fn micro_batches(&self) -> Result<Vec<crate::tensor::backend::Batch>> {
        let (sequences, micro) = (self.recipe.train.sequences_per_step() as usize, self.recipe.train.micro_batch);
        (0..sequences).step_by(micro).map(|s| self.loader.batch(self.state.step, s..(s + micro).min(sequences))).collect()
    }

    /// Scores of all held-out sets; none when interrupted.
    fn validate(&self, interrupted: &dyn Fn() -> bool) -> Result<Vec<Score>> {
        let (tokens, train) = (self.recipe.eval.tokens, &self.recipe.train);
        let mut scores = Vec::new();
        for set in &self.validation {
            match score(&self.engine, &self.state.params, set, tokens, train.micro_batch, train.seq_len, interrupted)? {
                Some(score) => scores.push(score),
                None => return Ok(Vec::new()),
            }
        }
        Ok(scores)
    }

    /// Saves a checkpoint. A failed save does not end a run that goes on (the next one may work), only one that ends here.
    fn save(&mut self, must: bool) -> Result<()> {
        let root = self.recipe.run.dir.join(CKPT_DIR);
        let mut meta = Meta {
            tokenizer_hash: self.tokenizer_hash.clone(),
            data_fingerprint: Some(self.data_fingerprint.clone()),
            loader: serde_json::to_value(self.loader.state_at(self.state.step)?)?,
            recipe: self.recipe.to_toml(),
            ..Meta::new(self.recipe.model.clone())
        };
        self.state.describe(&mut meta);
        let tensors = self.state.tensors();
        let mut read = |i: usize| self.state.read(self.engine.backend(), &tensors[i].name);
        match checkpoint::save(&root, &meta, &tensors, &mut read, &SaveOptions::default()) {
            Ok(saved) => {
                self.saved_step = Some(self.state.step);
                saved.notes.iter().for_each(|n| eprintln!("warning: {n}"));
                self.retain(&root);
                Ok(())
            }
            Err(e) => {
                self.checkpoint_failures += 1;
                let e = e.context(format!("step {} could not be saved", self.state.step));
                if must {
                    return Err(e);
                }
                eprintln!("warning: {e:#}; training goes on, and the next checkpoint is tried as usual");
                Ok(())
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
            Ok(done) => done.notes.iter().for_each(|n| eprintln!("warning: {n}")),
            Err(e) => eprintln!("warning: old checkpoints could not be looked through: {e:#}"),
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

/// The checkpoint to go on from; None = step 0.
fn find_start(root: &Path, options: &Options) -> Result<Option<Checkpoint>> {
    let there = checkpoint::list(root)?;
    if !options.resume {
        if let Some(step) = there.first() {
            return Err(bad_input(format!(
                "{} already holds a checkpoint of step {step}: go on with it by --resume, or choose another run.dir",
                root.display()
            )));
        }
        return Ok(None);
    }
    let found = checkpoint::latest_valid(root)?;
    found.skipped.iter().for_each(|s| eprintln!("warning: {s}"));
    match found.checkpoint {
        Some(c) if c.contents() != Contents::Training => {
            Err(bad_input(format!("{} holds weights only, and no optimizer state to resume with", c.dir().display())))
        }
        Some(c) => Ok(Some(c)),
        None if !there.is_empty() => bail!(
            "{} holds {} checkpoints, and none of them is valid (see the warnings). Move them away to start at step 0",
            root.display(),
            there.len()
        ),
        None => {
            eprintln!("--resume: {} holds no checkpoint yet, so this run starts at step 0", root.display());
            Ok(None)
        }
    }
}

/// Refuses to go on with a recipe that makes it another run; tells what else has changed.
fn check_resume(recipe: &Recipe, from: &Checkpoint) -> Result<()> {
    let name = format!("{} (its recipe)", from.dir().display());
    let old = recipe::load_resolved(&name, &from.meta().recipe)?;
    let differences = recipe.resume_differences(&old);
    if !differences.refused.is_empty() {
        return Err(bad_input(format!(
            "resuming {}: the recipe is not the one that the run was started with:\n  - {}\nSet these back, or start a new run \
             with another run.dir (docs/RECIPE.md lists what may change)",
            from.dir().display(),
            differences.refused.join("\n  - ")
        )));
    }
    differences.allowed.iter().for_each(|d| eprintln!("note: {d}"));
    Ok(())
}

/// A model to take weights from; its parameters must be those of the recipe's model.
fn open_init(dir: &Path, recipe: &Recipe) -> Result<hf::HfModel> {
    let model = hf::load(dir)?;
    let shape = |t: &ParamTable| t.specs.iter().map(|s| (s.name.clone(), s.shape.clone())).collect::<Vec<_>>();
    let (theirs, ours) = (shape(&model.table), shape(&ParamTable::new(&recipe.model)));
    if theirs != ours {
        let first = theirs.iter().zip(&ours).find(|(a, b)| a != b);
        let detail = match first {
            Some(((name, a), (other, b))) if name == other => format!("`{name}` is {a:?} there and {b:?} in the recipe"),
            _ => format!("it has {} parameter tensors, the recipe's model {}", theirs.len(), ours.len()),
        };
        return Err(bad_input(format!(
            "--init-from hf:{}: the model there has another shape than the recipe's `model`: {detail}",
            dir.display()
        )));
    }
    if model.config != recipe.model {
        eprintln!(
            "note: {} was trained with other settings (RoPE, norms, skip mode or token ids); the recipe's hold",
            dir.display()
        );
    }
    Ok(model)
}

fn open_validation(recipe: &Recipe) -> Result<Vec<NamedSet>> {
    let open = |s: &recipe::DataSource| {
        let set = ValidationSet::open(&s.shards, recipe.train.seq_len, recipe.data.document_mask, recipe.model.vocab_size)
            .with_context(|| format!("held-out data `{}`", s.name))?;
        Ok(NamedSet { name: s.name.clone(), set })
    };
    recipe.data.validation.iter().map(open).collect()
}

/// Hash of the recipe's tokenizer file, which must be the one that wrote the shards, where they say which.
fn check_tokenizer(recipe: &Recipe, loader: &Loader, validation: &[NamedSet]) -> Result<Option<String>> {
    let training = loader.source_names().enumerate().map(|(i, name)| (name, loader.dataset(i)));
    let held_out = validation.iter().map(|v| (v.name.as_str(), v.set.dataset()));
    let of_shards: Vec<(&str, &str)> =
        training.chain(held_out).filter_map(|(name, data)| Some((name, data.tokenizer_sha256()?))).collect();
    let (expected, what) = match (&recipe.tokenizer, of_shards.first()) {
        (Some(path), _) => (crate::text::tokenizer_sha256(path)?, format!("the recipe's tokenizer {}", path.display())),
        (None, Some((name, hash))) => (hash.to_string(), format!("data source `{name}`")),
        (None, None) => return Ok(None),
    };
    if let Some((name, _)) = of_shards.iter().find(|(_, hash)| *hash != expected) {
        return Err(bad_input(format!(
            "the shards of `{name}` were written with another tokenizer than {what}: their ids mean other text. Tokenize the \
             data again, or name the right tokenizer"
        )));
    }
    Ok(Some(expected))
}

/// Writes a small file under a temporary name, then renames it into place.
fn write_whole(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut tmp = path.as_os_str().to_owned();
    tmp.push(".tmp");
    std::fs::write(&tmp, bytes).and_then(|()| std::fs::rename(&tmp, path)).with_context(|| format!("writing {}", path.display()))
}
