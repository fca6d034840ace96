//! Opening a Hugging Face directory and reading parameters from it, one at a time.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};

use super::StoredDtype;
use super::config::{self, Schema};
use super::names::{FileTensor, Layout, file_tensors};
use super::shards::{Shards, listed};
use crate::error::bad_input;
use crate::model::config::ModelConfig;
use crate::model::numbers::Numbers;
use crate::model::params::{ParamId, ParamTable};

/// The tied head, which some programs store beside the embedding.
const LM_HEAD: &str = "lm_head.weight";
/// Tensors that hold nothing: RoPE's frequencies follow from the config.
const COMPUTED: &str = "rotary_emb.inv_freq";

/// An open model directory, checked to be complete. Weights stay on disk until they are read.
pub struct HfModel {
    pub dir: PathBuf,
    pub config: ModelConfig,
    pub schema: Schema,
    pub layout: Layout,
    /// Format of the embedding, which stands for the model; single tensors may be stored otherwise.
    pub dtype: StoredDtype,
    pub table: ParamTable,
    /// What a user may want to know: nothing in it keeps the model from working.
    pub notes: Vec<String>,
    shards: Shards,
    /// By parameter: tensor name, format, and first element there.
    sources: Vec<(String, StoredDtype, usize)>,
}

/// Opens the model in `dir`: reads `config.json` and the headers of its weight files, and checks that every parameter is there in
/// the right shape and nothing else is.
///
/// # Errors
/// [`crate::error::BadInput`] for whatever is wrong with the directory: it names files, keys and tensors, several at once.
pub fn load(dir: &Path) -> Result<HfModel> {
    if !dir.is_dir() {
        return Err(bad_input(format!(
            "{} is not a directory; a Hugging Face model is one, with a config.json in it",
            dir.display()
        )));
    }
    let (config, schema) = config::read(&dir.join("config.json"))?;
    let shards = Shards::open(dir)?;
    let table = ParamTable::new(&config);

    let candidates = Layout::ALL.map(|layout| (layout, file_tensors(&table, layout)));
    let hits = |tensors: &[FileTensor]| tensors.iter().filter(|t| shards.place.contains_key(&t.name)).count();
    let (layout, tensors) = candidates.into_iter().rev().max_by_key(|(_, tensors)| hits(tensors)).expect("three layouts");
    let mut notes = Vec::new();
    let mut problems = Vec::new();

    let missing: Vec<&str> = tensors.iter().map(|t| t.name.as_str()).filter(|n| !shards.place.contains_key(*n)).collect();
    if !missing.is_empty() {
        problems.push(format!("{} of {} tensors are missing: {}", missing.len(), tensors.len(), listed(missing.iter().copied())));
    }
    let known: HashSet<&str> = tensors.iter().map(|t| t.name.as_str()).collect();
    let unexpected: Vec<&str> = shards
        .place
        .keys()
        .map(String::as_str)
        .filter(|n| !known.contains(n) && *n != LM_HEAD && !n.ends_with(COMPUTED))
        .collect();
    if !unexpected.is_empty() {
        problems.push(format!("{} tensors belong to no ZAYA model: {}", unexpected.len(), listed(unexpected.iter().copied())));
    }

    let mut sources = vec![(String::new(), StoredDtype::F32, 0); table.specs.len()];
    let (mut wrong_shape, mut wrong_dtype) = (Vec::new(), Vec::new());
    for tensor in &tensors {
        let Some((shard, info)) = shards.get(&tensor.name) else { continue };
        if info.shape != tensor.shape {
            wrong_shape.push(format!("`{}` is {:?}, the config asks for {:?}", tensor.name, info.shape, tensor.shape));
        }
        let Some(dtype) = StoredDtype::of(info.dtype) else {
            wrong_dtype.push(format!("`{}` in {} is {:?}", tensor.name, shard.path.display(), info.dtype));
            continue;
        };
        for (slot, &id) in tensor.params.iter().enumerate() {
            sources[id] = (tensor.name.clone(), dtype, slot * table.specs[id].numel());
        }
    }
    if !wrong_shape.is_empty() {
        problems.push(format!("tensors of another shape: {}", listed(wrong_shape.iter().map(String::as_str))));
    }
    if !wrong_dtype.is_empty() {
        problems.push(format!("only F32, BF16 and F16 can be read: {}", listed(wrong_dtype.iter().map(String::as_str))));
    }
    if !problems.is_empty() {
        return Err(bad_input(format!(
            "the weights in {} do not fit its config.json ({} schema, {} layout):\n  - {}",
            dir.display(),
            schema.name(),
            layout.name(),
            problems.join("\n  - ")
        )));
    }

    let dtype = sources[table.embed].1;
    let mut model = HfModel { dir: dir.to_path_buf(), config, schema, layout, dtype, table, notes: Vec::new(), shards, sources };
    if model.shards.place.contains_key(LM_HEAD) {
        model.check_head_is_tied()?;
        notes.push(format!("`{LM_HEAD}` is stored although it equals the embedding; it is ignored"));
    }
    model.notes = notes;
    Ok(model)
}

