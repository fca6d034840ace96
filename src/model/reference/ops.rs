//! The small pieces: norm, scaling, linear maps, embedding, loss. Every one has a gradient.
//!
//! candle's fused `rms_norm`, `rope` and `softmax_last_dim` are avoided because they have none (they cut it silently), and
//! its `gelu_erf` because the gradient it has is good to six digits only.

use anyhow::Result;
use candle_core::{D, DType, Tensor};

use crate::error::bad_input;
use crate::tensor::backend::{Merge, Precision};

/// `x` as an operand of a matrix product. Rounding counts as the identity in the backward pass (straight-through).
pub fn operand(x: &Tensor, precision: Precision) -> Result<Tensor> {
    match precision {
        Precision::F32 => Ok(x.clone()),
        Precision::Bf16 => {
            let plain = x.detach();
            let rounded = plain.to_dtype(DType::BF16)?.to_dtype(x.dtype())?;
            Ok((x + (rounded - plain)?)?) // exact: the difference of neighbours is representable
        }
    }
}

/// Row `ids` of `table` `[V, D]`: `[T, D]`. The row of `pad` gets no gradient from being looked up.
pub fn embed(table: &Tensor, ids: &[u32], pad: Option<u32>) -> Result<Tensor> {
    let index = Tensor::new(ids, table.device())?;
    let rows = table.index_select(&index, 0)?;
    match pad {
        Some(pad) if ids.contains(&pad) => {
            let is_pad = index.eq(pad)?.unsqueeze(1)?.broadcast_as(rows.shape())?.contiguous()?;
            Ok(is_pad.where_cond(&rows.detach(), &rows)?)
        }
        _ => Ok(rows),
    }
}

/// `(x + bias) * scale`, per channel.
pub fn affine(x: &Tensor, scale: &Tensor, bias: &Tensor) -> Result<Tensor> {
    Ok(x.broadcast_add(bias)?.broadcast_mul(scale)?)
}

/// A residual merge: both sides shifted, then scaled, then added.
pub fn residual_scale(branch: &Tensor, stream: &Tensor, p: Merge<&Tensor>) -> Result<Tensor> {
    Ok((affine(branch, p.branch_scale, p.branch_bias)? + affine(stream, p.stream_scale, p.stream_bias)?)?)
}

/// `weight * x / sqrt(mean(x^2) + eps)` over the last axis.
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    let mean_square = x.sqr()?.mean_keepdim(D::Minus1)?;
    Ok(x.broadcast_div(&(mean_square + eps)?.sqrt()?)?.broadcast_mul(weight)?)
}

/// `x weightᵀ`: x `[.., in]`, weight `[out, in]`, result `[.., out]`.
pub fn linear(x: &Tensor, weight: &Tensor, precision: Precision) -> Result<Tensor> {
    let (out, inner) = weight.dims2()?;
    let mut shape = x.dims().to_vec();
    let flat = x.reshape(((), inner))?;
    let y = operand(&flat, precision)?.matmul(&operand(weight, precision)?.t()?)?;
    if let Some(last) = shape.last_mut() {
        *last = out;
    }
    Ok(y.reshape(shape)?)
}

/// The exact GELU, x * Phi(x).
pub fn gelu(x: &Tensor) -> Result<Tensor> {
    let phi = ((x / 2f64.sqrt())?.erf()? + 1.0)? * 0.5;
    Ok((x * phi?)?)
}

/// Softmax over the last axis.
pub fn softmax(x: &Tensor) -> Result<Tensor> {
    let exp = x.broadcast_sub(&x.detach().max_keepdim(D::Minus1)?)?.exp()?;
    Ok(exp.broadcast_div(&exp.sum_keepdim(D::Minus1)?)?)
}

/// Sum over the rows with a label (>= 0) of -log softmax(logits)[label], in nats. Logits `[T, V]`; a scalar.
pub fn cross_entropy(logits: &Tensor, labels: &[i64]) -> Result<Tensor> {
    let vocab = logits.dim(1)?;
    if let Some(bad) = labels.iter().find(|l| **l >= vocab as i64) {
        return Err(bad_input(format!("label {bad} is not a token of a vocabulary of {vocab}; leave a row out with -100")));
    }
    let device = logits.device();
    let max = logits.detach().max_keepdim(1)?; // [T, 1]
    let log_sum = (logits.broadcast_sub(&max)?.exp()?.sum_keepdim(1)?.log()? + max)?;
    let target: Vec<u32> = labels.iter().map(|l| (*l).max(0) as u32).collect();
    let target = logits.gather(&Tensor::new(target, device)?.unsqueeze(1)?, 1)?;
    let counted: Vec<f32> = labels.iter().map(|l| f32::from(*l >= 0)).collect();
    let counted = Tensor::new(counted, device)?.unsqueeze(1)?.to_dtype(logits.dtype())?;
    Ok(((log_sum - target)? * counted)?.sum_all()?)
}
