//! Bringing a checkpoint back from the store.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result, anyhow, ensure};
use object_store::ObjectStoreExt;

use super::{PIECE_BYTES, Remote};
use crate::checkpoint::commit::{free_bytes, lock};
use crate::checkpoint::names::tmp_dir;
use crate::checkpoint::write::{sync_dir, write_small};
use crate::checkpoint::{Checkpoint, FileEntry, Found, MANIFEST, Meta, step_dir};
use crate::failpoint::{self, WriteFault};

/// What became of a checkpoint that was to be fetched.
#[derive(Debug)]
pub enum Fetched {
    /// Whole, verified, and in its place.
    Whole(Box<Checkpoint>),
    /// What is there is damaged or not complete; nothing of it is left here.
    Damaged(anyhow::Error),
}

impl Remote {
    /// Fetches the newest checkpoint that is whole into `<root>/step-N`, as crash-safe as a save, and verifies every byte of it before it
    /// gets that name. Those that are damaged or not complete are passed over, with a sentence each. `wanted` looks at a checkpoint
    /// before it is fetched.
    ///
    /// # Errors
    /// When the store cannot be asked, or `root` cannot be written: an older checkpoint is no answer to that. When `wanted` refuses one.
    /// That nothing is found is no error.
    pub fn fetch_latest(&self, root: &Path, wanted: &dyn Fn(&Meta) -> Result<()>) -> Result<Found> {
        let mut skipped = Vec::new();
        for step in self.steps()? {
            let place = || format!("{}/{}", self.url, step_dir(step));
            match self.fetch(step, root, wanted).with_context(|| format!("fetching {}", place()))? {
                Fetched::Whole(checkpoint) => return Ok(Found { checkpoint: Some(*checkpoint), skipped }),
                Fetched::Damaged(e) => skipped.push(format!("skipped {}: {e:#}", place())),
            }
        }
        Ok(Found { checkpoint: None, skipped })
    }

    /// Fetches one checkpoint into `<root>/step-N`. A folder of that name that is no valid checkpoint is set aside under another name.
    ///
    /// # Errors
    /// When there is no room for it, when the store or the disk fails. Then nothing is left of it.
    pub fn fetch(&self, step: u64, root: &Path, wanted: &dyn Fn(&Meta) -> Result<()>) -> Result<Fetched> {
        let bytes = self.runtime.block_on(self.manifest_bytes(step))?;
        let manifest = match self.parse(step, bytes.clone()) {
            Ok(manifest) => manifest,
            Err(e) => return Ok(Fetched::Damaged(e)),
        };
        wanted(&manifest.meta)?;
        fs::create_dir_all(root).with_context(|| format!("creating {}", root.display()))?;
        let _lock = lock(root)?;
        let (needed, free) = (manifest.total_bytes(), free_bytes(root)?);
        ensure!(needed <= free, "it has {} MiB, and {} MiB are free in {}", needed >> 20, free >> 20, root.display());
        let (dir, tmp) = (root.join(step_dir(step)), root.join(tmp_dir(step)));
        let fetched = self.fetch_into(&tmp, step, &manifest.files, &bytes.unwrap_or_default()).and_then(|damage| {
            if damage.is_some() {
                return Ok(damage);
            }
            failpoint::hit("fetch.before_commit")?;
            if dir.symlink_metadata().is_ok() {
                let aside = root.join(format!("{}.damaged-{}", step_dir(step), uuid::Uuid::new_v4().simple()));
                fs::rename(&dir, &aside).with_context(|| format!("setting {} aside", dir.display()))?;
                tell!("note: {} is no valid checkpoint, and is called {} from now on", dir.display(), aside.display());
            }
            fs::rename(&tmp, &dir).with_context(|| format!("renaming {}", tmp.display()))?;
            sync_dir(root)?;
            Ok(None)
        });
        if !matches!(fetched, Ok(None)) {
            let _ = fs::remove_dir_all(&tmp);
        }
        match fetched? {
            Some(damage) => Ok(Fetched::Damaged(damage)),
            None => Ok(Fetched::Whole(Box::new(Checkpoint::open(&dir)?))),
        }
    }

    /// What is wrong with it, if anything is.
    fn fetch_into(&self, tmp: &Path, step: u64, files: &[FileEntry], manifest: &[u8]) -> Result<Option<anyhow::Error>> {
        fs::create_dir(tmp).with_context(|| format!("creating {}", tmp.display()))?;
        for file in files {
            failpoint::hit("fetch.file")?;
            let key = self.key(step, &file.name);
            let size = self.runtime.block_on(self.head(&key))?.map(|found| found.size);
            if size != Some(file.size) {
                let found = size.map_or("is not there".into(), |size| format!("has {size} bytes"));
                return Ok(Some(anyhow!("{} {found}, and the manifest says {} bytes", file.name, file.size)));
            }
            self.fetch_file(tmp, step, file).with_context(|| format!("fetching {}", file.name))?;
        }
        failpoint::hit("fetch.before_manifest")?;
        write_small(&tmp.join(MANIFEST), manifest, WriteFault::None)?;
        sync_dir(tmp)?;
        Ok(Checkpoint::open(tmp)?.verify().err())
    }

    fn fetch_file(&self, tmp: &Path, step: u64, file: &FileEntry) -> Result<()> {
        let key = self.key(step, &file.name);
        let path = tmp.join(&file.name);
        let what = || format!("writing {}", path.display());
        let mut out = File::options().write(true).create_new(true).open(&path).with_context(what)?;
        let mut at = 0;
        while at < file.size {
            let end = file.size.min(at + PIECE_BYTES);
            let piece = self.runtime.block_on(self.store.get_range(&key, at..end)).with_context(|| format!("reading {key}"))?;
            ensure!(piece.len() as u64 == end - at, "{} bytes of {key} came where {} were asked for", piece.len(), end - at);
            out.write_all(&piece).with_context(what)?;
            at = end;
        }
        out.sync_all().with_context(what)
    }
}
