//! Metrics and filters of a definition.

use anyhow::Result;
use serde_json::{Map, Value};

use super::builtin::Function;
use super::spec::{OutputType, Source};
use crate::eval::harness::python::regex::Pattern;
use crate::eval::harness::python::repr;

/// A metric of `metric_list`.
#[derive(Debug, Clone, PartialEq)]
pub struct Metric {
    pub kind: MetricKind,
    pub aggregation: Aggregation,
    pub higher_is_better: bool,
    /// `regexes_to_ignore`, `ignore_case`, `ignore_punctuation`, `ignore_numbers`, `k`
    pub options: Map<String, Value>,
}

/// What is measured on a document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetricKind {
    Acc,
    AccNorm,
    AccBytes,
    AccMutualInfo,
    /// Of tasks of CORE: chance is 0.
    AccCentered,
    ExactMatch,
    Perplexity,
    WordPerplexity,
    BytePerplexity,
    BitsPerByte,
    PassAtK,
}

/// How a task's value comes from its documents'.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Aggregation {
    Mean,
    Median,
    NanMean,
    Perplexity,
    WeightedPerplexity,
    BitsPerByte,
}

const METRICS: [(&str, MetricKind, Aggregation, bool); 11] = [
    ("acc", MetricKind::Acc, Aggregation::Mean, true),
    ("acc_norm", MetricKind::AccNorm, Aggregation::Mean, true),
    ("acc_bytes", MetricKind::AccBytes, Aggregation::Mean, true),
    ("acc_mutual_info", MetricKind::AccMutualInfo, Aggregation::Mean, true),
    ("acc_centered", MetricKind::AccCentered, Aggregation::Mean, true),
    ("exact_match", MetricKind::ExactMatch, Aggregation::Mean, true),
    ("perplexity", MetricKind::Perplexity, Aggregation::Perplexity, false),
    ("word_perplexity", MetricKind::WordPerplexity, Aggregation::WeightedPerplexity, false),
    ("byte_perplexity", MetricKind::BytePerplexity, Aggregation::WeightedPerplexity, false),
    ("bits_per_byte", MetricKind::BitsPerByte, Aggregation::BitsPerByte, false),
    ("pass_at_k", MetricKind::PassAtK, Aggregation::Mean, true),
];

const AGGREGATIONS: [(&str, Aggregation); 6] = [
    ("mean", Aggregation::Mean),
    ("median", Aggregation::Median),
    ("nanmean", Aggregation::NanMean),
    ("perplexity", Aggregation::Perplexity),
    ("weighted_perplexity", Aggregation::WeightedPerplexity),
    ("bits_per_byte", Aggregation::BitsPerByte),
];

impl MetricKind {
    pub fn name(self) -> &'static str {
        METRICS.iter().find(|m| m.1 == self).map_or("", |m| m.0)
    }
}

/// The metrics of a definition; lm-eval's defaults of the output type when it names none.
pub fn metrics(map: &Map<String, Value>, output: OutputType, source: &Source) -> Result<Vec<Metric>> {
    let Some(list) = map.get("metric_list").filter(|v| !v.is_null()) else {
        let names: &[&str] = match output {
            OutputType::Loglikelihood => &["perplexity", "acc"],
            OutputType::LoglikelihoodRolling => &["word_perplexity", "byte_perplexity", "bits_per_byte"],
            OutputType::MultipleChoice => &["acc", "acc_norm"],
            OutputType::GenerateUntil => &["exact_match"],
        };
        return names.iter().map(|name| metric(&Map::from_iter([("metric".to_string(), Value::from(*name))]), source)).collect();
    };
    let list = list.as_array().ok_or_else(|| source.error("metric_list", "`metric_list` is a list"))?;
    list.iter()
        .map(|m| {
            metric(m.as_object().ok_or_else(|| source.error("metric_list", "an entry of `metric_list` is a table"))?, source)
        })
        .collect()
}

fn metric(map: &Map<String, Value>, source: &Source) -> Result<Metric> {
    let name = map
        .get("metric")
        .and_then(Value::as_str)
        .ok_or_else(|| source.error("metric_list", "an entry of `metric_list` names no `metric`"))?;
    let Some((_, kind, aggregation, higher)) = METRICS.iter().find(|m| m.0 == name) else {
        let known: Vec<_> = METRICS.iter().map(|m| m.0).collect();
        return Err(source.error("metric", format!("the metric {name:?} is not among {}", known.join(", "))));
    };
    let aggregation = match map.get("aggregation").map(repr::str_of) {
        None => *aggregation,
        Some(name) => AGGREGATIONS.iter().find(|a| a.0 == name).map(|a| a.1).ok_or_else(|| {
            let known: Vec<_> = AGGREGATIONS.iter().map(|a| a.0).collect();
            source.error("aggregation", format!("the aggregation {name:?} is not among {}", known.join(", ")))
        })?,
    };
    let mut options = map.clone();
    for key in ["metric", "aggregation", "higher_is_better", "hf_evaluate"] {
        options.shift_remove(key);
    }
    let allowed: &[&str] = match kind {
        MetricKind::ExactMatch => &["regexes_to_ignore", "ignore_case", "ignore_punctuation", "ignore_numbers"],
        MetricKind::PassAtK => &["k"],
        _ => &[],
    };
    if let Some(key) = options.keys().find(|k| !allowed.contains(&k.as_str())) {
        return Err(source.error(key, format!("the metric {name} has no option `{key}`")));
    }
    let higher_is_better = map.get("higher_is_better").and_then(Value::as_bool).unwrap_or(*higher);
    Ok(Metric { kind: *kind, aggregation, higher_is_better, options })
}

