//! Forward: blocks of columns over the blocks of their keys, with a running maximum and sum for each column.

use super::super::level::vectorised;
use super::super::packed::pack::{self, Source};
use super::super::packed::{Core, Format, Left, as_slots, as_slots_mut, multiply_block};
use super::super::par::{self, Shared};
use super::super::rows::Rows;
use super::super::scratch::cut;
use super::tiles::{bring_up_to_date, hide};
use super::{COLS, Dims, Sight, Span, Unit, gather, needs_mask, right_slots};
use crate::tensor::backend::{AttentionShape, Qkv};

/// Keys of a block; even, for pairs of numbers.
const KEYS: usize = 128;

/// Whether a unit has a single block of columns, as when text is generated (or few, of short chunks). Its task is then alone in
/// reading the unit's keys: it packs each block for itself, or not at all where there is nothing to convert. Otherwise all are
/// packed beforehand.
fn reads_alone(n: &Dims) -> bool {
    n.columns <= COLS
}

/// Slots of one packed block of keys, `[KEYS, slots(head)]`, and of values, `[slots(KEYS), head]`.
fn block_slots(core: &Core, n: &Dims) -> (usize, usize) {
    (KEYS * core.slots(n.head), core.slots(KEYS) * n.head)
}

/// Packed blocks of keys kept for all tasks.
fn shared_blocks(n: &Dims) -> usize {
    if reads_alone(n) { 0 } else { n.units * n.keys.div_ceil(KEYS) }
}

/// Slots for a block that a task packs for itself.
fn own_slots(core: &Core, n: &Dims) -> (usize, usize) {
    if reads_alone(n) && core.format != Format::F32 { block_slots(core, n) } else { (0, 0) }
}

fn per_thread(core: &Core, n: &Dims) -> usize {
    let packed_p = if core.format == Format::F32 { 0 } else { core.slots(KEYS) * core.nr };
    let (k, v) = own_slots(core, n);
    COLS * n.head + right_slots(core, n.head, COLS) + KEYS * core.nr + packed_p + COLS * n.head + 2 * n.head + k + v
}

/// Numbers of scratch that `forward` needs.
pub fn forward_scratch(core: &Core, rows: &Rows, shape: AttentionShape) -> usize {
    let n = Dims::new(rows, &shape);
    let (k, v) = block_slots(core, &n);
    shared_blocks(&n) * (k + v) + par::threads() * per_thread(core, &n)
}

/// What a thread works in.
struct Work<'a> {
    /// The columns' queries, `[COLS, head]`; at the end a panel's outputs.
    rows: &'a mut [f32],
    /// Those packed: panels of `nr` columns, `[slots(head), nr]` each.
    q: &'a mut [u32],
    /// Scores and then probabilities of a tile, `[KEYS, nr]`.
    tile: &'a mut [f32],
    /// Those packed, `[slots(KEYS), nr]`; empty where the tile is an operand as it stands.
    p: &'a mut [u32],
    /// Sums of probability times value, transposed: `[head, nr]` for each panel.
    out: &'a mut [f32],
    /// `[head]`, twice.
    mean: &'a mut [f32],
    /// A block of keys and one of values, packed, if the task does that for itself.
    k: &'a mut [u32],
    v: &'a mut [u32],
}

impl<'a> Work<'a> {
    fn new(core: &Core, n: &Dims, mut part: &'a mut [f32]) -> Self {
        let part = &mut part;
        let (k, v) = own_slots(core, n);
        Self {
            rows: cut(part, COLS * n.head),
            q: as_slots_mut(cut(part, right_slots(core, n.head, COLS))),
            tile: cut(part, KEYS * core.nr),
            out: cut(part, COLS * n.head),
            mean: cut(part, 2 * n.head),
            k: as_slots_mut(cut(part, k)),
            v: as_slots_mut(cut(part, v)),
            p: as_slots_mut(std::mem::take(part)),
        }
    }
}

