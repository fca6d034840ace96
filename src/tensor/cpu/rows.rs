//! A micro-batch made ready, and the verbs that look at tokens: embedding, masking, joining and cutting sequences.

use anyhow::{Result, ensure};

use super::elementwise::{ROW_CHUNK, add};
use super::par::{self, Shared};
use crate::tensor::backend::{Batch, Chunks};
use crate::tensor::tree::{Before, Tree};

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
    /// Where each sequence of `seq` rows stands in a longer one.
    pub chunks: Option<Chunks>,
    /// Where rows stand, and what they follow, if not their places in `batch` sequences say it.
    pub tree: Option<TreeRows>,
}

/// Of each row of a tree.
#[derive(Debug, Clone)]
pub struct TreeRows {
    position: Vec<u32>,
    /// Above all positions.
    pub end: usize,
    /// None = the rows before it in the batch.
    before: Vec<Option<[Before; 2]>>,
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
        if let Some(chunks) = &b.chunks {
            ensure!(b.past == 0, "chunks of sequences cannot follow {} tokens in a cache", b.past);
            check_chunks(chunks, b.batch, b.seq)?;
        }
        let mut doc_start = b.doc_start.clone();
        doc_start.resize(tokens, 0);
        for (t, start) in doc_start.iter().enumerate() {
            let s = b.chunks.as_ref().map_or(0, |c| c.start[t / b.seq]) + t % b.seq;
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
            chunks: b.chunks.clone(),
            tree: None,
        })
    }

    /// What CCA needs to know of a tree's rows; there are no ids.
    pub fn of_tree(tree: &Tree) -> Self {
        let (mut position, mut before) = (Vec::with_capacity(tree.tokens()), vec![None; tree.tokens()]);
        for s in &tree.segments {
            position.extend((s.position..).take(s.rows.len()).map(|p| p as u32));
            let follows = s.rows.start.checked_sub(1).is_some_and(|t| s.before[0] == Before::Row(t));
            before[s.rows.start] = (!follows).then_some(s.before);
        }
        let end = position.iter().max().map_or(0, |p| *p as usize + 1);
        Self {
            batch: 1,
            seq: tree.tokens(),
            past: 0,
            ids: Vec::new(),
            labels: Vec::new(),
            valid: Vec::new(),
            doc_start: vec![0; tree.tokens()],
            chunks: None,
            tree: Some(TreeRows { position, end, before }),
        }
    }

    pub fn tokens(&self) -> usize {
        self.batch * self.seq
    }

    pub fn is_valid(&self, t: usize) -> bool {
        self.valid.is_empty() || self.valid[t]
    }

    /// Sequences that rows of this batch belong to.
    pub fn sequences(&self) -> usize {
        self.batch / self.chunks_per_sequence()
    }

    pub fn chunks_per_sequence(&self) -> usize {
        self.chunks.as_ref().map_or(1, |c| c.per_sequence)
    }

    /// Rows of this batch that belong to one sequence.
    pub fn rows_per_sequence(&self) -> usize {
        self.chunks_per_sequence() * self.seq
    }

    /// Keys and values of one sequence, those in caches included.
    pub fn keys(&self) -> usize {
        self.chunks.as_ref().map_or(self.past + self.seq, |c| c.keys)
    }

    /// First position of a row of chunk `chunk` (a sequence, where they are whole).
    pub fn chunk_start(&self, chunk: usize) -> usize {
        self.chunks.as_ref().map_or(self.past, |c| c.start[chunk])
    }

    /// Position of row `t` in its sequence, tokens in caches included.
    pub fn position(&self, t: usize) -> usize {
        if let Some(tree) = &self.tree {
            return tree.position[t] as usize;
        }
        self.chunk_start(t / self.seq) + t % self.seq
    }

    /// Number of row `t`'s token among those of all sequences of this batch, chunks that are elsewhere included.
    pub fn token(&self, t: usize) -> u32 {
        let sequence = t / self.rows_per_sequence();
        (sequence * self.keys() + self.position(t)) as u32
    }

    /// Rows of sequence `sequence` in this batch whose positions are below `position`: the first ones of the sequence.
    pub fn rows_below(&self, sequence: usize, position: usize) -> usize {
        let of = self.chunks_per_sequence();
        let chunks = sequence * of..(sequence + 1) * of;
        chunks.map(|chunk| position.saturating_sub(self.chunk_start(chunk)).min(self.seq)).sum()
    }

    /// Whether some keys are padding.
    pub fn has_padding_keys(&self) -> bool {
        match &self.chunks {
            None => !self.valid.is_empty(),
            Some(c) => !c.key_valid.is_empty(),
        }
    }

    /// Whether key `key` of a sequence is not a real token. Keys from a cache are.
    #[inline(always)]
    pub fn is_padding_key(&self, sequence: usize, key: usize) -> bool {
        match &self.chunks {
            None => key >= self.past && !self.is_valid(sequence * self.seq + key - self.past),
            Some(c) => !c.key_valid.is_empty() && !c.key_valid[sequence * c.keys + key],
        }
    }

    /// Whether row `t` follows a row of its own document in this batch.
    pub fn has_previous(&self, t: usize) -> bool {
        if let Some(tree) = &self.tree {
            return tree.before[t].is_none();
        }
        match &self.chunks {
            None => (t % self.seq) as u32 > self.doc_start[t],
            Some(_) => !self.is_first(t) && self.position(t) > self.doc_start[t] as usize,
        }
    }

    /// Whether row `t` is the first of its sequence (or chunk) and so continues whatever came before (a halo, or zeros).
    pub fn is_first(&self, t: usize) -> bool {
        t.is_multiple_of(self.seq)
    }

    /// How many of the two rows of a halo are the history of row `t`: none of a row that is not a first one, and of a chunk's
    /// first row only those in its document. The newer row of the halo counts first.
    pub fn rows_of_halo(&self, t: usize) -> usize {
        match &self.chunks {
            _ if !self.is_first(t) => 0,
            None => 2,
            Some(_) => (self.position(t) - self.doc_start[t] as usize).min(2),
        }
    }

    /// Where the two rows lie that are the history of row `t` and not before it in this batch, the nearer first.
    #[inline(always)]
    pub fn history(&self, t: usize) -> [Option<Before>; 2] {
        if let Some(tree) = &self.tree {
            return tree.before[t].map_or([None; 2], |before| before.map(Some));
        }
        // A halo has two rows a sequence, the older first.
        let older = if self.is_first(t) { t / self.seq * 2 } else { 0 };
        match self.rows_of_halo(t) {
            0 => [None; 2],
            1 => [Some(Before::Halo(older + 1)), None],
            _ => [Some(Before::Halo(older + 1)), Some(Before::Halo(older))],
        }
    }
}

