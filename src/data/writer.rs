//! Writing a token shard: in a stream, under temporary names, published by renaming.

use std::fs::{File, OpenOptions};
use std::hash::Hasher;
use std::io::{BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use twox_hash::XxHash3_64;

use super::companions::{Companion, CompanionWriters, Origin};
use super::mask::{self, MaskWriter};
use super::shard::{HEADER_BYTES, MAGIC, TokenType, VERSION, with_suffix};
use crate::error::bad_input;
use crate::failpoint;

/// Files of a shard in the order they are published. The index comes last: without it nobody sees a shard.
pub(super) const SUFFIXES: [&str; 3] = [".bin", ".json", ".idx"];

/// Sizes and hashes of a finished pair.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Written {
    pub documents: u64,
    pub tokens: u64,
    pub bin_bytes: u64,
    pub bin_xxh3_64: String,
    pub idx_bytes: u64,
    pub idx_xxh3_64: String,
    /// Size and hash of the mask, where there is one.
    pub mask: Option<(u64, String)>,
}

/// One document as it lies in the files.
#[derive(Debug, Clone, Copy)]
pub struct Tokens<'a> {
    /// Ids as they lie in a `.bin`, checked by [`TokenType::append`]'s caller.
    pub bytes: &'a [u8],
    /// One a token where the shard has a mask, else none.
    pub marks: &'a [u8],
}

/// Files of the same shard for other programs, where they were asked for; all of them go when a shard is replaced.
fn companion_suffixes() -> impl Iterator<Item = &'static str> {
    [Companion::Ds, Companion::Olmo].into_iter().flat_map(Companion::suffixes).copied()
}

/// Of all files that a shard may have.
pub(super) fn all_suffixes() -> impl Iterator<Item = &'static str> {
    SUFFIXES.into_iter().rev().chain(companion_suffixes()).chain([mask::SUFFIX])
}

/// Appends documents to `PREFIX.bin.tmp` and `PREFIX.idx.tmp`; [`ShardWriter::publish`] gives them their names. Dropped
/// before that, it removes them. Memory does not grow with the number of documents.
pub struct ShardWriter {
    prefix: PathBuf,
    token_type: TokenType,
    bin: BufWriter<File>,
    /// Header (filled in at the end), then the lengths as they come.
    idx: BufWriter<File>,
    bin_hash: XxHash3_64,
    companions: CompanionWriters,
    mask: Option<MaskWriter>,
    documents: u64,
    tokens: u64,
    bytes: Vec<u8>,
    published: bool,
}

impl ShardWriter {
    /// Refuses a prefix whose shard exists, unless `overwrite`, and one that another process is writing.
    pub fn create(prefix: &Path, token_type: TokenType, overwrite: bool) -> Result<Self> {
        Self::create_with(prefix, token_type, overwrite, &[])
    }

    /// As [`ShardWriter::create`], with files for other programs.
    pub fn create_with(prefix: &Path, token_type: TokenType, overwrite: bool, companions: &[Companion]) -> Result<Self> {
        check_prefix(prefix, overwrite)?;
        let bin = create_temporary(&with_suffix(prefix, ".bin.tmp"))?;
        let mut idx = BufWriter::with_capacity(1 << 16, create_temporary(&with_suffix(prefix, ".idx.tmp"))?);
        idx.write_all(&[0; HEADER_BYTES as usize])?;
        Ok(Self {
            prefix: prefix.to_path_buf(),
            token_type,
            bin: BufWriter::with_capacity(1 << 20, bin),
            idx,
            bin_hash: XxHash3_64::new(),
            companions: CompanionWriters::create(prefix, companions)?,
            mask: None,
            documents: 0,
            tokens: 0,
            bytes: Vec::new(),
            published: false,
        })
    }

    /// With `PREFIX.mask`; to be said before the first document, which [`ShardWriter::push_tokens`] then takes.
    pub fn with_mask(mut self) -> Result<Self> {
        self.mask = Some(MaskWriter::create(&self.prefix)?);
        Ok(self)
    }

