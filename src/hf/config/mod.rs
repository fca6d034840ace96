//! `config.json` in the three schemas that ZAYA files exist in, read into one [`ModelConfig`].

mod keys;
mod legacy;
mod native;
mod python_json;

use std::path::Path;

use anyhow::Result;
use serde_json::{Map, Value, json};

use crate::error::{bad_input, did_you_mean};
use crate::hf::StoredDtype;
use crate::model::config::ModelConfig;
use keys::{Keys, shown};

pub(crate) use legacy::{ROUTER_NORM_EPS_2025, to_json as legacy_json};
pub(crate) use native::{generation_json, to_json as native_json};
pub(crate) use python_json::to_text;

/// Which family of keys a `config.json` is written in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Schema {
    /// As ZAYA1-base was published in November 2025: two stages per block, one list entry per stage (`zaya_layers`, ...).
    LegacyLists,
    /// The old names as single numbers (ZAYA1-8B-legacy).
    LegacyScalars,
    /// `transformers` 5.13 and later.
    Native,
}

impl Schema {
    pub fn name(self) -> &'static str {
        match self {
            Self::LegacyLists => "legacy, per-layer lists",
            Self::LegacyScalars => "legacy, scalars",
            Self::Native => "native",
        }
    }
}

/// More blocks or experts than this are a broken file, and would only fill the memory with names.
const MAX_BLOCKS: usize = 10_000;
const MAX_EXPERT_MATRICES: usize = 10_000_000;

/// Reads the config file `path`. Every unusable value is told at once, by file and key.
pub fn read(path: &Path) -> Result<(ModelConfig, Schema)> {
    let text = std::fs::read(path).map_err(|e| {
        bad_input(format!("cannot read the model's config {}: {e}. A model directory holds a config.json", path.display()))
    })?;
    let value: Value =
        serde_json::from_slice(&text).map_err(|e| bad_input(format!("{} is not valid JSON: {e}", path.display())))?;
    parse(&value).map_err(|problems| {
        bad_input(format!("{} does not describe a model that can be used:\n  - {}", path.display(), problems.join("\n  - ")))
    })
}

/// Reads a config that is already parsed; the error lists every problem.
pub fn parse(value: &Value) -> Result<(ModelConfig, Schema), Vec<String>> {
    let Some(map) = value.as_object() else {
        return Err(vec![format!("the file must hold one JSON object, found {}", shown(value))]);
    };
    let mut keys = Keys::new(map);
    let schema = schema_of(&mut keys, map);
    if !keys.problems.is_empty() {
        return Err(keys.problems);
    }
    common_limits(&mut keys);
    let config = match schema {
        Schema::Native => native::parse(&mut keys),
        Schema::LegacyLists => legacy::parse_lists(&mut keys),
        Schema::LegacyScalars => legacy::parse_scalars(&mut keys),
    };
    if keys.problems.is_empty() {
        // Only a config whose every key was readable is worth judging as a whole.
        let judged = config.problems().into_iter().map(|(_, text)| in_words_of_file(schema, &text));
        let found: Vec<_> = size_problems(&config).into_iter().chain(judged).collect();
        keys.problems.extend(found);
    }
    if keys.problems.is_empty() { Ok((config, schema)) } else { Err(keys.problems) }
}

/// Tells the schemas apart by the keys that only they have.
fn schema_of(keys: &mut Keys, map: &Map<String, Value>) -> Schema {
    let native = ["moe_intermediate_size", "router_hidden_size", "rms_norm_eps"];
    let scalar = ["zaya_mlp_expansion", "num_query_groups", "ffn_hidden_size", "norm_epsilon", "zaya_use_mod", "zaya_use_eda"];
    let list = ["zaya_layers", "ffn_hidden_size_list", "num_query_groups_list"];
    let has = |names: &[&str]| names.iter().any(|k| keys.has(k));
    let (is_native, is_scalar, is_list) = (has(&native), has(&scalar), has(&list));
    match keys.get("model_type").map(|v| v.as_str().unwrap_or("")) {
        Some("zaya" | "smoe") => (),
        Some(other) => {
            let text = format!(
                "`model_type` is {:?}, expected \"zaya\"{}: only ZAYA models are supported",
                other,
                did_you_mean(other, ["zaya"])
            );
            keys.problem(text);
        }
        None if is_native || is_scalar || is_list => (),
        None => keys.problem(format!(
            "`model_type` is missing, expected \"zaya\", and none of ZAYA's own keys is there (found: {})",
            shown(&json!(map.keys().take(6).collect::<Vec<_>>()))
        )),
    }
    match (is_native, is_list, is_scalar) {
        (true, _, _) | (false, false, false) => Schema::Native,
        (false, true, _) => Schema::LegacyLists,
        (false, false, true) => Schema::LegacyScalars,
    }
}

