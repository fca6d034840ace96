//! What each verb costs at least: floating-point operations and bytes that must move. One set of formulas for benchmarks,
//! profiles and the planner.
//!
//! A product of `[m, k]` and `[k, n]` is `2 m n k` operations. Recomputation, padding and conversions are not counted: they
//! are a kernel's own doing. Bytes count every operand once, in f32: read if it is read, written if it is written, both if
//! it is added to. A verb whose operands are still in a cache may therefore be faster than memory.

use std::ops::{Add, Mul};

use super::backend::{AttentionShape, CcaShape};

/// Operations and bytes of one call.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Work {
    pub flops: f64,
    pub bytes: f64,
}

/// What a machine can do in a second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Limits {
    pub flops_per_s: f64,
    pub bytes_per_s: f64,
}

/// Which of its two limits a verb meets first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bound {
    Compute,
    Memory,
}

impl Limits {
    /// Least seconds that `work` takes: the larger of its time on the arithmetic units and its time on memory.
    pub fn seconds(&self, work: Work) -> f64 {
        (work.flops / self.flops_per_s).max(work.bytes / self.bytes_per_s)
    }

    pub fn bound(&self, work: Work) -> Bound {
        if work.flops / self.flops_per_s >= work.bytes / self.bytes_per_s { Bound::Compute } else { Bound::Memory }
    }
}

impl Add for Work {
    type Output = Work;
    fn add(self, other: Work) -> Work {
        Work { flops: self.flops + other.flops, bytes: self.bytes + other.bytes }
    }
}

impl Mul<f64> for Work {
    type Output = Work;
    fn mul(self, times: f64) -> Work {
        Work { flops: self.flops * times, bytes: self.bytes * times }
    }
}

const F32: f64 = 4.0;

/// `flops` operations on `numbers` numbers that are read or written.
fn work(flops: f64, numbers: f64) -> Work {
    Work { flops, bytes: F32 * numbers }
}

/// Nothing but `numbers` numbers that are read or written.
pub fn moved(numbers: usize) -> Work {
    work(0.0, numbers as f64)
}

fn product(dims: [usize; 3]) -> f64 {
    2.0 * dims.iter().map(|d| *d as f64).product::<f64>()
}

fn area(rows: usize, cols: usize) -> f64 {
    rows as f64 * cols as f64
}

/// `x wᵀ`: x `[t, i]`, w `[o, i]`.
pub fn linear(t: usize, i: usize, o: usize) -> Work {
    work(product([t, i, o]), area(t, i) + area(o, i) + area(t, o))
}

/// Both gradients of [`linear`].
pub fn linear_backward(t: usize, i: usize, o: usize) -> Work {
    // Reads x, w and dy, writes dx, adds to dw.
    work(2.0 * product([t, i, o]), 2.0 * area(t, i) + 3.0 * area(o, i) + area(t, o))
}

/// Square, sum, scale and weight.
pub fn rms_norm(t: usize, d: usize) -> Work {
    work(4.0 * area(t, d), 2.0 * area(t, d))
}

pub fn rms_norm_backward(t: usize, d: usize) -> Work {
    work(9.0 * area(t, d), 3.0 * area(t, d))
}

pub fn affine(t: usize, d: usize) -> Work {
    work(2.0 * area(t, d), 2.0 * area(t, d))
}

pub fn affine_backward(t: usize, d: usize) -> Work {
    work(5.0 * area(t, d), 3.0 * area(t, d))
}

/// Two affine maps and a sum.
pub fn residual_scale(t: usize, d: usize) -> Work {
    work(5.0 * area(t, d), 3.0 * area(t, d))
}

pub fn residual_scale_backward(t: usize, d: usize) -> Work {
    work(10.0 * area(t, d), 5.0 * area(t, d))
}

/// [`residual_scale`] and the [`rms_norm`] of it, which reads nothing from memory.
pub fn residual_norm(t: usize, d: usize) -> Work {
    work(9.0 * area(t, d), 4.0 * area(t, d))
}

/// Reads branch, stream, merged stream and two gradients, writes two.
pub fn residual_norm_backward(t: usize, d: usize) -> Work {
    work(20.0 * area(t, d), 7.0 * area(t, d))
}

