//! What may differ between a run's recipe and the one it is resumed with. The rule of each key stands in the schema.

use std::collections::BTreeMap;

use toml_edit::Value;

use super::resolved::Recipe;
use super::schema::{self, Resume};
use super::write::flat;

/// Outcome of comparing two recipes for `--resume`: sentences that name the key, the old and the new value.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ResumeDifferences {
    /// Changes that hold from the resumed step on; worth telling the user.
    pub allowed: Vec<String>,
    /// Changes that make the resumed run another run; with any of these it may not go on.
    pub refused: Vec<String>,
}

impl Recipe {
    /// Compares with `old`, the recipe that the run was started with. Empty where both say the same.
    pub fn resume_differences(&self, old: &Recipe) -> ResumeDifferences {
        let values = |r: &Recipe| -> Vec<(String, Value)> {
            // What a single stage says is also said by the other tables.
            flat(r).into_iter().filter(|(key, _)| r.stages.len() > 1 || !key.starts_with("stages.")).collect()
        };
        let (new, old) = (values(self), values(old));
        let before: BTreeMap<&str, &Value> = old.iter().map(|(k, v)| (k.as_str(), v)).collect();
        let after: BTreeMap<&str, &Value> = new.iter().map(|(k, v)| (k.as_str(), v)).collect();
        let gone = old.iter().filter(|(key, _)| !after.contains_key(key.as_str()));
        let mut out = ResumeDifferences::default();
        for (key, _) in new.iter().chain(gone) {
            let (was, is) = (before.get(key.as_str()).copied(), after.get(key.as_str()).copied());
            let (was_text, is_text) = (show(was), show(is));
            if was_text == is_text {
                continue;
            }
            let change = format!("`{key}` was {was_text} and is now {is_text}");
            let rule = schema::find(&schema::pattern(&key.split('.').collect::<Vec<_>>())).map(|k| k.resume);
            match rule {
                // The name is only a word; the numbers it stands for are compared one by one.
                _ if key == "model.preset" => out.allowed.push(change),
                Some(Resume::Free) => out.allowed.push(change),
                Some(Resume::Notice(what)) => out.allowed.push(format!("{change}: {what}")),
                Some(Resume::MayMove) if is.is_some() && file_names(was) == file_names(is) => {
                    out.allowed.push(format!("{change}: taken as the same files at another place"));
                }
                Some(Resume::MayMove) => {
                    out.refused.push(format!("{change}: the run was started with other files, and goes on with those only"));
                }
                Some(Resume::Fixed(why)) => out.refused.push(format!("{change}: {why}")),
                None => out.refused.push(change),
            }
        }
        out
    }
}

fn show(value: Option<&Value>) -> String {
    value.map_or("not given".to_string(), |v| v.to_string().trim().to_string())
}

/// Last names of the paths in a value.
fn file_names(value: Option<&Value>) -> Vec<String> {
    let name = |v: &Value| v.as_str().unwrap_or("").rsplit('/').next().unwrap_or("").to_string();
    match value {
        Some(Value::Array(paths)) => paths.iter().map(name).collect(),
        Some(path) => vec![name(path)],
        None => Vec::new(),
    }
}
