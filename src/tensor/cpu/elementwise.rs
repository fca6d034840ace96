//! Row-wise verbs: affine, residual merge, RMSNorm, and the pattern they share: rows in parallel, and sums over rows
//! (gradients of per-channel parameters) taken chunk by chunk in a fixed order.

use std::ops::Range;

use super::level::vectorised;
use super::math::lane_sum;
use super::par::{self, Shared};
use crate::tensor::backend::Merge;

/// Rows one task handles. Fixed, so that sums over rows group alike at any thread count.
pub const ROW_CHUNK: usize = super::packed::MC;

pub fn num_chunks(rows: usize) -> usize {
    rows.div_ceil(ROW_CHUNK)
}

/// Numbers of scratch for `sum_over_rows` with sums of `width` in all.
pub fn sums_len(rows: usize, width: usize) -> usize {
    num_chunks(rows) * width
}

/// Runs `f(row range, partial sums)` over chunks of rows; partial sums start at zero and are `width` long. Afterwards `out`
/// gets the sum over chunks, in their order. `partials`: `sums_len(rows, width)`.
pub fn sum_over_rows(
    rows: usize,
    width: usize,
    partials: &mut [f32],
    f: impl Fn(Range<usize>, &mut [f32]) + Sync,
    out: impl FnMut(usize, f32),
) {
    sum_over_rows_with(rows, width, partials, &mut [], 0, |range, sums, _| f(range, sums), out);
}

/// As `sum_over_rows`; `f` gets its thread's part of `scratch` as well, `per_thread` long.
pub fn sum_over_rows_with(
    rows: usize,
    width: usize,
    partials: &mut [f32],
    scratch: &mut [f32],
    per_thread: usize,
    f: impl Fn(Range<usize>, &mut [f32], &mut [f32]) + Sync,
    mut out: impl FnMut(usize, f32),
) {
    let partials = &mut partials[..sums_len(rows, width)];
    let parts = Shared::new(partials);
    par::tasks_with(num_chunks(rows), scratch, per_thread, |chunk, scratch| {
        // SAFETY: one part per chunk.
        let part = unsafe { parts.range(chunk * width, width) };
        part.fill(0.0);
        f(chunk * ROW_CHUNK..((chunk + 1) * ROW_CHUNK).min(rows), part, scratch);
    });
    if partials.is_empty() {
        return;
    }
    let (total, others) = partials.split_at_mut(width);
    vectorised(
        #[inline(always)]
        || {
            for part in others.chunks(width) {
                add_inline(total, part);
            }
        },
    );
    total.iter().enumerate().for_each(|(i, sum)| out(i, *sum));
}

#[inline(always)]
pub fn add_inline(a: &mut [f32], b: &[f32]) {
    for (a, b) in a.iter_mut().zip(b) {
        *a += b;
    }
}

/// `a += b`
pub fn add(a: &mut [f32], b: &[f32]) {
    vectorised(
        #[inline(always)]
        || add_inline(a, b),
    );
}

/// Numbers one task handles where there are no rows.
const FLAT_CHUNK: usize = 1 << 15;

/// `a += b`, in parallel.
pub fn add_parallel(a: &mut [f32], b: &[f32]) {
    let len = a.len();
    let a = Shared::new(a);
    par::chunks(len, FLAT_CHUNK, |range| {
        // SAFETY: chunks are disjoint.
        add(unsafe { a.range(range.start, range.len()) }, &b[range]);
    });
}

/// `a = 0`, in parallel.
pub fn clear(a: &mut [f32]) {
    let len = a.len();
    let a = Shared::new(a);
    // SAFETY: chunks are disjoint.
    par::chunks(len, FLAT_CHUNK, |range| unsafe { a.range(range.start, range.len()) }.fill(0.0));
}

/// `(x + bias) * scale`
pub fn affine(x: &[f32], scale: &[f32], bias: &[f32], y: &mut [f32]) {
    let d = scale.len();
    let y = Shared::new(y);
    par::chunks(x.len() / d, ROW_CHUNK, |rows| {
        // SAFETY: chunks of rows are disjoint.
        let y = unsafe { y.range(rows.start * d, rows.len() * d) };
        vectorised(
            #[inline(always)]
            || {
                for (y, x) in y.chunks_exact_mut(d).zip(x[rows.start * d..].chunks_exact(d)) {
                    let (x, scale, bias) = (&x[..d], &scale[..d], &bias[..d]);
                    for i in 0..d {
                        y[i] = (x[i] + bias[i]) * scale[i];
                    }
                }
            },
        );
    });
}