/// Whether `chunks` describes `batch` parts of `seq` rows.
fn check_chunks(chunks: &Chunks, batch: usize, seq: usize) -> Result<()> {
    let Chunks { start, per_sequence, keys, key_valid } = chunks;
    ensure!(start.len() == batch, "{} starts for {batch} chunks", start.len());
    ensure!(*per_sequence > 0 && batch.is_multiple_of(*per_sequence), "{batch} chunks cannot be {per_sequence} of each sequence");
    let sequences = batch / per_sequence;
    ensure!(
        key_valid.is_empty() || key_valid.len() == sequences * keys,
        "a padding mask of {} for {sequences} x {keys} keys",
        key_valid.len()
    );
    for of_sequence in start.chunks(*per_sequence) {
        for (i, at) in of_sequence.iter().enumerate() {
            // The next chunk begins here at the earliest.
            let end = at.saturating_add(seq);
            match of_sequence.get(i + 1) {
                Some(next) => ensure!(end <= *next, "a chunk of {seq} rows from {at} on reaches into the one from {next} on"),
                None => ensure!(end <= *keys, "a chunk of {seq} rows from {at} on ends after its sequence of {keys}"),
            }
        }
    }
    Ok(())
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
    // Without sequences nothing is divided, nor copied.
    let (la, lb) = (a.len() / batch.max(1), b.len() / batch.max(1));
    for (i, out) in out.chunks_exact_mut((la + lb).max(1)).enumerate() {
        out[..la].copy_from_slice(&a[i * la..(i + 1) * la]);
        out[la..].copy_from_slice(&b[i * lb..(i + 1) * lb]);
    }
}

/// The last `n` rows (of `d` numbers) of each of `batch` sequences.
pub fn last_rows(batch: usize, x: &[f32], n: usize, d: usize, out: &mut [f32]) {
    let len = x.len() / batch.max(1);
    for (i, out) in out.chunks_exact_mut((n * d).max(1)).enumerate() {
        out.copy_from_slice(&x[(i + 1) * len - n * d..(i + 1) * len]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(change: impl Fn(&mut Batch, &mut Chunks)) -> String {
        let mut chunks = Chunks { start: vec![0, 6, 0, 6], per_sequence: 2, keys: 8, key_valid: vec![] };
        let mut batch = Batch { batch: 4, seq: 2, ids: vec![0; 8], ..Batch::default() };
        change(&mut batch, &mut chunks);
        batch.chunks = Some(chunks);
        Rows::new(&batch).map_or_else(|e| e.to_string(), |_| String::new())
    }

    #[test]
    fn chunks_that_cannot_be_are_refused() {
        assert_eq!(refused(|_, _| ()), "");
        assert_eq!(refused(|b, _| b.doc_start = vec![0, 1, 3, 7, 0, 0, 6, 6]), "");
        assert!(refused(|b, _| b.past = 1).contains("cache"));
        assert!(refused(|_, c| c.start.truncate(3)).contains("3 starts for 4 chunks"));
        assert!(refused(|_, c| c.per_sequence = 0).contains("cannot be 0 of each"));
        assert!(refused(|_, c| c.per_sequence = 3).contains("cannot be 3 of each"));
        assert!(refused(|_, c| c.keys = 7).contains("after its sequence of 7"));
        assert!(refused(|_, c| c.key_valid = vec![true; 8]).contains("2 x 8 keys"));
        assert!(refused(|_, c| c.start[1] = 1).contains("reaches into"));
        assert!(refused(|_, c| c.start = vec![0, 6, 6, 0]).contains("reaches into"));
        assert!(refused(|_, c| c.start[3] = usize::MAX).contains("after its sequence"));
        assert!(refused(|b, _| b.doc_start = vec![0, 2, 3, 7, 0, 0, 6, 6]).contains("its document starts later"));
    }

    #[test]
    fn a_halo_is_history_within_the_document_only() {
        let chunks = Some(Chunks { start: vec![4], per_sequence: 1, keys: 8, key_valid: vec![] });
        for (doc_start, of_halo) in [(4, 0), (3, 1), (2, 2), (0, 2)] {
            let doc_start = vec![doc_start, 5, 5, 5];
            let batch = Batch { batch: 1, seq: 4, ids: vec![0; 4], doc_start, chunks: chunks.clone(), ..Batch::default() };
            let rows = Rows::new(&batch).unwrap();
            assert_eq!(rows.rows_of_halo(0), of_halo);
            assert_eq!([0, 1, 2, 3].map(|t| rows.has_previous(t)), [false, false, true, true]);
            assert_eq!([0, 5, 6, 9].map(|position| rows.rows_below(0, position)), [0, 1, 2, 4]);
        }
    }
}
