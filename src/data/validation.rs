//! Held-out data: every token predicted once, in the order of the files.

use std::ops::Range;
use std::path::PathBuf;

use anyhow::{Result, ensure};

use super::dataset::Dataset;
use super::loader::{Borders, append};
use super::source::Sample;
use crate::error::bad_input;
use crate::tensor::backend::Batch;

/// Held-out shards as windows of `seq_len` tokens, one after the other, without overlap.
///
/// Window w has inputs `w * L .. w * L + L` and their successors as labels, so every token but the very first is
/// predicted exactly once (with `document_mask` or `eod_mask_loss`: every token but the first of each document). The last window is filled
/// up with rows that are not `valid` and have no label.
#[derive(Debug)]
pub struct ValidationSet {
    dataset: Dataset,
    seq_len: usize,
    borders: Borders,
    vocab_size: usize,
}

impl ValidationSet {
    /// Refuses data of fewer than two tokens: there is nothing to predict.
    pub fn open(paths: &[PathBuf], seq_len: usize, document_mask: bool, vocab_size: usize) -> Result<Self> {
        let dataset = Dataset::open(paths)?;
        if dataset.num_tokens() < 2 || seq_len == 0 {
            let text = "held-out shards have fewer than 2 tokens, or sequences of 0 tokens: nothing to predict";
            return Err(bad_input(format!("{text} (first file: {})", dataset.shards()[0].bin_path().display())));
        }
        let borders = Borders { mask: document_mask, first_token_loss: true };
        Ok(Self { dataset, seq_len, borders, vocab_size })
    }

    /// With `yes`, leaves the first token of every document out of the loss, as training with `data.eod_mask_loss` does.
    pub fn eod_mask_loss(mut self, yes: bool) -> Self {
        self.borders.first_token_loss = !yes;
        self
    }

    pub fn dataset(&self) -> &Dataset {
        &self.dataset
    }

    /// Windows that together predict every token.
    pub fn num_windows(&self) -> u64 {
        (self.dataset.num_tokens() - 1).div_ceil(self.seq_len as u64)
    }

    /// UTF-8 bytes of all documents / all tokens, the ends of documents among the tokens; None where a shard lacks the
    /// sidecar that counts bytes.
    ///
    /// Bits per byte = mean loss in nats a predicted token / ln 2 / this ratio. The end of a document is predicted like any
    /// token but stands for no byte, so its cost is spread over the text's bytes. The few tokens that nothing predicts
    /// (see the type) are charged at the mean of the others.
    pub fn bytes_per_token(&self) -> Option<f64> {
        Some(self.dataset.text_bytes()? as f64 / self.dataset.num_tokens() as f64)
    }

    /// Windows `windows` as one batch.
    pub fn batch(&self, windows: Range<u64>) -> Result<Batch> {
        ensure!(
            windows.start <= windows.end && windows.end <= self.num_windows(),
            "windows {windows:?} of {} held-out windows",
            self.num_windows()
        );
        let seq = self.seq_len;
        let mut batch = Batch { batch: (windows.end - windows.start) as usize, seq, ..Batch::default() };
        let mut sample = Sample::default();
        for w in windows {
            let from = w * seq as u64;
            let to = (from + seq as u64 + 1).min(self.dataset.num_tokens());
            sample.clear();
            self.dataset.read_marked(from, to, self.vocab_size, &mut sample)?;
            self.starts(from, to, &mut sample.starts)?;
            // Only the very last window can be short.
            sample.pad(seq + 1);
            append(&mut batch, &sample, self.borders);
        }
        Ok(batch)
    }

    /// Positions in the window `from..to` where documents begin.
    fn starts(&self, from: u64, to: u64, starts: &mut Vec<u32>) -> Result<()> {
        starts.clear();
        if !self.borders.matter() {
            return Ok(());
        }
        let mut d = self.dataset.document_of_token(from)?;
        while d < self.dataset.num_documents() {
            let (start, end) = self.dataset.document(d)?;
            if start >= to {
                break;
            }
            if start >= from && end > start {
                starts.push((start - from) as u32);
            }
            d += 1;
        }
        Ok(())
    }
}
