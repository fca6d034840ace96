//! `zaya bench`: what this machine reaches, and what zaya reaches on it. The model's parts go through `trait Backend`, on numbers
//! and tokens that are made up; only `tokenize` reads data.

pub mod case;
mod checkpoint;
mod collectives;
mod gemm;
mod ranks;
mod report;
mod step;
mod synthetic;
mod table;
mod timing;
mod tokenize;
mod verbs;

use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Result;

pub use case::Case;
pub use checkpoint::CheckpointLine;
pub use collectives::{CollectiveLine, Collectives};
pub use ranks::RanksLine;
pub use report::*;
pub use timing::Times;
pub use tokenize::{TokenizeInput, TokenizeLine};

use crate::machine::{self, Peaks};
use crate::recipe::Recipe;

/// A part of the benchmark of a recipe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    Machine,
    Gemm,
    Verbs,
    Step,
    Collectives,
    Ranks,
    Checkpoint,
    Tokenize,
}

#[derive(Debug, Clone)]
pub struct Options {
    /// Parts of the recipe's benchmark.
    pub parts: Vec<Part>,
    pub cases: Vec<Case>,
    /// Of `Collectives` and `Ranks`.
    pub ranks: usize,
    /// Where `Checkpoint` writes; None = a temporary folder beside the recipe's run.
    pub dir: Option<PathBuf>,
    /// What `Tokenize` works on.
    pub tokenize: Option<TokenizeInput>,
    /// Of each measurement.
    pub seconds: f64,
}

/// A whole step is timed for so many times the seconds of one kernel.
const STEP_TIMES: f64 = 10.0;

/// Measures on the thread pool that it is called in. `progress` is told what comes next. Without a recipe only the cases
/// and the machine can be measured.
pub fn run(recipe: Option<&Recipe>, options: &Options, progress: &dyn Fn(&str)) -> Result<Report> {
    let wants = |part| options.parts.contains(&part);
    let seconds = options.seconds;
    // First of all, while the process is small: its peak of memory is the process's.
    let step = match recipe.filter(|_| wants(Part::Step)) {
        Some(recipe) => {
            progress("a whole step");
            Some((step::measure(recipe, STEP_TIMES * seconds)?, recipe.train.precision))
        }
        None => None,
    };
    let ranks = match recipe.filter(|_| wants(Part::Ranks)) {
        Some(recipe) => {
            progress(&format!("a step on {} ranks and on one", options.ranks));
            Some(ranks::measure(recipe, options.ranks, rayon::current_num_threads(), 4.0 * STEP_TIMES * seconds)?)
        }
        None => None,
    };
    let collectives = match wants(Part::Collectives) {
        true => Some(collectives::measure(options.ranks, seconds, progress)?),
        false => None,
    };
    let checkpoint = match recipe.filter(|_| wants(Part::Checkpoint)) {
        Some(recipe) => {
            progress("saving and loading the state");
            Some(checkpoint::measure(recipe, options.dir.as_deref())?)
        }
        None => None,
    };
    let tokenize = match options.tokenize.as_ref().filter(|_| wants(Part::Tokenize)) {
        Some(input) => {
            progress("tokenizing");
            Some(tokenize::measure(input, STEP_TIMES * seconds)?)
        }
        None => None,
    };
    let mut cases = Vec::with_capacity(options.cases.len());
    for case in &options.cases {
        progress(&case.to_string());
        cases.push(case.measure(seconds)?);
    }
    let needs_peaks =
        options.parts.iter().any(|p| !matches!(p, Part::Collectives | Part::Ranks | Part::Checkpoint | Part::Tokenize));
    let peaks = needs_peaks.then(|| {
        progress("the machine");
        Peaks::measure(10.0 * seconds)
    });
    let (mut gemm, mut verbs) = (None, None);
    if let (Some(recipe), Some(peaks)) = (recipe, &peaks) {
        if wants(Part::Gemm) {
            gemm = Some(gemm::measure(recipe, peaks, seconds, progress)?);
        }
        if wants(Part::Verbs) {
            verbs = Some(verbs::measure(recipe, peaks, seconds, progress)?);
        }
    }
    Ok(Report {
        zaya_version: env!("CARGO_PKG_VERSION"),
        unix_time: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64()),
        threads: rayon::current_num_threads(),
        seconds,
        machine: machine::describe(),
        recipe: recipe.map(RecipeShape::of),
        gemm,
        verbs,
        collectives,
        ranks,
        checkpoint,
        tokenize,
        step: step.map(|(s, precision)| s.against(peaks.as_ref(), precision)),
        peaks,
        cases,
    })
}
