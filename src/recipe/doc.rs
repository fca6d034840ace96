//! The tables of `docs/RECIPE.md`, written from the schema.

use std::fmt::Write;

use super::schema::{Default, KEYS, Key, Resume};

const TABLES: [(&str, &str); 17] = [
    ("run", ""),
    ("model", "The shape: a preset, fields, or a preset with fields that differ."),
    ("tokenizer", ""),
    ("data.sources", "One entry per source; at least one."),
    ("data.validation", "One entry per held-out set; none is needed."),
    ("data", ""),
    ("train", ""),
    ("optimizer", "Muon for weight matrices, AdamW for everything else; both follow `schedule.lr`."),
    ("schedule", "The learning rate is a pure function of the step (formulas below)."),
    ("router", "Balancing of the experts."),
    ("checkpoint", ""),
    ("guards", "Batches that are not to be trusted ([GUARDS.md](GUARDS.md))."),
    ("eval", ""),
    ("eval.tasks", "Benchmark tasks that run on the weights in training; none is needed. They change no bit of the run."),
    ("metrics", ""),
    (
        "parallel",
        "How the ranks of a run share its work. How many ranks there are is no part of a recipe: `--ranks`, or the launcher, says it.",
    ),
    (
        "stages",
        "Phases of a run that follow one another; a recipe without them is one stage. A stage says what differs from the other tables.",
    ),
];

fn cell(text: &str) -> String {
    text.replace('|', "\\|")
}

fn default_text(key: &Key) -> String {
    match key.default {
        Default::Required => "**required**".into(),
        Default::Value(text) => format!("`{text}`"),
        Default::Absent(text) => text.into(),
    }
}

/// One table of keys per table of a recipe.
pub fn keys_markdown() -> String {
    let mut out = String::new();
    for (table, intro) in TABLES {
        let keys: Vec<(&str, &Key)> = KEYS
            .iter()
            .filter_map(|k| {
                let (parent, leaf) = k.path.rsplit_once('.')?;
                (parent.trim_end_matches(".*") == table).then_some((leaf, k))
            })
            .collect();
        if keys.is_empty() {
            continue;
        }
        let is_array = keys[0].1.path.contains(".*.");
        let heading = if is_array { format!("[[{table}]]") } else { format!("[{table}]") };
        let _ = writeln!(out, "### `{heading}`\n");
        if !intro.is_empty() {
            let _ = writeln!(out, "{intro}\n");
        }
        let _ = writeln!(out, "| key | value | default | meaning |\n|---|---|---|---|");
        for (leaf, key) in keys {
            let kind = cell(&key.kind.describe());
            let _ = writeln!(out, "| `{leaf}` | {kind} | {} | {} |", cell(&default_text(key)), cell(key.doc));
        }
        out.push('\n');
    }
    out.trim_end().to_string()
}

/// Which keys may change on `--resume`.
pub fn resume_markdown() -> String {
    let mut out = String::from("| key | on `--resume` | why, or what comes of it |\n|---|---|---|\n");
    for key in KEYS {
        let path = key.path.replace(".*.", "[].");
        let (may, why) = match key.resume {
            Resume::Free => ("may change", ""),
            Resume::Notice(text) => ("may change, with a notice", text),
            Resume::Fixed(text) => ("refused", text),
            Resume::MayMove => ("may move, with a notice", "the same file names in another folder; other names are refused"),
        };
        let _ = writeln!(out, "| `{path}` | {may} | {} |", cell(why));
    }
    out.trim_end().to_string()
}
