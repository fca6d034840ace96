//! Linear maps `y = x wᵀ` and their gradients on packed operands. Several maps of one input share its packing.

use super::packed::{
    Core, Format, KC, Layout, Left, MC, Panels, Source, as_slots, as_slots_mut, multiply_block, multiply_block_at, pack,
    pack_all, pack_unit,
};
use super::par::{self, Shared};

/// Rows of a left operand, read where they lie (f32) or packed into `scratch`: rows `rows` of `x` (`cols` wide), numbers
/// `k0..k0 + k` of each.
pub fn left_rows<'a>(
    core: &Core,
    x: &'a [f32],
    cols: usize,
    rows: std::ops::Range<usize>,
    k0: usize,
    k: usize,
    scratch: &'a mut [f32],
) -> Left<'a> {
    if core.format == Format::F32 {
        return Left::rows(&as_slots(x)[rows.start * cols + k0..], cols);
    }
    let slots = core.slots(k);
    let out = &mut as_slots_mut(scratch)[..rows.len() * slots];
    pack::rows(core.format, rows.len(), k, |r| &x[(rows.start + r) * cols + k0..][..k], out);
    Left::rows(out, slots)
}

/// `c = x w`, or `+=`: rows `rows` of `x` (`k` wide) against a packed weight, into `rows.len()` rows of c. For one thread.
/// `scratch`: `LEFT_SCRATCH`.
#[allow(clippy::too_many_arguments)]
pub fn block(
    core: &Core,
    x: &[f32],
    rows: std::ops::Range<usize>,
    weight: Panels,
    c: &mut [f32],
    accumulate: bool,
    scratch: &mut [f32],
) {
    let (k, n) = (weight.layout.k, weight.layout.n);
    for b in 0..weight.layout.num_blocks() {
        let (k0, kk) = weight.layout.block(b);
        let left = left_rows(core, x, k, rows.clone(), k0, kk, scratch);
        multiply_block(core, rows.len(), n, core.slots(kk), left, weight.from(b, 0), c, n, accumulate || b > 0);
    }
}

/// Scratch of one thread for `left_rows` of `MC` rows (and the two that a convolution looks back) and a block along k.
pub const LEFT_SCRATCH: usize = (MC + 2) * KC;

/// Rows that a task takes: `MC`, fewer when there would not be tasks for everyone. (Bits do not depend on it.)
pub fn task_rows(core: &Core, rows: usize) -> usize {
    // Whole tiles: 12 is a multiple of the rows of all kernels but AMX's.
    let tile = core.mr.max(12);
    rows.div_ceil(4 * par::threads()).next_multiple_of(tile).clamp(tile.max(24), MC)
}

/// One map: its packed weight, and the matrix `[rows, n]` that is written.
pub struct Map<'a> {
    pub weight: Panels<'a>,
    pub y: &'a mut [f32],
}

pub fn scratch_len() -> usize {
    par::threads() * LEFT_SCRATCH
}

/// `y = x wᵀ` for every map; x is `[rows, k]`. `scratch`: `scratch_len()`.
pub fn forward(core: &Core, x: &[f32], k: usize, maps: &mut [Map], scratch: &mut [f32]) {
    let rows = x.len() / k;
    let chunk = task_rows(core, rows);
    let outs: Vec<(Panels, Shared<f32>)> = maps.iter_mut().map(|m| (m.weight, Shared::new(m.y))).collect();
    par::tasks_with(rows.div_ceil(chunk), scratch, LEFT_SCRATCH, |i, scratch| {
        let range = i * chunk..((i + 1) * chunk).min(rows);
        for b in 0..k.div_ceil(KC) {
            let (k0, kk) = (b * KC, KC.min(k - b * KC));
            let left = left_rows(core, x, k, range.clone(), k0, kk, scratch);
            for (weight, y) in &outs {
                let n = weight.layout.n;
                // SAFETY: tasks write disjoint rows.
                let y = unsafe { y.range(range.start * n, range.len() * n) };
                multiply_block(core, range.len(), n, core.slots(kk), left, weight.from(b, 0), y, n, b > 0);
            }
        }
    });
}

