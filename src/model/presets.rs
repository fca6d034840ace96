//! Named model shapes, for `model.preset` in a recipe.

use super::config::{AttentionKind, ModelConfig, Rope, SkipMode};

/// Names a recipe may use.
pub const NAMES: [&str; 3] = ["zaya1-base", "bench-15m", "demo-6m"];

pub fn by_name(name: &str) -> Option<ModelConfig> {
    match name {
        "zaya1-base" => Some(zaya1_base()),
        "bench-15m" => Some(bench_15m()),
        "demo-6m" => Some(demo_6m()),
        _ => None,
    }
}

/// ZAYA1-base at its first stage: 8.84 B parameters, RoPE base 10,000, 4K context.
pub fn zaya1_base() -> ModelConfig {
    ModelConfig {
        vocab_size: 262_272,
        hidden_size: 2048,
        num_query_heads: 8,
        num_kv_heads: 2,
        head_dim: 128,
        num_experts: 16,
        expert_width: 2048,
        router_width: 256,
        attention: vec![AttentionKind::Full; 40],
        sliding_window: None,
        rope: Rope { theta: 10_000.0, partial_rotary_factor: 0.5 },
        rope_sliding: Rope { theta: 10_000.0, partial_rotary_factor: 0.5 },
        max_position_embeddings: 32_768,
        norm_eps: 1e-5,
        router_norm_eps: 1e-5,
        skip_mode: SkipMode::Zero,
        initializer_range: 0.02,
        pad_token_id: Some(0),
        bos_token_id: Some(2),
        eos_token_id: Some(1),
    }
}

/// The model of `recipes/bench-cpu.toml`: about 15 M parameters.
pub fn bench_15m() -> ModelConfig {
    ModelConfig {
        vocab_size: 8192,
        hidden_size: 256,
        num_query_heads: 2,
        num_kv_heads: 1,
        head_dim: 64,
        num_experts: 16,
        expert_width: 256,
        router_width: 64,
        attention: vec![AttentionKind::Full; 4],
        max_position_embeddings: 4096,
        pad_token_id: None,
        bos_token_id: None,
        eos_token_id: Some(0),
        ..zaya1_base()
    }
}

/// The model of `recipes/demo-cpu.toml`: 6 M parameters, few of them active for a token: learns visibly in minutes on two cores.
pub fn demo_6m() -> ModelConfig {
    ModelConfig {
        vocab_size: 2048,
        hidden_size: 128,
        num_query_heads: 4,
        num_kv_heads: 2,
        head_dim: 32,
        expert_width: 224,
        router_width: 32,
        max_position_embeddings: 1024,
        // Narrow layers need larger weights than the 0.02 of wide ones; routers above all, else all tokens go one way at first.
        initializer_range: 0.05,
        ..bench_15m()
    }
}
