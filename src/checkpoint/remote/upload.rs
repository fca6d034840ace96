//! Bringing a checkpoint into the store: its files, each checked, then its manifest.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use object_store::path::Path as Key;
use object_store::{ObjectMeta, ObjectStoreExt, PutPayload};
use serde::{Deserialize, Serialize};
use tokio::task::JoinSet;

use super::journal::Journal;
use super::{PIECE_BYTES, Remote, STORE, trimmed};
use crate::checkpoint::manifest::Manifest;
use crate::checkpoint::{Checkpoint, FileEntry, MANIFEST, step_dir};
use crate::failpoint;

/// Pieces of a file that are on their way at the same time.
const IN_FLIGHT: usize = 4;
/// In the checkpoint's folder: it is in the store.
const DONE: &str = ".uploaded";

/// What an upload did.
#[derive(Debug, Clone, PartialEq)]
pub struct Uploaded {
    pub step: u64,
    /// Bytes of all files.
    pub bytes: u64,
    /// Of these, bytes that were there already.
    pub skipped_bytes: u64,
    pub seconds: f64,
}

/// Contents of [`DONE`].
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Done {
    url: String,
    /// blake3 of the manifest: a step that is saved again is another checkpoint.
    manifest: String,
}

impl Done {
    fn new(url: &str, manifest: &[u8]) -> Self {
        Self { url: trimmed(url).to_string(), manifest: blake3::hash(manifest).to_hex().to_string() }
    }
}

/// Whether the checkpoint in `dir` is known to be in the store at `url`; nobody is asked.
pub fn is_uploaded(url: &str, dir: &Path) -> bool {
    let (Ok(manifest), Ok(text)) = (std::fs::read(dir.join(MANIFEST)), std::fs::read(dir.join(DONE))) else { return false };
    serde_json::from_slice::<Done>(&text).is_ok_and(|done| done == Done::new(url, &manifest))
}

impl Remote {
    /// Uploads the checkpoint in `dir` and verifies that it arrived: of every object the size, of the manifest every byte. What an
    /// earlier try has brought there, unchanged since, is not sent again. A step that the store holds in another version is no
    /// checkpoint from the beginning of this to its end; the others are not touched.
    ///
    /// # Errors
    /// When the checkpoint is damaged, or the store fails for longer than it is tried again. Then the step is no checkpoint in the
    /// store, and the next try goes on from here.
    pub fn upload(&self, dir: &Path) -> Result<Uploaded> {
        failpoint::hit("upload.begin")?;
        let began = Instant::now();
        let checkpoint = Checkpoint::open(dir)?;
        let step = checkpoint.meta().step;
        let what = || format!("uploading {} to {}", step_dir(step), self.url);
        let manifest = std::fs::read(dir.join(MANIFEST)).with_context(what)?;
        let skipped_bytes = self.runtime.block_on(self.upload_all(dir, &checkpoint, &manifest)).with_context(what)?;
        // A help for the next start, no more: without it the store is asked.
        let _ = serde_json::to_vec(&Done::new(&self.url, &manifest)).map(|text| std::fs::write(dir.join(DONE), text));
        Ok(Uploaded { step, bytes: checkpoint.manifest().total_bytes(), skipped_bytes, seconds: began.elapsed().as_secs_f64() })
    }

    async fn upload_all(&self, dir: &Path, checkpoint: &Checkpoint, manifest: &[u8]) -> Result<u64> {
        let (step, files) = (checkpoint.meta().step, &checkpoint.manifest().files);
        let manifest_key = self.key(step, MANIFEST);
        let mut journal = Journal::open(dir, &self.url);
        let there = self.manifest_bytes(step).await?;
        let complete = there.as_deref() == Some(manifest);
        if let Some(there) = there.filter(|_| !complete) {
            refuse_other_run(&there, checkpoint)?;
            self.store.delete(&manifest_key).await.context("taking back the manifest of this step's earlier version")?;
        }
        let mut skipped = 0;
        for file in files {
            failpoint::hit("upload.file")?;
            let key = self.key(step, &file.name);
            let known = journal.e_tag(file);
            match self.head(&key).await? {
                // The manifest was put when all of them had arrived.
                Some(found) if complete && found.size == file.size => skipped += file.size,
                Some(found) if known.is_some() && found.e_tag.as_deref() == known && found.size == file.size => {
                    skipped += file.size
                }
                _ => {
                    self.send(dir, file, &key).await.with_context(|| file.name.clone())?;
                    let found = self.head(&key).await?.with_context(|| format!("{key} is not there after it was sent"))?;
                    ensure!(found.size == file.size, "{key} has {} bytes after {} were sent", found.size, file.size);
                    journal.arrived(file, found.e_tag)?;
                }
            }
            failpoint::hit("upload.after_file")?;
        }
        failpoint::hit("upload.before_manifest")?;
        if !complete {
            self.store.put(&manifest_key, PutPayload::from(manifest.to_vec())).await.context(MANIFEST)?;
        }
        failpoint::hit("upload.after_manifest")?;
        ensure!(self.manifest_bytes(step).await?.as_deref() == Some(manifest), "the manifest is another one after it was sent");
        journal.remove();
        self.remove_others(step, files).await;
        Ok(skipped)
    }

