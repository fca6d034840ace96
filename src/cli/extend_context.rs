//! `zaya extend-context`.

use std::path::PathBuf;

use anyhow::Result;

use super::{BackendName, pretrain};
use crate::checkpoint::open_checkpoint;
use crate::recipe;
use crate::train::{Extend, Options, extend};

/// Train a model on at a longer context, as a new run.
///
/// Weights, and the optimizer's moments, are those of a checkpoint; step, learning rate and data begin at zero. The recipe says the new
/// length, RoPE base, data and parallelism; with [[stages]], the length grows in steps. Loss by position and retrieval over distance are
/// told before and after, of several stages before and after each.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// A checkpoint, or a run directory (its newest valid checkpoint).
    #[arg(long, value_name = "RUN_OR_CKPT")]
    from: PathBuf,

    /// The recipe of the longer context, a TOML file.
    #[arg(long, value_name = "FILE")]
    recipe: PathBuf,

    /// Writes a value over the recipe's, as in `zaya pretrain`.
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,

    /// Ranks to train on, as threads of this process.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = pretrain::parse_ranks)]
    ranks: usize,

    /// Checks the recipe against the checkpoint, prints what follows from it, and ends.
    #[arg(long)]
    dry_run: bool,

    /// Goes on from the newest checkpoint in the new `run.dir`.
    #[arg(long)]
    resume: bool,

    /// Begins with empty moments of the optimizer and of balancing.
    #[arg(long)]
    reset_optimizer: bool,

    /// Takes a sequence length that is not longer than the checkpoint's.
    #[arg(long)]
    allow_shorter: bool,
}

pub fn run(args: Args, backend: BackendName) -> Result<u8> {
    let recipe = recipe::load(&args.recipe, &args.set)?;
    // Held-out sets that training never scores are what the loss by position is told of.
    let warnings = recipe.warnings.iter().filter(|w| !w.ends_with(recipe::NEVER_EVALUATED));
    warnings.for_each(|w| tell!("warning: {w}"));
    let from = open_checkpoint(&args.from)?;
    extend::check(&recipe, &from, args.reset_optimizer, args.allow_shorter)?;
    if args.dry_run {
        return pretrain::dry_run(&recipe, args.ranks, backend);
    }
    pretrain::refuse_unready(&recipe)?;
    let options = Options {
        engine: backend.engine(),
        ranks: args.ranks,
        resume: args.resume,
        resume_from: None,
        stop_at: None,
        time_limit: None,
        init_from: None,
        extend: Some(Extend { from: from.dir().to_path_buf(), reset_optimizer: args.reset_optimizer }),
        profile: None,
    };
    pretrain::train(&recipe, &options)
}
