//! The CORE metric of DCLM as nanochat computes it (core_eval at commit 92d63d4).
//!
//! Unlike lm-eval: a BOS in front, choices compared by their mean log-probability over the tokens in which the prompts differ, shots
//! drawn for each document by `Random(1234 + index)` from the evaluated documents, which `Random(1337)` has shuffled, and scores
//! centred so that chance is 0.

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::encode::{Encode, Encoder, Pair};
use super::python::random::Random;
use super::python::text::rstrip;
use super::request::{Asked, Request};
use super::run::Planned;
use super::score::counts::Counts;
use super::tasks::documents::Library;
use super::tasks::spec::TaskSpec;
use crate::error::bad_input;

/// The name of the group of all its tasks.
pub const GROUP: &str = "core";
/// What the names of its tasks begin with; the rest is DCLM's label.
const PREFIX: &str = "core_";
/// DCLM's table of tasks, a part of the bundle of their data: chance as it is taken there.
const TABLE: &str = "eval_meta_data.csv";

/// How a task's prompts differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// One query, several continuations: the tokens after the common prefix count.
    MultipleChoice,
    /// Several contexts, one continuation: the tokens of the common suffix count.
    Schema,
    /// One continuation, every token of which must be the argmax.
    LanguageModeling,
}

/// A document in CORE's form. `contexts` holds one query, or one per option of a schema; `continuations` one per choice, or one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Item {
    pub kind: Kind,
    pub contexts: Vec<String>,
    pub continuations: Vec<String>,
    pub gold: usize,
}

impl Item {
    /// Reads `query`, `choices` and `gold`; or `context_options`, `continuation` and `gold`; or `context` and `continuation`.
    ///
    /// # Errors
    /// `BadInput`: none of these.
    pub fn of(doc: &Value) -> Result<Self> {
        let text = |key: &str| doc[key].as_str().map(|t| vec![t.to_string()]);
        let texts = |key: &str| doc[key].as_array()?.iter().map(|v| v.as_str().map(String::from)).collect::<Option<Vec<_>>>();
        let item = match (texts("choices"), texts("context_options")) {
            (Some(continuations), _) => text("query").map(|c| (Kind::MultipleChoice, c, continuations)),
            (_, Some(contexts)) => text("continuation").map(|c| (Kind::Schema, contexts, c)),
            _ => text("context").zip(text("continuation")).map(|(a, b)| (Kind::LanguageModeling, a, b)),
        };
        let (kind, contexts, continuations) = item.context("no document of CORE's form")?;
        let options = contexts.len().max(continuations.len());
        let gold = if kind == Kind::LanguageModeling { Some(0) } else { doc["gold"].as_u64() };
        match gold.filter(|gold| *gold < options as u64) {
            Some(gold) => Ok(Self { kind, contexts, continuations, gold: gold as usize }),
            None => Err(bad_input(format!("`gold` is {}, which is no index of its {options} options", doc["gold"]))),
        }
    }

    /// The item with its answer, as a shot of others.
    fn shot(&self, delimiter: &str) -> String {
        let (context, continuation) = match self.kind {
            Kind::MultipleChoice => (&self.contexts[0], &self.continuations[self.gold]),
            Kind::Schema => (&self.contexts[self.gold], &self.continuations[0]),
            Kind::LanguageModeling => (&self.contexts[0], &self.continuations[0]),
        };
        format!("{}{delimiter}{continuation}\n\n", self.trimmed(context))
    }

    fn trimmed<'a>(&self, context: &'a str) -> &'a str {
        if self.kind == Kind::LanguageModeling { context.trim() } else { context }
    }

    /// One request per choice or context.
    fn requests(&self, before: &str, delimiter: &str) -> Vec<Request> {
        let ask = |context: &String, continuation: &String| Request::Loglikelihood {
            context: format!("{before}{}{delimiter}", self.trimmed(context)).into(),
            continuation: continuation.clone(),
        };
        match self.kind {
            Kind::Schema => self.contexts.iter().map(|c| ask(c, &self.continuations[0])).collect(),
            _ => self.continuations.iter().map(|c| ask(&self.contexts[0], c)).collect(),
        }
    }
}

