//! The metrics of one document, as lm-eval's `process_results`.

use anyhow::Result;
use serde_json::{Value, json};

use super::code::{CodeRunner, Verdict, pass_at_k};
use super::counts::Counts;
use super::filters::Answer;
use super::numeric::{argmax, numpy_sum};
use super::samples::CONTINUATION_TOKENS;
use crate::error::bad_input;
use crate::eval::harness::core_metric;
use crate::eval::harness::python::regex::Pattern;
use crate::eval::harness::python::{repr, text};
use crate::eval::harness::request::Asked;
use crate::eval::harness::tasks::build::Built;
use crate::eval::harness::tasks::builtin::{Function, string};
use crate::eval::harness::tasks::spec::OutputType;
use crate::eval::harness::tasks::spec_parts::{Metric, MetricKind};

/// The value of a metric on a document.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Score {
    Float(f64),
    Int(i64),
    /// A log-likelihood and the words or bytes that it is spread over.
    Weighted(f64, u64),
}

impl Score {
    pub fn value(self) -> f64 {
        match self {
            Score::Float(x) | Score::Weighted(x, _) => x,
            Score::Int(i) => i as f64,
        }
    }

    pub fn json(self) -> Value {
        match self {
            Score::Float(x) => json!(x),
            Score::Int(i) => json!(i),
            Score::Weighted(x, n) => json!([x, n]),
        }
    }
}

/// Metrics by name, in lm-eval's order.
pub type Scores = Vec<(String, Score)>;

/// Scores documents of one task.
pub struct Scorer<'a> {
    pub task: &'a Built,
    /// Runs generated programs; without it a task that needs one is an error.
    pub code: Option<&'a dyn CodeRunner>,
}

