//! The two old schemas. Both count stages (attention, MoE, attention, ...), two to a block.

use serde_json::{Value, json};

use super::keys::{Keys, shown, size_of};
use super::native::skip_mode;
use super::{checked_blocks, dtype_name};
use crate::hf::StoredDtype;
use crate::model::config::{AttentionKind, ModelConfig, Rope, SkipMode};

/// The code of November 2025 reads its router norm's eps from a key (`layernorm_epsilon`) that no config has, and falls back to this.
pub(crate) const ROUTER_NORM_EPS_2025: f64 = 1e-6;

/// As ZAYA1-base was published: one list entry per stage.
pub(super) fn parse_lists(keys: &mut Keys) -> ModelConfig {
    let (blocks, num_experts) = stages(keys);
    let layers = 2 * blocks;
    // The published scalar counts uncompressed heads; queries are compressed two to one.
    let full_heads = keys.required("num_attention_heads");
    let hidden_size = keys.required("hidden_size");
    let num_query_heads = match keys.per_layer("cca_num_q_heads", 0, layers) {
        Some(heads) => heads,
        None => {
            if !full_heads.is_multiple_of(2) {
                keys.problem(format!(
                    "`num_attention_heads` is {full_heads}; without `cca_num_q_heads` half of it are computed, so it must be even"
                ));
            }
            full_heads / 2
        }
    };
    let head_dim = keys.size("kv_channels").or_else(|| keys.size("head_dim")).unwrap_or_else(|| {
        if full_heads == 0 || !hidden_size.is_multiple_of(full_heads) {
            keys.problem(format!(
                "`kv_channels` is missing, and `hidden_size` ({hidden_size}) is not a multiple of `num_attention_heads` ({full_heads})"
            ));
            return 1;
        }
        hidden_size / full_heads
    });
    let fused = keys.per_layer("ffn_hidden_size_list", 1, layers).or_else(|| keys.size("ffn_hidden_size"));
    let fused = present(keys, "ffn_hidden_size_list", fused);
    let router = keys.per_layer("zaya_mlp_expansion", 1, layers);
    let router_width = present(keys, "zaya_mlp_expansion", router);
    let shape = Shape { hidden_size, num_query_heads, head_dim, num_experts, router_width, fused_width: fused };
    // The skip class of that code hands the normed input on; see `SkipMode`.
    finish(keys, "num_query_groups_list", blocks, shape, SkipMode::Identity, Some(ROUTER_NORM_EPS_2025))
}

/// The old names as single numbers. `num_attention_heads` counts the computed heads here.
pub(super) fn parse_scalars(keys: &mut Keys) -> ModelConfig {
    let layers = keys.required("num_hidden_layers");
    if !layers.is_multiple_of(2) {
        keys.problem(format!(
            "`num_hidden_layers` is {layers}, but stages come in pairs of attention and MoE, so it must be even"
        ));
    }
    let blocks = checked_blocks(keys, "num_hidden_layers", layers / 2);
    let layers = 2 * blocks;
    let heads = keys.required("num_attention_heads");
    let shape = Shape {
        hidden_size: keys.required("hidden_size"),
        num_query_heads: keys.per_layer("cca_num_q_heads", 0, layers).unwrap_or(heads),
        head_dim: keys.size("head_dim").or_else(|| keys.size("kv_channels")).unwrap_or(128),
        num_experts: keys.required("num_experts"),
        router_width: keys.required("zaya_mlp_expansion"),
        fused_width: keys.required("ffn_hidden_size"),
    };
    // The code that came with these files agrees with the native one: nothing for a skipped token, one eps for every norm.
    finish(keys, "num_query_groups", blocks, shape, SkipMode::Zero, None)
}

/// The sizes that the two schemas spell differently.
struct Shape {
    hidden_size: usize,
    num_query_heads: usize,
    head_dim: usize,
    num_experts: usize,
    router_width: usize,
    /// Gate and up together: twice an expert's width.
    fused_width: usize,
}

