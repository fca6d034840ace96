//! The native schema: keys, and defaults for missing ones, as in `transformers` (`ZayaConfig`, since 5.13).

use serde_json::{Map, Value, json};

use super::keys::{Keys, shown};
use super::{check_rope_type, checked_blocks, dtype_name};
use crate::hf::StoredDtype;
use crate::model::config::{AttentionKind, ModelConfig, Rope, SkipMode};

/// The version whose files ours are equal to.
const TRANSFORMERS_VERSION: &str = "5.23.0";

/// RoPE of `transformers` when a config says nothing.
const DEFAULT_ROPE: Rope = Rope { theta: 5_000_000.0, partial_rotary_factor: 0.5 };
const DEFAULT_ROPE_SLIDING: Rope = Rope { theta: 10_000.0, partial_rotary_factor: 0.5 };

pub(super) fn parse(keys: &mut Keys) -> ModelConfig {
    let blocks = keys.size("num_hidden_layers").unwrap_or(40);
    let blocks = checked_blocks(keys, "num_hidden_layers", blocks);
    let attention = attention_of(keys, blocks);
    let (rope, rope_sliding) = ropes(keys);
    let norm_eps = keys.number("rms_norm_eps").unwrap_or(1e-5);
    let skip_mode = skip_mode(keys, SkipMode::Zero);
    ModelConfig {
        vocab_size: keys.size("vocab_size").unwrap_or(262_272),
        hidden_size: keys.size("hidden_size").unwrap_or(2048),
        num_query_heads: keys.size("num_attention_heads").unwrap_or(8),
        num_kv_heads: keys.size("num_key_value_heads").unwrap_or(2),
        head_dim: keys.size("head_dim").unwrap_or(128),
        num_experts: keys.size("num_experts").unwrap_or(16),
        expert_width: keys.size("moe_intermediate_size").unwrap_or(2048),
        router_width: keys.size("router_hidden_size").unwrap_or(256),
        attention,
        sliding_window: keys.size("sliding_window"),
        rope,
        rope_sliding,
        max_position_embeddings: keys.size("max_position_embeddings").unwrap_or(131_072),
        norm_eps,
        router_norm_eps: keys.number("zaya_router_norm_eps").unwrap_or(norm_eps),
        skip_mode,
        initializer_range: keys.number("initializer_range").unwrap_or(0.02),
        pad_token_id: keys.token("pad_token_id", Some(0)),
        bos_token_id: keys.token("bos_token_id", Some(2)),
        eos_token_id: keys.token("eos_token_id", Some(106)),
    }
}

/// Our own key `zaya_skip_mode`, which any schema may hold.
pub(super) fn skip_mode(keys: &mut Keys, default: SkipMode) -> SkipMode {
    match keys.get("zaya_skip_mode") {
        None => default,
        Some(value) => serde_json::from_value(value.clone()).unwrap_or_else(|_| {
            keys.problem(format!("`zaya_skip_mode` is {}, expected \"zero\" or \"identity\"", shown(value)));
            default
        }),
    }
}

fn attention_of(keys: &mut Keys, blocks: usize) -> Vec<AttentionKind> {
    let Some(value) = keys.get("layer_types") else { return vec![AttentionKind::Full; blocks] };
    let Some(list) = value.as_array() else {
        keys.problem(format!("`layer_types` must be a list, got {}", shown(value)));
        return vec![AttentionKind::Full; blocks];
    };
    if list.len() != blocks {
        keys.problem(format!("`layer_types` has {} entries, but `num_hidden_layers` is {blocks}", list.len()));
    }
    let mut attention = Vec::with_capacity(blocks);
    for (i, kind) in list.iter().enumerate() {
        match kind.as_str() {
            Some("hybrid") => attention.push(AttentionKind::Full),
            Some("hybrid_sliding") => attention.push(AttentionKind::Sliding),
            _ => {
                keys.problem(format!(
                    "`layer_types[{i}]` is {}, but only \"hybrid\" and \"hybrid_sliding\" are supported",
                    shown(kind)
                ));
                break;
            }
        }
    }
    attention.resize(blocks, AttentionKind::Full);
    attention
}