/// One side of a merge, or the input affine: `dx = dy * scale`, `d_scale += sum dy (x + bias)`, `d_bias += sum dy * scale`.
/// `partials`: `sums_len(rows, 2 D)`.
#[allow(clippy::too_many_arguments)]
pub fn affine_backward(
    x: &[f32],
    scale: &[f32],
    bias: &[f32],
    dy: &[f32],
    dx: &mut [f32],
    d_scale: &mut [f32],
    d_bias: &mut [f32],
    partials: &mut [f32],
) {
    let d = scale.len();
    let dx = Shared::new(dx);
    sum_over_rows(
        x.len() / d,
        2 * d,
        partials,
        |rows, partial| {
            // SAFETY: chunks of rows are disjoint.
            let dx = unsafe { dx.range(rows.start * d, rows.len() * d) };
            let (s, b) = partial.split_at_mut(d);
            vectorised(
                #[inline(always)]
                || {
                    for (t, dx) in rows.zip(dx.chunks_exact_mut(d)) {
                        dx.copy_from_slice(&dy[t * d..][..d]);
                        affine_backward_row(&x[t * d..][..d], scale, bias, dx, s, b);
                    }
                },
            );
        },
        |i, sum| if i < d { d_scale[i] += sum } else { d_bias[i - d] += sum * scale[i - d] },
    );
}

/// Of one row, in place: `d` holds dy, then dx. Adds the row's parts of `sum dy (x + bias)` and `sum dy`.
#[inline(always)]
fn affine_backward_row(x: &[f32], scale: &[f32], bias: &[f32], d: &mut [f32], s: &mut [f32], b: &mut [f32]) {
    let n = x.len();
    let (scale, bias, d, s, b) = (&scale[..n], &bias[..n], &mut d[..n], &mut s[..n], &mut b[..n]);
    for i in 0..n {
        s[i] += d[i] * (x[i] + bias[i]);
        b[i] += d[i];
        d[i] *= scale[i];
    }
}

#[inline(always)]
fn merge_row(branch: &[f32], stream: &[f32], p: Merge<&[f32]>, y: &mut [f32]) {
    let d = y.len();
    let (branch, stream) = (&branch[..d], &stream[..d]);
    let (bb, bs, sb, ss) = (&p.branch_bias[..d], &p.branch_scale[..d], &p.stream_bias[..d], &p.stream_scale[..d]);
    for i in 0..d {
        y[i] = (branch[i] + bb[i]) * bs[i] + (stream[i] + sb[i]) * ss[i];
    }
}

/// Normalises one row; returns 1 / sqrt(mean(x^2) + eps).
#[inline(always)]
pub fn norm_row(x: &[f32], w: &[f32], eps: f64, y: &mut [f32]) -> f32 {
    let d = x.len();
    let (w, y) = (&w[..d], &mut y[..d]);
    let inv = 1.0 / (lane_sum(d, |i| x[i] * x[i]) / d as f32 + eps as f32).sqrt();
    for i in 0..d {
        y[i] = x[i] * inv * w[i];
    }
    inv
}

/// `(branch + b) * s + (stream + b') * s'`
pub fn residual_scale(branch: &[f32], stream: &[f32], p: Merge<&[f32]>, y: &mut [f32]) {
    let d = p.branch_scale.len();
    let y = Shared::new(y);
    par::chunks(stream.len() / d, ROW_CHUNK, |rows| {
        // SAFETY: chunks of rows are disjoint.
        let y = unsafe { y.range(rows.start * d, rows.len() * d) };
        vectorised(
            #[inline(always)]
            || {
                for (t, y) in rows.zip(y.chunks_exact_mut(d)) {
                    merge_row(&branch[t * d..][..d], &stream[t * d..][..d], p, y);
                }
            },
        );
    });
}

/// `residual_scale` into `y`, and the norm of that into `h`, with 1 / RMS of each row in `inv`.
#[allow(clippy::too_many_arguments)]
pub fn residual_norm(
    branch: &[f32],
    stream: &[f32],
    p: Merge<&[f32]>,
    w: &[f32],
    eps: f64,
    y: &mut [f32],
    h: &mut [f32],
    inv: &mut [f32],
) {
    let d = w.len();
    let (y, h, inv) = (Shared::new(y), Shared::new(h), Shared::new(inv));
    par::chunks(stream.len() / d, ROW_CHUNK, |rows| {
        // SAFETY: chunks of rows are disjoint.
        let (y, h) = unsafe { (y.range(rows.start * d, rows.len() * d), h.range(rows.start * d, rows.len() * d)) };
        let inv = unsafe { inv.range(rows.start, rows.len()) };
        vectorised(
            #[inline(always)]
            || {
                for (((t, y), h), inv) in rows.zip(y.chunks_exact_mut(d)).zip(h.chunks_exact_mut(d)).zip(inv) {
                    merge_row(&branch[t * d..][..d], &stream[t * d..][..d], p, y);
                    *inv = norm_row(y, w, eps, h);
                }
            },
        );
    });
}