    pub(super) async fn head(&self, key: &Key) -> Result<Option<ObjectMeta>> {
        match self.store.head(key).await {
            Ok(found) => Ok(Some(found)),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(e) => Err(anyhow::Error::new(e).context(format!("looking at {key}"))),
        }
    }

    /// Sends a file, in pieces when it is large, and hashes what is sent: what the disk has damaged does not become an upload.
    async fn send(&self, dir: &Path, file: &FileEntry, key: &Key) -> Result<()> {
        let mut pieces_of = Pieces::open(dir, file)?;
        if file.size <= PIECE_BYTES {
            let whole = pieces_of.next()?.unwrap_or_default();
            pieces_of.finish()?;
            self.store.put(key, PutPayload::from(whole)).await.context(STORE)?;
            return Ok(());
        }
        let mut upload = self.store.put_multipart(key).await.context(STORE)?;
        let mut pieces: JoinSet<object_store::Result<()>> = JoinSet::new();
        let sent: Result<()> = async {
            while let Some(piece) = pieces_of.next()? {
                if pieces.len() >= IN_FLIGHT
                    && let Some(done) = pieces.join_next().await
                {
                    done?.context(STORE)?;
                }
                pieces.spawn(upload.put_part(PutPayload::from(piece)));
            }
            while let Some(done) = pieces.join_next().await {
                done?.context(STORE)?;
            }
            pieces_of.finish()
        }
        .await;
        if let Err(e) = sent {
            pieces.abort_all();
            // Pieces that stay there cost money, and are no object.
            let _ = upload.abort().await;
            return Err(e);
        }
        upload.complete().await.context(STORE)?;
        Ok(())
    }

    /// Deletes what an earlier version of the step has left. Nothing depends on it.
    async fn remove_others(&self, step: u64, files: &[FileEntry]) {
        let folder = self.prefix.clone().join(step_dir(step));
        let Ok(listed) = self.store.list_with_delimiter(Some(&folder)).await else { return };
        for object in listed.objects {
            let name = object.location.parts().next_back();
            let name = name.as_ref().map_or("", |n| n.as_ref());
            if name.ends_with(".safetensors") && files.iter().all(|f| f.name != name) {
                let _ = self.store.delete(&object.location).await;
            }
        }
    }
}

/// Refuses to replace what is not an earlier version of a checkpoint, but another model's or another run's. What is no manifest may go.
fn refuse_other_run(there: &[u8], ours: &Checkpoint) -> Result<()> {
    let Ok(there) = Manifest::parse(there) else { return Ok(()) };
    let (theirs, ours) = (&there, ours.manifest());
    let same = theirs.model_hash == ours.model_hash
        && theirs.meta.tokenizer_hash == ours.meta.tokenizer_hash
        && theirs.meta.data_fingerprint == ours.meta.data_fingerprint;
    ensure!(same, "there is a checkpoint of this step of another model, or trained on other data: upload to another place");
    Ok(())
}

/// A file, piece by piece, hashed on the way.
struct Pieces<'a> {
    entry: &'a FileEntry,
    path: PathBuf,
    file: File,
    at: u64,
    hash: blake3::Hasher,
}

impl<'a> Pieces<'a> {
    fn open(dir: &Path, entry: &'a FileEntry) -> Result<Self> {
        let path = dir.join(&entry.name);
        let file = File::open(&path).with_context(|| format!("opening {}", path.display()))?;
        Ok(Self { entry, path, file, at: 0, hash: blake3::Hasher::new() })
    }

    fn next(&mut self) -> Result<Option<Vec<u8>>> {
        if self.at == self.entry.size {
            return Ok(None);
        }
        let mut piece = vec![0; PIECE_BYTES.min(self.entry.size - self.at) as usize];
        self.file.read_exact_at(&mut piece, self.at).with_context(|| format!("reading {}", self.path.display()))?;
        self.hash.update(&piece);
        self.at += piece.len() as u64;
        Ok(Some(piece))
    }

    /// Whether it was what the manifest says.
    fn finish(&self) -> Result<()> {
        let same = self.hash.finalize().to_hex().as_str() == self.entry.blake3;
        ensure!(same, "{} is damaged: its hash is another one", self.path.display());
        Ok(())
    }
}