impl Scorer<'_> {
    /// The metrics of `asked`, given the filtered answers to its requests.
    pub fn score(&self, asked: &Asked, answers: &[Answer], counts: &mut Counts) -> Result<Scores> {
        let spec = &self.task.spec;
        if let Some(chance) = spec.core_chance {
            return self.core(asked, answers, chance, counts);
        }
        match (spec.process_results, spec.output_type) {
            (Some(Function::WikitextCounts), _) => self.rolling(string(&asked.doc, "page")?, answers),
            (Some(Function::TruthfulqaMc2), _) => mc2(asked, answers),
            (Some(other), _) => {
                Err(bad_input(format!("the built-in function `{}` cannot stand as process_results", other.name())))
            }
            (None, OutputType::Loglikelihood) => self.loglikelihood(answers),
            (None, OutputType::LoglikelihoodRolling) => self.rolling(&repr::str_of(&asked.target), answers),
            (None, OutputType::MultipleChoice) => self.multiple_choice(asked, answers, counts),
            (None, OutputType::GenerateUntil) => self.generated(asked, answers, counts),
        }
    }

    fn metrics(&self) -> &[Metric] {
        &self.task.spec.metrics
    }

    fn wants(&self, kind: MetricKind) -> bool {
        self.metrics().iter().any(|m| m.kind == kind)
    }

    fn loglikelihood(&self, answers: &[Answer]) -> Result<Scores> {
        let (logprob, is_greedy) = *loglikelihoods(answers)?.first().ok_or_else(|| bad_input("a document without an answer"))?;
        let all = [(MetricKind::Perplexity, Score::Float(logprob)), (MetricKind::Acc, Score::Int(is_greedy.into()))];
        Ok(self.pick(&all))
    }

    fn rolling(&self, counted: &str, answers: &[Answer]) -> Result<Scores> {
        let [Answer::Rolling(logprob)] = answers else {
            return Err(bad_input("a rolling document has one answer, a log-likelihood"));
        };
        let words = Pattern::new(r"\s+")?.split_count(counted) as u64;
        let bytes = counted.len() as u64;
        let all = [
            (MetricKind::WordPerplexity, Score::Weighted(*logprob, words)),
            (MetricKind::BytePerplexity, Score::Weighted(*logprob, bytes)),
            (MetricKind::BitsPerByte, Score::Weighted(*logprob, bytes)),
        ];
        Ok(self.pick(&all))
    }

    fn pick(&self, all: &[(MetricKind, Score)]) -> Scores {
        all.iter().filter(|(kind, _)| self.wants(*kind)).map(|(kind, s)| (kind.name().to_string(), *s)).collect()
    }

    fn multiple_choice(&self, asked: &Asked, answers: &[Answer], counts: &mut Counts) -> Result<Scores> {
        let all = loglikelihoods(answers)?;
        let n = asked.choices.len();
        let (conditional, alone) = all.split_at(n.min(all.len()));
        let lps: Vec<f64> = conditional.iter().map(|a| a.0).collect();
        if lps.len() != n || n == 0 {
            return Err(bad_input(format!("{n} choices, but {} answers", all.len())));
        }
        let per = |length: &dyn Fn(&str) -> usize| -> Vec<f64> {
            lps.iter().zip(&asked.choices).map(|(lp, c)| lp / length(c) as f64).collect()
        };
        let best = argmax(&lps);
        counts.ties += u64::from(lps.iter().filter(|lp| **lp == lps[best]).count() > 1);
        counts.not_finite += lps.iter().filter(|lp| !lp.is_finite()).count() as u64;
        let golds = golds(&asked.gold, &asked.choices, self.task.multiple_target > 0);
        counts.bad_labels += u64::from(golds.iter().any(Option::is_none));
        let right = |picked: usize| Score::Float(if golds.contains(&Some(picked)) { 1.0 } else { 0.0 });
        let greedy = golds.iter().any(|g| g.is_some_and(|g| conditional[g].1));
        let mut scores = self.pick(&[
            (MetricKind::Acc, right(best)),
            (MetricKind::AccNorm, right(argmax(&per(&text::len)))),
            (MetricKind::AccBytes, right(argmax(&per(&str::len)))),
            (MetricKind::ExactMatch, Score::Int(greedy.into())),
        ]);
        if self.wants(MetricKind::AccMutualInfo) {
            if alone.len() != n {
                return Err(bad_input(format!("acc_mutual_info needs {n} answers without context, there are {}", alone.len())));
            }
            let gains: Vec<f64> = lps.iter().zip(alone).map(|(lp, a)| lp - a.0).collect();
            scores.push((MetricKind::AccMutualInfo.name().into(), right(argmax(&gains))));
        }
        Ok(scores)
    }

    /// By CORE's rules: the likeliest choice by the mean over its tokens; of one continuation, all tokens are the argmax.
    fn core(&self, asked: &Asked, answers: &[Answer], chance: f64, counts: &mut Counts) -> Result<Scores> {
        let all = loglikelihoods(answers)?;
        counts.not_finite += all.iter().filter(|a| !a.0.is_finite()).count() as u64;
        let is_right = match asked.gold.as_u64() {
            None => all.iter().all(|a| a.1),
            Some(gold) => {
                let mean = |answer: &Answer| match answer {
                    Answer::Loglikelihood { logprob, tokens: n @ 1.., .. } => Ok(logprob / *n as f64),
                    _ => Err(bad_input(format!(
                        "how many tokens its log-probabilities are of is not told: no `{CONTINUATION_TOKENS}`"
                    ))),
                };
                let means = answers.iter().map(mean).collect::<Result<Vec<_>>>()?;
                let best = argmax(&means);
                counts.ties += u64::from(means.iter().filter(|m| **m == means[best]).count() > 1);
                best as u64 == gold
            }
        };
        let acc = if is_right { 1.0 } else { 0.0 };
        let centred = core_metric::centred(acc, chance);
        Ok(self.pick(&[(MetricKind::Acc, Score::Float(acc)), (MetricKind::AccCentered, Score::Float(centred))]))
    }

    fn generated(&self, asked: &Asked, answers: &[Answer], counts: &mut Counts) -> Result<Scores> {
        let answer = answers.first().ok_or_else(|| bad_input("a document without an answer"))?;
        let gold = match (&asked.target, asked.choices.is_empty()) {
            (Value::Number(i), false) => i.as_u64().and_then(|i| asked.choices.get(i as usize)).map(|c| vec![c.clone()]),
            (Value::Array(items), true) => Some(items.iter().map(repr::str_of).collect()),
            (other, _) => Some(vec![repr::str_of(other)]),
        };
        let gold = gold.ok_or_else(|| bad_input(format!("the target {} is no index of the choices", asked.target)))?;
        let mut scores = Scores::new();
        for metric in self.metrics() {
            match metric.kind {
                MetricKind::ExactMatch => scores.push(("exact_match".into(), exact_match(metric, &gold, answer)?)),
                MetricKind::PassAtK => scores.extend(self.pass_at_k(metric, &gold[0], answer, counts)?),
                other => return Err(bad_input(format!("the metric {} does not fit generated text", other.name()))),
            }
        }
        Ok(scores)
    }

    fn pass_at_k(&self, metric: &Metric, check: &str, answer: &Answer, counts: &mut Counts) -> Result<Scores> {
        let code = self.code.ok_or_else(|| {
            bad_input(format!("{} runs generated programs, which only --allow-code-exec permits", self.task.spec.name))
        })?;
        let Answer::Texts(programs) = answer else {
            return Err(bad_input("pass_at_k needs all answers of a document: no take_first before it"));
        };
        let mut correct = 0;
        for program in programs {
            let verdict = code.run(program, check)?;
            correct += usize::from(verdict == Verdict::Pass);
            counts.timeouts += u64::from(verdict == Verdict::Timeout);
        }
        let ks: Vec<usize> = match metric.options.get("k") {
            Some(Value::Array(ks)) => ks.iter().filter_map(Value::as_u64).map(|k| k as usize).collect(),
            Some(one) => one.as_u64().into_iter().map(|k| k as usize).collect(),
            None => vec![1],
        };
        let possible = ks.into_iter().filter(|k| *k <= programs.len());
        Ok(possible.map(|k| (format!("pass@{k}"), Score::Float(pass_at_k(programs.len(), correct, k)))).collect())
    }
}