    /// Appends one document of fewer than 2^31 tokens. An id that the type cannot hold is an error, never cut to fit.
    pub fn push(&mut self, ids: &[u32]) -> Result<()> {
        let len = i32::try_from(ids.len()).map_err(|_| {
            bad_input(format!("a document of {} tokens is too long: the format holds up to {} a document", ids.len(), i32::MAX))
        })?;
        let limit = match self.token_type {
            TokenType::U16 => u32::from(u16::MAX),
            TokenType::I32 => i32::MAX as u32,
        };
        if let Some(id) = ids.iter().find(|id| **id > limit) {
            return Err(bad_input(format!("token id {id} does not fit into {}", self.token_type.name())));
        }
        let mut bytes = std::mem::take(&mut self.bytes);
        bytes.clear();
        self.token_type.append(ids, &mut bytes);
        let pushed = self.append(Tokens { bytes: &bytes, marks: &[] }, len, &Origin::default());
        self.bytes = bytes;
        pushed
    }

    /// Appends one document.
    pub fn push_tokens(&mut self, document: Tokens<'_>, origin: &Origin<'_>) -> Result<()> {
        let tokens = document.bytes.len() as u64 / self.token_type.bytes();
        self.append(document, i32::try_from(tokens).context("a document has 2^31 tokens or more")?, origin)
    }

    fn append(&mut self, document: Tokens<'_>, tokens: i32, origin: &Origin<'_>) -> Result<()> {
        let Tokens { bytes, marks } = document;
        let wanted = if self.mask.is_some() { tokens as usize } else { 0 };
        ensure!(marks.len() == wanted, "a document of {tokens} tokens has {} marks, {wanted} are needed", marks.len());
        if let Some(mask) = &mut self.mask {
            mask.write(marks)?;
        }
        self.bin_hash.write(bytes);
        self.bin.write_all(bytes).with_context(|| self.writing(".bin.tmp"))?;
        self.idx.write_all(&tokens.to_le_bytes()).with_context(|| self.writing(".idx.tmp"))?;
        self.documents += 1;
        self.tokens += tokens as u64;
        self.companions.push(self.tokens, tokens as u64, origin)
    }

    pub fn documents(&self) -> u64 {
        self.documents
    }
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    pub fn bytes(&self) -> u64 {
        self.tokens * self.token_type.bytes()
    }

    /// Completes the index, makes everything durable, and gives the files their names: `.bin`, `.json`, then `.idx`.
    /// `sidecar` turns sizes and hashes into the text of `PREFIX.json`.
    pub fn publish(self, sidecar: impl FnOnce(&Written) -> Result<String>) -> Result<Written> {
        self.publish_from("", sidecar)
    }

    /// As [`ShardWriter::publish`]; `tokenizer` is what files for other programs call it.
    pub fn publish_from(mut self, tokenizer: &str, sidecar: impl FnOnce(&Written) -> Result<String>) -> Result<Written> {
        self.bin.flush().with_context(|| self.writing(".bin.tmp"))?;
        self.bin.get_ref().sync_all().with_context(|| self.writing(".bin.tmp"))?;
        self.finish_index().with_context(|| self.writing(".idx.tmp"))?;
        let mask = self.mask.as_mut().map(MaskWriter::finish).transpose()?;
        let (idx_bytes, idx_hash) = hash_file(&with_suffix(&self.prefix, ".idx.tmp"))?;
        let written = Written {
            documents: self.documents,
            tokens: self.tokens,
            bin_bytes: self.tokens * self.token_type.bytes(),
            bin_xxh3_64: format!("{:016x}", self.bin_hash.finish()),
            idx_bytes,
            idx_xxh3_64: format!("{idx_hash:016x}"),
            mask,
        };
        let json = create_temporary(&with_suffix(&self.prefix, ".json.tmp"))?;
        (&json).write_all(sidecar(&written)?.as_bytes()).with_context(|| self.writing(".json.tmp"))?;
        json.sync_all().with_context(|| self.writing(".json.tmp"))?;
        self.companions.finish(tokenizer, self.token_type)?;
        failpoint::hit("shard.before_publish")?;
        self.rename_all()?;
        self.published = true;
        Ok(written)
    }

