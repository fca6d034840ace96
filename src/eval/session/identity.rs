//! What a model is, told by its contents.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rayon::prelude::*;
use sha2::{Digest, Sha256};

use crate::checkpoint::{MANIFEST, ModelSource};

/// A model by its contents.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// SHA-256, hexadecimal: of a checkpoint's manifest, which holds the hashes of its files; of a Hugging Face model's config and
    /// weight files.
    pub sha256: String,
    /// Optimizer steps taken, where the model says.
    pub step: Option<u64>,
    pub num_parameters: u64,
}

/// Reads what identifies `source`.
pub fn of(source: &ModelSource) -> Result<Identity> {
    let num_parameters = source.table().specs.iter().map(|s| s.numel() as u64).sum();
    let (files, step) = match source {
        ModelSource::Checkpoint { checkpoint, .. } => (vec![checkpoint.dir().join(MANIFEST)], Some(checkpoint.meta().step)),
        ModelSource::HuggingFace(model) => (hugging_face(&model.dir)?, None),
    };
    Ok(Identity { sha256: of_files(&files)?, step, num_parameters })
}

fn hugging_face(dir: &Path) -> Result<Vec<PathBuf>> {
    let listed = std::fs::read_dir(dir).with_context(|| format!("listing {}", dir.display()))?;
    let mut files = listed.map(|e| e.map(|e| e.path())).collect::<std::io::Result<Vec<_>>>()?;
    files.retain(|f| f.file_name().is_some_and(|n| n == "config.json") || f.extension().is_some_and(|e| e == "safetensors"));
    files.sort();
    Ok(files)
}

/// One hash of the names and contents of files.
fn of_files(files: &[PathBuf]) -> Result<String> {
    let each = files.par_iter().map(|f| sha256_of(f)).collect::<Result<Vec<_>>>()?;
    if let [one] = &each[..] {
        return Ok(one.clone());
    }
    let mut whole = Sha256::new();
    for (file, hash) in files.iter().zip(each) {
        whole.update(file.file_name().unwrap_or_default().as_encoded_bytes());
        whole.update(hash);
    }
    Ok(hex(whole))
}

/// SHA-256 of a file, hexadecimal.
pub fn sha256_of(path: &Path) -> Result<String> {
    let mut file = std::fs::File::open(path).with_context(|| format!("opening {}", path.display()))?;
    let mut hasher = Sha256::new();
    std::io::copy(&mut file, &mut hasher).with_context(|| format!("reading {}", path.display()))?;
    Ok(hex(hasher))
}

fn hex(hasher: Sha256) -> String {
    hasher.finalize().iter().map(|b| format!("{b:02x}")).collect()
}
