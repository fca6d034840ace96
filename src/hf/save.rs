//! Writing a model as a Hugging Face directory that `transformers` loads.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::StoredDtype;
use super::config;
use super::file_writer::{Entry, Pending, sync_dir};
use super::names::{FileTensor, Layout, file_tensors};
use super::shards::{INDEX, SINGLE};
use super::tokenizer_config;
use crate::error::bad_input;
use crate::model::config::{AttentionKind, ModelConfig, SkipMode};
use crate::model::numbers::{Numbers, each_piece};
use crate::model::params::{OptimKind, ParamId, ParamTable};

/// Numbers that are converted at a time.
const CHUNK_NUMBERS: usize = 1 << 18;

/// How to write a model.
#[derive(Debug, Clone)]
pub struct SaveOptions {
    /// Format of all tensors but the balancing biases, which stay in F32.
    pub dtype: StoredDtype,
    pub layout: Layout,
    /// A new shard begins before one would hold more than this. A larger tensor gets a shard of its own.
    pub max_shard_bytes: u64,
    /// A `tokenizer.json` to put beside the weights, with the `tokenizer_config.json` of its directory or a new one.
    pub tokenizer: Option<PathBuf>,
}

impl Default for SaveOptions {
    /// Native, in BF16, in shards of 5 GB at most.
    fn default() -> Self {
        Self { dtype: StoredDtype::Bf16, layout: Layout::Native, max_shard_bytes: 5_000_000_000, tokenizer: None }
    }
}

/// What [`save`] wrote.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SavedModel {
    /// File names in the directory.
    pub files: Vec<String>,
    /// Bytes of tensor data in all shards.
    pub tensor_bytes: u64,
    /// Where another program would compute something else from these files than this one; to be shown to the user.
    pub notes: Vec<String>,
}

/// Writes the model `config` into `dir`, which is created if need be. `read` gives the values of one parameter of
/// `ParamTable::new(config)` in its logical shape; it is asked for each once, and never for the next one before the last is
/// written, so that no more than one parameter is in memory. Of one that is still in a file, [`save_streamed`] needs a piece only.
///
/// # Errors
/// As [`save_streamed`].
pub fn save(
    dir: &Path,
    config: &ModelConfig,
    options: &SaveOptions,
    mut read: impl FnMut(ParamId) -> Result<Vec<f32>>,
) -> Result<SavedModel> {
    let table = ParamTable::new(config);
    save_streamed(dir, config, options, |id| {
        let (values, spec) = (read(id)?, &table.specs[id]);
        ensure!(values.len() == spec.numel(), "{}: {} values for the shape {:?}", spec.name, values.len(), spec.shape);
        let mut at = 0;
        Ok(Box::new(move |out: &mut [f32]| {
            out.copy_from_slice(&values[at..at + out.len()]);
            at += out.len();
            Ok(())
        }))
    })
}

/// Writes the model `config` into `dir`, which is created if need be. `open` begins to read one parameter of
/// `ParamTable::new(config)`, whose values are then taken piece by piece: memory does not grow with the model's tensors.
///
/// No file appears under its name before all are on the disk, and `config.json` comes last: a directory that has one is complete.
///
/// # Errors
/// [`crate::error::BadInput`] when `dir` holds a model already, or `options` ask for what the layout cannot express.
pub fn save_streamed<'a>(
    dir: &Path,
    config: &ModelConfig,
    options: &SaveOptions,
    mut open: impl FnMut(ParamId) -> Result<Numbers<'a>>,
) -> Result<SavedModel> {
    if options.layout != Layout::Native {
        check_legacy(config)?;
    }
    fs::create_dir_all(dir).with_context(|| format!("creating the directory {}", dir.display()))?;
    check_free(dir)?;
    let table = ParamTable::new(config);
    let tensors = file_tensors(&table, options.layout);
    let shards = split(&tensors, options);

    let mut pending = Vec::new();
    let mut files = Vec::new();
    let mut weight_map = BTreeMap::new();
    let mut tensor_bytes = 0;
    let mut notes = foreign_meaning(config, options.layout);
    let mut moved_skip_biases = 0;
    let (mut piece, mut bytes) = (Vec::new(), Vec::new());
    for (number, shard) in shards.iter().enumerate() {
        let name = match shards.len() {
            1 => SINGLE.to_string(),
            n => format!("model-{:05}-of-{n:05}.safetensors", number + 1),
        };
        let entries: Vec<Entry> = shard.iter().map(|tensor| entry(tensor, options)).collect();
        let mut file = Pending::tensors(&dir.join(&name), &entries)?;
        for (tensor, entry) in shard.iter().zip(&entries) {
            for &id in &tensor.params {
                let spec = &table.specs[id];
                let mut last = None;
                each_piece(&mut open(id)?, spec.numel(), &mut piece, &mut |values| {
                    last = values.last().copied().or(last);
                    for chunk in values.chunks(CHUNK_NUMBERS) {
                        bytes.clear();
                        entry.dtype.encode(chunk, &mut bytes);
                        file.write(&bytes)?;
                    }
                    Ok(())
                })?;
                moved_skip_biases += (spec.optim == OptimKind::Balance && last != Some(-1.0)) as usize;
            }
            weight_map.insert(tensor.name.clone(), name.clone());
            tensor_bytes += entry.bytes();
        }
        file.sync()?;
        pending.push(file);
        files.push(name);
    }
    let mut text_file = |name: &str, text: &[u8]| -> Result<()> {
        let mut file = Pending::create(&dir.join(name))?;
        file.write(text)?;
        pending.push(file);
        files.push(name.to_string());
        Ok(())
    };
    if shards.len() > 1 {
        let index = json!({
            "metadata": {"total_parameters": table.total(), "total_size": tensor_bytes},
            "weight_map": weight_map,
        });
        text_file(INDEX, config::to_text(&index).as_bytes())?;
    }
    if let Some(path) = &options.tokenizer {
        let unusable = |e: &dyn std::fmt::Display| bad_input(format!("cannot use the tokenizer {}: {e}", path.display()));
        let text = fs::read(path).map_err(|e| unusable(&e))?;
        let parsed = serde_json::from_slice(&text).map_err(|e| unusable(&e))?;
        text_file("tokenizer.json", &text)?;
        // Its own config, when it has one, knows more than we do (chat templates).
        let own = path.with_file_name("tokenizer_config.json");
        let own = if own.is_file() { fs::read(&own).map_err(|e| unusable(&e))? } else { Vec::new() };
        let derived = config::to_text(&tokenizer_config::for_tokenizer(&parsed, config));
        text_file("tokenizer_config.json", if own.is_empty() { derived.as_bytes() } else { &own })?;
    }
    let config_json = match options.layout {
        Layout::Native => {
            text_file("generation_config.json", config::to_text(&config::generation_json(config)).as_bytes())?;
            config::native_json(config, options.dtype)
        }
        Layout::Legacy | Layout::LegacySmoe => config::legacy_json(config, options.dtype),
    };
    text_file("config.json", config::to_text(&config_json).as_bytes())?;

    for file in pending {
        file.finish()?;
    }
    sync_dir(dir)?;
    if moved_skip_biases > 0 && options.layout == Layout::Native {
        notes.push(format!(
            "in {moved_skip_biases} blocks the skip class's balancing bias is not -1; transformers (seen in 5.23) sets it to -1 when it loads \
             a model, whatever the file says"
        ));
    }
    Ok(SavedModel { files, tensor_bytes, notes })
}

