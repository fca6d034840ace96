//! results.json: lm-eval's keys, and a block `zaya`.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::aggregate::Figure;
use super::groups::{self, Part};
use super::samples::TaskScore;
use crate::eval::harness::compat::Compat;
use crate::eval::harness::python::json::{Style, dumps};
use crate::eval::harness::python::repr;
use crate::eval::harness::tasks::build::Built;
use crate::eval::harness::tasks::field::Field;
use crate::eval::harness::tasks::registry::{GroupSpec, Node};
use crate::eval::harness::tasks::spec::OutputType;

/// A task and its score.
pub type Scored = (Arc<Built>, TaskScore);

/// What the caller knows of the run.
#[derive(Debug, Clone, Default)]
pub struct RunInfo {
    /// lm-eval's `config`: model, dtype, limit, seeds, ...
    pub config: Map<String, Value>,
    /// Further keys of the top level: tokenizer_bos_token, max_length, ...
    pub extra: Map<String, Value>,
    /// Further keys of the `zaya` block.
    pub zaya: Map<String, Value>,
    pub compat: Compat,
}

/// The results of a run over `nodes`, whose tasks are in `scored` by name.
pub fn results(nodes: &[Node], scored: &BTreeMap<String, Scored>, info: &RunInfo) -> Value {
    let mut out = Map::new();
    let (mut table, mut group_table, mut subtasks) = (Map::new(), Map::new(), Map::new());
    let (mut configs, mut versions, mut shots) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
    let (mut higher, mut samples) = (BTreeMap::new(), Map::new());
    for task in nodes.iter().flat_map(Node::tasks) {
        let Some((built, score)) = scored.get(&task.name) else { continue };
        table.insert(task.name.clone(), task_row(built, score));
        configs.insert(task.name.clone(), config(built));
        versions.insert(task.name.clone(), task.version.clone());
        shots.insert(task.name.clone(), json!(built.spec.num_fewshot.unwrap_or(0)));
        higher.insert(task.name.clone(), higher_is_better(built, score));
        samples.insert(task.name.clone(), json!({"original": built.original, "effective": score.sample_len}));
    }
    for node in nodes {
        add_group(node, scored, &mut table, &mut group_table, &mut versions);
        describe_group(node, &mut subtasks, &mut shots, &mut higher);
    }
    out.insert("results".into(), table.into());
    if !group_table.is_empty() {
        out.insert("groups".into(), group_table.into());
    }
    out.insert("group_subtasks".into(), subtasks.into());
    out.insert("configs".into(), object(configs));
    out.insert("versions".into(), object(versions));
    out.insert("n-shot".into(), object(shots));
    out.insert("higher_is_better".into(), object(higher));
    out.insert("n-samples".into(), samples.into());
    out.insert("config".into(), info.config.clone().into());
    out.insert("git_hash".into(), Value::Null);
    out.extend(info.extra.clone());
    let mut own = zaya(scored, info);
    let mut partial = Map::new();
    nodes.iter().for_each(|n| add_partial(n, scored, &mut partial));
    own.insert("partial_groups".into(), partial.into());
    out.insert("zaya".into(), own.into());
    Value::Object(out)
}

/// Groups of which tasks are missing: their scores are over the others.
fn add_partial(node: &Node, scored: &BTreeMap<String, Scored>, out: &mut Map<String, Value>) {
    let Node::Group { spec, children } = node else { return };
    let tasks = node.tasks();
    let found = tasks.iter().filter(|t| scored.contains_key(&t.name)).count();
    if found < tasks.len() {
        out.insert(spec.name.clone(), format!("{found} of {} tasks", tasks.len()).into());
    }
    children.iter().for_each(|c| add_partial(c, scored, out));
}

/// The text of results.json.
pub fn text(results: &Value) -> String {
    dumps(results, Style { indent: Some(2), ascii: false }) + "\n"
}

fn object(map: BTreeMap<String, Value>) -> Value {
    Value::Object(map.into_iter().collect())
}

fn task_row(built: &Built, score: &TaskScore) -> Value {
    let mut row = Map::new();
    row.insert("name".into(), built.spec.name.clone().into());
    row.insert("alias".into(), built.spec.alias.clone().unwrap_or(built.spec.name.clone()).into());
    row.insert("sample_len".into(), score.sample_len.into());
    for m in &score.metrics {
        row.insert(format!("{},{}", m.name, m.filter), Figure::Number(m.value).json());
        row.insert(format!("{}_stderr,{}", m.name, m.filter), m.stderr.json());
    }
    row.into()
}

fn higher_is_better(built: &Built, score: &TaskScore) -> Value {
    let mut out = Map::new();
    for metric in &built.spec.metrics {
        out.insert(metric.kind.name().into(), metric.higher_is_better.into());
    }
    for m in score.metrics.iter().filter(|m| m.name.starts_with("pass@")) {
        out.insert(m.name.clone(), true.into());
    }
    out.into()
}

