//! The router (spec 1.6): down-projection, depth averaging, norm, a two-layer MLP, softmax, biased argmax; and the grouping
//! of rows by expert that follows from it.

use rayon::prelude::*;

use super::elementwise::{ROW_CHUNK, add_column_sums, rms_norm, rms_norm_backward, sum_over_rows};
use super::math::{exp, gelu, gelu_derivative};
use super::rows::Rows;
use super::{elementwise, linear};
use crate::tensor::backend::{PinnedRoutes, RouterParams};

/// What was decided for each row.
pub struct Routing {
    /// Chosen class; E is the skip class.
    pub choice: Vec<u32>,
    /// Its probability.
    pub prob: Vec<f32>,
    /// Rows sorted by class, rows of one class in their order in the batch.
    pub order: Vec<u32>,
    /// Where each class begins in `order`; E + 2 numbers.
    pub offsets: Vec<usize>,
    /// Real rows per class.
    pub counts: Vec<u64>,
}

impl Routing {
    fn new(rows: &Rows, choice: Vec<u32>, prob: Vec<f32>, classes: usize) -> Self {
        let mut counts = vec![0; classes];
        let mut offsets = vec![0; classes + 1];
        for (t, c) in choice.iter().enumerate() {
            offsets[*c as usize + 1] += 1;
            counts[*c as usize] += rows.is_valid(t) as u64;
        }
        for c in 0..classes {
            offsets[c + 1] += offsets[c];
        }
        let mut next = offsets.clone();
        let mut order = vec![0; choice.len()];
        for (t, c) in choice.iter().enumerate() {
            order[next[*c as usize]] = t as u32;
            next[*c as usize] += 1;
        }
        Self { choice, prob, order, offsets, counts }
    }
}

/// Intermediate results: state r, normed t, both hidden layers before and after GELU, logits and probabilities.
pub struct Saved {
    state: Vec<f32>,
    normed: Vec<f32>,
    inv_rms: Vec<f32>,
    hidden1: Vec<f32>,
    hidden2: Vec<f32>,
    pub logits: Vec<f32>,
    probs: Vec<f32>,
}

fn add_bias(x: &mut [f32], bias: &[f32]) {
    x.par_chunks_mut(bias.len()).with_min_len(ROW_CHUNK).for_each(|row| elementwise::add(row, bias));
}

fn map(x: &[f32], f: impl Fn(f32) -> f32 + Sync) -> Vec<f32> {
    let mut y = vec![0.0; x.len()];
    y.par_chunks_mut(4096).zip(x.par_chunks(4096)).for_each(|(y, x)| {
        y.iter_mut().zip(x).for_each(|(y, x)| *y = f(*x));
    });
    y
}

#[allow(clippy::too_many_arguments)]
pub fn forward(
    rows: &Rows,
    h: &[f32],
    prev: Option<&[f32]>,
    p: RouterParams<&[f32]>,
    biases: &[f32],
    norm_eps: f64,
    pinned: Option<&PinnedRoutes>,
    bf16: bool,
) -> (Routing, Vec<f32>, Saved) {
    let (r, tokens, classes) = (p.norm.len(), rows.tokens(), biases.len());
    let d = h.len() / tokens;
    let mut state = linear::forward(h, p.down_weight, d, r, bf16);
    add_bias(&mut state, p.down_bias);
    if let (Some(prev), Some(gamma)) = (prev, p.gamma) {
        state.par_chunks_mut(r).zip(prev.par_chunks(r)).with_min_len(ROW_CHUNK).for_each(|(state, prev)| {
            for i in 0..r {
                state[i] += prev[i] * gamma[i];
            }
        });
    }
    let (normed, inv_rms) = rms_norm(&state, p.norm, norm_eps);
    let mut hidden1 = linear::forward(&normed, p.fc1_weight, r, r, bf16);
    add_bias(&mut hidden1, p.fc1_bias);
    let mut hidden2 = linear::forward(&map(&hidden1, gelu), p.fc2_weight, r, r, bf16);
    add_bias(&mut hidden2, p.fc2_bias);
    let logits = linear::forward(&map(&hidden2, gelu), p.out, r, classes, bf16);

    let mut probs = logits.clone();
    let (mut choice, mut prob) = (vec![0u32; tokens], vec![0f32; tokens]);
    probs.par_chunks_mut(classes).zip(&mut choice).zip(&mut prob).with_min_len(ROW_CHUNK).enumerate().for_each(
        |(t, ((p, choice), prob))| {
            let max = p.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            p.iter_mut().for_each(|v| *v = exp(*v - max));
            let sum: f32 = p.iter().sum();
            p.iter_mut().for_each(|v| *v /= sum);
            *choice = match pinned {
                Some(PinnedRoutes(routes)) => routes[t],
                None => {
                    // Ties go to the lowest index.
                    let best = |best: usize, c: usize| if p[c] + biases[c] > p[best] + biases[best] { c } else { best };
                    (1..classes).fold(0, best) as u32
                }
            };
            *prob = p[*choice as usize];
        },
    );
    let routing = Routing::new(rows, choice, prob, classes);
    let saved = Saved { state: state.clone(), normed, inv_rms, hidden1, hidden2, logits, probs };
    (routing, state, saved)
}

