//! The router (spec 1.6): down-projection, depth averaging, norm, a two-layer MLP, softmax, biased argmax; and the grouping
//! of rows by expert that follows from it. Both directions go block of rows by block of rows, all layers of a block together.

use anyhow::Result;

use super::Cpu;
use super::arena::Block;
use super::buf::{Buf, Side};
use super::elementwise::{ROW_CHUNK, add_inline, norm_backward_row, norm_row, sum_over_rows_with, sums_len};
use super::level::vectorised;
use super::linear::{self, LEFT_SCRATCH};
use super::math::{exp, gelu, gelu_derivative};
use super::par::{self, Shared};
use super::rows::Rows;
use crate::tensor::backend::{PinnedRoutes, RouterParams, all};

/// What was decided for each row.
pub struct Routing {
    /// Chosen class; E is the skip class.
    pub choice: Block<u32>,
    /// Its probability.
    pub prob: Block<f32>,
    /// Rows sorted by class, rows of one class in their order in the batch.
    pub order: Block<u32>,
    /// Where each class begins in `order`; E + 2 numbers.
    pub offsets: Vec<usize>,
    /// Real rows per class.
    pub counts: Vec<u64>,
}

impl Routing {
    /// Of rows whose choices were made elsewhere: their classes, probabilities, and the rows sorted by class. `experts` classes
    /// and the skip class, which none of them is.
    pub fn given(cpu: &Cpu, choice: &[u32], prob: impl Iterator<Item = f32>, order: &[u32], experts: usize) -> Result<Self> {
        let n = choice.len();
        let mut routing = Self {
            choice: cpu.block(n)?,
            prob: cpu.block(n)?,
            order: cpu.block(n)?,
            offsets: vec![0; experts + 2],
            counts: vec![0; experts + 1],
        };
        if cpu.is_planning() {
            return Ok(routing);
        }
        routing.choice.copy_from_slice(choice);
        routing.prob.iter_mut().zip(prob).for_each(|(to, prob)| *to = prob);
        routing.order.copy_from_slice(order);
        routing.find_offsets();
        Ok(routing)
    }

    /// Where each class begins when the rows are sorted by `choice`.
    fn find_offsets(&mut self) {
        self.offsets.fill(0);
        self.choice.iter().for_each(|c| self.offsets[*c as usize + 1] += 1);
        for c in 1..self.offsets.len() {
            self.offsets[c] += self.offsets[c - 1];
        }
    }

    /// Sorts the rows by `choice`.
    fn group(&mut self, rows: &Rows) {
        self.find_offsets();
        self.counts.fill(0);
        for (t, c) in self.choice.iter().enumerate() {
            self.counts[*c as usize] += rows.is_valid(t) as u64;
        }
        let mut next = self.offsets.clone();
        for (t, c) in self.choice.iter().enumerate() {
            self.order[next[*c as usize]] = t as u32;
            next[*c as usize] += 1;
        }
    }
}

/// Intermediate results of all rows: state r, its norm and 1 / RMS, both hidden layers before GELU, logits and probabilities.
pub struct Saved {
    state: Block<f32>,
    normed: Block<f32>,
    inv_rms: Block<f32>,
    hidden1: Block<f32>,
    hidden2: Block<f32>,
    pub logits: Block<f32>,
    probs: Block<f32>,
}

/// `out = gelu(x)`
fn gelu_rows(x: &[f32], out: &mut [f32]) {
    vectorised(
        #[inline(always)]
        || {
            for (out, x) in out.iter_mut().zip(x) {
                *out = gelu(*x);
            }
        },
    );
}

/// Adds `bias` to every row.
fn add_bias(x: &mut [f32], bias: &[f32]) {
    vectorised(
        #[inline(always)]
        || {
            for row in x.chunks_exact_mut(bias.len()) {
                add_inline(row, bias);
            }
        },
    );
}

