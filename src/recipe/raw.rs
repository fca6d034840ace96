//! The raw recipe: a tree of TOML values that remember where they were written, in the file or in a `--set` argument.

use toml_edit::{Document, Item, TableLike, Value};

use super::problems::{Origin, Problem};
use super::schema::{self, Kind};

#[derive(Debug, Clone)]
pub struct Node {
    pub origin: Origin,
    pub data: Data,
}

#[derive(Debug, Clone)]
pub enum Data {
    Table(Vec<Member>),
    Array(Vec<Node>),
    Text(String),
    Integer(i64),
    Float(f64),
    Bool(bool),
    /// A TOML date or time, which no key takes.
    Date(String),
}

#[derive(Debug, Clone)]
pub struct Member {
    pub key: String,
    pub key_origin: Origin,
    pub node: Node,
}

impl Node {
    /// The value in words, for "expected ..., got ...".
    pub fn describe(&self) -> String {
        match &self.data {
            Data::Table(_) => "a table".into(),
            Data::Array(_) => "an array".into(),
            Data::Text(s) => format!("the text \"{}\"", s.escape_debug()),
            Data::Integer(n) => format!("the integer {n}"),
            Data::Float(x) => format!("the decimal number {x:?}"),
            Data::Bool(b) => format!("the boolean {b}"),
            Data::Date(d) => format!("the date or time {d}"),
        }
    }

    fn member_mut(&mut self, key: &str) -> Option<&mut Member> {
        match &mut self.data {
            Data::Table(members) => members.iter_mut().find(|m| m.key == key),
            _ => None,
        }
    }

    /// Removes `path` where it was written in the file (not where a `--set` wrote it).
    fn remove_from_file(&mut self, path: &[&str]) {
        match (path, &mut self.data) {
            ([last], Data::Table(members)) => {
                members.retain(|m| m.key != *last || !matches!(m.key_origin, Origin::File(_)));
            }
            ([head, rest @ ..], Data::Table(members)) => {
                if let Some(m) = members.iter_mut().find(|m| m.key == *head) {
                    m.node.remove_from_file(rest);
                }
            }
            ([head, rest @ ..], Data::Array(nodes)) => {
                if let Some(node) = head.parse().ok().and_then(|i: usize| nodes.get_mut(i)) {
                    node.remove_from_file(rest);
                }
            }
            _ => {}
        }
    }
}

/// Parses a recipe's text. A syntax error (duplicate keys included) is the one problem told.
pub fn parse(text: &str) -> Result<Node, Problem> {
    let document = Document::parse(text).map_err(|e| {
        let offset = e.span().map_or(0, |s| s.start);
        let message = e.message().trim();
        let hint = match message {
            "duplicate key" => ": this key is already set further up; keep one of the two",
            _ => "",
        };
        Problem::new(Origin::File(offset), format!("not valid TOML: {message}{hint}"))
    })?;
    Ok(table(document.as_table(), &|offset| Origin::File(offset), Origin::File(0)))
}

type Place<'a> = &'a dyn Fn(usize) -> Origin;

fn table(t: &dyn TableLike, place: Place<'_>, origin: Origin) -> Node {
    let mut members = Vec::new();
    for (name, item) in t.iter() {
        let key_origin = t.key(name).and_then(|k| k.span()).map_or(origin, |s| place(s.start));
        if let Some(node) = item_node(item, place, key_origin) {
            members.push(Member { key: name.to_string(), key_origin, node });
        }
    }
    Node { origin, data: Data::Table(members) }
}

fn item_node(item: &Item, place: Place<'_>, fallback: Origin) -> Option<Node> {
    let origin = item.span().map_or(fallback, |s| place(s.start));
    Some(match item {
        Item::None => return None,
        Item::Value(v) => value_node(v, place, fallback),
        Item::Table(t) => table(t, place, origin),
        Item::ArrayOfTables(a) => Node {
            origin,
            data: Data::Array(a.iter().map(|t| table(t, place, t.span().map_or(origin, |s| place(s.start)))).collect()),
        },
    })
}

fn value_node(value: &Value, place: Place<'_>, fallback: Origin) -> Node {
    let origin = value.span().map_or(fallback, |s| place(s.start));
    let data = match value {
        Value::String(s) => Data::Text(s.value().clone()),
        Value::Integer(n) => Data::Integer(*n.value()),
        Value::Float(x) => Data::Float(*x.value()),
        Value::Boolean(b) => Data::Bool(*b.value()),
        Value::Datetime(d) => Data::Date(d.value().to_string()),
        Value::Array(a) => Data::Array(a.iter().map(|v| value_node(v, place, origin)).collect()),
        Value::InlineTable(t) => return table(t, place, origin),
    };
    Node { origin, data }
}

