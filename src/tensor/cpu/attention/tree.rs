//! Attention of the segments of a tree, each over its own rows of the pools of keys and values.
//!
//! Works as `forward` does, but a row's bits do not depend on its neighbours: blocks of keys begin at multiples of `KEYS` positions, and
//! sums within a tile are taken by fours that begin at multiples of four, so that what a neighbour sees beyond a row adds zeros.

use super::super::level::vectorised;
use super::super::packed::pack::{self, Source};
use super::super::packed::{Core, Format, Left, as_slots, as_slots_mut, multiply_block};
use super::super::par::{self, Shared};
use super::super::scratch::cut;
use super::tiles::{bring_up_to_date, hide_key};
use super::{COLS, Sight, Span, right_slots};
use crate::tensor::backend::{AttentionShape, Qkv};
use crate::tensor::tree::{Segment, Tree};

/// Keys of a block; a multiple of four.
const KEYS: usize = 128;

fn per_thread(core: &Core, head: usize) -> usize {
    let packed_p = if core.format == Format::F32 { 0 } else { core.slots(KEYS) * core.nr };
    COLS * head + right_slots(core, head, COLS) + KEYS * core.nr + COLS * head + 3 * KEYS * head + packed_p
}

/// Numbers of scratch that `tree` needs.
pub fn tree_scratch(core: &Core, shape: AttentionShape) -> usize {
    par::threads() * per_thread(core, shape.head_dim)
}

/// What a thread works in.
struct Work<'a> {
    /// The columns' queries, `[COLS, head]`; at the end a panel's outputs.
    rows: &'a mut [f32],
    /// Those packed: panels of `nr` columns, `[slots(head), nr]` each.
    q: &'a mut [u32],
    /// Scores and then probabilities of a tile, `[KEYS, nr]`.
    tile: &'a mut [f32],
    /// Sums of probability times value, transposed: `[head, nr]` for each panel.
    out: &'a mut [f32],
    /// A block of keys and one of values as left operands, and values on their way there; `[KEYS, head]` each.
    k: &'a mut [u32],
    v: &'a mut [u32],
    values: &'a mut [f32],
    /// Packed probabilities; empty where the tile is an operand as it stands.
    p: &'a mut [u32],
}

impl<'a> Work<'a> {
    fn new(core: &Core, head: usize, mut part: &'a mut [f32]) -> Self {
        let part = &mut part;
        Self {
            rows: cut(part, COLS * head),
            q: as_slots_mut(cut(part, right_slots(core, head, COLS))),
            tile: cut(part, KEYS * core.nr),
            out: cut(part, COLS * head),
            k: as_slots_mut(cut(part, KEYS * head)),
            v: as_slots_mut(cut(part, KEYS * head)),
            values: cut(part, KEYS * head),
            p: as_slots_mut(std::mem::take(part)),
        }
    }
}

/// Columns of one key/value head of one segment: its rows, and in each the query heads of the group.
#[derive(Clone, Copy)]
struct Task {
    segment: usize,
    kv_head: usize,
    first: usize,
    count: usize,
}

struct Operands<'a> {
    core: &'a Core,
    shape: AttentionShape,
    group: usize,
    /// Widths of a row of queries and of keys.
    q_dim: usize,
    kv_dim: usize,
    x: Qkv<&'a [f32]>,
}

/// Queries `[T, q_dim]`, pools of keys and values `[rows, kv_dim]` -> `out` `[T, q_dim]`. `scratch`: `tree_scratch`.
pub fn tree(core: &Core, tree: &Tree, shape: AttentionShape, x: Qkv<&[f32]>, out: &mut [f32], scratch: &mut [f32]) {
    let (head, kv_heads) = (shape.head_dim, shape.num_kv_heads);
    let group = shape.num_query_heads / kv_heads;
    let o = Operands { core, shape, group, q_dim: shape.num_query_heads * head, kv_dim: kv_heads * head, x };
    let mut tasks = Vec::new();
    for (segment, s) in tree.segments.iter().enumerate() {
        let columns = s.rows.len() * group;
        for kv_head in 0..kv_heads {
            let blocks = (0..columns).step_by(COLS);
            tasks.extend(blocks.map(|first| Task { segment, kv_head, first, count: COLS.min(columns - first) }));
        }
    }
    let out = Shared::new(out);
    par::tasks_with(tasks.len(), scratch, per_thread(core, head), |i, part| {
        let task = tasks[i];
        let mut work = Work::new(core, head, part);
        attend(&o, &tree.segments[task.segment], task, &mut work, out);
    });
}

/// Rows of the pool with the positions from `from` on, as many as `rows` has.
fn pool_rows(s: &Segment, from: usize, rows: &mut [u32]) {
    let (mut skip, mut filled) = (from, 0);
    for keys in &s.keys {
        if filled == rows.len() {
            return;
        }
        if skip >= keys.len() {
            skip -= keys.len();
            continue;
        }
        for row in (keys.start + skip..keys.end).take(rows.len() - filled) {
            rows[filled] = row as u32;
            filled += 1;
        }
        skip = 0;
    }
}

