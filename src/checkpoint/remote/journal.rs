//! What an upload has brought to its end already, so that the next try need not do it again.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::checkpoint::FileEntry;

/// In the checkpoint's folder: one JSON object a line, one line an object that has arrived.
const FILE: &str = ".uploading";

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Line {
    url: String,
    name: String,
    size: u64,
    blake3: String,
    /// What the store called this very version of the object.
    e_tag: Option<String>,
}

pub(super) struct Journal {
    path: PathBuf,
    url: String,
    lines: Vec<Line>,
}

impl Journal {
    /// Of uploads of the checkpoint in `dir` to `url`. Lines that cannot be read are as if they were not there.
    pub fn open(dir: &Path, url: &str) -> Self {
        let path = dir.join(FILE);
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        Self { path, url: url.into(), lines: text.lines().filter_map(|l| serde_json::from_str(l).ok()).collect() }
    }

    /// What the store called this file's object when it arrived, if it ever did.
    pub fn e_tag(&self, file: &FileEntry) -> Option<&str> {
        let is_it = |l: &&Line| l.url == self.url && l.name == file.name && l.size == file.size && l.blake3 == file.blake3;
        self.lines.iter().rev().find(is_it)?.e_tag.as_deref()
    }

    /// Takes note of an object that has arrived.
    ///
    /// # Errors
    /// When the folder cannot be written.
    pub fn arrived(&mut self, file: &FileEntry, e_tag: Option<String>) -> Result<()> {
        let line = Line { url: self.url.clone(), name: file.name.clone(), size: file.size, blake3: file.blake3.clone(), e_tag };
        let what = || format!("writing {}", self.path.display());
        let mut out = File::options().create(true).append(true).open(&self.path).with_context(what)?;
        // A line of its own also behind one that was cut off.
        out.write_all(format!("\n{}\n", serde_json::to_string(&line)?).as_bytes()).with_context(what)?;
        self.lines.push(line);
        Ok(())
    }

    /// The upload is done.
    pub fn remove(self) {
        let _ = std::fs::remove_file(&self.path);
    }
}
