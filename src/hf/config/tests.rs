use serde_json::{Value, json};

use super::*;
use crate::model::config::{AttentionKind, Rope, SkipMode};

/// ZAYA1-base as it was published.
fn published_base() -> Value {
    let stages = |attention: Value, moe: Value| -> Value {
        (0..80).map(|i| if i % 2 == 0 { attention.clone() } else { moe.clone() }).collect()
    };
    json!({
        "architectures": ["ZayaForCausalLM"], "model_type": "zaya", "transformers_version": "4.57.1", "dtype": "bfloat16",
        "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2, "kv_channels": 128, "num_hidden_layers": 120,
        "num_query_groups_list": stages(json!(2), json!(0)), "zaya_layers": stages(json!("a"), json!(16)), "cca": true,
        "cca_num_q_heads": stages(json!(8), json!(0)), "ffn_hidden_size_list": stages(json!(0), json!(4096)),
        "zaya_mlp_expansion": stages(json!(0), json!(256)), "moe_router_topk": 1, "zaya_use_mod": true, "zaya_use_eda": true,
        "activation_func": "swiglu", "gated_linear_unit": true, "add_bias_linear": false, "attention_bias": false,
        "lm_head_bias": false, "tie_word_embeddings": true, "norm_epsilon": 1e-5, "scale_residual_merge": true,
        "residual_in_fp32": false, "partial_rotary_factor": 0.5, "rope_theta": 1000000, "rope_scaling": false,
        "max_position_embeddings": 32768, "sliding_window": null, "vocab_size": 262272, "attention_dropout": 0.0,
        "bias_activation_fusion": true, "activation_func_fp8_input_store": false, "use_cache": true,
        "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1,
    })
}

/// ZAYA1-8B-legacy.
fn legacy_8b() -> Value {
    json!({
        "architectures": ["ZayaForCausalLM"], "model_type": "zaya", "hidden_size": 2048, "num_hidden_layers": 80,
        "num_attention_heads": 8, "head_dim": 128, "num_query_groups": 2, "num_key_value_heads": 2, "num_experts": 16,
        "ffn_hidden_size": 4096, "zaya_mlp_expansion": 256, "residual_in_fp32": true, "rope_theta": 5000000,
        "max_position_embeddings": 131072, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 106,
        "mamba_cache_dtype": "float32", "clamp_temp": false, "cca_time0": 2, "cca_time1": 2, "swa_layers": null,
        "swa_rotary_base": null, "vocab_size": 262272, "norm_epsilon": 1e-5, "rope_scaling": false, "zaya_use_mod": true,
    })
}

fn native_8b() -> Value {
    json!({
        "architectures": ["ZayaForCausalLM"], "model_type": "zaya", "hidden_size": 2048, "num_hidden_layers": 40,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "moe_intermediate_size": 2048, "num_experts": 16,
        "num_experts_per_tok": 1, "router_hidden_size": 256, "hidden_act": "silu", "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "vocab_size": 262272, "eos_token_id": 106, "sliding_window": null,
        "rope_parameters": {
            "hybrid": {"rope_type": "default", "rope_theta": 5000000, "partial_rotary_factor": 0.5},
            "hybrid_sliding": {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.5},
            "rope_type": "default",
        },
    })
}

fn with(mut config: Value, key: &str, value: Value) -> Value {
    config[key] = value;
    config
}

fn without(mut config: Value, key: &str) -> Value {
    config.as_object_mut().unwrap().remove(key);
    config
}

fn read(config: &Value) -> ModelConfig {
    parse(config).unwrap_or_else(|problems| panic!("{problems:?}")).0
}

/// The complaints about a config, which must name `key`.
fn refused(config: &Value, key: &str) -> String {
    let problems = parse(config).expect_err(&format!("{key} must be refused")).join("\n");
    assert!(problems.contains(key), "`{key}` is not named: {problems}");
    problems
}

