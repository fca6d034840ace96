//! CCA's mixer (spec 1.4): `kernels/cca_mix.zk.cpp` and `cca_mix_backward.zk.cpp`.

use std::sync::Arc;

use anyhow::{Result, ensure};

use super::host::upload_plain;
use super::rows::address;
use super::{Buf, Hip, Rows, int};
use crate::tensor::backend::{Batch, CcaIn, CcaParams, CcaShape, Halo, Qkv};
use crate::tensor::rope::Span;

const ITEMS: u32 = 256;
/// Rows of a workgroup's tile in the forward, and in the gradient of the inputs (one less: the tile looks one row ahead).
const TILE_ROWS: usize = 64;
const INPUT_ROWS: usize = 63;
/// Rows that a workgroup sums gradients of the convolutions' weights over, and of the temperature.
const WEIGHT_ROWS: usize = 64;
const NORM_ROWS: usize = 16;

/// What the backward needs.
pub struct Saved {
    /// Queries and keys before their norm, f32 `[T, C]`.
    before_norm: Buf,
    rope: Arc<Buf>,
    /// The second convolution's weights, packed for the backward.
    weights: Buf,
}

/// Widths derived from the shape.
struct Dims {
    q: usize,
    k: usize,
    heads: usize,
    channels: usize,
}

impl Dims {
    fn of(shape: &CcaShape) -> Self {
        let heads = shape.num_query_heads + shape.num_kv_heads;
        Self {
            q: shape.num_query_heads * shape.head_dim,
            k: shape.num_kv_heads * shape.head_dim,
            heads,
            channels: heads * shape.head_dim,
        }
    }
}

/// Names of the kernels of a width: forward, gradient of the inputs, gradient of the weights.
fn names(head_dim: usize) -> Result<[&'static str; 3]> {
    Ok(match head_dim {
        16 => ["cca_mix_fwd_16", "cca_mix_bwd_input_16", "cca_mix_bwd_weight_16"],
        32 => ["cca_mix_fwd_32", "cca_mix_bwd_input_32", "cca_mix_bwd_weight_32"],
        64 => ["cca_mix_fwd_64", "cca_mix_bwd_input_64", "cca_mix_bwd_weight_64"],
        128 => ["cca_mix_fwd_128", "cca_mix_bwd_input_128", "cca_mix_bwd_weight_128"],
        _ => anyhow::bail!("the HIP kernels mix heads of 16, 32, 64 or 128 numbers, not {head_dim}"),
    })
}

/// Cosines and sines of the angles of all positions that `rows` can have, `[positions, rotary_dim]`: half cosines, then sines.
fn rope(hip: &Hip, shape: &CcaShape, rows: &Rows) -> Result<Arc<Buf>> {
    let span = Span::of(shape, rows.past, rows.keys());
    hip.inner.rope.get(span, || {
        hip.about_to_keep("a table of angles")?;
        let frequencies = span.inverse_frequencies();
        let mut numbers = Vec::with_capacity(span.len * span.rotary_dim);
        for position in span.past..span.past + span.len {
            numbers.extend(frequencies.iter().map(|f| (position as f32 * f).cos()));
            numbers.extend(frequencies.iter().map(|f| (position as f32 * f).sin()));
        }
        upload_plain(hip, &numbers)
    })
}

/// What precedes each row of a micro-batch, the same for all layers: i32 `[T, 4]`. `chunk_start`: of chunks.
pub fn history(hip: &Hip, b: &Batch, doc_start: Option<&Buf>, chunk_start: Option<&Buf>) -> Result<Buf> {
    let tokens = b.tokens();
    let mut history = hip.f32s(tokens, 4)?;
    launch!(
        hip, "cca_mix_history", [tokens.div_ceil(256)], ITEMS;
        address(doc_start), address(chunk_start), history.at_mut(), int(tokens), int(b.seq),
    )?;
    Ok(history)
}

/// The second convolution's weights as its products read them: bf16, for the forward and for the backward.
fn packed(hip: &Hip, shape: &CcaShape, weight: &Buf) -> Result<[Buf; 2]> {
    let dims = Dims::of(shape);
    let n = dims.channels * 2 * shape.head_dim;
    let (mut forward, mut backward) = (hip.bf16s(1, n)?, hip.bf16s(1, n)?);
    launch!(
        hip, "cca_mix_pack", [n.div_ceil(256)], ITEMS;
        weight.at(), forward.at_mut(), backward.at_mut(), int(dims.heads), int(shape.head_dim),
    )?;
    Ok([forward, backward])
}