impl HfModel {
    /// The values of one parameter, row by row in its logical shape.
    pub fn read(&self, id: ParamId) -> Result<Vec<f32>> {
        let mut out = vec![0.0; self.table.specs[id].numel()];
        self.read_into(id, &mut out)?;
        Ok(out)
    }

    /// As [`HfModel::read`], into a buffer of the parameter's size.
    pub fn read_into(&self, id: ParamId, out: &mut [f32]) -> Result<()> {
        let (name, dtype, first) = &self.sources[id];
        assert_eq!(out.len(), self.table.specs[id].numel(), "buffer for {}", self.table.specs[id].name);
        let (shard, info) = self.shards.get(name).expect("load() found every tensor");
        shard.read(name, info, *dtype, *first, out)
    }

    /// The values of one parameter from the first to the last, piece by piece.
    pub fn numbers(&self, id: ParamId) -> Numbers<'_> {
        let (name, dtype, first) = &self.sources[id];
        let mut at = *first;
        let end = first + self.table.specs[id].numel();
        Box::new(move |out| {
            // Behind it the next expert's values may lie.
            ensure!(out.len() <= end - at, "`{}` has fewer numbers than are asked for", self.table.specs[id].name);
            let (shard, info) = self.shards.get(name).expect("load() found every tensor");
            shard.read(name, info, *dtype, at, out)?;
            at += out.len();
            Ok(())
        })
    }

    /// `tokenizer.json`, when the directory has one.
    pub fn tokenizer(&self) -> Option<PathBuf> {
        Some(self.dir.join("tokenizer.json")).filter(|path| path.is_file())
    }

    /// Refuses a head that is not the embedding: the model would compute something else.
    fn check_head_is_tied(&self) -> Result<()> {
        let (name, embed_dtype, _) = &self.sources[self.table.embed];
        let (Some((shard, info)), Some((embed_shard, embed_info))) = (self.shards.get(LM_HEAD), self.shards.get(name)) else {
            return Ok(());
        };
        let differs = |how: String| {
            bad_input(format!(
                "`{LM_HEAD}` in {} differs from `{name}` {how}: a head of its own is not supported, it must be tied to the embedding",
                shard.path.display()
            ))
        };
        let dtype = StoredDtype::of(info.dtype).ok_or_else(|| differs(format!("in its format ({:?})", info.dtype)))?;
        if info.shape != embed_info.shape {
            return Err(differs(format!("in its shape ({:?} and {:?})", info.shape, embed_info.shape)));
        }
        let [rows, columns] = [self.config.vocab_size, self.config.hidden_size];
        let (mut head, mut embed) = (vec![0.0f32; columns], vec![0.0f32; columns]);
        for row in 0..rows {
            shard.read(LM_HEAD, info, dtype, row * columns, &mut head)?;
            embed_shard.read(name, embed_info, *embed_dtype, row * columns, &mut embed)?;
            // Bits, so that a NaN on both sides is equal.
            if head.iter().zip(&embed).any(|(a, b)| a.to_bits() != b.to_bits()) {
                return Err(differs(format!("in row {row}")));
            }
        }
        Ok(())
    }
}
