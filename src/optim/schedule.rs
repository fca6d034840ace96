//! The learning rate: a pure function of the step, so that it cannot depend on where a run was stopped or resumed.

use std::f64::consts::PI;

use crate::recipe::{Recipe, ScheduleKind, ScheduleSpec};

/// A learning-rate curve over a run of `total_steps` optimizer steps, numbered from 0.
///
/// With W = `warmup_steps` and N = `total_steps`, the learning rate of step t is
///
/// * t < W: `lr * (t + 1) / W`
/// * cosine: `min_lr + (lr - min_lr) * (1 + cos(pi x)) / 2`, x = (t - W) / (N - W)
/// * linear: `lr + (min_lr - lr) * x`, the same x
/// * constant: `lr`
/// * wsd: `lr` until step N - D, then `lr + (min_lr - lr) * (t - (N - D)) / D`, D = min(`decay_steps`, N - W)
///
/// x is at most 1: a step at or past the end, or past a warm-up as long as the run, has `min_lr`
/// (`lr` where nothing decays: constant, and wsd with `decay_steps` = 0).
///
/// ```
/// use zaya::optim::schedule::Schedule;
/// use zaya::recipe::ScheduleKind;
/// let s = Schedule { kind: ScheduleKind::Linear, lr: 1.0, min_lr: 0.0, warmup_steps: 2, decay_steps: 0, total_steps: 6 };
/// let table: Vec<f64> = (0..7).map(|t| s.lr_at(t)).collect();
/// assert_eq!(table, [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]);
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Schedule {
    pub kind: ScheduleKind,
    pub lr: f64,
    pub min_lr: f64,
    pub warmup_steps: u64,
    /// Only `Wsd` uses it.
    pub decay_steps: u64,
    pub total_steps: u64,
}

impl Schedule {
    pub fn new(spec: &ScheduleSpec, total_steps: u64) -> Self {
        Self {
            kind: spec.kind,
            lr: spec.lr,
            min_lr: spec.min_lr,
            warmup_steps: spec.warmup_steps,
            decay_steps: spec.decay_steps,
            total_steps,
        }
    }

    /// The curve of a recipe of one stage. `--stop-at` has no part in it.
    pub fn of(recipe: &Recipe) -> Self {
        Self::new(&recipe.schedule, recipe.train.steps)
    }

    /// Learning rate of the optimizer step that follows `step` finished ones.
    pub fn lr_at(&self, step: u64) -> f64 {
        if step < self.warmup_steps {
            return self.lr * (step + 1) as f64 / self.warmup_steps as f64;
        }
        // Share of a stretch of `length` steps, beginning at `start`, that lies behind `step`; a stretch of none is over.
        let share = |start: u64, length: u64| match length {
            0 => 1.0,
            _ => (step.saturating_sub(start) as f64 / length as f64).min(1.0),
        };
        let rest = self.total_steps.saturating_sub(self.warmup_steps);
        match self.kind {
            ScheduleKind::Constant => self.lr,
            ScheduleKind::Cosine => {
                let x = share(self.warmup_steps, rest);
                self.min_lr + 0.5 * (self.lr - self.min_lr) * (1.0 + (PI * x).cos())
            }
            ScheduleKind::Linear => self.lr + (self.min_lr - self.lr) * share(self.warmup_steps, rest),
            ScheduleKind::Wsd if self.decay_steps == 0 => self.lr,
            ScheduleKind::Wsd => {
                let decay = self.decay_steps.min(rest);
                self.lr + (self.min_lr - self.lr) * share(self.total_steps - decay.min(self.total_steps), decay)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule(kind: ScheduleKind, warmup_steps: u64, decay_steps: u64, total_steps: u64) -> Schedule {
        Schedule { kind, lr: 6e-4, min_lr: 2e-4, warmup_steps, decay_steps, total_steps }
    }

    fn table(s: &Schedule, steps: u64) -> Vec<f64> {
        (0..steps).map(|t| s.lr_at(t)).collect()
    }

    fn close(a: &[f64], b: &[f64]) {
        assert_eq!(a.len(), b.len());
        for (x, y) in a.iter().zip(b) {
            assert!((x - y).abs() <= 1e-18, "{a:?} != {b:?}");
        }
    }

    const ALL: [ScheduleKind; 4] = [ScheduleKind::Cosine, ScheduleKind::Linear, ScheduleKind::Constant, ScheduleKind::Wsd];

    #[test]
    fn cosine_equals_the_reference_run() {
        // Learning rates of the reference's 8 steps: 2 of warm-up, then cosine over the other 6.
        let reference = [3e-4, 6e-4, 6e-4, 0.0005732050807568877, 0.0005, 0.0004, 3e-4, 0.00022679491924311226];
        close(&table(&schedule(ScheduleKind::Cosine, 2, 0, 8), 8), &reference);
    }

    #[test]
    fn shapes_by_hand() {
        close(&table(&schedule(ScheduleKind::Constant, 2, 0, 4), 6), &[3e-4, 6e-4, 6e-4, 6e-4, 6e-4, 6e-4]);
        close(&table(&schedule(ScheduleKind::Linear, 0, 0, 4), 6), &[6e-4, 5e-4, 4e-4, 3e-4, 2e-4, 2e-4]);
        close(&table(&schedule(ScheduleKind::Wsd, 1, 2, 6), 8), &[6e-4, 6e-4, 6e-4, 6e-4, 6e-4, 4e-4, 2e-4, 2e-4]);
    }

    #[test]
    fn a_warm_up_of_any_length_is_defined() {
        for kind in ALL {
            // None: the first step has the full learning rate.
            close(&table(&schedule(kind, 0, 3, 10), 1), &[6e-4]);
            // As long as the run, and longer: a ramp, and nothing but the ramp.
            close(&table(&schedule(kind, 4, 3, 4), 4), &[1.5e-4, 3e-4, 4.5e-4, 6e-4]);
            close(&table(&schedule(kind, 8, 3, 4), 4), &[0.75e-4, 1.5e-4, 2.25e-4, 3e-4]);
            for (warmup, decay, total) in [(0, 0, 0), (0, 0, 1), (1, 0, 1), (0, 1, 1), (3, 9, 5), (5, 5, 5), (9, 9, 5), (0, 5, 5)]
            {
                for lr in table(&schedule(kind, warmup, decay, total), 20) {
                    assert!(lr.is_finite() && lr > 0.0 && lr <= 6e-4 * (1.0 + 1e-15), "{kind:?} {warmup} {decay} {total}: {lr}");
                }
            }
        }
        let last = u64::MAX;
        close(&[schedule(ScheduleKind::Cosine, 2, 0, 8).lr_at(last)], &[2e-4]);
        close(&[schedule(ScheduleKind::Wsd, 2, 0, 8).lr_at(last)], &[6e-4]);
        close(&[schedule(ScheduleKind::Wsd, 2, 3, 8).lr_at(last)], &[2e-4]);
    }

    #[test]
    fn after_the_warm_up_it_never_rises() {
        for kind in ALL {
            let s = schedule(kind, 5, 7, 40);
            let t = table(&s, 50);
            assert!(t[..5].is_sorted(), "{kind:?}");
            assert!(t[4..].iter().rev().is_sorted(), "{kind:?}");
        }
    }
}
