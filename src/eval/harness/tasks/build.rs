//! From a definition and its documents to requests, as lm-eval's `ConfigurableTask` builds them.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use anyhow::{Context, Result};
use serde_json::Value;

use super::documents::Library;
use super::fewshot::Shots;
use super::field::{Field, Scope};
use super::spec::{OutputType, TaskSpec};
use super::spec_parts::MetricKind;
use super::template::Templates;
use crate::error::bad_input;
use crate::eval::harness::compat::{Compat, Fault, Faults};
use crate::eval::harness::core_metric;
use crate::eval::harness::python::random::Random;
use crate::eval::harness::python::repr;
use crate::eval::harness::request::{Asked, Request};

/// What a run asks of every task.
#[derive(Debug, Clone)]
pub struct Options {
    pub compat: Compat,
    /// Overrides the definition's.
    pub num_fewshot: Option<usize>,
    /// Documents from the first: a number, or a share when below 1.
    pub limit: Option<f64>,
    /// Seed of few-shot choice; lm-eval's default is 1234.
    pub fewshot_seed: u64,
    /// Put over the definition's `generation_kwargs`.
    pub generation: serde_json::Map<String, Value>,
}

impl Default for Options {
    fn default() -> Self {
        Self { compat: Compat::LmEval, num_fewshot: None, limit: None, fewshot_seed: 1234, generation: serde_json::Map::new() }
    }
}

/// A task with its documents and requests.
#[derive(Debug)]
pub struct Built {
    /// The definition, completed by the options: `num_fewshot`, `generation`.
    pub spec: TaskSpec,
    /// Documents of the evaluated split before the limit.
    pub original: usize,
    /// Documents of the evaluated split that equal an earlier one.
    pub duplicates: usize,
    pub asked: Vec<Asked>,
    /// Contexts differ from choice to choice, the continuation is one.
    pub multiple_input: bool,
    /// Targets of the first document when it has several.
    pub multiple_target: usize,
    /// What a user should know of the data.
    pub notes: Vec<String>,
    /// Files that were read, by split.
    pub files: Vec<(String, std::path::PathBuf)>,
    pub faults: Faults,
}

/// Reads the documents of `spec` and builds all requests.
pub fn build(spec: &TaskSpec, library: &Library, templates: &Templates, options: &Options) -> Result<Built> {
    let mut spec = spec.clone();
    spec.num_fewshot = options.num_fewshot.or(spec.num_fewshot);
    if spec.output_type == OutputType::GenerateUntil {
        spec.generation.extend(options.generation.clone());
    }
    let mut notes = Vec::new();
    let mut files = Vec::new();
    let split = spec.evaluated_split().to_string();
    let docs = documents(&spec, &split, library, &mut files, &mut notes)?;
    if let Some(official) = spec.official_docs.filter(|n| *n != docs.len()) {
        notes.push(format!("{}: {} of the {official} official documents are at hand", spec.name, docs.len()));
    }
    let seen = docs.iter().map(hash_of).collect::<Result<HashSet<_>>>()?;
    let duplicates = docs.len() - seen.len();
    let count = limited(docs.len(), options.limit);
    spec.core_chance = core_metric::chance(&spec, library)?;
    if spec.core_chance.is_some() {
        let asked = core_metric::ask(&spec, &docs, count)?;
        let (original, faults) = (docs.len(), Faults::default());
        return Ok(Built { original, duplicates, asked, multiple_input: false, multiple_target: 0, notes, files, faults, spec });
    }
    let preamble = preamble(&spec, library, &mut files)?;
    let pool = pool(&spec, &split, &docs, library, &mut files, &mut notes)?;
    let faults = Faults::default();
    let features: Vec<String> = docs[0].as_object().map(|o| o.keys().cloned().collect()).unwrap_or_default();
    let builder = Builder {
        scope: Scope {
            templates,
            features: &features,
            has_choices: spec.doc_to_choice.is_some(),
            compat: options.compat,
            faults: &faults,
        },
        spec: &spec,
        options,
        preamble,
        multiple_input: false,
        known_shots: RefCell::default(),
    };
    let first_text = builder.scope.text(&spec.doc_to_text, &docs[0])?;
    let multiple_input = first_text.is_i64() && spec.doc_to_choice.is_some();
    let first_target = builder.scope.target(&spec.doc_to_target, &docs[0])?;
    let builder = Builder { multiple_input, ..builder };
    let mut shots = Shots {
        task: &spec.name,
        sampler: spec.fewshot.sampler,
        pool: pool.iter().collect(),
        random: Random::new(options.fewshot_seed),
    };
    let asked = docs[..count]
        .iter()
        .enumerate()
        .map(|(doc_id, doc)| {
            builder.ask(doc_id, doc, &mut shots).with_context(|| format!("{}: document {doc_id} of the {split} split", spec.name))
        })
        .collect::<Result<Vec<_>>>()?;
    drop(shots);
    let multiple_target = first_target.as_array().map_or(0, Vec::len);
    Ok(Built { original: docs.len(), duplicates, asked, multiple_input, multiple_target, notes, files, faults, spec })
}