/// Keys and values of the positions from `start` on, `n` of them, of one head, as left operands: where they lie, if they can be
/// read there, else copied.
#[allow(clippy::too_many_arguments)]
fn block<'a>(
    o: &Operands<'a>,
    s: &Segment,
    kv_head: usize,
    start: usize,
    n: usize,
    k: &'a mut [u32],
    v: &'a mut [u32],
    values: &mut [f32],
) -> (Left<'a>, Left<'a>) {
    let (head, format, slots) = (o.shape.head_dim, o.core.format, o.core.slots(o.shape.head_dim));
    let mut rows = [0u32; KEYS];
    let rows = &mut rows[..n];
    pool_rows(s, start, rows);
    let at = |row: u32| row as usize * o.kv_dim + kv_head * head;
    if format == Format::F32 && rows[n - 1] - rows[0] == n as u32 - 1 && rows.is_sorted() {
        let from = at(rows[0]);
        return (Left::strided(&as_slots(o.x.k)[from..], o.kv_dim, 1), Left::strided(&as_slots(o.x.v)[from..], 1, o.kv_dim));
    }
    pack::rows(format, n, head, |r| &o.x.k[at(rows[r])..][..head], k);
    if format.per_slot() == 1 {
        pack::rows(format, n, head, |r| &o.x.v[at(rows[r])..][..head], v);
    } else {
        for (value, row) in values.chunks_exact_mut(head).zip(&*rows) {
            value.copy_from_slice(&o.x.v[at(*row)..][..head]);
        }
        pack::left_panel(o.core, Source::rows(values, head), n, head, v, head, o.core.slots(KEYS), 0);
    }
    (Left::rows(k, slots), Left::panel(o.core, v, head, o.core.slots(KEYS)))
}

fn attend(o: &Operands, s: &Segment, task: Task, work: &mut Work, out: Shared<f32>) {
    let (core, nr, head) = (o.core, o.core.nr, o.shape.head_dim);
    let (slots, columns) = (core.slots(head), task.count);
    let place = |c: usize| {
        let column = task.first + c;
        (column / o.group, task.kv_head * o.group + column % o.group)
    };
    let query_at = |c: usize| {
        let (row, query_head) = place(c);
        (s.rows.start + row) * o.q_dim + query_head * head
    };
    for (c, row) in work.rows.chunks_exact_mut(head).enumerate().take(columns) {
        row.copy_from_slice(&o.x.q[query_at(c)..][..head]);
    }
    pack::panels(core.format, Source::transposed(work.rows, head), head, columns, nr, work.q);
    let (mut first, mut len) = ([0u32; COLS], [0u32; COLS]);
    for c in 0..COLS {
        // Places behind the last column repeat it.
        let end = s.position + place(c.min(columns - 1)).0 + 1;
        first[c] = o.shape.window.map_or(0, |w| end.saturating_sub(w)) as u32;
        len[c] = end as u32 - first[c];
    }
    let panels = columns.div_ceil(nr);
    let sight = Sight { count: columns, first, len };
    // Sums within a tile are taken by fours, and in products by the kernel's groups.
    let together = core.summed_together().max(4);
    let span = |from: usize, width: usize| {
        let span = sight.span(from, width);
        Span { from: span.from / together * together, ..span }
    };
    let whole = span(0, COLS);
    let mut spans = [whole; COLS];
    spans.iter_mut().take(panels).enumerate().for_each(|(p, of_panel)| *of_panel = span(p * nr, nr));
    let (mut max, mut sum) = ([f32::MIN; COLS], [0f32; COLS]);
    for number in whole.from / KEYS..whole.to.div_ceil(KEYS) {
        let start = (number * KEYS).max(whole.from);
        let stop = ((number + 1) * KEYS).min(whole.to);
        let (k_left, v_left) = block(o, s, task.kv_head, start, stop - start, work.k, work.v, work.values);
        for (p, span) in spans.iter().enumerate().take(panels) {
            let (c0, key0, end) = (p * nr, start.max(span.from), stop.min(span.to));
            if key0 >= end {
                continue;
            }
            let (keys, started) = (end - key0, number > span.from / KEYS);
            // Half a panel, if that holds all columns.
            let width = if columns - c0 > nr / 2 { nr } else { nr / 2 };
            let tile = &mut work.tile[..keys.next_multiple_of(4) * nr];
            let k = Left { data: &k_left.data[(key0 - start) * k_left.row_stride..], ..k_left };
            multiply_block(core, keys, width, slots, k, &work.q[c0 * slots..], tile, nr, false);
            tile[keys * nr..].fill(f32::NEG_INFINITY);
            if key0 < span.all_from || end > span.all_to {
                let (first, len) = (&sight.first[c0..c0 + width], &sight.len[c0..c0 + width]);
                vectorised(
                    #[inline(always)]
                    || {
                        for (r, row) in tile.chunks_exact_mut(nr).enumerate().take(keys) {
                            hide_key(&mut row[..width], key0 + r, first, len);
                        }
                    },
                );
            }
            let sums = &mut work.out[c0 * head..(c0 + nr) * head];
            let (max, sum) = (&mut max[c0..], &mut sum[c0..]);
            bring_up_to_date(width, tile, nr, 1.0 / (head as f32).sqrt(), max, sum, started.then_some(&mut *sums));
            let p = if core.format == Format::F32 {
                as_slots(tile)
            } else {
                pack::panel(core.format, Source::rows(tile, nr), keys, width, work.p, nr);
                &*work.p
            };
            let v = Left { data: &v_left.data[core.slots(key0 - start) * v_left.slot_stride..], ..v_left };
            multiply_block(core, head, width, core.slots(keys), v, p, sums, nr, started);
        }
    }
    for p in 0..panels {
        let (c0, count) = (p * nr, nr.min(columns - p * nr));
        let turned = Source::transposed(&work.out[c0 * head..], nr);
        pack::panel(Format::F32, turned, count, head, as_slots_mut(work.rows), head);
        for c in 0..count {
            // SAFETY: each column belongs to one task.
            let out = unsafe { out.range(query_at(c0 + c), head) };
            let inverse = 1.0 / sum[c0 + c];
            for (out, x) in out.iter_mut().zip(&work.rows[c * head..]) {
                *out = x * inverse;
            }
        }
    }
}