/// What the programs that these files are made for would compute differently.
fn foreign_meaning(config: &ModelConfig, layout: Layout) -> Vec<String> {
    let native = layout == Layout::Native;
    let (theirs, skip, eps, word) = match native {
        true => ("transformers", SkipMode::Zero, config.norm_eps, "nothing"),
        false => ("Zyphra's code of November 2025", SkipMode::Identity, config::ROUTER_NORM_EPS_2025, "the scaled input"),
    };
    let mut notes = Vec::new();
    if config.skip_mode != skip {
        notes.push(format!(
            "`zaya_skip_mode` in config.json is our own key: {theirs} does not know it and adds {word} for a token that takes the skip class"
        ));
    }
    if config.router_norm_eps != eps {
        notes.push(format!("`zaya_router_norm_eps` in config.json is our own key: {theirs} does not know it and uses {eps:e}"));
    }
    notes
}

fn entry(tensor: &FileTensor, options: &SaveOptions) -> Entry {
    let dtype = if tensor.always_f32 { StoredDtype::F32 } else { options.dtype };
    Entry { name: tensor.name.clone(), dtype, shape: tensor.shape.clone() }
}

/// Tensors by shard. Shards follow the table; within one, wider formats come first and then names, as the safetensors library
/// orders them, which keeps all data aligned.
fn split<'a>(tensors: &'a [FileTensor], options: &SaveOptions) -> Vec<Vec<&'a FileTensor>> {
    let mut shards = vec![Vec::new()];
    let mut bytes = 0;
    for tensor in tensors {
        let more = entry(tensor, options).bytes();
        if bytes > 0 && bytes + more > options.max_shard_bytes {
            shards.push(Vec::new());
            bytes = 0;
        }
        bytes += more;
        shards.last_mut().expect("never empty").push(tensor);
    }
    for shard in &mut shards {
        shard.sort_by_key(|t| (std::cmp::Reverse(entry(t, options).dtype.bytes()), t.name.clone()));
    }
    shards
}

/// Refuses a directory with a model in it: its shards would mix with ours.
fn check_free(dir: &Path) -> Result<()> {
    let listing = fs::read_dir(dir).with_context(|| format!("listing {}", dir.display()))?;
    for file in listing {
        let name = file.with_context(|| format!("listing {}", dir.display()))?.file_name();
        let name = name.to_string_lossy();
        let weights = name.starts_with("model") && (name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json"));
        if weights || name == "config.json" {
            return Err(bad_input(format!(
                "{} already holds a model ({name}); choose another directory, or remove that one first",
                dir.display()
            )));
        }
    }
    Ok(())
}

/// What the old schema has no words for.
fn check_legacy(config: &ModelConfig) -> Result<()> {
    if !config.attention.contains(&AttentionKind::Sliding) {
        return Ok(());
    }
    if config.rope_sliding.partial_rotary_factor != config.rope.partial_rotary_factor {
        return Err(bad_input(
            "the legacy layout knows one partial_rotary_factor for full and sliding blocks, this model has two; export it as native",
        ));
    }
    if config.sliding_window.is_none_or(|window| window < 2) {
        return Err(bad_input("the legacy layout cannot express a sliding_window below 2; export the model as native"));
    }
    Ok(())
}
