//! A micro-batch made ready: what kernels need to know of each row, on the device.

use anyhow::{Result, ensure};

use super::host::upload_plain;
use super::{Buf, Hip, cca};
use crate::tensor::backend::{Batch, Chunks};

/// Of `batch` sequences (or chunks) of `seq` rows.
#[derive(Debug)]
pub struct Rows {
    pub batch: usize,
    pub seq: usize,
    /// Rows before the first one that live in caches.
    pub past: usize,
    /// i32 `[T]`: token of each row.
    pub ids: Buf,
    /// Token that each row is to predict, negative = none; on the host, where rows that have one are picked. Empty = none has.
    pub labels: Vec<i32>,
    /// u8 `[T]`: 1 = real, 0 = padding. None = all are real.
    pub valid: Option<Buf>,
    /// u8 `[batch * keys]`: the same of all keys, those of caches being real. None = all are.
    pub key_valid: Option<Buf>,
    /// i32 `[T]`: where the row's document begins, as `Batch::doc_start` says. None = one document a sequence.
    pub doc_start: Option<Buf>,
    /// i32 `[T, 4]`: which rows CCA's convolutions look back to from each row.
    pub history: Buf,
    pub chunks: Option<ChunkRows>,
    /// The tokens on the host, for what is sorted there.
    pub host_ids: Vec<u32>,
}

/// Of chunks of longer sequences.
#[derive(Debug)]
pub struct ChunkRows {
    pub plan: Chunks,
    /// i32 `[batch]`: position of each chunk's first row in its sequence.
    pub start: Buf,
    /// u8 `[sequences * keys]`: which keys are real. None = all.
    pub key_valid: Option<Buf>,
}

impl Rows {
    pub fn new(hip: &Hip, b: &Batch) -> Result<Self> {
        let tokens = b.tokens();
        let fits = |n: usize| n == 0 || n == tokens;
        ensure!(b.ids.len() == tokens, "a batch of {tokens} rows got {} tokens", b.ids.len());
        ensure!(
            fits(b.labels.len()) && fits(b.valid.len()) && fits(b.doc_start.len()),
            "a batch of {tokens} rows got {} labels, {} marks of padding, {} starts of documents",
            b.labels.len(),
            b.valid.len(),
            b.doc_start.len()
        );
        let some = |data: Vec<i32>| if data.is_empty() { Ok(None) } else { upload_plain(hip, &data).map(Some) };
        let marks = |x: Vec<u8>| if x.is_empty() { Ok(None) } else { upload_plain(hip, &x).map(Some) };
        let bytes = |x: &[bool]| x.iter().map(|v| u8::from(*v)).collect::<Vec<_>>();
        let of_caches = b.valid.chunks(b.seq.max(1)).flat_map(|own| std::iter::repeat_n(1, b.past).chain(bytes(own)));
        let chunks = match &b.chunks {
            None => None,
            Some(plan) => Some(ChunkRows {
                start: upload_plain(hip, &plan.start.iter().map(|s| *s as i32).collect::<Vec<_>>())?,
                key_valid: marks(bytes(&plan.key_valid))?,
                plan: plan.clone(),
            }),
        };
        let doc_start = some(b.doc_start.iter().map(|s| *s as i32).collect())?;
        let history = cca::history(hip, b, doc_start.as_ref(), chunks.as_ref().map(|c: &ChunkRows| &c.start))?;
        Ok(Self {
            batch: b.batch,
            seq: b.seq,
            past: b.past,
            ids: upload_plain(hip, &b.ids.iter().map(|i| *i as i32).collect::<Vec<_>>())?,
            labels: b.labels.iter().map(|l| i32::try_from(*l).unwrap_or(-1)).collect(),
            key_valid: marks(of_caches.collect())?,
            valid: marks(bytes(&b.valid))?,
            doc_start,
            history,
            chunks,
            host_ids: b.ids.clone(),
        })
    }

    pub fn tokens(&self) -> usize {
        self.batch * self.seq
    }

    /// Whole sequences that the rows are of.
    pub fn sequences(&self) -> usize {
        self.chunks.as_ref().map_or(self.batch, |c| self.batch / c.plan.per_sequence.max(1))
    }

    /// Keys of each sequence.
    pub fn keys(&self) -> usize {
        self.chunks.as_ref().map_or(self.past + self.seq, |c| c.plan.keys)
    }
}

/// Address of a buffer that may be missing: null.
pub fn address(buf: Option<&Buf>) -> *const f32 {
    buf.map_or(std::ptr::null(), Buf::at)
}
