//! Two runs over the same documents: exact McNemar, a paired bootstrap interval of the difference, Holm over tasks.

use std::collections::BTreeMap;

use anyhow::Result;
use rayon::prelude::*;
use serde_json::{Value, json};

use super::harness::python::random::Random;
use super::session::records::TaskRecords;
use crate::error::bad_input;

/// Resamples of the bootstrap.
const RESAMPLES: usize = 10_000;

/// A metric of a task in two runs, B against A.
#[derive(Debug, Clone, PartialEq)]
pub struct Comparison {
    pub task: String,
    pub metric: String,
    pub filter: String,
    pub documents: usize,
    /// Means of both runs.
    pub a: f64,
    pub b: f64,
    /// 2.5 % and 97.5 % of the resampled differences b - a.
    pub interval: (f64, f64),
    /// Of metrics that are 0 or 1: documents that only A, and only B, got right, and McNemar's exact two-sided p.
    pub mcnemar: Option<McNemar>,
    /// Holm's adjustment over all comparisons of the same metric.
    pub p_holm: Option<f64>,
    /// Documents whose value differs: id, A's value, B's value.
    pub flipped: Vec<(u64, f64, f64)>,
}

/// Discordant pairs and their test.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct McNemar {
    pub only_a: u64,
    pub only_b: u64,
    pub p: f64,
}

impl Comparison {
    pub fn json(&self) -> Value {
        json!({
            "task": self.task,
            "metric": self.metric,
            "filter": self.filter,
            "documents": self.documents,
            "a": self.a,
            "b": self.b,
            "difference": self.b - self.a,
            "ci95": [self.interval.0, self.interval.1],
            "only_a": self.mcnemar.map(|m| m.only_a),
            "only_b": self.mcnemar.map(|m| m.only_b),
            "p_mcnemar": self.mcnemar.map(|m| m.p),
            "p_holm": self.p_holm,
            "flipped": self.flipped.iter().map(|(id, a, b)| json!({"doc_id": id, "a": a, "b": b})).collect::<Vec<_>>(),
        })
    }
}

/// All metrics of all tasks that both runs have.
///
/// # Errors
/// `BadInput`: no task in common; a document that both have was asked in other words.
pub fn compare(a: &BTreeMap<String, TaskRecords>, b: &BTreeMap<String, TaskRecords>) -> Result<Vec<Comparison>> {
    let mut out = Vec::new();
    for (task, of_a) in a {
        let Some(of_b) = b.get(task) else { continue };
        out.extend(compare_task(task, of_a, of_b)?);
    }
    if out.is_empty() {
        return Err(bad_input("the two runs have no task in common"));
    }
    let mut metrics: Vec<(String, String)> = out.iter().map(|c| (c.metric.clone(), c.filter.clone())).collect();
    metrics.sort();
    metrics.dedup();
    for (metric, filter) in metrics {
        let of_metric = |c: &Comparison| c.metric == metric && c.filter == filter;
        let ps: Vec<f64> = out.iter().filter(|c| of_metric(c)).filter_map(|c| Some(c.mcnemar?.p)).collect();
        let mut adjusted = holm(&ps).into_iter();
        for c in out.iter_mut().filter(|c| of_metric(c) && c.mcnemar.is_some()) {
            c.p_holm = adjusted.next();
        }
    }
    Ok(out)
}

type Key = (String, u64, String);

/// Records by filter, id and hash of the document.
fn by_document(records: &TaskRecords) -> BTreeMap<Key, &Value> {
    let text = |r: &Value, key: &str| r[key].as_str().unwrap_or_default().to_string();
    let key = |r: &Value| (text(r, "filter"), r["doc_id"].as_u64().unwrap_or_default(), text(r, "doc_hash"));
    records.records.iter().map(|r| (key(r), r)).collect()
}

/// Of a document: its number, and its values in both runs.
type Both = (u64, f64, f64);

fn compare_task(task: &str, a: &TaskRecords, b: &TaskRecords) -> Result<Vec<Comparison>> {
    let (of_a, of_b) = (by_document(a), by_document(b));
    // By filter and metric: id and both values of each document.
    let mut columns: BTreeMap<(String, String), Vec<Both>> = BTreeMap::new();
    for ((filter, id, hash), ra) in &of_a {
        let Some(rb) = of_b.get(&(filter.clone(), *id, hash.clone())) else { continue };
        if ra["prompt_hash"] != rb["prompt_hash"] {
            return Err(bad_input(format!(
                "{task}: document {id} was asked in other words in {} than in {}: other examples or settings; such scores cannot be compared",
                b.path.display(),
                a.path.display()
            )));
        }
        for metric in ra["metrics"].as_array().into_iter().flatten().filter_map(Value::as_str) {
            if let (Some(x), Some(y)) = (value(&ra[metric]), value(&rb[metric])) {
                columns.entry((filter.clone(), metric.to_string())).or_default().push((*id, x, y));
            }
        }
    }
    if columns.is_empty() {
        return Err(bad_input(format!("{task}: {} and {} have no document in common", a.path.display(), b.path.display())));
    }
    Ok(columns.into_iter().map(|((filter, metric), values)| one(task, metric, filter, &values)).collect())
}

