//! Top-1 experts, grouped: blocks of rows of one expert are gathered and go through its SwiGLU together, from the input to
//! the output in the cache. No padding, no capacity.

use anyhow::Result;

use super::Cpu;
use super::arena::Block;
use super::buf::{Buf, Side};
use super::level::vectorised;
use super::linear::{self, LEFT_SCRATCH};
use super::math::{lane_sum, sigmoid};
use super::packed::Panels;
use super::packed::{Core, KC, Left, MC, as_slots_mut, multiply_block, pack};
use super::par::{self, Shared};
use super::router::Routing;
use crate::tensor::backend::SkipMode;

/// Gate and up before the activation, `[T, 2F]`, rows in the order of `Routing::order` (those of skipped rows unused).
pub struct Saved {
    gate_up: Block<f32>,
}

/// Blocks of rows of one expert: which expert, and where in `Routing::order`.
struct Blocks {
    /// Blocks before each expert's first; experts + 1 numbers.
    first: Vec<usize>,
}

impl Blocks {
    fn new(routing: &Routing, experts: usize) -> Self {
        let mut first = vec![0; experts + 1];
        for e in 0..experts {
            first[e + 1] = first[e] + (routing.offsets[e + 1] - routing.offsets[e]).div_ceil(MC);
        }
        Self { first }
    }

    fn len(&self) -> usize {
        self.first[self.first.len() - 1]
    }

    /// Expert of block `i`, and its rows in the order.
    fn get(&self, routing: &Routing, i: usize) -> (usize, std::ops::Range<usize>) {
        let e = self.first.partition_point(|first| *first <= i) - 1;
        let start = routing.offsets[e] + (i - self.first[e]) * MC;
        (e, start..(start + MC).min(routing.offsets[e + 1]))
    }
}

/// `c = x w` for gathered rows: row r of the left operand is `x[order[r]]`. `scratch`: `LEFT_SCRATCH`.
fn gathered_block(core: &Core, x: &[f32], order: &[u32], weight: Panels, c: &mut [f32], scratch: &mut [f32]) {
    let (k, n) = (weight.layout.k, weight.layout.n);
    for b in 0..weight.layout.num_blocks() {
        let (k0, kk) = weight.layout.block(b);
        let slots = core.slots(kk);
        let left = &mut as_slots_mut(scratch)[..order.len() * slots];
        pack::rows(core.format, order.len(), kk, |r| &x[order[r] as usize * k + k0..][..kk], left);
        multiply_block(core, order.len(), n, slots, Left::rows(left, slots), weight.from(b, 0), c, n, b > 0);
    }
}

/// silu(gate) * up, `[n, F]` from `[n, 2F]`.
#[inline(always)]
fn swiglu_rows(gate_up: &[f32], f: usize, out: &mut [f32]) {
    for (out, gu) in out.chunks_exact_mut(f).zip(gate_up.chunks_exact(2 * f)) {
        let (gate, up) = (&gu[..f], &gu[f..2 * f]);
        for i in 0..f {
            out[i] = gate[i] * sigmoid(gate[i]) * up[i];
        }
    }
}

/// What all experts share.
struct Shape {
    num: usize,
    d: usize,
    f: usize,
}

impl Shape {
    fn of(h: &Buf, experts: &[Buf]) -> Self {
        Self { num: experts.len() / 2, d: h.cols, f: experts.get(1).map_or(0, |down| down.cols) }
    }
}

