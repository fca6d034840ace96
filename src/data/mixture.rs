//! Which source gives the next sample: Megatron-LM's greedy mixture, with exact counts.

use anyhow::Result;
use serde::{Deserialize, Serialize};

use crate::error::bad_input;

/// Sources and their shares. Sample number n comes from the source that is furthest behind its share: the largest
/// `w_i * max(n, 1) - c_i`, where c_i counts what source i has given; of equals, the first (Megatron-LM,
/// `build_blending_indices`). No source is ever more than one sample ahead of its share; of two sources none is more than
/// one behind, of many a source may fall a little further behind (less than two in all that was tried). A source of weight 0 gives nothing, in contrast to Megatron-LM, where a tie may pick it.
///
/// A source that has given as many samples as it may gives no more, and the others share what follows as their weights say: w_i are then
/// the shares among those that are left, and n what these have given. As they kept to their shares of each other all along, nothing
/// needs to be remembered of when that was.
#[derive(Debug, Clone, PartialEq)]
pub struct Mixture {
    /// Positive sum scaled to 1.
    weights: Vec<f64>,
    /// Most samples of each source.
    limits: Vec<Option<u64>>,
}

/// Where a mixture stands: all that a checkpoint needs in order to go on without replaying.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MixtureState {
    /// Samples taken from all sources.
    pub samples: u64,
    /// Samples taken from each source; their sum is `samples`.
    pub counts: Vec<u64>,
    /// Shares that the samples are taken by. Empty in states of versions that did not write them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub weights: Vec<f64>,
    /// `counts` where these shares began to hold; empty = at the beginning.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub since: Vec<u64>,
}

impl MixtureState {
    /// Whether its parts fit together.
    pub fn is_sound(&self) -> bool {
        let lengths = [self.weights.len(), self.since.len()];
        lengths.iter().all(|n| *n == 0 || *n == self.counts.len()) && self.since.iter().zip(&self.counts).all(|(a, b)| a <= b)
    }

