//! The tied head with cross-entropy: `logits = y headᵀ`, their softmax, the loss and both gradients, in chunks of tokens.
//!
//! The logits of a whole micro-batch never exist. A chunk of labelled rows goes through four passes of parallel tasks:
//!
//! 1. *forward*, a task a vocabulary block of `KC` entries: logits of all rows of the chunk, 96 rows at a time; while they
//!    are hot they become `e = exp(logit - top)`, with the largest logit `top` and the sum of `e` noted for each row and block;
//! 2. *rows*: tops and sums of the blocks, in their order, give each row's logsumexp, its loss, and for each block the factor
//!    that turns `e` into the gradient `scale * softmax`, so that no exponential is taken twice;
//! 3. *head gradient*, a task a vocabulary block: `e` becomes the gradient of the logits, which is packed for both products,
//!    and `d_head[block] += d_logitsᵀ y`; a task owns its rows of `d_head`;
//! 4. *input gradient*, a task some rows and columns of `dy = d_logits head`, summed over vocabulary blocks in their order.
//!
//! What is written for a label itself, `scale * (softmax - 1)`, is the largest number of its row by far: it is kept out of the
//! packed gradients (a zero stands there) and added in f32 from the f32 head and `y`, whatever the format of the products.
//!
//! No number depends on the count of threads, nor on how the tasks of passes 2 and 4 are cut.

use super::level::vectorised;
use super::math::{exp_of_negative, larger};
use super::packed::{Core, KC, Layout, Left, MC, Panels, Source, as_slots, as_slots_mut, multiply_block, pack, pack_on_threads};
use super::par::{self, Shared};
use super::scratch::{aligned, cut_aligned};
use crate::tensor::backend::Loss;

/// Entries of a vocabulary block: a block of the inner dimension of `d_logits head`, and whole panels of the forward product.
const BLOCK: usize = KC;
/// Logits of a chunk, at most, as long as that leaves `LEAST_ROWS`.
const CHUNK_LOGITS: usize = 1 << 24;
/// A chunk reads the packed head twice and its gradient once, and writes that: 12 to 16 bytes for `6 * rows` FLOP. With fewer
/// rows than this the memory would set the pace. 128 rows of the vocabulary of 262,272 are 134 MB.
const LEAST_ROWS: usize = 128;
const MOST_ROWS: usize = 1024;
/// Rows of a task of pass 2.
const ROWS: usize = 64;
/// Rows whose gradients are packed together; even, so that no pair of rows is cut.
const GROUP: usize = 32;
/// Rows of `dy` that a task of pass 4 takes: two times `MC` halve the reading of the packed head.
const DY_ROWS: usize = 2 * MC;
/// Columns of `dy` that a task of pass 4 takes, at most and (where `dy` has them) at least.
const MOST_COLS: usize = 256;
const LEAST_COLS: usize = 64;

/// What the backward of the head needs: the gradient of `scale * loss.sum`.
pub struct Gradient<'a> {
    pub scale: f32,
    /// `[V, D]`, added to.
    pub d_head: &'a mut [f32],
    /// `[T, D]`, overwritten; rows without a label get 0.
    pub dy: &'a mut [f32],
    /// The head as a right operand with `k = V`, `n = D`.
    pub backward: Panels<'a>,
}

/// Rows of the chunks that `labelled` rows are cut into: as equal as can be.
fn chunk_rows(labelled: usize, vocab: usize) -> usize {
    let most = (CHUNK_LOGITS / vocab).clamp(LEAST_ROWS, MOST_ROWS);
    labelled.div_ceil(labelled.div_ceil(most).max(1))
}

/// Parts of the scratch for chunks of `n` rows, in f32 numbers (or slots).
struct Sizes {
    /// Rows of `y`: f32, packed as a left operand, packed as a right one.
    x: usize,
    left: usize,
    right: usize,
    logits: usize,
    /// For each block and row.
    stats: usize,
    /// Of one thread.
    thread: usize,
}