/// Copies of table rows.
pub fn embed(t: usize, d: usize) -> Work {
    work(0.0, 2.0 * area(t, d))
}

/// Additions to table rows.
pub fn embed_backward(t: usize, d: usize) -> Work {
    work(area(t, d), 3.0 * area(t, d))
}

fn dims(q_heads: usize, kv_heads: usize, head_dim: usize) -> (usize, usize) {
    (q_heads * head_dim, kv_heads * head_dim)
}

/// The two convolutions: two taps of one channel, then two taps of a head's channels. What else CCA does is not counted.
pub fn cca_mix(t: usize, s: &CcaShape) -> Work {
    let (q, kv) = dims(s.num_query_heads, s.num_kv_heads, s.head_dim);
    work(cca_flops(t, s), 2.0 * area(t, q + 2 * kv))
}

pub fn cca_mix_backward(t: usize, s: &CcaShape) -> Work {
    let (q, kv) = dims(s.num_query_heads, s.num_kv_heads, s.head_dim);
    work(2.0 * cca_flops(t, s), 3.0 * area(t, q + 2 * kv))
}

fn cca_flops(t: usize, s: &CcaShape) -> f64 {
    let (q, kv) = dims(s.num_query_heads, s.num_kv_heads, s.head_dim);
    4.0 * area(t, q + kv) * (1.0 + s.head_dim as f64)
}

/// Keys that a token of a causal sequence of `seq` sees on average: S/2; with a window w < S, w - w^2 / (2 S).
pub fn mean_keys(seq: usize, window: Option<usize>) -> f64 {
    let s = seq as f64;
    match window {
        Some(w) if w < seq => w as f64 - area(w, w) / (2.0 * s),
        _ => s / 2.0,
    }
}

/// How much attention has to look at: rows of queries, rows of keys, and keys that a query sees on average.
#[derive(Debug, Clone, Copy)]
pub struct Attended {
    queries: usize,
    keys: usize,
    mean: f64,
}

impl Attended {
    /// `batch` sequences of `seq` tokens, one document each.
    pub fn sequences(batch: usize, seq: usize, window: Option<usize>) -> Self {
        Self { queries: batch * seq, keys: batch * seq, mean: mean_keys(seq, window) }
    }

    /// Chunks of `seq` tokens from the positions `start` on, in sequences with `keys` tokens in all.
    pub fn chunks(start: &[usize], seq: usize, keys: usize, window: Option<usize>) -> Self {
        let below = |tokens: usize| if tokens == 0 { 0.0 } else { tokens as f64 * mean_keys(tokens, window) };
        let pairs: f64 = start.iter().map(|at| below(at + seq) - below(*at)).sum();
        let queries = start.len() * seq;
        Self { queries, keys, mean: pairs / queries.max(1) as f64 }
    }

    /// `queries` rows of a tree that see `pairs` keys in all, each of `keys` once.
    pub fn tree(queries: usize, keys: usize, pairs: usize) -> Self {
        Self { queries, keys, mean: pairs as f64 / queries.max(1) as f64 }
    }
}

/// Scores and weighted values, `batch` sequences of `seq` tokens, one document each.
pub fn causal_attention(batch: usize, seq: usize, s: &AttentionShape) -> Work {
    attention(Attended::sequences(batch, seq, s.window), s)
}

pub fn causal_attention_backward(batch: usize, seq: usize, s: &AttentionShape) -> Work {
    attention_backward(Attended::sequences(batch, seq, s.window), s)
}

/// Scores and weighted values.
pub fn attention(a: Attended, s: &AttentionShape) -> Work {
    let (q, kv) = dims(s.num_query_heads, s.num_kv_heads, s.head_dim);
    work(4.0 * area(a.queries, q) * a.mean, 2.0 * area(a.queries, q) + 2.0 * area(a.keys, kv))
}

/// Four products; the scores that a flash-style kernel computes anew are not counted.
pub fn attention_backward(a: Attended, s: &AttentionShape) -> Work {
    let (q, kv) = dims(s.num_query_heads, s.num_kv_heads, s.head_dim);
    // Reads q, k, v, out and d_out, writes dq, dk and dv.
    work(8.0 * area(a.queries, q) * a.mean, 4.0 * area(a.queries, q) + 4.0 * area(a.keys, kv))
}

