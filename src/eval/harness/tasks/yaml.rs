//! lm-eval's YAML files, read as they are, without what would run Python.

use std::path::Path;

use anyhow::{Context, Result};
use serde_json::{Map, Value};
use serde_yaml_ng::Value as Yaml;

use super::spec::Source;
use crate::error::bad_input;

/// The fields of `path`, those of its `include` under them.
///
/// Errors: no YAML, `!function` (the line is named), or a circle of includes.
pub fn read(path: &Path) -> Result<(Map<String, Value>, Source)> {
    read_at(path, 0)
}

fn read_at(path: &Path, depth: usize) -> Result<(Map<String, Value>, Source)> {
    const DEEPEST: usize = 16;
    if depth > DEEPEST {
        return Err(bad_input(format!("{}: includes go in a circle", path.display())));
    }
    let text = std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
    let source = Source { path: path.to_path_buf(), text };
    if let Some(line) = source.text.lines().position(|l| l.split('#').next().unwrap_or_default().contains("!function")) {
        return Err(bad_input(format!(
            "{}:{}: `!function` runs Python, which this program does not; use a template, or a built-in function in a TOML task",
            path.display(),
            line + 1
        )));
    }
    let yaml: Yaml = serde_yaml_ng::from_str(&source.text).map_err(|e| {
        let line = e.location().map_or(String::new(), |l| format!(":{}", l.line()));
        bad_input(format!("{}{line}: not YAML: {e}", path.display()))
    })?;
    let Value::Object(mut map) = json(yaml, &source)? else {
        return Err(bad_input(format!("{}: a task is a mapping of fields", path.display())));
    };
    let Some(include) = map.shift_remove("include") else { return Ok((map, source)) };
    let mut merged = Map::new();
    let includes = if let Value::Array(items) = include { items } else { vec![include] };
    for name in &includes {
        let name = name.as_str().ok_or_else(|| source.error("include", "`include` is a file name"))?;
        let other = path.parent().unwrap_or(Path::new(".")).join(name);
        merged.extend(read_at(&other, depth + 1).with_context(|| format!("included by {}", path.display()))?.0);
    }
    merged.extend(map);
    Ok((merged, source))
}

fn json(yaml: Yaml, source: &Source) -> Result<Value> {
    Ok(match yaml {
        Yaml::Null => Value::Null,
        Yaml::Bool(b) => b.into(),
        Yaml::Number(n) => match (n.as_i64(), n.as_f64()) {
            (Some(i), _) => i.into(),
            (None, Some(f)) => f.into(),
            (None, None) => Value::Null,
        },
        Yaml::String(s) => s.into(),
        Yaml::Sequence(items) => items.into_iter().map(|v| json(v, source)).collect::<Result<Vec<_>>>()?.into(),
        Yaml::Mapping(map) => {
            let mut out = Map::new();
            for (k, v) in map {
                let key = match k {
                    Yaml::String(s) => s,
                    other => serde_yaml_ng::to_string(&other).unwrap_or_default().trim().to_string(),
                };
                out.insert(key, json(v, source)?);
            }
            Value::Object(out)
        }
        Yaml::Tagged(tagged) => return Err(source.error("task", format!("the YAML tag {} is not supported", tagged.tag))),
    })
}
