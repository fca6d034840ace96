//! `zaya eval`.

mod inspect;
mod perplexity;
mod records;
mod tasks;

use std::path::PathBuf;

use anyhow::Result;
use clap::ValueEnum;

use super::BackendName;
use crate::error::bad_input;
use crate::eval::harness::compat::Compat;
use crate::tensor::backend::Precision;

/// Evaluate a model offline: benchmark tasks as lm-evaluation-harness scores them, or perplexity.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct Args {
    #[command(subcommand)]
    other: Option<Other>,
    #[command(flatten)]
    run: RunArgs,
}

#[derive(Debug, clap::Subcommand)]
enum Other {
    Ls(inspect::ListArgs),
    Show(inspect::ShowArgs),
    Validate(inspect::ValidateArgs),
    Compare(records::CompareArgs),
    Contamination(records::ContaminationArgs),
    Score(records::ScoreArgs),
}

// Options that a run needs are optional here, since the other commands go without them; clap asks for them.
#[derive(Debug, clap::Args)]
struct RunArgs {
    /// A Hugging Face model directory, a checkpoint, or a run directory (its newest valid checkpoint).
    #[arg(long, value_name = "DIR", required = true)]
    model: Option<PathBuf>,
    /// Names of tasks or groups, separated by commas; or perplexity.
    #[arg(long, value_name = "NAMES", value_delimiter = ',', required = true)]
    tasks: Vec<String>,
    /// For tasks: folders that hold their data. For perplexity: token shards (prefix of .bin and .idx), text files or JSON lines, plain,
    /// .gz or .zst.
    #[arg(long, value_name = "PATH", num_args = 1.., required = true)]
    data: Vec<PathBuf>,
    /// Where the results go: a folder; for perplexity also a file that ends in .json.
    #[arg(long, value_name = "OUT", required = true)]
    output: Option<PathBuf>,
    /// tokenizer.json for text; by default the model's own.
    #[arg(long, value_name = "FILE")]
    tokenizer: Option<PathBuf>,
    /// Threads; by default all cores.
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Arithmetic; by default what the model was made for.
    #[arg(long, value_enum)]
    dtype: Option<DtypeName>,
    #[command(flatten)]
    tasks_only: TaskArgs,
    /// Perplexity: end-of-document token of text, if not the tokenizer's only likely one.
    #[arg(long, value_name = "TOKEN")]
    eod: Option<String>,
    /// Perplexity: field of JSON lines that holds the text.
    #[arg(long, default_value = "text")]
    field: String,
    /// Perplexity: tokens of a window; by default that of the checkpoint's training, else 2048, never more than the model's context.
    #[arg(long, value_name = "N")]
    seq_len: Option<usize>,
    /// Perplexity: windows per forward pass.
    #[arg(long, value_name = "N", default_value_t = 4)]
    batch: usize,
}

// What only tasks need. (A doc comment would take the place of the subcommand's own.)
#[derive(Debug, clap::Args)]
struct TaskArgs {
    /// Examples in front of each question; by default the task's own number.
    #[arg(long, value_name = "K")]
    num_fewshot: Option<usize>,
    /// Documents of each task from the first: a number, or a share when below 1.
    #[arg(long, value_name = "N")]
    limit: Option<f64>,
    /// Seed of the choice of examples, and of texts that are drawn.
    #[arg(long, default_value_t = 1234)]
    seed: u64,
    /// Also write requests.jsonl: every request with its ids and its answer.
    #[arg(long)]
    log_requests: bool,
    /// Whose rules hold: lm-evaluation-harness 0.4.13 with its faults, or with them put right.
    #[arg(long, value_enum, default_value_t = CompatName::LmEval)]
    compat: CompatName,
    /// Longest input, tokens; by default the model's context.
    #[arg(long, value_name = "L")]
    max_length: Option<usize>,
    /// Whether the tokenizer's special tokens are put around texts; by default as the tokenizer does it.
    #[arg(long, value_name = "BOOL")]
    add_bos_token: Option<bool>,
    /// Tokens of one forward pass.
    #[arg(long, value_name = "N", default_value_t = 2048)]
    batch_tokens: usize,
    /// Most memory for the caches of prefixes, MiB.
    #[arg(long, value_name = "MIB", default_value_t = 1024)]
    cache_mib: u64,
    /// Folders or files (.toml, .yaml) that define tasks of one's own.
    #[arg(long, value_name = "PATH", num_args = 1..)]
    task_path: Vec<PathBuf>,
    /// Put over the tasks' parameters of generation: JSON, or KEY=VALUE,KEY=VALUE.
    #[arg(long, value_name = "KWARGS", allow_hyphen_values = true)]
    gen_kwargs: Option<String>,
    /// Run the programs that the model writes (HumanEval), each in a sandbox.
    #[arg(long)]
    allow_code_exec: bool,
    /// Go on where an earlier run into the same folder ended: what its requests.log knows is not asked again.
    #[arg(long)]
    resume: bool,
    /// Resamples of standard errors without a formula; 0 = none.
    #[arg(long, value_name = "N", default_value_t = 100_000)]
    bootstrap_iters: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum DtypeName {
    #[value(alias = "float32", alias = "fp32")]
    F32,
    #[value(alias = "bfloat16")]
    Bf16,
}

impl DtypeName {
    fn precision(self) -> Precision {
        match self {
            DtypeName::F32 => Precision::F32,
            DtypeName::Bf16 => Precision::Bf16,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum CompatName {
    #[value(name = "lm-eval", alias = "lm-eval-0.4.13")]
    LmEval,
    Strict,
}

impl CompatName {
    fn compat(self) -> Compat {
        match self {
            CompatName::LmEval => Compat::LmEval,
            CompatName::Strict => Compat::Strict,
        }
    }
}

pub fn run(args: Args, backend: BackendName) -> Result<u8> {
    match args.other {
        None => {}
        Some(Other::Ls(args)) => return inspect::list(&args),
        Some(Other::Show(args)) => return inspect::show(&args),
        Some(Other::Validate(args)) => return inspect::validate(&args),
        Some(Other::Compare(args)) => return records::compare_runs(&args),
        Some(Other::Contamination(args)) => return records::contamination(&args),
        Some(Other::Score(args)) => return records::score(&args),
    }
    let args = args.run;
    let (Some(model), Some(output)) = (&args.model, &args.output) else {
        return Err(bad_input("zaya eval needs --model, --tasks, --data and --output"));
    };
    match &args.tasks[..] {
        [one] if one == "perplexity" => perplexity::run(&args, model, output, backend),
        several if several.iter().any(|t| t == "perplexity") => {
            Err(bad_input("perplexity reads other data than the tasks: measure it in a run of its own"))
        }
        _ => tasks::run(&args, model, output, backend),
    }
}