pub fn forward(cpu: &Cpu, h_buf: &Buf, routing: &Routing, experts: &[Buf], skip: SkipMode) -> Result<(Buf, Saved)> {
    let (shape, core, tokens) = (Shape::of(h_buf, experts), &cpu.core, h_buf.rows);
    let (d, f) = (shape.d, shape.f);
    let mut out = cpu.matrix(tokens, d)?;
    let mut saved = Saved { gate_up: cpu.block(tokens * 2 * f)? };
    let per_thread = LEFT_SCRATCH + MC * (f + d);
    let mut scratch = cpu.block::<f32>(par::threads() * per_thread)?;
    let weights = experts.iter().map(|w| cpu.pack(core, w, Side::Forward)).collect::<Result<Vec<_>>>()?;
    if cpu.is_planning() {
        return Ok((out, saved));
    }
    let blocks = Blocks::new(routing, shape.num);
    let h = h_buf.data();
    let (all_out, all_gate_up) = (Shared::new(out.data_mut()), Shared::new(&mut saved.gate_up));
    par::tasks_with(blocks.len(), &mut scratch, per_thread, |i, scratch| {
        let (e, range) = blocks.get(routing, i);
        let (n, order) = (range.len(), &routing.order[range.clone()]);
        let (left, rest) = scratch.split_at_mut(LEFT_SCRATCH);
        let (act, rest) = rest.split_at_mut(MC * f);
        let (act, y) = (&mut act[..n * f], &mut rest[..n * d]);
        // SAFETY: blocks are disjoint parts of the order.
        let gate_up = unsafe { all_gate_up.range(range.start * 2 * f, n * 2 * f) };
        gathered_block(core, h, order, weights[2 * e].panels(), gate_up, left);
        vectorised(
            #[inline(always)]
            || swiglu_rows(gate_up, f, act),
        );
        linear::block(core, act, 0..n, weights[2 * e + 1].panels(), y, false, left);
        for (t, y) in order.iter().zip(y.chunks_exact(d)) {
            // SAFETY: every row stands in the order once.
            let out = unsafe { all_out.range(*t as usize * d, d) };
            let p = routing.prob[*t as usize];
            for (out, y) in out.iter_mut().zip(y) {
                *out = p * y;
            }
        }
    });
    skip_forward(h_buf, routing, shape.num, skip, &mut out);
    Ok((out, saved))
}

/// Outputs of the rows that the router sends to the skip class, which follows `experts` experts.
pub fn skip_forward(h: &Buf, routing: &Routing, experts: usize, skip: SkipMode, out: &mut Buf) {
    let (d, h, out) = (h.cols, h.data(), Shared::new(out.data_mut()));
    let skipped = &routing.order[routing.offsets[experts]..];
    par::chunks(skipped.len(), MC, |range| {
        for t in &skipped[range] {
            let t = *t as usize;
            // SAFETY: every row stands in the order once.
            let out = unsafe { out.range(t * d, d) };
            match skip {
                SkipMode::Zero => out.fill(0.0),
                SkipMode::Identity => out.iter_mut().zip(&h[t * d..]).for_each(|(out, h)| *out = routing.prob[t] * h),
            }
        }
    });
}

/// Gradients of the rows that the router sends to the skip class.
#[allow(clippy::too_many_arguments)]
pub fn skip_backward(h: &Buf, routing: &Routing, experts: usize, skip: SkipMode, dy: &Buf, dh: &mut Buf, d_prob: &mut Buf) {
    let (d, h, dy) = (h.cols, h.data(), dy.data());
    let (dh, d_prob) = (Shared::new(dh.data_mut()), Shared::new(d_prob.data_mut()));
    let skipped = &routing.order[routing.offsets[experts]..];
    par::chunks(skipped.len(), MC, |range| {
        for t in &skipped[range] {
            let t = *t as usize;
            // SAFETY: every row stands in the order once.
            let (dh, d_prob) = unsafe { (dh.range(t * d, d), d_prob.range(t, 1)) };
            let (dy, h, p) = (&dy[t * d..][..d], &h[t * d..][..d], routing.prob[t]);
            match skip {
                SkipMode::Zero => (dh.fill(0.0), d_prob.fill(0.0)),
                SkipMode::Identity => {
                    (dh.iter_mut().zip(dy).for_each(|(dh, dy)| *dh = p * dy), d_prob.fill(lane_sum(d, |j| dy[j] * h[j])))
                }
            };
        }
    });
}

/// Rows `order` of `x`, one after the other; `width` numbers each.
pub fn gather(x: &[f32], order: &[u32], width: usize, out: &mut [f32]) {
    let out = Shared::new(out);
    par::chunks(order.len(), MC, |range| {
        for i in range {
            // SAFETY: one row each.
            unsafe { out.range(i * width, width) }.copy_from_slice(&x[order[i] as usize * width..][..width]);
        }
    });
}

