//! A task's definition, read from its own TOML or lm-eval's YAML: the field names are lm-eval's.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context, Result};
use serde_json::{Map, Value};

use super::builtin::Function;
use super::fewshot::Sampler;
use super::field::Field;
use super::spec_parts::{Filter, Metric, filters, metrics};
use crate::error::{bad_input, did_you_mean};
use crate::eval::harness::python::repr;

/// What a task asks of the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutputType {
    Loglikelihood,
    LoglikelihoodRolling,
    MultipleChoice,
    GenerateUntil,
}

impl OutputType {
    /// lm-eval's name.
    pub fn name(self) -> &'static str {
        match self {
            OutputType::Loglikelihood => "loglikelihood",
            OutputType::LoglikelihoodRolling => "loglikelihood_rolling",
            OutputType::MultipleChoice => "multiple_choice",
            OutputType::GenerateUntil => "generate_until",
        }
    }
}

/// Where few-shot examples come from and how they are written, where that differs from the task's own fields.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Fewshot {
    pub sampler: Sampler,
    pub split: Option<String>,
    pub samples: Option<Vec<Value>>,
    pub doc_to_text: Option<Field>,
    pub doc_to_target: Option<Field>,
    pub doc_to_choice: Option<Field>,
    pub target_delimiter: Option<String>,
    pub fewshot_delimiter: Option<String>,
    pub gen_prefix: Option<String>,
}

/// A complete definition.
#[derive(Debug, Clone, PartialEq)]
pub struct TaskSpec {
    pub name: String,
    pub alias: Option<String>,
    pub tags: Vec<String>,
    pub output_type: OutputType,
    pub training_split: Option<String>,
    pub validation_split: Option<String>,
    pub test_split: Option<String>,
    /// Names of files per split, the best first.
    pub data_files: BTreeMap<String, Vec<String>>,
    /// Only documents with these values belong to the task.
    pub only: Map<String, Value>,
    /// Documents of the official evaluated split.
    pub official_docs: Option<usize>,
    /// What a user should know when a file of this name is read.
    pub notes: BTreeMap<String, String>,
    pub process_docs: Option<Function>,
    pub doc_to_text: Field,
    pub doc_to_target: Field,
    pub doc_to_choice: Option<Field>,
    pub process_results: Option<Function>,
    pub description: String,
    pub target_delimiter: String,
    pub fewshot_delimiter: String,
    pub gen_prefix: Option<String>,
    pub fewshot: Fewshot,
    pub num_fewshot: Option<usize>,
    pub metrics: Vec<Metric>,
    pub generation: Map<String, Value>,
    pub repeats: usize,
    pub filters: Vec<Filter>,
    pub decontamination: Option<String>,
    pub unsafe_code: bool,
    /// What to do when the data is not at hand, half a sentence.
    pub how_to_get: Option<String>,
    /// The rules of CORE hold (`core_metric`); score of chance, a share.
    pub core_chance: Option<f64>,
    /// Names of a data file whose first `text` stands before every prompt.
    pub preamble: Vec<String>,
    /// `metadata.version`
    pub version: Value,
    /// The definition as read, for the results.
    pub raw: Map<String, Value>,
}

/// A definition file: for errors that say where.
#[derive(Debug, Clone)]
pub struct Source {
    pub path: PathBuf,
    pub text: String,
}

impl Source {
    /// An error at the first line that sets `key`.
    pub fn error(&self, key: &str, says: impl std::fmt::Display) -> anyhow::Error {
        let sets = |line: &str| {
            let line = line.trim_start().trim_start_matches("- ").trim_start_matches(['"', '\'']);
            line.strip_prefix(key).is_some_and(|rest| rest.trim_start_matches(['"', '\'', ' ']).starts_with([':', '=', '.', ']']))
        };
        let line = self.text.lines().position(sets).map_or(String::new(), |i| format!(":{}", i + 1));
        bad_input(format!("{}{line}: {says}", self.path.display()))
    }
}