/// A value of a metric; of a log-likelihood with its length, their quotient.
fn value(v: &Value) -> Option<f64> {
    match v {
        Value::Array(pair) => Some(pair.first()?.as_f64()? / pair.get(1)?.as_f64()?),
        Value::Bool(b) => Some(f64::from(u8::from(*b))),
        other => other.as_f64(),
    }
}

fn one(task: &str, metric: String, filter: String, values: &[(u64, f64, f64)]) -> Comparison {
    let n = values.len() as f64;
    let mean = |f: &dyn Fn(&(u64, f64, f64)) -> f64| values.iter().map(f).sum::<f64>() / n;
    let binary = values.iter().all(|(_, a, b)| [0.0, 1.0].contains(a) && [0.0, 1.0].contains(b));
    let only = |x: f64, y: f64| values.iter().filter(|(_, a, b)| (*a, *b) == (x, y)).count() as u64;
    let mcnemar = binary.then(|| {
        let (only_a, only_b) = (only(1.0, 0.0), only(0.0, 1.0));
        McNemar { only_a, only_b, p: mcnemar(only_a, only_b) }
    });
    let differences: Vec<f64> = values.iter().map(|(_, a, b)| b - a).collect();
    Comparison {
        task: task.to_string(),
        metric,
        filter,
        documents: values.len(),
        a: mean(&|v| v.1),
        b: mean(&|v| v.2),
        interval: bootstrap(&differences),
        mcnemar,
        p_holm: None,
        flipped: values.iter().filter(|(_, a, b)| a != b).copied().collect(),
    }
}

/// McNemar's exact two-sided p: 2 * P(X <= min(b, c)) of Binomial(b + c, 1/2), at most 1.
pub fn mcnemar(only_a: u64, only_b: u64) -> f64 {
    let n = only_a + only_b;
    // ln C(n, k), as a running sum.
    let (mut ln_choose, mut tail) = (0.0f64, 0.0f64);
    for k in 0..=only_a.min(only_b) {
        tail += (ln_choose - n as f64 * 2f64.ln()).exp();
        ln_choose += ((n - k) as f64).ln() - ((k + 1) as f64).ln();
    }
    (2.0 * tail).min(1.0)
}

/// Holm's step-down adjustment.
pub fn holm(ps: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..ps.len()).collect();
    order.sort_by(|a, b| ps[*a].total_cmp(&ps[*b]));
    let mut out = vec![0.0; ps.len()];
    let mut largest = 0.0f64;
    for (rank, i) in order.iter().enumerate() {
        largest = largest.max(((ps.len() - rank) as f64 * ps[*i]).min(1.0));
        out[*i] = largest;
    }
    out
}

/// Percentiles 2.5 and 97.5 of the mean over resampled documents.
fn bootstrap(differences: &[f64]) -> (f64, f64) {
    let n = differences.len();
    const CHUNK: usize = 500;
    let mut means: Vec<f64> = (0..RESAMPLES / CHUNK)
        .into_par_iter()
        .flat_map_iter(|chunk| {
            let mut random = Random::new(chunk as u64);
            (0..CHUNK)
                .map(move |_| (0..n).map(|_| differences[random.choice_index(n)]).sum::<f64>() / n as f64)
                .collect::<Vec<_>>()
        })
        .collect();
    means.sort_by(f64::total_cmp);
    // NumPy's linear interpolation.
    let at = |q: f64| {
        let x = q * (means.len() - 1) as f64;
        let (low, part) = (x.floor() as usize, x.fract());
        means[low] + part * (means[(low + 1).min(means.len() - 1)] - means[low])
    };
    (at(0.025), at(0.975))
}

#[cfg(test)]
mod tests {
    use super::*;

    // SciPy: binomtest(k, n, 0.5).pvalue
    #[test]
    fn mcnemar_is_the_exact_binomial_test() {
        for (b, c, want) in
            [(1, 7, 0.0703125), (7, 1, 0.0703125), (0, 0, 1.0), (0, 5, 0.0625), (4, 4, 1.0), (30, 60, 0.0020602656810)]
        {
            assert!((mcnemar(b, c) - want).abs() < 1e-8, "{b} {c}: {}", mcnemar(b, c));
        }
        assert!(mcnemar(2000, 2400) > 0.0);
    }

    // statsmodels: multipletests([0.01, 0.04, 0.03, 0.005], method="holm")[1]
    #[test]
    fn holm_steps_down() {
        let adjusted = holm(&[0.01, 0.04, 0.03, 0.005]);
        for (a, want) in adjusted.iter().zip([0.03, 0.06, 0.06, 0.02]) {
            assert!((a - want).abs() < 1e-12, "{adjusted:?}");
        }
        assert_eq!(holm(&[0.9, 0.8]), [1.0, 1.0]);
    }

    #[test]
    fn the_interval_is_that_of_the_mean() {
        // Differences of mean 0.1 and standard deviation 0.3 over 400 documents: 1.96 * 0.3 / 20 = 0.0294.
        let differences: Vec<f64> = (0..400).map(|i| if i % 10 == 0 { 1.0 } else { 0.0 }).collect();
        let (low, high) = bootstrap(&differences);
        assert!((low - 0.0706).abs() < 0.006 && (high - 0.1294).abs() < 0.006, "{low} {high}");
        assert_eq!(bootstrap(&[0.0; 5]), (0.0, 0.0));
    }
}
