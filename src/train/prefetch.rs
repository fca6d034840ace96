//! Batches are read while the step before is computed, so that training does not wait for its data.

use std::ops::Range;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use anyhow::{Result, anyhow};

use crate::data::Loader;
use crate::tensor::backend::Batch;

/// Seconds that a step's data took.
#[derive(Debug, Clone, Copy, Default)]
pub struct DataTime {
    /// To be read, in the background unless it is a run's first.
    pub read_s: f64,
    /// That the step stood still for it.
    pub wait_s: f64,
}

type Reading = JoinHandle<Result<(Vec<Batch>, f64)>>;

/// Reads one batch ahead.
#[derive(Debug)]
pub struct Prefetch {
    loader: Arc<Loader>,
    /// Number of the batch that is being read.
    ahead: Option<(u64, Reading)>,
}

impl Prefetch {
    pub fn new(loader: Loader) -> Self {
        Self { loader: Arc::new(loader), ahead: None }
    }

    pub fn loader(&self) -> &Loader {
        &self.loader
    }

    /// Sequences `parts` of batch `number`, a micro-batch each; begins to read those of the batch that follows. Another batch than
    /// the one that was read ahead is read now.
    pub fn take(&mut self, number: u64, parts: &[Range<usize>]) -> Result<(Vec<Batch>, DataTime)> {
        let started = Instant::now();
        let (batches, read_s) = match self.ahead.take() {
            Some((ahead, reading)) if ahead == number => {
                reading.join().map_err(|_| anyhow!("the thread that reads training data panicked"))??
            }
            other => {
                // Whoever reads something else is done soon; two readers would only be in each other's way.
                other.into_iter().for_each(|(_, reading)| drop(reading.join()));
                read(&self.loader, number, parts)?
            }
        };
        let time = DataTime { read_s, wait_s: started.elapsed().as_secs_f64() };
        let (loader, parts, next) = (self.loader.clone(), parts.to_vec(), number + 1);
        let reading = std::thread::Builder::new().name("data".into()).spawn(move || read(&loader, next, &parts))?;
        self.ahead = Some((next, reading));
        Ok((batches, time))
    }
}

fn read(loader: &Loader, number: u64, parts: &[Range<usize>]) -> Result<(Vec<Batch>, f64)> {
    let started = Instant::now();
    let batches = parts.iter().map(|part| loader.batch(number, part.clone())).collect::<Result<_>>()?;
    Ok((batches, started.elapsed().as_secs_f64()))
}