/// Rows of groups, the inner before the outer.
fn add_group(
    node: &Node,
    scored: &BTreeMap<String, Scored>,
    table: &mut Map<String, Value>,
    groups: &mut Map<String, Value>,
    versions: &mut BTreeMap<String, Value>,
) {
    let Node::Group { spec, children } = node else { return };
    children.iter().for_each(|c| add_group(c, scored, table, groups, versions));
    let row = group_row(spec, &node.tasks().iter().filter_map(|t| scored.get(&t.name)).collect::<Vec<_>>());
    table.insert(spec.name.clone(), row.clone());
    if !spec.metrics.is_empty() {
        groups.insert(spec.name.clone(), row);
    }
    let version = if spec.version.is_null() { "N/A".into() } else { repr::str_of(&spec.version) };
    versions.insert(spec.name.clone(), version.into());
}

fn group_row(spec: &GroupSpec, parts: &[&Scored]) -> Value {
    let mut row = Map::new();
    row.insert("alias".into(), spec.alias.clone().unwrap_or(spec.name.clone()).into());
    row.insert("name".into(), spec.name.clone().into());
    if spec.metrics.is_empty() {
        return row.into();
    }
    row.insert("sample_len".into(), parts.iter().map(|(_, s)| s.sample_len).sum::<usize>().into());
    let mut counts = Map::new();
    for wanted in &spec.metrics {
        let mut filters: Vec<&str> = match &wanted.filters {
            Some(names) => names.iter().map(String::as_str).collect(),
            None => {
                let all = parts.iter().flat_map(|(_, s)| &s.metrics).filter(|m| m.name == wanted.metric);
                all.map(|m| m.filter.as_str()).collect()
            }
        };
        if wanted.filters.is_none() {
            filters.sort_unstable();
            filters.dedup();
        }
        for filter in filters {
            let found = |(_, s): &&Scored| {
                let m = s.metrics.iter().find(|m| m.name == wanted.metric && m.filter == filter)?;
                Some(Part { value: m.value, stderr: m.stderr, size: s.sample_len })
            };
            let found: Vec<Part> = parts.iter().filter_map(found).collect();
            if found.is_empty() {
                continue;
            }
            let (value, stderr) = groups::aggregate(&found, wanted.weight_by_size);
            let key = format!("{},{filter}", wanted.metric);
            row.insert(key.clone(), Figure::Number(value).json());
            row.insert(format!("{}_stderr,{filter}", wanted.metric), stderr.json());
            counts.insert(key, found.iter().map(|p| p.size).sum::<usize>().into());
        }
    }
    if !counts.is_empty() {
        row.insert("sample_count".into(), counts.into());
    }
    row.into()
}

/// What a group shares with its members: few-shot count where they agree, directions of metrics.
fn describe_group(
    node: &Node,
    subtasks: &mut Map<String, Value>,
    shots: &mut BTreeMap<String, Value>,
    higher: &mut BTreeMap<String, Value>,
) {
    let Node::Group { spec, children } = node else { return };
    let names: Vec<&str> = children.iter().map(Node::name).collect();
    subtasks.insert(spec.name.clone(), json!(names));
    children.iter().for_each(|c| describe_group(c, subtasks, shots, higher));
    let mut counts: Vec<Value> = names.iter().filter_map(|n| shots.get(*n).cloned()).collect();
    counts.dedup();
    if let [one] = &counts[..] {
        shots.insert(spec.name.clone(), one.clone());
    }
    let mut merged = Map::new();
    for (metric, direction) in names.iter().filter_map(|n| higher.get(*n)).flat_map(|h| h.as_object().into_iter().flatten()) {
        let known = merged.entry(metric.clone()).or_insert(direction.clone());
        if known != direction {
            *known = Value::Null;
        }
    }
    if !merged.is_empty() {
        higher.insert(spec.name.clone(), merged.into());
    }
}

