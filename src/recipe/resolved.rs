//! The resolved recipe: plain typed numbers, every default filled in, every path absolute.

use std::path::PathBuf;
use std::time::Duration;

use crate::model::config::ModelConfig;
pub use crate::model::stack::Recompute;
pub use crate::tensor::backend::Precision;

/// Everything of a run. Read by [`super::load`]; keys and units are documented in `docs/RECIPE.md`.
#[derive(Debug, Clone)]
pub struct Recipe {
    pub run: Run,
    /// Name of the preset that the model started from, if any; `model` holds the outcome.
    pub preset: Option<String>,
    pub model: ModelConfig,
    /// A Hugging Face `tokenizer.json`.
    pub tokenizer: Option<PathBuf>,
    pub data: Data,
    pub train: Train,
    pub optimizer: Optimizer,
    pub schedule: ScheduleSpec,
    pub router: Router,
    pub checkpoint: Checkpoint,
    pub guards: Guards,
    pub eval: Eval,
    pub metrics: Metrics,
    pub parallel: Parallel,
    /// Empty for a recipe without `[[stages]]`. Else every field above holds the first stage's values.
    pub stages: Vec<Stage>,
    /// Legal but surprising things, one sentence each, for the user to read.
    pub warnings: Vec<String>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Run {
    pub dir: PathBuf,
    pub seed: u64,
    pub time_limit: Option<Duration>,
}

/// Token shards that are sampled together.
#[derive(Debug, Clone, PartialEq)]
pub struct DataSource {
    pub name: String,
    /// Prefixes of `.bin`/`.idx` pairs, absolute.
    pub shards: Vec<PathBuf>,
    /// Relative to the other sources' weights; not normalised. 1 and without meaning for held-out sets.
    pub weight: f64,
    /// How often the run may go through it; None = without end.
    pub max_epochs: Option<f64>,
}

/// How documents become sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Packing {
    /// A stream of documents end to end, cut every `seq_len` tokens.
    Stream,
    /// Whole documents, as many as fit.
    BestFit,
}

