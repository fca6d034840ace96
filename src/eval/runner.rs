//! Answers requests one sequence at a time, with the caches of generation.

use anyhow::Result;
use rayon::prelude::*;

use super::generate::Sampling;
use super::harness::encode::Pair;
use super::harness::run::{Generation, Runner, Usage};
use crate::data::order::hash;
use crate::model::{Cx, Model, ParamStore};
use crate::tensor::backend::{Backend, Batch};

/// How to work.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Rows of one forward pass.
    pub token_budget: usize,
    /// Most memory for caches, bytes.
    pub memory_budget_bytes: u64,
    /// Longest input of the model, tokens.
    pub max_length: usize,
    pub end_of_text: Option<u32>,
    /// Of generations that are drawn.
    pub seed: u64,
}

/// A model that answers requests.
pub struct ModelRunner<'a, B: Backend> {
    backend: &'a B,
    model: &'a Model,
    params: &'a ParamStore<B>,
    options: Options,
    usage: Usage,
}

impl<'a, B: Backend> ModelRunner<'a, B> {
    pub fn new(backend: &'a B, model: &'a Model, params: &'a ParamStore<B>, options: Options) -> Self {
        Self { backend, model, params, options, usage: Usage::default() }
    }

    /// Logits `[n, V]` of the last `n` of `ids`, which follow `past` tokens in `cache`.
    fn logits(&mut self, ids: &[u32], past: usize, n: usize, cache: &mut crate::model::stack::Cache<B>) -> Result<Vec<f32>> {
        let batch = Batch { batch: 1, seq: ids.len(), past, ids: ids.to_vec(), ..Batch::default() };
        let rows = self.backend.rows(&batch)?;
        let y = self.model.decode(&Cx::new(self.backend, self.params, &rows), 1, cache)?;
        self.usage.forward += ids.len() as u64;
        let last = self.backend.last_rows(1, &y, n)?;
        self.backend.download(&self.backend.logits(&last, &self.params[self.model.table.embed])?)
    }
}

/// log p of `id`, and whether it is the argmax (of equal logits, the lowest id).
fn log_prob(logits: &[f32], id: u32) -> (f64, bool) {
    let best = logits.iter().enumerate().fold(0, |best, (i, x)| if *x > logits[best] { i } else { best });
    let max = f64::from(logits[best]);
    let total: f64 = logits.iter().map(|x| (f64::from(*x) - max).exp()).sum();
    (f64::from(logits[id as usize]) - max - total.ln(), best == id as usize)
}

impl<B: Backend> Runner for ModelRunner<'_, B> {
    fn loglikelihood(&mut self, pairs: &[Pair]) -> Result<Vec<(f64, bool)>> {
        let vocab = self.model.config.vocab_size;
        pairs
            .iter()
            .map(|pair| {
                let ids = [&pair.context[..], &pair.continuation[..]].concat();
                let n = pair.continuation.len();
                let logits = self.logits(&ids[..ids.len() - 1], 0, n, &mut self.model.cache())?;
                let each: Vec<(f64, bool)> =
                    logits.par_chunks_exact(vocab).zip(&pair.continuation).map(|(row, id)| log_prob(row, *id)).collect();
                Ok((each.iter().map(|e| e.0).sum(), each.iter().all(|e| e.1)))
            })
            .collect()
    }

    fn generate(&mut self, requests: &[Generation], done: &dyn Fn(&Generation, &[u32]) -> bool) -> Result<Vec<Vec<u32>>> {
        let mut all = Vec::with_capacity(requests.len());
        for request in requests {
            let temperature = if request.do_sample { request.temperature } else { 0.0 };
            let of_prompt = request.prompt.iter().map(|id| u64::from(*id)).chain([request.repeat as u64]);
            let seed = hash(self.options.seed, &of_prompt.collect::<Vec<_>>());
            let sampling = Sampling { temperature, top_p: request.top_p, seed };
            let mut cache = self.model.cache();
            let (mut next, mut past, mut ids) = (request.prompt.clone(), 0, Vec::new());
            while ids.len() < request.max_tokens && past + next.len() <= self.options.max_length {
                let logits = self.logits(&next, past, 1, &mut cache)?;
                past += next.len();
                let id = sampling.choose(&logits, ids.len() as u64);
                if Some(id) == self.options.end_of_text {
                    break;
                }
                ids.push(id);
                if done(request, &ids) {
                    break;
                }
                next = vec![id];
            }
            all.push(ids);
        }
        Ok(all)
    }

    fn usage(&self) -> Usage {
        self.usage
    }
}