    /// Appends places and document borders to the lengths, and fills in the header.
    fn finish_index(&mut self) -> Result<()> {
        self.idx.flush()?;
        let mut lengths = BufReader::with_capacity(1 << 16, File::open(with_suffix(&self.prefix, ".idx.tmp"))?);
        lengths.seek(SeekFrom::Start(HEADER_BYTES))?;
        let mut byte = 0u64;
        for _ in 0..self.documents {
            let mut len = [0; 4];
            lengths.read_exact(&mut len)?;
            self.idx.write_all(&byte.to_le_bytes())?;
            byte += u64::from(u32::from_le_bytes(len)) * self.token_type.bytes();
        }
        for d in 0..=self.documents {
            self.idx.write_all(&d.to_le_bytes())?;
        }
        self.idx.seek(SeekFrom::Start(0))?;
        self.idx.write_all(MAGIC)?;
        self.idx.write_all(&VERSION.to_le_bytes())?;
        self.idx.write_all(&[self.token_type.code()])?;
        self.idx.write_all(&self.documents.to_le_bytes())?;
        self.idx.write_all(&(self.documents + 1).to_le_bytes())?;
        self.idx.flush()?;
        self.idx.get_ref().sync_all()?;
        Ok(())
    }

    fn rename_all(&mut self) -> Result<()> {
        let prefix = self.prefix.clone();
        let sync = || sync_directory_of(&prefix);
        // An index of an older shard must not meet a newer .bin, not even after a crash in between.
        if remove_if_there(&with_suffix(&self.prefix, ".idx"))? {
            sync()?;
        }
        let written = self.companions.suffixes();
        for suffix in companion_suffixes().filter(|suffix| !written.contains(suffix)) {
            remove_if_there(&with_suffix(&self.prefix, suffix))?;
        }
        match &mut self.mask {
            Some(mask) => drop(mask.publish()?),
            None => drop(remove_if_there(&with_suffix(&self.prefix, mask::SUFFIX))?),
        }
        let (last, first) = (SUFFIXES[SUFFIXES.len() - 1], &SUFFIXES[..SUFFIXES.len() - 1]);
        for suffix in first.iter().chain(&written).copied() {
            self.rename(suffix)?;
        }
        failpoint::hit("shard.before_index")?;
        self.rename(last)?;
        sync()
    }

    fn rename(&self, suffix: &str) -> Result<()> {
        let to = with_suffix(&self.prefix, suffix);
        let from = with_suffix(&to, ".tmp");
        std::fs::rename(&from, &to).with_context(|| format!("renaming {} to {}", from.display(), to.display()))
    }

    fn writing(&self, suffix: &str) -> String {
        format!("writing {}{suffix}", self.prefix.display())
    }
}

impl Drop for ShardWriter {
    fn drop(&mut self) {
        if !self.published {
            for suffix in SUFFIXES.into_iter().chain(self.companions.suffixes()) {
                // Best effort: a file that stays is overwritten by the next run.
                let _ = std::fs::remove_file(with_suffix(&self.prefix, &format!("{suffix}.tmp")));
            }
        }
    }
}

