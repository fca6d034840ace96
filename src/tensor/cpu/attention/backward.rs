//! Backward: probabilities recomputed tile by tile from the log-sum-exp.
//!
//! A unit's sequence is cut into segments of `L` rows. A task takes the keys of one segment and the columns of one, and adds to
//! the gradients of both. Wave d holds the pairs (keys of segment g, columns of segment g + d): no two of them share a
//! segment of keys or of columns, so a wave runs in parallel without partial sums, and the waves, one after the other, fix the
//! order in which every gradient is summed. `L` depends on the shape alone.
//!
//! Of chunks, a segment has all of its keys, and the columns of those of its rows that are here (perhaps none).

use super::super::level::vectorised;
use super::super::math::lane_sum;
use super::super::packed::pack::{self, Source};
use super::super::packed::{Core, Format, Left, as_slots, as_slots_mut, multiply_block, multiply_block_at};
use super::super::par::{self, Shared};
use super::super::rows::Rows;
use super::super::scratch::cut;
use super::tiles::{STEP, hide, probabilities, score_gradients};
use super::{COLS, Dims, Sight, Span, Unit, gather, needs_mask, right_slots, visible};
use crate::tensor::backend::{AttentionShape, Qkv};

/// Keys of a block; even, for pairs of numbers.
const KEYS: usize = 96;
/// Segments are multiples of whole blocks of keys and of columns.
const SEGMENT: usize = 192;
/// Tasks that the first wave should have at least: enough that threads rarely wait for the last one.
const TASKS: usize = 64;

/// Rows of a segment.
fn segment(n: &Dims) -> usize {
    n.rows.div_ceil(TASKS.div_ceil(n.units.max(1))).next_multiple_of(SEGMENT)
}

/// Slots of a unit's packed keys and values, and of one block of its keys as a right operand.
fn packed_slots(core: &Core, n: &Dims) -> (usize, usize) {
    (n.keys * core.slots(n.head), right_slots(core, KEYS, n.head))
}

fn per_thread(core: &Core, n: &Dims) -> usize {
    let tile = KEYS * COLS;
    let packed_tiles = if core.format == Format::F32 { 0 } else { 3 * tile };
    2 * COLS * n.head + 2 * right_slots(core, n.head, COLS) + 2 * right_slots(core, COLS, n.head) + 2 * tile + packed_tiles
}

/// Numbers of scratch that `backward` needs.
pub fn backward_scratch(core: &Core, rows: &Rows, shape: AttentionShape) -> usize {
    let n = Dims::new(rows, &shape);
    let (k, right) = packed_slots(core, &n);
    let shared = n.units * (2 * k + n.keys.div_ceil(KEYS) * right + n.columns) + rows.tokens();
    shared + par::threads() * per_thread(core, &n)
}

/// What a thread works in.
struct Work<'a> {
    /// Columns of queries or of output gradients, gathered: `[COLS, head]`.
    rows: &'a mut [f32],
    /// Queries and output gradients, packed: transposed, as `[head, COLS]`, and as `[COLS, head]`.
    q_across: &'a mut [u32],
    do_across: &'a mut [u32],
    q: &'a mut [u32],
    d_out: &'a mut [u32],
    /// Tiles `[KEYS, COLS]`: scores, then probabilities; gradients of the probabilities, then of the scores.
    p: &'a mut [f32],
    ds: &'a mut [f32],
    /// The tiles packed: pairs along the columns, and pairs along the keys. Empty where a tile is an operand as it stands.
    packed: &'a mut [u32],
    /// Gradients of the columns, `[COLS, head]`.
    dq: &'a mut [f32],
}

impl<'a> Work<'a> {
    fn new(core: &Core, n: &Dims, mut part: &'a mut [f32]) -> Self {
        let part = &mut part;
        Self {
            rows: cut(part, COLS * n.head),
            dq: cut(part, COLS * n.head),
            q_across: as_slots_mut(cut(part, right_slots(core, n.head, COLS))),
            do_across: as_slots_mut(cut(part, right_slots(core, n.head, COLS))),
            q: as_slots_mut(cut(part, right_slots(core, COLS, n.head))),
            d_out: as_slots_mut(cut(part, right_slots(core, COLS, n.head))),
            p: cut(part, KEYS * COLS),
            ds: cut(part, KEYS * COLS),
            packed: as_slots_mut(std::mem::take(part)),
        }
    }
}

/// What all tasks read. Packed parts are of all units, one after the other.
struct Operands<'a> {
    core: &'a Core,
    n: Dims,
    rows: &'a Rows,
    shape: AttentionShape,
    x: Qkv<&'a [f32]>,
    lse: &'a [f32],
    grad: &'a [f32],
    /// `[keys, slots(head)]`.
    k: &'a [u32],
    v: &'a [u32],
    /// Blocks of keys as right operands `[keys, head]`.
    k_right: &'a [u32],
    /// Sum of output times its gradient, for each column.
    delta: &'a [f32],
    /// What a row's scores are multiplied with: the scale, or 0 for a row with a single key, whose scores have no gradient.
    slope: &'a [f32],
}

