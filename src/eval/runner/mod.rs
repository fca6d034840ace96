//! Answers of a model to the requests of a whole run: each distinct prefix goes through the model once, without padding.
//!
//! `trie` holds the token ids of all requests. `walk` goes through it depth-first and fills batches, which cut it anywhere: a batch is
//! rows of many sequences, each of which sees the keys of its own past in one pool (`tensor::tree`). `scores` looks at logits of the
//! rows that are asked for, and no others. `likelihood` and `generate` are the two kinds of requests.
//!
//! Batches are a function of the requests and the options. On the CPU backend a row's numbers depend neither on the other rows of its
//! batch nor on the number of threads, so answers have the same bits for any token budget and any order of requests.

mod generate;
mod likelihood;
pub mod pool;
mod scores;
pub mod trie;
pub mod walk;

use std::time::Instant;

use anyhow::Result;
use serde::Serialize;

use crate::error::bad_input;
use crate::eval::harness::encode::Pair;
use crate::eval::harness::run::{Generation, Runner, Usage};
use crate::model::tree::{START, TreeCache, TreeStep, cache_bytes};
use crate::model::{Model, ParamStore};
use crate::tensor::backend::Backend;
use pool::{Pool, States};

/// How to run.
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    /// Tokens of one forward at most; at least 1.
    pub token_budget: usize,
    /// Bytes of keys, values and states at most. Less than the longest request needs counts as that much.
    pub memory_budget_bytes: u64,
    /// Longest input of the model, tokens.
    pub max_length: usize,
    /// Ends a generated text.
    pub end_of_text: Option<u32>,
    /// Of sampled texts.
    pub seed: u64,
}

impl Options {
    /// Tokens of a forward that keep the products busy, with activations that stay small.
    pub const TOKEN_BUDGET: usize = 2048;
    pub const MEMORY_BUDGET_BYTES: u64 = 1 << 30;

    /// For a model of `max_length` tokens, with the usual budgets.
    pub fn new(max_length: usize) -> Self {
        Self {
            token_budget: Self::TOKEN_BUDGET,
            memory_budget_bytes: Self::MEMORY_BUDGET_BYTES,
            max_length,
            end_of_text: None,
            seed: 1234,
        }
    }
}

/// What the calls of a runner have taken so far.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Counters {
    /// Rows that went through the model.
    pub forward_tokens: u64,
    /// Those of them that are generated tokens.
    pub generated_tokens: u64,
    /// Tokens of inputs that were not computed again, since another request begins alike.
    pub reused_tokens: u64,
    /// There are none: batches are ragged.
    pub padded_tokens: u64,
    /// Distinct prefixes of the inputs: the least that `forward_tokens - generated_tokens` can be.
    pub trie_tokens: u64,
    /// Rows whose logits were looked at.
    pub scored_rows: u64,
    /// Forwards.
    pub batches: u64,
    /// Keys, values and states that were held at a time at most.
    pub peak_cache_bytes: u64,
    pub seconds: f64,
}

/// How far a call is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Rows computed.
    pub done: u64,
    /// Rows to compute in all; of generations the longest that they may become.
    pub planned: u64,
}

/// Answers requests with a model. The weights may be those of a training run: nothing is changed.
pub struct ModelRunner<'a, B: Backend> {
    backend: &'a B,
    model: &'a Model,
    params: &'a ParamStore<B>,
    options: Options,
    counters: Counters,
    progress: Option<Box<dyn FnMut(Progress) + 'a>>,
}

/// The caches of one call.
struct Session<B: Backend> {
    cache: TreeCache<B>,
    pool: Pool,
    states: States,
}

impl<'a, B: Backend> ModelRunner<'a, B> {
    pub fn new(backend: &'a B, model: &'a Model, params: &'a ParamStore<B>, options: Options) -> Self {
        Self { backend, model, params, options, counters: Counters::default(), progress: None }
    }