/// lm-eval's dump of a task's configuration: its fields in its order, without those that are unset.
pub fn config(built: &Built) -> Value {
    let spec = &built.spec;
    let mut out = Map::new();
    let field = |f: &Field| match f {
        Field::Template(s) => json!(s),
        Field::Fixed(v) => v.clone(),
        Field::Function(f) => json!(f.name()),
    };
    let mut put = |key: &str, v: Value| {
        if !v.is_null() {
            out.insert(key.into(), v);
        }
    };
    let raw = |key: &str| spec.raw.get(key).cloned().unwrap_or(Value::Null);
    let files: Map<String, Value> =
        built.files.iter().map(|(split, path)| (split.clone(), path.display().to_string().into())).collect();
    put("task", json!(spec.name));
    put("task_alias", json!(spec.alias));
    put("tag", raw("tag"));
    put("dataset_path", json!("json"));
    put("dataset_kwargs", json!({"data_files": files}));
    put("training_split", json!(spec.training_split));
    put("validation_split", json!(spec.validation_split));
    put("test_split", json!(spec.test_split));
    put("fewshot_split", raw("fewshot_split"));
    put("process_docs", json!(spec.process_docs.map(|f| f.name())));
    put("doc_to_text", field(&spec.doc_to_text));
    put("doc_to_target", field(&spec.doc_to_target));
    put("unsafe_code", json!(spec.unsafe_code));
    put("doc_to_choice", spec.doc_to_choice.as_ref().map_or(Value::Null, field));
    put("process_results", json!(spec.process_results.map(|f| f.name())));
    put("description", json!(spec.description));
    put("target_delimiter", json!(spec.target_delimiter));
    put("fewshot_delimiter", json!(spec.fewshot_delimiter));
    let few = &spec.fewshot;
    let or_own = |f: &Option<Field>, own: Option<&Field>| f.as_ref().or(own).map_or(Value::Null, field);
    let sampler = spec.raw.get("fewshot_config").and_then(|c| c.get("sampler")).cloned().unwrap_or(json!("default"));
    put(
        "fewshot_config",
        json!({
            "sampler": sampler,
            "split": few.split,
            "process_docs": spec.process_docs.map(|f| f.name()),
            "fewshot_indices": null,
            "samples": few.samples,
            "doc_to_text": or_own(&few.doc_to_text, Some(&spec.doc_to_text)),
            "doc_to_choice": or_own(&few.doc_to_choice, spec.doc_to_choice.as_ref()),
            "doc_to_target": or_own(&few.doc_to_target, Some(&spec.doc_to_target)),
            "gen_prefix": few.gen_prefix.as_ref().or(spec.gen_prefix.as_ref()),
            "fewshot_delimiter": few.fewshot_delimiter.as_ref().unwrap_or(&spec.fewshot_delimiter),
            "target_delimiter": few.target_delimiter.as_ref().unwrap_or(&spec.target_delimiter),
        }),
    );
    put("num_fewshot", json!(spec.num_fewshot.unwrap_or(0)));
    put("metric_list", raw("metric_list"));
    put("output_type", raw("output_type"));
    if spec.output_type == OutputType::GenerateUntil {
        put("generation_kwargs", spec.generation.clone().into());
    }
    put("repeats", json!(spec.repeats));
    put("filter_list", raw("filter_list"));
    put("should_decontaminate", json!(spec.raw.get("should_decontaminate").and_then(Value::as_bool).unwrap_or(false)));
    put("doc_to_decontamination_query", json!(spec.decontamination));
    put("gen_prefix", json!(spec.gen_prefix));
    let mut metadata = raw("metadata").as_object().cloned().unwrap_or_default();
    metadata.insert("config_source".into(), "".into());
    put("metadata", metadata.into());
    out.into()
}

/// Our own block: counts, faults, notes on the data, intervals.
fn zaya(scored: &BTreeMap<String, Scored>, info: &RunInfo) -> Map<String, Value> {
    let mut tasks = Map::new();
    for (name, (built, score)) in scored {
        let faults: Map<String, Value> =
            built.faults.counts().into_iter().map(|(f, n)| (f.name().to_string(), n.into())).collect();
        let mut intervals = Map::new();
        for m in &score.metrics {
            if let Some((low, high)) = interval(m.value, m.scores.len(), m.scores.iter().all(|s| [0.0, 1.0].contains(&s.value())))
            {
                intervals.insert(format!("{},{}", m.name, m.filter), json!([low, high]));
            }
        }
        let block = json!({"counts": score.counts.json(), "faults": faults, "ci95": intervals, "notes": built.notes});
        tasks.insert(name.clone(), block);
    }
    let compat = match info.compat {
        Compat::LmEval => "lm-eval-0.4.13",
        Compat::Strict => "strict",
    };
    let mut out = Map::new();
    out.insert("schema_version".into(), 1.into());
    out.insert("version".into(), env!("CARGO_PKG_VERSION").into());
    out.insert("compat".into(), compat.into());
    out.insert("tasks".into(), tasks.into());
    out.extend(info.zaya.clone());
    out
}

/// Wilson's 95 % interval of a share of `n` documents.
pub fn interval(share: f64, n: usize, is_share: bool) -> Option<(f64, f64)> {
    if !is_share || n == 0 {
        return None;
    }
    const Z: f64 = 1.959963984540054;
    let n = n as f64;
    let centre = (share + Z * Z / (2.0 * n)) / (1.0 + Z * Z / n);
    let half = Z / (1.0 + Z * Z / n) * (share * (1.0 - share) / n + Z * Z / (4.0 * n * n)).sqrt();
    Some((centre - half, centre + half))
}
