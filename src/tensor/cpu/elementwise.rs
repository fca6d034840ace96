//! Row-wise verbs: affine, residual merge, RMSNorm, and the pattern they share: rows in parallel, and sums over rows
//! (gradients of per-channel parameters) taken chunk by chunk in a fixed order.

use rayon::prelude::*;

use super::math::lane_sum;
use crate::tensor::backend::Merge;

/// Rows one task handles. Fixed, so that sums over rows group alike at any thread count.
pub const ROW_CHUNK: usize = 128;

/// Runs `f(row range, partial sums)` over chunks of rows; `sums` receives the partial sums in chunk order.
/// `f` gets a zeroed slice of `sums.len()` numbers.
pub fn sum_over_rows(rows: usize, sums: &mut [f32], f: impl Fn(std::ops::Range<usize>, &mut [f32]) + Sync) {
    let width = sums.len();
    let partial: Vec<Vec<f32>> = (0..rows.div_ceil(ROW_CHUNK))
        .into_par_iter()
        .map(|chunk| {
            let mut partial = vec![0.0; width];
            f(chunk * ROW_CHUNK..((chunk + 1) * ROW_CHUNK).min(rows), &mut partial);
            partial
        })
        .collect();
    for p in partial {
        add(sums, &p);
    }
}

/// `a += b`
pub fn add(a: &mut [f32], b: &[f32]) {
    for (a, b) in a.iter_mut().zip(b) {
        *a += b;
    }
}

/// `a += b`, in parallel.
pub fn add_parallel(a: &mut [f32], b: &[f32]) {
    const CHUNK: usize = 1 << 15;
    a.par_chunks_mut(CHUNK).zip(b.par_chunks(CHUNK)).for_each(|(a, b)| add(a, b));
}

/// Sums of all rows of `x`, added to `sums`.
pub fn add_column_sums(x: &[f32], sums: &mut [f32]) {
    let cols = sums.len();
    sum_over_rows(x.len() / cols.max(1), sums, |rows, partial| {
        for row in x[rows.start * cols..rows.end * cols].chunks(cols) {
            add(partial, row);
        }
    });
}

/// `(x + bias) * scale`
pub fn affine(x: &[f32], scale: &[f32], bias: &[f32], y: &mut [f32]) {
    let d = scale.len();
    y.par_chunks_mut(d * ROW_CHUNK).zip(x.par_chunks(d * ROW_CHUNK)).for_each(|(y, x)| {
        for (y, x) in y.chunks_mut(d).zip(x.chunks(d)) {
            for i in 0..d {
                y[i] = (x[i] + bias[i]) * scale[i];
            }
        }
    });
}

/// One side of a merge, or the input affine: `dx = dy * scale`, `d_scale += sum dy (x + bias)`, `d_bias += sum dy * scale`.
pub fn affine_backward(x: &[f32], scale: &[f32], bias: &[f32], dy: &[f32], d_scale: &mut [f32], d_bias: &mut [f32]) -> Vec<f32> {
    let d = scale.len();
    let mut dx = vec![0.0; x.len()];
    dx.par_chunks_mut(d * ROW_CHUNK).zip(dy.par_chunks(d * ROW_CHUNK)).for_each(|(dx, dy)| {
        for (dx, dy) in dx.chunks_mut(d).zip(dy.chunks(d)) {
            for i in 0..d {
                dx[i] = dy[i] * scale[i];
            }
        }
    });
    let mut sums = vec![0.0; 2 * d];
    sum_over_rows(x.len() / d, &mut sums, |rows, partial| {
        let (s, b) = partial.split_at_mut(d);
        for r in rows {
            let (x, dy) = (&x[r * d..(r + 1) * d], &dy[r * d..(r + 1) * d]);
            for i in 0..d {
                s[i] += dy[i] * (x[i] + bias[i]);
                b[i] += dy[i];
            }
        }
    });
    for i in 0..d {
        d_scale[i] += sums[i];
        d_bias[i] += sums[d + i] * scale[i];
    }
    dx
}

/// `(branch + b) * s + (stream + b') * s'`
pub fn residual_scale(branch: &[f32], stream: &[f32], p: Merge<&[f32]>, y: &mut [f32]) {
    let d = p.branch_scale.len();
    let chunk = d * ROW_CHUNK;
    y.par_chunks_mut(chunk).zip(branch.par_chunks(chunk)).zip(stream.par_chunks(chunk)).for_each(|((y, branch), stream)| {
        for ((y, branch), stream) in y.chunks_mut(d).zip(branch.chunks(d)).zip(stream.chunks(d)) {
            for i in 0..d {
                y[i] = (branch[i] + p.branch_bias[i]) * p.branch_scale[i] + (stream[i] + p.stream_bias[i]) * p.stream_scale[i];
            }
        }
    });
}

/// Returns y and 1 / sqrt(mean(x^2) + eps) of each row.
pub fn rms_norm(x: &[f32], w: &[f32], eps: f64) -> (Vec<f32>, Vec<f32>) {
    let d = w.len();
    let mut y = vec![0.0; x.len()];
    let mut inv = vec![0.0; x.len() / d];
    y.par_chunks_mut(d * ROW_CHUNK).zip(inv.par_chunks_mut(ROW_CHUNK)).zip(x.par_chunks(d * ROW_CHUNK)).for_each(
        |((y, inv), x)| {
            for ((y, inv), x) in y.chunks_mut(d).zip(inv).zip(x.chunks(d)) {
                let mean = lane_sum(d, |i| x[i] * x[i]) / d as f32;
                *inv = 1.0 / (mean + eps as f32).sqrt();
                for i in 0..d {
                    y[i] = x[i] * *inv * w[i];
                }
            }
        },
    );
    (y, inv)
}

/// With g = dy * w and n = 1 / sqrt(mean(x^2) + eps): `dx = n g - x n^3 mean(g x)`, `dw += sum dy x n`.
pub fn rms_norm_backward(x: &[f32], w: &[f32], inv: &[f32], dy: &[f32], dw: &mut [f32]) -> Vec<f32> {
    let d = w.len();
    let mut dx = vec![0.0; x.len()];
    dx.par_chunks_mut(d * ROW_CHUNK)
        .zip(inv.par_chunks(ROW_CHUNK))
        .zip(x.par_chunks(d * ROW_CHUNK))
        .zip(dy.par_chunks(d * ROW_CHUNK))
        .for_each(|(((dx, inv), x), dy)| {
            for (((dx, n), x), dy) in dx.chunks_mut(d).zip(inv).zip(x.chunks(d)).zip(dy.chunks(d)) {
                let c = lane_sum(d, |i| dy[i] * w[i] * x[i]) / d as f32 * n * n * n;
                for i in 0..d {
                    dx[i] = dy[i] * w[i] * n - x[i] * c;
                }
            }
        });
    sum_over_rows(inv.len(), dw, |rows, partial| {
        for r in rows {
            let (x, dy, n) = (&x[r * d..(r + 1) * d], &dy[r * d..(r + 1) * d], inv[r]);
            for i in 0..d {
                partial[i] += dy[i] * x[i] * n;
            }
        }
    });
    dx
}