/// What all tasks read: the inputs, and the blocks of keys and values of all units, packed; empty where
/// each task reads alone.
struct Operands<'a> {
    core: &'a Core,
    n: Dims,
    rows: &'a Rows,
    shape: AttentionShape,
    x: Qkv<&'a [f32]>,
    k: &'a [u32],
    v: &'a [u32],
}

/// Blocks of columns that a unit has at most.
fn blocks_of_unit(rows: &Rows, n: &Dims) -> usize {
    rows.chunks_per_sequence() * blocks_of_chunk(rows, n)
}

/// A chunk can begin within a panel of the whole sequence: a first block has the rest of that panel.
fn blocks_of_chunk(rows: &Rows, n: &Dims) -> usize {
    usize::from(rows.chunks.is_some()) + (rows.seq * n.group).div_ceil(COLS)
}

/// First column of a unit's block `block`, and how many it has (maybe none).
fn columns_of_block(rows: &Rows, n: &Dims, nr: usize, unit: Unit, block: usize) -> (usize, usize) {
    let (chunk, block) = (block / blocks_of_chunk(rows, n), block % blocks_of_chunk(rows, n));
    let columns = rows.seq * n.group;
    let (from, to) = if rows.chunks.is_none() {
        (block * COLS, (block + 1) * COLS)
    } else {
        let start = rows.chunk_start(unit.sequence * rows.chunks_per_sequence() + chunk) * n.group;
        let lead = start.next_multiple_of(nr) - start;
        if block == 0 { (0, lead) } else { (lead + (block - 1) * COLS, lead + block * COLS) }
    };
    let (from, to) = (from.min(columns), to.min(columns));
    (chunk * columns + from, to - from)
}

/// Queries `[T, q_dim]`, keys and values `[sequences * keys, kv_dim]` -> `out` `[T, q_dim]` and the log-sum-exp of the scaled
/// scores `lse` `[T, heads]`, +infinity where a row sees no key and so gets the mean of all values of its sequence.
pub fn forward(
    core: &Core,
    rows: &Rows,
    shape: AttentionShape,
    x: Qkv<&[f32]>,
    out: &mut [f32],
    lse: &mut [f32],
    mut scratch: &mut [f32],
) {
    let n = Dims::new(rows, &shape);
    let (k_slots, v_slots) = block_slots(core, &n);
    let k = as_slots_mut(cut(&mut scratch, shared_blocks(&n) * k_slots));
    let v = as_slots_mut(cut(&mut scratch, shared_blocks(&n) * v_slots));
    {
        let (k, v, blocks) = (Shared::new(k), Shared::new(v), n.keys.div_ceil(KEYS));
        par::tasks(shared_blocks(&n), |i| {
            let keys = i % blocks * KEYS..n.keys.min((i % blocks + 1) * KEYS);
            // SAFETY: blocks lie apart.
            let (k, v) = unsafe { (k.range(i * k_slots, k_slots), v.range(i * v_slots, v_slots)) };
            pack_block(core, &n, x, n.unit(i / blocks), keys, k, v);
        });
    }
    let operands = Operands { core, n, rows, shape, x, k, v };
    let (out, lse) = (Shared::new(out), Shared::new(lse));
    let per_unit = blocks_of_unit(rows, &n);
    // Unit by unit, so that its keys stay in the cache; in each, the last columns first, since they see the most keys.
    par::tasks_with(n.units * per_unit, scratch, per_thread(core, &n), |i, part| {
        let (unit, block) = (i / per_unit, per_unit - 1 - i % per_unit);
        let (from, count) = columns_of_block(rows, &n, core.nr, n.unit(unit), block);
        if count > 0 {
            let mut work = Work::new(core, &n, part);
            let columns: [usize; COLS] = std::array::from_fn(|c| from + c);
            attend(&operands, unit, &columns[..count], &mut work, out, lse);
        }
    });
}