impl Sizes {
    fn new(core: &Core, n: usize, d: usize, vocab: usize, gradient: bool) -> Self {
        let blocks = vocab.div_ceil(BLOCK);
        let forward_tile = MC * BLOCK;
        let panels = BLOCK.div_ceil(core.mr) * core.mr * core.slots(KC.min(n));
        let backward = GROUP * BLOCK + panels;
        Self {
            x: n * d,
            left: n * core.slots(d),
            right: if gradient { Layout::new(core, n, d).len() } else { 0 },
            logits: if gradient { n * blocks * BLOCK } else { 0 },
            stats: n * blocks,
            thread: aligned(if gradient { backward.max(DY_ROWS * MOST_COLS) } else { forward_tile }),
        }
    }

    fn total(&self, n: usize) -> usize {
        let one_each = [self.x, self.left, self.right, self.logits, self.stats, self.stats, n, n];
        one_each.into_iter().map(aligned).sum::<usize>() + par::threads() * self.thread
    }
}

/// Scratch (f32 numbers) of `cross_entropy` for `rows` rows of `y` on the threads of this pool.
pub fn scratch_len(core: &Core, rows: usize, d: usize, vocab: usize, gradient: bool) -> usize {
    // Fewer labelled rows can make longer chunks (1025 are two of 513, 1024 are one).
    let n = rows.min((CHUNK_LOGITS / vocab).clamp(LEAST_ROWS, MOST_ROWS));
    aligned(rows) + Sizes::new(core, n, d, vocab, gradient).total(n)
}

/// Sum of the losses of rows with a label, and with `gradient` that of `scale * sum`. Without any label the loss, the count and
/// the gradients are zero.
///
/// `labels` `[T]` (negative = none), `y` `[T, D]`, `head` `[V, D]`; `forward` is `headᵀ` as a right operand with `k = D`, `n = V`.
/// `scratch` holds at least `scratch_len(.., T, ..)` numbers, whatever they are.
#[allow(clippy::too_many_arguments)]
pub fn cross_entropy(
    core: &Core,
    labels: &[i64],
    y: &[f32],
    head: &[f32],
    forward: Panels,
    d: usize,
    mut gradient: Option<Gradient>,
    mut scratch: &mut [f32],
) -> Loss {
    let vocab = head.len() / d;
    assert_eq!(y.len(), labels.len() * d, "y of {} labels", labels.len());
    assert!(
        forward.layout.k == d && forward.layout.n == vocab,
        "the packed head is [{}, {}]",
        forward.layout.n,
        forward.layout.k
    );
    if let Some(g) = &mut gradient {
        assert!(g.dy.len() == y.len() && g.d_head.len() == head.len(), "gradients differ from y and the head in size");
        assert!(g.backward.layout.k == vocab && g.backward.layout.n == d, "the head packed for the backward has another shape");
        for (dy, _) in g.dy.chunks_mut(d).zip(labels).filter(|(_, label)| **label < 0) {
            dy.fill(0.0);
        }
    }
    // Rows with a label, so that padding and foreign targets cost nothing.
    let index = as_slots_mut(cut_aligned(&mut scratch, labels.len()));
    let mut labelled = 0;
    for (t, label) in labels.iter().enumerate().filter(|(_, label)| **label >= 0) {
        assert!((*label as usize) < vocab, "row {t} has label {label}, but the vocabulary ends at {}", vocab - 1);
        index[labelled] = t as u32;
        labelled += 1;
    }
    let mut sum = 0f64;
    if labelled > 0 {
        for rows in index[..labelled].chunks(chunk_rows(labelled, vocab)) {
            sum += Chunk { core, labels, rows, d, vocab }.run(y, head, forward, gradient.as_mut(), &mut *scratch);
        }
    }
    Loss { sum, count: labelled as u64 }
}

/// Some labelled rows.
struct Chunk<'a> {
    core: &'a Core,
    labels: &'a [i64],
    /// Their places in `y` and `labels`.
    rows: &'a [u32],
    d: usize,
    vocab: usize,
}