fn check_halo(rows: &Rows, dims: &Dims, halo: &Option<Halo<&Buf>>) -> Result<()> {
    if let Some(h) = halo {
        let want = [[rows.batch * 2, dims.q], [rows.batch * 2, dims.k], [rows.batch, dims.k / 2]];
        let got = [h.q, h.k, h.v_delayed].map(|b| [b.rows(), b.cols()]);
        ensure!(got == want, "a halo of {got:?}, not of {want:?}");
    }
    Ok(())
}

pub fn forward(
    hip: &Hip,
    rows: &Rows,
    shape: CcaShape,
    x: CcaIn<&Buf>,
    p: CcaParams<&Buf>,
    halo: Option<Halo<&Buf>>,
) -> Result<(Qkv<Buf>, Saved)> {
    let (dims, tokens, [name, ..]) = (Dims::of(&shape), rows.tokens(), names(shape.head_dim)?);
    check_halo(rows, &dims, &halo)?;
    let (q, k) = (hip.as_f32(x.q)?, hip.as_f32(x.k)?);
    let (current, delayed) = (hip.as_f32(x.v_current)?, hip.as_f32(x.v_delayed)?);
    let history = rows.history.at();
    let rope = rope(hip, &shape, rows)?;
    let [weights, weights_back] = packed(hip, &shape, p.conv1_weight)?;
    let (mut out_q, mut out_k) = (hip.bf16s(tokens, dims.q)?, hip.bf16s(tokens, dims.k)?);
    let (mut out_v, mut before_norm) = (hip.bf16s(tokens, dims.k)?, hip.f32s(tokens, dims.channels)?);
    launch!(
        hip, name, [tokens.div_ceil(TILE_ROWS), shape.num_kv_heads], ITEMS;
        q.at(), k.at(), address(halo.map(|h| h.q)), address(halo.map(|h| h.k)), p.conv0_weight.at(), p.conv0_bias.at(), history,
        int(tokens), int(shape.num_query_heads), int(shape.num_kv_heads), weights.at(), p.conv1_bias.at(), p.temp.at(), rope.at(),
        int(shape.rotary_dim), out_q.at_mut(), out_k.at_mut(), before_norm.at_mut(),
    )?;
    launch!(
        hip, "cca_mix_values_fwd", [(tokens * dims.k).div_ceil(256)], ITEMS;
        current.at(), delayed.at(), address(halo.map(|h| h.v_delayed)), history, out_v.at_mut(), int(tokens), int(dims.k),
    )?;
    Ok((Qkv { q: out_q, k: out_k, v: out_v }, Saved { before_norm, rope, weights: weights_back }))
}

