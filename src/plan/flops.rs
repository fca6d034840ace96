//! Floating-point operations of training, by the formula that MFU uses everywhere in zaya.
//!
//! Per token, forward and backward:
//!
//! ```text
//! 6 * P  +  12 * q_dim * (mean number of keys)   summed over the attention of all blocks
//! ```
//!
//! P is the number of parameters that work on a token: all but the experts not chosen (top-1 of E), with the tied
//! embedding counted once, as the head. Each takes a multiplication and an addition in forward, and twice that in backward
//! (for the input's gradient and for its own). Attention multiplies queries with keys and probabilities with values: 2
//! matrix products of q_dim multiplications and additions per key in forward (4 operations), twice that in backward. A
//! causal token sees S/2 keys on average; with a window of w < S, w - w^2 / (2 S). For full blocks that makes
//! 6 * S * q_dim each. Padding, recomputation, document masks and the optimizer are not counted.

use crate::model::config::AttentionKind;
use crate::model::params::{OptimKind, ParamTable};
use crate::recipe::Recipe;
use crate::tensor::work::{mean_keys, newton_schulz_flops};

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Flops {
    /// Per token: 6 times the active parameters, the head counted.
    pub parameters: f64,
    /// Per token: scores and weighted values of all blocks.
    pub attention: f64,
    /// Per optimizer step: Muon's Newton-Schulz iterations. Not part of `per_token`.
    pub newton_schulz: f64,
}

impl Flops {
    pub fn of(recipe: &Recipe, table: &ParamTable) -> Self {
        let (m, seq) = (&recipe.model, recipe.train.seq_len);
        let active = table.active_without_embedding() + table.specs[table.embed].numel() as u64;
        let keys: f64 = m
            .attention
            .iter()
            .map(|kind| match kind {
                AttentionKind::Full => mean_keys(seq, None),
                AttentionKind::Sliding => mean_keys(seq, m.sliding_window),
            })
            .sum();
        let newton_schulz: f64 = table
            .specs
            .iter()
            .filter(|s| s.optim == OptimKind::Muon)
            .map(|s| {
                let [rows, cols] = s.matrix_shape();
                match recipe.optimizer.muon_split_gate_up && s.is_gate_up() {
                    true => 2.0 * newton_schulz_flops(rows / 2, cols, recipe.optimizer.ns_steps),
                    false => newton_schulz_flops(rows, cols, recipe.optimizer.ns_steps),
                }
            })
            .sum();
        Self { parameters: 6.0 * active as f64, attention: 12.0 * m.q_dim() as f64 * keys, newton_schulz }
    }

    /// Operations for one token of training.
    pub fn per_token(&self) -> f64 {
        self.parameters + self.attention
    }
}
