//! Compressed convolutional attention, up to the point where plain attention begins.

use anyhow::Result;
use candle_core::{D, DType, Device, Tensor};

use super::ops::operand;
use super::sequence::Sequences;
use crate::tensor::backend::Precision;
use crate::tensor::backend::{CcaIn, CcaParams, CcaShape};

/// Keeps the norm of a zero vector from dividing by zero: 1 / sqrt(|x|^2 + this).
const NORM_GUARD: f64 = 1e-12;

/// Every stage of the mixing, in order. C = channels of all query heads, then of all key heads.
pub struct CcaMix {
    /// `[B, S + 1, C]`: after the depthwise convolution; starts one token early, with the bias alone.
    pub conv0: Tensor,
    /// `[B, S, C]`: after the convolution within heads.
    pub conv1: Tensor,
    /// `[B, S, heads, d]`: with the q-k-mean added; values current and delayed.
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    /// `[B, S, heads, d]`: of length sqrt(d), keys times their temperature.
    pub q_norm: Tensor,
    pub k_norm: Tensor,
    /// `[B, S, heads, d]`: rotated, ready for attention with `v`.
    pub q_rotated: Tensor,
    pub k_rotated: Tensor,
}

/// From the four projections `[B, S, ..]` of the normed stream to queries, keys and values.
pub fn cca_mix(
    sequences: &Sequences,
    shape: CcaShape,
    x: CcaIn<&Tensor>,
    p: CcaParams<&Tensor>,
    precision: Precision,
) -> Result<CcaMix> {
    let (q_heads, kv_heads, d) = (shape.num_query_heads, shape.num_kv_heads, shape.head_dim);
    let (b, s) = (sequences.batch, sequences.seq);

    let channels = Tensor::cat(&[x.q, x.k], 2)?; // [B, S, C]
    let conv0 = depthwise(sequences, &channels, p.conv0_weight, p.conv0_bias)?; // [B, S, C]
    let conv1 = within_heads(sequences, &conv0, p.conv0_bias, p.conv1_weight, p.conv1_bias, precision)?; // [B, S, C]

    let (mean_q, mean_k) =
        qk_mean(&x.q.reshape((b, s, kv_heads, q_heads / kv_heads, d))?, &x.k.reshape((b, s, kv_heads, 1, d))?)?;
    let q = (conv1.narrow(2, 0, q_heads * d)?.reshape((b, s, q_heads, d))? + mean_q.reshape((b, s, q_heads, d))?)?;
    let k = (conv1.narrow(2, q_heads * d, kv_heads * d)?.reshape((b, s, kv_heads, d))? + mean_k)?;

    let nothing = Tensor::zeros(x.v_delayed.dim(2)?, x.v_delayed.dtype(), x.v_delayed.device())?;
    let delayed = sequences.previous(x.v_delayed, &nothing)?;
    let v = Tensor::cat(&[x.v_current, &delayed], 2)?.reshape((b, s, kv_heads, d))?; // the cut may fall inside a head

    let q_norm = unit_rms(&q)?;
    let k_norm = unit_rms(&k)?.broadcast_mul(&p.temp.reshape((kv_heads, 1))?)?;
    let q_rotated = rope(&q_norm, shape.rotary_dim, shape.rope_theta)?;
    let k_rotated = rope(&k_norm, shape.rotary_dim, shape.rope_theta)?;

    let before = p.conv0_bias.broadcast_as((b, 1, q_heads * d + kv_heads * d))?;
    let conv0 = Tensor::cat(&[&before, &conv0], 1)?;
    Ok(CcaMix { conv0, conv1, q, k, v, q_norm, k_norm, q_rotated, k_rotated })
}

/// `u_t = w[:, 0] * x_{t-1} + w[:, 1] * x_t + bias`, with zeros before a document: x `[B, S, C]`, weight `[C, 2]`.
fn depthwise(sequences: &Sequences, x: &Tensor, weight: &Tensor, bias: &Tensor) -> Result<Tensor> {
    let before = sequences.previous(x, &bias.zeros_like()?)?;
    let tap = |k: usize| weight.narrow(1, k, 1)?.squeeze(1); // [C]
    Ok((before.broadcast_mul(&tap(0)?)? + x.broadcast_mul(&tap(1)?)?)?.broadcast_add(bias)?)
}