/// What no schema may ask for.
fn common_limits(keys: &mut Keys) {
    let bias = "the model would need bias tensors that ZAYA's published models do not have";
    keys.only("attention_bias", &json!(false), bias);
    keys.only("lm_head_bias", &json!(false), bias);
    keys.only("tie_word_embeddings", &json!(true), "the head is the embedding");
    for key in ["num_experts_per_tok", "moe_router_topk"] {
        keys.only(key, &json!(1), "a token goes to one expert");
    }
    for key in ["cca_time0", "cca_time1"] {
        keys.only(key, &json!(2), "both convolutions of CCA see two tokens");
    }
    keys.only("clamp_temp", &json!(false), "the key temperature is used as it is");
    keys.only("zaya_use_mod", &json!(true), "the router always has a skip class");
    keys.only("zaya_use_eda", &json!(true), "the routers always pass their state from block to block");
    keys.only("hidden_act", &json!("silu"), "experts are SwiGLU");
    keys.only("activation_func", &json!("swiglu"), "experts are SwiGLU");
    keys.only("gated_linear_unit", &json!(true), "experts are SwiGLU");
    keys.only("add_bias_linear", &json!(false), bias);
    keys.only("scale_residual_merge", &json!(true), "every merge with the residual stream is scaled");
    keys.only("cca", &json!(true), "attention is always CCA");
    keys.only("normalization", &json!("RMSNorm"), "every norm is an RMSNorm");
    keys.only("attention_dropout", &json!(0.0), "there is no dropout");
    if keys.has("quantization_config") {
        keys.problem("`quantization_config` is set: quantised weights cannot be read, use the original model");
    }
    if let Some(scaling) = keys.get("rope_scaling") {
        // ZAYA1-base was published with `false` here.
        match scaling {
            Value::Bool(false) => (),
            Value::Object(map) => check_rope_type(keys, "rope_scaling", map),
            other => keys.problem(format!("`rope_scaling` is {}, expected null or an object", shown(other))),
        }
    }
}

/// Complains about any RoPE but the plain one. `at` names the object in the file.
fn check_rope_type(keys: &mut Keys, at: &str, map: &Map<String, Value>) {
    for key in ["rope_type", "type"] {
        if let Some(kind) = map.get(key).filter(|v| !v.is_null() && v.as_str() != Some("default")) {
            keys.problem(format!("`{at}.{key}` is {}, but only \"default\" is supported", shown(kind)));
        }
    }
}

/// Sizes that no file can mean.
fn size_problems(config: &ModelConfig) -> Vec<String> {
    let mut out = Vec::new();
    if config.num_blocks() * config.num_experts.max(1) > MAX_EXPERT_MATRICES {
        out.push(format!(
            "{} blocks of {} experts are more than {MAX_EXPERT_MATRICES} experts in all, more than can be handled",
            config.num_blocks(),
            config.num_experts
        ));
    }
    let largest = [config.hidden_size, config.expert_width, config.router_width, config.q_dim(), config.kv_dim()];
    if largest.into_iter().any(|n| n > 1 << 24) {
        out.push(format!("a width of {} channels is more than can be handled (2^24)", largest.into_iter().max().unwrap_or(0)));
    }
    out
}

/// The number of blocks as a length that can be allocated.
fn checked_blocks(keys: &mut Keys, key: &str, blocks: usize) -> usize {
    if blocks > MAX_BLOCKS {
        keys.problem(format!("`{key}` gives {blocks} blocks, more than can be handled ({MAX_BLOCKS})"));
    }
    blocks.min(MAX_BLOCKS)
}

/// A sentence about fields of [`ModelConfig`], with every field replaced by the key it was read from.
fn in_words_of_file(schema: Schema, text: &str) -> String {
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut out = String::new();
    let mut rest = text;
    while !rest.is_empty() {
        let end = rest.find(|c| !is_word(c)).unwrap_or(rest.len());
        out += key_of(schema, &rest[..end]);
        let next = rest[end..].find(is_word).map_or(rest.len(), |n| end + n);
        out += &rest[end..next];
        rest = &rest[next..];
    }
    out
}

/// The key of a file that stands for a field of [`ModelConfig`].
fn key_of(schema: Schema, field: &str) -> &str {
    let (native, lists, scalars) = match field {
        "num_query_heads" => ("num_attention_heads", "cca_num_q_heads", "num_attention_heads"),
        "num_kv_heads" => ("num_key_value_heads", "num_query_groups_list", "num_query_groups"),
        "head_dim" => ("head_dim", "kv_channels", "head_dim"),
        "num_experts" => ("num_experts", "zaya_layers", "num_experts"),
        "expert_width" => ("moe_intermediate_size", "ffn_hidden_size_list", "ffn_hidden_size"),
        "router_width" => ("router_hidden_size", "zaya_mlp_expansion", "zaya_mlp_expansion"),
        "num_blocks" => ("num_hidden_layers", "zaya_layers", "num_hidden_layers"),
        "sliding_window" => ("sliding_window", "swa_layers", "swa_layers"),
        "norm_eps" => ("rms_norm_eps", "norm_epsilon", "norm_epsilon"),
        "router_norm_eps" => ("zaya_router_norm_eps", "layernorm_epsilon", "layernorm_epsilon"),
        other => (other, other, other),
    };
    match schema {
        Schema::Native => native,
        Schema::LegacyLists => lists,
        Schema::LegacyScalars => scalars,
    }
}

/// The `dtype` string of a config.
pub(crate) fn dtype_name(dtype: StoredDtype) -> &'static str {
    match dtype {
        StoredDtype::F32 => "float32",
        StoredDtype::Bf16 => "bfloat16",
        StoredDtype::F16 => "float16",
    }
}

#[cfg(test)]
mod tests;