/// Gradients of q, k and v, for `past` = 0, into `d`, from what `forward` was given and returned and the gradient of `out`.
///
/// A row that sees no key weighs every key of its sequence alike. Its scores have a gradient all the same, as in Hugging Face's
/// code, which hides keys by adding a huge negative number.
#[allow(clippy::too_many_arguments)]
pub fn backward(
    core: &Core,
    rows: &Rows,
    shape: AttentionShape,
    x: Qkv<&[f32]>,
    out: &[f32],
    lse: &[f32],
    d_out: &[f32],
    d: Qkv<&mut [f32]>,
    mut scratch: &mut [f32],
) {
    assert_eq!(rows.past, 0, "attention with a cache has no backward");
    let n = Dims::new(rows, &shape);
    let (k_slots, right) = packed_slots(core, &n);
    let k = as_slots_mut(cut(&mut scratch, n.units * k_slots));
    let v = as_slots_mut(cut(&mut scratch, n.units * k_slots));
    let k_right = as_slots_mut(cut(&mut scratch, n.units * n.keys.div_ceil(KEYS) * right));
    let delta = cut(&mut scratch, n.units * n.columns);
    let slope = cut(&mut scratch, rows.tokens());
    pack_operands(core, &n, x, k, v, k_right);
    output_sums(core, &n, out, d_out, delta);
    slopes(rows, &shape, &n, slope);
    let keys = rows.sequences() * n.keys * n.kv;
    assert!(d.k.len() == keys && d.v.len() == keys, "gradients of keys and values have the wrong size");
    let d = Qkv { q: Shared::new(zeroed(d.q)), k: Shared::new(zeroed(d.k)), v: Shared::new(zeroed(d.v)) };
    let o = Operands { core, n, rows, shape, x, lse, grad: d_out, k, v, k_right, delta, slope };

    let length = segment(&n);
    let segments = n.keys.div_ceil(length);
    let reach = |t: usize| (rows.position(t) / length).saturating_sub(visible(rows, &shape, t).0 / length);
    let waves = 1 + (0..rows.tokens()).map(reach).max().unwrap_or(0);
    for wave in 0..waves {
        par::tasks_with(n.units * (segments - wave), scratch, per_thread(core, &n), |i, part| {
            let mut work = Work::new(core, &n, part);
            let key0 = i / n.units * length;
            let keys = key0..n.keys.min(key0 + length);
            let row0 = key0 + wave * length;
            let [from, to] = [row0, row0 + length].map(|row| rows.rows_below(n.unit(i % n.units).sequence, row) * n.group);
            for c0 in (from..to).step_by(COLS) {
                let columns: [usize; COLS] = std::array::from_fn(|c| c0 + c);
                block(&o, i % n.units, &columns[..COLS.min(to - c0)], keys.clone(), false, &mut work, d);
            }
        });
    }
    par::tasks_with(n.units, scratch, per_thread(core, &n), |i, part| {
        let mut work = Work::new(core, &n, part);
        let (mut columns, mut count) = ([0; COLS], 0);
        for c in 0..n.columns {
            let (t, h) = n.place(n.unit(i), c);
            if lse[t * n.heads + h] == f32::INFINITY {
                columns[count] = c;
                count += 1;
            }
            if count == COLS || (count > 0 && c + 1 == n.columns) {
                block(&o, i, &columns[..count], 0..n.keys, true, &mut work, d);
                count = 0;
            }
        }
    });
}

fn zeroed(x: &mut [f32]) -> &mut [f32] {
    const CHUNK: usize = 1 << 16;
    let part = Shared::new(x);
    // SAFETY: chunks lie apart.
    par::chunks(x.len(), CHUNK, |at| unsafe { part.range(at.start, at.len()) }.fill(0.0));
    x
}

