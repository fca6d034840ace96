//! Counts of what can change a score without a word; all of them go into the results.

use serde_json::{Value, json};

/// Of one task.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Requests whose context was cut on the left.
    pub truncated_requests: u64,
    /// Tokens that were cut off.
    pub truncated_tokens: u64,
    /// Requests of which a token spans the boundary, so that the continuation was encoded alone.
    pub boundary_fallbacks: u64,
    /// Requests whose context ids are no prefix of the whole's.
    pub boundary_mismatches: u64,
    /// Documents of which several choices share the highest log-probability.
    pub ties: u64,
    /// Answers without a match of the filter's pattern, over all filters.
    pub invalid_extractions: u64,
    /// Programs out of time.
    pub timeouts: u64,
    /// Documents equal to an earlier one of the evaluated split.
    pub duplicates: u64,
    /// Documents whose label is no index of its choices.
    pub bad_labels: u64,
    /// Log-probabilities that are no finite numbers.
    pub not_finite: u64,
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.truncated_requests += other.truncated_requests;
        self.truncated_tokens += other.truncated_tokens;
        self.boundary_fallbacks += other.boundary_fallbacks;
        self.boundary_mismatches += other.boundary_mismatches;
        self.ties += other.ties;
        self.invalid_extractions += other.invalid_extractions;
        self.timeouts += other.timeouts;
        self.duplicates += other.duplicates;
        self.bad_labels += other.bad_labels;
        self.not_finite += other.not_finite;
    }
}

impl Counts {
    pub fn json(&self) -> Value {
        json!({
            "truncated_requests": self.truncated_requests,
            "truncated_tokens": self.truncated_tokens,
            "boundary_fallbacks": self.boundary_fallbacks,
            "boundary_mismatches": self.boundary_mismatches,
            "ties": self.ties,
            "invalid_extractions": self.invalid_extractions,
            "timeouts": self.timeouts,
            "duplicates": self.duplicates,
            "bad_labels": self.bad_labels,
            "not_finite": self.not_finite,
        })
    }
}
