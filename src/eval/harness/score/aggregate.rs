//! From documents to a task: aggregation and its standard error (rule 10 of the harness).

use rayon::prelude::*;
use serde_json::Value;

use super::document::Score;
use super::numeric::{mean, mean_stderr, sample_stddev, sum};
use crate::eval::harness::python::random::Random;
use crate::eval::harness::tasks::spec_parts::Aggregation;

/// A number of the results, or "N/A".
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Figure {
    Number(f64),
    NotAvailable,
}

impl Figure {
    pub fn json(self) -> Value {
        match self {
            Figure::Number(x) => serde_json::Number::from_f64(x).map_or(Value::Null, Value::Number),
            Figure::NotAvailable => "N/A".into(),
        }
    }

    pub fn number(self) -> Option<f64> {
        match self {
            Figure::Number(x) => Some(x),
            Figure::NotAvailable => None,
        }
    }
}

/// The task's value of a metric.
pub fn value(aggregation: Aggregation, scores: &[Score]) -> f64 {
    let xs: Vec<f64> = scores.iter().map(|s| s.value()).collect();
    match aggregation {
        Aggregation::Perplexity => (-mean(&xs)).exp(),
        Aggregation::WeightedPerplexity => (-weighted_mean(scores)).exp(),
        Aggregation::BitsPerByte => -weighted_mean(scores) / 2f64.ln(),
        _ => of_numbers(aggregation, &xs),
    }
}

fn of_numbers(aggregation: Aggregation, xs: &[f64]) -> f64 {
    match aggregation {
        Aggregation::Perplexity => (-mean(xs)).exp(),
        Aggregation::Median => {
            let mut sorted = xs.to_vec();
            sorted.sort_by(f64::total_cmp);
            sorted[sorted.len() / 2]
        }
        Aggregation::NanMean => {
            let numbers: Vec<f64> = xs.iter().copied().filter(|x| !x.is_nan()).collect();
            if numbers.is_empty() { f64::NAN } else { mean(&numbers) }
        }
        _ => mean(xs),
    }
}

fn weighted_mean(scores: &[Score]) -> f64 {
    let weights: u64 = scores.iter().map(|s| if let Score::Weighted(_, n) = s { *n } else { 1 }).sum();
    let xs: Vec<f64> = scores.iter().map(|s| s.value()).collect();
    sum(&xs) / weights as f64
}

/// Its standard error: closed for means, by bootstrap for perplexity and median, none for weighted values and single documents.
pub fn stderr(aggregation: Aggregation, scores: &[Score], bootstrap_iters: usize) -> Figure {
    if scores.len() < 2 || bootstrap_iters == 0 {
        return Figure::NotAvailable;
    }
    let xs: Vec<f64> = scores.iter().map(|s| s.value()).collect();
    match aggregation {
        Aggregation::Mean => Figure::Number(mean_stderr(&xs)),
        Aggregation::Perplexity | Aggregation::Median | Aggregation::NanMean => {
            Figure::Number(bootstrap(aggregation, &xs, bootstrap_iters))
        }
        Aggregation::WeightedPerplexity | Aggregation::BitsPerByte => Figure::NotAvailable,
    }
}

/// Standard deviation of the statistic over resamples: chunks of up to 1,000, chunk i drawn from `Random(i)`.
fn bootstrap(aggregation: Aggregation, xs: &[f64], iters: usize) -> f64 {
    let chunk = iters.min(1000);
    let resamples: Vec<f64> = (0..iters / chunk)
        .into_par_iter()
        .flat_map_iter(|i| {
            let mut random = Random::new(i as u64);
            let mut drawn = vec![0.0; xs.len()];
            let mut statistics = Vec::with_capacity(chunk);
            for _ in 0..chunk {
                drawn.iter_mut().for_each(|d| *d = xs[random.choice_index(xs.len())]);
                statistics.push(of_numbers(aggregation, &drawn));
            }
            statistics
        })
        .collect();
    sample_stddev(&resamples)
}