/// A named chain of filters.
#[derive(Debug, Clone, PartialEq)]
pub struct Filter {
    pub name: String,
    pub steps: Vec<Step>,
}

/// One filter: answers of a document in, answers out.
#[derive(Debug, Clone, PartialEq)]
pub enum Step {
    Regex(RegexStep),
    MultiChoiceRegex { regex: RegexStep, ignore_case: bool, ignore_punctuation: bool, regexes_to_ignore: Vec<String> },
    TakeFirst,
    TakeFirstK(usize),
    MajorityVote,
    Lowercase,
    Uppercase,
    RemoveWhitespace,
    Map { mapping: Map<String, Value>, default: Value },
    Function(Function),
}

/// `regex_pattern`, which of its matches counts, and what stands for none.
#[derive(Debug, Clone, PartialEq)]
pub struct RegexStep {
    pub pattern: String,
    pub group_select: i64,
    pub fallback: String,
}

/// The filters of a definition; without any, the first answer under the name "none".
pub fn filters(map: &Map<String, Value>, source: &Source) -> Result<Vec<Filter>> {
    let Some(list) = map.get("filter_list").filter(|v| !v.is_null()) else {
        return Ok(vec![Filter { name: "none".into(), steps: vec![Step::TakeFirst] }]);
    };
    let bad = |says: &str| source.error("filter_list", says);
    let list = list.as_array().filter(|l| !l.is_empty()).ok_or_else(|| bad("`filter_list` is a list of filters"))?;
    list.iter()
        .map(|f| {
            let name = f.get("name").and_then(Value::as_str).ok_or_else(|| bad("a filter has a `name`"))?;
            let steps =
                f.get("filter").and_then(Value::as_array).ok_or_else(|| bad("a filter has a list `filter` of functions"))?;
            let steps = steps.iter().map(|s| step(s, source)).collect::<Result<Vec<_>>>()?;
            Ok(Filter { name: name.into(), steps })
        })
        .collect()
}

fn step(v: &Value, source: &Source) -> Result<Step> {
    let name = v
        .get("function")
        .and_then(Value::as_str)
        .ok_or_else(|| source.error("filter", "an entry of `filter` has a `function`"))?;
    let flag = |key: &str| v.get(key).and_then(Value::as_bool).unwrap_or(false);
    let regex = || -> Result<RegexStep> {
        let pattern = v.get("regex_pattern").and_then(Value::as_str).unwrap_or(r"#### (\-?[0-9\.\,]+)").to_string();
        Pattern::new(&pattern).map_err(|e| source.error("regex_pattern", e))?;
        let fallback = v.get("fallback").map_or("[invalid]".into(), repr::str_of);
        Ok(RegexStep { pattern, group_select: v.get("group_select").and_then(Value::as_i64).unwrap_or(0), fallback })
    };
    Ok(match name {
        "regex" => Step::Regex(regex()?),
        "multi_choice_regex" => {
            let ignored = v.get("regexes_to_ignore").and_then(Value::as_array).cloned().unwrap_or_default();
            Step::MultiChoiceRegex {
                regex: regex()?,
                ignore_case: flag("ignore_case"),
                ignore_punctuation: flag("ignore_punctuation"),
                regexes_to_ignore: ignored.iter().map(repr::str_of).collect(),
            }
        }
        "take_first" => Step::TakeFirst,
        "take_first_k" => {
            let k = v
                .get("k")
                .and_then(Value::as_u64)
                .ok_or_else(|| source.error("function", "`take_first_k` needs a number `k`"))?;
            Step::TakeFirstK(k as usize)
        }
        "majority_vote" => Step::MajorityVote,
        "lowercase" => Step::Lowercase,
        "uppercase" => Step::Uppercase,
        "remove_whitespace" => Step::RemoveWhitespace,
        "map" => Step::Map {
            mapping: v.get("mapping_dict").and_then(Value::as_object).cloned().unwrap_or_default(),
            default: v.get("default_value").cloned().unwrap_or(Value::Null),
        },
        other => {
            Step::Function(Function::named(other).map_err(|e| source.error("function", format!("no filter is called so: {e}")))?)
        }
    })
}
