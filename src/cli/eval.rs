//! `zaya eval`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::ValueEnum;
use serde_json::json;

use super::BackendName;
use crate::checkpoint::ModelSource;
use crate::error::{bad_input, exit_code};
use crate::eval::perplexity::{Options, Score, perplexity};
use crate::model::Model;
use crate::tensor::cpu::Cpu;
use crate::tensor::hip::Hip;
use crate::text::Eod;
use crate::train::backend::require_bf16;
use crate::train::candle_engine::Candle;
use crate::train::engine::{Engine, Native};

/// Evaluate a model offline.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// A Hugging Face model directory, a checkpoint, or a run directory (its newest valid checkpoint).
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// What to measure.
    #[arg(long, value_enum, value_delimiter = ',', required = true)]
    tasks: Vec<Task>,
    /// For perplexity: token shards (prefix of .bin and .idx), text files or JSON lines, plain, .gz or .zst.
    #[arg(long, value_name = "PATH", num_args = 1.., required = true)]
    data: Vec<PathBuf>,
    /// Where the results go: a file that ends in .json, or a folder that gets a results.json.
    #[arg(long, value_name = "OUT")]
    output: PathBuf,
    /// tokenizer.json for text; by default the model's own.
    #[arg(long, value_name = "FILE")]
    tokenizer: Option<PathBuf>,
    /// End-of-document token of text, if not the tokenizer's only likely one.
    #[arg(long, value_name = "TOKEN")]
    eod: Option<String>,
    /// Field of JSON lines that holds the text.
    #[arg(long, default_value = "text")]
    field: String,
    /// Tokens of a window; by default that of the checkpoint's training, else 2048, never more than the model's context.
    #[arg(long, value_name = "N")]
    seq_len: Option<usize>,
    /// Windows per forward pass.
    #[arg(long, value_name = "N", default_value_t = 4)]
    batch: usize,
    /// Threads; by default all cores.
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Task {
    /// Perplexity and bits per byte of `--data`.
    Perplexity,
}

pub fn run(args: Args, backend: BackendName) -> Result<u8> {
    if args.batch == 0 || args.seq_len == Some(0) {
        return Err(bad_input("--batch and --seq-len must be at least 1"));
    }
    let output = claim_output(&args.output)?;
    let source = ModelSource::open(&args.model)?;
    let context = source.config().max_position_embeddings;
    if let Some(n) = args.seq_len.filter(|n| *n > context) {
        return Err(bad_input(format!("--seq-len {n} is longer than the model's context of {context} tokens")));
    }
    let recipe = source.recipe();
    let options = Options {
        seq_len: args.seq_len.unwrap_or_else(|| recipe.as_ref().map_or(2048, |r| r.train.seq_len).min(context)),
        batch: args.batch,
        document_mask: recipe.as_ref().is_some_and(|r| r.data.document_mask),
        field: args.field.clone(),
        tokenizer: args.tokenizer.clone().or_else(|| source.tokenizer()),
        eod: args.eod.clone().map_or(Eod::Find, Eod::Token),
    };
    super::in_pool(args.threads, || {
        let scores = match backend {
            BackendName::Cpu => {
                let cpu = Cpu::new(source.precision());
                score(&Native { backend: cpu, model: Model::new(source.config().clone()) }, &source, &args.data, &options)
            }
            BackendName::Hip => {
                require_bf16(source.precision())?;
                let backend = Hip::open(0)?;
                score(&Native { backend, model: Model::new(source.config().clone()) }, &source, &args.data, &options)
            }
            BackendName::Candle => {
                score(&Candle::new(source.config().clone(), source.precision())?, &source, &args.data, &options)
            }
        }?;
        write(&args, &output, &options, &scores)?;
        Ok(exit_code::OK)
    })
}

fn score<E: Engine>(engine: &E, source: &ModelSource, data: &[PathBuf], options: &Options) -> Result<Vec<Score>> {
    let params = source.params(engine.backend())?;
    perplexity(engine, &params, source.config().vocab_size, data, options, |s| {
        let bpb = s.bits_per_byte.map_or("unknown".to_string(), |b| format!("{b:.4}"));
        say!(
            "{}: loss {:.4}, perplexity {:.3}, bits per byte {bpb}, {} tokens",
            s.data,
            s.loss,
            s.perplexity,
            s.tokens_predicted
        );
    })
}

/// The file that the results go to. That it can be written is found out before the work, not after it.
fn claim_output(output: &Path) -> Result<PathBuf> {
    let path = if output.extension().is_some_and(|e| e == "json") { output.to_path_buf() } else { output.join("results.json") };
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder).map_err(|e| super::unwritable(&path, &e))?;
    super::claim_output(&path)?;
    Ok(path)
}

fn write(args: &Args, path: &Path, options: &Options, scores: &[Score]) -> Result<()> {
    let results = json!({
        "model": args.model.display().to_string(),
        "zaya_version": env!("CARGO_PKG_VERSION"),
        "results": {"perplexity": scores},
        "config": {"seq_len": options.seq_len, "document_mask": options.document_mask},
    });
    let text = serde_json::to_string_pretty(&results)? + "\n";
    std::fs::write(path, text).with_context(|| format!("writing the results to {}", path.display()))?;
    say!("results in {}", path.display());
    Ok(())
}