fn pack_operands(core: &Core, n: &Dims, x: Qkv<&[f32]>, k: &mut [u32], v: &mut [u32], k_right: &mut [u32]) {
    let (blocks, slots, (_, right)) = (n.keys.div_ceil(KEYS), core.slots(n.head), packed_slots(core, n));
    let (k, v, k_right) = (Shared::new(k), Shared::new(v), Shared::new(k_right));
    par::tasks(n.units * blocks, |i| {
        let (unit, key0) = (n.unit(i / blocks), i % blocks * KEYS);
        let keys = KEYS.min(n.keys - key0);
        let at = (i / blocks * n.keys + key0) * slots;
        // SAFETY: parts of different tasks lie apart.
        let (k, v, k_right) = unsafe { (k.range(at, keys * slots), v.range(at, keys * slots), k_right.range(i * right, right)) };
        pack::rows(core.format, keys, n.head, |r| &x.k[n.key_at(unit, key0 + r)..][..n.head], k);
        pack::rows(core.format, keys, n.head, |r| &x.v[n.key_at(unit, key0 + r)..][..n.head], v);
        let keys_at = Source::rows(&x.k[n.key_at(unit, key0)..], n.kv);
        pack::panels(core.format, keys_at, keys, n.head, core.nr, k_right);
    });
}

/// Sums of output times its gradient, the latter as products take it.
fn output_sums(core: &Core, n: &Dims, out: &[f32], d_out: &[f32], delta: &mut [f32]) {
    const CHUNK: usize = 256;
    let shared = Shared::new(delta);
    par::chunks(n.units * n.columns, CHUNK, |range| {
        // SAFETY: chunks lie apart.
        let delta = unsafe { shared.range(range.start, range.len()) };
        vectorised(
            #[inline(always)]
            || {
                for (i, delta) in range.zip(delta) {
                    let at = n.query_at(n.unit(i / n.columns), i % n.columns);
                    let (out, d_out) = (&out[at..][..n.head], &d_out[at..][..n.head]);
                    *delta = lane_sum(n.head, |i| out[i] * pack::as_multiplied(core.format, d_out[i]));
                }
            },
        );
    });
}

fn slopes(rows: &Rows, shape: &AttentionShape, n: &Dims, slope: &mut [f32]) {
    let slope = Shared::new(slope);
    par::tasks(rows.sequences(), |sequence| {
        // SAFETY: one sequence per task.
        let slope = unsafe { slope.range(sequence * n.rows, n.rows) };
        // One past the last real key so far, and the one before it.
        let (mut last, mut earlier) = (0, 0);
        let mut key = 0;
        for (s, slope) in slope.iter_mut().enumerate() {
            let (first, end) = visible(rows, shape, sequence * n.rows + s);
            while key < end {
                if !rows.is_padding_key(sequence, key) {
                    (last, earlier) = (key + 1, last);
                }
                key += 1;
            }
            let alone = n.keys == 1 || (last > first && earlier <= first);
            *slope = if alone { 0.0 } else { n.scale };
        }
    });
}

/// Adds what the scores of some columns with a range of keys contribute to the gradients of both. `blind` columns are those that
/// see no key and weigh all keys alike.
fn block(
    o: &Operands,
    unit: usize,
    columns: &[usize],
    range: std::ops::Range<usize>,
    blind: bool,
    work: &mut Work,
    d: Qkv<Shared<f32>>,
) {
    let (core, n, at) = (o.core, &o.n, o.n.unit(unit));
    let sight = Sight::new(o.rows, &o.shape, n, at, columns);
    let all = Span { from: 0, to: n.keys, all_from: 0, all_to: n.keys };
    let span = if blind { all } else { sight.span(0, COLS) };
    let (from, to) = (range.start.max(span.from), range.end.min(span.to));
    if from >= to {
        return;
    }
    let width = columns.len().next_multiple_of(STEP);
    let numbers = Numbers::new(o, unit, columns);
    pack_columns(o, at, columns, width, work);
    work.dq.fill(0.0);
    let (slots, col_slots) = (core.slots(n.head), core.slots(width));
    let (k_slots, right) = packed_slots(core, n);
    for key_block in from / KEYS..to.div_ceil(KEYS) {
        let (key0, end) = ((key_block * KEYS).max(from), ((key_block + 1) * KEYS).min(to));
        let keys = end - key0;
        let k_at = unit * k_slots + key0 * slots;
        let (p, ds) = (&mut work.p[..keys * COLS], &mut work.ds[..keys * COLS]);
        multiply_block(core, keys, width, slots, Left::rows(&o.v[k_at..], slots), work.do_across, ds, COLS, false);
        if blind {
            p.fill(1.0 / n.keys as f32);
            vectorised(
                #[inline(always)]
                || score_gradients(p, ds, &numbers.delta[..width], &numbers.slope[..width]),
            );
        } else {
            multiply_block(core, keys, width, slots, Left::rows(&o.k[k_at..], slots), work.q_across, p, COLS, false);
            if needs_mask(o.rows, at, span, key0, keys) {
                vectorised(
                    #[inline(always)]
                    || hide(o.rows, at, p, COLS, key0, &sight.first[..width], &sight.len[..width]),
                );
            }
            vectorised(
                #[inline(always)]
                || {
                    probabilities(p, n.scale, &numbers.lse[..width]);
                    score_gradients(p, ds, &numbers.delta[..width], &numbers.slope[..width]);
                },
            );
        }
        let tiles = Tiles::new(core, p, ds, keys, width, work.packed);
        // dV += Pᵀ dO, dK += dSᵀ Q
        let to = n.key_at(at, key0);
        for (left, right, d) in [(tiles.p, &*work.d_out, d.v), (tiles.ds, &*work.q, d.k)] {
            // SAFETY: these keys' channels of this head belong to the task, and all keys lie inside.
            unsafe { multiply_block_at(core, keys, n.head, col_slots, left, right, d.at(to), n.kv, true) };
        }
        // dQ += dS K
        let block_keys = KEYS.min(n.keys - key_block * KEYS);
        let panel = core.slots(block_keys) * core.nr;
        let k =
            &o.k_right[(unit * n.keys.div_ceil(KEYS) + key_block) * right..][key0 % KEYS / core.format.per_slot() * core.nr..];
        for (i, j) in (0..n.head).step_by(core.nr).enumerate() {
            let channels = core.nr.min(n.head - j);
            let (k, dq) = (&k[i * panel..], &mut work.dq[j..]);
            multiply_block(core, width, channels, core.slots(keys), tiles.ds_across, k, dq, n.head, true);
        }
    }
    for (column, dq) in columns.iter().zip(work.dq.chunks(n.head)) {
        // SAFETY: these columns belong to the task.
        let to = unsafe { d.q.range(n.query_at(at, *column), n.head) };
        for (to, dq) in to.iter_mut().zip(dq) {
            *to += dq;
        }
    }
}

