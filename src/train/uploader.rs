//! The thread that uploads checkpoints while training goes on. One upload is in flight at a time.

use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use anyhow::{Context, Result};

use crate::checkpoint::remote::{Remote, Uploaded};
use crate::checkpoint::step_dir;

/// How an upload ended.
pub struct UploadEnded {
    pub step: u64,
    pub outcome: Result<Uploaded>,
}

/// A checkpoint that is to be uploaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Waiting {
    step: u64,
    /// Also when a newer one waits.
    keep: bool,
}

pub struct Uploader {
    root: PathBuf,
    url: String,
    orders: Sender<u64>,
    ended: Receiver<UploadEnded>,
    in_flight: Option<Waiting>,
    waiting: Vec<Waiting>,
    /// Of those to be kept, the ones whose upload has failed: tried again with the next one.
    failed: Vec<u64>,
}

impl Uploader {
    /// For checkpoints of the folder `root`.
    ///
    /// # Errors
    /// `BadInput` when the URL is of no store; when the thread cannot be started.
    pub fn start(root: &Path, url: &str, retry: Duration) -> Result<Self> {
        let remote = Remote::open(url, retry)?;
        let (orders, received) = channel::<u64>();
        let (tell, ended) = channel();
        let of = root.to_path_buf();
        let body = move || {
            for step in received {
                let outcome = remote.upload(&of.join(step_dir(step)));
                if tell.send(UploadEnded { step, outcome }).is_err() {
                    break;
                }
            }
        };
        std::thread::Builder::new().name("upload".into()).spawn(body).context("starting the uploading thread")?;
        Ok(Self {
            root: root.to_path_buf(),
            url: url.into(),
            orders,
            ended,
            in_flight: None,
            waiting: Vec::new(),
            failed: Vec::new(),
        })
    }

    pub fn url(&self) -> &str {
        &self.url
    }

    /// Folder of a step's checkpoint.
    pub fn dir(&self, step: u64) -> PathBuf {
        self.root.join(step_dir(step))
    }

    /// Asks for the upload of a checkpoint. It takes the place of the one that waits, unless that one is to be kept.
    pub fn offer(&mut self, step: u64, keep: bool) {
        let again = std::mem::take(&mut self.failed);
        self.waiting.extend(again.into_iter().map(|step| Waiting { step, keep: true }));
        self.waiting.retain(|w| w.keep && w.step != step);
        self.waiting.push(Waiting { step, keep });
        self.begin();
    }

    /// Steps that the upload still needs.
    pub fn needed(&self) -> Vec<u64> {
        let orders = self.in_flight.iter().chain(&self.waiting).map(|w| w.step);
        orders.chain(self.failed.iter().copied()).collect()
    }

    fn begin(&mut self) {
        // The newest first: it is the one to go on from.
        let newest = (0..self.waiting.len()).max_by_key(|i| self.waiting[*i].step);
        if let (None, Some(newest)) = (self.in_flight, newest) {
            let next = self.waiting.swap_remove(newest);
            // The thread is gone when it has panicked, which `wait` tells.
            let _ = self.orders.send(next.step);
            self.in_flight = Some(next);
        }
    }

    /// Waits at most so long for the upload in flight; None when none is, or it is not done by then.
    pub fn wait(&mut self, at_most: Duration) -> Option<UploadEnded> {
        let Waiting { step, keep } = self.in_flight?;
        let ended = match self.ended.recv_timeout(at_most) {
            Ok(ended) => ended,
            Err(RecvTimeoutError::Timeout) => return None,
            Err(RecvTimeoutError::Disconnected) => {
                // Nothing that waits will ever be uploaded.
                self.waiting.clear();
                UploadEnded { step, outcome: Err(anyhow::anyhow!("the thread that uploads panicked")) }
            }
        };
        self.in_flight = None;
        if keep && ended.outcome.is_err() {
            self.failed.push(step);
        }
        self.begin();
        Some(ended)
    }

    /// Whether anything is in flight or waits.
    pub fn is_busy(&self) -> bool {
        self.in_flight.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_newest_one_waits_and_those_that_are_kept() {
        let dir = tempfile::tempdir().unwrap();
        let url = format!("file://{}/mirror", dir.path().display());
        let mut uploader = Uploader::start(dir.path(), &url, Duration::ZERO).unwrap();
        // There are no such checkpoints, so that each upload fails at once.
        for (step, keep) in [(1, false), (2, false), (3, true), (4, false), (5, false)] {
            uploader.offer(step, keep);
        }
        assert_eq!(uploader.needed(), [1, 3, 5]);
        uploader.offer(5, true);
        let mut tried = Vec::new();
        while uploader.is_busy() {
            let Some(ended) = uploader.wait(Duration::from_secs(10)) else { continue };
            assert!(ended.outcome.is_err());
            tried.push(ended.step);
        }
        assert_eq!(tried, [1, 5, 3]);
        assert!(uploader.wait(Duration::ZERO).is_none());
        // Those that are to be kept wait for another chance.
        assert_eq!(uploader.needed(), [5, 3]);
        uploader.offer(6, false);
        assert_eq!(uploader.needed(), [6, 5, 3]);
    }
}
