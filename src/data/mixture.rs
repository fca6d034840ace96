//! Which source gives the next sample: Megatron-LM's greedy mixture, with exact counts.

use anyhow::Result;
use serde::{Deserialize, Serialize};

use crate::error::bad_input;

/// Sources and their shares. Sample number n comes from the source that is furthest behind its share: the largest
/// `w_i * max(n, 1) - c_i`, where c_i counts what source i has given; of equals, the first (Megatron-LM,
/// `build_blending_indices`). No source is ever more than one sample ahead of its share; of two sources none is more than
/// one behind, of many a source may fall a little further behind (less than two in all that was tried). A source of weight 0 gives nothing, in contrast to Megatron-LM, where a tie may pick it.
#[derive(Debug, Clone, PartialEq)]
pub struct Mixture {
    /// Positive sum scaled to 1.
    weights: Vec<f64>,
}

/// Where a mixture stands: all that a checkpoint needs in order to go on without replaying.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MixtureState {
    /// Samples taken from all sources.
    pub samples: u64,
    /// Samples taken from each source; their sum is `samples`.
    pub counts: Vec<u64>,
}

impl Mixture {
    /// Weights need not sum to 1. Refuses a weight that is negative or not finite, and a sum of 0.
    pub fn new(weights: &[f64]) -> Result<Self> {
        if let Some((i, w)) = weights.iter().enumerate().find(|(_, w)| !w.is_finite() || **w < 0.0) {
            return Err(bad_input(format!("weight {w} of data source {i} cannot be used: weights are numbers from 0 upwards")));
        }
        let sum: f64 = weights.iter().sum();
        if !sum.is_finite() || sum <= 0.0 {
            return Err(bad_input("the weights of the data sources sum to 0: at least one source must have a positive weight"));
        }
        Ok(Self { weights: weights.iter().map(|w| w / sum).collect() })
    }

    /// Shares, summing to 1.
    pub fn weights(&self) -> &[f64] {
        &self.weights
    }

    /// Before the first sample.
    pub fn start(&self) -> MixtureState {
        MixtureState { samples: 0, counts: vec![0; self.weights.len()] }
    }

    /// Takes one sample: its source, and how many samples that source had given before.
    pub fn take(&self, state: &mut MixtureState) -> (usize, u64) {
        let n = state.samples.max(1) as f64;
        let mut best = (usize::MAX, f64::NEG_INFINITY);
        for (i, (w, c)) in self.weights.iter().zip(&state.counts).enumerate() {
            let behind = w * n - *c as f64;
            if *w > 0.0 && behind > best.1 {
                best = (i, behind);
            }
        }
        let source = best.0;
        let number = state.counts[source];
        state.counts[source] += 1;
        state.samples += 1;
        (source, number)
    }

    /// State after the first `samples` samples, by replay: exact, a few nanoseconds a sample and source.
    pub fn state_at(&self, samples: u64) -> MixtureState {
        let mut state = self.start();
        if let [_] = self.weights[..] {
            return MixtureState { samples, counts: vec![samples] };
        }
        while state.samples < samples {
            self.take(&mut state);
        }
        state
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::order::hash;

    fn first(weights: &[f64], n: usize) -> Vec<usize> {
        let mixture = Mixture::new(weights).unwrap();
        let mut state = mixture.start();
        (0..n).map(|_| mixture.take(&mut state).0).collect()
    }

    #[test]
    fn follows_megatrons_rule() {
        // Worked by hand from the formula, ties to the lowest index.
        assert_eq!(first(&[1.0, 1.0], 6), [0, 1, 0, 1, 0, 1]);
        assert_eq!(first(&[0.75, 0.25], 8), [0, 1, 0, 0, 0, 1, 0, 0]);
        assert_eq!(first(&[1.0, 2.0, 1.0], 4), [1, 0, 2, 1]);
    }

    #[test]
    fn weight_zero_gives_nothing() {
        assert!(first(&[0.0, 1.0, 0.0, 3.0], 4000).iter().all(|s| *s == 1 || *s == 3));
    }

    #[test]
    fn counts_stay_close_to_the_share() {
        for case in 0..200u64 {
            let k = 1 + (hash(case, &[0]) % 6) as usize;
            let weights: Vec<f64> = (0..k).map(|i| (1 + hash(case, &[1, i as u64]) % 1000) as f64).collect();
            let mixture = Mixture::new(&weights).unwrap();
            let mut state = mixture.start();
            for n in 1..=5000u64 {
                mixture.take(&mut state);
                assert_eq!((state.samples, state.counts.iter().sum::<u64>()), (n, n));
                for (w, c) in mixture.weights().iter().zip(&state.counts) {
                    let ahead = *c as f64 - w * n as f64;
                    let behind = if k <= 2 { 1.0 } else { 2.0 };
                    assert!(ahead <= 1.0 + 1e-9 && ahead >= -behind, "case {case}: {weights:?}, n = {n}: {:?}", state.counts);
                }
            }
        }
    }

    #[test]
    fn extreme_weights() {
        // 0.999 / 0.001: one sample in a thousand, on time.
        let order = first(&[0.999, 0.001], 10_000);
        assert_eq!(order.iter().filter(|s| **s == 1).count(), 10);
    }

    #[test]
    fn state_at_equals_walking() {
        let mixture = Mixture::new(&[5.0, 3.0, 0.1]).unwrap();
        let mut state = mixture.start();
        for n in 0..500 {
            assert_eq!(mixture.state_at(n), state);
            mixture.take(&mut state);
        }
    }

    #[test]
    fn refuses_impossible_weights() {
        for bad in [&[][..], &[0.0], &[1.0, -0.5], &[f64::NAN, 1.0], &[f64::INFINITY]] {
            assert!(Mixture::new(bad).is_err(), "{bad:?}");
        }
    }
}