/// The reverse of `gather`. No row stands in `order` twice.
pub fn scatter(x: &[f32], order: &[u32], width: usize, out: &mut [f32]) {
    let out = Shared::new(out);
    par::chunks(order.len(), MC, |range| {
        for i in range {
            // SAFETY: no row twice.
            unsafe { out.range(order[i] as usize * width, width) }.copy_from_slice(&x[i * width..][..width]);
        }
    });
}

/// Returns the gradients of `h` and of the chosen probabilities.
#[allow(clippy::too_many_arguments)]
pub fn backward(
    cpu: &Cpu,
    h_buf: &Buf,
    routing: &Routing,
    experts: &[Buf],
    skip: SkipMode,
    saved: &Saved,
    dy_buf: &Buf,
    g: &mut [Buf],
) -> Result<(Buf, Buf)> {
    let (shape, core, tokens) = (Shape::of(h_buf, experts), &cpu.core, h_buf.rows);
    let (d, f) = (shape.d, shape.f);
    let (mut dh, mut d_prob) = (cpu.matrix(tokens, d)?, cpu.matrix(tokens, 1)?);
    // Operands of the weights' gradients, rows in the order: gathered input, activation, gradients of gate and up, and of the
    // expert's output.
    let mut rows_h = cpu.block::<f32>(tokens * d)?;
    let mut rows_act = cpu.block::<f32>(tokens * f)?;
    let mut rows_d_gate_up = cpu.block::<f32>(tokens * 2 * f)?;
    let mut rows_dy = cpu.block::<f32>(tokens * d)?;
    let per_thread = LEFT_SCRATCH + MC * f.max(d);
    let gradients = [(2 * f, d), (d, f)];
    let alone = gradients.map(|(o, i)| linear::weight_gradient_alone_scratch(core, KC, o, i)).into_iter().max().unwrap_or(0);
    let together = gradients.map(|(o, i)| linear::weight_gradient_scratch(core, tokens, o, i)).into_iter().max().unwrap_or(0);
    let mut scratch = cpu.block::<f32>((par::threads() * per_thread.max(alone)).max(together))?;
    let weights = experts.iter().map(|w| cpu.pack(core, w, Side::Backward)).collect::<Result<Vec<_>>>()?;
    if cpu.is_planning() {
        return Ok((dh, d_prob));
    }
    let blocks = Blocks::new(routing, shape.num);
    let (h, dy) = (h_buf.data(), dy_buf.data());
    let (all_dh, all_d_prob) = (Shared::new(dh.data_mut()), Shared::new(d_prob.data_mut()));
    {
        let [all_h, all_act, all_d_gate_up, all_dy] =
            [&mut rows_h, &mut rows_act, &mut rows_d_gate_up, &mut rows_dy].map(|rows| Shared::new(rows));
        par::tasks_with(blocks.len(), &mut scratch, per_thread, |i, scratch| {
            let (e, range) = blocks.get(routing, i);
            let (n, order) = (range.len(), &routing.order[range.clone()]);
            let (left, block) = scratch.split_at_mut(LEFT_SCRATCH);
            // SAFETY: blocks are disjoint parts of the order.
            let part = |all: &Shared<f32>, width: usize| unsafe { all.range(range.start * width, n * width) };
            let (rows_h, rows_dy, act) = (part(&all_h, d), part(&all_dy, d), part(&all_act, f));
            for ((t, rows_h), rows_dy) in order.iter().zip(rows_h.chunks_exact_mut(d)).zip(rows_dy.chunks_exact_mut(d)) {
                let t = *t as usize;
                rows_h.copy_from_slice(&h[t * d..][..d]);
                rows_dy.copy_from_slice(&dy[t * d..][..d]);
            }
            // Gradient of the activation without the probability: its product with the activation is the probability's own.
            let d_act = &mut block[..n * f];
            linear::block(core, rows_dy, 0..n, weights[2 * e + 1].panels(), d_act, false, left);
            let gate_up = &saved.gate_up[range.start * 2 * f..range.end * 2 * f];
            let d_gate_up = part(&all_d_gate_up, 2 * f);
            vectorised(
                #[inline(always)]
                || {
                    swiglu_rows(gate_up, f, act);
                    for (i, t) in order.iter().enumerate() {
                        let (act, d_act) = (&act[i * f..][..f], &d_act[i * f..][..f]);
                        let gu = &gate_up[i * 2 * f..][..2 * f];
                        let (gate, up) = (&gu[..f], &gu[f..]);
                        let (d_gate, d_up) = d_gate_up[i * 2 * f..][..2 * f].split_at_mut(f);
                        // SAFETY: every row stands in the order once.
                        let d_prob = unsafe { all_d_prob.range(*t as usize, 1) };
                        d_prob[0] = lane_sum(f, |j| act[j] * d_act[j]);
                        let p = routing.prob[*t as usize];
                        for j in 0..f {
                            let (sig, da) = (sigmoid(gate[j]), p * d_act[j]);
                            d_gate[j] = da * up[j] * sig * (1.0 + gate[j] * (1.0 - sig));
                            d_up[j] = da * gate[j] * sig;
                        }
                        for v in &mut rows_dy[i * d..][..d] {
                            *v *= p;
                        }
                    }
                },
            );
            let rows_dh = &mut block[..n * d];
            linear::block(core, d_gate_up, 0..n, weights[2 * e].panels(), rows_dh, false, left);
            for (t, row) in order.iter().zip(rows_dh.chunks_exact(d)) {
                // SAFETY: as above.
                unsafe { all_dh.range(*t as usize * d, d) }.copy_from_slice(row);
            }
        });
    }
    weight_gradients(core, &shape, routing, [&rows_h, &rows_d_gate_up, &rows_act, &rows_dy], g, &mut scratch, alone);
    skip_backward(h_buf, routing, shape.num, skip, dy_buf, &mut dh, &mut d_prob);
    Ok((dh, d_prob))
}

