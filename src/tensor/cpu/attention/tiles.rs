//! Loops over tiles of scores, written so that they vectorise; callers run them in `vectorised`.
//!
//! A tile has a row for each key and a column for each query.

use super::super::level::vectorised;
use super::super::math::{exp_of_score, larger};
use super::super::rows::Rows;
use super::{COLS, Unit};

/// Columns that the loops of the backward take at a time.
pub const STEP: usize = 16;

/// Sets scores that a column must not see to -infinity. `tile` holds rows of `stride` numbers, one a key from `key0` on, for the
/// columns whose keys `first` and `len` give.
#[inline(always)]
pub fn hide(rows: &Rows, unit: Unit, tile: &mut [f32], stride: usize, key0: usize, first: &[u32], len: &[u32]) {
    for (r, row) in tile.chunks_mut(stride).enumerate() {
        let row = &mut row[..first.len()];
        if rows.has_padding_keys() && rows.is_padding_key(unit.sequence, key0 + r) {
            row.fill(f32::NEG_INFINITY);
            continue;
        }
        hide_key(row, key0 + r, first, len);
    }
}

/// The same of one key's scores.
#[inline(always)]
pub fn hide_key(row: &mut [f32], key: usize, first: &[u32], len: &[u32]) {
    for ((score, first), len) in row.iter_mut().zip(first).zip(len) {
        // Bits of the score or those of -infinity. As a choice of numbers this became stores under a mask, which some
        // machines are slow at.
        let seen = 0u32.wrapping_sub(u32::from((key as u32).wrapping_sub(*first) < *len));
        *score = f32::from_bits(score.to_bits() & seen | f32::NEG_INFINITY.to_bits() & !seen);
    }
}

/// Scores of a tile -> probabilities times e^maximum, with the columns' maximum and sum brought up to date, and what was added
/// up before, `out` `[head, stride]`, scaled down to the new maximum. `W` columns, rows `stride` apart.
#[inline(always)]
pub fn softmax<const W: usize>(
    tile: &mut [f32],
    stride: usize,
    scale: f32,
    max: &mut [f32],
    sum: &mut [f32],
    out: Option<&mut [f32]>,
) {
    // Four rows at a time, since a chain of additions waits for each result.
    let mut top = [f32::NEG_INFINITY; W];
    let mut quads = tile.chunks_exact(4 * stride);
    for quad in &mut quads {
        let (a, b, c, d) = four_rows::<W>(quad, stride);
        for j in 0..W {
            top[j] = larger(top[j], larger(larger(a[j], b[j]), larger(c[j], d[j])));
        }
    }
    for row in quads.remainder().chunks_exact(stride) {
        for j in 0..W {
            top[j] = larger(top[j], row[j]);
        }
    }
    let (max, sum): (&mut [f32; W], &mut [f32; W]) =
        (max.first_chunk_mut().expect("columns"), sum.first_chunk_mut().expect("columns"));
    let mut shrink = [0f32; W];
    let mut high = [0f32; W];
    for j in 0..W {
        high[j] = larger(max[j], top[j] * scale);
        shrink[j] = exp_of_score(max[j] - high[j]);
    }
    *max = high;
    for row in tile.chunks_exact_mut(stride) {
        let row: &mut [f32; W] = row.first_chunk_mut().expect("a row");
        for j in 0..W {
            row[j] = exp_of_score(row[j] * scale - high[j]);
        }
    }
    let mut added = [0f32; W];
    let mut quads = tile.chunks_exact(4 * stride);
    for quad in &mut quads {
        let (a, b, c, d) = four_rows::<W>(quad, stride);
        for j in 0..W {
            added[j] += (a[j] + b[j]) + (c[j] + d[j]);
        }
    }
    for row in quads.remainder().chunks_exact(stride) {
        for j in 0..W {
            added[j] += row[j];
        }
    }
    for j in 0..W {
        sum[j] = sum[j] * shrink[j] + added[j];
    }
    if let Some(out) = out
        && shrink != [1.0; W]
    {
        for row in out.chunks_exact_mut(stride) {
            for j in 0..W {
                row[j] *= shrink[j];
            }
        }
    }
}

type Rows4<'a, const W: usize> = (&'a [f32; W], &'a [f32; W], &'a [f32; W], &'a [f32; W]);

#[inline(always)]
fn four_rows<const W: usize>(tile: &[f32], stride: usize) -> Rows4<'_, W> {
    let (a, rest) = tile.split_at(stride);
    let (b, rest) = rest.split_at(stride);
    let (c, d) = rest.split_at(stride);
    (first(a), first(b), first(c), first(d))
}

#[inline(always)]
fn first<const W: usize>(row: &[f32]) -> &[f32; W] {
    row.first_chunk().expect("a whole row")
}

/// Scores -> probabilities, for as many columns as `lse` has; rows `COLS` apart.
#[inline(always)]
pub fn probabilities(tile: &mut [f32], scale: f32, lse: &[f32]) {
    let (lse, _) = lse.as_chunks::<STEP>();
    for row in tile.chunks_exact_mut(COLS) {
        let (row, _) = row.as_chunks_mut::<STEP>();
        for s in 0..lse.len() {
            for i in 0..STEP {
                row[s][i] = exp_of_score(row[s][i] * scale - lse[s][i]);
            }
        }
    }
}

/// dP -> dS = P (dP - delta) slope, with the numbers of the columns; rows `COLS` apart.
#[inline(always)]
pub fn score_gradients(p: &[f32], ds: &mut [f32], delta: &[f32], slope: &[f32]) {
    for (p, ds) in p.chunks_exact(COLS).zip(ds.chunks_exact_mut(COLS)) {
        let (p, ds, slope) = (&p[..delta.len()], &mut ds[..delta.len()], &slope[..delta.len()]);
        for i in 0..delta.len() {
            ds[i] = p[i] * (ds[i] - delta[i]) * slope[i];
        }
    }
}

/// `softmax` of a tile of `width` columns.
pub fn bring_up_to_date(
    width: usize,
    tile: &mut [f32],
    nr: usize,
    scale: f32,
    max: &mut [f32],
    sum: &mut [f32],
    out: Option<&mut [f32]>,
) {
    match width {
        8 => vectorised(
            #[inline(always)]
            || softmax::<8>(tile, nr, scale, max, sum, out),
        ),
        16 => vectorised(
            #[inline(always)]
            || softmax::<16>(tile, nr, scale, max, sum, out),
        ),
        32 => vectorised(
            #[inline(always)]
            || softmax::<32>(tile, nr, scale, max, sum, out),
        ),
        _ => unreachable!("panels of {nr} columns"),
    }
}