/// y, and 1 / sqrt(mean(x^2) + eps) of each row.
pub fn rms_norm(x: &[f32], w: &[f32], eps: f64, y: &mut [f32], inv: &mut [f32]) {
    let d = w.len();
    let (y, inv) = (Shared::new(y), Shared::new(inv));
    par::chunks(x.len() / d, ROW_CHUNK, |rows| {
        // SAFETY: chunks of rows are disjoint.
        let (y, inv) = unsafe { (y.range(rows.start * d, rows.len() * d), inv.range(rows.start, rows.len())) };
        vectorised(
            #[inline(always)]
            || {
                for ((t, y), inv) in rows.zip(y.chunks_exact_mut(d)).zip(inv) {
                    *inv = norm_row(&x[t * d..][..d], w, eps, y);
                }
            },
        );
    });
}

/// With g = dy * w and n = 1 / sqrt(mean(x^2) + eps): `dx = n g - x n^3 mean(g x)`, `dw += dy x n`.
#[inline(always)]
pub fn norm_backward_row(x: &[f32], w: &[f32], n: f32, dy: &[f32], dx: &mut [f32], dw: &mut [f32]) {
    let d = x.len();
    let (w, dy, dx, dw) = (&w[..d], &dy[..d], &mut dx[..d], &mut dw[..d]);
    let c = lane_sum(d, |i| dy[i] * w[i] * x[i]) / d as f32 * n * n * n;
    for i in 0..d {
        dw[i] += dy[i] * x[i] * n;
        dx[i] = dy[i] * w[i] * n - x[i] * c;
    }
}

/// `partials`: `sums_len(rows, D)`.
pub fn rms_norm_backward(x: &[f32], w: &[f32], inv: &[f32], dy: &[f32], dx: &mut [f32], dw: &mut [f32], partials: &mut [f32]) {
    let d = w.len();
    let dx = Shared::new(dx);
    sum_over_rows(
        inv.len(),
        d,
        partials,
        |rows, partial| {
            // SAFETY: chunks of rows are disjoint.
            let dx = unsafe { dx.range(rows.start * d, rows.len() * d) };
            vectorised(
                #[inline(always)]
                || {
                    for (t, dx) in rows.zip(dx.chunks_exact_mut(d)) {
                        norm_backward_row(&x[t * d..][..d], w, inv[t], &dy[t * d..][..d], dx, partial);
                    }
                },
            );
        },
        |i, sum| dw[i] += sum,
    );
}

/// Inputs of `residual_norm_backward`: what the forward had, and the gradients of its two outputs.
pub struct ResidualNorm<'a> {
    pub branch: &'a [f32],
    pub stream: &'a [f32],
    pub p: Merge<&'a [f32]>,
    /// The merged stream.
    pub y: &'a [f32],
    pub w: &'a [f32],
    pub inv: &'a [f32],
    pub dh: &'a [f32],
    /// Gradient of the merged stream that did not come through the norm.
    pub dy: Option<&'a [f32]>,
}

/// Backward of `residual_norm`. `partials`: `sums_len(rows, 5 D)`.
pub fn residual_norm_backward(
    x: ResidualNorm,
    d_branch: &mut [f32],
    d_stream: &mut [f32],
    g: Merge<&mut [f32]>,
    dw: &mut [f32],
    partials: &mut [f32],
) {
    let d = x.w.len();
    let (d_branch, d_stream) = (Shared::new(d_branch), Shared::new(d_stream));
    sum_over_rows(
        x.inv.len(),
        5 * d,
        partials,
        |rows, partial| {
            // SAFETY: chunks of rows are disjoint.
            let (d_branch, d_stream) =
                unsafe { (d_branch.range(rows.start * d, rows.len() * d), d_stream.range(rows.start * d, rows.len() * d)) };
            let mut sums = partial.chunks_exact_mut(d);
            let [dw, s1, b1, s2, b2] = std::array::from_fn(|_| sums.next().expect("five sums"));
            vectorised(
                #[inline(always)]
                || {
                    for ((t, d_branch), d_stream) in rows.zip(d_branch.chunks_exact_mut(d)).zip(d_stream.chunks_exact_mut(d)) {
                        let at = t * d..(t + 1) * d;
                        // The branch's place holds the gradient of the merged stream until both sides have used it.
                        norm_backward_row(&x.y[at.clone()], x.w, x.inv[t], &x.dh[at.clone()], d_branch, dw);
                        if let Some(dy) = x.dy {
                            add_inline(d_branch, &dy[at.clone()]);
                        }
                        d_stream.copy_from_slice(d_branch);
                        affine_backward_row(&x.stream[at.clone()], x.p.stream_scale, x.p.stream_bias, d_stream, s2, b2);
                        affine_backward_row(&x.branch[at], x.p.branch_scale, x.p.branch_bias, d_branch, s1, b1);
                    }
                },
            );
        },
        |i, sum| match (i / d, i % d) {
            (0, i) => dw[i] += sum,
            (1, i) => g.branch_scale[i] += sum,
            (2, i) => g.branch_bias[i] += sum * x.p.branch_scale[i],
            (3, i) => g.stream_scale[i] += sum,
            (_, i) => g.stream_bias[i] += sum * x.p.stream_scale[i],
        },
    );
}
