//! The TOML recipe: schema, presets, overrides, errors that help.
//!
//! A recipe passes through two forms. The *raw* one ([`raw`]) is a tree of TOML values that know their line, or the
//! `--set` argument they came from. It is checked against one table of keys ([`schema`]), which also holds defaults,
//! documentation and the rules of resuming. The *resolved* one ([`Recipe`]) is plain numbers: defaults filled in, presets
//! and stages applied, paths absolute. All problems of a file are told at once.

mod check;
pub mod doc;
mod geometry;
mod keys;
mod paths;
mod problems;
mod raw;
mod resolve;
mod resolved;
mod resume;
pub mod schema;
mod suggest;
mod tokenizer;
pub mod units;
mod write;

use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::Result;

pub use geometry::NEVER_EVALUATED;
pub use resolved::*;
pub use resume::ResumeDifferences;

use crate::error::bad_input;
use problems::Source;

/// A recipe larger than this is some other file.
const MAX_BYTES: u64 = 4 << 20;

/// Reads the recipe at `path`, with `sets` (each `key.path=value`) written over it. Paths in both are relative to the
/// recipe's folder. Every problem is told, with file, line and key; the error is a [`crate::error::BadInput`].
pub fn load(path: &Path, sets: &[String]) -> Result<Recipe> {
    load_text(path.display().to_string(), read(path)?, sets, || folder(path))
}

/// Reads a resolved recipe (all its paths are absolute) from its text; `name` stands for it in errors.
pub fn load_resolved(name: &str, text: &str) -> Result<Recipe> {
    load_text(name.to_string(), text.to_string(), &[], || Ok("/".into()))
}

fn load_text(file: String, text: String, sets: &[String], base: impl FnOnce() -> Result<PathBuf>) -> Result<Recipe> {
    let source = Source { file, text, sets: sets.to_vec() };
    let refuse = |problems: Vec<problems::Problem>| bad_input(source.report(problems));
    let mut root = raw::parse(&source.text).map_err(|p| refuse(vec![p]))?;
    raw::spell_out(&mut root);
    let mut problems = Vec::new();
    for (i, set) in sets.iter().enumerate() {
        problems.extend(raw::apply_set(&mut root, i, set).err());
        raw::spell_out(&mut root);
    }
    let checked = check::check(&root);
    problems.extend(checked.problems.iter().cloned());
    problems.extend(checked.contradictions());
    match checked.values.len_of("stages") {
        0 => problems.extend(checked.missing(&checked.values)),
        n => (0..n).for_each(|i| problems.extend(checked.missing(&resolve::stage_view(&checked.values, i).0))),
    }
    if !problems.is_empty() {
        return Err(refuse(problems));
    }
    resolve::resolve(&checked.values, &base()?).map_err(refuse)
}

fn read(path: &Path) -> Result<String> {
    let refuse = |why: String| bad_input(format!("cannot read the recipe {}: {why}", path.display()));
    let hint = "expected the path of a TOML file, such as recipes/demo-cpu.toml";
    if path.is_dir() {
        return Err(refuse(format!("it is a directory; {hint}")));
    }
    let file = std::fs::File::open(path).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => refuse(format!("there is no such file; {hint}")),
        _ => refuse(e.to_string()),
    })?;
    let mut bytes = Vec::new();
    file.take(MAX_BYTES + 1).read_to_end(&mut bytes).map_err(|e| refuse(e.to_string()))?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(refuse(format!("it is larger than {} MiB, so it is no recipe; {hint}", MAX_BYTES >> 20)));
    }
    String::from_utf8(bytes).map_err(|e| {
        let valid = &e.as_bytes()[..e.utf8_error().valid_up_to()];
        let line = valid.iter().filter(|b| **b == b'\n').count() + 1;
        refuse(format!("it is not UTF-8 text (line {line}, byte {}); {hint}", valid.len()))
    })
}

/// The folder that the recipe's paths are relative to, absolute. A link to a recipe counts where the link lies.
fn folder(path: &Path) -> Result<PathBuf> {
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let refuse = |why: &str| bad_input(format!("cannot use the recipe {}: {why}", path.display()));
    let folder = parent.canonicalize().map_err(|e| refuse(&format!("its folder cannot be found: {e}")))?;
    if folder.to_str().is_none() {
        return Err(refuse("the path of its folder is not UTF-8, which a resolved recipe could not hold"));
    }
    Ok(folder)
}