#[allow(clippy::too_many_arguments)]
pub fn forward(
    cpu: &Cpu,
    rows: &Rows,
    h: &Buf,
    prev: Option<&Buf>,
    p: RouterParams<&Buf>,
    biases: &Buf,
    norm_eps: f64,
    pinned: Option<&PinnedRoutes>,
) -> Result<(Routing, Buf, Saved)> {
    let (r, tokens, classes, core) = (p.norm.cols, rows.tokens(), biases.cols, &cpu.core);
    let mut routing = Routing {
        choice: cpu.block(tokens)?,
        prob: cpu.block(tokens)?,
        order: cpu.block(tokens)?,
        offsets: vec![0; classes + 1],
        counts: vec![0; classes],
    };
    let mut state = cpu.matrix(tokens, r)?;
    let mut saved = Saved {
        state: cpu.block(tokens * r)?,
        normed: cpu.block(tokens * r)?,
        inv_rms: cpu.block(tokens)?,
        hidden1: cpu.block(tokens * r)?,
        hidden2: cpu.block(tokens * r)?,
        logits: cpu.block(tokens * classes)?,
        probs: cpu.block(tokens * classes)?,
    };
    let per_thread = LEFT_SCRATCH + ROW_CHUNK * r;
    let mut scratch = cpu.block::<f32>(par::threads() * per_thread)?;
    let weights = all([p.down_weight, p.fc1_weight, p.fc2_weight, p.out].map(|w| cpu.pack(core, w, Side::Forward)))?;
    if cpu.is_planning() {
        return Ok((routing, state, saved));
    }
    let [down, fc1, fc2, out] = weights.each_ref().map(|w| w.panels());
    let h = h.data();
    let eda = prev.zip(p.gamma).map(|(prev, gamma)| (prev.data(), gamma.data()));
    let (down_bias, fc1_bias, fc2_bias, norm) = (p.down_bias.data(), p.fc1_bias.data(), p.fc2_bias.data(), p.norm.data());
    let biases = biases.data();
    {
        let (all_state, all_normed, all_inv) =
            (Shared::new(&mut saved.state), Shared::new(&mut saved.normed), Shared::new(&mut saved.inv_rms));
        let (all_hidden1, all_hidden2) = (Shared::new(&mut saved.hidden1), Shared::new(&mut saved.hidden2));
        let (all_logits, all_probs) = (Shared::new(&mut saved.logits), Shared::new(&mut saved.probs));
        let (all_choice, all_prob) = (Shared::new(&mut routing.choice), Shared::new(&mut routing.prob));
        par::tasks_with(tokens.div_ceil(ROW_CHUNK), &mut scratch, per_thread, |i, scratch| {
            let (t0, n) = (i * ROW_CHUNK, ROW_CHUNK.min(tokens - i * ROW_CHUNK));
            let (left, act) = scratch.split_at_mut(LEFT_SCRATCH);
            let act = &mut act[..n * r];
            // SAFETY: tasks have disjoint rows.
            let part = |all: &Shared<f32>, width: usize| unsafe { all.range(t0 * width, n * width) };
            let state = part(&all_state, r);
            linear::block(core, h, t0..t0 + n, down, state, false, left);
            add_bias(state, down_bias);
            let (normed, inv) = (part(&all_normed, r), part(&all_inv, 1));
            vectorised(
                #[inline(always)]
                || {
                    for (i, ((state, normed), inv)) in
                        state.chunks_exact_mut(r).zip(normed.chunks_exact_mut(r)).zip(inv).enumerate()
                    {
                        if let Some((prev, gamma)) = eda {
                            for ((state, prev), gamma) in state.iter_mut().zip(&prev[(t0 + i) * r..][..r]).zip(&gamma[..r]) {
                                *state += prev * gamma;
                            }
                        }
                        *inv = norm_row(state, norm, norm_eps, normed);
                    }
                },
            );
            let hidden1 = part(&all_hidden1, r);
            linear::block(core, normed, 0..n, fc1, hidden1, false, left);
            add_bias(hidden1, fc1_bias);
            gelu_rows(hidden1, act);
            let hidden2 = part(&all_hidden2, r);
            linear::block(core, act, 0..n, fc2, hidden2, false, left);
            add_bias(hidden2, fc2_bias);
            gelu_rows(hidden2, act);
            let (logits, probs) = (part(&all_logits, classes), part(&all_probs, classes));
            linear::block(core, act, 0..n, out, logits, false, left);
            // SAFETY: as above.
            let (choice, prob) = unsafe { (all_choice.range(t0, n), all_prob.range(t0, n)) };
            for (i, (logits, p)) in logits.chunks_exact(classes).zip(probs.chunks_exact_mut(classes)).enumerate() {
                let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                for (p, z) in p.iter_mut().zip(logits) {
                    *p = exp(*z - max);
                }
                let sum: f32 = p.iter().sum();
                for v in p.iter_mut() {
                    *v /= sum;
                }
                choice[i] = match pinned {
                    Some(PinnedRoutes(routes)) => routes[t0 + i],
                    None => {
                        // Ties go to the lowest index.
                        let best = |best: usize, c: usize| if p[c] + biases[c] > p[best] + biases[best] { c } else { best };
                        (1..classes).fold(0, best) as u32
                    }
                };
                prob[i] = p[choice[i] as usize];
            }
        });
    }
    routing.group(rows);
    state.data_mut().copy_from_slice(&saved.state);
    Ok((routing, state, saved))
}

