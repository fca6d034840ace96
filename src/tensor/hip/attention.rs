//! Causal attention: `kernels/attention.zk.cpp`, and `attention_padding.zk.cpp` for rows that see no key.

use anyhow::{Result, ensure};

use super::rows::address;
use super::{Buf, Hip, Rows, int};
use crate::tensor::backend::{AttentionShape, Qkv};

/// Columns (queries of a key head's group) and keys that a workgroup works on.
const TILE: usize = 128;
const ITEMS: u32 = 256;
/// Rows that a workgroup of `attention_bwd_delta` sums.
const DELTA_ROWS: usize = 4;

/// Log-sum-exp of each row and head, f32 `[T, heads]`, in the kernels' own way of writing it.
pub struct Saved {
    lse: Buf,
}

/// What all kernels are told of a launch, in the order of `SIGHT_ARGUMENTS`.
struct Sight {
    doc_start: *const f32,
    chunk_start: *const f32,
    key_valid: *const f32,
    rows: usize,
    seq: usize,
    keys: usize,
    shape: AttentionShape,
    past: usize,
    /// Workgroups: tiles of columns, of keys; one for each key head of each sequence.
    columns: usize,
    units: usize,
}

impl Sight {
    fn of(rows: &Rows, shape: AttentionShape) -> Self {
        let sequences = rows.sequences();
        let of_sequence = rows.tokens() / sequences.max(1);
        let key_valid = match &rows.chunks {
            Some(chunks) => chunks.key_valid.as_ref(),
            None => rows.key_valid.as_ref(),
        };
        Self {
            doc_start: address(rows.doc_start.as_ref()),
            chunk_start: address(rows.chunks.as_ref().map(|c| &c.start)),
            key_valid: address(key_valid),
            rows: of_sequence,
            seq: rows.seq,
            keys: rows.keys(),
            shape,
            past: if rows.chunks.is_some() { 0 } else { rows.past },
            columns: of_sequence * (shape.num_query_heads / shape.num_kv_heads),
            units: sequences * shape.num_kv_heads,
        }
    }

    fn has_padding(&self) -> bool {
        !self.key_valid.is_null()
    }
}

/// `launch!` of a kernel whose last arguments are those of a `Sight`.
macro_rules! launch_with {
    ($hip:expr, $sight:expr, $name:expr, [$x:expr, $y:expr], $items:expr; $($argument:expr),* $(,)?) => {{
        let s = &$sight;
        let window = s.shape.window.unwrap_or(0);
        let scale = (1.0 / (s.shape.head_dim as f64).sqrt()) as f32;
        launch!(
            $hip, $name, [$x, $y], $items;
            $($argument,)* s.doc_start, s.chunk_start, s.key_valid, int(s.rows), int(s.seq), int(s.keys),
            int(s.shape.num_query_heads), int(s.shape.num_kv_heads), int(s.past), int(window), scale,
        )
    }};
}

/// Names of the forward kernel and of the two of the backward for a width of heads.
fn names(head_dim: usize) -> Result<[&'static str; 3]> {
    Ok(match head_dim {
        16 => ["attention_fwd_16", "attention_bwd_q_16", "attention_bwd_kv_16"],
        32 => ["attention_fwd_32", "attention_bwd_q_32", "attention_bwd_kv_32"],
        64 => ["attention_fwd_64", "attention_bwd_q_64", "attention_bwd_kv_64"],
        128 => ["attention_fwd_128", "attention_bwd_q_128", "attention_bwd_kv_128"],
        _ => anyhow::bail!("the HIP kernels attend with heads of 16, 32, 64 or 128 numbers, not {head_dim}"),
    })
}

fn check(rows: &Rows, x: &Qkv<&Buf>) -> Result<()> {
    let keys = rows.sequences() * rows.keys();
    ensure!(
        x.k.rows() == keys && x.v.rows() == keys,
        "attention over {keys} keys got {} keys, {} values",
        x.k.rows(),
        x.v.rows()
    );
    Ok(())
}

/// Heads' outputs, bf16 `[T, q_dim]`.
pub fn forward(hip: &Hip, rows: &Rows, shape: AttentionShape, x: Qkv<&Buf>) -> Result<(Buf, Saved)> {
    check(rows, &x)?;
    let [name, ..] = names(shape.head_dim)?;
    let (q, k, v) = (hip.as_bf16(x.q)?, hip.as_bf16(x.k)?, hip.as_bf16(x.v)?);
    let s = Sight::of(rows, shape);
    let mut out = hip.bf16s(q.rows(), q.cols())?;
    let mut lse = hip.f32s(q.rows(), shape.num_query_heads)?;
    let (tiles, units) = (s.columns.div_ceil(TILE), s.units);
    launch_with!(hip, s, name, [tiles, units], ITEMS; q.at(), k.at(), v.at(), out.at_mut(), lse.at_mut())?;
    if s.has_padding() {
        let d = int(shape.head_dim);
        launch_with!(hip, s, "attention_padding_fwd", [s.columns, units], 64; v.at(), out.at_mut(), lse.at_mut(), d)?;
    }
    Ok((out, Saved { lse }))
}

/// Gradients, f32.
pub fn backward(
    hip: &Hip,
    rows: &Rows,
    shape: AttentionShape,
    x: Qkv<&Buf>,
    out: &Buf,
    saved: &Saved,
    d_out: &Buf,
) -> Result<Qkv<Buf>> {
    check(rows, &x)?;
    ensure!(rows.past == 0, "a backward through keys of a cache");
    let [_, of_queries, of_keys] = names(shape.head_dim)?;
    let (q, k, v) = (hip.as_bf16(x.q)?, hip.as_bf16(x.k)?, hip.as_bf16(x.v)?);
    let (out, d_out) = (hip.as_bf16(out)?, hip.as_bf16(d_out)?);
    let s = Sight::of(rows, shape);
    let mut dq = hip.f32s(q.rows(), q.cols())?;
    let (mut dk, mut dv) = (hip.f32s(k.rows(), k.cols())?, hip.f32s(v.rows(), v.cols())?);
    let heads = q.rows() * shape.num_query_heads;
    let (mut delta, d) = (hip.f32s(q.rows(), shape.num_query_heads)?, int(shape.head_dim));
    launch!(hip, "attention_bwd_delta", [heads.div_ceil(DELTA_ROWS)], ITEMS; out.at(), d_out.at(), delta.at_mut(), int(heads), d)?;
    let (lse, units) = (saved.lse.at(), s.units);
    let (columns, keys) = (s.columns.div_ceil(TILE), s.keys.div_ceil(TILE));
    launch_with!(
        hip, s, of_queries, [columns, units], ITEMS;
        q.at(), k.at(), v.at(), lse, delta.at(), d_out.at(), dq.at_mut(),
    )?;
    launch_with!(
        hip, s, of_keys, [keys, units], ITEMS;
        q.at(), k.at(), v.at(), lse, delta.at(), d_out.at(), dk.at_mut(), dv.at_mut(),
    )?;
    if s.has_padding() {
        launch_with!(
            hip, s, "attention_padding_bwd_q", [s.columns, units], 64;
            k.at(), v.at(), lse, delta.at(), d_out.at(), dq.at_mut(), d,
        )?;
        launch_with!(
            hip, s, "attention_padding_bwd_kv", [s.keys, units], 64;
            q.at(), v.at(), lse, delta.at(), d_out.at(), dk.at_mut(), dv.at_mut(), d,
        )?;
    }
    Ok(Qkv { q: dq, k: dk, v: dv })
}
