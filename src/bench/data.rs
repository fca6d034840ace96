//! Reading a recipe's training data, against what its training uses up.

use std::time::{Duration, Instant};

use anyhow::Result;
use serde::Serialize;

use crate::data::Loader;
use crate::error::bad_input;
use crate::plan::missing_files;
use crate::recipe::Recipe;
use crate::train::config::{loader_config, source_specs};

/// Least batches that are read.
const LEAST_BATCHES: u64 = 3;

#[derive(Debug, Clone, Serialize)]
pub struct DataLine {
    pub documents: u64,
    pub tokens: u64,
    /// Seconds until the sources are open, and from there until the first batch is there.
    pub open_s: f64,
    pub first_batch_s: f64,
    /// Whole batches read one after the other by one thread.
    pub tokens_per_s: f64,
    pub batches: u64,
    /// Of the recipe's step.
    pub trainer_tokens_per_s: f64,
    /// `tokens_per_s` over `trainer_tokens_per_s`.
    pub ratio: f64,
}

/// Opens the sources of the recipe's first stage and reads batches for `seconds`.
///
/// # Errors
/// When shards are missing or damaged.
pub fn measure(recipe: &Recipe, seconds: f64, trainer_tokens_per_s: f64) -> Result<DataLine> {
    let shards = recipe.data.sources.iter().flat_map(|s| &s.shards).map(|s| s.as_os_str()).collect::<Vec<_>>();
    let of_source = |file: &std::path::PathBuf| shards.contains(&file.with_extension("").as_os_str());
    if let Some(file) = missing_files(recipe).iter().find(|f| of_source(f)) {
        return Err(bad_input(format!("{} is not there: `bench data` reads the recipe's training data", file.display())));
    }
    let started = Instant::now();
    let loader = Loader::open(loader_config(recipe), &source_specs(recipe, &vec![0; recipe.data.sources.len()]))?;
    let open_s = started.elapsed().as_secs_f64();
    let sequences = recipe.train.sequences_per_step() as usize;
    let started = Instant::now();
    loader.batch(0, 0..sequences)?;
    let first_batch_s = started.elapsed().as_secs_f64();
    let (started, until, mut batches) = (Instant::now(), Duration::from_secs_f64(seconds), 0);
    while batches < LEAST_BATCHES || started.elapsed() < until {
        batches += 1;
        std::hint::black_box(loader.batch(batches, 0..sequences)?);
    }
    let tokens_per_s = (batches * recipe.train.global_batch_tokens) as f64 / started.elapsed().as_secs_f64();
    let datasets = || (0..recipe.data.sources.len()).map(|i| loader.dataset(i));
    Ok(DataLine {
        documents: datasets().map(|d| d.num_documents()).sum(),
        tokens: datasets().map(|d| d.num_tokens()).sum(),
        open_s,
        first_batch_s,
        tokens_per_s,
        batches,
        trainer_tokens_per_s,
        ratio: tokens_per_s / trainer_tokens_per_s,
    })
}
