//! Softmax attention, query by query.

use zaya::tensor::backend::{AttentionShape, Qkv};

use super::matrix::Mat;
use super::rows::Rows;

/// Weights of one query head's row over the `past + seq` keys of its sequence.
fn weights(rows: &Rows, shape: AttentionShape, x: &Qkv<&Mat>, row: usize, head: usize) -> Vec<f64> {
    let (d, keys) = (shape.head_dim, rows.past + rows.seq);
    let kv = head / (shape.num_query_heads / shape.num_kv_heads);
    let first = row / rows.seq * keys;
    let score = |key: usize| {
        let dot: f64 = (0..d).map(|i| x.q[(row, head * d + i)] * x.k[(first + key, kv * d + i)]).sum();
        dot / (d as f64).sqrt()
    };
    let visible: Vec<usize> = (0..keys).filter(|key| rows.sees(row, *key, shape.window)).collect();
    if visible.is_empty() {
        return vec![1.0 / keys as f64; keys];
    }
    let max = visible.iter().map(|key| score(*key)).fold(f64::NEG_INFINITY, f64::max);
    let mut weights = vec![0.0; keys];
    for key in &visible {
        weights[*key] = (score(*key) - max).exp();
    }
    let sum: f64 = weights.iter().sum();
    weights.iter().map(|w| w / sum).collect()
}

pub fn causal_attention(rows: &Rows, shape: AttentionShape, x: Qkv<&Mat>) -> Mat {
    let (d, keys) = (shape.head_dim, rows.past + rows.seq);
    let mut out = Mat::zeros(rows.tokens(), shape.num_query_heads * d);
    for row in 0..rows.tokens() {
        for head in 0..shape.num_query_heads {
            let kv = head / (shape.num_query_heads / shape.num_kv_heads);
            for (key, w) in weights(rows, shape, &x, row, head).iter().enumerate() {
                for i in 0..d {
                    out[(row, head * d + i)] += w * x.v[(row / rows.seq * keys + key, kv * d + i)];
                }
            }
        }
    }
    out
}

/// Without a past.
pub fn causal_attention_backward(rows: &Rows, shape: AttentionShape, x: Qkv<&Mat>, d_out: &Mat) -> Qkv<Mat> {
    let d = shape.head_dim;
    let like = |m: &Mat| Mat::zeros(m.rows, m.cols);
    let mut g = Qkv { q: like(x.q), k: like(x.k), v: like(x.v) };
    for row in 0..rows.tokens() {
        let first = row / rows.seq * rows.seq;
        for head in 0..shape.num_query_heads {
            let kv = head / (shape.num_query_heads / shape.num_kv_heads);
            let w = weights(rows, shape, &x, row, head);
            let dw: Vec<f64> = (0..rows.seq)
                .map(|key| (0..d).map(|i| d_out[(row, head * d + i)] * x.v[(first + key, kv * d + i)]).sum())
                .collect();
            let mean: f64 = w.iter().zip(&dw).map(|(w, dw)| w * dw).sum();
            for key in 0..rows.seq {
                // Also where nothing is visible: Hugging Face adds its mask to the scores, which keeps their gradient.
                let d_score = w[key] * (dw[key] - mean) / (d as f64).sqrt();
                for i in 0..d {
                    let (query_at, key_at) = ((row, head * d + i), (first + key, kv * d + i));
                    g.v[key_at] += w[key] * d_out[query_at];
                    g.q[query_at] += d_score * x.k[key_at];
                    g.k[key_at] += d_score * x.q[query_at];
                }
            }
        }
    }
    g
}