impl Packing {
    /// As recipes name it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stream => "stream",
            Self::BestFit => "best-fit",
        }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct Data {
    /// At least one, and at least one with a weight above 0.
    pub sources: Vec<DataSource>,
    pub validation: Vec<DataSource>,
    pub packing: Packing,
    pub document_mask: bool,
    pub eod_mask_loss: bool,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Train {
    pub steps: u64,
    /// A multiple of `micro_batch * seq_len`.
    pub global_batch_tokens: u64,
    /// Sequences of one forward and backward pass.
    pub micro_batch: usize,
    pub seq_len: usize,
    pub precision: Precision,
    pub head_precision: Precision,
    pub recompute: Recompute,
    pub deterministic: Deterministic,
    /// Of a rank; None = what the system gives.
    pub memory_limit_mib: Option<u64>,
    /// None = all cores.
    pub threads: Option<usize>,
    /// Whether a GPU's launches are repeated as graphs.
    pub gpu_graphs: bool,
    /// FLOP/s; None = measured.
    pub peak_flops: Option<f64>,
}

impl Train {
    /// Sequences of one forward and backward pass: the micro-batch, or one where the same bits are promised for any cut.
    pub fn sequences_at_once(&self) -> usize {
        match self.deterministic {
            Deterministic::Layout => 1,
            Deterministic::Run => self.micro_batch,
        }
    }

    /// Sequences of one optimizer step.
    pub fn sequences_per_step(&self) -> u64 {
        self.global_batch_tokens / self.seq_len as u64
    }
    /// Forward and backward passes of one optimizer step.
    pub fn micro_batches_per_step(&self) -> u64 {
        self.sequences_per_step() / self.sequences_at_once() as u64
    }
    pub fn total_tokens(&self) -> u64 {
        self.steps * self.global_batch_tokens
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct Optimizer {
    pub muon_momentum: f64,
    pub muon_weight_decay: f64,
    pub ns_steps: usize,
    pub muon_split_gate_up: bool,
    pub adam_betas: [f64; 2],
    pub adam_eps: f64,
    pub adam_weight_decay: f64,
    /// Largest global gradient norm; 0 = never clipped.
    pub clip: f64,
    /// Largest gradient norm of one expert; 0 = never clipped.
    pub expert_clip: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScheduleKind {
    Cosine,
    Constant,
    Linear,
    /// Warm-up, stable, decay.
    Wsd,
}

/// The learning rate's curve; `crate::optim::schedule` evaluates it.
#[derive(Debug, Clone, PartialEq)]
pub struct ScheduleSpec {
    pub kind: ScheduleKind,
    pub lr: f64,
    pub min_lr: f64,
    pub warmup_steps: u64,
    /// Only `Wsd` uses it.
    pub decay_steps: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Balance {
    AdamW,
    Sign,
    Pid,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Router {
    pub balance: Balance,
    pub balance_lr: f64,
    pub balance_betas: [f64; 2],
    pub balance_eps: f64,
    pub pid_proportional: f64,
    pub pid_integral: f64,
    pub pid_derivative: f64,
    /// Steps over which the controller's gain rises from 0.
    pub balance_warmup: u64,
    pub balance_skip_class: bool,
    /// Tokens at the start during which router weights do not move.
    pub freeze_tokens: u64,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Checkpoint {
    /// Steps.
    pub every: u64,
    /// Written while training goes on.
    pub asynchronous: bool,
    /// None = all are kept.
    pub keep_last: Option<u64>,
    pub keep_every: Option<u64>,
    /// Files that did not change are not written again.
    pub incremental: bool,
    /// URL of an object store.
    pub upload: Option<String>,
    /// How long a request to the store is tried again.
    pub upload_retry: Duration,
}

/// What becomes of a batch that is not to be trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Remedy {
    /// The run ends.
    Stop,
    /// The batch is passed over.
    Skip,
    /// The run goes back to its last checkpoint, and passes over all batches since.
    Rollback,
}

impl Remedy {
    /// As recipes and metrics name it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Skip => "skip",
            Self::Rollback => "rollback",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpikePolicy {
    /// Spikes are not looked for.
    Off,
    /// The batch is applied, and the spike told.
    Tell,
    Refuse(Remedy),
}

/// Batches that are refused.
#[derive(Debug, Clone, PartialEq)]
pub struct Guards {
    pub non_finite: Remedy,
    pub spike: SpikePolicy,
    /// Accepted steps.
    pub spike_window: usize,
    /// Robust standard deviations.
    pub spike_threshold: f64,
    pub limit: u64,
    /// First and last numbers of batches in the run.
    pub skip_batches: Vec<[u64; 2]>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Eval {
    /// Steps; None = never.
    pub every: Option<u64>,
    /// Tokens of each held-out set; None = all.
    pub tokens: Option<u64>,
    pub tasks: Vec<EvalTask>,
}

/// A benchmark that runs on the weights in training.
#[derive(Debug, Clone, PartialEq)]
pub struct EvalTask {
    /// Name of a task or group.
    pub task: String,
    /// Folder of data files.
    pub data: PathBuf,
    /// Steps; None = only the last one.
    pub every: Option<u64>,
    /// None = the task's own.
    pub num_fewshot: Option<usize>,
    /// Documents of each task; None = all.
    pub limit: Option<u64>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Metrics {
    /// Steps.
    pub every: u64,
}

/// What the same bits are promised for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Deterministic {
    Run,
    Layout,
}

/// How collectives travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Collectives {
    Auto,
    Flat,
    TwoStage,
}

/// How sequences are cut among the ranks that share them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CpChunks {
    Auto,
    Contiguous,
    Zigzag,
}

/// What becomes of groups that waste the links of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PartialNodes {
    Warn,
    Error,
    Allow,
}

/// How the ranks of a run share its work; how many there are, the command line or the launcher says.
#[derive(Debug, Clone, PartialEq)]
pub struct Parallel {
    pub cp: usize,
    pub ep: usize,
    pub cp_chunks: CpChunks,
    pub collectives: Collectives,
    /// None = the launcher's, else all ranks.
    pub ranks_per_node: Option<usize>,
    pub partial_nodes: PartialNodes,
    /// None = measured when the run starts.
    pub bucket_mib: Option<u64>,
    pub timeout: Duration,
}

/// What one stage of a recipe says in place of the recipe's other tables.
#[derive(Debug, Clone, PartialEq)]
pub struct Stage {
    pub name: String,
    pub steps: u64,
    pub global_batch_tokens: u64,
    pub micro_batch: usize,
    pub recompute: Recompute,
    pub seq_len: usize,
    pub rope_theta: f64,
    pub rope_theta_sliding: f64,
    pub schedule: ScheduleSpec,
    pub cp: usize,
    pub ep: usize,
    /// In the order of `data.sources`.
    pub weights: Vec<f64>,
}

/// Equal when every key says the same; warnings are not compared.
impl PartialEq for Recipe {
    fn eq(&self, other: &Self) -> bool {
        (&self.run, &self.preset, &self.model, &self.tokenizer, &self.data, &self.train)
            == (&other.run, &other.preset, &other.model, &other.tokenizer, &other.data, &other.train)
            && (
                &self.optimizer,
                &self.schedule,
                &self.router,
                &self.checkpoint,
                &self.guards,
                &self.eval,
                &self.metrics,
                &self.parallel,
                &self.stages,
            ) == (
                &other.optimizer,
                &other.schedule,
                &other.router,
                &other.checkpoint,
                &other.guards,
                &other.eval,
                &other.metrics,
                &other.parallel,
                &other.stages,
            )
    }
}

impl Recipe {
    /// Stages of the run; a recipe without `[[stages]]` is one.
    pub fn num_stages(&self) -> usize {
        self.stages.len().max(1)
    }

    /// Steps after which each stage ends, counted over the whole run; the last one is the length of the run.
    pub fn stage_ends(&self) -> Vec<u64> {
        if self.stages.is_empty() {
            return vec![self.train.steps];
        }
        let end = |sum: &mut u64, stage: &Stage| {
            *sum = sum.saturating_add(stage.steps);
            Some(*sum)
        };
        self.stages.iter().scan(0, end).collect()
    }

    /// The stage that makes the step which follows `step` finished ones: at a border it is the later one. Once the run is done, the
    /// last one.
    pub fn stage_at(&self, step: u64) -> usize {
        self.stage_ends().iter().position(|end| step < *end).unwrap_or(self.num_stages() - 1)
    }

    /// The recipe of each stage alone.
    pub fn each_stage(&self) -> impl Iterator<Item = Recipe> + '_ {
        (0..self.num_stages()).filter_map(|i| self.stage(i))
    }

    /// The recipe of stage `i` alone (None beyond the last).
    pub fn stage(&self, i: usize) -> Option<Recipe> {
        if self.stages.is_empty() {
            return (i == 0).then(|| self.clone());
        }
        let stage = self.stages.get(i)?;
        let mut out = self.clone();
        out.train.steps = stage.steps;
        out.train.global_batch_tokens = stage.global_batch_tokens;
        out.train.micro_batch = stage.micro_batch;
        out.train.recompute = stage.recompute;
        out.train.seq_len = stage.seq_len;
        out.model.rope.theta = stage.rope_theta;
        out.model.rope_sliding.theta = stage.rope_theta_sliding;
        out.schedule = stage.schedule.clone();
        (out.parallel.cp, out.parallel.ep) = (stage.cp, stage.ep);
        for (source, weight) in out.data.sources.iter_mut().zip(&stage.weights) {
            source.weight = *weight;
        }
        out.stages = vec![stage.clone()];
        Some(out)
    }

    /// The stage that the fields above describe.
    pub(super) fn as_stage(&self, name: String) -> Stage {
        Stage {
            name,
            steps: self.train.steps,
            global_batch_tokens: self.train.global_batch_tokens,
            micro_batch: self.train.micro_batch,
            recompute: self.train.recompute,
            seq_len: self.train.seq_len,
            rope_theta: self.model.rope.theta,
            rope_theta_sliding: self.model.rope_sliding.theta,
            schedule: self.schedule.clone(),
            cp: self.parallel.cp,
            ep: self.parallel.ep,
            weights: self.data.sources.iter().map(|s| s.weight).collect(),
        }
    }
}