/// One part of an input gradient: `dx += dy w`, with dy `[rows, n]`.
pub struct Back<'a> {
    pub dy: &'a [f32],
    pub weight: Panels<'a>,
}

/// `dx = Σ dy w` over all parts, `[rows, k]`. `scratch`: `scratch_len()`.
pub fn input_gradient(core: &Core, parts: &[Back], k: usize, dx: &mut [f32], scratch: &mut [f32]) {
    let rows = dx.len() / k;
    let chunk = task_rows(core, rows);
    let dx = Shared::new(dx);
    par::tasks_with(rows.div_ceil(chunk), scratch, LEFT_SCRATCH, |i, scratch| {
        let range = i * chunk..((i + 1) * chunk).min(rows);
        // SAFETY: tasks write disjoint rows.
        let dx = unsafe { dx.range(range.start * k, range.len() * k) };
        for (i, part) in parts.iter().enumerate() {
            block(core, part.dy, range.clone(), part.weight, dx, i > 0, scratch);
        }
    });
}

/// Tokens packed at a time for a weight gradient; a multiple of `KC`.
const TOKENS: usize = 2048;
/// Rows of a weight gradient that one task computes.
const WEIGHT_ROWS: usize = 48;

/// Scratch for gradients of `[o, i]` weights over `tokens` rows.
pub fn weight_gradient_scratch(core: &Core, tokens: usize, o: usize, i: usize) -> usize {
    let t = tokens.min(TOKENS);
    left_len(core, t, o) + Layout::new(core, t, i).len()
}

/// Slots of a packed transposed left operand `[t, o]`, block by block along t.
fn left_len(core: &Core, t: usize, o: usize) -> usize {
    (0..t.div_ceil(KC)).map(|b| core.slots(KC.min(t - b * KC))).sum::<usize>() * o.div_ceil(core.mr) * core.mr
}

/// `dw += dyᵀ x`: dy `[T, o]`, x `[T, i]`, dw `[o, i]`, on all threads. `scratch`: `weight_gradient_scratch`.
pub fn weight_gradient(core: &Core, x: &[f32], dy: &[f32], o: usize, i: usize, dw: &mut [f32], scratch: &mut [f32]) {
    let tokens = x.len() / i;
    let panels = o.div_ceil(core.mr);
    let scratch = as_slots_mut(scratch);
    for t0 in (0..tokens).step_by(TOKENS) {
        let t = TOKENS.min(tokens - t0);
        let (left, rest) = scratch.split_at_mut(left_len(core, t, o));
        let layout = Layout::new(core, t, i);
        let right = &mut rest[..layout.len()];
        let blocks = layout.num_blocks();
        // Place of panel p of block b on the left.
        let left_at = |b: usize, p: usize| (b * core.slots(KC) * panels + core.slots(layout.block(b).1) * p) * core.mr;
        {
            let (source_left, source_right) = (Source::rows(dy, o).from(t0, 0), Source::rows(x, i).from(t0, 0));
            let (left, right) = (Shared::new(left), Shared::new(right));
            // Whole blocks of panels a task: a panel alone is little work.
            par::tasks(2 * blocks, |task| {
                let b = task / 2;
                let (k0, k) = layout.block(b);
                if task % 2 == 0 {
                    let len = core.slots(k) * core.mr * panels;
                    // SAFETY: one part per block.
                    let left = unsafe { left.range(left_at(b, 0), len) };
                    pack::left_panels(core, source_left.from(k0, 0), k, o, left);
                } else {
                    for unit in b * layout.num_panels()..(b + 1) * layout.num_panels() {
                        let (start, len) = layout.unit(unit);
                        // SAFETY: one part per unit.
                        pack_unit(core, layout, source_right, unit, unsafe { right.range(start, len) });
                    }
                }
            });
        }
        let (left, right) = (&*left, Panels::new(layout, right));
        let out = Shared::new(dw);
        let rows = WEIGHT_ROWS.next_multiple_of(core.mr);
        // Tiles of columns too, when the rows alone are few tasks.
        let column_tiles = (16usize.div_ceil(o.div_ceil(rows))).clamp(1, layout.num_panels());
        let tile_panels = layout.num_panels().div_ceil(column_tiles);
        par::tasks(o.div_ceil(rows) * column_tiles, |task| {
            let (o0, p0) = (task / column_tiles * rows, task % column_tiles * tile_panels);
            if p0 >= layout.num_panels() {
                return;
            }
            let (m, j0) = (rows.min(o - o0), p0 * core.nr);
            let n = (tile_panels * core.nr).min(i - j0);
            for b in 0..blocks {
                let slots = layout.block_slots(b);
                let left = Left::panels(core, &left[left_at(b, o0 / core.mr)..], slots);
                // SAFETY: tiles of the gradient are disjoint and inside it.
                unsafe { multiply_block_at(core, m, n, slots, left, right.from(b, p0), out.at(o0 * i + j0), i, true) };
            }
        });
    }
}