/// RoPE of full and of sliding blocks. A value is looked for in `rope_parameters.<kind>`, then in a flat `rope_parameters` or at
/// the top level of the file.
fn ropes(keys: &mut Keys) -> (Rope, Rope) {
    let empty = Map::new();
    let parameters = match keys.get("rope_parameters") {
        None => &empty,
        Some(Value::Object(map)) => map,
        Some(other) => {
            keys.problem(format!("`rope_parameters` must be an object, got {}", shown(other)));
            &empty
        }
    };
    let nested = ["hybrid", "hybrid_sliding"].iter().any(|k| parameters.contains_key(*k));
    if !nested {
        check_rope_type(keys, "rope_parameters", parameters);
    }
    // Beside the nested objects, files of the 8B model carry a stray `rope_parameters.rope_type`, which means nothing.
    let flat = |keys: &mut Keys, key: &str| match parameters.get(key).filter(|v| !nested && !v.is_null()) {
        Some(value) => number(keys, "rope_parameters", key, value),
        None => keys.number(key),
    };
    let (flat_theta, flat_factor) = (flat(keys, "rope_theta"), flat(keys, "partial_rotary_factor"));
    let mut one = |kind: &str, flat_theta: Option<f64>, default: Rope| {
        let Some(value) = parameters.get(kind).filter(|v| !v.is_null()) else {
            return Rope {
                theta: flat_theta.unwrap_or(default.theta),
                partial_rotary_factor: flat_factor.unwrap_or(default.partial_rotary_factor),
            };
        };
        let at = format!("rope_parameters.{kind}");
        let Some(map) = value.as_object() else {
            keys.problem(format!("`{at}` must be an object, got {}", shown(value)));
            return default;
        };
        check_rope_type(keys, &at, map);
        let mut given = |key: &str| map.get(key).filter(|v| !v.is_null()).and_then(|value| number(keys, &at, key, value));
        Rope {
            theta: given("rope_theta").or(flat_theta).unwrap_or(default.theta),
            // An object that is there but names no share rotates everything: so does `transformers`.
            partial_rotary_factor: given("partial_rotary_factor").or(flat_factor).unwrap_or(1.0),
        }
    };
    // A flat theta is that of the full blocks; sliding ones have their own.
    (one("hybrid", flat_theta, DEFAULT_ROPE), one("hybrid_sliding", None, DEFAULT_ROPE_SLIDING))
}

fn number(keys: &mut Keys, at: &str, key: &str, value: &Value) -> Option<f64> {
    let number = value.as_f64();
    if number.is_none() {
        keys.problem(format!("`{at}.{key}` must be a number, got {}", shown(value)));
    }
    number
}

/// The native `config.json` of a model, key for key what `transformers` writes. What it has no key for is added as
/// `zaya_skip_mode` and `zaya_router_norm_eps`, when it differs from what a native file means by itself.
pub(crate) fn to_json(config: &ModelConfig, dtype: StoredDtype) -> Value {
    let layer_types: Vec<_> = config
        .attention
        .iter()
        .map(|kind| match kind {
            AttentionKind::Full => "hybrid",
            AttentionKind::Sliding => "hybrid_sliding",
        })
        .collect();
    let rope = |rope: Rope| json!({"partial_rotary_factor": rope.partial_rotary_factor, "rope_theta": rope.theta, "rope_type": "default"});
    let mut out = json!({
        "architectures": ["ZayaForCausalLM"],
        "attention_bias": false,
        "attention_dropout": 0.0,
        "bos_token_id": config.bos_token_id,
        "cca_time0": 2,
        "cca_time1": 2,
        "dtype": dtype_name(dtype),
        "eos_token_id": config.eos_token_id,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": config.initializer_range,
        "layer_types": layer_types,
        "lm_head_bias": false,
        "max_position_embeddings": config.max_position_embeddings,
        "model_type": "zaya",
        "moe_intermediate_size": config.expert_width,
        "num_attention_heads": config.num_query_heads,
        "num_experts": config.num_experts,
        "num_experts_per_tok": 1,
        "num_hidden_layers": config.num_blocks(),
        "num_key_value_heads": config.num_kv_heads,
        "output_router_logits": false,
        "pad_token_id": config.pad_token_id,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"hybrid": rope(config.rope), "hybrid_sliding": rope(config.rope_sliding)},
        "router_hidden_size": config.router_width,
        "sliding_window": config.sliding_window,
        "tie_word_embeddings": true,
        "transformers_version": TRANSFORMERS_VERSION,
        "use_cache": true,
        "vocab_size": config.vocab_size,
    });
    if config.router_norm_eps != config.norm_eps {
        out["zaya_router_norm_eps"] = json!(config.router_norm_eps);
    }
    if config.skip_mode != SkipMode::Zero {
        out["zaya_skip_mode"] = json!(config.skip_mode);
    }
    out
}

/// The `generation_config.json` that `transformers` derives from such a config.
pub(crate) fn generation_json(config: &ModelConfig) -> Value {
    let mut out = Map::new();
    out.insert("_from_model_config".into(), json!(true));
    for (key, id) in [("bos_token_id", config.bos_token_id), ("eos_token_id", config.eos_token_id)] {
        out.extend(id.map(|id| (key.to_string(), json!(id))));
    }
    out.insert("output_attentions".into(), json!(false));
    out.insert("output_hidden_states".into(), json!(false));
    out.extend(config.pad_token_id.map(|id| ("pad_token_id".to_string(), json!(id))));
    out.insert("transformers_version".into(), json!(TRANSFORMERS_VERSION));
    out.insert("use_cache".into(), json!(true));
    Value::Object(out)
}
