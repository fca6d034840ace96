//! `zaya tokenize` against its parts, in alternating rounds: encoding texts that lie in memory, reading without encoding, and the whole
//! way from files to a shard with one worker and with two.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, anyhow};
use serde::Serialize;

use super::timing::{Times, cpu_seconds};
use crate::data::build::{Corpus, TokenizeJob, Watcher, tokenize_loaded};
use crate::error::bad_input;
use crate::robust::median;
use crate::text::corpus::{self, Input, Wanted, expand};
use crate::text::record::{OnBad, document_of};
use crate::text::{Encoder, Eod};

/// What `zaya bench tokenize` measures on.
#[derive(Debug, Clone)]
pub struct TokenizeInput {
    pub tokenizer: PathBuf,
    pub inputs: Vec<PathBuf>,
    pub field: String,
}

/// Every part takes the text so many times in a row that it passes this many bytes: a cache that is still empty at first then
/// weighs little, as it does in a corpus of any size.
const PASS_BYTES: u64 = 100_000_000;
/// Text that is held in memory at most.
const MOST_TEXT: u64 = 1 << 30;
const LEAST_ROUNDS: usize = 3;

#[derive(Debug, Clone, Serialize)]
pub struct TokenizeLine {
    pub documents: u64,
    /// Of one pass.
    pub text_bytes: u64,
    /// Of the inputs as they lie on disk.
    pub file_bytes: u64,
    /// Passes over the text that each part makes in a round, with a cache that is empty at first.
    pub passes: usize,
    pub rounds: usize,
    /// Seconds that reading the `tokenizer.json` took, once; in no figure below.
    pub load_s: f64,
    /// Encoding, on one thread, texts that lie in memory.
    pub tokenizer: Rate,
    /// Reading, decompressing and taking JSON apart, on two threads.
    pub reading: Rate,
    /// From files to a published shard.
    pub one_worker: Rate,
    pub two_workers: Rate,
    /// CPU time of the tokenizer alone over that of the pipeline with one worker; median of the rounds' quotients.
    pub of_tokenizer: f64,
    /// The same of wall time.
    pub of_tokenizer_wall: f64,
    /// Wall time with one worker over that with two; median of the rounds' quotients.
    pub speedup: f64,
}

/// Millions of bytes of text a second.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Rate {
    #[serde(flatten)]
    pub times: Times,
    pub mb_per_s: f64,
    /// Of CPU time, all threads.
    pub mb_per_cpu_s: f64,
}

struct Quiet;

impl Watcher for Quiet {
    fn progress(&mut self, _: u64) {}
    fn warn(&mut self, _: &str) {}
}

