//! Reasons to end a run before its last step: a signal, a time limit, a step asked for.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use signal_hook::consts::{SIGINT, SIGTERM};

/// Why a run ended. In every case its state is saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The last step of the recipe is done.
    Finished,
    /// `--stop-at` was reached.
    StopAt,
    TimeLimit,
    /// SIGINT or SIGTERM.
    Signal(i32),
}

/// How many ranks want the run to end for each reason: the time limit, SIGINT, SIGTERM. Votes of several ranks add up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Votes(pub [u64; 3]);

impl Votes {
    pub fn any(self) -> bool {
        self.0.iter().any(|count| *count > 0)
    }

    /// The strongest reason among them.
    pub fn reason(self) -> Option<Outcome> {
        let reasons = [Outcome::TimeLimit, Outcome::Signal(SIGINT), Outcome::Signal(SIGTERM)];
        reasons.into_iter().zip(self.0).rev().find_map(|(reason, count)| (count > 0).then_some(reason))
    }
}

#[derive(Clone)]
pub struct Stop {
    signal: Arc<AtomicUsize>,
    started: Instant,
    time_limit: Option<Duration>,
}

impl Stop {
    /// Takes over SIGINT and SIGTERM: the first asks for a save, the second ends the process at once.
    pub fn install(time_limit: Option<Duration>) -> Result<Self> {
        let signal = Arc::new(AtomicUsize::new(0));
        let armed = Arc::new(AtomicBool::new(false));
        for s in [SIGINT, SIGTERM] {
            // In this order: the first signal finds `armed` false, and arms it.
            signal_hook::flag::register_conditional_shutdown(s, 128 + s, Arc::clone(&armed))
                .and_then(|_| signal_hook::flag::register(s, Arc::clone(&armed)))
                .and_then(|_| signal_hook::flag::register_usize(s, Arc::clone(&signal), s as usize))
                .context("taking over SIGINT and SIGTERM")?;
        }
        Ok(Self { signal, started: Instant::now(), time_limit })
    }

    /// A signal that came, if any.
    pub fn signalled(&self) -> Option<i32> {
        match self.signal.load(Ordering::Relaxed) {
            0 => None,
            s => Some(s as i32),
        }
    }

    /// This rank's votes.
    pub fn votes(&self) -> Votes {
        Votes(match self.reason() {
            None => [0, 0, 0],
            Some(Outcome::Signal(SIGTERM)) => [0, 0, 1],
            Some(Outcome::Signal(_)) => [0, 1, 0],
            Some(_) => [1, 0, 0],
        })
    }

    /// Why to end now, between two steps.
    pub fn reason(&self) -> Option<Outcome> {
        if let Some(s) = self.signalled() {
            return Some(Outcome::Signal(s));
        }
        self.time_limit.filter(|limit| self.started.elapsed() >= *limit).map(|_| Outcome::TimeLimit)
    }
}
