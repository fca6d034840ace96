//! All tasks and groups by name: those built in, and those of a user's folder.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::{Map, Value};

use super::spec::{Source, TaskSpec};
use super::yaml;
use crate::error::{bad_input, did_you_mean};
use crate::eval::harness::python::repr;

/// A group of tasks or of further groups.
#[derive(Debug, Clone, PartialEq)]
pub struct GroupSpec {
    pub name: String,
    pub alias: Option<String>,
    /// Names of tasks, groups, or tags.
    pub members: Vec<String>,
    pub metrics: Vec<GroupMetric>,
    pub version: Value,
}

/// A metric that a group shows.
#[derive(Debug, Clone, PartialEq)]
pub struct GroupMetric {
    pub metric: String,
    /// Mean over documents, not over tasks.
    pub weight_by_size: bool,
    /// Names of filters; all that occur when none is named.
    pub filters: Option<Vec<String>>,
}

/// What a name stands for.
#[derive(Debug, Clone)]
pub enum Node {
    Task(Box<TaskSpec>),
    Group { spec: GroupSpec, children: Vec<Node> },
}

impl Node {
    pub fn name(&self) -> &str {
        match self {
            Node::Task(t) => &t.name,
            Node::Group { spec, .. } => &spec.name,
        }
    }

    /// The tasks below, left to right.
    pub fn tasks(&self) -> Vec<&TaskSpec> {
        match self {
            Node::Task(t) => vec![t],
            Node::Group { children, .. } => children.iter().flat_map(Node::tasks).collect(),
        }
    }
}

/// Definitions by name.
#[derive(Debug, Default)]
pub struct Registry {
    tasks: BTreeMap<String, TaskSpec>,
    groups: BTreeMap<String, GroupSpec>,
}

/// The definitions that come with the program.
const BUILT_IN: [(&str, &str); 9] = [
    ("mmlu.toml", include_str!("definitions/mmlu.toml")),
    ("gsm8k.toml", include_str!("definitions/gsm8k.toml")),
    ("humaneval.toml", include_str!("definitions/humaneval.toml")),
    ("bbh_cot_fewshot.toml", include_str!("definitions/bbh_cot_fewshot.toml")),
    ("multiple_choice.toml", include_str!("definitions/multiple_choice.toml")),
    ("truthfulqa.toml", include_str!("definitions/truthfulqa.toml")),
    ("winogrande.toml", include_str!("definitions/winogrande.toml")),
    ("language_modeling.toml", include_str!("definitions/language_modeling.toml")),
    ("core.toml", include_str!("definitions/core.toml")),
];

impl Registry {
    /// The tasks that come with the program.
    pub fn built_in() -> Result<Self> {
        let mut registry = Self::default();
        for (name, text) in BUILT_IN {
            let source = Source { path: PathBuf::from("built-in").join(name), text: text.to_string() };
            registry.add_toml(&source)?;
        }
        Ok(registry)
    }

    /// Adds a file, or all .toml, .yaml and .yml files of a folder. A name that exists is replaced.
    pub fn add_path(&mut self, path: &Path) -> Result<()> {
        if path.is_dir() {
            let listed = std::fs::read_dir(path).with_context(|| format!("listing {}", path.display()))?;
            let mut files = listed.map(|e| e.map(|e| e.path())).collect::<std::io::Result<Vec<_>>>()?;
            files.retain(|f| ["toml", "yaml", "yml"].iter().any(|e| f.extension().is_some_and(|x| x == *e)));
            files.sort();
            return files.iter().try_for_each(|f| self.add_path(f));
        }
        if path.extension().is_some_and(|e| e == "toml") {
            let text = std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
            return self.add_toml(&Source { path: path.to_path_buf(), text });
        }
        let (map, source) = yaml::read(path)?;
        self.add(map, &source)
    }

    /// Names of all tasks, groups and tags.
    pub fn names(&self) -> Vec<&str> {
        let mut names: Vec<&str> = self.tasks.keys().chain(self.groups.keys()).map(String::as_str).collect();
        names.extend(self.tasks.values().flat_map(|t| t.tags.iter().map(String::as_str)));
        names.sort_unstable();
        names.dedup();
        names
    }

    /// What `name` stands for: one task, a group with all below it, or the tasks of a tag.
    pub fn resolve(&self, name: &str) -> Result<Vec<Node>> {
        self.resolve_at(name, 0)
    }

    fn resolve_at(&self, name: &str, depth: usize) -> Result<Vec<Node>> {
        const DEEPEST: usize = 16;
        if depth > DEEPEST {
            return Err(bad_input(format!("the group `{name}` holds itself")));
        }
        if let Some(task) = self.tasks.get(name) {
            return Ok(vec![Node::Task(Box::new(task.clone()))]);
        }
        if let Some(group) = self.groups.get(name) {
            let children = group.members.iter().map(|m| self.resolve_at(m, depth + 1)).collect::<Result<Vec<_>>>();
            let children = children.with_context(|| format!("in the group `{name}`"))?.into_iter().flatten().collect();
            return Ok(vec![Node::Group { spec: group.clone(), children }]);
        }
        let tagged: Vec<_> = self.tasks.values().filter(|t| t.tags.iter().any(|tag| tag == name)).collect();
        if tagged.is_empty() {
            return Err(bad_input(format!("there is no task `{name}`{}", did_you_mean(name, self.names()))));
        }
        Ok(tagged.into_iter().map(|t| Node::Task(Box::new(t.clone()))).collect())
    }