/// Score of chance of `spec`, a share: DCLM's table where it lies beside the data, else the definition's; none if it is no task of CORE.
pub fn chance(spec: &TaskSpec, library: &Library) -> Result<Option<f64>> {
    let Some(own) = spec.core_chance else { return Ok(None) };
    let Some(path) = library.find(&[TABLE.to_string()]) else { return Ok(Some(own)) };
    let label = spec.name.strip_prefix(PREFIX).unwrap_or(&spec.name);
    let rows = library.documents(&path)?;
    let Some(row) = rows.iter().find(|r| r["Eval Task"] == label) else { return Ok(Some(own)) };
    let percent = row["Random baseline"].as_str().and_then(|t| t.trim().parse::<f64>().ok()).filter(|p| (0.0..100.0).contains(p));
    let wrong =
        || bad_input(format!("{}: `Random baseline` of {label} is {}, no percentage", path.display(), row["Random baseline"]));
    Ok(Some(0.01 * percent.ok_or_else(wrong)?))
}

/// The requests of the first `count` documents in nanochat's order.
///
/// # Errors
/// `BadInput`: a document is not of CORE's form, or there are too few for the shots.
pub fn ask(spec: &TaskSpec, docs: &[Value], count: usize) -> Result<Vec<Asked>> {
    let mut chosen = order(docs.len());
    chosen.truncate(count);
    let item = |i: &usize| Item::of(&docs[*i]).with_context(|| format!("{}: document {i}", spec.name));
    let items = chosen.iter().map(item).collect::<Result<Vec<_>>>()?;
    let delimiter = &spec.target_delimiter;
    let asked = |(index, item): (usize, &Item)| {
        let shots = shots(index, items.len(), spec.num_fewshot.unwrap_or(0)).with_context(|| spec.name.clone())?;
        let before: String = shots.into_iter().map(|i| items[i].shot(delimiter)).collect();
        let doc_id = chosen[index];
        let (target, choices) = match item.kind {
            Kind::MultipleChoice => (json!(item.gold), item.continuations.clone()),
            Kind::Schema => (json!(item.gold), item.contexts.clone()),
            Kind::LanguageModeling => (json!(item.continuations[0]), Vec::new()),
        };
        let requests = item.requests(&before, delimiter);
        Ok(Asked { doc_id, doc: docs[doc_id].clone(), target: target.clone(), choices, gold: target, requests })
    };
    items.iter().enumerate().map(asked).collect()
}

/// Indices of the shots of document `index` out of `count`: itself is not among them.
fn shots(index: usize, count: usize, k: usize) -> Result<Vec<usize>> {
    if k > count.saturating_sub(1) {
        return Err(bad_input(format!(
            "the {k} few-shot examples are other documents of those evaluated, of which there are {}: raise --limit, or lower --num-fewshot",
            count.saturating_sub(1)
        )));
    }
    let others: Vec<usize> = (0..count).filter(|i| *i != index).collect();
    Ok(Random::new(1234 + index as u64).sample(others.len(), k).into_iter().map(|i| others[i]).collect())
}

/// The order in which nanochat takes documents, of which a limit takes the first.
fn order(count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    Random::new(1337).shuffle(&mut order);
    order
}

