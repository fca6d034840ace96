//! The safetensors files of a model directory: one `model.safetensors`, or shards with `model.safetensors.index.json`.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use safetensors::tensor::{Metadata, TensorInfo};
use serde_json::Value;

use super::StoredDtype;
use crate::error::bad_input;

pub(super) const SINGLE: &str = "model.safetensors";
pub(super) const INDEX: &str = "model.safetensors.index.json";

/// The largest header that safetensors readers accept.
const MAX_HEADER_BYTES: u64 = 100_000_000;
/// Bytes converted at a time when a tensor is read.
const CHUNK_BYTES: usize = 1 << 20;

/// One open file with its parsed header.
pub(super) struct Shard {
    pub path: PathBuf,
    file: File,
    /// Where the data begins.
    data_start: u64,
    pub tensors: HashMap<String, TensorInfo>,
}

impl Shard {
    fn open(path: &Path) -> Result<Self> {
        let damaged = |what: String| bad_input(format!("{} is not a whole safetensors file: {what}", path.display()));
        let mut file = File::open(path).map_err(|e| bad_input(format!("cannot open the weights {}: {e}", path.display())))?;
        let file_bytes = file.metadata().with_context(|| format!("reading the size of {}", path.display()))?.len();
        let mut length = [0u8; 8];
        file.read_exact(&mut length).map_err(|_| damaged(format!("it has {file_bytes} bytes, and a header needs 8")))?;
        let header_bytes = u64::from_le_bytes(length);
        if header_bytes > MAX_HEADER_BYTES || header_bytes + 8 > file_bytes {
            return Err(damaged(format!("its header claims {header_bytes} bytes, the file has {file_bytes}")));
        }
        let mut header = vec![0u8; header_bytes as usize];
        file.read_exact(&mut header).with_context(|| format!("reading the header of {}", path.display()))?;
        let metadata: Metadata =
            serde_json::from_slice(&header).map_err(|e| damaged(format!("its header cannot be used: {e}")))?;
        let (data_start, data_bytes) = (8 + header_bytes, metadata.data_len() as u64);
        // No overflow: the offsets were validated to be contiguous, but may still lie far beyond the file.
        if data_start.checked_add(data_bytes) != Some(file_bytes) {
            return Err(damaged(format!(
                "its header promises {data_bytes} bytes of tensors, the file has {} (was it copied completely?)",
                file_bytes - data_start
            )));
        }
        let tensors = metadata.tensors().into_iter().map(|(name, info)| (name, info.clone())).collect();
        Ok(Self { path: path.to_path_buf(), file, data_start, tensors })
    }

    /// Reads `out.len()` elements of a tensor, from element `first` on, as f32.
    pub fn read(&self, name: &str, info: &TensorInfo, dtype: StoredDtype, first: usize, out: &mut [f32]) -> Result<()> {
        let mut at = self.data_start + (info.data_offsets.0 + first * dtype.bytes()) as u64;
        let mut buffer = vec![0u8; CHUNK_BYTES.min(out.len() * dtype.bytes())];
        for part in out.chunks_mut(CHUNK_BYTES / dtype.bytes()) {
            let bytes = &mut buffer[..part.len() * dtype.bytes()];
            self.file.read_exact_at(bytes, at).with_context(|| format!("reading `{name}` from {}", self.path.display()))?;
            dtype.decode(bytes, part);
            at += bytes.len() as u64;
        }
        Ok(())
    }
}

/// Every tensor of a directory: which shard it is in.
pub(super) struct Shards {
    pub files: Vec<Shard>,
    /// Tensor name to index in `files`; sorted, so that complaints are.
    pub place: BTreeMap<String, usize>,
}

impl Shards {
    pub fn open(dir: &Path) -> Result<Self> {
        let (single, index) = (dir.join(SINGLE), dir.join(INDEX));
        // The order in which `transformers` looks.
        if single.exists() {
            let shard = Shard::open(&single)?;
            let place = shard.tensors.keys().map(|name| (name.clone(), 0)).collect();
            return Ok(Self { files: vec![shard], place });
        }
        if !index.exists() {
            let hint = if dir.join("pytorch_model.bin").exists() || dir.join("pytorch_model.bin.index.json").exists() {
                "; pytorch_model.bin files are not read, convert them to safetensors first"
            } else {
                ""
            };
            return Err(bad_input(format!("{} holds neither {SINGLE} nor {INDEX}{hint}", dir.display())));
        }
        Self::open_index(dir, &index)
    }

    fn open_index(dir: &Path, index: &Path) -> Result<Self> {
        let unusable = |what: String| bad_input(format!("{} cannot be used: {what}", index.display()));
        let text = std::fs::read(index).map_err(|e| unusable(e.to_string()))?;
        let value: Value = serde_json::from_slice(&text).map_err(|e| unusable(format!("it is not valid JSON: {e}")))?;
        let map = value
            .get("weight_map")
            .and_then(Value::as_object)
            .ok_or_else(|| unusable("it has no `weight_map` object from tensor to file name".into()))?;
        let mut names: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (tensor, file) in map {
            // A file name, not a path: an index must not reach outside its directory.
            let name = file.as_str().filter(|f| !f.is_empty() && Path::new(f).file_name().is_some_and(|n| n == *f));
            let name =
                name.ok_or_else(|| unusable(format!("`weight_map` puts `{tensor}` into {file}, which is not a file name")))?;
            names.entry(name).or_default().push(tensor);
        }
        if names.is_empty() {
            return Err(unusable("its `weight_map` is empty".into()));
        }
        let missing: Vec<_> = names.keys().filter(|name| !dir.join(name).is_file()).copied().collect();
        if !missing.is_empty() {
            return Err(bad_input(format!(
                "{} names {} of {} shards that are not in {}: {}. Download or copy them again",
                index.display(),
                missing.len(),
                names.len(),
                dir.display(),
                listed(missing.iter().copied())
            )));
        }
        let (mut files, mut place, mut absent) = (Vec::new(), BTreeMap::new(), Vec::new());
        for (number, (name, tensors)) in names.into_iter().enumerate() {
            let shard = Shard::open(&dir.join(name))?;
            for tensor in tensors {
                match shard.tensors.contains_key(tensor) {
                    true => _ = place.insert(tensor.to_string(), number),
                    false => absent.push(format!("`{tensor}` in {name}")),
                }
            }
            files.push(shard);
        }
        if !absent.is_empty() {
            return Err(bad_input(format!(
                "{} names tensors that its files do not hold: {}",
                index.display(),
                listed(absent.iter().map(String::as_str))
            )));
        }
        Ok(Self { files, place })
    }

    pub fn get(&self, name: &str) -> Option<(&Shard, &TensorInfo)> {
        let shard = &self.files[*self.place.get(name)?];
        Some((shard, shard.tensors.get(name)?))
    }
}

/// The first few of a list, and how many more there are.
pub(super) fn listed<'a>(items: impl ExactSizeIterator<Item = &'a str>) -> String {
    const SHOWN: usize = 8;
    let more = items.len().saturating_sub(SHOWN);
    let mut text = items.take(SHOWN).collect::<Vec<_>>().join(", ");
    if more > 0 {
        text += &format!(", and {more} more");
    }
    text
}