/// As `weight_gradient`, on the calling thread, for a task that has no others to call.
pub fn weight_gradient_alone(core: &Core, x: &[f32], dy: &[f32], o: usize, i: usize, dw: &mut [f32], scratch: &mut [f32]) {
    let tokens = x.len() / i;
    let panels = o.div_ceil(core.mr);
    let scratch = as_slots_mut(scratch);
    for t0 in (0..tokens).step_by(KC) {
        let t = KC.min(tokens - t0);
        let slots = core.slots(t);
        let (left, right) = scratch.split_at_mut(slots * panels * core.mr);
        pack::left_panels(core, Source::rows(dy, o).from(t0, 0), t, o, left);
        let layout = Layout::new(core, t, i);
        pack_all(core, layout, Source::rows(x, i).from(t0, 0), right);
        multiply_block(core, o, i, slots, Left::panels(core, left, slots), right, dw, i, true);
    }
}

/// Scratch of `weight_gradient_alone`.
pub fn weight_gradient_alone_scratch(core: &Core, tokens: usize, o: usize, i: usize) -> usize {
    let t = tokens.min(KC);
    core.slots(t) * o.div_ceil(core.mr) * core.mr + Layout::new(core, t, i).len()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::cpu::test_support::{all_cores, on, series};

    /// Tiles, tasks and blocks of tokens of every kernel begin inside these shapes.
    #[test]
    fn weight_gradients_are_sums_over_tokens() {
        for core in all_cores() {
            for (tokens, o, i) in [(1, 1, 1), (50, 70, 40), (600, 130, 100), (257, 200, 33), (2100, 49, 65)] {
                let (x, dy) = (series(tokens * i, 1), series(tokens * o, 2));
                let taken = |v: &f32| pack::as_multiplied(core.format, *v) as f64;
                let expected = |row: usize, col: usize| -> f64 {
                    (0..tokens).map(|t| taken(&dy[t * o + row]) * taken(&x[t * i + col])).sum()
                };
                let mut together = vec![1.0; o * i];
                on(3, || {
                    let mut scratch = vec![f32::NAN; weight_gradient_scratch(&core, tokens, o, i)];
                    weight_gradient(&core, &x, &dy, o, i, &mut together, &mut scratch);
                });
                let mut alone = vec![1.0; o * i];
                let mut scratch = vec![f32::NAN; weight_gradient_alone_scratch(&core, tokens, o, i)];
                weight_gradient_alone(&core, &x, &dy, o, i, &mut alone, &mut scratch);
                for (at, (a, b)) in together.iter().zip(&alone).enumerate() {
                    let sum = 1.0 + expected(at / i, at % i);
                    for got in [a, b] {
                        let close = (*got as f64 - sum).abs() < 1e-4 * (1.0 + (tokens as f64).sqrt());
                        assert!(close, "{:?} {tokens} x {o} x {i}, row {} column {}: {got} not {sum}", core, at / i, at % i);
                    }
                }
            }
        }
    }
}
