//! Generation: next-token logits from caches, and sampling.

use anyhow::Result;
use candle_core::{DType, Device};

use crate::data::order::hash;
use crate::model::reference::Reference;
use crate::model::stack::Cache;
use crate::model::{Cx, Model, ParamStore};
use crate::tensor::backend::{Backend, Batch, Precision};

/// A model that continues one sequence.
pub trait Continue {
    /// Appends `ids` and returns the logits `[V]` of what comes after the last of them.
    fn append(&mut self, ids: &[u32]) -> Result<Vec<f32>>;
}

/// With the caches of a backend: keys and values, and the short history of CCA's convolutions.
pub struct Cached<'a, B: Backend> {
    backend: &'a B,
    model: &'a Model,
    params: &'a ParamStore<B>,
    cache: Cache<B>,
    past: usize,
}

impl<'a, B: Backend> Cached<'a, B> {
    pub fn new(backend: &'a B, model: &'a Model, params: &'a ParamStore<B>) -> Self {
        Self { backend, model, params, cache: model.cache(), past: 0 }
    }
}

impl<B: Backend> Continue for Cached<'_, B> {
    fn append(&mut self, ids: &[u32]) -> Result<Vec<f32>> {
        let batch = Batch { batch: 1, seq: ids.len(), past: self.past, ids: ids.to_vec(), ..Batch::default() };
        let rows = self.backend.rows(&batch)?;
        let cx = Cx::new(self.backend, self.params, &rows);
        let y = self.model.decode(&cx, 1, &mut self.cache)?;
        self.past += ids.len();
        let last = self.backend.last_rows(1, &y, 1)?;
        self.backend.download(&self.backend.logits(&last, &self.params[self.model.table.embed])?)
    }
}

/// The candle reference, which has no caches: the whole sequence runs again for each token.
pub struct Whole {
    reference: Reference,
    ids: Vec<u32>,
}

impl Whole {
    pub fn new(config: &crate::model::ModelConfig, values: &[Vec<f32>], precision: Precision) -> Result<Self> {
        let device = crate::train::candle_engine::device()?;
        let reference = Reference::new(config.clone(), values, DType::F32, &device, precision)?;
        Ok(Self { reference, ids: Vec::new() })
    }
}

impl Continue for Whole {
    fn append(&mut self, ids: &[u32]) -> Result<Vec<f32>> {
        self.ids.extend_from_slice(ids);
        let batch = Batch { batch: 1, seq: self.ids.len(), ids: self.ids.clone(), ..Batch::default() };
        let logits = self.reference.forward(&batch, None, &mut |_, _| {})?.logits;
        Ok(logits.to_device(&Device::Cpu)?.get(0)?.get(self.ids.len() - 1)?.to_vec1()?)
    }
}

/// How a token is chosen from its logits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// Logits are divided by this; 0 = always the likeliest token.
    pub temperature: f64,
    /// Only the likeliest tokens that together reach this probability are drawn from.
    pub top_p: f64,
    pub seed: u64,
}

impl Sampling {
    /// Token number `index` of a sequence; of equally likely tokens the lowest id comes first.
    pub fn choose(&self, logits: &[f32], index: u64) -> u32 {
        let mut order: Vec<u32> = (0..logits.len() as u32).collect();
        order.sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b)));
        if self.temperature == 0.0 {
            return order[0];
        }
        let max = logits[order[0] as usize] as f64;
        let weights: Vec<f64> = order.iter().map(|id| ((logits[*id as usize] as f64 - max) / self.temperature).exp()).collect();
        let total: f64 = weights.iter().sum();
        // The nucleus ends with the token that reaches top_p.
        let mut kept = 0.0;
        let mut count = 0;
        for w in &weights {
            kept += w;
            count += 1;
            if kept >= self.top_p * total {
                break;
            }
        }
        let mut rest = (hash(self.seed, &[index]) >> 11) as f64 / (1u64 << 53) as f64 * kept;
        for (w, id) in weights[..count].iter().zip(&order) {
            if rest < *w {
                return *id;
            }
            rest -= w;
        }
        order[count - 1]
    }
}

/// Why generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The model chose the end-of-text token.
    EndOfText,
    MaxTokens,
    /// The model's context is full.
    ContextFull,
}

/// Continues `prompt` by at most `max_tokens` tokens; `each` gets every new id.
pub fn generate(
    model: &mut dyn Continue,
    prompt: &[u32],
    max_tokens: usize,
    context: usize,
    end_of_text: Option<u32>,
    sampling: Sampling,
    mut each: impl FnMut(u32) -> Result<()>,
) -> Result<End> {
    let mut logits = model.append(prompt)?;
    for i in 0..max_tokens {
        let id = sampling.choose(&logits, i as u64);
        if Some(id) == end_of_text {
            return Ok(End::EndOfText);
        }
        each(id)?;
        if prompt.len() + i + 1 >= context {
            return Ok(End::ContextFull);
        }
        if i + 1 < max_tokens {
            logits = model.append(&[id])?;
        }
    }
    Ok(End::MaxTokens)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn temperature_zero_is_greedy_and_ties_go_to_the_lowest_id() {
        let greedy = Sampling { temperature: 0.0, top_p: 1.0, seed: 0 };
        assert_eq!(greedy.choose(&[0.0, 3.0, 3.0, -1.0], 0), 1);
    }

    #[test]
    fn draws_follow_the_probabilities() {
        let s = Sampling { temperature: 1.0, top_p: 1.0, seed: 3 };
        let logits = [0.5f32.ln(), 0.3f32.ln(), 0.2f32.ln()];
        let mut counts = [0; 3];
        (0..20_000).for_each(|i| counts[s.choose(&logits, i) as usize] += 1);
        for (count, p) in counts.into_iter().zip([0.5, 0.3, 0.2]) {
            assert!((count as f64 / 20_000.0 - p).abs() < 0.015, "{counts:?}");
        }
        let nucleus = Sampling { top_p: 0.6, ..s };
        assert!((0..1000).all(|i| nucleus.choose(&logits, i) < 2), "0.5 + 0.3 reaches 0.6");
        let narrow = Sampling { top_p: 0.0, ..s };
        assert!((0..100).all(|i| narrow.choose(&logits, i) == 0), "the likeliest always stays");
    }
}