/// The ids of a document's requests: context is all before the tokens that count. What the model does not take is cut off on the left.
pub fn plan<T: Encode + ?Sized>(asked: &Asked, encoder: &Encoder<T>, counts: &mut Counts) -> Result<Vec<Planned>> {
    let kind = Item::of(&asked.doc)?.kind;
    let tokenizer = encoder.tokenizer;
    let bos = tokenizer.bos().or_else(|| tokenizer.eos()).map(|(id, _)| id);
    let encode = |text: &str| -> Result<Vec<u32>> { Ok(bos.into_iter().chain(tokenizer.encode(text, false)?).collect()) };
    let texts = asked.requests.iter().filter_map(|r| match r {
        Request::Loglikelihood { context, continuation } => Some((&**context, continuation.as_str())),
        _ => None,
    });
    let texts: Vec<(&str, &str)> = texts.collect();
    let ids = texts.iter().map(|(a, b)| encode(&format!("{a}{b}"))).collect::<Result<Vec<_>>>()?;
    let starts: Vec<usize> = match kind {
        Kind::MultipleChoice => vec![common(&ids, false); ids.len()],
        Kind::Schema => {
            let suffix = common(&ids, true);
            ids.iter().map(|i| i.len() - suffix).collect()
        }
        Kind::LanguageModeling => {
            // White space at the end would be a token of its own.
            let alone = encode(rstrip(texts[0].0))?;
            counts.boundary_mismatches += u64::from(!ids[0].starts_with(&alone));
            vec![common(&[ids[0].clone(), alone], false)]
        }
    };
    let planned = ids.into_iter().zip(starts).map(|(mut ids, start)| {
        let cut = ids.len().saturating_sub(encoder.max_length);
        // At least one token counts, and at least one stands before: a choice may begin another one, and all may be too long.
        let last = ids.len().checked_sub(1).filter(|last| *last > 0);
        let last = last.ok_or_else(|| bad_input("a prompt of fewer than two tokens leaves nothing to score"))?;
        let split = start.clamp(cut + 1, last.max(cut + 1));
        counts.boundary_fallbacks += u64::from(split != start);
        counts.truncated_requests += u64::from(cut > 0);
        counts.truncated_tokens += cut as u64;
        let continuation = ids.split_off(split);
        Ok(Planned::Pair { pair: Pair { context: ids.into(), continuation, ..Pair::default() }, cut })
    });
    planned.collect()
}

/// Length of the longest common prefix, or suffix.
fn common(all: &[Vec<u32>], from_end: bool) -> usize {
    let shortest = all.iter().map(Vec::len).min().unwrap_or(0);
    let at = |ids: &[u32], i: usize| if from_end { ids[ids.len() - 1 - i] } else { ids[i] };
    (0..shortest).take_while(|i| all.iter().all(|ids| at(ids, *i) == at(&all[0], *i))).count()
}

/// (score - chance) / (1 - chance)
pub fn centred(score: f64, chance: f64) -> f64 {
    (score - chance) / (1.0 - chance)
}

