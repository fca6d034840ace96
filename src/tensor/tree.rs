//! Rows of many sequences that share beginnings, as one batch without padding: a prefix tree whose nodes are computed once.
//!
//! The rows of such a batch are ordinary rows for every verb that works row by row. Two verbs look further: CCA's convolutions at the
//! two rows before, and attention at all keys before. A [`Tree`] says where these lie. Keys and values of all sequences lie in one
//! pool; a sequence's are some ranges of its rows, which other sequences may share.
//!
//! The functions here are the verbs in terms of others, one segment after the other, for backends that have nothing better.

use std::ops::Range;

use anyhow::{Result, ensure};

use super::backend::{AttentionShape, Backend, Batch, CcaIn, CcaParams, CcaShape, Halo, Qkv};

/// Where a row that is looked back to lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Before {
    /// In the batch.
    Row(usize),
    /// In the halo's queries and keys; its delayed value is row `at / 2` of the halo's, and there only of odd `at`.
    Halo(usize),
}

/// Rows of a batch that follow one another in one sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment {
    pub rows: Range<usize>,
    /// Of the first row in its sequence.
    pub position: usize,
    /// The two rows before the first one, the nearer first. What stands before a sequence is zero.
    pub before: [Before; 2],
    /// Rows of the pool that hold keys and values of the positions from 0 on, those of `rows` included.
    pub keys: Vec<Range<usize>>,
}

/// The segments of a batch, in the order of its rows, which they share out among themselves.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tree {
    pub segments: Vec<Segment>,
}

impl Tree {
    /// Rows of the batch.
    pub fn tokens(&self) -> usize {
        self.segments.last().map_or(0, |s| s.rows.end)
    }

    /// Pairs of a row and a key that it sees, were there no window.
    pub fn pairs(&self) -> usize {
        self.segments.iter().map(|s| s.rows.len() * (s.position + 1) + s.rows.len() * s.rows.len().saturating_sub(1) / 2).sum()
    }

    /// Whether the segments are what the fields' comments say, in a halo of `halo` rows and a pool of `pool` rows.
    ///
    /// # Errors
    /// What is not.
    pub fn check(&self, halo: usize, pool: usize) -> Result<()> {
        let mut next = 0;
        for s in &self.segments {
            ensure!(s.rows.start == next && s.rows.end > next, "segment {:?} does not follow row {next}", s.rows);
            next = s.rows.end;
            let fits = |before: &Before| match *before {
                Before::Row(t) => t < s.rows.start,
                Before::Halo(at) => at < halo,
            };
            let odd = !matches!(s.before[0], Before::Halo(at) if at % 2 == 0);
            ensure!(odd && s.before.iter().all(fits), "segment {:?} looks back to {:?}, halo of {halo} rows", s.rows, s.before);
            let keys: usize = s.keys.iter().map(Range::len).sum();
            ensure!(keys == s.position + s.rows.len(), "segment {:?} from position {} has {keys} keys", s.rows, s.position);
            ensure!(s.keys.iter().all(|k| k.end <= pool), "keys {:?} in a pool of {pool} rows", s.keys);
        }
        Ok(())
    }
}

fn indices(range: &Range<usize>) -> impl Iterator<Item = u32> + use<> {
    range.start as u32..range.end as u32
}

/// `Backend::gather_rows` by way of the host.
pub fn gather_rows<B: Backend>(b: &B, x: &B::Buf, index: &[u32]) -> Result<B::Buf> {
    let [rows, cols] = b.shape(x);
    ensure!(index.iter().all(|i| (*i as usize) < rows), "rows {index:?} of a matrix of {rows}");
    let from = b.view(x)?;
    let numbers: Vec<f32> = index.iter().flat_map(|i| &from[*i as usize * cols..][..cols]).copied().collect();
    b.upload(&numbers, index.len(), cols)
}