impl Chunk<'_> {
    /// Sum of the chunk's losses.
    fn run(&self, y: &[f32], head: &[f32], forward: Panels, gradient: Option<&mut Gradient>, mut scratch: &mut [f32]) -> f64 {
        let n = self.rows.len();
        let sizes = Sizes::new(self.core, n, self.d, self.vocab, gradient.is_some());
        let x = cut_aligned(&mut scratch, sizes.x);
        let left = as_slots_mut(cut_aligned(&mut scratch, sizes.left));
        let right = as_slots_mut(cut_aligned(&mut scratch, sizes.right));
        let logits = cut_aligned(&mut scratch, sizes.logits);
        // Top of each block and row, later the factor that makes gradients of exponentials; sum of these.
        let top = cut_aligned(&mut scratch, sizes.stats);
        let sum = cut_aligned(&mut scratch, sizes.stats);
        // The label's logit, later its gradient.
        let target = cut_aligned(&mut scratch, n);
        let tile = scratch;

        self.gather(y, x, left, forward.layout);
        self.forward(left, forward, logits, top, sum, target, tile, sizes.thread);
        let loss = self.normalise(gradient.as_ref().map_or(0.0, |g| g.scale), top, sum, target);
        if let Some(g) = gradient {
            let layout = Layout::new(self.core, n, self.d);
            pack_on_threads(self.core, layout, Source::rows(x, self.d), right);
            self.head_gradient(x, Panels::new(layout, right), logits, top, target, g.d_head, tile, sizes.thread);
            self.input_gradient(head, as_slots(logits), g.backward, target, g.dy, tile, sizes.thread);
        }
        loss
    }

    fn label(&self, r: usize) -> usize {
        self.labels[self.rows[r] as usize] as usize
    }

    /// First entry of vocabulary block `b`, and how many it has.
    fn block(&self, b: usize) -> (usize, usize) {
        (b * BLOCK, BLOCK.min(self.vocab - b * BLOCK))
    }

    fn blocks(&self) -> usize {
        self.vocab.div_ceil(BLOCK)
    }

    /// The chunk's rows of `y`: as `x` `[n, D]`, and in `left` packed for each block of the inner dimension `[n, slots]`.
    fn gather(&self, y: &[f32], x: &mut [f32], left: &mut [u32], layout: Layout) {
        let (n, d) = (self.rows.len(), self.d);
        let (x, left) = (Shared::new(x), Shared::new(left));
        par::chunks(n, MC, |range| {
            // SAFETY: rows of a range, in both.
            let x = unsafe { x.range(range.start * d, range.len() * d) };
            for (x, t) in x.chunks_mut(d).zip(&self.rows[range.clone()]) {
                x.copy_from_slice(&y[*t as usize * d..][..d]);
            }
            for b in 0..layout.num_blocks() {
                let ((k0, k), slots) = (layout.block(b), layout.block_slots(b));
                let place = n * self.core.slots(k0) + range.start * slots;
                // SAFETY: as above.
                let left = unsafe { left.range(place, range.len() * slots) };
                pack::rows(self.core.format, range.len(), k, |r| &x[r * d + k0..][..k], left);
            }
        });
    }

    /// Pass 1. `logits` is `[blocks, n, BLOCK]`, or empty: then they are forgotten. `top` and `sum` are `[blocks, n]`.
    #[allow(clippy::too_many_arguments)]
    fn forward(
        &self,
        left: &[u32],
        head: Panels,
        logits: &mut [f32],
        top: &mut [f32],
        sum: &mut [f32],
        target: &mut [f32],
        tile: &mut [f32],
        per_thread: usize,
    ) {
        let (n, keep) = (self.rows.len(), !logits.is_empty());
        let (logits, top, sum, target) = (Shared::new(logits), Shared::new(top), Shared::new(sum), Shared::new(target));
        par::tasks_with(self.blocks(), tile, per_thread, |b, tile| {
            let (v0, width) = self.block(b);
            for r0 in (0..n).step_by(MC) {
                let m = MC.min(n - r0);
                // SAFETY: rows of this task's block.
                let z = if keep { unsafe { logits.range((b * n + r0) * BLOCK, m * BLOCK) } } else { &mut tile[..m * BLOCK] };
                for k in 0..head.layout.num_blocks() {
                    let slots = head.layout.block_slots(k);
                    let a = &left[n * self.core.slots(head.layout.block(k).0) + r0 * slots..][..m * slots];
                    let panels = head.from(k, v0 / self.core.nr);
                    multiply_block(self.core, m, width, slots, Left::rows(a, slots), panels, z, BLOCK, k > 0);
                }
                for r in 0..m {
                    if let Some(at) = self.label(r0 + r).checked_sub(v0).filter(|at| *at < width) {
                        // SAFETY: a row's label lies in one block.
                        let target = unsafe { target.range(r0 + r, 1) };
                        target[0] = z[r * BLOCK + at];
                    }
                }
                let slots = head.layout.block_slots(0);
                // SAFETY: this task's block.
                let (top, sum) = unsafe { (top.range(b * n + r0, m), sum.range(b * n + r0, m)) };
                vectorised(
                    #[inline(always)]
                    || {
                        // Meanwhile the next rows come nearer.
                        let ahead = left.len().min((r0 + MC) * slots);
                        let mut ahead = left[ahead..left.len().min((r0 + 2 * MC) * slots)].chunks(slots);
                        for (z, (top, sum)) in z.chunks_mut(BLOCK).zip(top.iter_mut().zip(sum)) {
                            prefetch(ahead.next().unwrap_or_default());
                            (*top, *sum) = exponentials(&mut z[..width]);
                        }
                    },
                );
            }
        });
    }

    /// Pass 2: sum of losses. `top` becomes each block's factor from exponentials to gradients, `target` the label's gradient.
    fn normalise(&self, scale: f32, top: &mut [f32], sum: &[f32], target: &mut [f32]) -> f64 {
        let (n, blocks) = (self.rows.len(), self.blocks());
        let mut losses = [0f64; MOST_ROWS.div_ceil(ROWS)];
        let (tops, targets, out) = (Shared::new(top), Shared::new(target), Shared::new(&mut losses));
        par::chunks(n, ROWS, |range| {
            let (r0, m) = (range.start, range.len());
            // SAFETY (all three): rows of this range.
            let tops = |b: usize| unsafe { tops.range(b * n + r0, m) };
            let target = unsafe { targets.range(r0, m) };
            let loss = unsafe { out.range(r0 / ROWS, 1) };
            vectorised(
                #[inline(always)]
                || {
                    let mut highest = [f32::NEG_INFINITY; ROWS];
                    let mut total = [0f64; ROWS];
                    for b in 0..blocks {
                        for (highest, top) in highest.iter_mut().zip(&*tops(b)) {
                            *highest = larger(*highest, *top);
                        }
                    }
                    for b in 0..blocks {
                        let sum = &sum[b * n + r0..][..m];
                        let top = tops(b);
                        for r in 0..m {
                            top[r] = exp_of_negative(top[r] - highest[r]);
                            total[r] += (sum[r] * top[r]) as f64;
                        }
                    }
                    let mut factor = [0f32; ROWS];
                    for r in 0..m {
                        let below = target[r] - highest[r];
                        loss[0] += total[r].ln() - below as f64;
                        target[r] = scale * (exp_of_negative(below) as f64 / total[r] - 1.0) as f32;
                        factor[r] = (scale as f64 / total[r]) as f32;
                    }
                    for b in 0..blocks {
                        for (top, factor) in tops(b).iter_mut().zip(&factor) {
                            *top *= factor;
                        }
                    }
                },
            );
        });
        losses.iter().sum()
    }

    /// Pass 3. `logits` holds exponentials and becomes the packed rows of a left operand, each block `[n, slots]`.
    #[allow(clippy::too_many_arguments)]
    fn head_gradient(
        &self,
        x: &[f32],
        right: Panels,
        logits: &mut [f32],
        factor: &[f32],
        target: &[f32],
        d_head: &mut [f32],
        tile: &mut [f32],
        per_thread: usize,
    ) {
        let (core, n, d) = (self.core, self.rows.len(), self.d);
        let (logits, d_head) = (Shared::new(logits), Shared::new(d_head));
        par::tasks_with(self.blocks(), tile, per_thread, |b, tile| {
            let (v0, width) = self.block(b);
            let (group, panels) = tile.split_at_mut(GROUP * BLOCK);
            let panels = as_slots_mut(panels);
            // SAFETY: this task's block, in both.
            let (z, d_head) = unsafe { (logits.range(b * n * BLOCK, n * BLOCK), d_head.range(v0 * d, width * d)) };
            for k in 0..right.layout.num_blocks() {
                let ((r0, rows), slots) = (right.layout.block(k), right.layout.block_slots(k));
                for g in (0..rows).step_by(GROUP) {
                    let m = GROUP.min(rows - g);
                    self.scale_group(r0 + g, m, b, &z[(r0 + g) * BLOCK..], &factor[b * n + r0 + g..], group);
                    // A row of slots is no longer than a row of exponentials, so this overwrites none that is yet to be read.
                    let row_slots = core.slots(width);
                    let packed = &mut as_slots_mut(z)[(r0 + g) * row_slots..][..m * row_slots];
                    pack::rows(core.format, m, width, |r| &group[r * BLOCK..][..width], packed);
                    for (p, panel) in panels.chunks_mut(core.mr * slots).enumerate().take(width.div_ceil(core.mr)) {
                        let source = Source::rows(group, BLOCK).from(0, p * core.mr);
                        let rows = core.mr.min(width - p * core.mr);
                        pack::left_panel(core, source, m, rows, panel, core.mr, slots, core.slots(g));
                    }
                }
                if core.left_lies_in_rows() {
                    // AMX keeps a tile of entries while y passes by.
                    let a = Left::panels(core, panels, slots);
                    multiply_block(core, width, d, slots, a, right.from(k, 0), d_head, d, true);
                    continue;
                }
                // MC entries at a time: their panels stay in the second-level cache while y passes by.
                for i0 in (0..width).step_by(MC) {
                    for j in 0..right.layout.num_panels() {
                        let (column, columns) = (j * core.nr, core.nr.min(d - j * core.nr));
                        let b = right.from(k, j);
                        for i in (i0..width.min(i0 + MC)).step_by(core.mr) {
                            let a = Left::panels(core, &panels[i * slots..][..core.mr * slots], slots);
                            let m = core.mr.min(width - i);
                            for row in d_head[i * d..].chunks(d).take(m) {
                                prefetch(&row[column + columns..d.min(column + 2 * core.nr)]);
                            }
                            multiply_block(core, m, columns, slots, a, b, &mut d_head[i * d + column..], d, true);
                        }
                    }
                }
            }
            for r in 0..n {
                if let Some(at) = self.label(r).checked_sub(v0).filter(|at| *at < width) {
                    vectorised(
                        #[inline(always)]
                        || add_scaled(&mut d_head[at * d..][..d], target[r], &x[r * d..][..d]),
                    );
                }
            }
        });
    }

    /// Gradients of the logits of block `b` and `m` rows from `r0` on, from their exponentials `e` and factors: `[m, BLOCK]`.
    fn scale_group(&self, r0: usize, m: usize, b: usize, e: &[f32], factor: &[f32], out: &mut [f32]) {
        let (v0, width) = self.block(b);
        vectorised(
            #[inline(always)]
            || {
                for (r, factor) in factor.iter().enumerate().take(m) {
                    for (out, e) in out[r * BLOCK..][..width].iter_mut().zip(&e[r * BLOCK..][..width]) {
                        *out = factor * e;
                    }
                }
            },
        );
        for r in 0..m {
            if let Some(at) = self.label(r0 + r).checked_sub(v0).filter(|at| *at < width) {
                out[r * BLOCK + at] = 0.0;
            }
        }
    }

    /// Pass 4. `d_logits` is as pass 3 left it.
    #[allow(clippy::too_many_arguments)]
    fn input_gradient(
        &self,
        head: &[f32],
        d_logits: &[u32],
        backward: Panels,
        target: &[f32],
        dy: &mut [f32],
        tile: &mut [f32],
        per_thread: usize,
    ) {
        let (core, n, d) = (self.core, self.rows.len(), self.d);
        let row_blocks = n.div_ceil(DY_ROWS);
        // Narrow enough that every thread gets some tasks.
        let panels = backward.layout.num_panels();
        let wanted = panels.div_ceil((4 * par::threads()).div_ceil(row_blocks));
        let step = wanted.clamp((LEAST_COLS / core.nr).max(1), (MOST_COLS / core.nr).max(1));
        let pieces = panels.div_ceil(step);
        let dy = Shared::new(dy);
        par::tasks_with(row_blocks * pieces, tile, per_thread, |task, tile| {
            let (r0, p0) = (task / pieces * DY_ROWS, task % pieces * step);
            let (m, j0) = (DY_ROWS.min(n - r0), p0 * core.nr);
            let columns = (step * core.nr).min(d - j0);
            // AMX keeps a tile of rows while panels pass by, the others a panel while rows do.
            let at_once = if core.left_lies_in_rows() { MOST_COLS } else { core.nr };
            let calls = columns.div_ceil(at_once);
            // MC of the task's rows in a block of the vocabulary.
            let left = |b: usize, i: usize| {
                let slots = backward.layout.block_slots(b);
                &d_logits[b * n * BLOCK + (r0 + i) * slots..][..MC.min(m - i) * slots]
            };
            for b in 0..backward.layout.num_blocks() {
                let slots = backward.layout.block_slots(b);
                for i in (0..m).step_by(MC) {
                    // Between panels a part of the rows to come is brought nearer.
                    let next = match (i + MC < m, b + 1 < backward.layout.num_blocks()) {
                        (true, _) => left(b, i + MC),
                        (false, true) => left(b + 1, 0),
                        (false, false) => &[],
                    };
                    let mut ahead = next.chunks(next.len().div_ceil(calls).max(1));
                    let a = Left::rows(left(b, i), slots);
                    for j in (0..columns).step_by(at_once) {
                        prefetch(ahead.next().unwrap_or_default());
                        let (panel, width) = (backward.from(b, p0 + j / core.nr), at_once.min(columns - j));
                        let c = &mut tile[i * columns + j..];
                        multiply_block(core, MC.min(m - i), width, slots, a, panel, c, columns, b > 0);
                    }
                }
            }
            for (r, tile) in tile.chunks(columns).enumerate().take(m) {
                let label = &head[self.label(r0 + r) * d + j0..][..columns];
                // SAFETY: these columns of these rows are this task's.
                let dy = unsafe { dy.range(self.rows[r0 + r] as usize * d + j0, columns) };
                dy.copy_from_slice(tile);
                vectorised(
                    #[inline(always)]
                    || add_scaled(dy, target[r0 + r], label),
                );
            }
        });
    }
}

