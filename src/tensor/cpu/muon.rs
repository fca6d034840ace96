//! Muon: momentum, the nearest (semi-)orthogonal matrix by Newton-Schulz, decay, update (spec 3.3).
//!
//! With X the update, scaled to norm 1 and turned so that it is `[m, n]`, m <= n, a step is
//! `X <- a X + (b A + c A^2) X`, `A = X Xᵀ`. Two forms, in multiplications of a step:
//!
//! * *plain*, as written: `A` and `A^2` are symmetric, so only the tiles on and below the diagonal are computed and the others
//!   are their mirror images: `m^2 n / 2 + m^3 / 2 + m^2 n`;
//! * *Gram*: `s` steps on `[m, m]` matrices alone, then one product with X. All of them are polynomials in the first A, so
//!   they commute and every product is symmetric:
//!   `P = a I + b A + c A^2;  Q <- P Q;  A <- (A P) P`, at the end `X <- Q X`.
//!
//! The Gram form squares the condition of X: rounding errors of A in directions where X is small grow with each step. A new
//! start from X now and then holds them down; see `segments`. Measured against the plain form in f64, singular values spread
//! over 1e-4..1: plain f32 4e-6, five steps at one stretch 1.5e-4, three and two 7e-6.
//!
//! X is never transposed: a wide matrix is multiplied from the left, a tall one (`Xᵀ` as it lies) from the right.
//!
//! Matrices are tasks, long ones first; those too large to have all they need once a thread are taken one by one, with tasks
//! inside. No number depends on which, nor on the count of threads.

use super::level::{Level, vectorised};
#[cfg(target_arch = "x86_64")]
use super::packed::turn;
use super::packed::{
    Core, Format, KC, Layout, Left, MC, Panels, Source, as_slots, as_slots_mut, multiply_block, multiply_block_at, pack,
    pack_unit,
};
use super::par::{self, Shared};
use super::scratch::aligned;
use crate::tensor::backend::MuonStep;

/// Quintic whose iterates come near 1 fast and stay near it.
const A: f32 = 3.4445;
const B: f32 = -4.7750;
const C: f32 = 2.0315;
/// Smallest norm that is divided by.
const EPS: f32 = 1e-7;
/// Numbers of a matrix that a single task still takes: its scratch, three to seven times as much, exists once a thread.
const ONE_TASK: usize = 1 << 20;
/// Columns that a task of a product takes: their packed block stays in the second-level cache.
const COLUMNS: usize = 128;
/// Numbers of an elementwise task, at least, and such tasks of a matrix, at most.
const CHUNK: usize = 1 << 14;
const CHUNKS: usize = 256;

/// One matrix, or some of one shape below each other.
pub struct Item<'a> {
    /// `[rows, cols]`, all three.
    pub weight: &'a mut [f32],
    pub grad: &'a [f32],
    pub momentum: &'a mut [f32],
    pub rows: usize,
    pub cols: usize,
    /// Equal blocks of rows that are orthogonalised apart.
    pub row_blocks: usize,
}

/// A block of rows of an item.
struct Job<'a> {
    weight: &'a mut [f32],
    grad: &'a [f32],
    momentum: &'a mut [f32],
    shape: Shape,
}

