//! Gradients of the four projections, of the halo and of CCA's parameters.
//!
//! A block of rows needs the gradients of the two rows after it (each convolution looks one token back), so a task computes
//! those as well; sums over rows take a task's own rows only.

use anyhow::Result;

use super::rope::{self, RopeTable};
use super::{Dims, Direction, FirstConvolution, HeadWeights, Saved, inv_norm};
use crate::tensor::backend::{CcaIn, CcaParams, CcaShape, Halo, Qkv};
use crate::tensor::cpu::Cpu;
use crate::tensor::cpu::buf::Buf;
use crate::tensor::cpu::elementwise::{ROW_CHUNK, add_inline, num_chunks, sum_over_rows_with, sums_len};
use crate::tensor::cpu::level::vectorised;
use crate::tensor::cpu::linear::{self, LEFT_SCRATCH};
use crate::tensor::cpu::math::lane_sum;
use crate::tensor::cpu::par::{self, Shared};
use crate::tensor::cpu::rows::Rows;

/// Rows whose gradients a task computes: its own, and two more.
const REACH: usize = ROW_CHUNK + 2;

/// What the backward of norm, temperature and RoPE reads.
struct Finish<'a> {
    n: Dims,
    rows: &'a Rows,
    rope: &'a RopeTable,
    q: &'a [f32],
    k: &'a [f32],
    temp: &'a [f32],
    dq: &'a [f32],
    dk: &'a [f32],
}

impl Finish<'_> {
    /// Gradient of the normless [q | k] of row t. With `temp_sums`, adds the row's part of the temperatures' gradients.
    ///
    /// y = s x/|x|: dx = s/|x| (dy - x̂ (x̂ dy)); with the guard inside the root this form is exact too.
    #[inline(always)]
    fn row(&self, t: usize, out: &mut [f32], mut temp_sums: Option<&mut [f64]>) {
        let n = self.n;
        let root = (n.head as f32).sqrt();
        for (h, dx) in out[..n.c].chunks_exact_mut(n.head).enumerate() {
            let (x, dy, temp) = if h < n.query_heads {
                let at = t * n.q + h * n.head;
                (&self.q[at..][..n.head], &self.dq[at..][..n.head], None)
            } else {
                let g = h - n.query_heads;
                let at = t * n.k + g * n.head;
                (&self.k[at..][..n.head], &self.dk[at..][..n.head], Some(g))
            };
            dx.copy_from_slice(dy);
            self.rope.rotate(dx, self.rows.position(t), -1.0);
            let inv = inv_norm(x);
            if let (Some(g), Some(sums)) = (temp, temp_sums.as_deref_mut()) {
                // One number for all tokens, and its terms cancel: summed in f64.
                let dot: f64 = dx.iter().zip(x).map(|(d, x)| *d as f64 * *x as f64).sum();
                sums[g] += dot * (n.head as f64).sqrt() * inv as f64;
            }
            let scale = root * inv * temp.map_or(1.0, |g| self.temp[g]);
            let along = lane_sum(n.head, |i| dx[i] * x[i]) * inv * inv;
            for i in 0..n.head {
                dx[i] = scale * (dx[i] - x[i] * along);
            }
        }
    }
}

/// Gradients of the halo's rows. Those before a row are written by the task that has the row.
struct HaloGradients<'a> {
    rows: &'a Rows,
    n: Dims,
    q: Shared<f32>,
    k: Shared<f32>,
    v_delayed: Shared<f32>,
}

impl<'a> HaloGradients<'a> {
    fn new(rows: &'a Rows, n: Dims, halo: &mut Halo<Buf>) -> Self {
        let [q, k, v_delayed] = [&mut halo.q, &mut halo.k, &mut halo.v_delayed].map(|b| Shared::new(b.data_mut()));
        Self { rows, n, q, k, v_delayed }
    }