/// Refuses, before anything is read or written, a prefix that cannot become a shard; creates its directory.
pub fn check_prefix(prefix: &Path, overwrite: bool) -> Result<()> {
    let shown = prefix.display();
    let ends_in_slash = prefix.as_os_str().as_encoded_bytes().ends_with(b"/");
    if prefix.file_name().is_none() || ends_in_slash || prefix.is_dir() {
        return Err(bad_input(format!(
            "--output {shown} is a directory: give a prefix such as {}",
            prefix.join("train").display()
        )));
    }
    for suffix in all_suffixes() {
        let path = with_suffix(prefix, suffix);
        if path.exists() && !overwrite {
            return Err(bad_input(format!("{} exists: choose another --output, or replace it with --overwrite", path.display())));
        }
        if path.is_dir() {
            return Err(bad_input(format!("--output {shown}: {} is a directory", path.display())));
        }
    }
    let Some(parent) = prefix.parent().filter(|p| !p.as_os_str().is_empty()) else { return Ok(()) };
    std::fs::create_dir_all(parent)
        .map_err(|e| bad_input(format!("--output {shown}: the directory {} cannot be made: {e}", parent.display())))
}

/// Removes the files of a shard, its index first.
pub(super) fn remove_shard(prefix: &Path) -> Result<()> {
    for suffix in all_suffixes() {
        remove_if_there(&with_suffix(prefix, suffix))?;
    }
    Ok(())
}

/// True if there was such a file.
pub(super) fn remove_if_there(path: &Path) -> Result<bool> {
    match std::fs::remove_file(path) {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(e).with_context(|| format!("removing the old {}", path.display())),
    }
}

/// An empty file that this process alone writes, until it is closed.
pub(super) fn create_temporary(path: &Path) -> Result<File> {
    let failed = |e: std::io::Error| bad_input(format!("{} cannot be written: {e}", path.display()));
    let busy =
        || bad_input(format!("{} is being written by another process: wait for it, or choose another --output", path.display()));
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).map_err(failed)?;
    // Locked before it is emptied: a file that someone else is filling must stay whole.
    match file.try_lock() {
        Ok(()) => {}
        Err(std::fs::TryLockError::WouldBlock) => return Err(busy()),
        // A file system without locks: go on without one.
        Err(std::fs::TryLockError::Error(_)) => {}
    }
    if !is_same_file(&file, path) {
        return Err(busy());
    }
    file.set_len(0).map_err(failed)?;
    Ok(file)
}

/// Writes a whole file: temporary name, fsync, rename.
pub fn write_file(path: &Path, bytes: &[u8]) -> Result<()> {
    let temporary = with_suffix(path, ".tmp");
    let file = create_temporary(&temporary).with_context(|| format!("writing {}", path.display()))?;
    publish_file(&file, path, bytes).inspect_err(|_| drop(std::fs::remove_file(&temporary)))
}

/// Fills `file`, the temporary one of `path`, makes it durable and gives it its name.
pub(super) fn publish_file(mut file: &File, path: &Path, bytes: &[u8]) -> Result<()> {
    let mut write = || -> Result<()> {
        file.write_all(bytes)?;
        file.sync_all()?;
        std::fs::rename(with_suffix(path, ".tmp"), path)?;
        sync_directory_of(path)
    };
    write().with_context(|| format!("writing {}", path.display()))
}

/// Makes a rename in the directory of `path` durable.
fn sync_directory_of(path: &Path) -> Result<()> {
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    File::open(directory).and_then(|d| d.sync_all()).with_context(|| format!("syncing {}", directory.display()))
}

/// `path` still leads to `file`: its writer has not renamed it between our opening and our locking it.
fn is_same_file(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    match (file.metadata(), std::fs::metadata(path)) {
        (Ok(a), Ok(b)) => (a.dev(), a.ino()) == (b.dev(), b.ino()),
        _ => false,
    }
}

/// Size of a file and its XXH3.
pub(super) fn hash_file(path: &Path) -> Result<(u64, u64)> {
    let mut file = File::open(path).with_context(|| format!("reading {} back", path.display()))?;
    let (mut hash, mut bytes, mut buffer) = (XxHash3_64::new(), 0, vec![0; 1 << 18]);
    loop {
        let n = file.read(&mut buffer).with_context(|| format!("reading {} back", path.display()))?;
        if n == 0 {
            return Ok((bytes, hash.finish()));
        }
        hash.write(&buffer[..n]);
        bytes += n as u64;
    }
}