/// `M <- mu M + (1 - mu) G; U = (1 - mu) G + mu M; W <- (1 - lr wd) W - lr 0.2 sqrt(max(rows, cols)) NS(U)` for each block of
/// rows, G being `grad * step.grad_scale`. `scratch` holds at least `scratch_len` numbers, whatever they are.
pub fn muon(core: &Core, items: &mut [Item], step: MuonStep, scratch: &mut [f32]) {
    let mut jobs = Vec::with_capacity(items.iter().map(|item| item.row_blocks).sum());
    for item in items {
        let (rows, cols) = (item.rows / item.row_blocks, item.cols);
        let len = item.rows * cols;
        assert_eq!(rows * item.row_blocks, item.rows, "{} rows in {} equal blocks", item.rows, item.row_blocks);
        assert!(
            [item.weight.len(), item.grad.len(), item.momentum.len()] == [len; 3],
            "weight, gradient and momentum differ in size"
        );
        if len == 0 {
            continue;
        }
        let shape = Shape::new(rows, cols);
        let states = item.grad.chunks(rows * cols).zip(item.momentum.chunks_mut(rows * cols));
        for (weight, (grad, momentum)) in item.weight.chunks_mut(rows * cols).zip(states) {
            jobs.push(Job { weight, grad, momentum, shape });
        }
    }
    // Stable, so equal shapes stay in order.
    jobs.sort_by_key(|job| std::cmp::Reverse(job.shape.cost(core, step.ns_steps)));
    let (mut large, mut small): (Vec<Job>, Vec<Job>) = jobs.into_iter().partition(|job| job.shape.is_large());
    for job in &mut large {
        Work { core, shape: job.shape, parallel: true }.run(job, step, scratch);
    }
    let per_thread = small.iter().map(|job| Work { core, shape: job.shape, parallel: false }.scratch_len()).max().unwrap_or(0);
    let (n, jobs) = (small.len(), Shared::new(&mut small));
    par::tasks_with(n, scratch, per_thread, |i, scratch| {
        // SAFETY: one job a task.
        let job = &mut unsafe { jobs.range(i, 1) }[0];
        Work { core, shape: job.shape, parallel: false }.run(job, step, scratch);
    });
}

/// Scratch (f32 numbers) of `muon` for items whose blocks have these shapes (rows of a block, columns), on this pool's threads.
pub fn scratch_len(core: &Core, shapes: impl Iterator<Item = (usize, usize)>) -> usize {
    let (mut large, mut small) = (0, 0);
    for shape in shapes.filter(|(rows, cols)| rows * cols > 0).map(|(rows, cols)| Shape::new(rows, cols)) {
        let parallel = shape.is_large();
        let len = Work { core, shape, parallel }.scratch_len();
        let most = if parallel { &mut large } else { &mut small };
        *most = len.max(*most);
    }
    large.max(small * par::threads())
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    Plain,
    Gram,
}

#[derive(Debug, Clone, Copy)]
struct Shape {
    /// The shorter and the longer side.
    m: usize,
    n: usize,
    /// Lies in memory as `[n, m]`.
    tall: bool,
}

impl Shape {
    fn new(rows: usize, cols: usize) -> Self {
        // Square counts as tall: its panels are copied from rows, not turned.
        Self { m: rows.min(cols), n: rows.max(cols), tall: rows >= cols }
    }

    fn is_large(&self) -> bool {
        self.m * self.n > ONE_TASK
    }

    /// Multiplications of one form, times two: of the symmetric products only half are done.
    fn form_cost(&self, form: Form, steps: usize) -> usize {
        let (m, n) = (self.m, self.n);
        match form {
            Form::Plain => steps * (3 * m * m * n + m * m * m),
            // Each segment of s steps: A, A^2 and two products for the next A (but for the last step), Q (but for the
            // first), and Q X.
            Form::Gram => segments(steps).map(|s| 3 * m * m * n + (4 * s - 3) * m * m * m).sum(),
        }
    }

    /// The cheaper form: Gram as soon as n > m. Only f32 products are exact enough for it.
    fn form(&self, format: Format, steps: usize) -> Form {
        let gram = format == Format::F32 && self.form_cost(Form::Gram, steps) < self.form_cost(Form::Plain, steps);
        if gram { Form::Gram } else { Form::Plain }
    }

    fn cost(&self, core: &Core, steps: usize) -> usize {
        self.form_cost(self.form(core.format, steps), steps)
    }
}

/// Steps of the Gram form between two starts from X: three, then two at a time. The first steps are the ones that blow up
/// small directions, but they are also furthest from where their errors count.
fn segments(steps: usize) -> impl Iterator<Item = usize> {
    let first = steps.min(3);
    let rest = steps - first;
    (first > 0).then_some(first).into_iter().chain(std::iter::repeat_n(2, rest / 2)).chain((!rest.is_multiple_of(2)).then_some(1))
}