pub fn measure(input: &TokenizeInput, seconds: f64) -> Result<TokenizeLine> {
    let inputs = expand(&input.inputs, None)?.inputs;
    inputs.iter().try_for_each(|i| i.check_columns(&input.field, &[]))?;
    let began = Instant::now();
    let encoder = Arc::new(Encoder::load(&input.tokenizer, &Eod::Absent)?);
    let load_s = began.elapsed().as_secs_f64();
    let texts = Arc::new(texts(&inputs, &input.field)?);
    let text_bytes: u64 = texts.iter().map(|t| t.len() as u64).sum();
    if text_bytes == 0 {
        return Err(bad_input("zaya bench tokenize: the inputs hold no text"));
    }
    let passes = PASS_BYTES.div_ceil(text_bytes) as usize;
    let repeated: Vec<Input> = std::iter::repeat_n(&inputs, passes).flatten().cloned().collect();
    let scratch = tempfile::tempdir().context("making a folder for the shards")?;
    let job = |workers| TokenizeJob {
        corpus: Corpus { inputs: repeated.clone(), field: input.field.clone(), on_bad: OnBad::Replace },
        tokenizer: input.tokenizer.clone(),
        eod: Eod::Absent,
        output: scratch.path().join("shard"),
        overwrite: true,
        workers,
        chat: None,
    };
    let (one, two) = (job(1), job(2));
    let mut rounds: Vec<[(f64, f64); 4]> = Vec::new();
    let began = Instant::now();
    while rounds.len() < LEAST_ROUNDS || began.elapsed().as_secs_f64() < seconds {
        rounds.push([
            timed(&encoder, || alone(&encoder, &texts, passes))?,
            timed(&encoder, || read(&repeated, &input.field))?,
            timed(&encoder, || tokenize_loaded(&one, encoder.clone(), &mut Quiet).map(drop))?,
            timed(&encoder, || tokenize_loaded(&two, encoder.clone(), &mut Quiet).map(drop))?,
        ]);
    }
    let megabytes = (text_bytes * passes as u64) as f64 / 1e6;
    let rate = |part: usize| {
        let times = Times::of(rounds.iter().map(|r| r[part].0).collect(), rounds.iter().map(|r| r[part].1).collect(), 1);
        Rate { times, mb_per_s: megabytes / times.median_s, mb_per_cpu_s: megabytes / times.cpu_s }
    };
    let quotient = |f: fn(&[(f64, f64); 4]) -> f64| median(rounds.iter().map(f).collect());
    Ok(TokenizeLine {
        documents: texts.len() as u64,
        text_bytes,
        file_bytes: inputs.iter().map(|i| i.file_bytes).sum(),
        passes,
        rounds: rounds.len(),
        load_s,
        tokenizer: rate(0),
        reading: rate(1),
        one_worker: rate(2),
        two_workers: rate(3),
        of_tokenizer: quotient(|r| r[0].1 / r[2].1),
        of_tokenizer_wall: quotient(|r| r[0].0 / r[2].0),
        speedup: quotient(|r| r[2].0 / r[3].0),
    })
}

/// Seconds of wall and of CPU time, with a cache of words that is empty at first.
fn timed(encoder: &Encoder, f: impl FnOnce() -> Result<()>) -> Result<(f64, f64)> {
    encoder.forget();
    let (started, cpu) = (Instant::now(), cpu_seconds());
    f()?;
    Ok((started.elapsed().as_secs_f64(), cpu_seconds() - cpu))
}

fn texts(inputs: &[Input], field: &str) -> Result<Vec<String>> {
    let (mut texts, mut bytes) = (Vec::new(), 0);
    each_text(inputs, field, |text| {
        bytes += text.len() as u64;
        texts.push(text.to_string());
        match bytes > MOST_TEXT {
            true => Err(bad_input(
                "zaya bench tokenize: the inputs hold more than 1 GiB of text, which is kept in memory: name fewer",
            )),
            false => Ok(()),
        }
    })?;
    Ok(texts)
}

fn each_text(inputs: &[Input], field: &str, mut f: impl FnMut(&str) -> Result<()>) -> Result<()> {
    let mut room = Vec::new();
    for block in corpus::read(Arc::new(inputs.to_vec()), Wanted { readers: 1, ..Wanted::all(field) }) {
        let block = block?;
        for (number, record) in block.records.iter().enumerate() {
            let layout = inputs[record.place.input].layout;
            if let Ok((document, _)) = document_of(&block, number, layout, field, OnBad::Replace, &[], &mut room) {
                f(&document.text)?;
            }
        }
    }
    Ok(())
}

/// On a thread of its own, as the pipeline's workers are.
fn alone(encoder: &Arc<Encoder>, texts: &Arc<Vec<String>>, passes: usize) -> Result<()> {
    let (encoder, texts) = (encoder.clone(), texts.clone());
    let encode = move || -> Result<()> {
        let mut ids = Vec::new();
        for text in std::iter::repeat_n(&texts, passes).flat_map(|t| t.iter()) {
            ids.clear();
            encoder.encode_into(text, &mut ids)?;
            std::hint::black_box(&ids);
        }
        Ok(())
    };
    std::thread::spawn(encode).join().map_err(|_| anyhow!("the tokenizer panicked"))?
}

fn read(inputs: &[Input], field: &str) -> Result<()> {
    each_text(inputs, field, |text| {
        std::hint::black_box(text);
        Ok(())
    })
}