const KEYS: [&str; 37] = [
    "task",
    "task_alias",
    "tag",
    "dataset_path",
    "dataset_name",
    "dataset_kwargs",
    "training_split",
    "validation_split",
    "test_split",
    "fewshot_split",
    "process_docs",
    "doc_to_text",
    "doc_to_target",
    "doc_to_choice",
    "process_results",
    "description",
    "target_delimiter",
    "fewshot_delimiter",
    "fewshot_config",
    "num_fewshot",
    "metric_list",
    "output_type",
    "generation_kwargs",
    "repeats",
    "filter_list",
    "should_decontaminate",
    "doc_to_decontamination_query",
    "gen_prefix",
    "metadata",
    "unsafe_code",
    // Our own.
    "data_files",
    "only",
    "official_docs",
    "notes",
    "how_to_get",
    "preamble",
    "core_chance",
];

/// lm-eval's keys that cannot be honoured here.
const REFUSED: [(&str, &str); 4] = [
    ("use_prompt", "prompts of promptsource are not at hand"),
    ("custom_dataset", "data are local files"),
    ("doc_to_image", "images are not evaluated"),
    ("doc_to_audio", "sound is not evaluated"),
];

impl TaskSpec {
    /// Reads the fields of one task. Errors name file, line and key.
    pub fn parse(map: Map<String, Value>, source: &Source) -> Result<Self> {
        for key in map.keys() {
            if let Some((_, why)) = REFUSED.iter().find(|(k, _)| k == key) {
                return Err(source.error(key, format!("`{key}` is not supported: {why}")));
            }
            if !KEYS.contains(&key.as_str()) {
                return Err(source.error(key, format!("a task has no field `{key}`{}", did_you_mean(key, KEYS))));
            }
        }
        let read = Reader { map: &map, source };
        let name = read.string("task")?.ok_or_else(|| source.error("task", "a task needs a name: `task`"))?;
        let output_type = match read.string("output_type")?.as_deref().unwrap_or("generate_until") {
            "loglikelihood" => OutputType::Loglikelihood,
            "loglikelihood_rolling" => OutputType::LoglikelihoodRolling,
            "multiple_choice" => OutputType::MultipleChoice,
            "generate_until" => OutputType::GenerateUntil,
            other => {
                let known = "loglikelihood, loglikelihood_rolling, multiple_choice or generate_until";
                return Err(source.error("output_type", format!("output_type is {known}, not {other:?}")));
            }
        };
        let doc_to_choice = read.field("doc_to_choice")?;
        if output_type == OutputType::MultipleChoice && doc_to_choice.is_none() {
            return Err(source.error("output_type", "a multiple_choice task needs `doc_to_choice`"));
        }
        let fewshot_delimiter = read.string("fewshot_delimiter")?.unwrap_or_else(|| "\n\n".into());
        let mut spec = Self {
            alias: read.string("task_alias")?,
            tags: read.strings("tag")?,
            output_type,
            training_split: read.string("training_split")?,
            validation_split: read.string("validation_split")?,
            test_split: read.string("test_split")?,
            data_files: BTreeMap::new(),
            only: read.object("only")?.unwrap_or_default(),
            official_docs: read.number("official_docs")?,
            notes: read.object("notes")?.unwrap_or_default().iter().map(|(k, v)| (k.clone(), repr::str_of(v))).collect(),
            process_docs: read.function("process_docs")?,
            doc_to_text: read.field("doc_to_text")?.unwrap_or(Field::Template(String::new())),
            doc_to_target: read.field("doc_to_target")?.unwrap_or(Field::Template(String::new())),
            doc_to_choice,
            process_results: read.function("process_results")?,
            description: read.string("description")?.unwrap_or_default(),
            target_delimiter: read.string("target_delimiter")?.unwrap_or_else(|| " ".into()),
            gen_prefix: read.string("gen_prefix")?,
            fewshot: read.fewshot()?,
            num_fewshot: read.number("num_fewshot")?,
            metrics: metrics(&map, output_type, source)?,
            generation: generation(&map, output_type, &fewshot_delimiter),
            repeats: read.number("repeats")?.unwrap_or(1),
            filters: filters(&map, source)?,
            decontamination: read.string("doc_to_decontamination_query")?,
            preamble: read.strings("preamble")?,
            how_to_get: read.string("how_to_get")?,
            core_chance: read.share("core_chance")?,
            unsafe_code: map.get("unsafe_code").and_then(Value::as_bool).unwrap_or(false),
            version: map.get("metadata").and_then(|m| m.get("version")).cloned().unwrap_or(Value::Null),
            fewshot_delimiter,
            name,
            raw: Map::new(),
        };
        if spec.repeats == 0 {
            return Err(source.error("repeats", "`repeats` is at least 1"));
        }
        spec.data_files = read.data_files(&spec)?;
        if spec.test_split.is_none() && spec.validation_split.is_none() {
            return Err(
                source.error("task", format!("{}: neither `test_split` nor `validation_split` says what to evaluate", spec.name))
            );
        }
        spec.raw = map;
        Ok(spec)
    }