/// `Backend::scatter_rows` by way of the host.
pub fn scatter_rows<B: Backend>(b: &B, x: &B::Buf, index: &[u32], into: &mut B::Buf) -> Result<()> {
    let ([given, cols], [rows, width]) = (b.shape(x), b.shape(into));
    ensure!(given == index.len() && cols == width, "{given} rows of {cols} for {} places of {width}", index.len());
    ensure!(index.iter().all(|i| (*i as usize) < rows), "places {index:?} in a matrix of {rows} rows");
    let (from, mut to) = (b.view(x)?, b.download(into)?);
    for (x, i) in from.chunks(cols.max(1)).zip(index) {
        to[*i as usize * cols..][..cols].copy_from_slice(x);
    }
    *into = b.upload(&to, rows, width)?;
    Ok(())
}

/// One segment as an ordinary batch of one sequence that continues.
fn alone<B: Backend>(b: &B, s: &Segment) -> Result<B::Rows> {
    let seq = s.rows.len();
    b.rows(&Batch { batch: 1, seq, past: s.position, ids: vec![0; seq], ..Batch::default() })
}

/// `parts`, one below the other; an empty matrix of `cols` columns where there are none.
fn joined<B: Backend>(b: &B, parts: impl IntoIterator<Item = B::Buf>, cols: usize) -> Result<B::Buf> {
    let mut parts = parts.into_iter();
    let Some(mut all) = parts.next() else { return b.zeros(0, cols) };
    for part in parts {
        all = b.concat_rows(1, &all, &part)?;
    }
    Ok(all)
}

/// `Backend::cca_mix_tree` by `Backend::cca_mix`.
pub fn cca_mix<B: Backend>(
    b: &B,
    tree: &Tree,
    shape: CcaShape,
    x: CcaIn<&B::Buf>,
    p: CcaParams<&B::Buf>,
    halo: Halo<&B::Buf>,
) -> Result<Qkv<B::Buf>> {
    let cols = |buf| b.shape(buf)[1];
    let (q_dim, kv_dim) = (cols(x.q), cols(x.k));
    let mut parts: [Vec<B::Buf>; 3] = Default::default();
    for s in &tree.segments {
        let index: Vec<u32> = indices(&s.rows).collect();
        let own = |x| b.gather_rows(x, &index);
        let own = CcaIn { q: own(x.q)?, k: own(x.k)?, v_current: own(x.v_current)?, v_delayed: own(x.v_delayed)? };
        let row = |x, halo, place| match place {
            Before::Row(t) => b.gather_rows(x, &[t as u32]),
            Before::Halo(at) => b.gather_rows(halo, &[at as u32]),
        };
        let two = |x, halo| b.concat_rows(1, &row(x, halo, s.before[1])?, &row(x, halo, s.before[0])?);
        let of_value = match s.before[0] {
            Before::Halo(at) => Before::Halo(at / 2),
            row => row,
        };
        let before = Halo { q: two(x.q, halo.q)?, k: two(x.k, halo.k)?, v_delayed: row(x.v_delayed, halo.v_delayed, of_value)? };
        let (out, _) = b.cca_mix(&alone(b, s)?, shape, own.as_ref(), p, Some(before.as_ref()))?;
        parts.iter_mut().zip([out.q, out.k, out.v]).for_each(|(parts, part)| parts.push(part));
    }
    let [q, k, v] = parts;
    Ok(Qkv { q: joined(b, q, q_dim)?, k: joined(b, k, kv_dim)?, v: joined(b, v, kv_dim)? })
}

/// `Backend::tree_attention` by `Backend::causal_attention`.
pub fn attention<B: Backend>(b: &B, tree: &Tree, shape: AttentionShape, x: Qkv<&B::Buf>) -> Result<B::Buf> {
    let mut parts = Vec::with_capacity(tree.segments.len());
    for s in &tree.segments {
        let own: Vec<u32> = indices(&s.rows).collect();
        let keys: Vec<u32> = s.keys.iter().flat_map(indices).collect();
        let (q, k, v) = (b.gather_rows(x.q, &own)?, b.gather_rows(x.k, &keys)?, b.gather_rows(x.v, &keys)?);
        parts.push(b.causal_attention(&alone(b, s)?, shape, Qkv { q: &q, k: &k, v: &v })?.0);
    }
    joined(b, parts, b.shape(x.q)[1])
}