/// Queries and output gradients of the columns, both ways; zeros up to `width`.
fn pack_columns(o: &Operands, unit: Unit, columns: &[usize], width: usize, work: &mut Work) {
    let (core, head) = (o.core, o.n.head);
    let parts = [(o.x.q, &mut *work.q_across, &mut *work.q), (o.grad, &mut *work.do_across, &mut *work.d_out)];
    for (from, across, along) in parts {
        gather(&o.n, unit, columns, from, work.rows);
        work.rows[columns.len() * head..width * head].fill(0.0);
        let columns = Source::rows(work.rows, head);
        pack::panels(core.format, columns.flipped(), head, width, core.nr, across);
        pack::panels(core.format, columns, width, head, core.nr, along);
    }
}

/// Numbers of the columns of a block.
struct Numbers {
    /// +infinity (no probability) for columns that see no key, and in places after the last.
    lse: [f32; COLS],
    delta: [f32; COLS],
    slope: [f32; COLS],
}

impl Numbers {
    fn new(o: &Operands, unit: usize, columns: &[usize]) -> Self {
        let mut numbers = Self { lse: [f32::INFINITY; COLS], delta: [0.0; COLS], slope: [0.0; COLS] };
        for (i, column) in columns.iter().enumerate() {
            let (t, h) = o.n.place(o.n.unit(unit), *column);
            numbers.lse[i] = o.lse[t * o.n.heads + h];
            numbers.delta[i] = o.delta[unit * o.n.columns + column];
            numbers.slope[i] = o.slope[t];
        }
        numbers
    }
}

/// A tile's probabilities and score gradients as left operands.
struct Tiles<'a> {
    /// Rows are keys, slots go along the columns.
    p: Left<'a>,
    ds: Left<'a>,
    /// Rows are columns, slots go along the keys.
    ds_across: Left<'a>,
}

impl<'a> Tiles<'a> {
    fn new(core: &Core, p: &'a [f32], ds: &'a [f32], keys: usize, width: usize, packed: &'a mut [u32]) -> Self {
        if core.format == Format::F32 {
            let (p, ds) = (Left::rows(as_slots(p), COLS), Left::rows(as_slots(ds), COLS));
            return Self { p, ds, ds_across: Left { row_stride: 1, slot_stride: COLS, ..ds } };
        }
        let slots = core.slots(width);
        let (p_slots, rest) = packed.split_at_mut(KEYS * COLS);
        let (ds_slots, across) = rest.split_at_mut(KEYS * COLS);
        pack::rows(core.format, keys, width, |r| &p[r * COLS..][..width], p_slots);
        pack::rows(core.format, keys, width, |r| &ds[r * COLS..][..width], ds_slots);
        let (p, ds_left) = (Left::rows(p_slots, slots), Left::rows(ds_slots, slots));
        let ds_across = if core.format.per_slot() == 1 {
            Left { row_stride: 1, slot_stride: slots, ..ds_left }
        } else {
            pack::left_panel(core, Source::rows(ds, COLS), keys, width, across, width, core.slots(KEYS), 0);
            Left::panel(core, across, width, core.slots(KEYS))
        };
        Self { p, ds: ds_left, ds_across }
    }
}
