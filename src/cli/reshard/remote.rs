//! `zaya reshard ls|verify|fetch` of checkpoints in an object store.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::checkpoint::remote::{Fetched, Remote};
use crate::checkpoint::{MANIFEST, step_dir};
use crate::error::{bad_input, exit_code};

/// How long a request is tried again.
const RETRY: Duration = Duration::from_secs(60);

/// The URL that an argument is, unless it is a path.
pub fn url_of(path: &Path) -> Option<&str> {
    path.to_str().filter(|text| text.contains("://"))
}

pub fn ls(url: &str) -> Result<u8> {
    let remote = Remote::open(url, RETRY)?;
    let steps = remote.steps()?;
    if steps.is_empty() {
        say!("{url} holds no checkpoint");
        return Ok(exit_code::OK);
    }
    super::ls_head();
    for step in steps {
        super::ls_line(step, remote.manifest(step).as_ref());
    }
    Ok(exit_code::OK)
}

/// Fetches every checkpoint, one after the other, into a temporary folder, since it is there that every byte is looked at.
pub fn verify(url: &str) -> Result<u8> {
    let remote = Remote::open(url, RETRY)?;
    let steps = remote.steps()?;
    if steps.is_empty() {
        return Err(bad_input(format!("{url} holds no checkpoint")));
    }
    let mut valid = true;
    for step in steps {
        let folder = tempfile::tempdir().context("creating a temporary folder")?;
        match remote.fetch(step, folder.path(), &|_| Ok(()))? {
            Fetched::Whole(c) => say!("{url}: {}: valid: {}", step_dir(step), super::summary(&c)),
            Fetched::Damaged(e) => {
                say!("{url}: {}: NOT VALID: {e:#}", step_dir(step));
                valid = false;
            }
        }
    }
    Ok(if valid { exit_code::OK } else { exit_code::FAILURE })
}

pub fn fetch(url: &str, output: &Path) -> Result<u8> {
    let remote = Remote::open(url, RETRY)?;
    // Into the folder's own parent first: the name is given to something whole only.
    crate::checkpoint::repack::check_output(output, None)?;
    let output = std::path::absolute(output).with_context(|| format!("resolving {}", output.display()))?;
    let parent = output.parent().unwrap_or(Path::new("/"));
    std::fs::create_dir_all(parent).with_context(|| format!("creating {}", parent.display()))?;
    let folder = tempfile::Builder::new().prefix(".zaya-fetch-").tempdir_in(parent).context("creating a temporary folder")?;
    let found = remote.fetch_latest(folder.path(), &|_| Ok(()))?;
    found.skipped.iter().for_each(|s| tell!("warning: {s}"));
    let Some(checkpoint) = found.checkpoint else {
        return Err(bad_input(format!("{url} holds no valid checkpoint")));
    };
    std::fs::rename(checkpoint.dir(), &output)
        .with_context(|| format!("naming {} (its {MANIFEST} and files are verified)", output.display()))?;
    say!("{}: {}, every byte verified", output.display(), super::summary(&checkpoint));
    Ok(exit_code::OK)
}