/// What a symmetric product becomes before it is mirrored.
#[derive(Clone, Copy)]
enum Then<'a> {
    Itself,
    /// `identity I + B of + C product`.
    Polynomial {
        identity: f32,
        of: &'a [f32],
    },
}

/// A packed symmetric matrix, as each side of a product wants it.
#[derive(Clone, Copy)]
struct Operand<'a> {
    left: &'a [u32],
    right: &'a [u32],
}

impl<'a> Operand<'a> {
    fn same(packed: &'a [u32]) -> Self {
        Self { left: packed, right: packed }
    }
}

/// The calculation for one matrix.
///
/// Symmetric `[m, m]` matrices lie in f32 as packed right operands do (`Layout`): panels of `nr` columns in blocks of `KC` rows,
/// so that `nr` rows of a panel are one contiguous tile. Column i of a panel is row i of the matrix: the same panels serve
/// as left operand (unless the core wants rows), and with format `F32` need no packing at all.
#[derive(Clone, Copy)]
struct Work<'a> {
    core: &'a Core,
    shape: Shape,
    /// Tasks within this matrix.
    parallel: bool,
}

impl Work<'_> {
    /// Layout of Xᵀ `[n, m]`, whose product with itself is A.
    fn gram_layout(&self) -> Layout {
        Layout::new(self.core, self.shape.n, self.shape.m)
    }

    /// Layout of X `[m, n]` as a right operand.
    fn x_layout(&self) -> Layout {
        Layout::new(self.core, self.shape.m, self.shape.n)
    }

    /// Layout of a packed `[m, m]` operand.
    fn layout(&self) -> Layout {
        Layout::new(self.core, self.shape.m, self.shape.m)
    }

    /// Layout of an `[m, m]` matrix in f32.
    fn f32_layout(&self) -> Layout {
        let mut core = *self.core;
        core.format = Format::F32;
        Layout::new(&core, self.shape.m, self.shape.m)
    }

    /// Of X packed: panels, and after them rows where those are wanted.
    fn panels_len(&self) -> usize {
        let right = if self.shape.tall { 0 } else { self.x_layout().len() };
        let gram = self.gram_layout().len();
        gram.max(right) + if self.core.left_lies_in_rows() { gram } else { 0 }
    }

    /// Of an `[m, m]` matrix, in f32 or packed.
    fn square_len(&self) -> usize {
        let sides = if self.core.left_lies_in_rows() { 2 } else { 1 };
        self.f32_layout().len().max(sides * self.layout().len())
    }

    fn squares(&self) -> usize {
        // Whatever the steps: they are not known when the scratch is made.
        if self.core.format == Format::F32 { if self.shape.n > self.shape.m { 4 } else { 2 } } else { 3 }
    }

    fn thread_len(&self) -> usize {
        if self.shape.tall { aligned(MC * self.core.slots(self.shape.m)) } else { 0 }
    }

    fn scratch_len(&self) -> usize {
        let threads = if self.parallel { par::threads() } else { 1 };
        let Shape { m, n, .. } = self.shape;
        aligned(m * n) + aligned(self.panels_len()) + self.squares() * aligned(self.square_len()) + threads * self.thread_len()
    }

    fn tasks(&self, n: usize, scratch: &mut [f32], f: impl Fn(usize, &mut [f32]) + Sync) {
        let per_thread = self.thread_len();
        if self.parallel {
            par::tasks_with(n, scratch, per_thread, f);
        } else {
            (0..n).for_each(|i| f(i, &mut scratch[..per_thread]));
        }
    }

    fn run(&self, job: &mut Job, step: MuonStep, scratch: &mut [f32]) {
        let Shape { m, n, .. } = self.shape;
        let (x, rest) = scratch.split_at_mut(aligned(m * n));
        let x = &mut x[..m * n];
        let norm = self.start(job, step, x);
        let inverse = 1.0 / norm.max(EPS);
        let chunk = chunk_len(m * n);
        let chunks = (m * n).div_ceil(chunk);
        {
            let x = Shared::new(&mut *x);
            self.tasks(chunks, rest, |i, _| {
                // SAFETY: one chunk a task.
                let x = unsafe { x.range(i * chunk, chunk.min(m * n - i * chunk)) };
                vectorised(
                    #[inline(always)]
                    || scale(x, inverse),
                );
            });
        }
        self.newton_schulz(x, step.ns_steps, rest);
        let keep = 1.0 - step.lr * step.weight_decay;
        let by = step.lr * 0.2 * (n as f32).sqrt();
        let weight = Shared::new(&mut *job.weight);
        self.tasks(chunks, rest, |i, _| {
            let x = &x[i * chunk..][..chunk.min(m * n - i * chunk)];
            // SAFETY: one chunk a task.
            let weight = unsafe { weight.range(i * chunk, x.len()) };
            vectorised(
                #[inline(always)]
                || {
                    for (weight, x) in weight.iter_mut().zip(x) {
                        *weight = *weight * keep - by * x;
                    }
                },
            );
        });
    }

    /// Momentum and its mix with the gradient, which goes to `x`; the norm of that.
    fn start(&self, job: &mut Job, step: MuonStep, x: &mut [f32]) -> f32 {
        let (len, chunk) = (x.len(), chunk_len(x.len()));
        let mut squares = [0f64; CHUNKS];
        let (x, momentum, out) = (Shared::new(x), Shared::new(&mut *job.momentum), Shared::new(&mut squares));
        let grad = job.grad;
        let one = |i: usize| {
            let range = i * chunk..len.min((i + 1) * chunk);
            let grad = &grad[range.clone()];
            // SAFETY (of all three): one chunk a task.
            let (x, momentum) = unsafe { (x.range(range.start, range.len()), momentum.range(range.start, range.len())) };
            let out = unsafe { out.range(i, 1) };
            vectorised(
                #[inline(always)]
                || out[0] = mix(step.momentum, step.grad_scale, grad, momentum, x),
            );
        };
        let chunks = len.div_ceil(chunk);
        if self.parallel {
            par::tasks(chunks, one)
        } else {
            (0..chunks).for_each(one)
        }
        squares.iter().sum::<f64>().sqrt() as f32
    }

    fn newton_schulz(&self, x: &mut [f32], steps: usize, scratch: &mut [f32]) {
        let square = self.square_len();
        let (panels, scratch) = scratch.split_at_mut(aligned(self.panels_len()));
        let panels = as_slots_mut(panels);
        let (squares, threads) = scratch.split_at_mut(self.squares() * aligned(square));
        let mut squares = squares.chunks_mut(aligned(square)).map(|s| &mut s[..square]);
        let mut next = || squares.next().unwrap_or_default();
        match self.shape.form(self.core.format, steps) {
            Form::Plain => {
                let (a, b, packed) = (next(), next(), next());
                for _ in 0..steps {
                    self.gram(x, panels, a, threads);
                    let of = self.operand(a, packed, [true; 2], threads);
                    self.symmetric(self.layout(), of.left, of.right, b, Then::Polynomial { identity: 0.0, of: a }, threads);
                    let sides = [!self.shape.tall, self.shape.tall];
                    self.apply(self.operand(b, packed, sides, threads), Some(A), x, panels, threads);
                }
            }
            Form::Gram => {
                let (a, p, mut s, mut q) = (next(), next(), next(), next());
                let layout = self.layout();
                for steps in segments(steps) {
                    self.gram(x, panels, a, threads);
                    for step in 0..steps {
                        let first = step == 0;
                        let (of, out) = (as_slots(a), if first { &mut *q } else { &mut *p });
                        self.symmetric(layout, of, of, out, Then::Polynomial { identity: A, of: a }, threads);
                        let p = if first { &*q } else { &*p };
                        if step + 1 < steps {
                            self.symmetric(layout, as_slots(a), as_slots(p), s, Then::Itself, threads);
                            self.symmetric(layout, as_slots(s), as_slots(p), a, Then::Itself, threads);
                        }
                        if !first {
                            self.symmetric(layout, as_slots(p), as_slots(q), s, Then::Itself, threads);
                            std::mem::swap(&mut s, &mut q);
                        }
                    }
                    self.apply(Operand::same(as_slots(q)), None, x, panels, threads);
                }
            }
        }
    }

    /// `a = x xᵀ`; `panels` is room for x packed.
    fn gram(&self, x: &[f32], panels: &mut [u32], a: &mut [f32], threads: &mut [f32]) {
        let (layout, Shape { m, n, tall }) = (self.gram_layout(), self.shape);
        let source = if tall { Source::rows(x, m) } else { Source::transposed(x, n) };
        let (panels, rows) = panels.split_at_mut(layout.len());
        self.pack(layout, source, panels, threads);
        let left = if self.core.left_lies_in_rows() {
            self.pack_left(layout, source, rows, threads);
            &*rows
        } else {
            &*panels
        };
        self.symmetric(layout, left, panels, a, Then::Itself, threads);
    }

    fn pack(&self, layout: Layout, source: Source, out: &mut [u32], threads: &mut [f32]) {
        let out = Shared::new(out);
        self.tasks(layout.num_units(), threads, |unit, _| {
            let (at, len) = layout.unit(unit);
            // SAFETY: units do not overlap.
            pack_unit(self.core, layout, source, unit, unsafe { out.range(at, len) });
        });
    }

    /// As `pack`, for the left side: tiles of rows, each where the panel of the same columns would lie.
    fn pack_left(&self, layout: Layout, source: Source, out: &mut [u32], threads: &mut [f32]) {
        let out = Shared::new(out);
        self.tasks(layout.num_units(), threads, |unit, _| {
            let ((at, len), nr) = (layout.unit(unit), self.core.nr);
            let (b, j0) = (unit / layout.num_panels(), unit % layout.num_panels() * nr);
            let ((k0, k), slots) = (layout.block(b), layout.block_slots(b));
            // SAFETY: units do not overlap.
            let out = unsafe { out.range(at, len) };
            pack::left_panel(self.core, source.from(k0, j0), k, nr.min(layout.n - j0), out, nr, slots, 0);
        });
    }

    /// A symmetric matrix in the format of the products, for the sides of one that are wanted (left, right).
    fn operand<'a>(&self, x: &'a [f32], packed: &'a mut [f32], sides: [bool; 2], threads: &mut [f32]) -> Operand<'a> {
        if self.core.format == Format::F32 {
            return Operand::same(as_slots(x));
        }
        let (from, to, nr, m) = (self.f32_layout(), self.layout(), self.core.nr, self.shape.m);
        let (panels, rows) = as_slots_mut(packed).split_at_mut(to.len());
        let (num_panels, in_rows) = (to.num_panels(), self.core.left_lies_in_rows());
        if sides[1] || !in_rows {
            let out = Shared::new(&mut *panels);
            self.tasks(to.num_units(), threads, |unit, _| {
                let ((source, len), (at, slots)) = (from.unit(unit), to.unit(unit));
                // SAFETY: units do not overlap.
                let out = unsafe { out.range(at, slots) };
                pack::panel(self.core.format, Source::rows(&x[source..source + len], nr), len / nr, nr, out, nr);
            });
        }
        if !(sides[0] && in_rows) {
            return Operand::same(panels);
        }
        assert!(KC.is_multiple_of(nr), "tiles of {nr} rows must not cross blocks of {KC}");
        let out = Shared::new(&mut *rows);
        self.tasks(to.num_units(), threads, |unit, _| {
            // Tile i of the rows, as far as the columns of block b: a row of a panel is a piece of one of the matrix.
            let (b, i) = (unit / num_panels, unit % num_panels);
            let ((at, len), (k0, k), slots) = (to.unit(unit), to.block(b), to.block_slots(b));
            // SAFETY: units do not overlap.
            let out = unsafe { out.range(at, len) };
            for j in (0..k).step_by(nr) {
                let tile = &x[from.offset(i * nr / KC, (k0 + j) / nr) + i * nr % KC * nr..];
                let row = |r: usize| &tile[r * nr..];
                let out = &mut out[self.core.slots(j)..];
                pack::rows_at(self.core.format, nr.min(m - i * nr), nr.min(k - j), row, out, slots);
            }
        });
        Operand { left: rows, right: panels }
    }

    /// `out = leftᵀ right`, which is known to be symmetric: both are a `[k, m]` matrix, as `pack_left` and `pack` leave it (the same,
    /// unless the left one has to lie in rows). Tiles on and below the diagonal are computed, completed, and copied across it.
    fn symmetric(&self, layout: Layout, left: &[u32], right: &[u32], out: &mut [f32], then: Then, threads: &mut [f32]) {
        let (core, m, nr) = (self.core, self.shape.m, self.core.nr);
        assert!(KC.is_multiple_of(nr), "tiles of {nr} rows must not cross blocks of {KC}");
        let place = self.f32_layout();
        let (left, right) = (Panels::new(layout, left), Panels::new(layout, right));
        let (panels, group) = (layout.num_panels(), (COLUMNS / nr).max(1));
        // Tiles that are below each other in a block of the result, or such that their panels stay in the cache.
        let rows = if core.left_lies_in_rows() { KC / nr } else { (MC / nr).max(1) };
        let height = |i: usize| nr.min(m - i * nr);
        // Where tile (i, j) begins.
        let at = |i: usize, j: usize| place.offset(i * nr / KC, j) + i * nr % KC * nr;
        let out = Shared::new(out);
        // SAFETY: a task touches tiles (i, j) and (j, i) with j of its own group and i >= j; no other task does.
        let tile = |i: usize, j: usize| unsafe { out.range(at(i, j), height(i) * nr) };
        self.tasks(panels.div_ceil(group), threads, |task, _| {
            let columns = task * group..panels.min((task + 1) * group);
            for k in 0..layout.num_blocks() {
                let slots = layout.block_slots(k);
                for i0 in (columns.start / rows * rows..panels).step_by(rows) {
                    for j in columns.clone() {
                        let b = right.from(k, j);
                        let i = i0.max(j)..panels.min(i0 + rows);
                        if core.left_lies_in_rows() {
                            // Tiles below each other, within a block of the result, are one product.
                            let m = i.clone().map(height).sum();
                            let a = Left::panel(core, left.from(k, i.start.min(panels - 1)), nr, slots);
                            // SAFETY: as of `tile`.
                            let c = unsafe { out.range(at(i.start, j), m * nr) };
                            multiply_block(core, m, height(j), slots, a, b, c, nr, k > 0);
                            continue;
                        }
                        for i in i {
                            let a = Left::panel(core, left.from(k, i), nr, slots);
                            multiply_block(core, height(i), height(j), slots, a, b, tile(i, j), nr, k > 0);
                        }
                    }
                }
            }
            vectorised(
                #[inline(always)]
                || {
                    for j in columns {
                        for i in j..panels {
                            let lower = tile(i, j);
                            if let Then::Polynomial { identity, of } = then {
                                for (out, x) in lower.iter_mut().zip(&of[at(i, j)..]) {
                                    *out = C * *out + B * x;
                                }
                                if i == j {
                                    lower.iter_mut().step_by(nr + 1).for_each(|x| *x += identity);
                                }
                            }
                            if i == j {
                                mirror_within(lower, nr);
                            } else {
                                transpose_tile(lower, height(i), tile(j, i), nr);
                            }
                        }
                    }
                },
            );
        });
    }

    /// `x <- p x`, or `x <- keep x + p x`, with p packed and symmetric. `panels` is room for x packed.
    fn apply(&self, p: Operand, keep: Option<f32>, x: &mut [f32], panels: &mut [u32], threads: &mut [f32]) {
        let side = |side| Panels::new(self.layout(), side);
        if self.shape.tall {
            self.apply_right(side(p.right), keep, x, threads)
        } else {
            self.apply_left(side(p.left), keep, x, panels, threads)
        }
    }

    /// x is `[n, m]`: some rows a task, which are packed before they are overwritten.
    fn apply_right(&self, p: Panels, keep: Option<f32>, x: &mut [f32], threads: &mut [f32]) {
        let (core, Shape { m, n, .. }) = (self.core, self.shape);
        let x = Shared::new(x);
        self.tasks(n.div_ceil(MC), threads, |task, left| {
            let rows = MC.min(n - task * MC);
            // SAFETY: these rows are this task's.
            let x = unsafe { x.range(task * MC * m, rows * m) };
            let left = as_slots_mut(left);
            for k in 0..p.layout.num_blocks() {
                let ((k0, len), slots) = (p.layout.block(k), p.layout.block_slots(k));
                pack::rows(
                    core.format,
                    rows,
                    len,
                    |r| &x[r * m + k0..][..len],
                    &mut left[rows * core.slots(k0)..][..rows * slots],
                );
            }
            if let Some(keep) = keep {
                vectorised(
                    #[inline(always)]
                    || scale(x, keep),
                );
            }
            for k in 0..p.layout.num_blocks() {
                let slots = p.layout.block_slots(k);
                let left = Left::rows(&left[rows * core.slots(p.layout.block(k).0)..][..rows * slots], slots);
                multiply_block(core, rows, m, slots, left, p.from(k, 0), x, m, keep.is_some() || k > 0);
            }
        });
    }

    /// x is `[m, n]`: all of it is packed, then some columns a task.
    fn apply_left(&self, p: Panels, keep: Option<f32>, x: &mut [f32], panels: &mut [u32], threads: &mut [f32]) {
        let (core, layout, Shape { m, n, .. }) = (self.core, self.x_layout(), self.shape);
        let nr = core.nr;
        self.pack(layout, Source::rows(x, n), panels, threads);
        let right = Panels::new(layout, panels);
        let (row_panels, group, rows) = (p.layout.num_panels(), (COLUMNS / nr).max(1), (MC / nr).max(1));
        // Where tiles of p follow each other by rows, they are one product.
        let at_once = if core.left_lies_in_rows() { rows } else { 1 };
        let x = Shared::new(x);
        self.tasks(layout.num_panels().div_ceil(group), threads, |task, _| {
            let columns = task * group..layout.num_panels().min((task + 1) * group);
            let j0 = columns.start * nr;
            let width = n.min(columns.end * nr) - j0;
            if let Some(keep) = keep {
                for i in 0..m {
                    // SAFETY (here and below): these columns are this task's.
                    let row = unsafe { x.range(i * n + j0, width) };
                    vectorised(
                        #[inline(always)]
                        || scale(row, keep),
                    );
                }
            }
            for k in 0..layout.num_blocks() {
                let slots = layout.block_slots(k);
                for i0 in (0..row_panels).step_by(rows) {
                    for j in columns.clone() {
                        for i in (i0..row_panels.min(i0 + rows)).step_by(at_once) {
                            let a = Left::panel(core, p.from(k, i), nr, slots);
                            let (height, width) = ((at_once * nr).min(m - i * nr), nr.min(n - j * nr));
                            let accumulate = keep.is_some() || k > 0;
                            // SAFETY: the tile lies inside x; see above.
                            unsafe {
                                let c = x.at(i * nr * n + j * nr);
                                multiply_block_at(core, height, width, slots, a, right.from(k, j), c, n, accumulate);
                            }
                        }
                    }
                }
            }
        });
    }
}