    /// Has `each` called after every forward.
    pub fn on_progress(&mut self, each: impl FnMut(Progress) + 'a) {
        self.progress = Some(Box::new(each));
    }

    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Rows for tokens that may be held at a time: what the memory budget allows, at least `least`, and no more than `most`.
    fn capacity(&self, least: usize, most: usize) -> usize {
        let (row, _) = cache_bytes(&self.model.config);
        let allowed = usize::try_from(self.options.memory_budget_bytes / row.max(1) as u64).unwrap_or(usize::MAX);
        allowed.max(least).min(most)
    }

    fn session(&self, rows: usize) -> Result<Session<B>> {
        let cache = TreeCache::new(self.backend, &self.model.config, rows, 64)?;
        Ok(Session { cache, pool: Pool::new(rows), states: States::from(START + 1) })
    }

    /// Final hidden states of a step's rows.
    fn forward(&mut self, session: &mut Session<B>, step: &TreeStep) -> Result<B::Buf> {
        let wanted = session.states.end().next_power_of_two();
        session.cache.reserve_states(self.backend, &self.model.config, wanted)?;
        let y = self.model.decode_tree(self.backend, self.params, step, &mut session.cache)?;
        self.counters.forward_tokens += step.ids.len() as u64;
        self.counters.batches += 1;
        let (row, state) = cache_bytes(&self.model.config);
        let bytes = session.pool.peak() * row + session.states.end() * state;
        self.counters.peak_cache_bytes = self.counters.peak_cache_bytes.max(bytes as u64);
        Ok(y)
    }

    fn tell(&mut self, progress: Progress) {
        if let Some(tell) = &mut self.progress {
            tell(progress);
        }
    }

    /// # Errors
    /// A request that the model cannot be given: no input, or a longer one than it takes.
    fn check_length(&self, what: &str, request: usize, len: usize) -> Result<()> {
        let most = self.options.max_length;
        match len {
            0 => Err(bad_input(format!("{what} {request} has no context, not even a beginning-of-text token"))),
            _ if len > most => {
                Err(bad_input(format!("{what} {request} has an input of {len} tokens, but the model takes {most}: cut it first")))
            }
            _ => Ok(()),
        }
    }

    /// `run`, its time counted.
    fn timed<T>(&mut self, run: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let start = Instant::now();
        let result = run(self);
        self.counters.seconds += start.elapsed().as_secs_f64();
        result
    }

    /// As `Runner::loglikelihood`; `each` gets every answer as soon as it is known, with the number of its request.
    ///
    /// # Errors
    /// Requests without a context or a continuation, or longer than the model takes; and those of the model.
    pub fn loglikelihood_each(&mut self, pairs: &[Pair], each: &mut dyn FnMut(usize, (f64, bool)) -> Result<()>) -> Result<()> {
        self.timed(|runner| likelihood::run(runner, pairs, each))
    }

    /// As `Runner::generate`; `each` gets every text as soon as it is complete, with the number of its request.
    ///
    /// # Errors
    /// As `loglikelihood_each`.
    pub fn generate_each(
        &mut self,
        requests: &[Generation],
        done: &dyn Fn(&Generation, &[u32]) -> bool,
        each: &mut dyn FnMut(usize, Vec<u32>) -> Result<()>,
    ) -> Result<()> {
        self.timed(|runner| generate::run(runner, requests, done, each))
    }
}

impl<B: Backend> Runner for ModelRunner<'_, B> {
    fn loglikelihood(&mut self, pairs: &[Pair]) -> Result<Vec<(f64, bool)>> {
        let mut answers = vec![(0.0, false); pairs.len()];
        self.loglikelihood_each(pairs, &mut |i, answer| {
            answers[i] = answer;
            Ok(())
        })?;
        Ok(answers)
    }

    fn generate(&mut self, requests: &[Generation], done: &dyn Fn(&Generation, &[u32]) -> bool) -> Result<Vec<Vec<u32>>> {
        let mut texts = vec![Vec::new(); requests.len()];
        self.generate_each(requests, done, &mut |i, ids| {
            texts[i] = ids;
            Ok(())
        })?;
        Ok(texts)
    }

    fn usage(&self) -> Usage {
        let c = &self.counters;
        Usage { forward: c.forward_tokens, padded: c.padded_tokens, reused: c.reused_tokens }
    }
}

#[cfg(test)]
mod tests;
