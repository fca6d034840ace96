//! Rounds of a measurement: a warm-up, then one after the other until the time is used.

use std::time::Instant;

use anyhow::Result;
use serde::Serialize;

use crate::robust::median;

/// What one call took. Times are per call, though a round of a short one consists of many.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Times {
    pub rounds: usize,
    pub calls_per_round: usize,
    pub median_s: f64,
    pub best_s: f64,
    /// CPU time of the whole process, all threads, median of the rounds.
    pub cpu_s: f64,
}

/// Least rounds, however little time there is, and most, however much.
const LEAST_ROUNDS: usize = 3;
const MOST_ROUNDS: usize = 10_000;
/// A round lasts at least so long, so that clocks do not matter.
const ROUND_S: f64 = 1e-3;

/// Times `f`, which is called twice beforehand.
pub fn measure(seconds: f64, f: impl FnMut() -> Result<()>) -> Result<Times> {
    measure_until(seconds, f, || Ok(()))
}

/// Times `f`, which may return before its work is done: a round ends when `wait` returns.
pub fn measure_until(seconds: f64, mut f: impl FnMut() -> Result<()>, wait: impl Fn() -> Result<()>) -> Result<Times> {
    // Whatever came before is not its work, and neither is what a first call prepares.
    f()?;
    wait()?;
    let warming = Instant::now();
    f()?;
    wait()?;
    let calls = (ROUND_S / warming.elapsed().as_secs_f64().max(1e-7)).ceil().max(1.0) as usize;
    let (began, mut wall, mut cpu) = (Instant::now(), Vec::new(), Vec::new());
    while wall.len() < LEAST_ROUNDS || (began.elapsed().as_secs_f64() < seconds && wall.len() < MOST_ROUNDS) {
        let (started, cpu_before) = (Instant::now(), cpu_seconds());
        for _ in 0..calls {
            f()?;
        }
        wait()?;
        wall.push(started.elapsed().as_secs_f64() / calls as f64);
        cpu.push((cpu_seconds() - cpu_before) / calls as f64);
    }
    Ok(Times::of(wall, cpu, calls))
}

impl Times {
    /// `wall` and `cpu`: seconds a call, of each round.
    pub fn of(wall: Vec<f64>, cpu: Vec<f64>, calls_per_round: usize) -> Self {
        Self {
            rounds: wall.len(),
            calls_per_round,
            best_s: wall.iter().copied().fold(f64::INFINITY, f64::min),
            median_s: median(wall),
            cpu_s: median(cpu),
        }
    }
}

/// CPU time of this process so far, in user and system mode, of all threads.
pub fn cpu_seconds() -> f64 {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: `usage` is a place for one rusage, for which all zeros is a valid value should the call fail.
    let usage = unsafe {
        libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr());
        usage.assume_init()
    };
    let seconds = |t: libc::timeval| t.tv_sec as f64 + t.tv_usec as f64 * 1e-6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_rounds() {
        let times = Times::of(vec![3.0, 1.0, 2.0], vec![6.0, 2.0, 4.0], 7);
        assert_eq!((times.median_s, times.best_s, times.cpu_s, times.rounds), (2.0, 1.0, 4.0, 3));
    }

    #[test]
    fn rounds_are_made_however_little_time_there_is() {
        let mut calls = 0;
        let times = measure(0.0, || {
            calls += 1;
            Ok(())
        })
        .unwrap();
        assert_eq!(times.rounds, LEAST_ROUNDS);
        assert_eq!(calls, 2 + LEAST_ROUNDS * times.calls_per_round);
        assert!(times.best_s <= times.median_s);
        assert!(measure(1.0, || anyhow::bail!("no")).is_err());
    }

    #[test]
    fn the_process_has_used_time() {
        let before = cpu_seconds();
        let work: f64 = (0..4_000_000).map(|i| std::hint::black_box(i as f64).sqrt()).sum();
        assert!(work > 0.0 && cpu_seconds() > before);
    }
}
