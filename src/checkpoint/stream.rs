//! One tensor of a checkpoint, read from its first number to its last, and hashed on the way.

use std::collections::VecDeque;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, ensure};
use twox_hash::XxHash3_128;

use super::layout::Dtype;
use super::manifest::Entry;
use super::write::decode;

/// Bytes read at a time; a multiple of every number format's size.
const BUFFER_BYTES: usize = 1 << 20;

/// Files that stay open.
const OPEN_FILES: usize = 16;

/// The files of a checkpoint's folder. The ones that were opened last stay open: tensors that follow one another in a file are read in one go,
/// which the system sees and reads ahead.
#[derive(Debug)]
pub(super) struct Files {
    pub dir: PathBuf,
    open: Mutex<VecDeque<(String, Arc<File>)>>,
}

impl Files {
    pub fn new(dir: &Path) -> Self {
        Self { dir: dir.to_path_buf(), open: Mutex::default() }
    }

    fn open(&self, name: &str) -> std::io::Result<Arc<File>> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, file)) = open.iter().find(|(n, _)| n == name) {
            return Ok(file.clone());
        }
        let file = Arc::new(File::open(self.dir.join(name))?);
        open.truncate(OPEN_FILES - 1);
        open.push_front((name.to_string(), file.clone()));
        Ok(file)
    }
}

/// A row block's hash is known at its end: whoever has taken its last number has taken numbers that are right, and before that
/// nothing may be made of them that outlives an error.
pub(super) struct TensorStream<'a> {
    files: &'a Files,
    entry: &'a Entry,
    /// The row block that comes next, or that is being read.
    part: usize,
    file: Option<Arc<File>>,
    /// Bytes of the block that have been read, and their hash.
    taken: u64,
    hash: XxHash3_128,
    buffer: Vec<u8>,
}

impl<'a> TensorStream<'a> {
    pub fn new(files: &'a Files, entry: &'a Entry) -> Self {
        Self { files, entry, part: 0, file: None, taken: 0, hash: XxHash3_128::new(), buffer: Vec::new() }
    }

    /// Fills `out` with the numbers that follow, and checks each row block that ends with them.
    ///
    /// # Errors
    /// When a file cannot be read, when a row block is not what was written, or when the tensor has fewer numbers.
    pub fn fill(&mut self, mut out: &mut [f32]) -> Result<()> {
        let dtype = self.entry.dtype;
        loop {
            self.check_ended()?;
            if out.is_empty() {
                return Ok(());
            }
            let part = self.entry.parts.get(self.part);
            let part = part.with_context(|| format!("tensor {} has fewer numbers than are asked for", self.entry.name))?;
            let path = || self.files.dir.join(&part.file);
            let what = || format!("reading tensor {} from {}", self.entry.name, path().display());
            let file = match &self.file {
                Some(file) => file,
                None => self.file.insert(self.files.open(&part.file).with_context(what)?),
            };
            let at = part.bytes[0] + self.taken;
            let direct = dtype == Dtype::F32 && cfg!(target_endian = "little");
            let most = if direct { u64::MAX } else { BUFFER_BYTES as u64 };
            let n = (out.len() as u64 * dtype.bytes()).min(part.bytes[1] - at).min(most);
            let (numbers, rest) = out.split_at_mut((n / dtype.bytes()) as usize);
            if direct {
                // As they lie on the disk, numbers are read right into their place.
                read_and_hash(file, at, bytemuck::cast_slice_mut(numbers), &mut self.hash).with_context(what)?;
            } else {
                self.buffer.resize(n as usize, 0);
                file.read_exact_at(&mut self.buffer, at).with_context(what)?;
                self.hash.write(&self.buffer);
                decode(dtype, &self.buffer, numbers);
            }
            self.taken += n;
            out = rest;
        }
    }

    /// Compares the hash of a row block that has been read to its end, and goes on to the next one.
    fn check_ended(&mut self) -> Result<()> {
        while let Some(part) = self.entry.parts.get(self.part).filter(|p| p.bytes[0] + self.taken == p.bytes[1]) {
            ensure!(
                format!("{:032x}", self.hash.finish_128()) == part.xxh3,
                "{} is damaged: rows {}..{} of tensor {} (bytes {}..{}) are not what was written",
                self.files.dir.join(&part.file).display(),
                part.rows[0],
                part.rows[1],
                self.entry.name,
                part.bytes[0],
                part.bytes[1]
            );
            (self.part, self.file, self.taken) = (self.part + 1, None, 0);
            self.hash = XxHash3_128::new();
        }
        Ok(())
    }
}

/// Reads a piece of a file and hashes it, while each part of it lies in the cache.
fn read_and_hash(file: &File, at: u64, bytes: &mut [u8], hash: &mut XxHash3_128) -> std::io::Result<()> {
    for (chunk, at) in bytes.chunks_mut(BUFFER_BYTES).zip((at..).step_by(BUFFER_BYTES)) {
        file.read_exact_at(chunk, at)?;
        hash.write(chunk);
    }
    Ok(())
}