/// Numbers of an elementwise task on `len`: a function of `len` only, since sums of squares are grouped by it.
fn chunk_len(len: usize) -> usize {
    CHUNK.max(len.div_ceil(CHUNKS))
}

/// Momentum; its mix with the gradient, in `x`; the sum of squares of that, in eight interleaved lanes of f64.
#[inline(always)]
fn mix(mu: f32, grad_scale: f32, grad: &[f32], momentum: &mut [f32], x: &mut [f32]) -> f64 {
    const LANES: usize = 8;
    let one = |g: f32, m: &mut f32, x: &mut f32| {
        let g = g * grad_scale;
        *m = mu * *m + (1.0 - mu) * g;
        *x = g + mu * (*m - g);
        *x as f64 * *x as f64
    };
    let mut lanes = [0f64; LANES];
    let ((grad, grad_tail), (momentum, momentum_tail)) = (grad.as_chunks::<LANES>(), momentum.as_chunks_mut::<LANES>());
    let (x, x_tail) = x.as_chunks_mut::<LANES>();
    for ((g, m), x) in grad.iter().zip(momentum).zip(x) {
        for l in 0..LANES {
            lanes[l] += one(g[l], &mut m[l], &mut x[l]);
        }
    }
    for ((g, m), (x, lane)) in grad_tail.iter().zip(momentum_tail).zip(x_tail.iter_mut().zip(&mut lanes)) {
        *lane += one(*g, m, x);
    }
    lanes.iter().sum()
}

