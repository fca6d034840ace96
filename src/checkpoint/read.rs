//! Opening a checkpoint, reading tensors of it, and verifying it whole. Nothing is believed without its hash.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use rayon::prelude::*;
use serde_json::Value;
use twox_hash::XxHash3_128;

use super::MANIFEST;
use super::layout::{METADATA, TensorInfo, metadata, part_shape};
use super::manifest::{Contents, Entry, FileEntry, Manifest, Meta};
use super::stream::{Files, TensorStream};
use crate::model::numbers::Numbers;

/// Bytes verified at a time.
const BUFFER_BYTES: usize = 1 << 20;
/// A safetensors header larger than this is not one (the format's own limit).
const MAX_HEADER_BYTES: u64 = 100 << 20;

/// What is compared when a checkpoint is verified.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Hashes {
    /// Of each tensor's row blocks.
    Tensors,
    /// These, and of each file.
    All,
}

/// An open checkpoint. Its manifest is checked; a tensor's data is checked when it is read.
#[derive(Debug)]
pub struct Checkpoint {
    files: Files,
    manifest: Manifest,
    index: HashMap<String, usize>,
}

impl Checkpoint {
    /// Opens a checkpoint folder: its manifest must match its own checksum, every file must be there with the right size.
    ///
    /// # Errors
    /// A sentence that says what is missing or damaged.
    pub fn open(dir: &Path) -> Result<Self> {
        let path = dir.join(MANIFEST);
        let bytes = std::fs::read(&path).with_context(|| format!("reading {}", path.display()))?;
        let manifest = Manifest::parse(&bytes).with_context(|| format!("reading {}", path.display()))?;
        for f in &manifest.files {
            let path = dir.join(&f.name);
            let size = std::fs::metadata(&path).with_context(|| format!("looking at {}", path.display()))?.len();
            ensure!(size == f.size, "{} has {size} bytes, the manifest says {}", path.display(), f.size);
        }
        let index = manifest.entries.iter().enumerate().map(|(i, e)| (e.name.clone(), i)).collect();
        Ok(Self { files: Files::new(dir), manifest, index })
    }

