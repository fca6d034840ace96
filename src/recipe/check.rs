//! The raw tree against the schema: unknown keys, wrong types, missing keys. What passes is a flat table of typed values.

use std::collections::{BTreeMap, BTreeSet};

use super::problems::{Origin, Problem};
use super::raw::{Data, Member, Node};
use super::schema::{self, Default, KEYS, Value};
use super::suggest;

/// Typed values by path, such as `data.sources.0.weight`, with the place of each.
#[derive(Debug, Clone, std::default::Default)]
pub struct Values {
    entries: BTreeMap<String, (Value, Origin)>,
    /// Where each table begins.
    tables: BTreeMap<String, Origin>,
    /// Number of entries of each array of tables.
    lengths: BTreeMap<String, usize>,
}

impl Values {
    pub fn given(&self, path: &str) -> Option<&Value> {
        self.entries.get(path).map(|(v, _)| v)
    }

    /// What the recipe says, else the default.
    pub fn get(&self, path: &str) -> Option<Value> {
        self.given(path).cloned().or_else(|| default_of(path))
    }

    pub fn len_of(&self, array: &str) -> usize {
        self.lengths.get(array).copied().unwrap_or(0)
    }

    /// Where `path` is written; for one that is not, its table, or the preset it comes from.
    pub fn origin(&self, path: &str) -> Origin {
        if let Some((_, origin)) = self.entries.get(path) {
            return *origin;
        }
        if path.starts_with("model.")
            && let Some((_, origin)) = self.entries.get("model.preset")
        {
            return *origin;
        }
        let mut table = path;
        while let Some((parent, _)) = table.rsplit_once('.') {
            if let Some(origin) = self.tables.get(parent) {
                return *origin;
            }
            table = parent;
        }
        Origin::Absent
    }

    pub fn set(&mut self, path: &str, value: Value, origin: Origin) {
        self.entries.insert(path.to_string(), (value, origin));
    }

    pub fn remove(&mut self, path: &str) {
        self.entries.remove(path);
    }
}

fn pattern_of(path: &str) -> String {
    schema::pattern(&path.split('.').collect::<Vec<_>>())
}

/// The schema's default for `path`. That every default is well-formed is a test of the schema.
fn default_of(path: &str) -> Option<Value> {
    let key = schema::find(&pattern_of(path))?;
    match key.default {
        Default::Value(text) => {
            let tree = super::raw::parse(&format!("x = {text}")).ok()?;
            match &tree.data {
                Data::Table(members) => key.kind.read(&members.first()?.node).ok(),
                _ => None,
            }
        }
        _ => None,
    }
}

/// Outcome of the check: values, problems, and what a misspelt key was probably meant to be (so that it is not called
/// missing as well).
#[derive(Debug, std::default::Default)]
pub struct Checked {
    pub values: Values,
    pub problems: Vec<Problem>,
    meant: BTreeSet<String>,
}

pub fn check(root: &Node) -> Checked {
    let mut out = Checked::default();
    out.table(root, "");
    out
}

impl Checked {
    fn problem(&mut self, origin: Origin, text: String) {
        self.problems.push(Problem::new(origin, text));
    }

    fn table(&mut self, node: &Node, path: &str) {
        let Data::Table(members) = &node.data else {
            let text = format!("`{path}` is a table: expected a line [{path}] with keys below it, got {}", node.describe());
            self.meant.insert(pattern_of(path));
            return self.problem(node.origin, text);
        };
        if !path.is_empty() {
            self.values.tables.insert(path.to_string(), node.origin);
        }
        for member in members {
            let child = if path.is_empty() { member.key.clone() } else { format!("{path}.{}", member.key) };
            self.member(member, path, &child);
        }
    }

    fn member(&mut self, member: &Member, parent: &str, path: &str) {
        // A key that looks like an index would be taken for one.
        let pattern = if schema::is_index(&member.key) { String::new() } else { pattern_of(path) };
        if let Some(key) = schema::find(&pattern) {
            match key.kind.read(&member.node) {
                Ok(value) => self.values.set(path, value, member.key_origin),
                Err(text) => {
                    self.meant.insert(pattern);
                    self.problem(member.key_origin, format!("`{path}`: {text}"));
                }
            }
        } else if schema::children(&pattern).contains(&"*") {
            self.array(&member.node, path);
        } else if !pattern.is_empty() && !schema::children(&pattern).is_empty() {
            self.table(&member.node, path);
        } else {
            self.unknown(member, parent, path);
        }
    }

