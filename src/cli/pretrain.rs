//! `zaya pretrain`.

use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;

use super::BackendName;
use crate::error::{bad_input, exit_code};
use crate::plan;
use crate::recipe::{self, Recipe, units};
use crate::train::{self, Options, Outcome};

/// Train a model as a recipe says.
///
/// The keys of a recipe are documented in docs/RECIPE.md.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The recipe, a TOML file. Paths in it are relative to its folder.
    #[arg(long, value_name = "FILE")]
    pub recipe: PathBuf,

    /// Writes a value over the recipe's, as if it stood in the file: --set train.seq_len=1024,
    /// --set data.sources.0.weight=2. May be given many times; the last one of a key holds.
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,

    /// Prints the resolved recipe and what follows from it (sizes, steps, FLOPs, memory, epochs), and ends.
    #[arg(long)]
    pub dry_run: bool,

    /// Goes on from the newest checkpoint in `run.dir`; begins at step 0 when there is none.
    #[arg(long)]
    pub resume: bool,

    /// As --resume; where `run.dir` holds no checkpoint yet, the newest one is fetched from here first: an object store (s3://...,
    /// gs://..., az://..., file:///...) or another run's directory. Every byte is verified.
    #[arg(long, value_name = "URL|DIR")]
    pub resume_from: Option<String>,

    /// Saves and ends once this many steps are done. The schedule still spans the recipe's run.
    #[arg(long, value_name = "STEP")]
    pub stop_at: Option<u64>,

    /// Saves and ends after this time: 90s, 30m, 1h30m. Goes before the recipe's `run.time_limit`.
    #[arg(long, value_name = "DURATION", value_parser = units::parse_duration)]
    pub time_limit: Option<Duration>,

    /// Begins with the weights of a model (weights only: step, learning rate and data start at zero).
    #[arg(long, value_name = "hf:DIR", value_parser = parse_init_from)]
    pub init_from: Option<InitFrom>,

    /// Ranks to train on, as threads of this process, each with its part of the threads. How they share the work, the recipe's
    /// [parallel] says.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = parse_ranks)]
    pub ranks: usize,

    /// Threads of the CPU backend, of all ranks together. Goes before the recipe's `train.threads`.
    #[arg(long, value_name = "N", value_parser = parse_threads)]
    pub threads: Option<usize>,

    /// Records steps 3 to 5, writes them as a trace for Perfetto, and tells at the end where their time went
    /// [default PATH: profile.json in run.dir].
    #[arg(long, value_name = "PATH", num_args = 0..=1)]
    pub profile: Option<Option<PathBuf>>,
}

/// Where `--profile` writes its trace in the run directory.
pub const PROFILE_FILE: &str = "profile.json";

/// Where the first weights come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InitFrom {
    /// A Hugging Face model directory.
    HuggingFace(PathBuf),
}

fn parse_init_from(text: &str) -> Result<InitFrom, String> {
    match text.strip_prefix("hf:") {
        Some(dir) if !dir.is_empty() => Ok(InitFrom::HuggingFace(PathBuf::from(dir))),
        _ => Err("expected hf:DIR, DIR being a Hugging Face model directory".to_string()),
    }
}

pub(super) fn parse_ranks(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|n| (1..=1024).contains(n)).ok_or_else(|| "expected a number of ranks from 1 to 1024".to_string())
}

fn parse_threads(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|n| (1..=65_536).contains(n)).ok_or_else(|| "expected a number of threads, at least 1".to_string())
}

/// The recipe as the command line leaves it: `--set`, `--threads` and `--time-limit` written over the file.
pub fn load_recipe(args: &Args) -> Result<Recipe> {
    let mut sets = args.set.clone();
    sets.extend(args.threads.map(|n| format!("train.threads={n}")));
    sets.extend(args.time_limit.map(|d| format!("run.time_limit={}", units::format_duration(d))));
    recipe::load(&args.recipe, &sets)
}

pub fn run(args: Args, backend: BackendName) -> Result<u8> {
    let recipe = load_recipe(&args)?;
    for warning in &recipe.warnings {
        tell!("warning: {warning}");
    }
    if args.dry_run {
        return dry_run(&recipe, args.ranks, backend);
    }
    refuse_unready(&recipe)?;
    if let Some(Some(path)) = &args.profile {
        super::claim_output(path)?;
    }
    let options = Options {
        engine: backend.engine(),
        ranks: args.ranks,
        resume: args.resume || args.resume_from.is_some(),
        resume_from: args.resume_from,
        stop_at: args.stop_at,
        time_limit: args.time_limit,
        init_from: args.init_from.map(|InitFrom::HuggingFace(dir)| dir),
        extend: None,
        profile: args.profile.map(|path| path.unwrap_or_else(|| recipe.run.dir.join(PROFILE_FILE))),
    };
    train(&recipe, &options)
}

/// Trains, and tells how it ended.
pub(super) fn train(recipe: &Recipe, options: &Options) -> Result<u8> {
    let outcome = train::run(recipe, options)?;
    let dir = recipe.run.dir.display();
    let (text, code) = match outcome {
        Outcome::Finished => (format!("finished; the run is in {dir}"), exit_code::OK),
        Outcome::StopAt => (format!("stopped as asked; go on with --resume; the run is in {dir}"), exit_code::OK),
        Outcome::TimeLimit => (format!("time limit reached, saved; go on with --resume; the run is in {dir}"), exit_code::OK),
        Outcome::Signal(s) => {
            let code = if s == signal_hook::consts::SIGINT { exit_code::INTERRUPTED } else { exit_code::TERMINATED };
            (format!("stopped by a signal, saved; go on with --resume; the run is in {dir}"), code)
        }
    };
    tell!("{text}");
    Ok(code)
}

/// What `--dry-run` only marks, a real start refuses.
pub(super) fn refuse_unready(recipe: &Recipe) -> Result<()> {
    let missing = plan::missing_files(recipe);
    if !missing.is_empty() {
        let list: Vec<String> = missing.iter().map(|f| format!("    {}", f.display())).collect();
        return Err(bad_input(format!(
            "cannot start training: {} files that the recipe names are not there (paths are relative to the recipe's folder):\n{}",
            missing.len(),
            list.join("\n")
        )));
    }
    Ok(())
}

pub(super) fn dry_run(recipe: &Recipe, ranks: usize, backend: BackendName) -> Result<u8> {
    let threads = train::ranks::threads_of_rank(recipe, ranks);
    let report = super::in_pool(Some(threads), || plan::report(recipe, ranks, backend.engine()))?;
    let text = format!("# Resolved recipe\n\n{}\n{report}", recipe.to_toml());
    match std::io::stdout().write_all(text.as_bytes()) {
        // The reader has seen enough.
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => {}
        outcome => outcome?,
    }
    Ok(exit_code::OK)
}