/// The router's four products: D to R, R to R twice, R to classes.
pub fn route(t: usize, d: usize, r: usize, classes: usize) -> Work {
    // Reads h and the state before, writes the state and the decision.
    work(route_flops(t, d, r, classes), area(t, d) + 2.0 * area(t, r) + route_weights(d, r, classes))
}

pub fn route_backward(t: usize, d: usize, r: usize, classes: usize) -> Work {
    let activations = 2.0 * area(t, d) + 4.0 * area(t, r);
    work(2.0 * route_flops(t, d, r, classes), activations + 3.0 * route_weights(d, r, classes))
}

fn route_weights(d: usize, r: usize, classes: usize) -> f64 {
    area(r, d) + 2.0 * area(r, r) + area(classes, r)
}

fn route_flops(t: usize, d: usize, r: usize, classes: usize) -> f64 {
    2.0 * t as f64 * route_weights(d, r, classes)
}

/// Gate, up and down of one expert a token: `t` tokens that were not skipped, `experts` experts of width `f`.
pub fn expert_ffn(t: usize, d: usize, f: usize, experts: usize) -> Work {
    let weights = 3.0 * area(d, f) * experts as f64;
    work(3.0 * product([t, d, f]), 2.0 * area(t, d) + weights)
}

pub fn expert_ffn_backward(t: usize, d: usize, f: usize, experts: usize) -> Work {
    let weights = 3.0 * area(d, f) * experts as f64;
    // Reads h, dy and the weights, writes dh, adds to the gradients.
    work(6.0 * product([t, d, f]), 3.0 * area(t, d) + 3.0 * weights)
}

/// The head's product and the loss alone.
pub fn cross_entropy(t: usize, d: usize, vocab: usize) -> Work {
    work(product([t, d, vocab]), area(t, d) + area(vocab, d))
}

/// Loss and both gradients.
pub fn cross_entropy_backward(t: usize, d: usize, vocab: usize) -> Work {
    work(3.0 * product([t, d, vocab]), 2.0 * area(t, d) + 3.0 * area(vocab, d))
}

/// A sum of squares.
pub fn sq_norm(n: usize) -> Work {
    work(2.0 * n as f64, n as f64)
}

/// Reads the gradient, reads and writes weight and both moments.
pub fn adamw(n: usize) -> Work {
    work(15.0 * n as f64, 7.0 * n as f64)
}

/// One matrix: its Newton-Schulz, and the gradient read, weight and momentum read and written.
pub fn muon(rows: usize, cols: usize, row_blocks: usize, steps: usize) -> Work {
    let blocks = row_blocks as f64;
    work(blocks * newton_schulz_flops(rows / row_blocks, cols, steps), 5.0 * area(rows, cols))
}

/// Operations of `steps` Newton-Schulz iterations on one matrix: two products of m^2 n and one of m^3 each, m <= n.
pub fn newton_schulz_flops(rows: usize, cols: usize, steps: usize) -> f64 {
    let (m, n) = (rows.min(cols) as f64, rows.max(cols) as f64);
    steps as f64 * (4.0 * m * m * n + 2.0 * m * m * m)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_as_long_as_the_sequence_is_no_window() {
        assert_eq!(mean_keys(4096, None), 2048.0);
        assert_eq!(mean_keys(4096, Some(4096)), 2048.0);
        assert_eq!(mean_keys(4096, Some(4095)), 4095.0 - 4095.0 * 4095.0 / 8192.0);
        assert_eq!(mean_keys(100, Some(10)), 9.5);
    }

    #[test]
    fn the_larger_of_two_limits_holds() {
        let limits = Limits { flops_per_s: 100.0, bytes_per_s: 10.0 };
        assert_eq!(limits.seconds(Work { flops: 300.0, bytes: 10.0 }), 3.0);
        assert_eq!(limits.bound(Work { flops: 300.0, bytes: 10.0 }), Bound::Compute);
        assert_eq!(limits.seconds(Work { flops: 300.0, bytes: 50.0 }), 5.0);
        assert_eq!(limits.bound(Work { flops: 300.0, bytes: 50.0 }), Bound::Memory);
    }
}
