//! A micro-batch made ready, and the verbs that look at tokens: embedding, masking, joining and cutting sequences.

use anyhow::{Result, ensure};

use super::elementwise::{ROW_CHUNK, add};
use super::par::{self, Shared};
use crate::tensor::backend::Batch;

/// What the kernels need to know of each row.
#[derive(Debug, Clone)]
pub struct Rows {
    pub batch: usize,
    pub seq: usize,
    pub past: usize,
    pub ids: Vec<u32>,
    pub labels: Vec<i64>,
    /// Empty = every row is real.
    pub valid: Vec<bool>,
    /// First position of the row's document within its sequence; all 0 without document masking.
    pub doc_start: Vec<u32>,
}

impl Rows {
    pub fn new(b: &Batch) -> Result<Self> {
        let tokens = b.tokens();
        ensure!(b.ids.len() == tokens, "a batch of {} x {} tokens has {} ids", b.batch, b.seq, b.ids.len());
        ensure!(b.labels.is_empty() || b.labels.len() == tokens, "{} labels for {tokens} tokens", b.labels.len());
        ensure!(b.valid.is_empty() || b.valid.len() == tokens, "a padding mask of {} for {tokens} tokens", b.valid.len());
        ensure!(
            b.doc_start.is_empty() || b.doc_start.len() == tokens,
            "{} document starts for {tokens} tokens",
            b.doc_start.len()
        );
        let mut doc_start = b.doc_start.clone();
        doc_start.resize(tokens, 0);
        for (t, start) in doc_start.iter().enumerate() {
            let s = t % b.seq;
            ensure!(*start as usize <= s, "row {s}: its document starts later, at {start}");
        }
        Ok(Self {
            batch: b.batch,
            seq: b.seq,
            past: b.past,
            ids: b.ids.clone(),
            labels: b.labels.clone(),
            valid: b.valid.clone(),
            doc_start,
        })
    }

    pub fn tokens(&self) -> usize {
        self.batch * self.seq
    }

    pub fn is_valid(&self, t: usize) -> bool {
        self.valid.is_empty() || self.valid[t]
    }

    /// Whether row `t` follows a row of its own document in this batch.
    pub fn has_previous(&self, t: usize) -> bool {
        (t % self.seq) as u32 > self.doc_start[t]
    }

    /// Whether row `t` is the first of its sequence and so continues whatever came before (a halo, or zeros).
    pub fn is_first(&self, t: usize) -> bool {
        t.is_multiple_of(self.seq)
    }
}

pub fn check_ids(ids: &[u32], vocab: usize) -> Result<()> {
    match ids.iter().position(|id| *id as usize >= vocab) {
        None => Ok(()),
        Some(at) => anyhow::bail!("token {at} of the batch has id {}, but the model's vocabulary ends at {}", ids[at], vocab - 1),
    }
}

pub fn embed(rows: &Rows, table: &[f32], d: usize, y: &mut [f32]) {
    let y = Shared::new(y);
    par::chunks(rows.tokens(), ROW_CHUNK, |range| {
        for t in range {
            // SAFETY: tasks have disjoint rows.
            unsafe { y.range(t * d, d) }.copy_from_slice(&table[rows.ids[t] as usize * d..][..d]);
        }
    });
}

/// Parts that the vocabulary is cut into for `embed_backward`.
const EMBED_TASKS: usize = 64;

/// Adds each row of `dy` to the table row of its token; rows of one token in their order in the batch. `order`: one number a
/// token.
pub fn embed_backward(rows: &Rows, dy: &[f32], pad: Option<u32>, d_table: &mut [f32], d: usize, order: &mut [u32]) {
    let order = &mut order[..rows.tokens()];
    order.iter_mut().enumerate().for_each(|(t, order)| *order = t as u32);
    // By token, then by place: fixes the order of the additions.
    order.sort_unstable_by_key(|t| (rows.ids[*t as usize], *t));
    let (order, vocab) = (&*order, d_table.len() / d);
    let table = Shared::new(d_table);
    par::tasks(EMBED_TASKS, |task| {
        let ids = task * vocab / EMBED_TASKS..(task + 1) * vocab / EMBED_TASKS;
        let first = order.partition_point(|t| (rows.ids[*t as usize] as usize) < ids.start);
        for t in &order[first..] {
            let id = rows.ids[*t as usize];
            if id as usize >= ids.end {
                break;
            }
            if Some(id) != pad {
                // SAFETY: tasks have disjoint parts of the vocabulary.
                add(unsafe { table.range(id as usize * d, d) }, &dy[*t as usize * d..][..d]);
            }
        }
    });
}

pub fn mask_rows(rows: &Rows, x: &mut [f32], d: usize) {
    if !rows.valid.is_empty() {
        for (row, _) in x.chunks_mut(d).zip(&rows.valid).filter(|(_, valid)| !**valid) {
            row.fill(0.0);
        }
    }
}

/// For each of `batch` sequences: its rows of `a`, then its rows of `b`.
pub fn concat_rows(batch: usize, a: &[f32], b: &[f32], out: &mut [f32]) {
    let (la, lb) = (a.len() / batch, b.len() / batch);
    for (i, out) in out.chunks_exact_mut((la + lb).max(1)).enumerate() {
        out[..la].copy_from_slice(&a[i * la..(i + 1) * la]);
        out[la..].copy_from_slice(&b[i * lb..(i + 1) * lb]);
    }
}

/// The last `n` rows (of `d` numbers) of each of `batch` sequences.
pub fn last_rows(batch: usize, x: &[f32], n: usize, d: usize, out: &mut [f32]) {
    let len = x.len() / batch;
    for (i, out) in out.chunks_exact_mut((n * d).max(1)).enumerate() {
        out.copy_from_slice(&x[(i + 1) * len - n * d..(i + 1) * len]);
    }
}
