//! Which documents of a task occur in training data: sequences of 13 words that both have, as GPT-3's authors looked for them
//! (Brown et al., 2020, appendix C), and the scores of clean and dirty documents.

use std::collections::{BTreeMap, HashMap};

use anyhow::Result;
use rayon::prelude::*;
use serde_json::{Map, Value, json};

use super::harness::compat::{Compat, Faults};
use super::harness::score::aggregate::value;
use super::harness::score::document::Score;
use super::harness::tasks::field::{Field, Scope};
use super::harness::tasks::spec::TaskSpec;
use super::harness::tasks::spec_parts::Aggregation;
use super::harness::tasks::template::Templates;
use super::session::records::TaskRecords;
use crate::data::shard::Shard;
use crate::text::Encoder;

/// Words of a sequence.
pub const WORDS: usize = 13;

/// The sequences of the documents that are looked for.
#[derive(Debug, Default)]
pub struct Wanted {
    /// By hash of the sequence: the documents that hold it.
    sequences: HashMap<u64, Vec<usize>>,
    /// Documents with fewer than 13 words.
    pub too_short: Vec<bool>,
}

impl Wanted {
    pub fn new(queries: &[String]) -> Self {
        let mut out = Self::default();
        for (i, query) in queries.iter().enumerate() {
            let hashes = sequences(query);
            out.too_short.push(hashes.is_empty());
            for hash in hashes {
                let documents = out.sequences.entry(hash).or_default();
                if documents.last() != Some(&i) {
                    documents.push(i);
                }
            }
        }
        out
    }

    /// Which documents share a sequence with `text`.
    fn found_in(&self, text: &str) -> Vec<usize> {
        sequences(text).iter().filter_map(|h| self.sequences.get(h)).flatten().copied().collect()
    }
}

/// Hashes of all sequences of 13 words: letters and digits, lower case; what stands between them does not count.
fn sequences(text: &str) -> Vec<u64> {
    const BASE: u64 = 0x9e37_79b9_7f4a_7c15;
    let lower = text.to_lowercase();
    let words = lower.split(|c: char| !c.is_alphanumeric()).filter(|w| !w.is_empty());
    let words: Vec<u64> = words.map(|w| twox_hash::XxHash3_64::oneshot(w.as_bytes())).collect();
    let over = |window: &[u64]| window.iter().fold(0u64, |h, w| (h ^ w).wrapping_mul(BASE).rotate_left(29));
    words.windows(WORDS).map(over).collect()
}

/// Looks through all documents of the shards; `dirty[i]` tells whether document i was met.
///
/// # Errors
/// A damaged shard, or ids that the tokenizer cannot decode.
pub fn search(wanted: &Wanted, shards: &[Shard], tokenizer: &Encoder, mut progress: impl FnMut(u64)) -> Result<Vec<bool>> {
    // As many documents as keep all threads busy for a while.
    const BATCH: u64 = 4096;
    let mut dirty = vec![false; wanted.too_short.len()];
    for shard in shards {
        let mut from = 0;
        while from < shard.num_documents() {
            let to = (from + BATCH).min(shard.num_documents());
            let of_document = |d: u64| -> Result<Vec<usize>> {
                let (begin, end) = (shard.document_start(d)?, shard.document_start(d + 1)?);
                let mut ids = Vec::new();
                shard.read(begin, end, &mut ids);
                Ok(wanted.found_in(&tokenizer.decode(&ids, true)?))
            };
            let found = (from..to).into_par_iter().map(of_document).collect::<Result<Vec<_>>>()?;
            found.into_iter().flatten().for_each(|i| dirty[i] = true);
            progress(to - from);
            from = to;
        }
    }
    Ok(dirty)
}

/// The text of a document that is looked for: `doc_to_decontamination_query`, else its prompt.
pub fn query(spec: &TaskSpec, doc: &Value, templates: &Templates) -> Result<String> {
    let features: Vec<String> = doc.as_object().map(|o| o.keys().cloned().collect()).unwrap_or_default();
    let faults = Faults::default();
    let scope = Scope { templates, features: &features, has_choices: false, compat: Compat::Strict, faults: &faults };
    match (&spec.decontamination, &spec.doc_to_text) {
        (Some(query), _) => scope.string(query, doc),
        (None, Field::Template(text)) => scope.string(text, doc),
        (None, other) => Ok(super::harness::python::repr::str_of(&scope.text(other, doc)?)),
    }
}

/// A task's documents: dirty or not, by id, and each metric over all, over the clean and over the dirty ones.
pub fn report(spec: &TaskSpec, records: &TaskRecords, dirty: &BTreeMap<u64, bool>, too_short: usize) -> Value {
    // By metric and filter: clean, dirty.
    let mut columns: BTreeMap<(String, String), [Vec<Score>; 2]> = BTreeMap::new();
    for record in &records.records {
        let Some(dirty) = record["doc_id"].as_u64().and_then(|id| dirty.get(&id)) else { continue };
        for metric in record["metrics"].as_array().into_iter().flatten().filter_map(Value::as_str) {
            if let Some(score) = score_of(&record[metric]) {
                let key = (metric.to_string(), record["filter"].as_str().unwrap_or_default().to_string());
                columns.entry(key).or_default()[usize::from(*dirty)].push(score);
            }
        }
    }
    let mut scores = Map::new();
    for ((metric, filter), [clean, dirty]) in &columns {
        let of_metric = spec.metrics.iter().find(|m| m.kind.name() == metric);
        let aggregation = of_metric.map_or(Aggregation::Mean, |m| m.aggregation);
        let part = |s: &[Score]| if s.is_empty() { Value::Null } else { json!(value(aggregation, s)) };
        let all = [clean.as_slice(), dirty.as_slice()].concat();
        scores.insert(format!("{metric},{filter}"), json!({"all": part(&all), "clean": part(clean), "dirty": part(dirty)}));
    }
    let ids: Vec<u64> = dirty.iter().filter(|(_, d)| **d).map(|(id, _)| *id).collect();
    json!({
        "documents": dirty.len(),
        "dirty": ids.len(),
        "too_short": too_short,
        "scores": scores,
        "dirty_doc_ids": ids,
    })
}

/// A document's value as its record tells it: a number, or a log-likelihood and the length it is spread over.
fn score_of(v: &Value) -> Option<Score> {
    match v {
        Value::Array(pair) => Some(Score::Weighted(pair.first()?.as_f64()?, pair.get(1)?.as_u64()?)),
        other => other.as_f64().map(Score::Float),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thirteen_words_in_a_row_whatever_stands_between() {
        let words: Vec<String> = (0..20).map(|i| format!("word{i}")).collect();
        let query = |from: usize, to: usize| words[from..to].join(" ");
        let wanted = Wanted::new(&[query(3, 17), query(0, 12), "another ".repeat(14)]);
        assert_eq!(wanted.too_short, [false, true, false]);
        let met = |text: &str| !wanted.found_in(text).is_empty();
        assert!(met(&format!("Before. {}! After", words[4..17].join(",\n").to_uppercase())));
        assert!(!met(&query(5, 17)), "twelve words are not thirteen");
        let mut turned = words[3..17].to_vec();
        turned.swap(5, 8);
        assert!(!met(&turned.join(" ")));
    }
}