#[allow(clippy::too_many_arguments, clippy::type_complexity)]
pub fn backward(
    hip: &Hip,
    rows: &Rows,
    shape: CcaShape,
    x: CcaIn<&Buf>,
    p: CcaParams<&Buf>,
    halo: Option<Halo<&Buf>>,
    saved: &Saved,
    d: Qkv<&Buf>,
    g: CcaParams<&mut Buf>,
) -> Result<(CcaIn<Buf>, Option<Halo<Buf>>)> {
    let (dims, tokens, [_, of_input, of_weight]) = (Dims::of(&shape), rows.tokens(), names(shape.head_dim)?);
    check_halo(rows, &dims, &halo)?;
    let (q, k) = (hip.as_f32(x.q)?, hip.as_f32(x.k)?);
    let (dq, dk, dv) = (hip.as_f32(d.q)?, hip.as_f32(d.k)?, hip.as_f32(d.v)?);
    let (heads, kv_heads, head_dim) = (int(shape.num_query_heads), int(shape.num_kv_heads), int(shape.head_dim));
    let (history, rotary) = (rows.history.at(), int(shape.rotary_dim));

    let norm_blocks = tokens.div_ceil(NORM_ROWS);
    let mut dy = hip.f32s(tokens, dims.channels)?;
    // Of f64 numbers.
    let mut temp_partial = hip.f32s(norm_blocks, 2 * shape.num_kv_heads)?;
    launch!(
        hip, "cca_mix_bwd_norm", [norm_blocks], ITEMS;
        dq.at(), dk.at(), saved.before_norm.at(), p.temp.at(), history, saved.rope.at(), rotary, dy.at_mut(), temp_partial.at_mut(),
        int(tokens), heads, kv_heads, head_dim,
    )?;
    let (mut dx_q, mut dx_k) = (hip.bf16s(tokens, dims.q)?, hip.bf16s(tokens, dims.k)?);
    let (mut dx_current, mut dx_delayed) = (hip.bf16s(tokens, dims.k / 2)?, hip.bf16s(tokens, dims.k / 2)?);
    launch!(
        hip, "cca_mix_bwd_values", [(tokens * dims.k / 2).div_ceil(256)], ITEMS;
        dv.at(), history, dx_current.at_mut(), dx_delayed.at_mut(), int(tokens), int(dims.k),
    )?;
    let input_blocks = tokens.div_ceil(INPUT_ROWS);
    let mut input_partial = hip.f32s(input_blocks, 2 * dims.channels)?;
    let (halo_q, halo_k) = (address(halo.map(|h| h.q)), address(halo.map(|h| h.k)));
    launch!(
        hip, of_input, [input_blocks, shape.num_kv_heads], ITEMS;
        q.at(), k.at(), halo_q, halo_k, p.conv0_weight.at(), p.conv0_bias.at(), history, int(tokens), heads, kv_heads,
        saved.weights.at(), dy.at(), dx_q.at_mut(), dx_k.at_mut(), input_partial.at_mut(),
    )?;
    let weight_blocks = tokens.div_ceil(WEIGHT_ROWS);
    let mut weight_partial = hip.f32s(weight_blocks, dims.channels * 2 * shape.head_dim)?;
    let mut bias_partial = hip.f32s(weight_blocks, dims.channels)?;
    launch!(
        hip, of_weight, [weight_blocks, dims.heads], ITEMS;
        q.at(), k.at(), halo_q, halo_k, p.conv0_weight.at(), p.conv0_bias.at(), history, int(tokens), heads, kv_heads,
        dy.at(), weight_partial.at_mut(), bias_partial.at_mut(), int(WEIGHT_ROWS),
    )?;
    let halos = if halo.is_some() { rows.batch } else { 0 };
    let mut halo_partial = hip.f32s(halos, 2 * dims.channels)?;
    let d_halo = match halo {
        None => None,
        Some(_) => {
            let (mut of_q, mut of_k) = (hip.f32s(2 * halos, dims.q)?, hip.f32s(2 * halos, dims.k)?);
            let mut of_v = hip.f32s(halos, dims.k / 2)?;
            launch!(
                hip, "cca_mix_bwd_halo", [halos, dims.heads], ITEMS;
                q.at(), k.at(), halo_q, halo_k, p.conv0_weight.at(), p.conv0_bias.at(), history, int(tokens), heads, kv_heads,
                p.conv1_weight.at(), dy.at(), dv.at(), of_q.at_mut(), of_k.at_mut(), of_v.at_mut(), halo_partial.at_mut(), int(rows.seq),
                head_dim,
            )?;
            Some(Halo { q: of_q, k: of_k, v_delayed: of_v })
        }
    };
    launch!(
        hip, "cca_mix_bwd_conv1", [(2 * dims.channels * shape.head_dim).div_ceil(256)], ITEMS;
        weight_partial.at(), g.conv1_weight.at_mut(), int(weight_blocks), int(dims.channels), head_dim,
    )?;
    launch!(
        hip, "cca_mix_bwd_params", [dims.heads], ITEMS;
        input_partial.at(), int(input_blocks), halo_partial.at(), int(halos), bias_partial.at(), int(weight_blocks), temp_partial.at(),
        int(norm_blocks), p.conv1_weight.at(), g.conv0_weight.at_mut(), g.conv0_bias.at_mut(), g.conv1_bias.at_mut(), g.temp.at_mut(),
        heads, kv_heads, head_dim,
    )?;
    Ok((CcaIn { q: dx_q, k: dx_k, v_current: dx_current, v_delayed: dx_delayed }, d_halo))
}