#[test]
fn the_published_base_config() {
    let (config, schema) = parse(&published_base()).unwrap();
    assert_eq!(schema, Schema::LegacyLists);
    let preset = crate::model::presets::zaya1_base();
    let expected = ModelConfig {
        rope: Rope { theta: 1e6, partial_rotary_factor: 0.5 },
        skip_mode: SkipMode::Identity,
        router_norm_eps: 1e-6,
        ..preset
    };
    assert_eq!(config, expected);
}

#[test]
fn the_legacy_8b_and_its_native_twin_are_the_same_model() {
    let (legacy, schema) = parse(&legacy_8b()).unwrap();
    assert_eq!(schema, Schema::LegacyScalars);
    let (native, schema) = parse(&native_8b()).unwrap();
    assert_eq!(schema, Schema::Native);
    assert_eq!(legacy, native);
    assert_eq!(native.eos_token_id, Some(106));
    assert_eq!(native.rope.theta, 5e6);
    assert_eq!(native.num_blocks(), 40);
}

#[test]
fn per_layer_lists_may_be_longer_than_the_model_and_have_smoe_names() {
    let mut base = published_base();
    let list = base["ffn_hidden_size_list"].as_array_mut().unwrap();
    list.extend([json!(0), json!(999)]);
    let plain = read(&base);
    for key in ["zaya_layers", "zaya_mlp_expansion", "zaya_use_mod", "zaya_use_eda"] {
        let value = base.as_object_mut().unwrap().remove(key).unwrap();
        base[key.replace("zaya", "smoe")] = value;
    }
    base["rotary_base"] = base.as_object_mut().unwrap().remove("rope_theta").unwrap();
    assert_eq!(read(&base), plain);
    assert_eq!(read(&without(base, "model_type")), plain);
}

#[test]
fn head_counts_of_the_published_schema() {
    // Without the list, half of the heads are computed; without kv_channels, the uncompressed heads share the hidden size.
    let config = read(&without(without(published_base(), "cca_num_q_heads"), "kv_channels"));
    assert_eq!((config.num_query_heads, config.head_dim), (8, 128));
    let mut base = published_base();
    base["cca_num_q_heads"] = (0..80).map(|i| if i % 2 == 0 { 4 } else { 0 }).collect();
    assert_eq!(read(&base).num_query_heads, 4);
    refused(&with(without(published_base(), "cca_num_q_heads"), "num_attention_heads", json!(17)), "num_attention_heads");
    refused(&with(published_base(), "num_key_value_heads", json!(4)), "num_query_groups_list");
}

#[test]
fn sliding_layers_of_old_files_count_one_token_less() {
    let mut base = published_base();
    base["swa_layers"] = (0..80).map(|i| if i % 4 == 0 { json!(4096) } else { Value::Null }).collect();
    base["swa_rotary_base"] = json!(10000);
    let config = read(&base);
    assert_eq!(config.sliding_window, Some(4097));
    assert_eq!(config.attention[..3], [AttentionKind::Sliding, AttentionKind::Full, AttentionKind::Sliding]);
    assert_eq!((config.rope.theta, config.rope_sliding.theta), (1e6, 1e4));
    let mut uneven = base.clone();
    uneven["swa_layers"][4] = json!(100);
    refused(&uneven, "swa_layers[4]");
    refused(&with(base, "swa_layers", json!([1, 0])), "swa_layers");
    refused(&with(published_base(), "sliding_window", json!(128)), "sliding_window");
}

#[test]
fn missing_native_keys_take_the_defaults_of_transformers() {
    let config = read(&json!({"model_type": "zaya"}));
    let expected = ModelConfig {
        rope: Rope { theta: 5e6, partial_rotary_factor: 0.5 },
        max_position_embeddings: 131_072,
        eos_token_id: Some(106),
        ..crate::model::presets::zaya1_base()
    };
    assert_eq!(config, expected);
    let nulls = json!({
        "model_type": "zaya", "layer_types": null, "rope_parameters": null, "sliding_window": null, "pad_token_id": null,
        "bos_token_id": null, "eos_token_id": [7, 8], "hidden_size": null,
    });
    let expected = ModelConfig { pad_token_id: None, bos_token_id: None, eos_token_id: Some(7), ..expected };
    assert_eq!(read(&nulls), expected);
}

