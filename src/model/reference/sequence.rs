//! What the rows of a batch may see of each other: padding, documents, sliding windows, and the row before.

use anyhow::Result;
use candle_core::{DType, Device, Tensor};

use crate::error::bad_input;
use crate::tensor::backend::Batch;

/// Added to the score of a key that a query must not see. So large that the score itself is rounded away, in f32 and in
/// f64: a row that sees nothing at all spreads its attention evenly over the whole sequence, as Hugging Face's does.
const HIDDEN: f32 = f32::MIN;

/// The neighbourhood of every row of a batch.
pub struct Sequences {
    pub batch: usize,
    pub seq: usize,
    /// Real tokens (not padding), row after row.
    pub valid: Vec<bool>,
    /// Position at which each row's document begins.
    doc_start: Vec<u32>,
    dtype: DType,
    device: Device,
}

impl Sequences {
    /// Fails when the batch's lists do not have one entry a row, or when its sequences are not whole.
    pub fn new(batch: &Batch, dtype: DType, device: &Device) -> Result<Self> {
        let tokens = batch.tokens();
        if batch.past != 0 {
            return Err(bad_input("the candle reference has no caches: give it whole sequences (past = 0)"));
        }
        if batch.chunks.is_some() {
            return Err(bad_input("the candle reference computes whole sequences, not chunks of them"));
        }
        let lists = [
            ("ids", batch.ids.len(), false),
            ("labels", batch.labels.len(), true),
            ("valid", batch.valid.len(), true),
            ("doc_start", batch.doc_start.len(), true),
        ];
        for (name, len, optional) in lists {
            if len != tokens && !(optional && len == 0) {
                return Err(bad_input(format!(
                    "a batch of {} x {} tokens needs {tokens} entries in `{name}`, got {len}",
                    batch.batch, batch.seq
                )));
            }
        }
        let or = |list: &[u32]| if list.is_empty() { vec![0; tokens] } else { list.to_vec() };
        Ok(Self {
            batch: batch.batch,
            seq: batch.seq,
            valid: if batch.valid.is_empty() { vec![true; tokens] } else { batch.valid.clone() },
            doc_start: or(&batch.doc_start),
            dtype,
            device: device.clone(),
        })
    }

    /// A 0/1 tensor `[B, S, 1]` from a predicate on the row number and its position in the sequence.
    fn indicator(&self, test: impl Fn(usize, usize) -> bool) -> Result<Tensor> {
        let ones: Vec<f32> = (0..self.batch * self.seq).map(|row| f32::from(test(row, row % self.seq))).collect();
        Ok(Tensor::from_vec(ones, (self.batch, self.seq, 1), &self.device)?.to_dtype(self.dtype)?)
    }

    /// `x` `[B, S, C]` with the rows of padding tokens set to 0.
    pub fn mask_rows(&self, x: &Tensor) -> Result<Tensor> {
        if self.valid.iter().all(|v| *v) {
            return Ok(x.clone());
        }
        Ok(x.broadcast_mul(&self.indicator(|row, _| self.valid[row])?)?)
    }

    /// For each row of `x` `[B, S, C]` the row before it in the same document; `first` `[C]` where there is none.
    pub fn previous(&self, x: &Tensor, first: &Tensor) -> Result<Tensor> {
        let continues = self.indicator(|row, position| position > self.doc_start[row] as usize)?; // [B, S, 1]
        let begins = continues.affine(-1.0, 1.0)?;
        let head = x.narrow(1, 0, 1)?.zeros_like()?; // [B, 1, C]
        let shifted = if self.seq == 1 { head } else { Tensor::cat(&[&head, &x.narrow(1, 0, self.seq - 1)?], 1)? };
        Ok((shifted.broadcast_mul(&continues)? + begins.broadcast_mul(first)?)?)
    }

    /// `[B, 1, S, S]`: 0 where query (third axis) sees key (fourth), a hugely negative number elsewhere. A query sees
    /// real tokens of its own document, not after itself, at most `window` of them counting itself.
    pub fn attention_mask(&self, window: Option<usize>) -> Result<Tensor> {
        let mut mask = vec![HIDDEN; self.batch * self.seq * self.seq];
        for b in 0..self.batch {
            for query in 0..self.seq {
                let row = b * self.seq + query;
                let window_start = window.map_or(0, |w| (query + 1).saturating_sub(w));
                for key in window_start.max(self.doc_start[row] as usize)..=query {
                    if self.valid[b * self.seq + key] {
                        mask[row * self.seq + key] = 0.0;
                    }
                }
            }
        }
        Ok(Tensor::from_vec(mask, (self.batch, 1, self.seq, self.seq), &self.device)?.to_dtype(self.dtype)?)
    }
}
