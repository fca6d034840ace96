//! Hugging Face directories in and out, against files of the reference implementation.

mod refused;
mod round_trip;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use zaya::error::{BadInput, exit_code_of};
use zaya::hf::{self, HfModel, SaveOptions, StoredDtype};
use zaya::model::config::ModelConfig;
use zaya::model::params::ParamTable;
use zaya::model::presets;

/// Format, shape and bytes of a tensor in a file.
pub type StoredTensor = (Dtype, Vec<usize>, Vec<u8>);

pub fn fixture(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(case)
}

pub fn all(model: &HfModel) -> Vec<Vec<f32>> {
    (0..model.table.specs.len()).map(|id| model.read(id).unwrap()).collect()
}

pub fn save_as(model: &HfModel, dir: &Path, options: SaveOptions) -> Vec<String> {
    hf::save(dir, &model.config, &options, |id| model.read(id)).unwrap().files
}

pub fn single(dtype: StoredDtype) -> SaveOptions {
    SaveOptions { dtype, ..SaveOptions::default() }
}

/// A small random-looking model: every element differs, also after rounding to bf16.
pub fn counted(config: &ModelConfig) -> Vec<Vec<f32>> {
    let table = ParamTable::new(config);
    let value = |id: usize, i: usize| ((id * 131 + i) % 251) as f32 / 64.0 - 2.0;
    table.specs.iter().enumerate().map(|(id, spec)| (0..spec.numel()).map(|i| value(id, i)).collect()).collect()
}

pub fn toy() -> ModelConfig {
    ModelConfig {
        vocab_size: 11,
        hidden_size: 6,
        num_query_heads: 2,
        num_kv_heads: 1,
        head_dim: 4,
        num_experts: 12,
        expert_width: 3,
        router_width: 5,
        attention: presets::zaya1_base().attention[..2].to_vec(),
        ..presets::bench_15m()
    }
}

/// Rewrites the weight file of a model tensor by tensor; `change` gives the new tensor, or None to drop it.
pub fn rewrite(dir: &Path, change: impl Fn(&str, &[u8]) -> Option<StoredTensor>, extra: &[(&str, Dtype, &[usize], Vec<u8>)]) {
    let path = dir.join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors = BTreeMap::new();
    for (name, view) in file.iter() {
        if let Some(tensor) = change(name, view.data()) {
            tensors.insert(name.to_string(), tensor);
        }
    }
    for (name, dtype, shape, data) in extra {
        tensors.insert(name.to_string(), (*dtype, shape.to_vec(), data.clone()));
    }
    let views =
        tensors.iter().map(|(n, (dtype, shape, data))| (n.as_str(), TensorView::new(*dtype, shape.clone(), data).unwrap()));
    fs::write(&path, safetensors::serialize(views, None).unwrap()).unwrap();
}

/// A toy model on disk, in f32 and in one file, and its values.
pub fn toy_dir() -> (tempfile::TempDir, Vec<Vec<f32>>) {
    let (dir, values) = (tempfile::tempdir().unwrap(), counted(&toy()));
    hf::save(dir.path(), &toy(), &single(StoredDtype::F32), |id| Ok(values[id].clone())).unwrap();
    (dir, values)
}

/// Shape and bytes of a tensor of the toy file, unchanged.
pub fn keep(dir: &Path) -> impl Fn(&str, &[u8]) -> Option<StoredTensor> {
    let bytes = fs::read(dir.join("model.safetensors")).unwrap();
    let shapes: BTreeMap<String, Vec<usize>> =
        SafeTensors::deserialize(&bytes).unwrap().iter().map(|(n, t)| (n.to_string(), t.shape().to_vec())).collect();
    move |name, data| Some((Dtype::F32, shapes[name].clone(), data.to_vec()))
}

#[track_caller]
pub fn assert_refused<T>(result: anyhow::Result<T>, words: &[&str]) {
    let Err(error) = result else { panic!("must be refused, with {words:?}") };
    let text = format!("{error:#}");
    assert!(error.is::<BadInput>() && exit_code_of(&error) == 2, "not an input error: {text}");
    for word in words {
        assert!(text.contains(word), "{word:?} is not in: {text}");
    }
}
