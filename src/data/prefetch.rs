//! Batches read ahead on another thread, so that a cold page of a shard never holds the trainer up.

use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};

use anyhow::Result;

use super::loader::Loader;
use crate::tensor::backend::Batch;

/// Micro-batches of consecutive steps, in order. Dropping it ends the thread.
#[derive(Debug)]
pub struct Prefetch {
    batches: Receiver<Result<Batch>>,
}

impl Prefetch {
    /// Micro-batches of `micro_batch` sequences (the last of a step may be smaller) of the given steps; up to `ahead` of
    /// them wait in memory. They are exactly what [`Loader::batch`] returns for the same step and rows.
    pub fn new(loader: Arc<Loader>, steps: Range<u64>, micro_batch: usize, ahead: usize) -> Self {
        let (sender, batches) = sync_channel(ahead.max(1));
        std::thread::spawn(move || {
            let sequences = loader.config().batch_sequences;
            for step in steps {
                for start in (0..sequences).step_by(micro_batch.max(1)) {
                    let batch = loader.batch(step, start..(start + micro_batch.max(1)).min(sequences));
                    let failed = batch.is_err();
                    if sender.send(batch).is_err() || failed {
                        return;
                    }
                }
            }
        });
        Self { batches }
    }
}

impl Iterator for Prefetch {
    type Item = Result<Batch>;

    /// Ends after the last step, and after an error.
    fn next(&mut self) -> Option<Self::Item> {
        self.batches.recv().ok()
    }
}