    fn array(&mut self, node: &Node, path: &str) {
        let Data::Array(nodes) = &node.data else {
            let text = format!(
                "`{path}` is an array of tables: expected one line [[{path}]] for each entry, with its keys below it, got {}",
                node.describe()
            );
            self.meant.insert(pattern_of(path));
            return self.problem(node.origin, text);
        };
        self.values.tables.insert(path.to_string(), node.origin);
        self.values.lengths.insert(path.to_string(), nodes.len());
        for (i, entry) in nodes.iter().enumerate() {
            match &entry.data {
                Data::Table(_) => self.table(entry, &format!("{path}.{i}")),
                _ => self.problem(
                    entry.origin,
                    format!(
                        "`{path}.{i}`: each entry of `{path}` is a table, such as {{ path = \"...\" }}, got {}",
                        entry.describe()
                    ),
                ),
            }
        }
    }

    fn unknown(&mut self, member: &Member, parent: &str, path: &str) {
        let guesses = suggest::guesses(&pattern_of(parent), &member.key);
        self.meant.extend(guesses.iter().cloned());
        // Suggestions below the same entry of an array are told with its index.
        let shown: Vec<String> = guesses
            .iter()
            .map(|g| match g.strip_prefix(&pattern_of(parent)) {
                Some(rest) if !parent.is_empty() => format!("{parent}{rest}"),
                _ => g.clone(),
            })
            .map(|g| g.replace(".*", ".0"))
            .collect();
        let what = if matches!(member.node.data, Data::Table(_)) { "table" } else { "key" };
        self.problem(member.key_origin, format!("unknown {what} `{path}`{}", suggest::sentence(&shown)));
    }

    /// Tells required keys that are absent. `values` may be one stage's view of the recipe.
    pub fn missing(&self, values: &Values) -> Vec<Problem> {
        let mut out = Vec::new();
        let excused = |pattern: &str| {
            self.meant.contains(pattern)
                || pattern.match_indices('.').any(|(i, _)| self.meant.contains(pattern[..i].trim_end_matches(".*")))
        };
        let mut tell = |pattern: &str, path: &str, doc: &str| {
            if values.given(path).is_none() && !excused(pattern) {
                let doc = doc.split(['.', ';', ':']).next().unwrap_or(doc);
                out.push(Problem::new(values.origin(path), format!("the key `{path}` is missing ({doc})")));
            }
        };
        for key in KEYS.iter().filter(|k| k.default == Default::Required) {
            match key.path.split_once(".*.") {
                Some((array, leaf)) => {
                    (0..values.len_of(array)).for_each(|i| tell(key.path, &format!("{array}.{i}.{leaf}"), key.doc));
                }
                None => tell(key.path, key.path, key.doc),
            }
        }
        if values.len_of("data.sources") == 0 && !excused("data.sources.*.path") {
            let text = "no data: at least one [[data.sources]] with a `path` is needed";
            out.push(Problem::new(values.origin("data.sources"), text));
        }
        let either = |a: &str, b: &str| values.given(a).is_some() || values.given(b).is_some() || excused(a) || excused(b);
        if !either("train.steps", "train.tokens") {
            let text = "the length of the run is missing: give `train.steps` or `train.tokens`";
            out.push(Problem::new(values.origin("train.steps"), text));
        }
        out
    }

    /// Keys that exclude each other and are both given.
    pub fn contradictions(&self) -> Vec<Problem> {
        let mut out = Vec::new();
        for (a, b) in schema::EXCLUSIVE {
            for i in 0..a.split_once(".*.").map_or(1, |(array, _)| self.values.len_of(array)) {
                let (a, b) = (a.replace('*', &i.to_string()), b.replace('*', &i.to_string()));
                if self.values.given(&a).is_some() && self.values.given(&b).is_some() {
                    let origin = self.values.origin(&a).max(self.values.origin(&b));
                    out.push(Problem::new(
                        origin,
                        format!("`{a}` and `{b}` are both given: each follows from the other, keep one"),
                    ));
                }
            }
        }
        out
    }
}