/// What both schemas spell the same. `router_norm_eps` is None where the router's norm has the eps of the others.
fn finish(
    keys: &mut Keys,
    groups_key: &str,
    blocks: usize,
    shape: Shape,
    skip: SkipMode,
    router_norm_eps: Option<f64>,
) -> ModelConfig {
    let layers = 2 * blocks;
    if !shape.fused_width.is_multiple_of(2) {
        keys.problem(format!(
            "the experts' fused width is {}, but gate and up share it in halves, so it must be even",
            shape.fused_width
        ));
    }
    let num_kv_heads = kv_heads(keys, groups_key, layers);
    let rope = Rope {
        theta: keys.number("rope_theta").or_else(|| nested_theta(keys)).unwrap_or(1_000_000.0),
        partial_rotary_factor: keys.number("partial_rotary_factor").unwrap_or(0.5),
    };
    let (attention, sliding_window) = sliding(keys, blocks);
    let any_sliding = attention.contains(&AttentionKind::Sliding);
    let theta = keys.number("swa_rotary_base").unwrap_or(if any_sliding { rope.theta } else { 10_000.0 });
    let norm_eps = keys.number("norm_epsilon").unwrap_or(1e-5);
    let skip_mode = skip_mode(keys, skip);
    let router_norm_eps =
        keys.number("zaya_router_norm_eps").or_else(|| keys.number("layernorm_epsilon")).or(router_norm_eps).unwrap_or(norm_eps);
    ModelConfig {
        vocab_size: keys.required("vocab_size"),
        hidden_size: shape.hidden_size,
        num_query_heads: shape.num_query_heads,
        num_kv_heads,
        head_dim: shape.head_dim,
        num_experts: shape.num_experts,
        expert_width: shape.fused_width / 2,
        router_width: shape.router_width,
        attention,
        sliding_window,
        rope,
        rope_sliding: Rope { theta, partial_rotary_factor: rope.partial_rotary_factor },
        max_position_embeddings: keys.size("max_position_embeddings").unwrap_or(32_768),
        norm_eps,
        router_norm_eps,
        skip_mode,
        initializer_range: keys.number("initializer_range").unwrap_or(0.02),
        pad_token_id: keys.token("pad_token_id", Some(0)),
        bos_token_id: keys.token("bos_token_id", Some(2)),
        eos_token_id: keys.token("eos_token_id", Some(1)),
    }
}

/// Blocks and experts from `zaya_layers`: "a" for attention and a number of experts for a MoE stage, in turn. The scalar
/// `num_hidden_layers` of such files is stale and not read.
fn stages(keys: &mut Keys) -> (usize, usize) {
    let Some(value) = keys.get("zaya_layers") else {
        keys.problem("`zaya_layers` is missing: it says which stages there are");
        return (1, 1);
    };
    let Some(list) = value.as_array().filter(|list| !list.is_empty() && list.len() % 2 == 0) else {
        keys.problem(format!(
            "`zaya_layers` must be a list of pairs \"a\" (attention), number of experts (MoE); got {}",
            shown(value)
        ));
        return (1, 1);
    };
    let mut experts = None;
    for (stage, entry) in list.iter().enumerate() {
        let size = size_of(entry);
        let ok = if stage % 2 == 0 { entry.as_str() == Some("a") } else { size.is_some() };
        if !ok {
            keys.problem(format!(
                "`zaya_layers[{stage}]` is {}, expected {}: only attention and MoE in turn are supported",
                shown(entry),
                if stage % 2 == 0 { "\"a\"" } else { "a number of experts" }
            ));
            break;
        }
        if stage % 2 == 1 && *experts.get_or_insert(size) != size {
            keys.problem(format!(
                "`zaya_layers[{stage}]` is {} and `zaya_layers[1]` is {}: blocks with different numbers of experts are not supported",
                shown(entry),
                shown(&list[1])
            ));
            break;
        }
    }
    (checked_blocks(keys, "zaya_layers", list.len() / 2), experts.flatten().unwrap_or(1))
}

/// Key/value heads stand twice, under `groups_key` and as `num_key_value_heads`; the two must agree.
fn kv_heads(keys: &mut Keys, groups_key: &str, layers: usize) -> usize {
    let groups = keys.per_layer(groups_key, 0, layers);
    let heads = keys.size("num_key_value_heads");
    match (groups, heads) {
        (Some(groups), Some(heads)) if groups != heads => {
            keys.problem(format!("`{groups_key}` gives {groups} key/value heads, `num_key_value_heads` {heads}"));
            groups
        }
        (Some(n), _) | (None, Some(n)) => n,
        (None, None) => present(keys, groups_key, None),
    }
}

/// `value`, or a complaint that `key` is missing (unless it is there and was complained about already).
fn present(keys: &mut Keys, key: &str, value: Option<usize>) -> usize {
    if value.is_none() && !keys.has(key) {
        keys.problem(format!("`{key}` is missing"));
    }
    value.unwrap_or(2)
}

fn nested_theta(keys: &mut Keys) -> Option<f64> {
    keys.get("rope_parameters")?.get("rope_theta")?.as_f64()
}