/// What a user should know of a metric of which `missing` tasks have no data.
pub fn remark(missing: &[String], whole: usize) -> String {
    format!(
        "{GROUP}: the mean over {} of its {whole} tasks, not comparable with the whole metric: no data of {}",
        whole - missing.len(),
        missing.iter().map(|name| name.strip_prefix(PREFIX).unwrap_or(name)).collect::<Vec<_>>().join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::eval::harness::compat::{Compat, Faults};

    #[test]
    fn common_parts() {
        let ids = vec![vec![1, 2, 3, 9, 7], vec![1, 2, 4, 9, 7], vec![1, 2, 9, 7]];
        assert_eq!((common(&ids, false), common(&ids, true)), (2, 2));
    }

    // CPython: random.Random(1234 + 3).sample([i for i in range(20) if i != 3], 4)
    #[test]
    fn shots_of_a_document() {
        assert_eq!(shots(3, 20, 4).unwrap(), [5, 13, 10, 8]);
        assert!(shots(0, 4, 4).unwrap_err().to_string().contains("raise --limit"));
        assert_eq!(order(6), [1, 0, 3, 2, 5, 4]);
    }

    #[test]
    fn documents_have_three_forms() {
        let of = |doc: Value| Item::of(&doc);
        let choice = of(json!({"query": "Q ", "choices": ["a", "b"], "gold": 1})).unwrap();
        assert_eq!(choice.shot("\nAnswer: "), "Q \nAnswer: b\n\n");
        let ask = |context: &str, continuation: &str| Request::Loglikelihood {
            context: context.into(),
            continuation: continuation.into(),
        };
        assert_eq!(choice.requests("S", ": "), [ask("SQ : ", "a"), ask("SQ : ", "b")]);
        let schema = of(json!({"context_options": ["A", "B"], "continuation": "ran.", "gold": 0})).unwrap();
        assert_eq!(schema.requests("", " "), [ask("A ", "ran."), ask("B ", "ran.")]);
        let text = of(json!({"context": " x\n", "continuation": "y"})).unwrap();
        assert_eq!((text.shot(" "), text.requests("", " ")), ("x y\n\n".into(), vec![ask("x ", "y")]));
        for wrong in
            [json!({"query": "Q"}), json!({"query": "Q", "choices": ["a"], "gold": 1}), json!({"query": "Q", "choices": ["a"]})]
        {
            assert!(of(wrong).is_err());
        }
        assert!(of(json!({"query": "Q", "choices": ["a", "b"], "gold": "1"})).is_err());
        assert_eq!(centred(0.625, 0.25), 0.5);
    }

    /// Each byte is a token; 1 begins a text.
    struct Bytes;

    impl Encode for Bytes {
        fn encode(&self, text: &str, _: bool) -> Result<Vec<u32>> {
            Ok(text.bytes().map(u32::from).collect())
        }
        fn bos(&self) -> Option<(u32, &str)> {
            Some((1, ""))
        }
        fn eos(&self) -> Option<(u32, &str)> {
            None
        }
    }

    fn planned(doc: Value, max_length: usize) -> (Vec<(usize, usize, usize)>, Counts) {
        let item = Item::of(&doc).unwrap();
        let requests = item.requests("", " ");
        let asked = Asked { doc_id: 0, doc, target: Value::Null, choices: Vec::new(), gold: Value::Null, requests };
        let (faults, mut counts) = (Faults::default(), Counts::default());
        let encoder = Encoder { tokenizer: &Bytes, compat: Compat::LmEval, add_special: None, max_length, faults: &faults };
        let lengths = plan(&asked, &encoder, &mut counts).unwrap().into_iter().map(|p| match p {
            Planned::Pair { pair, cut } => (pair.context.len(), pair.continuation.len(), cut),
            _ => unreachable!("only pairs are planned"),
        });
        (lengths.collect(), counts)
    }

    #[test]
    fn the_tokens_that_differ_count() {
        // "\1q " is common, and the "b" of both choices.
        let choices = json!({"query": "q", "choices": ["bar", "bo"], "gold": 0});
        assert_eq!(planned(choices.clone(), 99).0, [(4, 2, 0), (4, 1, 0)]);
        // Six tokens of which four fit: the two that count and two before them.
        assert_eq!(planned(choices, 4).0, [(4, 2, 2), (4, 1, 1)]);
        let schema = json!({"context_options": ["A", "Be"], "continuation": "ran", "gold": 0});
        assert_eq!(planned(schema, 99).0, [(2, 4, 0), (3, 4, 0)]);
        assert_eq!(planned(json!({"context": "x ", "continuation": "yz"}), 99).0, [(2, 3, 0)]);
    }

    #[test]
    fn something_is_scored_whatever_the_prompts_are() {
        // One choice begins the other; what counts is longer than the model takes.
        let (lengths, counts) = planned(json!({"query": "q", "choices": ["a", "ab"], "gold": 0}), 99);
        assert_eq!((lengths, counts.boundary_fallbacks), (vec![(3, 1, 0), (4, 1, 0)], 1));
        let (lengths, counts) = planned(json!({"query": "q", "choices": ["abcdef", "uvwxyz"], "gold": 0}), 4);
        assert_eq!((lengths, counts.truncated_tokens), (vec![(6, 3, 5), (6, 3, 5)], 10));
    }
}