#[test]
fn flat_rope_values_serve_where_nested_ones_are_missing() {
    let rope = |theta, partial_rotary_factor| Rope { theta, partial_rotary_factor };
    let flat = json!({"model_type": "zaya", "rope_theta": 7000, "partial_rotary_factor": 0.25});
    assert_eq!((read(&flat).rope, read(&flat).rope_sliding), (rope(7000.0, 0.25), rope(1e4, 0.25)));
    let unnested = json!({"model_type": "zaya", "rope_parameters": {"rope_theta": 7000.0, "rope_type": "default"}});
    assert_eq!(read(&unnested).rope, rope(7000.0, 0.5));
    let nested = with(native_8b(), "rope_theta", json!(1));
    assert_eq!(read(&nested).rope, rope(5e6, 0.5));
    let mut partial = native_8b();
    partial["rope_parameters"]["hybrid"] = json!({"rope_type": "default", "rope_theta": 100.0});
    assert_eq!(read(&partial).rope, rope(100.0, 1.0));
}

#[test]
fn what_is_not_supported_is_refused_by_key() {
    for (key, value) in [
        ("attention_bias", json!(true)),
        ("lm_head_bias", json!(true)),
        ("tie_word_embeddings", json!(false)),
        ("num_experts_per_tok", json!(2)),
        ("moe_router_topk", json!(2)),
        ("cca_time0", json!(3)),
        ("cca_time1", json!(1)),
        ("clamp_temp", json!(true)),
        ("zaya_use_mod", json!(false)),
        ("zaya_use_eda", json!(false)),
        ("hidden_act", json!("gelu")),
        ("attention_dropout", json!(0.1)),
        ("quantization_config", json!({"quant_method": "fp8"})),
        ("rope_scaling", json!({"type": "yarn"})),
        ("rope_scaling", json!(true)),
        ("model_type", json!("zay")),
        ("zaya_skip_mode", json!("one")),
        ("vocab_size", json!("many")),
        ("vocab_size", json!(-1)),
        ("vocab_size", json!(1.5)),
        ("vocab_size", json!(1e30)),
        ("hidden_size", json!(0)),
        ("pad_token_id", json!(-1)),
        ("eos_token_id", json!([])),
        ("pad_token_id", json!(262272)),
    ] {
        for base in [published_base(), legacy_8b(), native_8b()] {
            refused(&with(base, key, value.clone()), key);
        }
    }
    for (key, value) in [
        ("layer_types", json!(["hybrid"])),
        ("layer_types", json!(vec!["mamba"; 40])),
        ("layer_types", json!("hybrid")),
        ("sliding_window", json!("wide")),
        ("rms_norm_eps", json!(0)),
        ("rms_norm_eps", json!("small")),
        ("num_hidden_layers", json!(1_000_000_000)),
        ("num_hidden_layers", json!(0)),
        ("num_key_value_heads", json!(3)),
        ("num_key_value_heads", json!(0)),
        ("rope_parameters", json!([])),
        ("rope_parameters", json!({"hybrid": {"rope_type": "llama3", "rope_theta": 1.0}})),
        ("rope_parameters", json!({"hybrid": 3})),
        ("rope_parameters", json!({"hybrid": {"rope_theta": "1e6"}})),
        ("partial_rotary_factor", json!({})),
    ] {
        refused(&with(native_8b(), key, value), key);
    }
    refused(&with(native_8b(), "layer_types", json!(vec!["hybrid_sliding"; 40])), "sliding_window");
    refused(&with(native_8b(), "head_dim", json!(6)), "head_dim"); // 3 rotating channels
    for (key, value) in [
        ("zaya_layers", json!(["a", "a"])),
        ("zaya_layers", json!([16, "a"])),
        ("zaya_layers", json!(["a", 16, "a", 8])),
        ("zaya_layers", json!(["a"])),
        ("zaya_layers", json!("a")),
        ("zaya_layers", json!(["a", 0])),
        ("ffn_hidden_size_list", json!([0, 4096])),
        ("ffn_hidden_size_list", json!(4095)),
        ("gated_linear_unit", json!(false)),
        ("add_bias_linear", json!(true)),
        ("scale_residual_merge", json!(false)),
        ("cca", json!(false)),
        ("activation_func", json!("gelu")),
        ("normalization", json!("LayerNorm")),
    ] {
        let message = parse(&with(published_base(), key, value)).expect_err(key).join("\n");
        assert!(message.contains(key) || message.contains("fused width"), "{key}: {message}");
    }
    let mut uneven = published_base();
    uneven["zaya_mlp_expansion"][3] = json!(128);
    refused(&uneven, "zaya_mlp_expansion[3]");
    for key in ["hidden_size", "num_attention_heads", "ffn_hidden_size_list", "zaya_mlp_expansion", "vocab_size"] {
        refused(&without(published_base(), key), key);
    }
    for key in ["num_hidden_layers", "num_attention_heads", "num_experts", "ffn_hidden_size", "vocab_size"] {
        refused(&without(legacy_8b(), key), key);
    }
    refused(&with(legacy_8b(), "num_hidden_layers", json!(81)), "num_hidden_layers");
    refused(&json!({"hidden_size": 8}), "model_type");
    assert!(parse(&json!([])).is_err() && parse(&json!(null)).is_err() && parse(&json!({})).is_err());
}

