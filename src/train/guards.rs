//! Guards: which batches are refused, and when too many are.
//!
//! A batch is refused when its loss or gradient is not a number, or stands out from those of the steps before. A refused batch makes no
//! step: it changes no weight, no moment and no bias, and the next batch takes its place, with the same step number and learning rate.
//! So the run goes on as one that has never seen it.
//!
//! What stands out is judged by median and median absolute deviation over the last *accepted* steps: neither what was refused nor a
//! single odd value among those moves the measure.

use std::collections::VecDeque;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use crate::checkpoint::Bits;
use crate::recipe::{self, SpikePolicy};
use crate::robust::median;

/// Median absolute deviation of a normal distribution, as part of its standard deviation.
const MAD_OF_NORMAL: f64 = 0.6745;
/// The deviation counts as at least this part of the median: a curve may lie so flat that every step stands out from it.
const LEAST_DEVIATION: f64 = 0.01;

/// Judges steps, and remembers what it judges by.
#[derive(Debug, Clone)]
pub struct Guards {
    cfg: recipe::Guards,
    state: State,
}

/// What goes to a checkpoint.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
struct State {
    /// Mean loss and gradient norm of the last accepted steps, oldest first; as bits, since decimal text may come back changed.
    window: VecDeque<[Bits; 2]>,
    /// Batches refused since `spike_window` steps in a row were accepted last.
    refused: u64,
    /// Steps accepted since the last refusal.
    accepted: u64,
}

impl Guards {
    pub fn new(cfg: &recipe::Guards) -> Self {
        Self { cfg: cfg.clone(), state: State::default() }
    }

    /// Says in what a step stands out, if it does and there is enough to judge it by.
    pub fn spike(&self, loss: f64, grad_norm: f64) -> Option<String> {
        let window = &self.state.window;
        if self.cfg.spike == SpikePolicy::Off || 2 * window.len() < self.cfg.spike_window {
            return None;
        }
        [("loss", 0, loss), ("gradient norm", 1, grad_norm)].into_iter().find_map(|(name, at, value)| {
            let values: Vec<f64> = window.iter().map(|step| step[at].0).collect();
            let (middle, deviation) = robust(&values);
            let limit = middle + self.cfg.spike_threshold * deviation;
            (value > limit).then(|| {
                format!(
                    "the {name}, {value:.6}, stands out from the last {} steps: their median is {middle:.6}, and {limit:.6} would be \
                     {} deviations ({deviation:.6}) above it",
                    values.len(),
                    self.cfg.spike_threshold
                )
            })
        })
    }

    /// The same, where such a step is to be refused.
    pub fn judge(&self, loss: f64, grad_norm: f64) -> Option<String> {
        matches!(self.cfg.spike, SpikePolicy::Refuse(_)).then(|| self.spike(loss, grad_norm)).flatten()
    }

    /// Takes note of a step that was applied.
    pub fn accept(&mut self, loss: f64, grad_norm: f64) {
        let state = &mut self.state;
        if self.cfg.spike != SpikePolicy::Off {
            state.window.push_back([Bits(loss), Bits(grad_norm)]);
            while state.window.len() > self.cfg.spike_window {
                state.window.pop_front();
            }
        }
        if state.refused > 0 {
            state.accepted += 1;
            if state.accepted >= self.cfg.spike_window as u64 {
                (state.refused, state.accepted) = (0, 0);
            }
        }
    }

    /// Takes note of a batch that was refused.
    ///
    /// # Errors
    /// When it is one too many.
    pub fn refuse(&mut self) -> Result<()> {
        self.state.refused += 1;
        self.state.accepted = 0;
        let (refused, limit) = (self.state.refused, self.cfg.limit);
        if refused > limit {
            bail!(
                "{refused} batches were refused without {} accepted steps in a row between them, and `guards.limit` is {limit}. Look at the \
                 data, or lower the learning rate, and resume from the last checkpoint",
                self.cfg.spike_window
            );
        }
        Ok(())
    }

    /// For a checkpoint; null where there is nothing to remember.
    pub fn to_value(&self) -> Result<serde_json::Value> {
        match self.state == State::default() {
            true => Ok(serde_json::Value::Null),
            false => serde_json::to_value(&self.state).context("the guards' state as JSON"),
        }
    }

    /// Goes on from what a checkpoint says.
    ///
    /// # Errors
    /// When it is no state of guards.
    pub fn restore(&mut self, value: &serde_json::Value) -> Result<()> {
        if !value.is_null() {
            self.state = State::deserialize(value).context("the guards' state in the manifest")?;
        }
        Ok(())
    }

