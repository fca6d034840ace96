//! Tensors that Hugging Face's `transformers` wrote (`tests/fixtures`), and how they are compared.

use std::collections::HashMap;
use std::path::PathBuf;

use candle_core::{DType, Device, Tensor, safetensors};
use zaya::model::config::{AttentionKind, ModelConfig, Rope, SkipMode};
use zaya::model::params::ParamTable;
use zaya::tensor::backend::Batch;

pub type Tensors = HashMap<String, Tensor>;

/// Relative Frobenius errors allowed in f32.
pub const FORWARD_TOLERANCE: f64 = 1e-5;
pub const GRADIENT_TOLERANCE: f64 = 2e-5;

pub fn read(case: &str, file: &str) -> Tensors {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny").join(case).join(file);
    safetensors::load(&path, &Device::Cpu).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// The shape of every tiny case, as its config.json says.
pub fn tiny_config() -> ModelConfig {
    ModelConfig {
        vocab_size: 256,
        hidden_size: 128,
        num_query_heads: 4,
        num_kv_heads: 2,
        head_dim: 16,
        num_experts: 4,
        expert_width: 48,
        router_width: 24,
        attention: vec![AttentionKind::Full; 3],
        sliding_window: None,
        rope: Rope { theta: 10_000.0, partial_rotary_factor: 0.5 },
        rope_sliding: Rope { theta: 1_000.0, partial_rotary_factor: 0.5 },
        max_position_embeddings: 256,
        norm_eps: 1e-5,
        router_norm_eps: 1e-5,
        skip_mode: SkipMode::Zero,
        initializer_range: 0.02,
        pad_token_id: Some(0),
        bos_token_id: Some(2),
        eos_token_id: Some(1),
    }
}

pub fn host(t: &Tensor) -> Vec<f64> {
    t.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// ||a - b|| / ||b||, b the fixture; shapes must agree.
pub fn error(name: &str, a: &Tensor, b: &Tensor) -> f64 {
    assert_eq!(a.dims(), b.dims(), "shape of {name}");
    let (a, b) = (host(a), host(b));
    let difference: f64 = a.iter().zip(&b).map(|(x, y)| (x - y).powi(2)).sum();
    let size: f64 = b.iter().map(|y| y * y).sum();
    assert!(size > 0.0, "{name} of the fixture is zero");
    (difference / size).sqrt()
}

/// The values of a native file in the order of the parameter table.
pub fn values(config: &ModelConfig, file: &Tensors) -> Vec<Vec<f32>> {
    let one = |spec: &zaya::model::params::ParamSpec| {
        let tensor = &file[&spec.hf.tensor];
        let tensor = spec.hf.expert.map_or_else(|| tensor.clone(), |e| tensor.get(e).unwrap());
        assert_eq!(tensor.dims(), spec.hf.shape, "{}", spec.name);
        tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap()
    };
    ParamTable::new(config).specs.iter().map(one).collect()
}

/// `input_ids`, `labels` and `attention_mask` of a fixture, labels shifted as the trainer wants them.
pub fn batch(io: &Tensors) -> Batch {
    let (b, s) = io["input_ids"].dims2().unwrap();
    let list = |name: &str| io[name].flatten_all().unwrap().to_vec1::<i64>().unwrap();
    let labels = io.get("labels").map(|_| list("labels")).unwrap_or_default();
    let shift = |row: usize| if row % s == s - 1 { -100 } else { labels[row + 1] };
    Batch {
        batch: b,
        seq: s,
        ids: list("input_ids").iter().map(|id| *id as u32).collect(),
        labels: if labels.is_empty() { Vec::new() } else { (0..b * s).map(shift).collect() },
        valid: io.get("attention_mask").map(|_| list("attention_mask").iter().map(|m| *m != 0).collect()).unwrap_or_default(),
        ..Batch::default()
    }
}

/// ||a - b|| / ||b||
pub fn relative_error(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let d: f64 = a.iter().zip(b).map(|(x, y)| (*x as f64 - *y as f64).powi(2)).sum();
    let n: f64 = b.iter().map(|y| (*y as f64).powi(2)).sum();
    (d / n).sqrt()
}