    /// Names of the files that are surely read: of the evaluated split, and of the one that examples come from.
    pub fn files(&self, num_fewshot: Option<usize>) -> impl Iterator<Item = &[String]> {
        let examples = self.fewshot.split.as_deref().filter(|_| num_fewshot.or(self.num_fewshot).unwrap_or(0) > 0);
        [Some(self.evaluated_split()), examples]
            .into_iter()
            .flatten()
            .filter_map(|split| Some(self.data_files.get(split)?.as_slice()))
    }

    /// The split that is evaluated: test, else validation.
    pub fn evaluated_split(&self) -> &str {
        self.test_split.as_deref().or(self.validation_split.as_deref()).unwrap_or_default()
    }
}

/// `generation_kwargs` as lm-eval completes them.
fn generation(map: &Map<String, Value>, output_type: OutputType, fewshot_delimiter: &str) -> Map<String, Value> {
    let Some(Value::Object(given)) = map.get("generation_kwargs") else {
        let mut out = Map::new();
        if output_type == OutputType::GenerateUntil {
            out.insert("until".into(), vec![fewshot_delimiter].into());
            out.insert("do_sample".into(), false.into());
            out.insert("temperature".into(), 0.0.into());
        }
        return out;
    };
    let mut out = given.clone();
    if let Some(t) = out.get("temperature").and_then(Value::as_f64) {
        out.insert("temperature".into(), t.into());
    }
    if !out.contains_key("until") {
        out.insert("until".into(), vec![fewshot_delimiter].into());
    }
    out
}

/// Typed access to the fields of a definition.
struct Reader<'a> {
    map: &'a Map<String, Value>,
    source: &'a Source,
}

