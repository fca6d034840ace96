//! What a traced pass runs on: token ids, and labels and a padding mask where given, from a safetensors file.

use std::path::Path;

use anyhow::{Context, Result};
use candle_core::safetensors::MmapedSafetensors;
use safetensors::Dtype;

use crate::error::bad_input;
use crate::model::ModelConfig;
use crate::tensor::backend::{Batch, PinnedRoutes};

/// A batch as the file describes it.
#[derive(Debug, Clone)]
pub struct Input {
    /// With labels shifted: row t has the label of position t + 1.
    pub batch: Batch,
}

/// Label that Hugging Face ignores.
const IGNORED: i64 = -100;

fn open(path: &Path) -> Result<MmapedSafetensors> {
    if !path.is_file() {
        return Err(bad_input(format!("{}: there is no such file; expected a safetensors file", path.display())));
    }
    // SAFETY: the file is only read; another program that truncates it meanwhile breaks every memory-mapped reader alike.
    let file = unsafe { MmapedSafetensors::new(path) };
    file.map_err(|e| bad_input(format!("{}: not a safetensors file ({e})", path.display())))
}

/// Integers of one tensor, of any integer or float type that holds them exactly.
fn integers(file: &MmapedSafetensors, path: &Path, name: &str) -> Result<Option<(Vec<usize>, Vec<i64>)>> {
    if file.get(name).is_err() {
        return Ok(None);
    }
    let at = || format!("{}: tensor `{name}`", path.display());
    let view = file.get(name).with_context(at)?;
    let bytes = view.data();
    macro_rules! read {
        ($t:ty) => {
            bytes.chunks_exact(size_of::<$t>()).map(|b| <$t>::from_le_bytes(b.try_into().expect("whole")) as i64).collect()
        };
    }
    let values = match view.dtype() {
        Dtype::I64 => read!(i64),
        Dtype::I32 => read!(i32),
        Dtype::U32 => read!(u32),
        Dtype::I16 => read!(i16),
        Dtype::U16 => read!(u16),
        Dtype::I8 => read!(i8),
        // A padding mask is often boolean.
        Dtype::U8 | Dtype::BOOL => read!(u8),
        other => return Err(bad_input(format!("{} holds {other:?}, expected integers (I64)", at()))),
    };
    Ok(Some((view.shape().to_vec(), values)))
}

/// Reads `input_ids` `[B, S]` (or `[S]`) and, where present, `labels` and `attention_mask` of the same shape. Other tensors
/// are ignored.
///
/// # Errors
/// `BadInput` that names the file, the tensor and the place of a value that does not fit the model.
pub fn read_input(path: &Path, cfg: &ModelConfig) -> Result<Input> {
    let file = open(path)?;
    let Some((shape, ids)) = integers(&file, path, "input_ids")? else {
        return Err(bad_input(format!("{}: has no tensor `input_ids`, which is what the model runs on", path.display())));
    };
    let (batch, seq) = match shape.as_slice() {
        [s] => (1, *s),
        [b, s] => (*b, *s),
        _ => return Err(bad_input(format!("{}: `input_ids` has shape {shape:?}, expected [batch, sequence]", path.display()))),
    };
    if batch * seq == 0 {
        return Err(bad_input(format!("{}: `input_ids` is empty", path.display())));
    }
    if seq > cfg.max_position_embeddings {
        return Err(bad_input(format!(
            "{}: sequences of {seq} tokens, but the model has max_position_embeddings {}",
            path.display(),
            cfg.max_position_embeddings
        )));
    }
    let vocab = cfg.vocab_size as i64;
    let refuse = |name: &str, at: usize, value: i64| {
        let (row, position) = (at / seq, at % seq);
        Err(bad_input(format!(
            "{}: `{name}`[{row}, {position}] is {value}, expected 0..{} (the model's vocabulary)",
            path.display(),
            vocab - 1
        )))
    };
    if let Some(at) = ids.iter().position(|id| !(0..vocab).contains(id)) {
        return refuse("input_ids", at, ids[at]);
    }
    let like_ids = |name: &str| -> Result<Option<Vec<i64>>> {
        let Some((other, values)) = integers(&file, path, name)? else { return Ok(None) };
        if other != shape {
            return Err(bad_input(format!("{}: `{name}` has shape {other:?}, `input_ids` {shape:?}", path.display())));
        }
        Ok(Some(values))
    };
    let mut shifted = Vec::new();
    if let Some(labels) = like_ids("labels")? {
        if let Some(at) = labels.iter().position(|l| *l != IGNORED && !(0..vocab).contains(l)) {
            return refuse("labels", at, labels[at]);
        }
        shifted = (0..batch * seq).map(|t| if t % seq == seq - 1 { IGNORED } else { labels[t + 1] }).collect();
    }
    let valid = like_ids("attention_mask")?.unwrap_or_default().iter().map(|m| *m != 0).collect();
    let ids = ids.iter().map(|id| *id as u32).collect();
    Ok(Input { batch: Batch { batch, seq, ids, labels: shifted, valid, ..Batch::default() } })
}

/// Reads `layers.<i>.router.choice` of every block: routes to pin.
pub fn read_pinned_routes(path: &Path, cfg: &ModelConfig, tokens: usize) -> Result<Vec<PinnedRoutes>> {
    let file = open(path)?;
    (0..cfg.num_blocks())
        .map(|i| {
            let name = format!("layers.{i}.router.choice");
            let Some((_, values)) = integers(&file, path, &name)? else {
                return Err(bad_input(format!("{}: has no tensor `{name}` to pin the routes of block {i}", path.display())));
            };
            if values.len() != tokens || values.iter().any(|v| !(0..cfg.num_classes() as i64).contains(v)) {
                return Err(bad_input(format!(
                    "{}: `{name}` must hold {tokens} classes in 0..{}",
                    path.display(),
                    cfg.num_classes() - 1
                )));
            }
            Ok(PinnedRoutes(values.iter().map(|v| *v as u32).collect()))
        })
        .collect()
}
