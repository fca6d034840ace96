//! Recipes: what is read, what is refused and with which words, what is written back, and the plan of a dry run.

mod command;
mod files;
mod resolved;
mod spelling;
mod values;

use std::path::{Path, PathBuf};

use zaya::error::BadInput;
use zaya::recipe::{self, Recipe};

pub(super) const SMALL: &str = r#"[run]
dir = "runs/small"
[model]
preset = "demo-6m"
[[data.sources]]
path = "shards/train"
[train]
steps = 20
global_batch_tokens = 2048
micro_batch = 2
seq_len = 256
[schedule]
lr = 1e-3
"#;

pub(super) fn root(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

pub(super) fn shipped() -> Vec<PathBuf> {
    let names = ["demo-cpu", "bench-cpu", "zaya1-base-stage1", "zaya1-base-stage2", "zaya1-base-stage3-32k", "zaya1-8b-sft-131k"];
    names.iter().map(|n| root(&format!("recipes/{n}.toml"))).collect()
}

pub(super) fn load(text: &str, sets: &[&str]) -> anyhow::Result<Recipe> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("r.toml");
    std::fs::write(&path, text).unwrap();
    recipe::load(&path, &sets.iter().map(|s| s.to_string()).collect::<Vec<_>>())
}

/// The text of a refusal, which must be the user's to mend.
#[track_caller]
pub(super) fn refusal(text: &str, sets: &[&str]) -> String {
    let error = load(text, sets).expect_err("must be refused");
    assert!(error.is::<BadInput>(), "not the user's fault? {error:#}");
    format!("{error:#}")
}

/// `SMALL` with `line` in place of the line that begins with the same key, or below `table`. Returns the line's number.
pub(super) fn small_with(table: &str, line: &str) -> (String, usize) {
    let mut lines: Vec<String> = SMALL.lines().map(str::to_string).collect();
    let header = |l: &String| l.trim_matches(['[', ']']) == table;
    let at = match lines.iter().position(header) {
        Some(at) => at,
        None => {
            lines.push(format!("[{table}]"));
            lines.len() - 1
        }
    };
    let key = line.split('=').next().unwrap().trim();
    let end = lines[at + 1..].iter().position(|l| l.starts_with('[')).map_or(lines.len(), |i| at + 1 + i);
    let old = (at + 1..end).find(|i| lines[*i].split('=').next().unwrap().trim() == key);
    let place = old.unwrap_or(at + 1);
    if old.is_some() {
        lines[place] = line.to_string();
    } else {
        lines.insert(place, line.to_string());
    }
    (lines.join("\n"), place + 1)
}

/// The same word with one letter changed, for every letter.
pub(super) fn misspellings(word: &str) -> Vec<String> {
    (0..word.len())
        .filter(|i| word.as_bytes()[*i].is_ascii_lowercase())
        .map(|i| {
            let other = if &word[i..i + 1] == "x" { "q" } else { "x" };
            format!("{}{other}{}", &word[..i], &word[i + 1..])
        })
        .collect()
}

/// A second source and two stages, to follow `SMALL`.
pub(super) const STAGES: &str = r#"
[[data.sources]]
name = "code"
path = "shards/code"
[[stages]]
name = "first"
lr = 2e-3
[[stages]]
name = "long"
tokens = 40960
seq_len = 512
rope_theta = 1e6
kind = "constant"
weights = { train = 0.2, code = 0.8 }
"#;
