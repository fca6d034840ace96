//! A micro-batch with every default filled in.

use zaya::tensor::backend::Batch;

#[derive(Debug, Clone)]
pub struct Rows {
    pub batch: usize,
    pub seq: usize,
    pub past: usize,
    pub ids: Vec<u32>,
    pub labels: Vec<i64>,
    pub valid: Vec<bool>,
    doc_start: Vec<u32>,
}

impl Rows {
    pub fn new(batch: &Batch) -> Self {
        let tokens = batch.tokens();
        let mut rows = Self {
            batch: batch.batch,
            seq: batch.seq,
            past: batch.past,
            ids: batch.ids.clone(),
            labels: batch.labels.clone(),
            valid: batch.valid.clone(),
            doc_start: batch.doc_start.clone(),
        };
        rows.labels.resize(tokens, -1);
        rows.valid.resize(tokens, true);
        rows.doc_start.resize(tokens, 0);
        rows
    }

    pub fn tokens(&self) -> usize {
        self.batch * self.seq
    }

    /// Position of a row in its sequence, tokens in caches included.
    pub fn position(&self, row: usize) -> usize {
        self.past + row % self.seq
    }

    /// Whether the token `back` steps before the row belongs to the same document.
    pub fn reaches_back(&self, row: usize, back: usize) -> bool {
        self.position(row) >= self.doc_start[row] as usize + back
    }

    /// Whether the query of a row sees the key at `position` of its sequence.
    pub fn sees(&self, row: usize, position: usize, window: Option<usize>) -> bool {
        let query = self.position(row);
        let first = row / self.seq * self.seq;
        let real = position < self.past || self.valid[first + position - self.past];
        position <= query && real && position >= self.doc_start[row] as usize && window.is_none_or(|w| position + w > query)
    }
}