/// Packs one block of keys and values: `[keys, slots(head)]` and `[slots(keys), head]`.
fn pack_block(core: &Core, n: &Dims, x: Qkv<&[f32]>, unit: Unit, keys: std::ops::Range<usize>, k: &mut [u32], v: &mut [u32]) {
    let row = |x, r| numbers_at(x, n.key_at(unit, keys.start + r), n.head);
    pack::rows(core.format, keys.len(), n.head, |r| row(x.k, r), k);
    if core.format.per_slot() == 1 {
        pack::rows(core.format, keys.len(), n.head, |r| row(x.v, r), v);
    } else {
        let values = Source::rows(&x.v[n.key_at(unit, keys.start)..], n.kv);
        pack::left_panel(core, values, keys.len(), n.head, v, n.head, core.slots(KEYS), 0);
    }
}

fn numbers_at(x: &[f32], at: usize, len: usize) -> &[f32] {
    &x[at..at + len]
}

/// One block of columns.
fn attend(o: &Operands, unit: usize, columns: &[usize], work: &mut Work, out: Shared<f32>, lse: Shared<f32>) {
    let (core, n, nr, at) = (o.core, &o.n, o.core.nr, o.n.unit(unit));
    gather(n, at, columns, o.x.q, work.rows);
    pack::panels(core.format, Source::transposed(work.rows, n.head), n.head, columns.len(), core.nr, work.q);
    let sight = Sight::new(o.rows, &o.shape, n, at, columns);
    let mut whole = sight.span(0, COLS);
    let mut spans = [whole; COLS];
    for (p, span) in spans.iter_mut().enumerate().take(columns.len().div_ceil(nr)) {
        *span = sight.span(p * nr, nr);
        if o.rows.chunks.is_some() {
            *span = span_of_panel(o, at, columns[p * nr], *span);
            (whole.from, whole.to) = (whole.from.min(span.from), whole.to.max(span.to));
        }
    }
    let (mut max, mut sum) = ([f32::MIN; COLS], [0f32; COLS]);
    let (slots, (k_slots, v_slots)) = (core.slots(n.head), block_slots(core, n));
    for block in whole.from / KEYS..whole.to.div_ceil(KEYS) {
        // Keys from `start` on, as left operands.
        let mut start = block * KEYS;
        let (k_left, v_left) = if reads_alone(n) {
            start = start.max(whole.from);
            let from = n.key_at(at, start);
            if core.format == Format::F32 {
                let k = Left::strided(&as_slots(o.x.k)[from..], n.kv, 1);
                (k, Left::strided(&as_slots(o.x.v)[from..], 1, n.kv))
            } else {
                pack_block(core, n, o.x, at, start..whole.to.min((block + 1) * KEYS), work.k, work.v);
                (Left::rows(work.k, slots), Left::panel(core, work.v, n.head, core.slots(KEYS)))
            }
        } else {
            let i = unit * n.keys.div_ceil(KEYS) + block;
            let v = Left::panel(core, &o.v[i * v_slots..], n.head, core.slots(KEYS));
            (Left::rows(&o.k[i * k_slots..], slots), v)
        };
        for (p, span) in spans.iter().enumerate().take(columns.len().div_ceil(nr)) {
            let c0 = p * nr;
            let (key0, end) = ((block * KEYS).max(span.from), ((block + 1) * KEYS).min(span.to));
            if key0 >= end {
                continue;
            }
            let (keys, started) = (end - key0, block > span.from / KEYS);
            // Half a panel, if that holds all columns.
            let width = if columns.len() - c0 > nr / 2 { nr } else { nr / 2 };
            let tile = &mut work.tile[..keys * nr];
            let k = Left { data: &k_left.data[(key0 - start) * k_left.row_stride..], ..k_left };
            multiply_block(core, keys, width, slots, k, &work.q[c0 * slots..], tile, nr, false);
            if needs_mask(o.rows, at, *span, key0, keys) {
                let (first, len) = (&sight.first[c0..c0 + width], &sight.len[c0..c0 + width]);
                vectorised(
                    #[inline(always)]
                    || hide(o.rows, at, tile, nr, key0, first, len),
                );
            }
            let out = &mut work.out[c0 * n.head..(c0 + nr) * n.head];
            bring_up_to_date(width, tile, nr, n.scale, &mut max[c0..], &mut sum[c0..], started.then_some(&mut *out));
            let p = if core.format == Format::F32 {
                as_slots(tile)
            } else {
                pack::panel(core.format, Source::rows(tile, nr), keys, width, work.p, nr);
                &*work.p
            };
            let v = Left { data: &v_left.data[core.slots(key0 - start) * v_left.slot_stride..], ..v_left };
            multiply_block(core, n.head, width, core.slots(keys), v, p, out, nr, started);
        }
    }
    finish(o, at, columns, &sight, &spans, work, &max, &sum, out, lse);
}