/// Asks for `x` to be brought into the second-level cache.
#[inline(always)]
fn prefetch<T>(x: &[T]) {
    const LINE: usize = 64;
    for line in x.chunks(LINE / size_of::<T>()) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: part of every x86-64; touches nothing that the program can see.
        unsafe {
            use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
            _mm_prefetch::<_MM_HINT_T1>(line.as_ptr().cast());
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = line;
    }
}

#[inline(always)]
fn add_scaled(y: &mut [f32], by: f32, x: &[f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y += by * x;
    }
}

/// Turns numbers into `exp(z - top)`, `top` being the largest; `top` and the sum of these, in sixteen interleaved lanes.
#[inline(always)]
fn exponentials(z: &mut [f32]) -> (f32, f32) {
    const LANES: usize = 16;
    let (whole, tail) = z.as_chunks_mut::<LANES>();
    let mut tops = [f32::NEG_INFINITY; LANES];
    for z in whole.iter() {
        for l in 0..LANES {
            tops[l] = larger(tops[l], z[l]);
        }
    }
    for (top, z) in tops.iter_mut().zip(tail.iter()) {
        *top = larger(*top, *z);
    }
    let mut top = tops[0];
    for other in &tops[1..] {
        top = larger(top, *other);
    }
    let mut sums = [0f32; LANES];
    for z in whole.iter_mut() {
        for l in 0..LANES {
            z[l] = exp_of_negative(z[l] - top);
            sums[l] += z[l];
        }
    }
    for (sum, z) in sums.iter_mut().zip(tail) {
        *z = exp_of_negative(*z - top);
        *sum += *z;
    }
    let mut width = LANES / 2;
    while width > 0 {
        for l in 0..width {
            sums[l] += sums[l + width];
        }
        width /= 2;
    }
    (top, sums[0])
}

#[cfg(test)]
#[path = "head_tests.rs"]
mod tests;
