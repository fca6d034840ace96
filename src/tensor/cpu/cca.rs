//! CCA's mixer (spec 1.4, steps 2 to 9): a depthwise and a head-grouped causal convolution over queries and keys, q-k-mean,
//! delayed values, norms with temperature, RoPE.
//!
//! Names: X_t = [q | k] of token t, u = first convolution, y = second. "Previous" means the token before in the same
//! document; where there is none, X is 0 and u is the first convolution's bias (its inputs are zeros, its bias is not).

use rayon::prelude::*;

use super::elementwise::{ROW_CHUNK, add, add_column_sums, sum_over_rows};
use super::gemm::{Target, View, matmul};
use super::math::{lane_sum, round_bf16};
use super::rows::Rows;
use crate::tensor::backend::{CcaIn, CcaParams, CcaShape, Halo, Qkv};

/// Guard of the query and key norms: 1 / sqrt(|x|^2 + this).
const NORM_GUARD: f32 = 1e-12;

/// Queries and keys before their norm.
pub struct Saved {
    q: Vec<f32>,
    k: Vec<f32>,
}

/// Widths derived from the shape.
#[derive(Clone, Copy)]
struct Dims {
    q: usize,
    k: usize,
    c: usize,
    head: usize,
    heads: usize,
    group: usize,
    half: usize,
}

impl Dims {
    fn of(s: &CcaShape) -> Self {
        let (q, k) = (s.num_query_heads * s.head_dim, s.num_kv_heads * s.head_dim);
        let (heads, group) = (s.num_query_heads + s.num_kv_heads, s.num_query_heads / s.num_kv_heads);
        Self { q, k, c: q + k, head: s.head_dim, heads, group, half: k / 2 }
    }
}

/// cos and sin of the angles of `seq` positions from `past`, `[seq, rotary_dim / 2]` each. Angles in f32, as everyone's are.
struct RopeTable {
    cos: Vec<f32>,
    sin: Vec<f32>,
    half: usize,
}

impl RopeTable {
    fn new(shape: &CcaShape, past: usize, seq: usize) -> Self {
        let half = shape.rotary_dim / 2;
        let inv_freq: Vec<f32> =
            (0..half).map(|j| 1.0 / shape.rope_theta.powf((2 * j) as f64 / shape.rotary_dim as f64) as f32).collect();
        let angles = || (past..past + seq).flat_map(|pos| inv_freq.iter().map(move |f| pos as f32 * f));
        Self { cos: angles().map(f32::cos).collect(), sin: angles().map(f32::sin).collect(), half }
    }

    /// Rotates the first `2 * half` channels of one head at position `s` of its sequence; `backward` rotates back.
    fn rotate(&self, x: &mut [f32], s: usize, backward: bool) {
        let (a, b) = x[..2 * self.half].split_at_mut(self.half);
        let (cos, sin) = (&self.cos[s * self.half..][..self.half], &self.sin[s * self.half..][..self.half]);
        let sign = if backward { -1.0 } else { 1.0 };
        for j in 0..self.half {
            let (x, y, sin) = (a[j], b[j], sign * sin[j]);
            a[j] = x * cos[j] - y * sin;
            b[j] = y * cos[j] + x * sin;
        }
    }
}

/// X = [q | k], and X of the previous token, each `[T, C]`.
fn inputs(rows: &Rows, n: Dims, x: CcaIn<&[f32]>, halo: Option<Halo<&[f32]>>) -> (Vec<f32>, Vec<f32>) {
    let tokens = rows.tokens();
    let mut now = vec![0.0; tokens * n.c];
    let mut before = vec![0.0; tokens * n.c];
    now.par_chunks_mut(n.c).with_min_len(ROW_CHUNK).enumerate().for_each(|(t, row)| {
        row[..n.q].copy_from_slice(&x.q[t * n.q..][..n.q]);
        row[n.q..].copy_from_slice(&x.k[t * n.k..][..n.k]);
    });
    before.par_chunks_mut(n.c).with_min_len(ROW_CHUNK).enumerate().for_each(|(t, row)| {
        if rows.has_previous(t) {
            row.copy_from_slice(&now[(t - 1) * n.c..t * n.c]);
        } else if rows.is_first(t)
            && let Some(h) = halo
        {
            let at = t / rows.seq * 2 + 1;
            row[..n.q].copy_from_slice(&h.q[at * n.q..][..n.q]);
            row[n.q..].copy_from_slice(&h.k[at * n.k..][..n.k]);
        }
    });
    (now, before)
}

