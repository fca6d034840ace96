//! The pool of `checkpoint.incremental`: files by the hash of their content, shared by the checkpoints that hold them.
//!
//! `<root>/objects/<first two digits>/<blake3>.safetensors` and the file of a checkpoint's folder are two names (hard links) of one
//! file. So every checkpoint's folder is whole by itself: it is read, copied and deleted like any other, and deleting an object takes
//! nothing from a folder. The pool alone decides what need not be written again.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::locate::{list, open_step};
use super::manifest::FileEntry;
use super::write::sync_dir;
use crate::failpoint;

/// Folder beside the checkpoints.
pub(super) const OBJECTS: &str = "objects";
const SUFFIX: &str = ".safetensors";
/// A file is full at this size: the smaller the files, the fewer of them change.
pub(super) const MAX_FILE_BYTES: u64 = 64 << 20;
const BUFFER_BYTES: usize = 1 << 20;

/// The pool of one folder of checkpoints.
#[derive(Debug)]
pub(super) struct Pool {
    dir: PathBuf,
    /// Sentences for the log: what the pool could not do. A checkpoint is whole without it.
    pub notes: Vec<String>,
    /// Bytes that were not written again.
    pub reused_bytes: u64,
}

impl Pool {
    pub fn of(root: &Path) -> Self {
        Self { dir: root.join(OBJECTS), notes: Vec::new(), reused_bytes: 0 }
    }

    fn object(&self, blake3: &str) -> PathBuf {
        self.dir.join(&blake3[..2.min(blake3.len())]).join(format!("{blake3}{SUFFIX}"))
    }

    /// Gives the object of this content the name `path`, if there is one. Its bytes are read first: what a disk has damaged since is
    /// not passed on, but written anew.
    ///
    /// # Errors
    /// At the failpoint only; what the file system refuses becomes a note.
    pub fn take(&mut self, file: &FileEntry, path: &Path) -> Result<bool> {
        let object = self.object(&file.blake3);
        match hash_of(&object) {
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(false),
            Ok((size, hash)) if size == file.size && hash == file.blake3 => {}
            outcome => {
                let why = outcome.map_or_else(|e| e.to_string(), |_| "its bytes are not those of its name".into());
                self.notes.push(format!("the object {} is of no use ({why}), and is written anew", object.display()));
                // The folders that hold it keep it, and are found damaged when they are read.
                let _ = fs::remove_file(&object);
                return Ok(false);
            }
        }
        failpoint::hit("ckpt.pool_take")?;
        match fs::hard_link(&object, path) {
            Ok(()) => {
                self.reused_bytes += file.size;
                Ok(true)
            }
            Err(e) => {
                self.notes.push(format!("{} could not be taken from the pool ({e}), and is written again", path.display()));
                Ok(false)
            }
        }
    }

    /// Takes a file that was just written and synced into the pool.
    ///
    /// # Errors
    /// At the failpoint only; what the file system refuses becomes a note.
    pub fn put(&mut self, file: &FileEntry, path: &Path) -> Result<()> {
        failpoint::hit("ckpt.pool_put")?;
        let object = self.object(&file.blake3);
        let folder = object.parent().unwrap_or(&self.dir);
        let link = || -> Result<()> {
            fs::create_dir_all(folder)?;
            match fs::hard_link(path, &object) {
                // Two files of one checkpoint may have the same content.
                Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
                other => other?,
            }
            sync_dir(folder)
        };
        if let Err(e) = link() {
            self.notes.push(format!(
                "{} could not be put into the pool {} ({e:#}); checkpoint.incremental needs a file system with hard links",
                path.display(),
                self.dir.display()
            ));
        }
        Ok(())
    }
}

/// Deletes the objects that no valid checkpoint holds. The caller has just saved, so that nothing is being written.
///
/// # Errors
/// When the checkpoints cannot be listed. What cannot be deleted is a note.
pub fn collect_garbage(root: &Path) -> Result<Vec<String>> {
    let mut notes = Vec::new();
    let dir = root.join(OBJECTS);
    if !dir.is_dir() {
        return Ok(notes);
    }
    let valid = list(root)?.into_iter().filter_map(|step| open_step(root, step).ok());
    let held: HashSet<String> =
        valid.flat_map(|c| c.manifest().files.iter().map(|f| f.blake3.clone()).collect::<Vec<_>>()).collect();
    for folder in fs::read_dir(&dir).with_context(|| format!("looking through {}", dir.display()))?.flatten() {
        for object in fs::read_dir(folder.path()).into_iter().flatten().flatten() {
            let name = object.file_name();
            let hash = name.to_str().and_then(|n| n.strip_suffix(SUFFIX)).filter(|h| h.len() == 64);
            // Files of other names are not the pool's.
            if hash.is_none_or(|hash| held.contains(hash)) {
                continue;
            }
            failpoint::hit("ckpt.pool_collect")?;
            if let Err(e) = fs::remove_file(object.path()) {
                notes.push(format!("could not delete {}: {e}", object.path().display()));
            }
        }
        // Unless something is left in it.
        let _ = fs::remove_dir(folder.path());
    }
    Ok(notes)
}

/// Bytes of a file, and their blake3.
fn hash_of(path: &Path) -> std::io::Result<(u64, String)> {
    let mut file = File::open(path)?;
    let (mut hash, mut buffer, mut size) = (blake3::Hasher::new(), vec![0; BUFFER_BYTES], 0);
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok((size, hash.finalize().to_hex().to_string())),
            n => {
                hash.update(&buffer[..n]);
                size += n as u64;
            }
        }
    }
}