/// Adds every expert's gradients. An expert with a large part of all rows is worked on by all threads, the others by one each.
fn weight_gradients(
    core: &Core,
    shape: &Shape,
    routing: &Routing,
    rows: [&[f32]; 4],
    g: &mut [Buf],
    scratch: &mut [f32],
    alone: usize,
) {
    let (d, f) = (shape.d, shape.f);
    let [rows_h, rows_d_gate_up, rows_act, rows_dy] = rows;
    let range = |e: usize| routing.offsets[e]..routing.offsets[e + 1];
    let is_large = |e: usize| range(e).len() * 4 > routing.choice.len();
    // Operands of matrix `i`, gate_up and down of each expert in turn: x, dy, and the shape of the gradient.
    let operands = |i: usize| {
        let range = range(i / 2);
        let of = |x: &'_ [f32], width: usize| -> std::ops::Range<usize> {
            debug_assert!(x.len() >= range.end * width);
            range.start * width..range.end * width
        };
        if i.is_multiple_of(2) {
            (&rows_h[of(rows_h, d)], &rows_d_gate_up[of(rows_d_gate_up, 2 * f)], 2 * f, d)
        } else {
            (&rows_act[of(rows_act, f)], &rows_dy[of(rows_dy, d)], d, f)
        }
    };
    for (i, g) in g.iter_mut().enumerate().filter(|(i, _)| is_large(i / 2)) {
        let (x, dy, rows, cols) = operands(i);
        linear::weight_gradient(core, x, dy, rows, cols, g.data_mut(), scratch);
    }
    let targets: Vec<Shared<f32>> = g.iter_mut().map(|g| Shared::new(g.data_mut())).collect();
    par::tasks_with(targets.len(), scratch, alone, |i, scratch| {
        if !is_large(i / 2) && !range(i / 2).is_empty() {
            let (x, dy, rows, cols) = operands(i);
            // SAFETY: one matrix per task.
            let dw = unsafe { targets[i].range(0, rows * cols) };
            linear::weight_gradient_alone(core, x, dy, rows, cols, dw, scratch);
        }
    });
}
