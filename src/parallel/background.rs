//! A thread of a rank that communicates while the rank computes.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use anyhow::{Context, Result, anyhow};

use crate::failpoint;

type Job = Box<dyn FnOnce() + Send>;

/// Runs jobs one after the other, in the order they were given. Dropping it waits for the one it is at.
pub struct Background {
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
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
        Ok(Self { jobs: Some(jobs), thread: Some(thread) })
    }

    pub fn submit<T: Send + 'static>(&self, job: impl FnOnce() -> Result<T> + Send + 'static) -> Pending<T> {
        let (done, outcome) = channel();
        let job: Job = Box::new(move || {
            // Nobody waits for it any more: the rank is about to end.
            let _ = done.send(job());
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
        if let Some(thread) = self.thread.take() {
            // A panic there has been told of by the hook, and ended the other ranks.
            let _ = thread.join();
        }
    }
}