fn loglikelihoods(answers: &[Answer]) -> Result<Vec<(f64, bool)>> {
    let each = answers.iter().map(|a| match a {
        Answer::Loglikelihood { logprob, is_greedy, .. } => Ok((*logprob, *is_greedy)),
        _ => Err(bad_input("a choice is scored by its log-likelihood, but text was answered")),
    });
    each.collect()
}

/// Indices of the right choices; `None` for a label that names none.
fn golds(gold: &Value, choices: &[String], several: bool) -> Vec<Option<usize>> {
    let one = |v: &Value| match v {
        Value::Number(n) => match n.as_i64() {
            // Negative labels are no index, but Python's list would take them.
            Some(i) => usize::try_from(i).ok().filter(|i| *i < choices.len()),
            None => None,
        },
        Value::String(s) => choices.iter().position(|c| c == s),
        _ => None,
    };
    match gold {
        Value::Array(items) if several => items.iter().map(one).collect(),
        other => vec![one(other)],
    }
}

/// 1 if any of `gold` equals the answer after both were cleaned as the metric says.
fn exact_match(metric: &Metric, gold: &[String], answer: &Answer) -> Result<Score> {
    let Answer::Text(answer) = answer else {
        return Err(bad_input("exact_match needs one answer of a document: a filter must end with take_first"));
    };
    let flag = |key: &str| metric.options.get(key).and_then(Value::as_bool).unwrap_or(false);
    let ignored = metric.options.get("regexes_to_ignore").and_then(Value::as_array).cloned().unwrap_or_default();
    let ignored = ignored.iter().map(|p| Pattern::new(&repr::str_of(p))).collect::<Result<Vec<_>>>()?;
    let (case, punctuation, numbers) = (flag("ignore_case"), flag("ignore_punctuation"), flag("ignore_numbers"));
    let clean = |s: &str| {
        let mut s = ignored.iter().fold(s.to_string(), |s, p| p.sub("", &s));
        if case {
            s = s.to_lowercase();
        }
        s.retain(|c| !(punctuation && c.is_ascii_punctuation() || numbers && c.is_ascii_digit()));
        s
    };
    let answer = clean(answer);
    Ok(Score::Float(if gold.iter().any(|g| clean(g) == answer) { 1.0 } else { 0.0 }))
}

/// TruthfulQA's mc2: the share of probability that falls on the true answers.
fn mc2(asked: &Asked, answers: &[Answer]) -> Result<Scores> {
    let probabilities: Vec<f64> = loglikelihoods(answers)?.iter().map(|a| a.0.exp()).collect();
    let total = numpy_sum(&probabilities);
    let labels = asked.doc["mc2_targets"]["labels"].as_array();
    let labels = labels
        .filter(|l| l.len() == probabilities.len())
        .ok_or_else(|| bad_input("mc2_targets has as many labels as choices"))?;
    let on_true: Vec<f64> = probabilities.iter().zip(labels).filter(|(_, l)| **l == 1).map(|(p, _)| p / total).collect();
    Ok(vec![("acc".into(), Score::Float(numpy_sum(&on_true)))])
}