#[inline(always)]
fn scale(x: &mut [f32], by: f32) {
    for x in x {
        *x *= by;
    }
}

/// Copies what is below the diagonal of a tile of rows of `width` above it.
#[inline(always)]
fn mirror_within(tile: &mut [f32], width: usize) {
    let rows = tile.len() / width;
    for i in 1..rows {
        for j in 0..i {
            tile[j * width + i] = tile[i * width + j];
        }
    }
}

/// `out[j][i] = tile[i][j]` for `rows` rows of `width`; rows of `out` are `width` long, too.
#[inline(always)]
fn transpose_tile(tile: &[f32], rows: usize, out: &mut [f32], width: usize) {
    #[cfg(target_arch = "x86_64")]
    if Level::current() >= Level::Avx512 {
        assert!(rows * width <= tile.len() && (width - 1) * width + rows <= out.len());
        // SAFETY: the assertion; the processor has the instructions.
        return unsafe { turn(tile.as_ptr().cast(), width, width, rows, out.as_mut_ptr().cast(), width) };
    }
    const SIDE: usize = 4;
    let whole = rows / SIDE * SIDE;
    for i in (0..whole).step_by(SIDE) {
        for j in (0..width).step_by(SIDE) {
            transpose4(&tile[i * width + j..][..3 * width + SIDE], &mut out[j * width + i..][..3 * width + SIDE], width);
        }
    }
    for i in whole..rows {
        for j in 0..width {
            out[j * width + i] = tile[i * width + j];
        }
    }
}

/// A square of four by four; `width` numbers between rows.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn transpose4(x: &[f32], out: &mut [f32], width: usize) {
    use std::arch::x86_64::*;
    assert!(x.len() >= 3 * width + 4 && out.len() >= 3 * width + 4);
    // SAFETY: four numbers from each of four rows, inside both by the assertion; the instructions are part of every x86-64.
    unsafe {
        let load = |r: usize| _mm_loadu_ps(x.as_ptr().add(r * width));
        let (mut a, mut b, mut c, mut d) = (load(0), load(1), load(2), load(3));
        _MM_TRANSPOSE4_PS(&mut a, &mut b, &mut c, &mut d);
        for (r, row) in [a, b, c, d].into_iter().enumerate() {
            _mm_storeu_ps(out.as_mut_ptr().add(r * width), row);
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
fn transpose4(x: &[f32], out: &mut [f32], width: usize) {
    for i in 0..4 {
        for j in 0..4 {
            out[j * width + i] = x[i * width + j];
        }
    }
}

#[cfg(test)]
#[path = "muon_tests.rs"]
mod tests;
