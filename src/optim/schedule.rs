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
