//! A micro-batch made ready, and the verbs that look at tokens: embedding, masking, joining and cutting sequences.

use anyhow::{Result, ensure};
use rayon::prelude::*;

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

pub fn embed(rows: &Rows, table: &[f32], d: usize) -> Vec<f32> {
    let mut y = vec![0.0; rows.tokens() * d];
    y.par_chunks_mut(d).with_min_len(64).zip(&rows.ids).for_each(|(y, id)| {
        y.copy_from_slice(&table[*id as usize * d..][..d]);
    });
    y
}

/// Adds each row of `dy` to the table row of its token; rows of one token in their order in the batch.
pub fn embed_backward(rows: &Rows, dy: &[f32], pad: Option<u32>, d_table: &mut [f32], d: usize) {
    let mut order: Vec<u32> = (0..rows.tokens() as u32).filter(|t| Some(rows.ids[*t as usize]) != pad).collect();
    // Stable: tokens of one id keep their order, which fixes the order of the additions.
    order.sort_by_key(|t| rows.ids[*t as usize]);
    let groups: Vec<&[u32]> = order.chunk_by(|a, b| rows.ids[*a as usize] == rows.ids[*b as usize]).collect();
    // The groups' table rows, each borrowed once, in rising order of id.
    let mut targets: Vec<&mut [f32]> = Vec::with_capacity(groups.len());
    let (mut rest, mut taken) = (d_table, 0);
    for g in &groups {
        let at = rows.ids[g[0] as usize] as usize;
        let (row, after) = rest.split_at_mut((at - taken) * d).1.split_at_mut(d);
        targets.push(row);
        (rest, taken) = (after, at + 1);
    }
    targets.into_par_iter().zip(groups).with_min_len(16).for_each(|(row, group)| {
        for t in group {
            super::elementwise::add(row, &dy[*t as usize * d..][..d]);
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
pub fn concat_rows(batch: usize, a: &[f32], b: &[f32]) -> Vec<f32> {
    let (la, lb) = (a.len() / batch, b.len() / batch);
    let mut out = Vec::with_capacity(a.len() + b.len());
    for i in 0..batch {
        out.extend_from_slice(&a[i * la..(i + 1) * la]);
        out.extend_from_slice(&b[i * lb..(i + 1) * lb]);
    }
    out
}

/// The last `n` rows (of `d` numbers) of each of `batch` sequences.
pub fn last_rows(batch: usize, x: &[f32], n: usize, d: usize) -> Vec<f32> {
    x.chunks(x.len() / batch).flat_map(|sequence| &sequence[sequence.len() - n * d..]).copied().collect()
}