    pub fn dir(&self) -> &Path {
        &self.files.dir
    }
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }
    pub fn meta(&self) -> &Meta {
        &self.manifest.meta
    }
    pub fn contents(&self) -> Contents {
        self.manifest.contents
    }
    /// Every tensor, in the order of the manifest.
    pub fn tensors(&self) -> Vec<TensorInfo> {
        let info = |e: &Entry| TensorInfo { name: e.name.clone(), shape: e.shape.clone(), dtype: e.dtype };
        self.manifest.entries.iter().map(info).collect()
    }
    pub fn entry(&self, name: &str) -> Option<&Entry> {
        self.index.get(name).map(|i| &self.manifest.entries[*i])
    }

    /// Are exactly these tensors here, in these shapes? Number formats may differ.
    ///
    /// # Errors
    /// Names what is missing, unexpected, or of another shape.
    pub fn expect(&self, wanted: &[TensorInfo]) -> Result<()> {
        let mut wrong = Vec::new();
        let names: HashMap<&str, &TensorInfo> = wanted.iter().map(|t| (t.name.as_str(), t)).collect();
        for t in wanted {
            match self.entry(&t.name) {
                None => wrong.push(format!("{} is missing", t.name)),
                Some(e) if e.shape != t.shape => {
                    wrong.push(format!("{} has shape {:?} where {:?} is expected", t.name, e.shape, t.shape));
                }
                Some(_) => {}
            }
        }
        let unexpected = self.manifest.entries.iter().filter(|e| !names.contains_key(e.name.as_str()));
        wrong.extend(unexpected.map(|e| format!("{} is not expected", e.name)));
        if wrong.is_empty() {
            return Ok(());
        }
        let shown = wrong.len().min(8);
        let more = if wrong.len() > shown { format!(", and {} more", wrong.len() - shown) } else { String::new() };
        bail!("{} holds other tensors than this run needs: {}{more}", self.files.dir.display(), wrong[..shown].join("; "));
    }

    /// Reads one tensor, `[numel]`, and checks the hash of every byte of it.
    ///
    /// # Errors
    /// When there is no such tensor, or when a byte of it is not the one that was written.
    pub fn read(&self, name: &str) -> Result<Vec<f32>> {
        let mut out = vec![0f32; self.needed(name)?.shape.iter().product()];
        self.read_into(name, &mut out)?;
        Ok(out)
    }

    /// As [`Checkpoint::read`], into memory that is there already; after an error it holds anything.
    ///
    /// # Errors
    /// Also when there are more or fewer numbers than `out` has room for.
    pub fn read_into(&self, name: &str, out: &mut [f32]) -> Result<()> {
        let entry = self.needed(name)?;
        let numbers: usize = entry.shape.iter().product();
        ensure!(out.len() == numbers, "tensor {name} has {numbers} numbers where {} are expected", out.len());
        TensorStream::new(&self.files, entry).fill(out)
    }

    /// One tensor from its first number to its last, piece by piece. Each row block's hash is checked with its last number: until then
    /// its numbers are not to be believed.
    ///
    /// # Errors
    /// When there is no such tensor; of the stream, when a byte is not the one that was written.
    pub fn numbers(&self, name: &str) -> Result<Numbers<'_>> {
        let mut stream = TensorStream::new(&self.files, self.needed(name)?);
        Ok(Box::new(move |out| stream.fill(out)))
    }

    fn needed(&self, name: &str) -> Result<&Entry> {
        self.entry(name).with_context(|| format!("the checkpoint {} holds no tensor {name}", self.files.dir.display()))
    }

    /// As [`Checkpoint::read`], for a tensor whose shape is known.
    ///
    /// # Errors
    /// Also when the shape is another one.
    pub fn read_shaped(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        self.expect_shape(name, shape)?;
        self.read(name)
    }

    /// As [`Checkpoint::numbers`], of a tensor whose shape is known.
    ///
    /// # Errors
    /// Also when the shape is another one.
    pub fn numbers_shaped(&self, name: &str, shape: &[usize]) -> Result<Numbers<'_>> {
        self.expect_shape(name, shape)?;
        self.numbers(name)
    }

    fn expect_shape(&self, name: &str, shape: &[usize]) -> Result<()> {
        match self.entry(name) {
            Some(e) if e.shape != shape => bail!("tensor {name} has shape {:?} where {shape:?} is expected", e.shape),
            _ => Ok(()),
        }
    }

    /// Reads every byte of every file and compares it with the manifest's hashes, of files and of tensors; also compares each file's
    /// own header.
    ///
    /// # Errors
    /// Names the file, and the tensor where the damage lies in one.
    pub fn verify(&self) -> Result<()> {
        self.verify_files(Hashes::All)
    }

    /// As [`Checkpoint::verify`] without the hashes of whole files, which cost several times as much: whatever can be read of a
    /// checkpoint is read and compared, so nothing wrong can be loaded after it.
    ///
    /// # Errors
    /// As [`Checkpoint::verify`].
    pub fn verify_tensors(&self) -> Result<()> {
        self.verify_files(Hashes::Tensors)
    }

    fn verify_files(&self, hashes: Hashes) -> Result<()> {
        self.manifest.files.par_iter().map(|f| self.verify_file(f, hashes)).collect::<Vec<_>>().into_iter().collect()
    }

    fn verify_file(&self, entry: &FileEntry, hashes: Hashes) -> Result<()> {
        let path = self.files.dir.join(&entry.name);
        let what = || format!("verifying {}", path.display());
        let mut file = File::open(&path).with_context(what)?;
        let parts = self.manifest.parts_of(&entry.name);
        let data_start = self.verify_header(&file, &parts).with_context(what)?;

        // One pass: the whole file's hash, and each part's, so that the damage can be named.
        let mut whole = (hashes == Hashes::All).then(blake3::Hasher::new);
        let mut buffer = vec![0; BUFFER_BYTES];
        let mut take = |file: &mut File, bytes: u64, mut part: Option<&mut XxHash3_128>| -> Result<()> {
            let mut left = bytes;
            while left > 0 {
                let n = left.min(BUFFER_BYTES as u64) as usize;
                file.read_exact(&mut buffer[..n]).with_context(what)?;
                if let Some(whole) = &mut whole {
                    whole.update(&buffer[..n]);
                }
                if let Some(hash) = part.as_deref_mut() {
                    hash.write(&buffer[..n]);
                }
                left -= n as u64;
            }
            Ok(())
        };
        take(&mut file, data_start, None)?;
        for (tensor, part, _) in &parts {
            let mut hash = XxHash3_128::new();
            take(&mut file, part.bytes[1] - part.bytes[0], Some(&mut hash))?;
            ensure!(
                format!("{:032x}", hash.finish_128()) == part.xxh3,
                "{} is damaged: rows {}..{} of tensor {} are not what was written",
                path.display(),
                part.rows[0],
                part.rows[1],
                tensor.name
            );
        }
        ensure!(file.read(&mut [0; 1]).with_context(what)? == 0, "{} has bytes behind its last tensor", path.display());
        let same = whole.is_none_or(|whole| whole.finalize().to_hex().as_str() == entry.blake3);
        ensure!(same, "{} is damaged: its hash is another one", path.display());
        Ok(())
    }

    /// Compares a file's safetensors header with the manifest, and returns where the data begins. The parts must cover the
    /// data without holes.
    fn verify_header(&self, file: &File, parts: &[(&Entry, &super::Part, String)]) -> Result<u64> {
        let mut length = [0; 8];
        file.read_exact_at(&mut length, 0)?;
        let length = u64::from_le_bytes(length);
        ensure!(length <= MAX_HEADER_BYTES, "its header claims {length} bytes");
        let mut text = vec![0; length as usize];
        file.read_exact_at(&mut text, 8).context("its header is cut off")?;
        let header: serde_json::Map<String, Value> = serde_json::from_slice(&text).context("its header is not JSON")?;
        let data_start = 8 + length;
        let mut next = data_start;
        for (entry, part, key) in parts {
            ensure!(part.bytes[0] == next, "the manifest leaves bytes {next}..{} without a tensor", part.bytes[0]);
            next = part.bytes[1];
            let here = header.get(key).with_context(|| format!("its header has no tensor {key}"))?;
            let same = here["dtype"] == entry.dtype.name()
                && here["shape"] == Value::from(part_shape(&entry.shape, &(part.rows[0]..part.rows[1])))
                && here["data_offsets"] == Value::from(part.bytes.map(|b| b - data_start).to_vec());
            ensure!(same, "its header describes tensor {key} otherwise than the manifest");
        }
        ensure!(header.get(METADATA) == Some(&metadata()), "its header says something else about the file than was written");
        let in_header = header.len() - 1;
        ensure!(in_header == parts.len(), "its header has {in_header} tensors, the manifest {}", parts.len());
        Ok(data_start)
    }
}