/// First convolution, and its value at the previous token, each `[T, C]`.
fn first_convolution(
    rows: &Rows,
    n: Dims,
    now: &[f32],
    before: &[f32],
    p: CcaParams<&[f32]>,
    halo: Option<Halo<&[f32]>>,
) -> (Vec<f32>, Vec<f32>) {
    let conv = |out: &mut [f32], before: &[f32], now: &[f32]| {
        for i in 0..n.c {
            out[i] = p.conv0_weight[2 * i] * before[i] + p.conv0_weight[2 * i + 1] * now[i] + p.conv0_bias[i];
        }
    };
    let mut u = vec![0.0; now.len()];
    u.par_chunks_mut(n.c).with_min_len(ROW_CHUNK).enumerate().for_each(|(t, u)| {
        conv(u, &before[t * n.c..][..n.c], &now[t * n.c..][..n.c]);
    });
    let mut u_before = vec![0.0; now.len()];
    u_before.par_chunks_mut(n.c).with_min_len(ROW_CHUNK).enumerate().for_each(|(t, out)| {
        if rows.has_previous(t) {
            out.copy_from_slice(&u[(t - 1) * n.c..t * n.c]);
            return;
        }
        match halo.filter(|_| rows.is_first(t)) {
            None => out.copy_from_slice(p.conv0_bias),
            Some(h) => {
                let row = |r: usize| [&h.q[r * n.q..][..n.q], &h.k[r * n.k..][..n.k]].concat();
                let at = t / rows.seq * 2;
                conv(out, &row(at), &row(at + 1));
            }
        }
    });
    (u, u_before)
}

/// The weight of tap `tap` for head `g` as a `[head (in), head (out)]` matrix: W is `[C, head, 2]`.
fn tap_weight<'a>(w: &'a [f32], n: Dims, g: usize, tap: usize) -> View<'a> {
    View { data: &w[g * n.head * n.head * 2 + tap..], row_stride: 2, col_stride: 2 * n.head }
}

pub fn forward(
    rows: &Rows,
    shape: CcaShape,
    x: CcaIn<&[f32]>,
    p: CcaParams<&[f32]>,
    halo: Option<Halo<&[f32]>>,
    bf16: bool,
) -> (Qkv<Vec<f32>>, Saved) {
    let (n, tokens) = (Dims::of(&shape), rows.tokens());
    let (now, before) = inputs(rows, n, x, halo);
    let (u, u_before) = first_convolution(rows, n, &now, &before, p, halo);
    drop((now, before));

    // y = b1 + W1[.., 0] u_{t-1} + W1[.., 1] u_t, head by head.
    let mut y = vec![0.0; tokens * n.c];
    y.par_chunks_mut(n.c).with_min_len(ROW_CHUNK).for_each(|row| row.copy_from_slice(p.conv1_bias));
    let rounded = bf16.then(|| (round_bf16(&u), round_bf16(&u_before), round_bf16(p.conv1_weight)));
    let (u, u_before, w1) = match &rounded {
        Some((u, u_before, w)) => (&u[..], &u_before[..], &w[..]),
        None => (&u[..], &u_before[..], p.conv1_weight),
    };
    for g in 0..n.heads {
        for (tap, u) in [(0, u_before), (1, u)] {
            let a = View::rows(&u[g * n.head..], n.c);
            let c = Target { data: &mut y[g * n.head..], row_stride: n.c };
            matmul(tokens, n.head, n.head, a, tap_weight(w1, n, g, tap), c, true);
        }
    }

    // q-k-mean, added to the convolution's output.
    let mut q = vec![0.0; tokens * n.q];
    let mut k = vec![0.0; tokens * n.k];
    q.par_chunks_mut(n.q).zip(k.par_chunks_mut(n.k)).with_min_len(ROW_CHUNK).enumerate().for_each(|(t, (q, k))| {
        let (q0, k0, y) = (&x.q[t * n.q..][..n.q], &x.k[t * n.k..][..n.k], &y[t * n.c..][..n.c]);
        k.copy_from_slice(&y[n.q..]);
        for a in 0..shape.num_query_heads {
            let g = a / n.group;
            for i in 0..n.head {
                let mean = 0.5 * (q0[a * n.head + i] + k0[g * n.head + i]);
                q[a * n.head + i] = y[a * n.head + i] + mean;
                k[g * n.head + i] += mean / n.group as f32;
            }
        }
    });
    let saved = Saved { q: q.clone(), k: k.clone() };

    // Norm, temperature, RoPE.
    let rope = RopeTable::new(&shape, rows.past, rows.seq);
    let finish = |x: &mut [f32], width: usize, temp: Option<&[f32]>| {
        x.par_chunks_mut(width).with_min_len(ROW_CHUNK).enumerate().for_each(|(t, row)| {
            for (h, head) in row.chunks_mut(n.head).enumerate() {
                let scale = (n.head as f32).sqrt() * inv_norm(head) * temp.map_or(1.0, |temp| temp[h]);
                head.iter_mut().for_each(|v| *v *= scale);
                rope.rotate(head, t % rows.seq, false);
            }
        });
    };
    finish(&mut q, n.q, None);
    finish(&mut k, n.k, Some(p.temp));

    // Values: this token's half, then the previous token's.
    let mut v = vec![0.0; tokens * n.k];
    v.par_chunks_mut(n.k).with_min_len(ROW_CHUNK).enumerate().for_each(|(t, v)| {
        v[..n.half].copy_from_slice(&x.v_current[t * n.half..][..n.half]);
        if rows.has_previous(t) {
            v[n.half..].copy_from_slice(&x.v_delayed[(t - 1) * n.half..][..n.half]);
        } else if rows.is_first(t)
            && let Some(h) = halo
        {
            v[n.half..].copy_from_slice(&h.v_delayed[t / rows.seq * n.half..][..n.half]);
        }
    });
    (Qkv { q, k, v }, saved)
}

