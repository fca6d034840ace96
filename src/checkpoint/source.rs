//! Weights to evaluate, to generate with or to convert: a Hugging Face directory, a checkpoint, or a run directory.

use std::path::{Path, PathBuf};

use anyhow::Result;

use super::{Checkpoint, MANIFEST, locate};
use crate::error::bad_input;
use crate::hf::{self, HfModel, StoredDtype};
use crate::model::numbers::Numbers;
use crate::model::params::{ParamId, ParamTable};
use crate::model::{ModelConfig, ParamStore};
use crate::recipe::{self, Recipe};
use crate::tensor::Backend;
use crate::tensor::backend::Precision;

/// An open model. Weights stay on disk until they are read.
pub enum ModelSource {
    HuggingFace(Box<HfModel>),
    Checkpoint { checkpoint: Box<Checkpoint>, table: ParamTable },
}

/// The checkpoint that `path` means; tells on stderr what was passed over, and which one it is.
///
/// # Errors
/// `BadInput` when there is no valid one.
pub fn open_checkpoint(path: &Path) -> Result<Checkpoint> {
    let found = locate(path)?;
    found.skipped.iter().for_each(|s| tell!("warning: {s}"));
    let checkpoint = found.checkpoint.ok_or_else(|| bad_input(format!("{} holds no valid checkpoint", path.display())))?;
    if checkpoint.dir() != path {
        tell!("reading {}", checkpoint.dir().display());
    }
    Ok(checkpoint)
}

impl ModelSource {
    /// Opens whatever `path` is. What was passed over or is worth knowing is told on stderr.
    ///
    /// # Errors
    /// `BadInput` when it is none of the three, or damaged.
    pub fn open(path: &Path) -> Result<Self> {
        if !path.is_dir() {
            return Err(bad_input(format!(
                "{} is not a folder: expected a Hugging Face model, a checkpoint or a run directory",
                path.display()
            )));
        }
        if path.join("config.json").is_file() && !path.join(MANIFEST).is_file() {
            let model = hf::load(path)?;
            model.notes.iter().for_each(|n| tell!("note: {n}"));
            return Ok(Self::HuggingFace(Box::new(model)));
        }
        let checkpoint = open_checkpoint(path)?;
        let table = ParamTable::new(&checkpoint.meta().model);
        Ok(Self::Checkpoint { checkpoint: Box::new(checkpoint), table })
    }

    pub fn config(&self) -> &ModelConfig {
        match self {
            Self::HuggingFace(model) => &model.config,
            Self::Checkpoint { checkpoint, .. } => &checkpoint.meta().model,
        }
    }

    pub fn table(&self) -> &ParamTable {
        match self {
            Self::HuggingFace(model) => &model.table,
            Self::Checkpoint { table, .. } => table,
        }
    }

    /// Values of one parameter in its logical shape, verified where the source has hashes.
    pub fn read(&self, id: ParamId) -> Result<Vec<f32>> {
        match self {
            Self::HuggingFace(model) => model.read(id),
            Self::Checkpoint { checkpoint, table } => checkpoint.read_shaped(&table.specs[id].name, &table.specs[id].shape),
        }
    }

    /// As [`ModelSource::read`], piece by piece. Where the source has hashes, each is checked with the last number that it covers.
    pub fn numbers(&self, id: ParamId) -> Result<Numbers<'_>> {
        match self {
            Self::HuggingFace(model) => Ok(model.numbers(id)),
            Self::Checkpoint { checkpoint, table } => checkpoint.numbers_shaped(&table.specs[id].name, &table.specs[id].shape),
        }
    }

    /// All weights on a backend.
    pub fn params<B: Backend>(&self, backend: &B) -> Result<ParamStore<B>> {
        ParamStore::from_host(backend, self.table(), |id| self.read(id))
    }

    /// Arithmetic the model was made for: bf16 for files in bf16 and runs with `train.precision = "bf16"`.
    pub fn precision(&self) -> Precision {
        match self {
            Self::HuggingFace(model) if model.dtype == StoredDtype::Bf16 => Precision::Bf16,
            Self::HuggingFace(_) => Precision::F32,
            Self::Checkpoint { .. } => self.recipe().map_or(Precision::F32, |r| r.train.precision),
        }
    }

    /// The recipe that a checkpoint was trained by, where it holds one: that of its stage, if the run has several.
    pub fn recipe(&self) -> Option<Recipe> {
        match self {
            Self::HuggingFace(_) => None,
            Self::Checkpoint { checkpoint, .. } => {
                let whole = recipe::load_resolved(&checkpoint.dir().display().to_string(), &checkpoint.meta().recipe).ok()?;
                // The stage that made the last step.
                whole.stage(whole.stage_at(checkpoint.meta().step.saturating_sub(1)))
            }
        }
    }

    /// Tells the user when `tokenizer` is not the file that the model was trained with, where the model says which that is.
    pub fn warn_of_other_tokenizer(&self, tokenizer: &Path) -> Result<()> {
        let Self::Checkpoint { checkpoint, .. } = self else { return Ok(()) };
        if let Some(hash) = &checkpoint.meta().tokenizer_hash
            && crate::text::tokenizer_sha256(tokenizer)? != *hash
        {
            tell!(
                "warning: {} is not the tokenizer that the model was trained with: its ids mean other text",
                tokenizer.display()
            );
        }
        Ok(())
    }

    /// The model's `tokenizer.json`: beside a Hugging Face model, in a checkpoint's run directory, or where the recipe had
    /// it. Of a checkpoint only the file that it was trained with counts.
    pub fn tokenizer(&self) -> Option<PathBuf> {
        match self {
            Self::HuggingFace(model) => model.tokenizer(),
            Self::Checkpoint { checkpoint, .. } => {
                let run_dir = checkpoint.dir().ancestors().nth(2).map(|run| run.join("tokenizer.json"));
                let of_recipe = self.recipe().and_then(|r| r.tokenizer);
                let hash = checkpoint.meta().tokenizer_hash.as_deref();
                let is_it = |path: &PathBuf| {
                    path.is_file() && hash.is_none_or(|h| crate::text::tokenizer_sha256(path).is_ok_and(|own| own == h))
                };
                run_dir.into_iter().chain(of_recipe).find(is_it)
            }
        }
    }
}