fn hash_of(doc: &Value) -> Result<blake3::Hash> {
    let mut hasher = blake3::Hasher::new();
    serde_json::to_writer(&mut hasher, doc)?;
    Ok(hasher.finalize())
}

/// lm-eval's `get_sample_size`: below 1 a share, rounded up.
fn limited(count: usize, limit: Option<f64>) -> usize {
    match limit {
        None => count,
        Some(l) if l < 1.0 => ((count as f64 * l).ceil() as usize).min(count),
        Some(l) => (l as usize).min(count),
    }
}

/// The documents of a split: read, chosen by `only`, processed.
fn documents(
    spec: &TaskSpec,
    split: &str,
    library: &Library,
    files: &mut Vec<(String, std::path::PathBuf)>,
    notes: &mut Vec<String>,
) -> Result<Vec<Value>> {
    let names = spec.data_files.get(split).cloned().unwrap_or_default();
    let path = library.require(&spec.name, split, &names)?;
    let all: Arc<Vec<Value>> = library.documents(&path)?;
    let stem = path.file_name().and_then(|n| n.to_str()).and_then(|n| n.split('.').next()).unwrap_or_default();
    notes.extend(spec.notes.get(stem).map(|says| format!("{}: {says}", spec.name)));
    let chosen = library.chosen(&path, &spec.only)?;
    let docs =
        chosen.into_iter().map(|i| &all[i]).map(|doc| spec.process_docs.map_or_else(|| Ok(doc.clone()), |f| f.process(doc)));
    let docs = docs
        .enumerate()
        .map(|(i, doc)| doc.with_context(|| format!("{}: document {i}", path.display())))
        .collect::<Result<Vec<_>>>()?;
    if docs.is_empty() {
        let only: Vec<_> = spec.only.iter().map(|(k, v)| format!("{k} = {v}")).collect();
        return Err(bad_input(format!("{}: {} has no document with {}", spec.name, path.display(), only.join(", "))));
    }
    files.push((split.to_string(), path));
    Ok(docs)
}

/// The text that stands before every prompt, from the file that the definition names.
fn preamble(spec: &TaskSpec, library: &Library, files: &mut Vec<(String, std::path::PathBuf)>) -> Result<String> {
    if spec.preamble.is_empty() {
        return Ok(String::new());
    }
    let path = library.require(&spec.name, "preamble", &spec.preamble)?;
    let text = library.documents(&path)?[0]["text"].as_str().map(str::to_string);
    let text = text.ok_or_else(|| bad_input(format!("{}: the first record has no `text`", path.display())))?;
    files.push(("preamble".into(), path));
    Ok(text)
}

/// Documents that few-shot examples are drawn from: the few-shot split, fixed samples, else training, validation, test. A split
/// whose file is not at hand is passed over, with a sentence.
fn pool(
    spec: &TaskSpec,
    evaluated: &str,
    docs: &[Value],
    library: &Library,
    files: &mut Vec<(String, std::path::PathBuf)>,
    notes: &mut Vec<String>,
) -> Result<Vec<Value>> {
    if spec.num_fewshot.unwrap_or(0) == 0 {
        return Ok(Vec::new());
    }
    if let Some(split) = &spec.fewshot.split {
        return if split == evaluated { Ok(docs.to_vec()) } else { documents(spec, split, library, files, notes) };
    }
    if let Some(samples) = &spec.fewshot.samples {
        return Ok(samples.clone());
    }
    for split in [&spec.training_split, &spec.validation_split, &spec.test_split].into_iter().flatten() {
        if split == evaluated {
            break;
        }
        if library.find(spec.data_files.get(split).map_or(&[][..], Vec::as_slice)).is_some() {
            return documents(spec, split, library, files, notes);
        }
        notes.push(format!("{}: its {split} split is not at hand; few-shot examples come from another split", spec.name));
    }
    Ok(docs.to_vec())
}