    /// A TOML file: one task, or `[defaults]` with `[[tasks]]`, and `[[groups]]`.
    fn add_toml(&mut self, source: &Source) -> Result<()> {
        // `toml_edit` keeps the order of the fields, which records show.
        let value: Value = toml_edit::de::from_str(&source.text).map_err(|e| {
            let line = e.span().map_or(1, |s| source.text[..s.start].matches('\n').count() + 1);
            bad_input(format!("{}:{line}: not TOML: {}", source.path.display(), e.message()))
        })?;
        let Value::Object(mut map) = value else {
            return Err(source.error("task", "a task is a table of fields"));
        };
        if map.contains_key("task") || map.contains_key("group") {
            return self.add(map, source);
        }
        let defaults = map.shift_remove("defaults").and_then(|d| d.as_object().cloned()).unwrap_or_default();
        let mut list = |key: &str| match map.shift_remove(key) {
            Some(Value::Array(items)) => items.into_iter().filter_map(|v| v.as_object().cloned()).collect(),
            _ => Vec::new(),
        };
        let (tasks, groups) = (list("tasks"), list("groups"));
        if let Some(key) = map.keys().next() {
            return Err(source.error(key, format!("a file of tasks has `defaults`, `tasks` and `groups`, not `{key}`")));
        }
        for task in tasks {
            let mut merged = defaults.clone();
            merged.extend(task);
            for one in expand(merged, source)? {
                self.add(one, source)?;
            }
        }
        groups.into_iter().try_for_each(|g| self.add(g, source))
    }

    fn add(&mut self, map: Map<String, Value>, source: &Source) -> Result<()> {
        if map.contains_key("group") {
            let group = self.group(&map, source)?;
            self.groups.insert(group.name.clone(), group);
        } else {
            let task = TaskSpec::parse(map, source)?;
            self.tasks.insert(task.name.clone(), task);
        }
        Ok(())
    }

    fn group(&mut self, map: &Map<String, Value>, source: &Source) -> Result<GroupSpec> {
        const KEYS: [&str; 6] = ["group", "group_alias", "task", "aggregate_metric_list", "metadata", "tag"];
        if let Some(key) = map.keys().find(|k| !KEYS.contains(&k.as_str())) {
            return Err(source.error(key, format!("a group has no field `{key}`{}", did_you_mean(key, KEYS))));
        }
        let items = match map.get("task") {
            Some(Value::Array(items)) => items.clone(),
            Some(one) => vec![one.clone()],
            None => return Err(source.error("group", "a group lists its members under `task`")),
        };
        let mut members = Vec::new();
        for item in items {
            match item {
                Value::String(name) => members.push(name),
                Value::Object(inline) => {
                    let name = inline.get("task").or(inline.get("group")).map_or(String::new(), repr::str_of);
                    self.add(inline, source)?;
                    members.push(name);
                }
                other => return Err(source.error("task", format!("a member of a group is a name or a task, not {other}"))),
            }
        }
        let metrics = match map.get("aggregate_metric_list") {
            Some(Value::Array(items)) => items.iter().map(|m| group_metric(m, source)).collect::<Result<Vec<_>>>()?,
            _ => Vec::new(),
        };
        Ok(GroupSpec {
            name: map["group"].as_str().unwrap_or_default().to_string(),
            alias: map.get("group_alias").and_then(Value::as_str).map(str::to_string),
            members,
            metrics,
            version: map.get("metadata").and_then(|m| m.get("version")).cloned().unwrap_or(Value::Null),
        })
    }
}

fn group_metric(v: &Value, source: &Source) -> Result<GroupMetric> {
    let metric = v.get("metric").and_then(Value::as_str);
    let metric = metric.ok_or_else(|| source.error("aggregate_metric_list", "an entry names no `metric`"))?.to_string();
    if v.get("aggregation").is_some_and(|a| a != "mean") {
        return Err(source.error("aggregation", "a group's aggregation is mean"));
    }
    let filters = match v.get("filter_list") {
        Some(Value::String(s)) => Some(vec![s.clone()]),
        Some(Value::Array(items)) => Some(items.iter().map(repr::str_of).collect()),
        _ => None,
    };
    Ok(GroupMetric { metric, weight_by_size: v.get("weight_by_size").and_then(Value::as_bool).unwrap_or(true), filters })
}

/// One definition for each name of `for_each`: `$name` and `$words` (underscores as spaces) stand for it in every text.
fn expand(mut map: Map<String, Value>, source: &Source) -> Result<Vec<Map<String, Value>>> {
    let Some(names) = map.shift_remove("for_each") else { return Ok(vec![map]) };
    let names = names.as_array().ok_or_else(|| source.error("for_each", "`for_each` is a list of names"))?;
    let put = |name: &str| Value::Object(map.clone().into_iter().map(|(k, v)| (k, substitute(v, name))).collect());
    Ok(names.iter().filter_map(|n| put(n.as_str()?).as_object().cloned()).collect())
}

fn substitute(v: Value, name: &str) -> Value {
    match v {
        Value::String(s) => s.replace("$name", name).replace("$words", &name.replace('_', " ")).into(),
        Value::Array(items) => items.into_iter().map(|v| substitute(v, name)).collect::<Vec<_>>().into(),
        Value::Object(map) => Value::Object(map.into_iter().map(|(k, v)| (k, substitute(v, name))).collect()),
        other => other,
    }
}
