//! Queries, keys and values from the four projections.

use anyhow::Result;

use super::{Dims, Direction, FirstConvolution, HeadWeights, Saved, inv_norm, rope};
use crate::tensor::backend::{CcaIn, CcaParams, CcaShape, Halo, Qkv};
use crate::tensor::cpu::Cpu;
use crate::tensor::cpu::buf::Buf;
use crate::tensor::cpu::elementwise::ROW_CHUNK;
use crate::tensor::cpu::level::vectorised;
use crate::tensor::cpu::linear::{self, LEFT_SCRATCH};
use crate::tensor::cpu::par::{self, Shared};
use crate::tensor::cpu::rows::Rows;

pub fn forward(
    cpu: &Cpu,
    rows: &Rows,
    shape: CcaShape,
    x: CcaIn<&Buf>,
    p: CcaParams<&Buf>,
    halo: Option<Halo<&Buf>>,
) -> Result<(Qkv<Buf>, Saved)> {
    let (n, tokens, core) = (Dims::of(&shape), rows.tokens(), &cpu.core);
    let mut out = Qkv { q: cpu.matrix(tokens, n.q)?, k: cpu.matrix(tokens, n.k)?, v: cpu.matrix(tokens, n.k)? };
    let mut saved = Saved { q: cpu.block(tokens * n.q)?, k: cpu.block(tokens * n.k)? };
    let (slots, apart_len) = HeadWeights::lens(core, n, Direction::Forward);
    let mut weights = cpu.block::<u32>(slots)?;
    let mut apart = cpu.block::<f32>(apart_len)?;
    let mut taps = cpu.block::<f32>(2 * n.c)?;
    let per_thread = LEFT_SCRATCH + (ROW_CHUNK + 1) * n.c + ROW_CHUNK * 3 * n.head;
    let mut scratch = cpu.block::<f32>(par::threads() * per_thread)?;
    if cpu.is_planning() {
        return Ok((out, saved));
    }
    FirstConvolution::taps(p.conv0_weight.data(), &mut taps);
    let weights = HeadWeights::pack(core, n, Direction::Forward, p.conv1_weight.data(), &mut apart, &mut weights);
    let conv = FirstConvolution::new(rows, n, x, halo, &taps, p.conv0_bias);
    let rope = rope::table(cpu, &shape, rows)?;
    let (bias, temp) = (p.conv1_bias.data(), p.temp.data());
    let (q0, k0, v_current, v_delayed) = (x.q.data(), x.k.data(), x.v_current.data(), x.v_delayed.data());
    let (all_q, all_k, all_v) = (Shared::new(out.q.data_mut()), Shared::new(out.k.data_mut()), Shared::new(out.v.data_mut()));
    let (saved_q, saved_k) = (Shared::new(&mut saved.q), Shared::new(&mut saved.k));
    let scale = (n.head as f32).sqrt();

    par::tasks_with(tokens.div_ceil(ROW_CHUNK), &mut scratch, per_thread, |i, scratch| {
        let (t0, m) = (i * ROW_CHUNK, ROW_CHUNK.min(tokens - i * ROW_CHUNK));
        let (left, rest) = scratch.split_at_mut(LEFT_SCRATCH);
        let (u, rest) = rest.split_at_mut((ROW_CHUNK + 1) * n.c);
        let (head_rows, y) = rest.split_at_mut(ROW_CHUNK * 2 * n.head);
        // SAFETY: tasks have disjoint rows.
        let part = |all: &Shared<f32>, width: usize| unsafe { all.range(t0 * width, m * width) };
        let (q, k, v) = (part(&all_q, n.q), part(&all_k, n.k), part(&all_v, n.k));
        let (pre_q, pre_k) = (part(&saved_q, n.q), part(&saved_k, n.k));
        conv.block(t0, m, u);
        for head in 0..n.heads {
            conv.head_rows(t0, m, head, u, head_rows);
            let y = &mut y[..m * n.head];
            linear::block(core, head_rows, 0..m, weights.head(head), y, false, left);
            let bias = &bias[head * n.head..][..n.head];
            let (out, width, at) = if head < n.query_heads {
                (&mut *pre_q, n.q, head * n.head)
            } else {
                (&mut *pre_k, n.k, (head - n.query_heads) * n.head)
            };
            for (out, y) in out.chunks_exact_mut(width).zip(y.chunks_exact(n.head)) {
                for ((out, y), bias) in out[at..at + n.head].iter_mut().zip(y).zip(bias) {
                    *out = y + bias;
                }
            }
        }
        vectorised(
            #[inline(always)]
            || {
                for i in 0..m {
                    let t = t0 + i;
                    let (q0, k0) = (&q0[t * n.q..][..n.q], &k0[t * n.k..][..n.k]);
                    let (pre_q, pre_k) = (&mut pre_q[i * n.q..][..n.q], &mut pre_k[i * n.k..][..n.k]);
                    // q-k-mean, added to the convolution's output.
                    for (a, (pre_q, q0)) in pre_q.chunks_exact_mut(n.head).zip(q0.chunks_exact(n.head)).enumerate() {
                        let g = a / n.group;
                        let (pre_k, k0) = (&mut pre_k[g * n.head..][..n.head], &k0[g * n.head..][..n.head]);
                        for j in 0..n.head {
                            let mean = 0.5 * (q0[j] + k0[j]);
                            pre_q[j] += mean;
                            pre_k[j] += mean / n.group as f32;
                        }
                    }
                    // Norm, temperature, RoPE.
                    let position = rows.position(t);
                    for (q, pre) in q[i * n.q..][..n.q].chunks_exact_mut(n.head).zip(pre_q.chunks_exact(n.head)) {
                        let by = scale * inv_norm(pre);
                        for (q, x) in q.iter_mut().zip(pre) {
                            *q = x * by;
                        }
                        rope.rotate(q, position, 1.0);
                    }
                    for ((k, pre), temp) in k[i * n.k..][..n.k].chunks_exact_mut(n.head).zip(pre_k.chunks_exact(n.head)).zip(temp)
                    {
                        let by = scale * inv_norm(pre) * temp;
                        for (k, x) in k.iter_mut().zip(pre) {
                            *k = x * by;
                        }
                        rope.rotate(k, position, 1.0);
                    }
                    // Values: this token's half, then the previous token's.
                    let (now, before) = v[i * n.k..][..n.k].split_at_mut(n.half);
                    now.copy_from_slice(&v_current[t * n.half..][..n.half]);
                    if rows.has_previous(t) {
                        before.copy_from_slice(&v_delayed[(t - 1) * n.half..][..n.half]);
                    } else if let Some(v) = conv.halo_v(t, v_delayed) {
                        before.copy_from_slice(v);
                    } else {
                        before.fill(0.0);
                    }
                }
            },
        );
    });
    Ok((out, saved))
}
