//! Causal attention with grouped heads, windows, documents and padding, in tiles: a block of queries against a block of the
//! keys it can see, with a running softmax. Scores are never kept; the backward recomputes them from the log-sum-exp.
//!
//! One key/value head of one sequence is a *unit*. The queries that attend to it are the unit's *columns*: row after row of
//! the sequence, and in a row the query heads of the group. Tiles of scores are transposed, `[keys, columns]`: a vector then
//! holds the same key for neighbouring columns, so that maximum, sum and masks need no work across lanes, a tile is a right
//! operand as it stands, and one reading of the keys serves all heads of the group.
//!
//! Each number that is written has one owner and one order of summation, whatever the number of threads.
//!
//! Of chunks of sequences, a unit has the columns of the rows that are here, one chunk after the other, and the keys of the whole
//! sequence. Panels of columns are cut where the whole sequence's are, so that a row gets the same bits wherever it is computed.

mod backward;
mod forward;
mod tiles;
mod tree;

pub use backward::{backward, backward_scratch};
pub use forward::{forward, forward_scratch};
pub use tree::{tree, tree_scratch};

use super::packed::Core;
use super::rows::Rows;
use crate::tensor::backend::AttentionShape;

/// Columns of a block: whole panels of every micro-kernel.
const COLS: usize = 64;

#[derive(Clone, Copy)]
struct Dims {
    heads: usize,
    /// Query heads of one key/value head.
    group: usize,
    head: usize,
    /// Widths of a row of queries and of keys.
    q: usize,
    kv: usize,
    units: usize,
    /// Rows and columns of a unit, and its keys (those of the cache first).
    rows: usize,
    columns: usize,
    keys: usize,
    scale: f32,
}

/// One key/value head of one sequence.
#[derive(Clone, Copy)]
struct Unit {
    sequence: usize,
    kv_head: usize,
}

impl Dims {
    fn new(rows: &Rows, shape: &AttentionShape) -> Self {
        let (heads, kv_heads, head) = (shape.num_query_heads, shape.num_kv_heads, shape.head_dim);
        let group = heads / kv_heads;
        Self {
            heads,
            group,
            head,
            q: heads * head,
            kv: kv_heads * head,
            units: rows.sequences() * kv_heads,
            rows: rows.rows_per_sequence(),
            columns: rows.rows_per_sequence() * group,
            keys: rows.keys(),
            scale: 1.0 / (head as f32).sqrt(),
        }
    }

    fn unit(&self, unit: usize) -> Unit {
        let kv_heads = self.heads / self.group;
        Unit { sequence: unit / kv_heads, kv_head: unit % kv_heads }
    }

    /// Row of the batch and query head of a unit's column.
    fn place(&self, unit: Unit, column: usize) -> (usize, usize) {
        (unit.sequence * self.rows + column / self.group, unit.kv_head * self.group + column % self.group)
    }

    /// Where a column's numbers start in `[T, q_dim]`.
    fn query_at(&self, unit: Unit, column: usize) -> usize {
        let (t, h) = self.place(unit, column);
        t * self.q + h * self.head
    }

    /// Where a key's numbers start in `[batch * keys, kv_dim]`.
    fn key_at(&self, unit: Unit, key: usize) -> usize {
        (unit.sequence * self.keys + key) * self.kv + unit.kv_head * self.head
    }
}

/// First and one-past-last key (position in the sequence, past included) that row `t` may see, padding aside.
fn visible(rows: &Rows, shape: &AttentionShape, t: usize) -> (usize, usize) {
    let end = rows.position(t) + 1;
    // A document that starts at the first row of the batch goes on from the cache.
    let document = if rows.doc_start[t] == 0 { 0 } else { rows.past + rows.doc_start[t] as usize };
    let window = shape.window.map_or(0, |w| end.saturating_sub(w));
    (document.max(window), end)
}

/// Keys that the columns of a block see.
struct Sight {
    count: usize,
    first: [u32; COLS],
    /// How many from `first` on. Places after the last column repeat it.
    len: [u32; COLS],
}

/// Keys that some column of a set sees, and, inside, those that all of them see (padding aside).
#[derive(Clone, Copy)]
struct Span {
    from: usize,
    to: usize,
    all_from: usize,
    all_to: usize,
}

impl Sight {
    fn new(rows: &Rows, shape: &AttentionShape, n: &Dims, unit: Unit, columns: &[usize]) -> Self {
        let mut sight = Self { count: columns.len(), first: [0; COLS], len: [0; COLS] };
        for i in 0..COLS {
            let (t, _) = n.place(unit, columns[i.min(columns.len() - 1)]);
            let (first, end) = visible(rows, shape, t);
            (sight.first[i], sight.len[i]) = (first as u32, end.saturating_sub(first) as u32);
        }
        sight
    }

    /// Of the columns from `from` on, `width` of them (or fewer, at the block's end).
    fn span(&self, from: usize, width: usize) -> Span {
        let mut span = Span { from: usize::MAX, to: 0, all_from: 0, all_to: usize::MAX };
        for i in from..(from + width).min(self.count) {
            let (first, end) = (self.first[i] as usize, (self.first[i] + self.len[i]) as usize);
            span.from = span.from.min(first);
            span.to = span.to.max(end);
            span.all_from = span.all_from.max(first);
            span.all_to = span.all_to.min(end);
        }
        // Pairs of numbers along the keys are never split; the key before the first is hidden like any other.
        span.from &= !1;
        span
    }
}

/// Whether a tile of the keys from `key0` on has something to hide from the columns of `span`.
fn needs_mask(rows: &Rows, unit: Unit, span: Span, key0: usize, keys: usize) -> bool {
    let padding = rows.has_padding_keys() && (key0..key0 + keys).any(|j| rows.is_padding_key(unit.sequence, j));
    key0 < span.all_from || key0 + keys > span.all_to || padding
}

/// Copies the columns' numbers out of `[T, q_dim]`, one after the other.
fn gather(n: &Dims, unit: Unit, columns: &[usize], from: &[f32], to: &mut [f32]) {
    for (column, to) in columns.iter().zip(to.chunks_mut(n.head)) {
        to.copy_from_slice(&from[n.query_at(unit, *column)..][..n.head]);
    }
}

/// Slots of a packed right operand.
fn right_slots(core: &Core, inner: usize, width: usize) -> usize {
    core.slots(inner) * width.next_multiple_of(core.nr)
}

#[cfg(test)]
mod tests;
