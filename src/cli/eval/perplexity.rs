//! `zaya eval --tasks perplexity`: perplexity and bits per byte of shards and texts.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::json;

use super::RunArgs;
use crate::checkpoint::ModelSource;
use crate::cli::{BackendName, claim_output, in_pool, unwritable};
use crate::error::{bad_input, exit_code};
use crate::eval::perplexity::{Options, Score, perplexity};
use crate::model::Model;
use crate::tensor::cpu::Cpu;
use crate::tensor::hip::Hip;
use crate::text::Eod;
use crate::train::backend::require_bf16;
use crate::train::candle_engine::Candle;
use crate::train::engine::{Engine, Native};

pub fn run(args: &RunArgs, model_dir: &Path, output: &Path, backend: BackendName) -> Result<u8> {
    if args.batch == 0 || args.seq_len == Some(0) {
        return Err(bad_input("--batch and --seq-len must be at least 1"));
    }
    let output = claim_file(output)?;
    let source = ModelSource::open(model_dir)?;
    let context = source.config().max_position_embeddings;
    if let Some(n) = args.seq_len.filter(|n| *n > context) {
        return Err(bad_input(format!("--seq-len {n} is longer than the model's context of {context} tokens")));
    }
    let precision = args.dtype.map_or_else(|| source.precision(), |d| d.precision());
    let recipe = source.recipe();
    let options = Options {
        seq_len: args.seq_len.unwrap_or_else(|| recipe.as_ref().map_or(2048, |r| r.train.seq_len).min(context)),
        batch: args.batch,
        document_mask: recipe.as_ref().is_some_and(|r| r.data.document_mask),
        field: args.field.clone(),
        tokenizer: args.tokenizer.clone().or_else(|| source.tokenizer()),
        eod: args.eod.clone().map_or(Eod::Find, Eod::Token),
    };
    in_pool(args.threads, || {
        let model = || Model::new(source.config().clone());
        let scores = match backend {
            BackendName::Cpu => score(&Native { backend: Cpu::new(precision), model: model() }, &source, &args.data, &options),
            BackendName::Hip => {
                require_bf16(precision)?;
                score(&Native { backend: Hip::open(0)?, model: model() }, &source, &args.data, &options)
            }
            BackendName::Candle => score(&Candle::new(source.config().clone(), precision)?, &source, &args.data, &options),
        }?;
        write(model_dir, &output, &options, &scores)?;
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
fn claim_file(output: &Path) -> Result<PathBuf> {
    let path = if output.extension().is_some_and(|e| e == "json") { output.to_path_buf() } else { output.join("results.json") };
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder).map_err(|e| unwritable(&path, &e))?;
    claim_output(&path)?;
    Ok(path)
}

fn write(model_dir: &Path, path: &Path, options: &Options, scores: &[Score]) -> Result<()> {
    let results = json!({
        "model": model_dir.display().to_string(),
        "zaya_version": env!("CARGO_PKG_VERSION"),
        "results": {"perplexity": scores},
        "config": {"seq_len": options.seq_len, "document_mask": options.document_mask},
    });
    let text = serde_json::to_string_pretty(&results)? + "\n";
    std::fs::write(path, text).with_context(|| format!("writing the results to {}", path.display()))?;
    say!("results in {}", path.display());
    Ok(())
}
