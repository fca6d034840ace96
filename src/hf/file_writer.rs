//! Writing a safetensors file as a stream: the header follows from names and shapes, then the data comes piece by piece.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde_json::{Map, json};

use super::StoredDtype;

/// A tensor to be written.
pub(super) struct Entry {
    pub name: String,
    pub dtype: StoredDtype,
    pub shape: Vec<usize>,
}

impl Entry {
    pub fn bytes(&self) -> u64 {
        self.shape.iter().product::<usize>() as u64 * self.dtype.bytes() as u64
    }
}

/// A file under construction. It has a temporary name until [`Pending::finish`], and vanishes if dropped before.
pub(super) struct Pending {
    target: PathBuf,
    temporary: PathBuf,
    /// None once everything is on the disk, so that many waiting files do not use up the file handles.
    out: Option<BufWriter<File>>,
    written: u64,
    expected: u64,
    done: bool,
}

impl Pending {
    /// Starts the file `target`, any content.
    pub fn create(target: &Path) -> Result<Self> {
        let name = target.file_name().unwrap_or_default().to_string_lossy();
        let temporary = target.with_file_name(format!(".{name}.{}.tmp", std::process::id()));
        let file = File::create(&temporary).with_context(|| format!("creating {}", temporary.display()))?;
        let out = Some(BufWriter::with_capacity(1 << 20, file));
        Ok(Self { target: target.to_path_buf(), temporary, out, written: 0, expected: 0, done: false })
    }

    /// Starts a safetensors file with these tensors, in this order. The bytes of their data must follow, in the same order.
    pub fn tensors(target: &Path, entries: &[Entry]) -> Result<Self> {
        let mut header = Map::new();
        header.insert("__metadata__".into(), json!({"format": "pt"}));
        let mut at = 0;
        for entry in entries {
            let end = at + entry.bytes();
            let value = json!({"dtype": entry.dtype.name(), "shape": entry.shape, "data_offsets": [at, end]});
            header.insert(entry.name.clone(), value);
            at = end;
        }
        let mut text = serde_json::to_vec(&header)?;
        text.resize(text.len().next_multiple_of(8), b' '); // data begins aligned
        let mut pending = Self::create(target)?;
        pending.write(&(text.len() as u64).to_le_bytes())?;
        pending.write(&text)?;
        pending.written = 0;
        pending.expected = at;
        Ok(pending)
    }

    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.written += bytes.len() as u64;
        let out = self.out.as_mut().with_context(|| format!("{} is closed", self.temporary.display()))?;
        out.write_all(bytes).with_context(|| format!("writing {}", self.temporary.display()))
    }

    /// Brings the whole file onto the disk, still under its temporary name. Nothing can be written after that.
    pub fn sync(&mut self) -> Result<()> {
        let Some(mut out) = self.out.take() else { return Ok(()) };
        out.flush().and_then(|_| out.get_ref().sync_all()).with_context(|| format!("writing {}", self.temporary.display()))
    }

    /// Gives the file its name, replacing an older one.
    pub fn finish(mut self) -> Result<()> {
        ensure!(
            self.expected == 0 || self.written == self.expected,
            "{} got {} bytes of tensors instead of {}",
            self.target.display(),
            self.written,
            self.expected
        );
        self.sync()?;
        fs::rename(&self.temporary, &self.target).with_context(|| format!("naming {}", self.target.display()))?;
        self.done = true;
        Ok(())
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if !self.done {
            let _ = fs::remove_file(&self.temporary);
        }
    }
}

/// Makes renames in `dir` last through a power failure.
pub(super) fn sync_dir(dir: &Path) -> Result<()> {
    File::open(dir).and_then(|d| d.sync_all()).with_context(|| format!("syncing {}", dir.display()))
}
