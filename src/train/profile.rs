//! `--profile`: records a few steps, writes the trace, and says at the end where their time went.

use std::path::PathBuf;

use super::run::write_whole;
use crate::machine::Peaks;
use crate::tensor::backend::Precision;
use crate::tensor::trace::{self, Trace};

/// Names of a whole step and of the reading of its data, in a recording.
pub const STEP: &str = "step";
pub const DATA: &str = "data";
/// Steps of this process that are recorded, counted from 1: the first ones still warm up.
const FIRST: u64 = 3;
const LAST: u64 = 5;
/// Lines of the table.
const TOP: usize = 15;
/// Seconds for the machine's limits.
const LIMITS_S: f64 = 3.0;

pub struct Profile {
    path: PathBuf,
    first: u64,
    last: u64,
    /// Steps that this process has made.
    done: u64,
    trace: Option<Trace>,
}

impl Profile {
    /// For a process that is going to make `steps` steps. A run that is too short has its last steps recorded.
    pub fn new(path: PathBuf, steps: u64) -> Self {
        Self { path, first: FIRST.min(steps), last: LAST.min(steps), done: 0, trace: None }
    }

    /// Before the next step of this process, in whatever stage.
    pub fn before(&mut self) {
        if self.done + 1 == self.first && self.trace.is_none() {
            trace::start();
        }
    }

    /// After it, when it has happened.
    pub fn after(&mut self) {
        self.done += 1;
        if self.done == self.last {
            self.close();
        }
    }

    /// Ends the recording and writes it. A trace that cannot be written does not end the run.
    fn close(&mut self) {
        if !trace::is_on() {
            return;
        }
        let trace = trace::finish();
        let mut text = Vec::new();
        match trace.write_chrome(&mut text).map_err(Into::into).and_then(|()| write_whole(&self.path, &text)) {
            Ok(()) => self.trace = Some(trace),
            Err(e) => tell!("warning: {e:#}; training goes on without the trace"),
        }
    }

    /// At the end of a run that a signal cut short: what there is.
    pub fn abandon(mut self) {
        self.close();
        if self.trace.is_some() {
            say!("the trace up to here is {}; https://ui.perfetto.dev shows it", self.path.display());
        }
    }

    /// At the end of the run: where the time of the recorded steps went, against limits that are measured now.
    pub fn report(mut self, precision: Precision) {
        self.close();
        let Some(trace) = &self.trace else { return };
        let limits = Peaks::measure(LIMITS_S).limits(precision);
        let summary = trace.summary(STEP, limits);
        if summary.times == 0 {
            return;
        }
        let (last, gflops, gbytes) = (self.first + summary.times as u64 - 1, limits.flops_per_s / 1e9, limits.bytes_per_s / 1e9);
        say!(
            "\nprofile of steps {} to {last} of this process, against {gflops:.1} GFLOP/s and {gbytes:.1} GB/s measured now:\n",
            self.first
        );
        say!("{}", summary.table(STEP, limits, TOP).trim_end());
        say!("\nthe trace is {}; https://ui.perfetto.dev shows it", self.path.display());
    }
}