/// Keys that the whole sequence's panel of columns reads, of which `own`, from column `first` on, is the part that is here. The
/// first and the last key of a tile decide how its sums are grouped, so that rows get the bits that they get where all are.
fn span_of_panel(o: &Operands, unit: Unit, first: usize, own: Span) -> Span {
    let (n, nr) = (&o.n, o.core.nr);
    let (t, h) = n.place(unit, first);
    let position = o.rows.position(t);
    let panel = (position * n.group + h % n.group) / nr * nr;
    let mut span = Span { to: n.keys.min((panel + nr - 1) / n.group + 1), ..own };
    let earlier = panel / n.group;
    let document = o.rows.doc_start[t] as usize;
    // Of rows that are not here only those in the first row's document are known. Those of another see keys further back; to leave
    // them out may group sums by other fours.
    if document <= earlier {
        let window = o.shape.window.map_or(0, |w| (earlier + 1).saturating_sub(w));
        span.from = span.from.min(document.max(window) & !1);
    }
    span
}

/// Divides by the sums and writes a block's outputs.
#[allow(clippy::too_many_arguments)]
fn finish(
    o: &Operands,
    unit: Unit,
    columns: &[usize],
    sight: &Sight,
    spans: &[Span; COLS],
    work: &mut Work,
    max: &[f32; COLS],
    sum: &[f32; COLS],
    out: Shared<f32>,
    lse: Shared<f32>,
) {
    let (n, nr) = (&o.n, o.core.nr);
    let mut mean_known = false;
    for (p, span) in spans.iter().enumerate().take(columns.len().div_ceil(nr)) {
        let (c0, count) = (p * nr, nr.min(columns.len() - p * nr));
        if span.from < span.to {
            let turned = Source::transposed(&work.out[c0 * n.head..], nr);
            pack::panel(Format::F32, turned, count, n.head, as_slots_mut(work.rows), n.head);
        }
        for c in 0..count {
            let (t, h) = n.place(unit, columns[c0 + c]);
            // SAFETY: each column belongs to one task.
            let (out, lse) = unsafe { (out.range(t * n.q + h * n.head, n.head), lse.range(t * n.heads + h, 1)) };
            // Hidden scores leave the sum at zero; a visible maximum alone adds one to it.
            if sight.len[c0 + c] == 0 || sum[c0 + c] == 0.0 {
                if !mean_known {
                    mean_of_all(o, unit, work.mean);
                    mean_known = true;
                }
                lse[0] = f32::INFINITY;
                out.copy_from_slice(&work.mean[..n.head]);
                continue;
            }
            lse[0] = max[c0 + c] + sum[c0 + c].ln();
            let inverse = 1.0 / sum[c0 + c];
            for (out, x) in out.iter_mut().zip(&work.rows[c * n.head..]) {
                *out = x * inverse;
            }
        }
    }
}

/// What a row without any visible key gets: the mean of all values of its sequence, in `mean[..head]`.
fn mean_of_all(o: &Operands, unit: Unit, mean: &mut [f32]) {
    let n = &o.n;
    let (total, part) = mean.split_at_mut(n.head);
    total.fill(0.0);
    // In parts, for the accuracy of long sums.
    for key0 in (0..n.keys).step_by(KEYS) {
        part.fill(0.0);
        for key in key0..n.keys.min(key0 + KEYS) {
            part.iter_mut().zip(&o.x.v[n.key_at(unit, key)..]).for_each(|(p, v)| *p += v);
        }
        total.iter_mut().zip(&*part).for_each(|(t, p)| *t += p);
    }
    total.iter_mut().for_each(|t| *t /= n.keys as f32);
}
