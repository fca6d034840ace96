//! Top-1 experts, grouped: the rows of one expert are gathered and go through its SwiGLU together. No padding, no capacity.

use rayon::prelude::*;

use super::Buf;
use super::elementwise::ROW_CHUNK;
use super::linear;
use super::math::{lane_sum, sigmoid};
use super::router::Routing;
use crate::tensor::backend::SkipMode;

/// Per expert, for its rows in order: gathered input, gate and up before the activation, output before the probability.
pub struct Saved {
    experts: Vec<ExpertSaved>,
}

#[derive(Default)]
struct ExpertSaved {
    h: Vec<f32>,
    gate_up: Vec<f32>,
    y: Vec<f32>,
}

fn gather(x: &[f32], d: usize, order: &[u32]) -> Vec<f32> {
    let mut out = vec![0.0; order.len() * d];
    out.par_chunks_mut(d).with_min_len(ROW_CHUNK).zip(order).for_each(|(row, t)| {
        row.copy_from_slice(&x[*t as usize * d..][..d]);
    });
    out
}

/// silu(gate) * up, `[n, F]` from `[n, 2F]`.
fn swiglu(gate_up: &[f32], f: usize) -> Vec<f32> {
    let mut out = vec![0.0; gate_up.len() / 2];
    out.par_chunks_mut(f).with_min_len(ROW_CHUNK).zip(gate_up.par_chunks(2 * f)).for_each(|(out, gu)| {
        let (gate, up) = gu.split_at(f);
        for i in 0..f {
            out[i] = gate[i] * sigmoid(gate[i]) * up[i];
        }
    });
    out
}

pub fn forward(h: &[f32], d: usize, routing: &Routing, experts: &[Buf], skip: SkipMode, bf16: bool) -> (Vec<f32>, Saved) {
    let num = experts.len() / 2;
    let saved: Vec<ExpertSaved> = (0..num)
        .into_par_iter()
        .with_max_len(1)
        .map(|e| {
            let order = &routing.order[routing.offsets[e]..routing.offsets[e + 1]];
            if order.is_empty() {
                return ExpertSaved::default();
            }
            let (w1, w2) = (&experts[2 * e], &experts[2 * e + 1]);
            let f = w2.cols;
            let h = gather(h, d, order);
            let gate_up = linear::forward(&h, &w1.data, d, 2 * f, bf16);
            let y = linear::forward(&swiglu(&gate_up, f), &w2.data, f, d, bf16);
            ExpertSaved { h, gate_up, y }
        })
        .collect();
    // Place of each row within its class.
    let mut out = vec![0.0; h.len()];
    let mut place = vec![0u32; routing.choice.len()];
    for (i, t) in routing.order.iter().enumerate() {
        place[*t as usize] = (i - routing.offsets[routing.choice[*t as usize] as usize]) as u32;
    }
    out.par_chunks_mut(d).with_min_len(ROW_CHUNK).enumerate().for_each(|(t, out)| {
        let (e, p) = (routing.choice[t] as usize, routing.prob[t]);
        let y = if e < num {
            &saved[e].y[place[t] as usize * d..][..d]
        } else if skip == SkipMode::Identity {
            &h[t * d..][..d]
        } else {
            return;
        };
        out.iter_mut().zip(y).for_each(|(o, y)| *o = p * y);
    });
    (out, Saved { experts: saved })
}

#[allow(clippy::too_many_arguments)]
pub fn backward(
    h: &[f32],
    d: usize,
    routing: &Routing,
    experts: &[Buf],
    skip: SkipMode,
    saved: &Saved,
    dy: &[f32],
    g: &mut [Buf],
    bf16: bool,
) -> (Vec<f32>, Vec<f32>) {
    let num = experts.len() / 2;
    // Per expert: gradients of its gathered rows and of their probabilities.
    let parts: Vec<(Vec<f32>, Vec<f32>)> = g
        .par_chunks_mut(2)
        .with_max_len(1)
        .enumerate()
        .map(|(e, g)| {
            let order = &routing.order[routing.offsets[e]..routing.offsets[e + 1]];
            if order.is_empty() {
                return (Vec::new(), Vec::new());
            }
            let (w1, w2, s) = (&experts[2 * e], &experts[2 * e + 1], &saved.experts[e]);
            let f = w2.cols;
            let mut dy = gather(dy, d, order);
            let mut d_prob = vec![0.0; order.len()];
            dy.par_chunks_mut(d).with_min_len(ROW_CHUNK).zip(&mut d_prob).enumerate().for_each(|(i, (dy, d_prob))| {
                let (y, p) = (&s.y[i * d..][..d], routing.prob[order[i] as usize]);
                *d_prob = lane_sum(d, |j| dy[j] * y[j]);
                dy.iter_mut().for_each(|v| *v *= p);
            });
            linear::add_weight_gradient(&swiglu(&s.gate_up, f), &dy, &mut g[1].data, f, d, bf16);
            let d_act = linear::input_gradient(&w2.data, &dy, f, d, bf16);
            let mut d_gate_up = vec![0.0; order.len() * 2 * f];
            d_gate_up.par_chunks_mut(2 * f).with_min_len(ROW_CHUNK).enumerate().for_each(|(i, out)| {
                let (gate, up) = s.gate_up[i * 2 * f..][..2 * f].split_at(f);
                let da = &d_act[i * f..][..f];
                let (d_gate, d_up) = out.split_at_mut(f);
                for j in 0..f {
                    let sig = sigmoid(gate[j]);
                    d_gate[j] = da[j] * up[j] * sig * (1.0 + gate[j] * (1.0 - sig));
                    d_up[j] = da[j] * gate[j] * sig;
                }
            });
            linear::add_weight_gradient(&s.h, &d_gate_up, &mut g[0].data, d, 2 * f, bf16);
            (linear::input_gradient(&w1.data, &d_gate_up, d, 2 * f, bf16), d_prob)
        })
        .collect();
    let mut dh = vec![0.0; h.len()];
    let mut d_prob = vec![0.0; routing.choice.len()];
    for (e, (part, part_prob)) in parts.iter().enumerate() {
        for (i, t) in routing.order[routing.offsets[e]..routing.offsets[e + 1]].iter().enumerate() {
            let t = *t as usize;
            dh[t * d..][..d].copy_from_slice(&part[i * d..][..d]);
            d_prob[t] = part_prob[i];
        }
    }
    if skip == SkipMode::Identity {
        for t in &routing.order[routing.offsets[num]..] {
            let t = *t as usize;
            let (dy, h, p) = (&dy[t * d..][..d], &h[t * d..][..d], routing.prob[t]);
            d_prob[t] = lane_sum(d, |j| dy[j] * h[j]);
            dh[t * d..][..d].iter_mut().zip(dy).for_each(|(o, dy)| *o = p * dy);
        }
    }
    (dh, d_prob)
}
