//! A task's scores, and its sample records with lm-eval's fields.

use anyhow::{Context, Result};
use rayon::prelude::*;
use serde_json::{Map, Value, json};

use super::aggregate::{self, Figure};
use super::code::CodeRunner;
use super::counts::Counts;
use super::document::{Score, Scorer, Scores};
use super::filters::{self, Answer};
use crate::eval::harness::python::json::{Style, dumps};
use crate::eval::harness::python::repr;
use crate::eval::harness::request::{Asked, Response};
use crate::eval::harness::tasks::build::Built;
use crate::eval::harness::tasks::spec_parts::{Aggregation, Filter, MetricKind};
use crate::text::sha256_hex;

/// Field of the records of CORE's tasks: number of tokens that count, by request.
pub const CONTINUATION_TOKENS: &str = "continuation_tokens";

/// Field of the same: the score of chance that they were centred on.
pub const CHANCE: &str = "chance";

/// A metric of a task under one filter.
#[derive(Debug, Clone, PartialEq)]
pub struct TaskMetric {
    /// `acc`, `pass@1`, ...
    pub name: String,
    pub filter: String,
    pub value: f64,
    pub stderr: Figure,
    /// Each document's value, in order.
    pub scores: Vec<Score>,
}

/// What came out of a task.
#[derive(Debug, Clone)]
pub struct TaskScore {
    pub metrics: Vec<TaskMetric>,
    /// One record per filter and document.
    pub samples: Vec<Value>,
    pub counts: Counts,
    /// Documents that were evaluated.
    pub sample_len: usize,
}

impl TaskScore {
    /// lm-eval's hash of what was asked: of all documents, prompts and targets.
    pub fn task_hash(&self) -> String {
        let text = |s: &Value, key: &str| s[key].as_str().unwrap_or_default().to_string();
        let all: String =
            self.samples.iter().flat_map(|s| ["doc_hash", "prompt_hash", "target_hash"].map(|k| text(s, k))).collect();
        sha256_hex(all.as_bytes())
    }
}

/// Scores a task. `responses` answer all its requests in order; `counts` holds what encoding counted.
pub fn score(
    task: &Built,
    responses: &[Response],
    code: Option<&dyn CodeRunner>,
    mut counts: Counts,
    bootstrap_iters: usize,
) -> Result<TaskScore> {
    let wanted: usize = task.asked.iter().map(|a| a.requests.len()).sum();
    anyhow::ensure!(wanted == responses.len(), "{}: {wanted} requests, but {} responses", task.spec.name, responses.len());
    counts.duplicates = task.duplicates as u64;
    let scorer = Scorer { task, code };
    let (mut metrics, mut samples) = (Vec::new(), Vec::new());
    let first = task.spec.filters.first().map(|f| &f.name);
    let mut own = Vec::with_capacity(task.asked.len());
    let mut rest = responses;
    for asked in &task.asked {
        let (these, others) = rest.split_at(asked.requests.len());
        own.push((asked, these));
        rest = others;
    }
    for filter in &task.spec.filters {
        // Documents in parallel: programs of HumanEval take their time.
        let scored = own.par_iter().map(|(asked, own)| one(&scorer, asked, own, filter)).collect::<Result<Vec<_>>>()?;
        let mut columns: Vec<(String, Vec<Score>)> = Vec::new();
        for (scores, record, counted) in scored {
            samples.push(record);
            // Ties, labels and the like are counted once, not per filter.
            counts += if first == Some(&filter.name) {
                counted
            } else {
                Counts { invalid_extractions: counted.invalid_extractions, ..Counts::default() }
            };
            for (name, score) in scores {
                match columns.iter_mut().find(|(n, _)| *n == name) {
                    Some((_, column)) => column.push(score),
                    None => columns.push((name, vec![score])),
                }
            }
        }
        metrics.extend(columns.into_iter().map(|(name, scores)| {
            let aggregation = aggregation(task, &name);
            let value = aggregate::value(aggregation, &scores);
            let stderr = aggregate::stderr(aggregation, &scores, bootstrap_iters);
            TaskMetric { name, filter: filter.name.clone(), value, stderr, scores }
        }));
    }
    let sample_len = metrics.iter().map(|m: &TaskMetric| m.scores.len()).max().unwrap_or(0);
    Ok(TaskScore { metrics, samples, counts, sample_len })
}