fn inv_norm(x: &[f32]) -> f32 {
    1.0 / (lane_sum(x.len(), |i| x[i] * x[i]) + NORM_GUARD).sqrt()
}

#[allow(clippy::too_many_arguments)]
pub fn backward(
    rows: &Rows,
    shape: CcaShape,
    x: CcaIn<&[f32]>,
    p: CcaParams<&[f32]>,
    saved: &Saved,
    d: Qkv<&[f32]>,
    g: CcaParams<&mut [f32]>,
    bf16: bool,
) -> CcaIn<Vec<f32>> {
    let (n, tokens) = (Dims::of(&shape), rows.tokens());
    let rope = RopeTable::new(&shape, rows.past, rows.seq);

    // Back through RoPE, temperature and norm: gradients of the normless queries and keys.
    // y = s x/|x|: dx = s/|x| (dy - x̂ (x̂ dy)); with the guard inside the root this form is exact too.
    let unfinish = |dx: &mut [f32], dy: &[f32], x: &[f32], width: usize, temp: Option<&[f32]>| {
        dx.par_chunks_mut(width).with_min_len(ROW_CHUNK).enumerate().for_each(|(t, dx)| {
            dx.copy_from_slice(&dy[t * width..][..width]);
            for (h, dx) in dx.chunks_mut(n.head).enumerate() {
                let x = &x[t * width + h * n.head..][..n.head];
                rope.rotate(dx, t % rows.seq, true);
                let inv = inv_norm(x);
                let scale = (n.head as f32).sqrt() * inv * temp.map_or(1.0, |temp| temp[h]);
                let along = lane_sum(n.head, |i| dx[i] * x[i]) * inv * inv;
                for i in 0..n.head {
                    dx[i] = scale * (dx[i] - x[i] * along);
                }
            }
        });
    };
    let mut dq = vec![0.0; tokens * n.q];
    let mut dk = vec![0.0; tokens * n.k];
    unfinish(&mut dq, d.q, &saved.q, n.q, None);
    unfinish(&mut dk, d.k, &saved.k, n.k, Some(p.temp));
    // dT = sum of (rotated-back dk) . (normed k before the temperature).
    // One number for all tokens, and its terms cancel: summed in f64.
    for (h, sum) in g.temp.iter_mut().enumerate() {
        let terms: Vec<f64> = (0..tokens)
            .into_par_iter()
            .with_min_len(ROW_CHUNK)
            .map(|t| {
                let at = t * n.k + h * n.head;
                let mut dk = d.k[at..][..n.head].to_vec();
                rope.rotate(&mut dk, t % rows.seq, true);
                let x = &saved.k[at..][..n.head];
                let dot: f64 = dk.iter().zip(x).map(|(d, x)| *d as f64 * *x as f64).sum();
                dot * (n.head as f64).sqrt() * inv_norm(x) as f64
            })
            .collect();
        *sum += terms.iter().sum::<f64>() as f32;
    }

    // dy = [dq | dk] enters the second convolution.
    let mut dy = vec![0.0; tokens * n.c];
    dy.par_chunks_mut(n.c).with_min_len(ROW_CHUNK).enumerate().for_each(|(t, row)| {
        row[..n.q].copy_from_slice(&dq[t * n.q..][..n.q]);
        row[n.q..].copy_from_slice(&dk[t * n.k..][..n.k]);
    });
    add_column_sums(&dy, g.conv1_bias);
    let (now, before) = inputs(rows, n, x, None);
    let (u, u_before) = first_convolution(rows, n, &now, &before, p, None);
    let mut du = vec![0.0; tokens * n.c];
    let mut du_before = vec![0.0; tokens * n.c];
    {
        let rounded = bf16.then(|| (round_bf16(&u), round_bf16(&u_before), round_bf16(p.conv1_weight), round_bf16(&dy)));
        let (u, u_before, w1, dy) = match &rounded {
            Some((u, u_before, w, dy)) => (&u[..], &u_before[..], &w[..], &dy[..]),
            None => (&u[..], &u_before[..], p.conv1_weight, &dy[..]),
        };
        let mut dw = vec![0.0; n.head * n.head];
        for h in 0..n.heads {
            for (tap, u, du) in [(0, u_before, &mut du_before), (1, u, &mut du)] {
                let at = h * n.head;
                // du = dy W: the weight as [out, in].
                let w = tap_weight(w1, n, h, tap);
                let w = View { row_stride: w.col_stride, col_stride: w.row_stride, ..w };
                let c = Target { data: &mut du[at..], row_stride: n.c };
                matmul(tokens, n.head, n.head, View::rows(&dy[at..], n.c), w, c, false);
                // dW[out, in] = dyᵀ u.
                let (a, b) = (View::transposed(&dy[at..], n.c), View::rows(&u[at..], n.c));
                matmul(n.head, n.head, tokens, a, b, Target::rows(&mut dw, n.head), false);
                let target = &mut g.conv1_weight[at * n.head * 2 + tap..];
                target.iter_mut().step_by(2).zip(&dw).for_each(|(w, d)| *w += d);
            }
        }
    }
    drop((u, u_before, dy));

    // The first convolution's bias meets every u, those before a document's start included.
    add_column_sums(&du, g.conv0_bias);
    add_column_sums(&du_before, g.conv0_bias);
    // Whole gradient of u_t: its own use and, where the next token has a previous one, its use there.
    let next_uses = |t: usize| !rows.is_first(t + 1) && rows.has_previous(t + 1);
    du.par_chunks_mut(n.c).with_min_len(ROW_CHUNK).enumerate().for_each(|(t, du)| {
        if next_uses(t) {
            add(du, &du_before[(t + 1) * n.c..][..n.c]);
        }
    });
    let mut dw0 = vec![0.0; 2 * n.c];
    sum_over_rows(tokens, &mut dw0, |range, partial| {
        for t in range {
            let (du, now, before) = (&du[t * n.c..][..n.c], &now[t * n.c..][..n.c], &before[t * n.c..][..n.c]);
            for i in 0..n.c {
                partial[2 * i] += du[i] * before[i];
                partial[2 * i + 1] += du[i] * now[i];
            }
        }
    });
    add(g.conv0_weight, &dw0);

    // Gradients of the projections.
    let w0 = p.conv0_weight;
    let mut out = CcaIn {
        q: vec![0.0; tokens * n.q],
        k: vec![0.0; tokens * n.k],
        v_current: vec![0.0; tokens * n.half],
        v_delayed: vec![0.0; tokens * n.half],
    };
    out.q.par_chunks_mut(n.q).zip(out.k.par_chunks_mut(n.k)).with_min_len(ROW_CHUNK).enumerate().for_each(
        |(t, (out_q, out_k))| {
            let now = &du[t * n.c..][..n.c];
            let next = next_uses(t).then(|| &du[(t + 1) * n.c..][..n.c]);
            let conv = |i: usize| w0[2 * i + 1] * now[i] + next.map_or(0.0, |next| w0[2 * i] * next[i]);
            let (dq, dk) = (&dq[t * n.q..][..n.q], &dk[t * n.k..][..n.k]);
            for (i, v) in out_k.iter_mut().enumerate() {
                *v = conv(n.q + i);
            }
            for a in 0..shape.num_query_heads {
                let g = a / n.group;
                for i in 0..n.head {
                    let d_mean = 0.5 * (dq[a * n.head + i] + dk[g * n.head + i] / n.group as f32);
                    out_q[a * n.head + i] = conv(a * n.head + i) + d_mean;
                    out_k[g * n.head + i] += d_mean;
                }
            }
        },
    );
    for t in 0..tokens {
        let dv = &d.v[t * n.k..][..n.k];
        out.v_current[t * n.half..][..n.half].copy_from_slice(&dv[..n.half]);
        if rows.has_previous(t) {
            out.v_delayed[(t - 1) * n.half..][..n.half].copy_from_slice(&dv[n.half..]);
        }
    }
    out
}
