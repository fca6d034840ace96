//! Numbers of batches, as spans of those that follow each other.

use serde::{Deserialize, Serialize};

/// First and last numbers of each span, rising and apart.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Spans(Vec<[u64; 2]>);

impl Spans {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds `first..=last`.
    pub fn insert(&mut self, [mut first, mut last]: [u64; 2]) {
        // What touches the new span becomes a part of it.
        self.0.retain(|[a, b]| {
            let apart = b.saturating_add(1) < first || last.saturating_add(1) < *a;
            if !apart {
                (first, last) = (first.min(*a), last.max(*b));
            }
            apart
        });
        let at = self.0.partition_point(|[a, _]| *a < first);
        self.0.insert(at, [first, last]);
    }

    pub fn contains(&self, n: u64) -> bool {
        self.0.iter().any(|[a, b]| (*a..=*b).contains(&n))
    }

    /// How many numbers there are.
    pub fn count(&self) -> u64 {
        self.count_below(u64::MAX)
    }

    /// How many of the numbers are less than `n`.
    pub fn count_below(&self, n: u64) -> u64 {
        self.0.iter().filter(|[a, _]| *a < n).map(|[a, b]| (*b).min(n - 1) - a + 1).sum()
    }

    /// Number of the batch that is drawn after `steps` steps, these being what was drawn in vain before: the first one with
    /// `steps` others below it.
    pub fn after_steps(&self, steps: u64) -> u64 {
        let mut n = steps;
        loop {
            let next = steps + self.count_below(n);
            if next == n {
                return n;
            }
            n = next;
        }
    }
}

impl FromIterator<[u64; 2]> for Spans {
    fn from_iter<I: IntoIterator<Item = [u64; 2]>>(spans: I) -> Self {
        let mut out = Self::default();
        spans.into_iter().for_each(|span| out.insert(span));
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_that_touch_become_one() {
        let spans: Spans = [[7, 7], [2, 3], [10, 12], [4, 5], [11, 20]].into_iter().collect();
        assert_eq!(spans.0, [[2, 5], [7, 7], [10, 20]]);
        assert_eq!(spans.count(), 4 + 1 + 11);
        let inside: Vec<u64> = (0..25).filter(|n| spans.contains(*n)).collect();
        for n in 0..25 {
            assert_eq!(spans.count_below(n), inside.iter().filter(|i| **i < n).count() as u64, "{n}");
        }
        let all: Spans = [[5, 6], [0, u64::MAX]].into_iter().collect();
        assert_eq!(all.0, [[0, u64::MAX]]);
    }

    /// Batches 0, 1, ... are drawn; those of the spans make no step.
    #[test]
    fn steps_are_made_by_the_other_batches() {
        for spans in [vec![], vec![[0, 0]], vec![[3, 5]], vec![[0, 2], [4, 4], [7, 9]]] {
            let spans: Spans = spans.into_iter().collect();
            let mut steps = 0;
            for batch in 0..20 {
                if !spans.contains(batch) {
                    steps += 1;
                    // The next step's batch, before anything more is refused.
                    assert_eq!(spans.after_steps(steps), batch + 1, "{spans:?}");
                }
            }
        }
        assert_eq!(Spans::default().after_steps(7), 7);
    }
}
