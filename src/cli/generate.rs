//! `zaya generate`.

use std::io::Write;
use std::path::PathBuf;

use anyhow::Result;
use tokenizers::Tokenizer;

use super::BackendName;
use crate::checkpoint::ModelSource;
use crate::error::{bad_input, exit_code};
use crate::eval::generate::{Cached, Continue, End, Sampling, Whole, generate};
use crate::model::Model;
use crate::tensor::cpu::Cpu;

/// Continue a prompt.
///
/// Prints the prompt and its continuation. The same seed gives the same text.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// A Hugging Face model directory, a checkpoint, or a run directory (its newest valid checkpoint).
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// Text to continue.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: String,
    /// Randomness: 0 = always the likeliest token, 1 = the model's own probabilities.
    #[arg(long, default_value_t = 0.8)]
    temperature: f64,
    /// Draw only from the likeliest tokens that together reach this probability.
    #[arg(long, default_value_t = 0.95)]
    top_p: f64,
    /// Tokens to add, at most.
    #[arg(long, default_value_t = 128)]
    max_tokens: usize,
    /// Another seed draws another text.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// tokenizer.json; by default the model's own.
    #[arg(long, value_name = "FILE")]
    tokenizer: Option<PathBuf>,
    /// Threads; by default all cores.
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
}

pub fn run(args: Args, backend: BackendName) -> Result<u8> {
    if !(args.temperature.is_finite() && args.temperature >= 0.0) {
        return Err(bad_input(format!("--temperature is {}, expected a number of at least 0", args.temperature)));
    }
    if !(0.0..=1.0).contains(&args.top_p) {
        return Err(bad_input(format!("--top-p is {}, expected a number from 0 to 1", args.top_p)));
    }
    let source = ModelSource::open(&args.model)?;
    let Some(path) = args.tokenizer.clone().or_else(|| source.tokenizer()) else {
        return Err(bad_input(format!("{} has no tokenizer.json that fits it: name one with --tokenizer", args.model.display())));
    };
    let tokenizer = Tokenizer::from_file(&path)
        .map_err(|e| bad_input(format!("{} is not a Hugging Face tokenizer.json: {e}", path.display())))?;
    source.warn_of_other_tokenizer(&path)?;
    let prompt = encode(&tokenizer, &args, &source)?;
    super::in_pool(args.threads, || match backend {
        BackendName::Cpu => {
            let backend = Cpu::new(source.precision());
            let model = Model::new(source.config().clone());
            let params = source.params(&backend)?;
            say(&mut Cached::new(&backend, &model, &params), &args, &source, &tokenizer, &prompt)
        }
        BackendName::Hip => Err(bad_input("zaya generate works on the processor: leave --backend hip out")),
        BackendName::Candle => {
            let values = (0..source.table().specs.len()).map(|id| source.read(id)).collect::<Result<Vec<_>>>()?;
            say(&mut Whole::new(source.config(), &values, source.precision())?, &args, &source, &tokenizer, &prompt)
        }
    })
}

/// The prompt's ids, with what the tokenizer itself puts in front. An empty prompt begins after the end of a text.
fn encode(tokenizer: &Tokenizer, args: &Args, source: &ModelSource) -> Result<Vec<u32>> {
    let cfg = source.config();
    let encoding =
        tokenizer.encode(args.prompt.as_str(), true).map_err(|e| bad_input(format!("the prompt cannot be tokenized: {e}")))?;
    let mut ids = encoding.get_ids().to_vec();
    if ids.is_empty() {
        let Some(start) = cfg.bos_token_id.or(cfg.eos_token_id) else {
            return Err(bad_input("the prompt is empty, and the model has no token that begins or ends a text"));
        };
        ids.push(start);
    }
    if let Some(id) = ids.iter().find(|id| **id as usize >= cfg.vocab_size) {
        return Err(bad_input(format!(
            "the prompt has token id {id}, but the model's vocabulary ends at {}: the tokenizer is not the model's",
            cfg.vocab_size - 1
        )));
    }
    if ids.len() >= cfg.max_position_embeddings {
        return Err(bad_input(format!(
            "the prompt has {} tokens and leaves no room in the model's context of {}",
            ids.len(),
            cfg.max_position_embeddings
        )));
    }
    Ok(ids)
}

fn say(model: &mut dyn Continue, args: &Args, source: &ModelSource, tokenizer: &Tokenizer, prompt: &[u32]) -> Result<u8> {
    let cfg = source.config();
    let mut out = std::io::stdout().lock();
    write!(out, "{}", args.prompt)?;
    out.flush()?;
    let decode = |ids: &[u32]| tokenizer.decode(ids, true).map_err(|e| anyhow::anyhow!("decoding {} tokens: {e}", ids.len()));
    // A token may be a part of a character, and decoders look at neighbours: the text grows by the difference of two
    // decodings of the whole, and waits while that ends in the middle of a character.
    let mut ids = prompt.to_vec();
    let mut shown = decode(&ids)?;
    let sampling = Sampling { temperature: args.temperature, top_p: args.top_p, seed: args.seed };
    let context = cfg.max_position_embeddings;
    let end = generate(model, prompt, args.max_tokens, context, cfg.eos_token_id, sampling, |id| {
        ids.push(id);
        let text = decode(&ids)?;
        if !text.ends_with('\u{fffd}')
            && let Some(new) = text.strip_prefix(shown.as_str())
        {
            write!(out, "{new}")?;
            out.flush()?;
            shown = text;
        }
        Ok(())
    })?;
    let text = decode(&ids)?;
    writeln!(out, "{}", text.strip_prefix(shown.as_str()).unwrap_or(""))?;
    if end == End::ContextFull {
        tell!("note: the model's context of {context} tokens is full");
    }
    Ok(exit_code::OK)
}