    /// Of one head's channels, from `at` on, of the two rows before the first row `t`. `du_before`: gradient of u of the newer
    /// one, `du`: whole gradient of u of row `t`. Adds to the head's sums of the first convolution's taps what its use in that
    /// newer row gives; its use in row `t` is summed like that in any row.
    fn channels(&self, conv: &FirstConvolution, t: usize, at: usize, du_before: &[f32], du: &[f32], sums: [&mut [f32]; 2]) {
        let n = self.n;
        // A head is one of queries or one of keys.
        let (part, of, width, channel) = if at < n.q { (0, &self.q, n.q, at) } else { (1, &self.k, n.k, at - n.q) };
        let row = t / self.rows.seq * 2;
        // SAFETY: each head of each row is written once.
        let (d_older, d_newer) =
            unsafe { (of.range(row * width + channel, n.head), of.range((row + 1) * width + channel, n.head)) };
        d_older.fill(0.0);
        d_newer.fill(0.0);
        let Some((newer, older)) = conv.halo_x(t) else {
            return;
        };
        let (before, now) = (&conv.before[at..][..n.head], &conv.now[at..][..n.head]);
        let [s_before, s_now] = sums;
        let newer = &newer[part][channel..];
        for j in 0..n.head {
            d_newer[j] = now[j] * du_before[j] + before[j] * du[j];
            s_now[j] += du_before[j] * newer[j];
        }
        if let Some(older) = older {
            let older = &older[part][channel..];
            for j in 0..n.head {
                d_older[j] = before[j] * du_before[j];
                s_before[j] += du_before[j] * older[j];
            }
        }
    }

    /// Of the delayed values before the first row `t`, whose gradient is `d` where it uses them.
    fn values(&self, t: usize, d: &[f32]) {
        // SAFETY: each row is written once.
        let out = unsafe { self.v_delayed.range(t / self.rows.seq * self.n.half, self.n.half) };
        if self.rows.rows_of_halo(t) > 0 {
            out.copy_from_slice(d);
        } else {
            out.fill(0.0);
        }
    }
}