#[allow(clippy::too_many_arguments)]
pub fn backward(
    h: &[f32],
    prev: Option<&[f32]>,
    p: RouterParams<&[f32]>,
    routing: &Routing,
    saved: &Saved,
    d_prob: &[f32],
    d_state: Option<&[f32]>,
    g: RouterParams<&mut [f32]>,
    bf16: bool,
) -> (Vec<f32>, Option<Vec<f32>>) {
    let (r, tokens) = (p.norm.len(), d_prob.len());
    let (d, classes) = (h.len() / tokens, saved.logits.len() / tokens);
    // Softmax: only the chosen class's probability has a gradient.
    let mut d_logits = vec![0.0; saved.logits.len()];
    d_logits.par_chunks_mut(classes).with_min_len(ROW_CHUNK).enumerate().for_each(|(t, dl)| {
        let (probs, chosen) = (&saved.probs[t * classes..][..classes], routing.choice[t] as usize);
        let along = routing.prob[t] * d_prob[t];
        let mut others = 0.0; // 1 - p of the chosen class, without the cancellation when that is nearly 1
        for c in (0..classes).filter(|c| *c != chosen) {
            dl[c] = -along * probs[c];
            others += probs[c];
        }
        dl[chosen] = along * others;
    });
    linear::add_weight_gradient(&map(&saved.hidden2, gelu), &d_logits, g.out, r, classes, bf16);
    let d_gelu = |dy: Vec<f32>, x: &[f32]| {
        let mut dx = dy;
        dx.par_chunks_mut(4096).zip(x.par_chunks(4096)).for_each(|(dx, x)| {
            dx.iter_mut().zip(x).for_each(|(d, x)| *d *= gelu_derivative(*x));
        });
        dx
    };
    let d2 = d_gelu(linear::input_gradient(p.out, &d_logits, r, classes, bf16), &saved.hidden2);
    linear::add_weight_gradient(&map(&saved.hidden1, gelu), &d2, g.fc2_weight, r, r, bf16);
    add_column_sums(&d2, g.fc2_bias);
    let d1 = d_gelu(linear::input_gradient(p.fc2_weight, &d2, r, r, bf16), &saved.hidden1);
    linear::add_weight_gradient(&saved.normed, &d1, g.fc1_weight, r, r, bf16);
    add_column_sums(&d1, g.fc1_bias);
    let d_normed = linear::input_gradient(p.fc1_weight, &d1, r, r, bf16);
    let mut dr = rms_norm_backward(&saved.state, p.norm, &saved.inv_rms, &d_normed, g.norm);
    if let Some(d_state) = d_state {
        elementwise::add_parallel(&mut dr, d_state);
    }
    let d_prev = match (prev, p.gamma, g.gamma) {
        (Some(prev), Some(gamma), Some(d_gamma)) => {
            sum_over_rows(tokens, d_gamma, |range, partial| {
                for t in range {
                    for i in 0..r {
                        partial[i] += dr[t * r + i] * prev[t * r + i];
                    }
                }
            });
            let mut d_prev = dr.clone();
            d_prev.par_chunks_mut(r).with_min_len(ROW_CHUNK).for_each(|row| {
                row.iter_mut().zip(gamma).for_each(|(d, g)| *d *= g);
            });
            Some(d_prev)
        }
        _ => None,
    };
    add_column_sums(&dr, g.down_bias);
    linear::add_weight_gradient(h, &dr, g.down_weight, d, r, bf16);
    (linear::input_gradient(p.down_weight, &dr, d, r, bf16), d_prev)
}