#[test]
fn several_problems_are_told_at_once() {
    let bad = with(with(native_8b(), "attention_bias", json!(true)), "hidden_size", json!("wide"));
    assert_eq!(parse(&bad).unwrap_err().len(), 2);
}

/// No config, however broken, may panic: every key is replaced by every kind of value in turn.
#[test]
fn no_value_of_any_key_panics() {
    let odd = [
        json!(null),
        json!(true),
        json!(0),
        json!(1),
        json!(-1),
        json!(3),
        json!(u64::MAX),
        json!(1e300),
        json!(""),
        json!("a"),
        json!([]),
        json!([0]),
        json!(["a", 1]),
        json!([[]]),
        json!({}),
        json!({"hybrid": null}),
        json!({"rope_type": 1}),
    ];
    let mut read_anyway = 0;
    for base in [published_base(), legacy_8b(), native_8b()] {
        for key in base.as_object().unwrap().keys() {
            for value in &odd {
                read_anyway += parse(&with(base.clone(), key, value.clone())).is_ok() as usize;
            }
            read_anyway += parse(&without(base.clone(), key)).is_ok() as usize;
        }
    }
    assert!(read_anyway > 100);
}

#[test]
fn what_we_write_reads_back() {
    let mut config = crate::model::presets::demo_6m();
    config.attention[1] = AttentionKind::Sliding;
    config.sliding_window = Some(128);
    config.rope_sliding.theta = 777.0;
    for (skip_mode, router_norm_eps) in [(SkipMode::Zero, 1e-5), (SkipMode::Identity, 1e-6), (SkipMode::Zero, 1e-6)] {
        let config = ModelConfig { skip_mode, router_norm_eps, ..config.clone() };
        for json in [native_json(&config, StoredDtype::F32), legacy_json(&config, StoredDtype::F32)] {
            assert_eq!(read(&json), config);
        }
    }
    let native = native_json(&crate::model::presets::demo_6m(), StoredDtype::F32);
    assert!(native.get("zaya_skip_mode").is_none() && native.get("zaya_router_norm_eps").is_none());
}