/// Adds the gradient of `h` to `dh`; returns that of `prev`.
#[allow(clippy::too_many_arguments)]
pub fn backward(
    cpu: &Cpu,
    h: &Buf,
    prev: Option<&Buf>,
    p: RouterParams<&Buf>,
    routing: &Routing,
    saved: &Saved,
    d_prob: &Buf,
    d_state: Option<&Buf>,
    g: RouterParams<&mut Buf>,
    dh: &mut Buf,
) -> Result<Option<Buf>> {
    let (r, d, core) = (p.norm.cols, h.cols, &cpu.core);
    let (tokens, classes) = (routing.choice.len(), routing.counts.len());
    let eda = match (prev, p.gamma, g.gamma) {
        (Some(prev), Some(gamma), Some(d_gamma)) => Some((prev, gamma, d_gamma)),
        _ => None,
    };
    let mut d_prev = if eda.is_some() { Some(cpu.matrix(tokens, r)?) } else { None };
    // Of all rows, for the gradients of the weights: both activations, and the gradients of logits, hidden layers and state.
    let mut act1 = cpu.block::<f32>(tokens * r)?;
    let mut act2 = cpu.block::<f32>(tokens * r)?;
    let mut d_logits = cpu.block::<f32>(tokens * classes)?;
    let mut d2 = cpu.block::<f32>(tokens * r)?;
    let mut d1 = cpu.block::<f32>(tokens * r)?;
    let mut dr = cpu.block::<f32>(tokens * r)?;
    let mut partials = cpu.block::<f32>(sums_len(tokens, 5 * r))?;
    let scratch_len = (par::threads() * (LEFT_SCRATCH + ROW_CHUNK * r))
        .max(linear::weight_gradient_scratch(core, tokens, r, d.max(r)))
        .max(linear::weight_gradient_scratch(core, tokens, classes, r));
    let mut scratch = cpu.block::<f32>(scratch_len)?;
    let weights = all([p.down_weight, p.fc1_weight, p.fc2_weight, p.out].map(|w| cpu.pack(core, w, Side::Backward)))?;
    if cpu.is_planning() {
        return Ok(d_prev);
    }
    let [down, fc1, fc2, out] = weights.each_ref().map(|w| w.panels());
    let norm = p.norm.data();
    let (d_prob, d_state) = (d_prob.data(), d_state.map(|b| b.data()));
    let eda_in = eda.as_ref().map(|(prev, gamma, _)| (prev.data(), gamma.data()));
    let mut d_gamma = eda.map(|(_, _, d_gamma)| d_gamma.data_mut());
    let (d_norm, d_down_bias) = (g.norm.data_mut(), g.down_bias.data_mut());
    let (d_fc1_bias, d_fc2_bias) = (g.fc1_bias.data_mut(), g.fc2_bias.data_mut());
    {
        let [all_act1, all_act2, all_d_logits, all_d2, all_d1, all_dr] =
            [&mut act1, &mut act2, &mut d_logits, &mut d2, &mut d1, &mut dr].map(|b| Shared::new(b));
        let all_dh = Shared::new(dh.data_mut());
        let all_d_prev = d_prev.as_mut().map(|b| Shared::new(b.data_mut()));
        let per_thread = LEFT_SCRATCH + ROW_CHUNK * r;
        sum_over_rows_with(
            tokens,
            5 * r,
            &mut partials,
            &mut scratch,
            per_thread,
            |range, sums, scratch| {
                let (t0, n) = (range.start, range.len());
                let (left, block) = scratch.split_at_mut(LEFT_SCRATCH);
                let block = &mut block[..n * r];
                // SAFETY: tasks have disjoint rows.
                let part = |all: &Shared<f32>, width: usize| unsafe { all.range(t0 * width, n * width) };
                let mut sums = sums.chunks_exact_mut(r);
                let [s_fc2, s_fc1, s_down, s_norm, s_gamma] = std::array::from_fn(|_| sums.next().expect("five sums"));

                // Softmax of the chosen class only: dl_c = p (1[c] - p_c) d_prob.
                let dl = part(&all_d_logits, classes);
                for (i, dl) in dl.chunks_exact_mut(classes).enumerate() {
                    let t = t0 + i;
                    let (probs, chosen) = (&saved.probs[t * classes..][..classes], routing.choice[t] as usize);
                    let along = routing.prob[t] * d_prob[t];
                    let mut others = 0.0; // 1 - p of the chosen class, without the cancellation when that is nearly 1
                    for c in (0..classes).filter(|c| *c != chosen) {
                        dl[c] = -along * probs[c];
                        others += probs[c];
                    }
                    dl[chosen] = along * others;
                }
                let hidden2 = &saved.hidden2[t0 * r..][..n * r];
                gelu_rows(hidden2, part(&all_act2, r));
                let d2 = part(&all_d2, r);
                linear::block(core, dl, 0..n, out, d2, false, left);
                gelu_backward_rows(hidden2, d2, s_fc2);
                let hidden1 = &saved.hidden1[t0 * r..][..n * r];
                gelu_rows(hidden1, part(&all_act1, r));
                let d1 = part(&all_d1, r);
                linear::block(core, d2, 0..n, fc2, d1, false, left);
                gelu_backward_rows(hidden1, d1, s_fc1);
                linear::block(core, d1, 0..n, fc1, block, false, left);
                let dr = part(&all_dr, r);
                let d_prev = all_d_prev.as_ref().map(|all| part(all, r));
                vectorised(
                    #[inline(always)]
                    || {
                        for i in 0..n {
                            let at = (t0 + i) * r..(t0 + i + 1) * r;
                            let dr = &mut dr[i * r..][..r];
                            norm_backward_row(
                                &saved.state[at.clone()],
                                norm,
                                saved.inv_rms[t0 + i],
                                &block[i * r..][..r],
                                dr,
                                s_norm,
                            );
                            if let Some(d_state) = d_state {
                                add_inline(dr, &d_state[at.clone()]);
                            }
                            add_inline(s_down, dr);
                            if let Some((prev, _)) = eda_in {
                                let prev = &prev[at.clone()];
                                for ((s, dr), prev) in s_gamma.iter_mut().zip(dr.iter()).zip(prev) {
                                    *s += dr * prev;
                                }
                            }
                        }
                        if let (Some((_, gamma)), Some(d_prev)) = (eda_in, d_prev) {
                            for (d_prev, dr) in d_prev.chunks_exact_mut(r).zip(dr.chunks_exact(r)) {
                                for i in 0..r {
                                    d_prev[i] = dr[i] * gamma[i];
                                }
                            }
                        }
                    },
                );
                linear::block(core, dr, 0..n, down, part(&all_dh, d), true, left);
            },
            |i, sum| match (i / r, i % r) {
                (0, i) => d_fc2_bias[i] += sum,
                (1, i) => d_fc1_bias[i] += sum,
                (2, i) => d_down_bias[i] += sum,
                (3, i) => d_norm[i] += sum,
                (_, i) => {
                    if let Some(d_gamma) = &mut d_gamma {
                        d_gamma[i] += sum;
                    }
                }
            },
        );
    }
    linear::weight_gradient(core, &act2, &d_logits, classes, r, g.out.data_mut(), &mut scratch);
    linear::weight_gradient(core, &act1, &d2, r, r, g.fc2_weight.data_mut(), &mut scratch);
    linear::weight_gradient(core, &saved.normed, &d1, r, r, g.fc1_weight.data_mut(), &mut scratch);
    linear::weight_gradient(core, h.data(), &dr, r, d, g.down_weight.data_mut(), &mut scratch);
    Ok(d_prev)
}

/// `d *= gelu'(x)`, and the sum of its rows added to `sums`.
fn gelu_backward_rows(x: &[f32], d: &mut [f32], sums: &mut [f32]) {
    let r = sums.len();
    vectorised(
        #[inline(always)]
        || {
            for (d, x) in d.iter_mut().zip(x) {
                *d *= gelu_derivative(*x);
            }
            for row in d.chunks_exact(r) {
                add_inline(sums, row);
            }
        },
    );
}
