//! `zaya bench`: what this machine reaches, and what zaya reaches on it. The model's parts go through `trait Backend`, on numbers
//! and tokens that are made up; only the part `data` reads a recipe's training data, and `tokenize` text.

pub mod case;
mod checkpoint;
mod collectives;
mod data;
mod gemm;
mod gpu;
pub mod plot;
mod ranks;
mod rccl;
mod report;
mod step;
mod sweep;
mod synthetic;
mod table;
mod table_of_devices;
mod timing;
mod tokenize;
mod verbs;

use anyhow::Result;
use std::path::PathBuf;

pub use case::Case;
pub use checkpoint::CheckpointLine;
pub use collectives::{CollectiveLine, Collectives};
pub use data::DataLine;
pub use gpu::{Gpu, GpuMemory, PatternLine};
pub use ranks::RanksLine;
pub use report::*;
pub use sweep::{Point, Sweep};
pub use timing::Times;
pub use tokenize::{TokenizeInput, TokenizeLine};

use crate::machine::Peaks;
use crate::recipe::Recipe;
use crate::tensor::hip::Hip;

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
    Data,
    Tokenize,
}

#[derive(Debug, Clone)]
pub struct Options {
    /// A GPU is measured in place of the processor: of the parts, `Machine`, `Gemm` and `Collectives`.
    pub on_gpu: bool,
    /// Parts of the recipe's benchmark.
    pub parts: Vec<Part>,
    /// `Gemm` goes over many shapes, too.
    pub sweep: bool,
    /// Largest size of the sweep; None = as the device bears.
    pub largest: Option<usize>,
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
    if options.on_gpu {
        return run_on_gpu(recipe, options, progress);
    }
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
        true => Some(between_ranks(options.ranks, seconds, progress)?),
        false => None,
    };
    let checkpoint = match recipe.filter(|_| wants(Part::Checkpoint)) {
        Some(recipe) => {
            progress("saving and loading the state");
            Some(checkpoint::measure(recipe, options.dir.as_deref())?)
        }
        None => None,
    };
    let data = match recipe.filter(|_| wants(Part::Data)) {
        Some(recipe) => {
            progress("reading the data");
            let trainer = match &step {
                Some((step, _)) => step.tokens_per_s,
                None => step::measure(recipe, STEP_TIMES * seconds)?.tokens_per_s,
            };
            Some(data::measure(recipe, STEP_TIMES * seconds, trainer)?)
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
    let sweep = match wants(Part::Gemm) && options.sweep {
        true => Some(sweep::on_cpu(recipe, options.largest, seconds, progress)?),
        false => None,
    };
    let without_peaks = |p: &Part| matches!(p, Part::Collectives | Part::Ranks | Part::Checkpoint | Part::Data | Part::Tokenize);
    let needs_peaks = options.parts.iter().any(|p| !without_peaks(p));
    let peaks = needs_peaks.then(|| {
        progress("the machine");
        Peaks::measure(14.0 * seconds)
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
        recipe: recipe.map(RecipeShape::of),
        gemm,
        sweep,
        verbs,
        collectives,
        ranks,
        checkpoint,
        data,
        tokenize,
        step: step.map(|(s, precision)| s.against(peaks.as_ref(), precision)),
        peaks,
        cases,
        ..Report::empty(seconds)
    })
}

/// Between ranks that are threads, or, started by MPI, between its processes.
fn between_ranks(ranks: usize, seconds: f64, progress: &dyn Fn(&str)) -> Result<Collectives> {
    #[cfg(feature = "mpi")]
    if crate::parallel::launch::detect(|name| std::env::var(name).ok())?.is_some() {
        let transport = std::sync::Arc::new(crate::parallel::mpi::MpiRank::start(std::time::Duration::from_secs(120))?);
        let found = collectives::between_processes(transport.clone(), seconds, progress);
        crate::parallel::Transport::leave(&*transport);
        return found;
    }
    collectives::between_threads(ranks, seconds, progress)
}

/// The parts that there are of a GPU.
fn run_on_gpu(recipe: Option<&Recipe>, options: &Options, progress: &dyn Fn(&str)) -> Result<Report> {
    let wants = |part| options.parts.contains(&part);
    let (hip, facts) = (Hip::open(0)?, Hip::facts(0)?);
    let mut report = Report { recipe: recipe.map(RecipeShape::of), ..Report::empty(options.seconds) };
    let memory = match wants(Part::Machine) {
        true => Some(gpu::memory(&hip, &facts, options.seconds, progress)?),
        false => None,
    };
    if wants(Part::Gemm) {
        report.sweep = Some(sweep::on_gpu(&hip, &facts, recipe, options.largest, options.seconds, progress)?);
    }
    drop(hip);
    if wants(Part::Collectives) {
        report.collectives = Some(rccl::between_gpus(options.ranks, &facts, options.seconds, progress)?);
    }
    report.gpu = Some(Gpu { facts, memory });
    Ok(report)
}
