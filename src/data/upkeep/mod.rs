//! What is done with token shards that are there: verifying, merging, measuring, reading.

mod merge;
mod stats;
mod verify;

use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};

pub use merge::merge;
pub use stats::{Bucket, Lengths, Stats, stats};
pub use verify::{Verified, verify};

use super::manifest::{Manifest, manifest_path, shard_prefix};
use super::mask;
use super::shard::{prefix_of, with_suffix};
use super::sidecar::Sidecar;
use super::writer::hash_file;
use crate::error::bad_input;

/// The shards that a prefix names: itself, or those of a set.
///
/// # Errors
/// Where there is neither, and where a set has no manifest: then it is not complete.
pub fn shards_of(path: &Path) -> Result<(Vec<PathBuf>, Option<Manifest>)> {
    let text = path.to_string_lossy();
    let prefix = text.strip_suffix(".manifest.json").map_or_else(|| prefix_of(path), PathBuf::from);
    if with_suffix(&prefix, ".idx").exists() {
        return Ok((vec![prefix], None));
    }
    if let Some(manifest) = Manifest::read(&prefix)? {
        return Ok((manifest.shards_at(&prefix), Some(manifest)));
    }
    let first = shard_prefix(&prefix, 0);
    if with_suffix(&first, ".idx").exists() {
        return Err(bad_input(format!(
            "the set {} is not complete: there is no {}; repeat the command that writes it with --resume",
            prefix.display(),
            manifest_path(&prefix).display()
        )));
    }
    Err(bad_input(format!("there is no token shard {0}.idx, and no set {0}.manifest.json", prefix.display())))
}

/// Compares sizes and hashes of a shard's files with its sidecar.
pub fn check_hashes(prefix: &Path, sidecar: &Sidecar) -> Result<()> {
    let pair = [(".bin", sidecar.bin_bytes, &sidecar.bin_xxh3_64), (".idx", sidecar.idx_bytes, &sidecar.idx_xxh3_64)];
    let mask = sidecar.chat.as_ref().map(|chat| (mask::SUFFIX, chat.mask_bytes, &chat.mask_xxh3_64));
    for (suffix, bytes, hash) in pair.into_iter().chain(mask) {
        let path = with_suffix(prefix, suffix);
        let (found, found_hash) = hash_file(&path)?;
        ensure!(found == bytes, "{} has {found} bytes, its sidecar says {bytes}: it was cut, or replaced", path.display());
        let found_hash = format!("{found_hash:016x}");
        ensure!(found_hash == *hash, "{} is damaged: its XXH3 is {found_hash}, its sidecar says {hash}", path.display());
    }
    Ok(())
}