    /// As [`Guards::restore`], on the way back to a checkpoint: what was refused since is not forgotten.
    ///
    /// # Errors
    /// As [`Guards::restore`].
    pub fn go_back_to(&mut self, value: &serde_json::Value) -> Result<()> {
        let (refused, accepted) = (self.state.refused, self.state.accepted);
        self.state.window.clear();
        self.restore(value)?;
        (self.state.refused, self.state.accepted) = (refused, accepted);
        Ok(())
    }
}

/// Median, and what the median absolute deviation says of the standard deviation.
fn robust(values: &[f64]) -> (f64, f64) {
    let middle = median(values.to_vec());
    let deviation = median(values.iter().map(|x| (x - middle).abs()).collect()) / MAD_OF_NORMAL;
    (middle, deviation.max(LEAST_DEVIATION * middle.abs()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::Remedy;

    fn guards(window: usize) -> Guards {
        let cfg = recipe::Guards {
            non_finite: Remedy::Skip,
            spike: SpikePolicy::Refuse(Remedy::Skip),
            spike_window: window,
            spike_threshold: 6.0,
            limit: 3,
            skip_batches: Vec::new(),
        };
        Guards::new(&cfg)
    }

    /// Losses around 2, with a spread of some 0.1.
    fn loss(i: usize) -> f64 {
        2.0 + 0.1 * ((i * 37 % 21) as f64 / 10.0 - 1.0)
    }

    #[test]
    fn what_stands_out_is_told_once_half_a_window_is_known() {
        let mut g = guards(20);
        for i in 0..10 {
            assert_eq!(g.spike(1e9, 1e9), None, "{i} steps are too few");
            g.accept(loss(i), 1.0);
        }
        assert_eq!(g.spike(2.2, 1.05), None);
        assert!(g.spike(3.0, 1.0).unwrap().contains("the loss, 3.000000"));
        // A flat curve counts as one that moves by a hundredth.
        assert_eq!(g.spike(2.0, 1.06), None);
        assert!(g.spike(2.0, 1.07).unwrap().contains("the gradient norm"));
        // A fall is no spike.
        assert_eq!(g.spike(0.1, 0.001), None);
    }

    #[test]
    fn one_odd_value_among_the_accepted_moves_nothing() {
        let (mut even, mut odd) = (guards(40), guards(40));
        for i in 0..40 {
            even.accept(loss(i), 1.0);
            odd.accept(if i == 7 { 1e6 } else { loss(i) }, 1.0);
        }
        for value in [2.2, 2.5, 3.0] {
            assert_eq!(even.spike(value, 1.0).is_some(), odd.spike(value, 1.0).is_some(), "{value}");
        }
    }

    #[test]
    fn the_measure_by_hand() {
        let (middle, deviation) = robust(&[1.0, 2.0, 3.0, 4.0, 100.0]);
        assert_eq!(middle, 3.0);
        assert!((deviation - 1.0 / 0.6745).abs() < 1e-12);
        assert_eq!(robust(&[4.0, 2.0]), (3.0, 1.0 / 0.6745));
    }

    #[test]
    fn too_many_refusals_end_the_run_and_calm_forgives_them() {
        let mut g = guards(4);
        (0..3).for_each(|_| g.refuse().unwrap());
        (0..4).for_each(|i| g.accept(loss(i), 1.0));
        for _ in 0..3 {
            g.refuse().unwrap();
            (0..3).for_each(|i| g.accept(loss(i), 1.0));
        }
        assert!(g.refuse().unwrap_err().to_string().contains("4 batches were refused"));
    }

    #[test]
    fn the_state_comes_back_bit_by_bit() {
        let mut g = guards(6);
        (0..9).for_each(|i| g.accept(loss(i) / 3.0, 0.1 + i as f64));
        g.refuse().unwrap();
        let value = g.to_value().unwrap();
        let text = value.to_string();
        let mut back = guards(6);
        back.restore(&serde_json::from_str(&text).unwrap()).unwrap();
        assert_eq!(back.state, g.state);
        // Going back forgets the steps, not the refusals.
        g.refuse().unwrap();
        g.accept(7.0, 7.0);
        g.go_back_to(&value).unwrap();
        assert_eq!((g.state.refused, g.state.accepted), (2, 1));
        assert_eq!(g.state.window, back.state.window);
        assert_eq!(guards(6).to_value().unwrap(), serde_json::Value::Null);
    }
}