impl Reader<'_> {
    fn get(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|v| !v.is_null())
    }

    fn wrong(&self, key: &str, expected: &str, v: &Value) -> anyhow::Error {
        self.source.error(key, format!("`{key}` is {expected}, not {v}"))
    }

    fn string(&self, key: &str) -> Result<Option<String>> {
        self.get(key).map(|v| v.as_str().map(str::to_string).ok_or_else(|| self.wrong(key, "a text", v))).transpose()
    }

    fn strings(&self, key: &str) -> Result<Vec<String>> {
        match self.get(key) {
            None => Ok(Vec::new()),
            Some(Value::String(s)) => Ok(vec![s.clone()]),
            Some(Value::Array(items)) if items.iter().all(Value::is_string) => Ok(items.iter().map(repr::str_of).collect()),
            Some(v) => Err(self.wrong(key, "a text or a list of texts", v)),
        }
    }

    fn number(&self, key: &str) -> Result<Option<usize>> {
        self.get(key).map(|v| v.as_u64().map(|n| n as usize).ok_or_else(|| self.wrong(key, "a whole number", v))).transpose()
    }

    fn share(&self, key: &str) -> Result<Option<f64>> {
        let share = |v: &Value| {
            v.as_f64().filter(|x| (0.0..1.0).contains(x)).ok_or_else(|| self.wrong(key, "a share from 0 to below 1", v))
        };
        self.get(key).map(share).transpose()
    }

    fn object(&self, key: &str) -> Result<Option<Map<String, Value>>> {
        self.get(key).map(|v| v.as_object().cloned().ok_or_else(|| self.wrong(key, "a table", v))).transpose()
    }

    fn function(&self, key: &str) -> Result<Option<Function>> {
        match self.field(key)? {
            None => Ok(None),
            Some(Field::Function(f)) => Ok(Some(f)),
            Some(_) => Err(self.source.error(key, format!("`{key}` is a built-in function: {{ function = \"name\" }}"))),
        }
    }

    fn field(&self, key: &str) -> Result<Option<Field>> {
        let Some(v) = self.get(key) else { return Ok(None) };
        field(v).map(Some).map_err(|e| self.source.error(key, e))
    }

    fn fewshot(&self) -> Result<Fewshot> {
        let mut out = Fewshot { split: self.string("fewshot_split")?, ..Fewshot::default() };
        for (key, v) in self.object("fewshot_config")?.unwrap_or_default() {
            let text = || v.as_str().map(str::to_string).ok_or_else(|| self.wrong(&key, "a text", &v));
            let sub = || field(&v).map(Some).map_err(|e| self.source.error(&key, e));
            match key.as_str() {
                _ if v.is_null() => {}
                "sampler" => {
                    out.sampler = match text()?.as_str() {
                        "default" => Sampler::Random,
                        "first_n" => Sampler::FirstN,
                        other => {
                            return Err(self.source.error("sampler", format!("`sampler` is default or first_n, not {other:?}")));
                        }
                    }
                }
                "split" => out.split = Some(text()?),
                "samples" => {
                    let list = v.as_array().filter(|l| l.iter().all(Value::is_object));
                    out.samples = Some(list.cloned().ok_or_else(|| self.wrong(&key, "a list of documents", &v))?);
                }
                "doc_to_text" => out.doc_to_text = sub()?,
                "doc_to_target" => out.doc_to_target = sub()?,
                "doc_to_choice" => out.doc_to_choice = sub()?,
                "target_delimiter" => out.target_delimiter = Some(text()?),
                "fewshot_delimiter" => out.fewshot_delimiter = Some(text()?),
                "gen_prefix" => out.gen_prefix = Some(text()?),
                other => return Err(self.source.error(other, format!("`fewshot_config` has no field `{other}`"))),
            }
        }
        Ok(out)
    }

    /// Names of data files: our `data_files`, lm-eval's `dataset_kwargs.data_files`, else names made of the data set's.
    fn data_files(&self, spec: &TaskSpec) -> Result<BTreeMap<String, Vec<String>>> {
        let inner = self.object("dataset_kwargs")?.unwrap_or_default().get("data_files").cloned();
        let given = self.get("data_files").cloned().or(inner);
        let names = |v: &Value| match v {
            Value::String(s) => Ok(vec![s.clone()]),
            Value::Array(items) => Ok(items.iter().map(repr::str_of).collect()),
            other => Err(self.wrong("data_files", "a file name, a list of them, or a table of splits", other)),
        };
        match given {
            Some(Value::Object(map)) => map.iter().map(|(split, v)| names(v).map(|n| (split.clone(), n))).collect::<Result<_>>(),
            // Hugging Face's loaders call the only file's split "train".
            Some(v) => Ok([("train".to_string(), names(&v)?)].into()),
            None => {
                let plain = |s: String| s.rsplit('/').next().unwrap_or_default().to_lowercase().replace('-', "_");
                let mut stems = vec![spec.name.clone()];
                stems.extend(self.string("dataset_name")?.map(plain).filter(|s| s != "main" && s != "default"));
                stems.extend(self.string("dataset_path")?.map(plain));
                let splits = [&spec.training_split, &spec.validation_split, &spec.test_split, &spec.fewshot.split];
                let splits = splits.into_iter().flatten();
                Ok(splits.map(|split| (split.clone(), stems.iter().flat_map(|stem| spellings(stem, split)).collect())).collect())
            }
        }
        .context("data files")
    }
}

fn spellings(stem: &str, split: &str) -> Vec<String> {
    let others: &[&str] = if split == "validation" { &["val", "valid"] } else { &[] };
    std::iter::once(split).chain(others.iter().copied()).map(|s| format!("{stem}_{s}")).collect()
}

/// A field: a text, a fixed value, or `{ function = "name" }`.
fn field(v: &Value) -> Result<Field> {
    if let Some(name) = v.as_object().filter(|o| o.len() == 1).and_then(|o| o.get("function")) {
        return Ok(Field::Function(Function::named(&repr::str_of(name))?));
    }
    Ok(match v {
        Value::String(s) => Field::Template(s.clone()),
        other => Field::Fixed(other.clone()),
    })
}
