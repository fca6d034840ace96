//! Softmax attention over the keys that a token may see.

use anyhow::Result;
use candle_core::Tensor;

use super::ops::softmax;
use super::sequence::Sequences;
use crate::tensor::backend::{AttentionShape, Qkv};

/// Queries `[B, S, heads, d]`, keys and values `[B, S, kv heads, d]`: the output `[B, S, heads * d]` and the weights
/// `[B, heads, S, S]`. Query head a reads key/value head a / (heads / kv heads).
pub fn causal_attention(sequences: &Sequences, shape: AttentionShape, x: Qkv<&Tensor>) -> Result<(Tensor, Tensor)> {
    let (b, s, heads, d) = x.q.dims4()?;
    let group = heads / shape.num_kv_heads;
    let heads_first = |x: &Tensor| x.transpose(1, 2)?.contiguous(); // [B, heads, S, d]
    let shared = |x: &Tensor| -> Result<Tensor> {
        let wide = x.unsqueeze(3)?.broadcast_as((b, s, shape.num_kv_heads, group, d))?;
        Ok(heads_first(&wide.reshape((b, s, heads, d))?)?)
    };
    let (q, k, v) = (heads_first(x.q)?, shared(x.k)?, shared(x.v)?);
    let scores = (q.matmul(&k.transpose(2, 3)?)? / (d as f64).sqrt())?; // [B, heads, S, S]
    let weights = softmax(&scores.broadcast_add(&sequences.attention_mask(shape.window)?)?)?;
    let out = weights.matmul(&v)?.transpose(1, 2)?.contiguous()?.reshape((b, s, heads * d))?;
    Ok((out, weights))
}
