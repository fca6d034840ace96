//! Sample records of an earlier run, read back from its folder.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::Value;

use crate::error::bad_input;

/// The records of a task.
#[derive(Debug, Clone, PartialEq)]
pub struct TaskRecords {
    pub path: PathBuf,
    /// In the file's order: one per filter and document.
    pub records: Vec<Value>,
}

/// The records of each `samples_<task>.jsonl` of a folder, or of one such file. lm-eval's names with a date at the end are read too.
///
/// # Errors
/// `BadInput`: there are none, or a line is no record.
pub fn read(path: &Path) -> Result<BTreeMap<String, TaskRecords>> {
    let files = if path.is_dir() {
        let listed = std::fs::read_dir(path).with_context(|| format!("listing {}", path.display()))?;
        let mut files = listed.map(|e| e.map(|e| e.path())).collect::<std::io::Result<Vec<_>>>()?;
        files.retain(|f| task_of(f).is_some());
        files.sort();
        files
    } else {
        vec![path.to_path_buf()]
    };
    let mut out = BTreeMap::new();
    for file in files {
        let task = task_of(&file).ok_or_else(|| {
            bad_input(format!("{} is not named samples_<task>.jsonl, so its task is not known", file.display()))
        })?;
        let text = std::fs::read_to_string(&file).map_err(|e| bad_input(format!("{} cannot be read: {e}", file.display())))?;
        let lines = text.lines().enumerate().filter(|(_, l)| !l.trim().is_empty());
        let records = lines.map(|(i, line)| {
            let record: Value =
                serde_json::from_str(line).map_err(|e| bad_input(format!("{}:{}: not JSON: {e}", file.display(), i + 1)))?;
            for key in ["doc_id", "doc_hash", "prompt_hash", "filter", "metrics", "resps"] {
                if record.get(key).is_none() {
                    return Err(bad_input(format!("{}:{}: the record has no `{key}`", file.display(), i + 1)));
                }
            }
            Ok(record)
        });
        out.insert(task, TaskRecords { records: records.collect::<Result<_>>()?, path: file });
    }
    if out.is_empty() {
        return Err(bad_input(format!("{} holds no samples_<task>.jsonl", path.display())));
    }
    Ok(out)
}

/// The task in a file's name.
fn task_of(path: &Path) -> Option<String> {
    let name = path.file_name()?.to_str()?.strip_prefix("samples_")?.strip_suffix(".jsonl")?;
    // lm-eval: samples_<task>_2026-01-31T10-20-30.123456.jsonl
    let is_date = |s: &str| s.len() >= 19 && s.as_bytes()[4] == b'-' && s.as_bytes()[10] == b'T';
    Some(name.rsplit_once('_').filter(|(_, end)| is_date(end)).map_or(name, |(task, _)| task).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_tell_the_task() {
        let task = |name: &str| task_of(Path::new(name));
        assert_eq!(task("x/samples_arc_easy.jsonl").as_deref(), Some("arc_easy"));
        assert_eq!(task("samples_arc_easy_2026-01-31T10-20-30.123456.jsonl").as_deref(), Some("arc_easy"));
        assert_eq!(task("requests.jsonl"), None);
    }
}
