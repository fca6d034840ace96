//! Writing a checkpoint anew: other number format, without optimizer state, other row blocks. The source is only read.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::commit::{SaveOptions, write_dir};
use super::layout::{Dtype, TensorInfo};
use super::manifest::{Contents, Meta};
use super::names::{is_optimizer, split_opt_name, weight_tensors};
use super::write::{OpenTensor, Source, sync_dir};
use super::{Checkpoint, MANIFEST};
use crate::error::bad_input;
use crate::model::config::ModelConfig;
use crate::model::numbers::Numbers;
use crate::model::params::{OptimKind, ParamId, ParamTable};
use crate::parallel::Layout;

#[derive(Debug, Clone, Default)]
pub struct RepackOptions {
    /// Number format of the weights; None = as in the source. Balancing biases and optimizer state stay f32.
    pub weights_dtype: Option<Dtype>,
    /// Leave the optimizer state out.
    pub weights_only: bool,
    /// The ranks that are to read it: experts of one expert-parallel place go into files of their own.
    pub readers: Option<Layout>,
    pub save: SaveOptions,
}

#[derive(Debug)]
pub struct Repacked {
    pub tensors: usize,
    /// Tensors of the source that were left out.
    pub dropped: usize,
    /// Bytes written.
    pub bytes: u64,
}

/// Writes `source` into the new checkpoint folder `out`, in pieces: memory does not grow with the tensors. A row block's hash is
/// known at its end, long before the folder gets its name, so nothing damaged becomes visible.
///
/// # Errors
/// `BadInput` when `out` is there and not empty, or lies inside the source; otherwise what reading and saving can fail with.
pub fn repack(source: &Checkpoint, out: &Path, options: &RepackOptions) -> Result<Repacked> {
    check_output(out, Some(source.dir()))?;
    let table = ParamTable::new(&source.meta().model);
    let all = source.tensors();
    let kept: Vec<TensorInfo> = all
        .iter()
        .filter(|t| !(options.weights_only && is_optimizer(&t.name)))
        .map(|t| TensorInfo { dtype: new_dtype(t, &table, options.weights_dtype), ..t.clone() })
        .collect();
    let contents = if options.weights_only { Contents::Weights } else { source.contents() };
    let groups = options.readers.map_or(Vec::new(), |layout| reader_groups(&source.meta().model, layout, &kept));
    let save = SaveOptions { contents, groups, ..options.save.clone() };
    let bytes = write_new(out, source.meta(), &kept, &mut |i| source.numbers(&kept[i].name), &save)?;
    Ok(Repacked { tensors: kept.len(), dropped: all.len() - kept.len(), bytes })
}

/// Writes the weights of a model that is no checkpoint yet (`open(id)` begins to read parameter `id` of its table) into the new
/// checkpoint folder `out`, at step 0 and without optimizer state.
///
/// # Errors
/// As [`repack`].
pub fn from_weights<'a>(
    model: &ModelConfig,
    out: &Path,
    dtype: Dtype,
    open: &'a mut (dyn FnMut(ParamId) -> Result<Numbers<'a>> + 'a),
    save: &SaveOptions,
) -> Result<Repacked> {
    check_output(out, None)?;
    let table = ParamTable::new(model);
    let tensors: Vec<TensorInfo> =
        weight_tensors(&table).into_iter().map(|t| TensorInfo { dtype: new_dtype(&t, &table, Some(dtype)), ..t }).collect();
    let save = SaveOptions { contents: Contents::Weights, ..save.clone() };
    let bytes = write_new(out, &Meta::new(model.clone()), &tensors, open, &save)?;
    Ok(Repacked { tensors: tensors.len(), dropped: 0, bytes })
}

/// Who reads each tensor: 0 = all ranks, else the ranks of an expert-parallel place, counted from 1. Optimizer state goes with its
/// parameter.
pub fn reader_groups(model: &ModelConfig, layout: Layout, tensors: &[TensorInfo]) -> Vec<usize> {
    let table = ParamTable::new(model);
    let experts: HashMap<&str, usize> = table.specs.iter().filter_map(|spec| Some((spec.name.as_str(), spec.expert?))).collect();
    let mut places = vec![0; model.num_experts];
    // Of a single place, everybody reads all.
    for rank in (0..layout.world).filter(|_| layout.ep > 1) {
        places[layout.experts_of(rank, model.num_experts)].fill(layout.expert_place(rank) + 1);
    }
    let param = |name| split_opt_name(name).map_or(name, |(param, _)| param);
    tensors.iter().map(|t| experts.get(param(t.name.as_str())).map_or(0, |e| places[*e])).collect()
}

fn new_dtype(t: &TensorInfo, table: &ParamTable, wanted: Option<Dtype>) -> Dtype {
    // Balancing biases move by steps that bf16 cannot hold.
    let balance = table.find(&t.name).is_some_and(|id| table.specs[id].optim == OptimKind::Balance);
    match wanted {
        Some(dtype) if !is_optimizer(&t.name) && !balance => dtype,
        _ => t.dtype,
    }
}

/// Refuses an output that would overwrite or change something.
///
/// # Errors
/// `BadInput` when `out` exists and is not an empty folder, or lies inside `source`.
pub fn check_output(out: &Path, source: Option<&Path>) -> Result<()> {
    let refuse = |why: &str| Err(bad_input(format!("the output {} {why}: give a folder that does not exist yet", out.display())));
    match fs::read_dir(out) {
        Ok(mut entries) => {
            if entries.next().is_some() {
                return refuse("is not empty");
            }
        }
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
        Err(_) if out.exists() => return refuse("is not a folder"),
        Err(e) => return Err(e).with_context(|| format!("looking at the output {}", out.display())),
    }
    if let Some(source) = source.and_then(|s| s.canonicalize().ok()) {
        // The output may not exist: its nearest existing ancestor decides where it would lie.
        let absolute = std::path::absolute(out).unwrap_or_else(|_| out.to_path_buf());
        let inside = absolute.ancestors().find_map(|a| a.canonicalize().ok()).is_some_and(|a| a.starts_with(&source));
        if inside {
            return refuse("lies inside the input, which is never changed");
        }
    }
    Ok(())
}

/// Writes a checkpoint folder of any name, complete or not at all.
fn write_new<'a>(
    out: &Path,
    meta: &Meta,
    tensors: &[TensorInfo],
    open: &'a mut OpenTensor<'a>,
    save: &SaveOptions,
) -> Result<u64> {
    let out = std::path::absolute(out).with_context(|| format!("resolving {}", out.display()))?;
    let parent = out.parent().map_or_else(|| PathBuf::from("/"), Path::to_path_buf);
    let name = out.file_name().with_context(|| format!("{} has no last part that could name a folder", out.display()))?;
    fs::create_dir_all(&parent).with_context(|| format!("creating {}", parent.display()))?;
    let tmp = parent.join(format!(".{}.tmp-{}", name.to_string_lossy(), uuid::Uuid::new_v4()));
    let written = write_dir(&tmp, &parent, meta, tensors, &mut Source::stream(open), save, false, None).and_then(|bytes| {
        fs::rename(&tmp, &out).with_context(|| format!("renaming {}", tmp.display()))?;
        sync_dir(&parent)?;
        Ok(bytes)
    });
    written
        .inspect_err(|_| {
            let _ = fs::remove_dir_all(&tmp);
        })
        .with_context(|| format!("writing {}", out.join(MANIFEST).display()))
}
