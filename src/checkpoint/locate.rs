//! Finding a checkpoint: the newest valid one of a run, or the one that a path names.

use std::path::Path;

use anyhow::{Context, Result};

use super::names::parse_step_dir;
use super::{CKPT_DIR, Checkpoint, MANIFEST};
use crate::error::bad_input;

/// What a search found, and what it passed over.
#[derive(Debug)]
pub struct Found {
    pub checkpoint: Option<Checkpoint>,
    /// One sentence for each newer folder that is not a valid checkpoint: to be shown to the user.
    pub skipped: Vec<String>,
}

/// Steps of all folders that are named like checkpoints, newest first. Valid or not; an absent root has none.
///
/// # Errors
/// When the folder is there and cannot be read.
pub fn list(root: &Path) -> Result<Vec<u64>> {
    let entries = match std::fs::read_dir(root) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(e).with_context(|| format!("looking for checkpoints in {}", root.display())),
    };
    let mut steps = Vec::new();
    for entry in entries {
        let entry = entry.with_context(|| format!("looking for checkpoints in {}", root.display()))?;
        steps.extend(entry.file_name().to_str().and_then(parse_step_dir));
    }
    steps.sort_unstable_by(|a, b| b.cmp(a));
    Ok(steps)
}

/// Opens the checkpoint of a step, whose manifest must be of that step.
pub(super) fn open_step(root: &Path, step: u64) -> Result<Checkpoint> {
    let checkpoint = Checkpoint::open(&root.join(super::step_dir(step)))?;
    let inside = checkpoint.meta().step;
    anyhow::ensure!(inside == step, "the folder is named after step {step}, its manifest is of step {inside}");
    Ok(checkpoint)
}

/// The newest checkpoint whose every byte is what was written. Damaged and unfinished ones are passed over, with a sentence
/// each. `LATEST` is not looked at.
///
/// # Errors
/// When the folder is there and cannot be read. An empty or absent folder is no error: nothing is found.
pub fn latest_valid(root: &Path) -> Result<Found> {
    let mut skipped = Vec::new();
    for step in list(root)? {
        let checked = open_step(root, step).and_then(|c| c.verify_tensors().map(|()| c));
        match checked {
            Ok(checkpoint) => return Ok(Found { checkpoint: Some(checkpoint), skipped }),
            Err(e) => skipped.push(format!("skipped {}: {e:#}", root.join(super::step_dir(step)).display())),
        }
    }
    Ok(Found { checkpoint: None, skipped })
}

/// The checkpoint that a path means: a checkpoint folder itself, or the newest valid one of a run directory or of its folder
/// of checkpoints. A checkpoint folder is opened without reading all of it; its tensors are verified as they are read.
///
/// # Errors
/// `BadInput` when the path is none of these, or holds no valid checkpoint; says what was passed over.
pub fn locate(path: &Path) -> Result<Found> {
    if path.join(MANIFEST).is_file() {
        return Ok(Found { checkpoint: Some(Checkpoint::open(path)?), skipped: Vec::new() });
    }
    if !path.is_dir() {
        return Err(bad_input(format!("{} is not a folder: expected a checkpoint or a run directory", path.display())));
    }
    let inner = path.join(CKPT_DIR);
    let root = if inner.is_dir() { inner.as_path() } else { path };
    let found = latest_valid(root)?;
    if found.checkpoint.is_none() {
        let why = if found.skipped.is_empty() { String::new() } else { format!(": {}", found.skipped.join("; ")) };
        return Err(bad_input(format!("{} holds no valid checkpoint{why}", path.display())));
    }
    Ok(found)
}