struct Builder<'a> {
    scope: Scope<'a>,
    spec: &'a TaskSpec,
    options: &'a Options,
    preamble: String,
    multiple_input: bool,
    known_shots: RefCell<HashMap<*const Value, String>>,
}

impl Builder<'_> {
    fn ask(&self, doc_id: usize, doc: &Value, shots: &mut Shots) -> Result<Asked> {
        let spec = self.spec;
        let before = self.before(doc, shots)?;
        let text = self.scope.text(&spec.doc_to_text, doc)?;
        let target = self.scope.target(&spec.doc_to_target, doc)?;
        let choices = spec.doc_to_choice.as_ref().map(|c| self.scope.choices(c, doc)).transpose()?.unwrap_or_default();
        let prefix = spec.gen_prefix.as_ref().map(|p| self.scope.string(p, doc)).transpose()?.unwrap_or_default();
        let requests = self.requests(&before, &text, &target, &choices, &prefix)?;
        let gold = if self.multiple_input { text } else { target.clone() };
        Ok(Asked { doc_id, doc: doc.clone(), target, choices, gold, requests })
    }

    fn requests(&self, before: &str, text: &Value, target: &Value, choices: &[String], prefix: &str) -> Result<Vec<Request>> {
        let spec = self.spec;
        let delimiter = &spec.target_delimiter;
        let context = |text: &str| {
            let between =
                if !prefix.is_empty() && needs_delimiter(text, prefix) && !self.multiple_input { delimiter.as_str() } else { "" };
            format!("{before}{text}{between}{prefix}")
        };
        if self.multiple_input {
            let continuation = format!("{delimiter}{}", repr::str_of(target));
            let ask =
                |choice: &String| Request::Loglikelihood { context: context(choice).into(), continuation: continuation.clone() };
            return Ok(choices.iter().map(ask).collect());
        }
        let context = || match text {
            Value::String(text) => Ok(context(text)),
            other => Err(bad_input(format!("doc_to_text gives {}, which is no text", repr::value(other)))),
        };
        Ok(match spec.output_type {
            OutputType::Loglikelihood => {
                let context = context()?;
                let mut continuation = repr::str_of(target);
                if self.options.compat == Compat::Strict && needs_delimiter(&context, &continuation) {
                    self.scope.faults.note(Fault::ShotDelimiter);
                    continuation = format!("{delimiter}{continuation}");
                }
                vec![Request::Loglikelihood { context: context.into(), continuation }]
            }
            OutputType::LoglikelihoodRolling => vec![Request::Rolling { text: repr::str_of(target) }],
            OutputType::GenerateUntil => vec![Request::Generate { context: context()?, options: spec.generation.clone() }],
            OutputType::MultipleChoice => {
                let context: Arc<str> = context()?.into();
                let ask = |context: &Arc<str>, choice: &String| Request::Loglikelihood {
                    context: context.clone(),
                    continuation: format!("{delimiter}{choice}"),
                };
                let mut requests: Vec<_> = choices.iter().map(|c| ask(&context, c)).collect();
                if spec.metrics.iter().any(|m| m.kind == MetricKind::AccMutualInfo) {
                    requests.extend(choices.iter().map(|c| ask(&"".into(), c)));
                }
                requests
            }
        })
    }

    /// Description, preamble and shots.
    fn before(&self, doc: &Value, shots: &mut Shots) -> Result<String> {
        let spec = self.spec;
        let mut out = self.scope.string(&spec.description, doc).context("description")?;
        out += &self.preamble;
        let k = spec.num_fewshot.unwrap_or(0);
        // lm-eval drops the document itself only when the few-shot split and the test split have one name, or neither is named.
        let drops = spec.fewshot.split == spec.test_split;
        let chosen = match self.options.compat {
            Compat::LmEval => {
                let chosen = shots.choose(k, drops.then_some(doc))?;
                if chosen.contains(&doc) {
                    self.scope.faults.note(Fault::FewshotLeak);
                }
                chosen
            }
            Compat::Strict => {
                let text = self.scope.text(&spec.doc_to_text, doc)?;
                let same = |shot: &Value| shot == doc || self.same_question(shot, doc, &text);
                if k > 0 && !drops && shots.pool.iter().any(|shot| same(shot)) {
                    self.scope.faults.note(Fault::FewshotLeak);
                }
                shots.choose_clean(k, same)?
            }
        };
        for shot in chosen {
            // Documents share their shots, which lie still while requests are made. Where a fault shows, it is noted each time.
            let place = std::ptr::from_ref(shot);
            if let Some(known) = self.known_shots.borrow().get(&place) {
                out += known;
                continue;
            }
            let faults = self.scope.faults.counts();
            let text = self.shot(shot).context("a few-shot example")?;
            out += &text;
            if self.scope.faults.counts() == faults {
                self.known_shots.borrow_mut().insert(place, text);
            }
        }
        Ok(out)
    }

    /// Whether a shot asks in the same words. Where the text is an index, the choices say what is asked.
    fn same_question(&self, shot: &Value, doc: &Value, text: &Value) -> bool {
        let asks = |d: &Value| self.spec.doc_to_choice.as_ref().and_then(|c| self.scope.choices(c, d).ok());
        match text {
            Value::String(_) => {
                self.scope.text(self.shot_text(), shot).is_ok_and(|t| &t == text)
                    && (self.spec.doc_to_text != Field::Template(String::new()))
            }
            _ => asks(shot).is_some_and(|c| Some(c) == asks(doc)),
        }
    }

    fn shot_text(&self) -> &Field {
        self.spec.fewshot.doc_to_text.as_ref().unwrap_or(&self.spec.doc_to_text)
    }

    /// One example with its answer and the delimiter behind it.
    fn shot(&self, shot: &Value) -> Result<String> {
        let (spec, few) = (self.spec, &self.spec.fewshot);
        let mut question = self.scope.text(self.shot_text(), shot)?;
        let choices =
            few.doc_to_choice.as_ref().or(spec.doc_to_choice.as_ref()).map(|c| self.scope.choices(c, shot)).transpose()?;
        let answer = self.scope.target(few.doc_to_target.as_ref().unwrap_or(&spec.doc_to_target), shot)?;
        let prefix = few.gen_prefix.as_ref().or(spec.gen_prefix.as_ref());
        let prefix = prefix.map(|p| self.scope.string(p, shot)).transpose()?.unwrap_or_default();
        let choice = |i: Option<u64>| choices.as_ref().and_then(|c| c.get(i? as usize));
        let in_range = |i: &Value| bad_input(format!("the answer {i} is no index of the choices"));
        let mut choices_hold_answer = choices.is_some();
        if self.multiple_input {
            question = choice(question.as_u64()).ok_or_else(|| in_range(&question))?.as_str().into();
            choices_hold_answer = false;
        }
        let answer = match &answer {
            Value::Number(i) if choices_hold_answer => choice(i.as_u64()).ok_or_else(|| in_range(&answer))?.clone(),
            Value::Array(items) => items.first().map_or(String::new(), repr::str_of),
            other => repr::str_of(other),
        };
        let Value::String(question) = question else {
            return Err(bad_input(format!("doc_to_text gives {}, which is no text", repr::value(&question))));
        };
        if answer.is_empty() {
            let between = if !prefix.is_empty() && needs_delimiter(&question, &prefix) { &spec.target_delimiter } else { "" };
            return Ok(format!("{question}{between}{prefix}"));
        }
        let mut delimiter = few.target_delimiter.as_ref().unwrap_or(&spec.target_delimiter).as_str();
        if spec.output_type == OutputType::Loglikelihood && answer.starts_with(char::is_whitespace) && !delimiter.is_empty() {
            self.scope.faults.note(Fault::ShotDelimiter);
            if self.options.compat == Compat::Strict {
                delimiter = "";
            }
        }
        if !prefix.is_empty() && !needs_delimiter(&question, &prefix) {
            delimiter = "";
        }
        let joint = if !prefix.is_empty() && needs_delimiter(&prefix, &answer) { " " } else { "" };
        let end = few.fewshot_delimiter.as_ref().unwrap_or(&spec.fewshot_delimiter);
        Ok(format!("{question}{delimiter}{prefix}{joint}{answer}{end}"))
    }
}

/// lm-eval's `requires_delimiter`: neither side has white space at the joint.
fn needs_delimiter(left: &str, right: &str) -> bool {
    use crate::eval::harness::python::text::is_space;
    !(left.is_empty() || left.ends_with(is_space) || right.starts_with(is_space))
}