/// Sliding blocks and their window from `swa_layers`: one entry per stage, 0 or null for full attention. The old number does not
/// count the current token, ours does.
fn sliding(keys: &mut Keys, blocks: usize) -> (Vec<AttentionKind>, Option<usize>) {
    let mut attention = vec![AttentionKind::Full; blocks];
    let Some(value) = keys.get("swa_layers") else {
        if keys.has("sliding_window") {
            keys.problem("`sliding_window` is set, but `swa_layers`, which says for which stages, is not");
        }
        return (attention, None);
    };
    let list = value.as_array().filter(|list| list.len() >= 2 * blocks);
    let Some(list) = list else {
        keys.problem(format!(
            "`swa_layers` must be a list of at least {} windows, one per stage, got {}",
            2 * blocks,
            shown(value)
        ));
        return (attention, None);
    };
    let mut window = None;
    for (block, kind) in attention.iter_mut().enumerate() {
        let entry = &list[2 * block];
        match size_of(entry) {
            None if !entry.is_null() => {
                keys.problem(format!("`swa_layers[{}]` must be a whole number, got {}", 2 * block, shown(entry)));
                break;
            }
            None | Some(0) => (),
            Some(w) if *window.get_or_insert(w) == w => *kind = AttentionKind::Sliding,
            Some(w) => {
                keys.problem(format!(
                    "`swa_layers[{}]` is {w}, but an earlier stage has {}: windows of different lengths are not supported",
                    2 * block,
                    window.unwrap_or(0)
                ));
                break;
            }
        }
    }
    (attention, window.map(|w| w + 1))
}

/// A config with per-layer lists, as ZAYA1-base was published with. What it cannot say is added under our own keys.
pub(crate) fn to_json(config: &ModelConfig, dtype: StoredDtype) -> Value {
    let blocks = config.num_blocks();
    let stages = |attention: Value, moe: Value| -> Value {
        (0..2 * blocks).map(|stage| if stage % 2 == 0 { attention.clone() } else { moe.clone() }).collect()
    };
    let mut out = json!({
        "activation_func": "swiglu",
        "activation_func_fp8_input_store": false,
        "add_bias_linear": false,
        "architectures": ["ZayaForCausalLM"],
        "attention_bias": false,
        "attention_dropout": 0.0,
        "bias_activation_fusion": true,
        "bos_token_id": config.bos_token_id,
        "cca": true,
        "cca_num_q_heads": stages(json!(config.num_query_heads), json!(0)),
        "dtype": dtype_name(dtype),
        "eos_token_id": config.eos_token_id,
        "ffn_hidden_size_list": stages(json!(0), json!(2 * config.expert_width)),
        "gated_linear_unit": true,
        "hidden_size": config.hidden_size,
        "initializer_range": config.initializer_range,
        "kv_channels": config.head_dim,
        "lm_head_bias": false,
        "max_position_embeddings": config.max_position_embeddings,
        "model_type": "zaya",
        "moe_router_topk": 1,
        "norm_epsilon": config.norm_eps,
        "num_attention_heads": 2 * config.num_query_heads,
        "num_hidden_layers": 2 * blocks,
        "num_key_value_heads": config.num_kv_heads,
        "num_query_groups_list": stages(json!(config.num_kv_heads), json!(0)),
        "pad_token_id": config.pad_token_id,
        "partial_rotary_factor": config.rope.partial_rotary_factor,
        "residual_in_fp32": false,
        "rope_scaling": null,
        "rope_theta": config.rope.theta,
        "scale_residual_merge": true,
        "sliding_window": null,
        "tie_word_embeddings": true,
        "transformers_version": "4.57.1",
        "use_cache": true,
        "vocab_size": config.vocab_size,
        "zaya_layers": stages(json!("a"), json!(config.num_experts)),
        "zaya_mlp_expansion": stages(json!(0), json!(config.router_width)),
        "zaya_use_eda": true,
        "zaya_use_mod": true,
    });
    if let Some(window) = config.sliding_window.filter(|_| config.attention.contains(&AttentionKind::Sliding)) {
        out["swa_layers"] = (0..2 * blocks)
            .map(|stage| match config.attention[stage / 2] {
                AttentionKind::Sliding if stage % 2 == 0 => json!(window.saturating_sub(1)),
                _ => json!(0),
            })
            .collect();
        out["swa_rotary_base"] = json!(config.rope_sliding.theta);
    }
    if config.router_norm_eps != ROUTER_NORM_EPS_2025 {
        out["zaya_router_norm_eps"] = json!(config.router_norm_eps);
    }
    if config.skip_mode != SkipMode::Identity {
        out["zaya_skip_mode"] = json!(config.skip_mode);
    }
    out
}