    /// Samples taken from source `i` since its share began to hold.
    fn taken(&self, i: usize) -> u64 {
        self.counts[i] - self.since.get(i).copied().unwrap_or(0)
    }
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
        Ok(Self { weights: weights.iter().map(|w| w / sum).collect(), limits: vec![None; weights.len()] })
    }

    /// With the most samples that each source may give.
    pub fn with_limits(self, limits: Vec<Option<u64>>) -> Self {
        Self { limits, ..self }
    }

    /// Shares, summing to 1.
    pub fn weights(&self) -> &[f64] {
        &self.weights
    }

    /// Samples that follow before every source has given what it may; None = without end.
    pub fn left(&self, state: &MixtureState) -> Option<u64> {
        let of_source = |i: usize| self.limits[i].map(|limit| limit.saturating_sub(state.counts[i]));
        (0..self.weights.len()).filter(|i| self.weights[*i] > 0.0).map(of_source).sum()
    }

    /// Before the first sample.
    pub fn start(&self) -> MixtureState {
        MixtureState { samples: 0, counts: vec![0; self.weights.len()], weights: self.weights.clone(), since: Vec::new() }
    }

    /// Takes one sample: its source, and how many samples that source had given before. None when every source has given what it may.
    pub fn take(&self, state: &mut MixtureState) -> Option<(usize, u64)> {
        let gives = |i: usize| self.weights[i] > 0.0 && self.limits[i].is_none_or(|limit| state.counts[i] < limit);
        let (mut left, mut all, mut n) = (0.0, true, 0);
        for i in 0..self.weights.len() {
            match gives(i) {
                true => (left, n) = (left + self.weights[i], n + state.taken(i)),
                false => all &= self.weights[i] == 0.0,
            }
        }
        // While no limit is reached the shares are taken as they are, to the bit.
        let whole = if all { 1.0 } else { left };
        let n = n.max(1) as f64;
        let mut best = None;
        for i in (0..self.weights.len()).filter(|i| gives(*i)) {
            let behind = self.weights[i] / whole * n - state.taken(i) as f64;
            if best.is_none_or(|(_, most)| behind > most) {
                best = Some((i, behind));
            }
        }
        let (source, _) = best?;
        let number = state.counts[source];
        state.counts[source] += 1;
        state.samples += 1;
        Some((source, number))
    }

    /// Takes samples until there are `samples`: exact, a few nanoseconds a sample and source. None when there are not so many.
    pub fn advance(&self, state: &mut MixtureState, samples: u64) -> Option<()> {
        if let ([_], [limit]) = (&self.weights[..], &self.limits[..]) {
            (state.samples, state.counts[0]) = (samples, samples);
            return limit.is_none_or(|limit| samples <= limit).then_some(());
        }
        while state.samples < samples {
            self.take(state)?;
        }
        Some(())
    }

    /// Goes on from a state of a mixture of the same sources: where its shares were others, ours hold from there on. True if so.
    pub fn adopt(&self, state: &mut MixtureState) -> bool {
        let changed = !state.weights.is_empty() && state.weights != self.weights;
        if changed {
            state.since = state.counts.clone();
        }
        state.weights = self.weights.clone();
        changed
    }

    /// Where the shares of `state` began to hold.
    pub fn origin(&self, state: &MixtureState) -> MixtureState {
        match state.since.is_empty() {
            true => self.start(),
            false => MixtureState { samples: state.since.iter().sum(), counts: state.since.clone(), ..state.clone() },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::order::hash;

    fn first(weights: &[f64], n: usize) -> Vec<usize> {
        let mixture = Mixture::new(weights).unwrap();
        let mut state = mixture.start();
        (0..n).map(|_| mixture.take(&mut state).unwrap().0).collect()
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
                mixture.take(&mut state).unwrap();
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
    fn advancing_equals_walking() {
        let mixture = Mixture::new(&[5.0, 3.0, 0.1]).unwrap();
        let mut state = mixture.start();
        for n in 0..500 {
            let mut other = mixture.start();
            mixture.advance(&mut other, n).unwrap();
            assert_eq!(other, state);
            mixture.take(&mut state).unwrap();
        }
    }

    /// A source that has given all it may leaves its share to the others, who keep to their shares of each other.
    #[test]
    fn limits_are_kept_and_the_rest_shares_on() {
        let mixture = Mixture::new(&[0.5, 0.3, 0.2]).unwrap().with_limits(vec![Some(10), None, Some(100)]);
        let mut state = mixture.start();
        assert_eq!(mixture.left(&state), None);
        let free = first(&[0.5, 0.3, 0.2], 20);
        for n in 1..=2000u64 {
            let (source, _) = mixture.take(&mut state).unwrap();
            if n <= 19 {
                assert_eq!(source, free[n as usize - 1], "before a limit nothing differs");
            }
            let [a, b, c] = state.counts[..] else { unreachable!() };
            assert!(a <= 10 && c <= 100);
            if c < 100 {
                // 0.3 to 0.2 of what these two have given, whenever the first one stopped.
                assert!((b as f64 - 0.6 * (b + c) as f64).abs() <= 1.0 + 1e-9, "{:?}", state.counts);
            }
        }
        assert_eq!(state.counts, [10, 1890, 100]);

        let mixture = Mixture::new(&[1.0, 1.0, 0.0]).unwrap().with_limits(vec![Some(3), Some(4), Some(9)]);
        let mut state = mixture.start();
        assert_eq!(mixture.left(&state), Some(7));
        assert_eq!((0..9).map_while(|_| mixture.take(&mut state)).count(), 7);
        assert_eq!(state.counts, [3, 4, 0]);
        let mut again = mixture.start();
        assert_eq!((mixture.advance(&mut again, 7), mixture.advance(&mut again, 8)), (Some(()), None));
    }

    /// New shares hold from where they begin, and each source goes on with its next sample.
    #[test]
    fn shares_change_without_a_gap() {
        let old = Mixture::new(&[0.9, 0.1]).unwrap();
        let new = Mixture::new(&[0.25, 0.75]).unwrap();
        let mut state = old.start();
        old.advance(&mut state, 100).unwrap();
        assert_eq!(state.counts, [90, 10]);
        let same = state.clone();
        assert!(!old.adopt(&mut state));
        assert_eq!(state, same);
        assert!(new.adopt(&mut state) && state.is_sound());
        let mut next = state.counts.clone();
        for n in 1..=400u64 {
            let (source, number) = new.take(&mut state).unwrap();
            assert_eq!(number, next[source]);
            next[source] += 1;
            assert!((state.counts[0] as f64 - 90.0 - 0.25 * n as f64).abs() <= 1.0);
        }
        assert_eq!(state.counts, [190, 310]);
        // Through JSON, and found again from where the new shares began.
        let text = serde_json::to_string(&state).unwrap();
        let mut back: MixtureState = serde_json::from_str(&text).unwrap();
        assert_eq!(back, state);
        assert!(!new.adopt(&mut back));
        let mut walked = new.origin(&back);
        assert_eq!(walked.samples, 100);
        new.advance(&mut walked, 500).unwrap();
        assert_eq!(walked, state);
    }

    #[test]
    fn refuses_impossible_weights() {
        for bad in [&[][..], &[0.0], &[1.0, -0.5], &[f64::NAN, 1.0], &[f64::INFINITY]] {
            assert!(Mixture::new(bad).is_err(), "{bad:?}");
        }
    }
}
