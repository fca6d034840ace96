//! Residual merge and RMSNorm (spec 1.3, 1.5): `kernels/residual_norm.zk.cpp`.

use anyhow::{Result, bail, ensure};

use super::rows::address;
use super::{Buf, Hip, int};
use crate::tensor::backend::{Merge, ResidualNorm};

/// Rows that one workgroup of the backward sums gradients of parameters over.
const ROWS_PER_BLOCK: usize = 16;

/// Kernels for rows of at most so many numbers, and their work-items.
struct Variant {
    forward: &'static str,
    backward: &'static str,
    items: u32,
}

fn variant(d: usize) -> Result<Variant> {
    Ok(match d {
        0..=512 => Variant { forward: "residual_norm_fwd_512", backward: "residual_norm_bwd_512", items: 256 },
        513..=2048 => Variant { forward: "residual_norm_fwd_2048", backward: "residual_norm_bwd_2048", items: 256 },
        2049..=4096 => Variant { forward: "residual_norm_fwd_4096", backward: "residual_norm_bwd_4096", items: 512 },
        _ => bail!("the HIP kernels norm rows of at most 4096 numbers, not {d}"),
    })
}

/// `w x / rms(x)` as bf16, and 1 / rms of each row.
pub fn forward(hip: &Hip, x: &Buf, weight: &Buf, eps: f64) -> Result<(Buf, Buf)> {
    let x = hip.as_f32(x)?;
    let (rows, d) = (x.rows(), x.cols());
    let (mut h, mut inv) = (hip.bf16s(rows, d)?, hip.f32s(rows, 1)?);
    let v = variant(d)?;
    let none = address(None);
    launch!(hip, v.forward, [rows], v.items; none, x.at(), none, none, none, none, weight.at(), none.cast_mut(), h.at_mut(), inv.at_mut(), int(d), eps as f32)?;
    Ok((h, inv))
}

/// The merged stream as f32, its norm as bf16, and 1 / rms of each row.
pub fn merge_forward(hip: &Hip, branch: &Buf, stream: &Buf, p: Merge<&Buf>, norm: &Buf, eps: f64) -> Result<(Buf, Buf, Buf)> {
    let (branch, stream) = (hip.as_bf16(branch)?, hip.as_f32(stream)?);
    let (rows, d) = (stream.rows(), stream.cols());
    ensure!(
        branch.rows() == rows && branch.cols() == d,
        "a branch of {} x {} and a stream of {rows} x {d}",
        branch.rows(),
        branch.cols()
    );
    let (mut y, mut h, mut inv) = (hip.f32s(rows, d)?, hip.bf16s(rows, d)?, hip.f32s(rows, 1)?);
    let v = variant(d)?;
    launch!(
        hip, v.forward, [rows], v.items;
        branch.at(), stream.at(), p.branch_scale.at(), p.branch_bias.at(), p.stream_scale.at(), p.stream_bias.at(), norm.at(),
        y.at_mut(), h.at_mut(), inv.at_mut(), int(d), eps as f32,
    )?;
    Ok((y, h, inv))
}

/// Gradient of x, f32.
pub fn backward(hip: &Hip, x: &Buf, weight: &Buf, inv: &Buf, dh: &Buf, d_weight: &mut Buf) -> Result<Buf> {
    let (x, dh) = (hip.as_f32(x)?, hip.as_f32(dh)?);
    let (rows, d) = (x.rows(), x.cols());
    let mut dx = hip.f32s(rows, d)?;
    let blocks = rows.div_ceil(ROWS_PER_BLOCK);
    let mut partial = hip.f32s(blocks, d)?;
    let v = variant(d)?;
    let none = address(None);
    launch!(
        hip, v.backward, [blocks], v.items;
        none, x.at(), none, none, none, none, weight.at(), inv.at(), dh.at(), none, none.cast_mut(), dx.at_mut(), partial.at_mut(),
        int(rows), int(d), int(ROWS_PER_BLOCK),
    )?;
    let to = none.cast_mut();
    launch!(hip, "residual_norm_params", [d.div_ceil(256)], 256; partial.at(), none, none, d_weight.at_mut(), to, to, to, to, int(blocks), int(d))?;
    Ok(dx)
}

/// Gradients of branch (bf16) and stream (f32).
pub fn merge_backward(
    hip: &Hip,
    x: ResidualNorm<'_, Hip>,
    dh: &Buf,
    dy: Option<&Buf>,
    g: Merge<&mut Buf>,
    d_norm: &mut Buf,
) -> Result<(Buf, Buf)> {
    let (branch, stream) = (hip.as_bf16(x.branch)?, hip.as_f32(x.stream)?);
    let dh = hip.as_f32(dh)?;
    let dy = dy.map(|dy| hip.as_f32(dy)).transpose()?;
    let (rows, d) = (stream.rows(), stream.cols());
    let (mut d_branch, mut d_stream) = (hip.bf16s(rows, d)?, hip.f32s(rows, d)?);
    let blocks = rows.div_ceil(ROWS_PER_BLOCK);
    let mut partial = hip.f32s(4 * blocks, d)?;
    let v = variant(d)?;
    let p = x.p;
    launch!(
        hip, v.backward, [blocks], v.items;
        branch.at(), stream.at(), p.branch_scale.at(), p.branch_bias.at(), p.stream_scale.at(), p.stream_bias.at(), x.norm.at(),
        x.saved.at(), dh.at(), dy.as_ref().map_or(address(None), |dy| dy.at()), d_branch.at_mut(), d_stream.at_mut(),
        partial.at_mut(), int(rows), int(d), int(ROWS_PER_BLOCK),
    )?;
    launch!(
        hip, "residual_norm_params", [d.div_ceil(256)], 256;
        partial.at(), p.branch_scale.at(), p.stream_scale.at(), d_norm.at_mut(), g.branch_scale.at_mut(), g.branch_bias.at_mut(),
        g.stream_scale.at_mut(), g.stream_bias.at_mut(), int(blocks), int(d),
    )?;
    Ok((d_branch, d_stream))
}
