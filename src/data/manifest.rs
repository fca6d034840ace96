//! `PREFIX.manifest.json`: the shards `PREFIX_00000`, `PREFIX_00001`, ... that one run of `zaya tokenize` wrote. It is written last, so a set
//! that has one is complete.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::shard::with_suffix;
use super::sidecar::{EodInfo, Replaced, SelectionInfo, Sidecar, Skipped, SourceInfo, TokenizerInfo};
use crate::error::bad_input;
use crate::text::corpus::Place;

/// Value of `format`.
pub const FORMAT: &str = "zaya-shard-set-1";

/// Shards of a set at most: their numbers have five digits, so that names sort as numbers do.
pub const MOST_SHARDS: u32 = 100_000;
/// Digits of a shard's number.
pub const SHARD_DIGITS: usize = 5;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// [`FORMAT`].
    pub format: String,
    /// Program and version that wrote the set.
    pub tool: String,
    pub tokenizer: TokenizerInfo,
    pub eod: Option<EodInfo>,
    pub dtype: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selection: Option<SelectionInfo>,
    /// Hash of all that decides about the set's bytes, as in the parts' sidecars.
    pub set: String,
    pub documents: u64,
    pub tokens: u64,
    pub text_bytes: u64,
    pub skipped: Skipped,
    pub replaced: Replaced,
    pub unknown_tokens: u64,
    pub shards: Vec<ShardEntry>,
    /// Inputs in the order they were read; their counts sum to those above.
    pub sources: Vec<SourceInfo>,
}

/// One shard of a set.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ShardEntry {
    /// File name of its prefix.
    pub name: String,
    pub documents: u64,
    pub tokens: u64,
    pub text_bytes: u64,
    pub skipped: Skipped,
    pub replaced: Replaced,
    pub bin_bytes: u64,
    pub bin_xxh3_64: String,
    pub idx_bytes: u64,
    pub idx_xxh3_64: String,
    /// First record read for it: index in `sources`, line or row from 1 (0: a whole file), bytes of the file (decompressed)
    /// before it.
    pub from: Place,
    /// First record of the next shard.
    pub to: Place,
}

/// Prefix of shard `number` of the set `prefix`.
pub fn shard_prefix(prefix: &Path, number: u32) -> PathBuf {
    with_suffix(prefix, &format!("_{number:0SHARD_DIGITS$}"))
}

/// Path of the manifest of the set `prefix`.
pub fn manifest_path(prefix: &Path) -> PathBuf {
    with_suffix(prefix, ".manifest.json")
}

impl ShardEntry {
    /// Of the sidecar of a part.
    pub fn of(name: String, sidecar: &Sidecar) -> Result<Self> {
        let part = sidecar.part.as_ref().with_context(|| format!("{name}.json speaks of a shard that is no part of a set"))?;
        Ok(Self {
            name,
            documents: sidecar.documents,
            tokens: sidecar.tokens,
            text_bytes: sidecar.text_bytes,
            skipped: sidecar.skipped,
            replaced: sidecar.replaced,
            bin_bytes: sidecar.bin_bytes,
            bin_xxh3_64: sidecar.bin_xxh3_64.clone(),
            idx_bytes: sidecar.idx_bytes,
            idx_xxh3_64: sidecar.idx_xxh3_64.clone(),
            from: part.from,
            to: part.to,
        })
    }
}

impl Manifest {
    /// The manifest of the set `prefix`; None where there is none.
    pub fn read(prefix: &Path) -> Result<Option<Self>> {
        let path = manifest_path(prefix);
        let bytes = match std::fs::read(&path) {
            Ok(bytes) => bytes,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e).with_context(|| format!("reading {}", path.display())),
        };
        let manifest: Self = serde_json::from_slice(&bytes)
            .map_err(|e| bad_input(format!("{} is no manifest of a set of shards: {e}", path.display())))?;
        if manifest.format != FORMAT {
            let found = &manifest.format;
            return Err(bad_input(format!("{} has the format `{found}`; this zaya reads `{FORMAT}`", path.display())));
        }
        Ok(Some(manifest))
    }

    /// Prefixes of the shards of the set at `prefix`.
    pub fn shards_at(&self, prefix: &Path) -> Vec<PathBuf> {
        self.shards.iter().map(|s| prefix.with_file_name(&s.name)).collect()
    }
}
