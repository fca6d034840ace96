//! One tensor of a checkpoint, read from its first number to its last, and hashed on the way.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use xxhash_rust::xxh3::Xxh3;

use super::layout::Dtype;
use super::manifest::Entry;
use super::write::decode;

/// Bytes read at a time; a multiple of every number format's size.
const BUFFER_BYTES: usize = 1 << 20;

/// A row block's hash is known at its end: whoever has taken its last number has taken numbers that are right, and before that
/// nothing may be made of them that outlives an error.
pub(super) struct TensorStream<'a> {
    dir: &'a Path,
    entry: &'a Entry,
    /// The row block that comes next, or that is being read.
    part: usize,
    file: Option<File>,
    /// Bytes of the block that have been read, and their hash.
    taken: u64,
    hash: Xxh3,
    buffer: Vec<u8>,
}

impl<'a> TensorStream<'a> {
    pub fn new(dir: &'a Path, entry: &'a Entry) -> Self {
        Self { dir, entry, part: 0, file: None, taken: 0, hash: Xxh3::new(), buffer: Vec::new() }
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
            let path = || self.dir.join(&part.file);
            let what = || format!("reading tensor {} from {}", self.entry.name, path().display());
            let file = match &self.file {
                Some(file) => file,
                None => self.file.insert(File::open(path()).with_context(what)?),
            };
            let at = part.bytes[0] + self.taken;
            let n = (out.len() as u64 * dtype.bytes()).min(part.bytes[1] - at).min(BUFFER_BYTES as u64);
            let (numbers, rest) = out.split_at_mut((n / dtype.bytes()) as usize);
            if dtype == Dtype::F32 && cfg!(target_endian = "little") {
                // As they lie on the disk, numbers are read right into their place.
                let bytes = bytemuck::cast_slice_mut(numbers);
                file.read_exact_at(bytes, at).with_context(what)?;
                self.hash.update(bytes);
            } else {
                self.buffer.resize(n as usize, 0);
                file.read_exact_at(&mut self.buffer, at).with_context(what)?;
                self.hash.update(&self.buffer);
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
                format!("{:032x}", self.hash.digest128()) == part.xxh3,
                "{} is damaged: rows {}..{} of tensor {} (bytes {}..{}) are not what was written",
                self.dir.join(&part.file).display(),
                part.rows[0],
                part.rows[1],
                self.entry.name,
                part.bytes[0],
                part.bytes[1]
            );
            (self.part, self.file, self.taken) = (self.part + 1, None, 0);
            self.hash.reset();
        }
        Ok(())
    }
}
