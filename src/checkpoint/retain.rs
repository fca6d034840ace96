//! Retention: which old checkpoints go. Only valid ones are counted, only valid ones are deleted.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use super::locate::{list, open_step};
use super::names::{step_dir, tmp_dir};
use super::{MANIFEST, PIN};
use crate::failpoint;

#[derive(Debug, Clone, Default)]
pub struct RetainPolicy {
    /// The newest valid checkpoints to keep; at least 1 is always kept.
    pub keep_last: usize,
    /// Also keep every step that is a multiple of this; 0 = none.
    pub keep_every: u64,
    /// Steps never to delete, such as the one that the run was resumed from.
    pub protected: Vec<u64>,
}

#[derive(Debug, Default)]
pub struct Retained {
    /// Steps that were deleted, newest first.
    pub deleted: Vec<u64>,
    /// Folders passed over and deletions that did not work: sentences for the log.
    pub notes: Vec<String>,
}

/// Deletes old checkpoints after a successful save. Folders that are not valid checkpoints are neither counted nor touched,
/// and a checkpoint that holds a file `PIN` stays. Before anything is deleted, the newest kept one is verified byte by byte.
///
/// # Errors
/// When the folder cannot be read. A deletion that fails is a note, not an error.
pub fn retain(root: &Path, policy: &RetainPolicy) -> Result<Retained> {
    let mut out = Retained::default();
    let mut kept_last = 0;
    let mut doomed = Vec::new();
    let mut verified = false;
    for step in list(root)? {
        let checkpoint = match open_step(root, step) {
            Ok(checkpoint) => checkpoint,
            Err(e) => {
                out.notes.push(format!("retention does not count {}: {e:#}", step_dir(step)));
                continue;
            }
        };
        // The newest one proves itself by its hashes; the older ones did so when they were the newest.
        if !verified {
            if let Err(e) = checkpoint.verify_tensors() {
                out.notes.push(format!("retention does not count {}: {e:#}", step_dir(step)));
                continue;
            }
            verified = true;
        }
        if kept_last < policy.keep_last.max(1) {
            kept_last += 1;
            continue;
        }
        let multiple = policy.keep_every > 0 && step.is_multiple_of(policy.keep_every);
        if !(multiple || policy.protected.contains(&step) || checkpoint.dir().join(PIN).exists()) {
            doomed.push(step);
        }
    }
    for step in doomed {
        match delete(root, step) {
            Ok(()) => out.deleted.push(step),
            Err(e) => out.notes.push(format!("could not delete {}: {e:#}", step_dir(step))),
        }
    }
    Ok(out)
}

/// Takes the name away first, so that a half-deleted folder is never looked at, then the manifest, then the data. What a
/// crash leaves here, the next save removes.
fn delete(root: &Path, step: u64) -> Result<()> {
    failpoint::hit("ckpt.retain")?;
    let (dir, trash) = (root.join(step_dir(step)), root.join(tmp_dir(step)));
    match fs::rename(&dir, &trash) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        other => other.with_context(|| format!("renaming {}", dir.display()))?,
    }
    failpoint::hit("ckpt.retain_renamed")?;
    fs::remove_file(trash.join(MANIFEST)).with_context(|| format!("deleting the manifest of {}", trash.display()))?;
    failpoint::hit("ckpt.retain_manifest_gone")?;
    fs::remove_dir_all(&trash).with_context(|| format!("deleting {}", trash.display()))
}
