//! Perplexity and bits per byte of a model on shards or text.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::Serialize;

use crate::data::ValidationSet;
use crate::data::build::{Corpus, TokenizeJob, Watcher, tokenize};
use crate::data::shard::{prefix_of, with_suffix};
use crate::error::bad_input;
use crate::model::ParamStore;
use crate::parallel::Alone;
use crate::text::Eod;
use crate::text::corpus::Input;
use crate::text::record::OnBad;
use crate::train::engine::Engine;
use crate::train::validate::{NamedSet, score};

/// How to read text and how to run.
#[derive(Debug, Clone)]
pub struct Options {
    /// Tokens of a window; every token is predicted once, from those before it in its window.
    pub seq_len: usize,
    /// Windows per forward pass.
    pub batch: usize,
    pub document_mask: bool,
    /// Field of JSON lines that holds the text.
    pub field: String,
    /// Needed for text, not for shards.
    pub tokenizer: Option<PathBuf>,
    pub eod: Eod,
}

/// Outcome on one data set. Sums, so that sets can be joined.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Score {
    pub data: String,
    /// Mean cross-entropy per predicted token, nats.
    pub loss: f64,
    /// exp(loss)
    pub perplexity: f64,
    /// Null when the shards do not say how many bytes of text they hold.
    pub bits_per_byte: Option<f64>,
    pub tokens_predicted: u64,
    /// UTF-8 bytes of text per token.
    pub bytes_per_token: Option<f64>,
}

/// Warnings about odd text go to stderr; evaluation shows no bar for tokenizing.
struct Quiet;

impl Watcher for Quiet {
    fn progress(&mut self, _bytes: u64) {}
    fn warn(&mut self, text: &str) {
        tell!("warning: {text}");
    }
}

/// Opens one `--data` argument: the prefix, `.bin` or `.idx` of a shard, or a text or JSONL file, which is tokenized into
/// `scratch` first.
fn open(path: &Path, number: usize, vocab_size: usize, options: &Options, scratch: &Path) -> Result<ValidationSet> {
    let prefix = prefix_of(path);
    let is_shard = ["bin", "idx"].iter().all(|end| with_suffix(&prefix, &format!(".{end}")).is_file());
    let shard = if is_shard {
        prefix
    } else {
        let Some(tokenizer) = &options.tokenizer else {
            return Err(bad_input(format!(
                "{} is text (no .bin and .idx of that name), and the model has no tokenizer.json beside it: name one with --tokenizer",
                path.display()
            )));
        };
        let output = scratch.join(format!("data-{number}"));
        let job = TokenizeJob {
            corpus: Corpus { inputs: vec![Input::find(path, None)?], field: options.field.clone(), on_bad: OnBad::Replace },
            tokenizer: tokenizer.clone(),
            eod: options.eod.clone(),
            output: output.clone(),
            overwrite: false,
            workers: 0,
            chat: None,
        };
        tokenize(&job, &mut Quiet)?;
        output
    };
    ValidationSet::open(&[shard], options.seq_len, options.document_mask, vocab_size)
}

/// Scores of each of `data`, in order. `shown` is called after each.
pub fn perplexity<E: Engine>(
    engine: &E,
    params: &ParamStore<E::B>,
    vocab_size: usize,
    data: &[PathBuf],
    options: &Options,
    mut shown: impl FnMut(&Score),
) -> Result<Vec<Score>> {
    let scratch = tempfile::tempdir()?;
    // All are opened before the first is scored: a wrong name should not cost an hour.
    let sets = data
        .iter()
        .enumerate()
        .map(|(i, path)| {
            let set = open(path, i, vocab_size, options, scratch.path()).with_context(|| format!("--data {}", path.display()))?;
            Ok(NamedSet { name: path.display().to_string(), set })
        })
        .collect::<Result<Vec<_>>>()?;
    let mut out = Vec::with_capacity(sets.len());
    for named in &sets {
        let alone = Alone::evaluating();
        let scored = score(engine, params, &alone, named, None, options.batch, options.seq_len, &|| false)?;
        let Some(s) = scored else { continue };
        let loss = s.mean_loss();
        let score = Score {
            data: s.name.clone(),
            loss,
            perplexity: loss.exp(),
            bits_per_byte: s.bits_per_byte(),
            tokens_predicted: s.loss.count,
            bytes_per_token: s.bytes_per_token,
        };
        shown(&score);
        out.push(score);
    }
    Ok(out)
}