/// `y_t = w[.., 0] u_{t-1} + w[.., 1] u_t + bias` in each head: u `[B, S, C]`, weight `[C, d, 2]`.
/// Before a document stands `first`: what the depthwise convolution makes of zeros is its bias, not 0.
fn within_heads(
    sequences: &Sequences,
    u: &Tensor,
    first: &Tensor,
    weight: &Tensor,
    bias: &Tensor,
    precision: Precision,
) -> Result<Tensor> {
    let (b, s, c) = u.dims3()?;
    let d = weight.dim(1)?;
    let heads = |x: &Tensor| x.reshape((b * s, c / d, d))?.transpose(0, 1)?.contiguous(); // [heads, B*S, d]
    let tap = |k: usize| weight.narrow(2, k, 1)?.reshape((c / d, d, d))?.transpose(1, 2)?.contiguous(); // [heads, in, out]
    let product =
        |x: &Tensor, k: usize| -> Result<Tensor> { Ok(operand(&heads(x)?, precision)?.matmul(&operand(&tap(k)?, precision)?)?) };
    let y = (product(&sequences.previous(u, first)?, 0)? + product(u, 1)?)?; // [heads, B*S, d]
    Ok(y.transpose(0, 1)?.contiguous()?.reshape((b, s, c))?.broadcast_add(bias)?)
}

/// The mean of each query with its key `[B, S, KV, G, d]`, and the mean of those over a key's queries `[B, S, KV, d]`.
fn qk_mean(q: &Tensor, k: &Tensor) -> Result<(Tensor, Tensor)> {
    let mean_q = (q.broadcast_add(k)? * 0.5)?;
    let mean_k = mean_q.mean(3)?;
    Ok((mean_q, mean_k))
}

/// `x` stretched to length sqrt(d) along the last axis.
fn unit_rms(x: &Tensor) -> Result<Tensor> {
    let d = x.dim(D::Minus1)? as f64;
    let length = (x.sqr()?.sum_keepdim(D::Minus1)? + NORM_GUARD)?.sqrt()?;
    Ok((x.broadcast_div(&length)? * d.sqrt())?)
}

/// Rotates the first `r` channels of each head of `x` `[B, S, heads, d]`, in pairs (j, j + r/2), by position.
fn rope(x: &Tensor, r: usize, theta: f64) -> Result<Tensor> {
    if r == 0 {
        return Ok(x.clone());
    }
    let (_, s, _, d) = x.dims4()?;
    let (cos, sin) = rope_tables(s, r, theta, x.dtype(), x.device())?;
    let first = x.narrow(3, 0, r / 2)?;
    let second = x.narrow(3, r / 2, r / 2)?;
    let turned_first = (first.broadcast_mul(&cos)? - second.broadcast_mul(&sin)?)?;
    let turned_second = (second.broadcast_mul(&cos)? + first.broadcast_mul(&sin)?)?;
    let rest = x.narrow(3, r, d - r)?;
    Ok(if r == d {
        Tensor::cat(&[&turned_first, &turned_second], 3)?
    } else {
        Tensor::cat(&[&turned_first, &turned_second, &rest], 3)?
    })
}

/// Cosines and sines `[S, 1, r/2]` of position * theta^(-2j/r). The angle is an f32 product, as in Hugging Face's code:
/// at position 30,000 its rounding is larger than anything else, so any other way would be another model.
fn rope_tables(s: usize, r: usize, theta: f64, dtype: DType, device: &Device) -> Result<(Tensor, Tensor)> {
    let mut cos = Vec::with_capacity(s * r / 2);
    let mut sin = Vec::with_capacity(s * r / 2);
    for position in 0..s {
        for j in 0..r / 2 {
            let exponent = (2 * j) as f32 / r as f32;
            let inverse_frequency = 1.0 / theta.powf(f64::from(exponent)) as f32;
            let angle = f64::from(position as f32 * inverse_frequency);
            cos.push(angle.cos());
            sin.push(angle.sin());
        }
    }
    let table = |values: Vec<f64>| Tensor::from_vec(values, (s, 1, r / 2), device)?.to_dtype(dtype);
    Ok((table(cos)?, table(sin)?))
}