#[allow(clippy::too_many_arguments, clippy::type_complexity)]
pub fn backward(
    cpu: &Cpu,
    rows: &Rows,
    shape: CcaShape,
    x: CcaIn<&Buf>,
    p: CcaParams<&Buf>,
    halo: Option<Halo<&Buf>>,
    saved: &Saved,
    d: Qkv<&Buf>,
    g: CcaParams<&mut Buf>,
) -> Result<(CcaIn<Buf>, Option<Halo<Buf>>)> {
    let (n, tokens, core) = (Dims::of(&shape), rows.tokens(), &cpu.core);
    let mut out = CcaIn {
        q: cpu.matrix(tokens, n.q)?,
        k: cpu.matrix(tokens, n.k)?,
        v_current: cpu.matrix(tokens, n.half)?,
        v_delayed: cpu.matrix(tokens, n.half)?,
    };
    let mut out_halo = match halo {
        None => None,
        Some(_) => Some(Halo {
            q: cpu.matrix(rows.batch * 2, n.q)?,
            k: cpu.matrix(rows.batch * 2, n.k)?,
            v_delayed: cpu.matrix(rows.batch, n.half)?,
        }),
    };
    let (slots, apart_len) = HeadWeights::lens(core, n, Direction::Backward);
    let mut weights = cpu.block::<u32>(slots)?;
    let mut apart = cpu.block::<f32>(apart_len)?;
    let mut taps = cpu.block::<f32>(2 * n.c)?;
    // Sums over rows: second convolution's weight (taps apart) and bias, first one's taps and bias.
    let sums = n.c * 2 * n.head + 4 * n.c;
    let mut partials = cpu.block::<f32>(sums_len(tokens, sums))?;
    let mut temp_partials = cpu.block::<f64>(num_chunks(tokens) * shape.num_kv_heads)?;
    let weight_scratch = linear::weight_gradient_alone_scratch(core, ROW_CHUNK, n.head, 2 * n.head);
    let per_thread =
        LEFT_SCRATCH + REACH * n.c * 2 + (ROW_CHUNK + 1) * n.c + REACH * 4 * n.head + REACH * n.head + weight_scratch;
    let mut scratch = cpu.block::<f32>(par::threads() * per_thread)?;
    if cpu.is_planning() {
        return Ok((out, out_halo));
    }
    FirstConvolution::taps(p.conv0_weight.data(), &mut taps);
    let weights = HeadWeights::pack(core, n, Direction::Backward, p.conv1_weight.data(), &mut apart, &mut weights);
    let conv = FirstConvolution::new(rows, n, x, halo, &taps, p.conv0_bias);
    let rope = rope::table(cpu, &shape, rows)?;
    let (dq, dk) = (d.q.data(), d.k.data());
    let finish = Finish { n, rows, rope: &rope, q: &saved.q, k: &saved.k, temp: p.temp.data(), dq, dk };
    let dv = d.v.data();
    // Whether row t's u and X are used by row t + 1.
    let next_uses = |t: usize| t + 1 < tokens && !rows.is_first(t + 1) && rows.has_previous(t + 1);
    let [all_q, all_k, all_current, all_delayed] =
        [&mut out.q, &mut out.k, &mut out.v_current, &mut out.v_delayed].map(|b| Shared::new(b.data_mut()));
    let all_temp = Shared::new(&mut temp_partials);
    let d_halo = out_halo.as_mut().map(|h| HaloGradients::new(rows, n, h));

    // Layout of the sums of a chunk.
    let (w1_len, c) = (n.c * 2 * n.head, n.c);
    let d_conv1 = g.conv1_weight.data_mut();
    let (d_conv1_bias, d_conv0, d_conv0_bias) = (g.conv1_bias.data_mut(), g.conv0_weight.data_mut(), g.conv0_bias.data_mut());
    sum_over_rows_with(
        tokens,
        sums,
        &mut partials,
        &mut scratch,
        per_thread,
        |range, sums, scratch| {
            let (t0, m) = (range.start, range.len());
            // Rows with gradients: own ones and up to two after them.
            let reach = (m + 2).min(tokens - t0);
            let (left, rest) = scratch.split_at_mut(LEFT_SCRATCH);
            let (dy, rest) = rest.split_at_mut(REACH * n.c);
            let (du, rest) = rest.split_at_mut(REACH * n.c);
            let (u, rest) = rest.split_at_mut((ROW_CHUNK + 1) * n.c);
            let (d_pairs, rest) = rest.split_at_mut(REACH * 2 * n.head);
            let (head_rows, rest) = rest.split_at_mut(REACH * 2 * n.head);
            let (dy_head, weight_scratch) = rest.split_at_mut(REACH * n.head);
            let (s_w1, rest) = sums.split_at_mut(w1_len);
            let mut rest = rest.chunks_exact_mut(c);
            let [s_b1, s_before, s_now, s_b0] = std::array::from_fn(|_| rest.next().expect("four sums"));
            // SAFETY: one part per chunk.
            let temp_sums = unsafe { all_temp.range(t0 / ROW_CHUNK * shape.num_kv_heads, shape.num_kv_heads) };
            temp_sums.fill(0.0);

            vectorised(
                #[inline(always)]
                || {
                    for (i, dy) in dy.chunks_exact_mut(c).enumerate().take(reach) {
                        finish.row(t0 + i, dy, (i < m).then_some(&mut *temp_sums));
                        if i < m {
                            add_inline(s_b1, dy);
                        }
                    }
                },
            );
            conv.block(t0, m, u);
            for head in 0..n.heads {
                let at = head * n.head;
                let (dy_head, d_pairs) = (&mut dy_head[..reach * n.head], &mut d_pairs[..reach * 2 * n.head]);
                for (out, dy) in dy_head.chunks_exact_mut(n.head).zip(dy.chunks_exact(c)) {
                    out.copy_from_slice(&dy[at..at + n.head]);
                }
                // Gradients of [u_{t-1} | u_t] of every row.
                linear::block(core, dy_head, 0..reach, weights.head(head), d_pairs, false, left);
                // Whole gradient of u_t: its own use and, where the next token has a previous one, its use there.
                for i in 0..(m + 1).min(reach) {
                    let own = &d_pairs[i * 2 * n.head..][..2 * n.head];
                    let du = &mut du[i * c + at..][..n.head];
                    du.copy_from_slice(&own[n.head..]);
                    if next_uses(t0 + i) {
                        add_inline(du, &d_pairs[(i + 1) * 2 * n.head..][..n.head]);
                    }
                    if i < m {
                        // The first convolution's bias meets every u, those before a document's start included.
                        let bias = &mut s_b0[at..at + n.head];
                        add_inline(bias, &own[..n.head]);
                        add_inline(bias, &own[n.head..]);
                        if let Some(d_halo) = d_halo.as_ref().filter(|_| rows.is_first(t0 + i)) {
                            let sums = [&mut s_before[at..][..n.head], &mut s_now[at..][..n.head]];
                            d_halo.channels(&conv, t0 + i, at, &own[..n.head], du, sums);
                        }
                    }
                }
                // dW[out, in] = dyᵀ [u_{t-1} | u_t].
                conv.head_rows(t0, m, head, u, head_rows);
                let dw = &mut s_w1[at * 2 * n.head..][..n.head * 2 * n.head];
                let (a, b) = (&head_rows[..m * 2 * n.head], &dy_head[..m * n.head]);
                linear::weight_gradient_alone(core, a, b, n.head, 2 * n.head, dw, weight_scratch);
            }
            vectorised(
                #[inline(always)]
                || {
                    for i in 0..m {
                        let t = t0 + i;
                        let du_row = &du[i * c..][..c];
                        let next = next_uses(t).then(|| &du[(i + 1) * c..][..c]);
                        // SAFETY: tasks have disjoint rows.
                        let part = |all: &Shared<f32>, width: usize| unsafe { all.range(t * width, width) };
                        let (out_q, out_k) = (part(&all_q, n.q), part(&all_k, n.k));
                        let x = conv.x(t);
                        let before = conv.x_before(t);
                        for (part, (out, at)) in [(&mut *out_q, 0), (&mut *out_k, n.q)].into_iter().enumerate() {
                            let len = out.len();
                            let (du, x, w1) = (&du_row[at..][..len], &x[part][..len], &conv.now[at..][..len]);
                            let s_now = &mut s_now[at..][..len];
                            for i in 0..len {
                                s_now[i] += du[i] * x[i];
                                out[i] = w1[i] * du[i];
                            }
                            if let Some(before) = before {
                                let (before, s_before) = (&before[part][..len], &mut s_before[at..][..len]);
                                for i in 0..len {
                                    s_before[i] += du[i] * before[i];
                                }
                            }
                            if let Some(next) = next {
                                let (next, w0) = (&next[at..][..len], &conv.before[at..][..len]);
                                for i in 0..len {
                                    out[i] += w0[i] * next[i];
                                }
                            }
                        }
                        // q-k-mean.
                        let (dq, dk) = dy[i * c..][..c].split_at(n.q);
                        for (a, (out_q, dq)) in out_q.chunks_exact_mut(n.head).zip(dq.chunks_exact(n.head)).enumerate() {
                            let g = a / n.group;
                            let (out_k, dk) = (&mut out_k[g * n.head..][..n.head], &dk[g * n.head..][..n.head]);
                            for j in 0..n.head {
                                let d_mean = 0.5 * (dq[j] + dk[j] / n.group as f32);
                                out_q[j] += d_mean;
                                out_k[j] += d_mean;
                            }
                        }
                        part(&all_current, n.half).copy_from_slice(&dv[t * n.k..][..n.half]);
                        let delayed = part(&all_delayed, n.half);
                        if next_uses(t) {
                            delayed.copy_from_slice(&dv[(t + 1) * n.k + n.half..][..n.half]);
                        } else {
                            delayed.fill(0.0);
                        }
                        if let Some(d_halo) = d_halo.as_ref().filter(|_| rows.is_first(t)) {
                            d_halo.values(t, &dv[t * n.k + n.half..][..n.half]);
                        }
                    }
                },
            );
        },
        |i, sum| {
            if i < w1_len {
                // Taps apart back to taps in turn.
                let (channel, at) = (i / (2 * n.head), i % (2 * n.head));
                d_conv1[channel * 2 * n.head + 2 * (at % n.head) + at / n.head] += sum;
                return;
            }
            let i = i - w1_len;
            match (i / c, i % c) {
                (0, i) => d_conv1_bias[i] += sum,
                (1, i) => d_conv0[2 * i] += sum,
                (2, i) => d_conv0[2 * i + 1] += sum,
                (_, i) => d_conv0_bias[i] += sum,
            }
        },
    );
    for (h, d_temp) in g.temp.data_mut().iter_mut().enumerate() {
        *d_temp += temp_partials.iter().skip(h).step_by(shape.num_kv_heads).sum::<f64>() as f32;
    }
    Ok((out, out_halo))
}