/// Lists of data that may be written short: a path, or an array of paths, in place of an array of tables with a `path`.
const SHORT_LISTS: [(&str, &str); 2] = [("data", "sources"), ("data", "validation")];

/// Spells the short forms out: `sources = "x"` and `sources = ["x", "y"]` as `[[data.sources]]` with `path = "x"`, ...
pub fn spell_out(root: &mut Node) {
    let entry = |node: Node| match node.data {
        Data::Text(_) => {
            let origin = node.origin;
            let path = Member { key: "path".into(), key_origin: origin, node };
            Node { origin, data: Data::Table(vec![path]) }
        }
        _ => node,
    };
    for (outer, inner) in SHORT_LISTS {
        let Some(list) = root.member_mut(outer).and_then(|m| m.node.member_mut(inner)) else { continue };
        let node = &mut list.node;
        let origin = node.origin;
        node.data = match std::mem::replace(&mut node.data, Data::Bool(false)) {
            Data::Array(nodes) => Data::Array(nodes.into_iter().map(entry).collect()),
            data @ Data::Text(_) => Data::Array(vec![entry(Node { origin, data })]),
            other => other,
        };
    }
}

/// Writes one `--set key.path=value` argument into the tree, as if it stood in the file in place of what is there.
pub fn apply_set(root: &mut Node, index: usize, argument: &str) -> Result<(), Problem> {
    let origin = Origin::Set(index);
    let fail = |text: String| Problem::new(origin, text);
    let Some((path, value)) = argument.split_once('=') else {
        return Err(fail("expected key.path=value, as in --set train.seq_len=1024".into()));
    };
    let (path, value) = (path.trim(), value.trim());
    let segments: Vec<&str> = path.split('.').map(str::trim).collect();
    if segments.iter().any(|s| s.is_empty() || s.contains(char::is_whitespace)) {
        return Err(fail("expected key.path=value, as in --set train.seq_len=1024".into()));
    }
    let node = set_value(&segments, value, origin).map_err(fail)?;
    write(root, &segments, node, origin).map_err(fail)?;
    if let Some(other) = schema::exclusive_partner(&schema::pattern(&segments)) {
        let mut partner = segments.clone();
        if let Some(last) = partner.last_mut() {
            *last = other;
        }
        root.remove_from_file(&partner);
    }
    Ok(())
}

/// The right-hand side as a TOML value; bare words are text, and so is anything for a key that takes text.
fn set_value(segments: &[&str], value: &str, origin: Origin) -> Result<Node, String> {
    let text = || Node { origin, data: Data::Text(value.to_string()) };
    let takes_text =
        schema::find(&schema::pattern(segments)).is_some_and(|k| matches!(k.kind, Kind::Text | Kind::Path | Kind::Paths));
    match value.parse::<Value>() {
        Ok(v) => match value_node(&v, &|_| origin, origin) {
            node if takes_text && !matches!(node.data, Data::Text(_) | Data::Array(_) | Data::Table(_)) => Ok(text()),
            node => Ok(node),
        },
        Err(e) if value.starts_with(['"', '\'', '[', '{']) => {
            Err(format!("`{value}` is not a TOML value: {}", e.message().trim()))
        }
        Err(_) if value.is_empty() => Err("no value after `=`; write --set 'key=\"\"' for an empty text".into()),
        Err(_) => Ok(text()),
    }
}

fn write(node: &mut Node, path: &[&str], value: Node, origin: Origin) -> Result<(), String> {
    let [head, rest @ ..] = path else {
        *node = value;
        return Ok(());
    };
    let found = node.describe();
    match &mut node.data {
        Data::Table(_) => {
            if node.member_mut(head).is_none()
                && let Data::Table(members) = &mut node.data
            {
                let empty = Node { origin, data: Data::Table(Vec::new()) };
                members.push(Member { key: head.to_string(), key_origin: origin, node: empty });
            }
            match node.member_mut(head) {
                Some(member) => {
                    if rest.is_empty() {
                        member.key_origin = origin;
                    }
                    write(&mut member.node, rest, value, origin)
                }
                None => Ok(()),
            }
        }
        Data::Array(nodes) => {
            let count = nodes.len();
            match head.parse().ok().and_then(|i: usize| nodes.get_mut(i)) {
                Some(node) => write(node, rest, value, origin),
                None => Err(format!("`{head}` is no entry of this array, which has {count}: the first entry is 0")),
            }
        }
        _ => Err(format!("`{head}` cannot be set inside {found}: it is no table")),
    }
}
