//! A thread of a rank that communicates while the rank computes.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use anyhow::{Context, Result, anyhow};

use crate::failpoint;

type Job = Box<dyn FnOnce() + Send>;

/// Runs jobs one after the other, in the order they were given.
pub struct Background {
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
    /// Jobs that are not done.
    open: Arc<AtomicUsize>,
}

/// The outcome of a job, to be waited for.
pub struct Pending<T>(Receiver<Result<T>>);

impl Background {
    pub fn start(rank: usize) -> Result<Self> {
        let (jobs, todo) = channel::<Job>();
        let thread = std::thread::Builder::new()
            .name(format!("rank-{rank}-comm"))
            .spawn(move || {
                failpoint::set_rank(rank);
                todo.into_iter().for_each(|job| job());
            })
            .context("starting a thread for communication")?;
        Ok(Self { jobs: Some(jobs), thread: Some(thread), open: Arc::default() })
    }

    pub fn submit<T: Send + 'static>(&self, job: impl FnOnce() -> Result<T> + Send + 'static) -> Pending<T> {
        let (done, outcome) = channel();
        self.open.fetch_add(1, Ordering::AcqRel);
        let open = self.open.clone();
        let job: Job = Box::new(move || {
            let outcome = job();
            open.fetch_sub(1, Ordering::AcqRel);
            // Nobody may be waiting for it any more: the rank is about to end.
            let _ = done.send(outcome);
        });
        if let Some(jobs) = &self.jobs {
            // A thread that is gone shows when the outcome is waited for.
            let _ = jobs.send(job);
        }
        Pending(outcome)
    }
}

impl<T> Pending<T> {
    pub fn wait(self) -> Result<T> {
        self.0.recv().map_err(|_| anyhow!("the thread for communication has ended"))?
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        drop(self.jobs.take());
        // A job that is not done waits for other ranks, and this rank, about to end on a failure, has yet to tell them.
        let is_idle = self.open.load(Ordering::Acquire) == 0;
        if let Some(thread) = self.thread.take().filter(|_| is_idle) {
            // A panic there has been told of by the hook, and ended the other ranks.
            let _ = thread.join();
        }
    }
}
