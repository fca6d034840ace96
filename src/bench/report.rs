//! What was measured, as `--json` writes it (docs/BENCH.md).

use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;

use super::checkpoint::CheckpointLine;
use super::collectives::Collectives;
use super::data::DataLine;
use super::gpu::Gpu;
use super::ranks::RanksLine;
use super::sweep::Sweep;
use super::table;
use super::timing::Times;
use super::tokenize::TokenizeLine;
use crate::machine::{self, Cpu, Peaks};
use crate::model::params::ParamTable;
use crate::plan::flops::Flops;
use crate::recipe::Recipe;
use crate::tensor::backend::Precision;
use crate::tensor::work::{Bound, Limits, Work};

#[derive(Debug, Clone, Serialize)]
pub struct Report {
    pub zaya_version: &'static str,
    pub unix_time: f64,
    /// Of the pool that everything ran on.
    pub threads: usize,
    /// Asked for each measurement.
    pub seconds: f64,
    pub machine: Cpu,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peaks: Option<Peaks>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recipe: Option<RecipeShape>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu: Option<Gpu>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gemm: Option<Vec<GemmLine>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sweep: Option<Sweep>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verbs: Option<Vec<VerbLine>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step: Option<StepLine>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub collectives: Option<Collectives>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ranks: Option<RanksLine>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<CheckpointLine>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data: Option<DataLine>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokenize: Option<TokenizeLine>,
    pub cases: Vec<CaseLine>,
}

impl Report {
    /// Of this machine, with nothing measured.
    pub fn empty(seconds: f64) -> Self {
        Self {
            zaya_version: env!("CARGO_PKG_VERSION"),
            unix_time: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64()),
            threads: rayon::current_num_threads(),
            seconds,
            machine: machine::describe(),
            peaks: None,
            recipe: None,
            gpu: None,
            gemm: None,
            sweep: None,
            verbs: None,
            step: None,
            collectives: None,
            ranks: None,
            checkpoint: None,
            data: None,
            tokenize: None,
            cases: Vec::new(),
        }
    }

    /// For people.
    pub fn table(&self) -> String {
        table::of(self)
    }
}

/// Numbers of the recipe that the rest depends on.
#[derive(Debug, Clone, Serialize)]
pub struct RecipeShape {
    pub parameters: u64,
    pub precision: Precision,
    pub micro_batch: usize,
    pub seq_len: usize,
    pub tokens_per_step: u64,
    pub micro_batches_per_step: u64,
    /// Forward and backward, by the formula of `--dry-run`.
    pub flops_per_token: f64,
}

impl RecipeShape {
    pub fn of(recipe: &Recipe) -> Self {
        let (table, train) = (ParamTable::new(&recipe.model), &recipe.train);
        Self {
            parameters: table.total(),
            precision: train.precision,
            micro_batch: train.sequences_at_once(),
            seq_len: train.seq_len,
            tokens_per_step: train.global_batch_tokens,
            micro_batches_per_step: train.micro_batches_per_step(),
            flops_per_token: Flops::of(recipe, &table).per_token(),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Pass {
    Forward,
    Backward,
    /// A verb whose backward contains its forward.
    ForwardBackward,
    /// Part of the optimizer.
    Update,
}

impl Pass {
    pub fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::ForwardBackward => "forward+backward",
            Self::Update => "update",
        }
    }
}

/// `y = x wᵀ` with x `[m, k]`, w `[n, k]`; backward: both gradients, twice the operations.
#[derive(Debug, Clone, Serialize)]
pub struct GemmLine {
    pub name: String,
    pub pass: Pass,
    pub precision: Precision,
    pub m: usize,
    pub n: usize,
    pub k: usize,
    #[serde(flatten)]
    pub times: Times,
    pub flops: f64,
    pub gflops: f64,
    /// Peak of this precision on all threads.
    pub limit_gflops: f64,
    /// `gflops` over `limit_gflops`.
    pub fraction: f64,
}

#[derive(Debug, Clone, Serialize)]
pub struct VerbLine {
    pub name: String,
    pub pass: Pass,
    /// Calls of this verb in one step of the recipe.
    pub calls_per_step: u64,
    #[serde(flatten)]
    pub times: Times,
    pub flops: f64,
    /// Bytes that must move at least.
    pub bytes: f64,
    pub gflops: f64,
    pub gbytes_per_s: f64,
    /// "compute" or "memory", whichever takes longer.
    pub bound: &'static str,
    /// Least seconds by that limit.
    pub limit_s: f64,
    /// `limit_s` over the median.
    pub fraction: f64,
}

impl VerbLine {
    pub fn new(name: String, pass: Pass, calls_per_step: u64, times: Times, work: Work, limits: Limits) -> Self {
        let limit_s = limits.seconds(work);
        Self {
            name,
            pass,
            calls_per_step,
            times,
            flops: work.flops,
            bytes: work.bytes,
            gflops: work.flops / times.median_s / 1e9,
            gbytes_per_s: work.bytes / times.median_s / 1e9,
            bound: match limits.bound(work) {
                Bound::Compute => "compute",
                Bound::Memory => "memory",
            },
            limit_s,
            fraction: limit_s / times.median_s,
        }
    }
}

/// A whole optimizer step, tokens dealt evenly to the experts. The parts are those of the step of median length.
#[derive(Debug, Clone, Serialize)]
pub struct StepLine {
    #[serde(flatten)]
    pub times: Times,
    pub tokens: u64,
    pub tokens_per_s: f64,
    pub forward_backward_s: f64,
    pub adamw_s: f64,
    pub muon_s: f64,
    /// The rest: gradient norm, balancing.
    pub other_s: f64,
    /// Of the whole step.
    pub muon_share: f64,
    /// Forward and backward, by the formula of `--dry-run`; Newton-Schulz beside it.
    pub flops: f64,
    pub newton_schulz_flops: f64,
    /// Of forward and backward.
    pub gflops: f64,
    /// Peak of the recipe's precision on all threads.
    pub limit_gflops: Option<f64>,
    /// Of forward and backward: `gflops` over `limit_gflops`.
    pub mfu: Option<f64>,
    /// Most memory of the process up to the end of the steps.
    pub peak_resident_bytes: Option<u64>,
}

impl StepLine {
    /// With the machine's peak in this precision as the limit.
    pub fn against(mut self, peaks: Option<&Peaks>, precision: Precision) -> Self {
        self.limit_gflops = peaks.map(|p| p.gflops(precision).all_threads);
        self.mfu = self.limit_gflops.map(|limit| self.gflops / limit);
        self
    }
}

/// One kernel at a given shape.
#[derive(Debug, Clone, Serialize)]
pub struct CaseLine {
    /// As given, every parameter spelled out.
    pub case: String,
    pub kind: &'static str,
    pub pass: Pass,
    pub precision: Precision,
    #[serde(flatten)]
    pub times: Times,
    pub flops: f64,
    pub gflops: f64,
}