/// Metrics, record and counts of one document under one filter.
fn one(scorer: &Scorer, asked: &Asked, own: &[Response], filter: &Filter) -> Result<(Scores, Value, Counts)> {
    let mut counts = Counts::default();
    let mut answers = Vec::with_capacity(own.len());
    for response in own {
        let (answer, invalid) = filters::apply(filter, response, &asked.doc)?;
        counts.invalid_extractions += invalid;
        answers.push(answer);
    }
    let scores = scorer.score(asked, &answers, &mut counts);
    let scores = scores.with_context(|| format!("{}: document {}", scorer.task.spec.name, asked.doc_id))?;
    let mut record = record(asked, own, &answers, &filter.name, &scores);
    if scorer.task.spec.core_chance.is_some() {
        // Means over tokens cannot be told from lm-eval's fields.
        let tokens = own.iter().map(|r| if let Response::Loglikelihood { tokens, .. } = r { *tokens } else { 0 });
        record[CONTINUATION_TOKENS] = tokens.collect::<Vec<_>>().into();
        record[CHANCE] = scorer.task.spec.core_chance.into();
    }
    Ok((scores, record, counts))
}

/// The aggregation of a metric by its name in the results; those of pass@k are its metric's.
fn aggregation(task: &Built, name: &str) -> Aggregation {
    let named = |m: &&crate::eval::harness::tasks::spec_parts::Metric| {
        m.kind.name() == name || (m.kind == MetricKind::PassAtK && name.starts_with("pass@"))
    };
    task.spec.metrics.iter().find(named).map_or(Aggregation::Mean, |m| m.aggregation)
}

fn record(asked: &Asked, responses: &[Response], answers: &[Answer], filter: &str, scores: &Scores) -> Value {
    let mut out = Map::new();
    let mut put = |key: &str, v: Value| {
        out.insert(key.into(), v);
    };
    put("doc_id", asked.doc_id.into());
    put("doc", asked.doc.clone());
    put("target", asked.target.clone());
    put("arguments", asked.requests.iter().map(|r| r.arguments()).collect::<Vec<_>>().into());
    put("resps", responses.iter().map(response).collect::<Vec<_>>().into());
    put("filtered_resps", answers.iter().map(answer).collect::<Vec<_>>().into());
    put("filter", filter.into());
    put("metrics", scores.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>().into());
    put("doc_hash", sha256_hex(dumps(&asked.doc, Style { indent: Some(2), ascii: false }).as_bytes()).into());
    put("prompt_hash", sha256_hex(asked.requests.first().map_or("", |r| r.prompt()).as_bytes()).into());
    put("target_hash", sha256_hex(repr::str_of(&asked.target).as_bytes()).into());
    for (name, score) in scores {
        put(name, score.json());
    }
    Value::Object(out)
}

fn response(response: &Response) -> Value {
    match response {
        Response::Loglikelihood { logprob, is_greedy, .. } => json!([[logprob, is_greedy]]),
        Response::Rolling { logprob } => json!([logprob]),
        Response::Generated(texts) => json!(texts),
    }
}

fn answer(answer: &Answer) -> Value {
    match answer {
        Answer::Loglikelihood { logprob, is_greedy, .. } => json!([logprob, is_greedy]),
        Answer::Rolling(logprob) => json!(logprob),
        Answer::Text(text) => json!(text),
        Answer::Texts(texts) => json!(texts),
    }
}
