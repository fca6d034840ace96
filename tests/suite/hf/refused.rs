//! Broken, foreign and hostile directories: each is refused with a sentence that names file and tensor.

use std::fs;
use std::path::Path;

use safetensors::Dtype;
use serde_json::{Value, json};
use zaya::hf::{self, Layout, SaveOptions, StoredDtype};
use zaya::model::config::{AttentionKind, ModelConfig};

use super::*;

#[test]
fn missing_and_foreign_tensors_and_wrong_shapes_are_all_named() {
    let (dir, _) = toy_dir();
    let keep = keep(dir.path());
    let change = |name: &str, data: &[u8]| match name {
        "model.norm.weight" | "model.layers.1.mlp.gate.balancing_biases" => None,
        "model.embed_tokens.weight" => Some((Dtype::F32, vec![6, 11], data.to_vec())),
        "model.layers.0.self_attn.qkv_proj.conv_qk_depthwise.weight" => Some((Dtype::F32, vec![12, 2], data.to_vec())),
        "model.layers.0.input_layernorm.weight" => Some((Dtype::I32, vec![6], data.to_vec())),
        _ => keep(name, data),
    };
    rewrite(dir.path(), change, &[("model.layers.7.extra", Dtype::F32, &[1], vec![0; 4])]);
    assert_refused(
        hf::load(dir.path()),
        &[
            "model.norm.weight",
            "model.layers.1.mlp.gate.balancing_biases",
            "model.layers.7.extra",
            "`model.embed_tokens.weight` is [6, 11], the config asks for [11, 6]",
            "[12, 2], the config asks for [12, 1, 2]",
            "`model.layers.0.input_layernorm.weight` in",
            "I32",
        ],
    );
}

#[test]
fn computed_tensors_of_old_files_are_ignored() {
    let (dir, values) = toy_dir();
    rewrite(dir.path(), keep(dir.path()), &[("model.rotary_emb.inv_freq", Dtype::F32, &[1], vec![0; 4])]);
    assert_eq!(all(&hf::load(dir.path()).unwrap()), values);
}

#[test]
fn a_config_for_another_size_is_told_from_the_weights() {
    let (dir, _) = toy_dir();
    let path = dir.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config["num_hidden_layers"] = json!(3);
    config["layer_types"] = Value::Null;
    fs::write(&path, config.to_string()).unwrap();
    assert_refused(
        hf::load(dir.path()),
        &["config.json", "tensors are missing", "model.layers.2.input_layernorm.weight", "more"],
    );
}

#[test]
fn broken_directories_are_refused_with_a_sentence() {
    assert_refused(hf::load(Path::new("no/such/model")), &["no/such/model", "not a directory"]);
    let empty = tempfile::tempdir().unwrap();
    assert_refused(hf::load(empty.path()), &["config.json"]);
    for text in ["", "{", "[]", "null", "{\"model_type\": \"llama\"}", "{\"model_type\": \"zaya\", \"attention_bias\": true}"] {
        fs::write(empty.path().join("config.json"), text).unwrap();
        assert_refused(hf::load(empty.path()), &["config.json"]);
    }
    fs::write(empty.path().join("config.json"), [0xff, 0xfe, 0]).unwrap();
    assert_refused(hf::load(empty.path()), &["config.json"]);
    fs::write(empty.path().join("config.json"), "{\"model_type\": \"zaya\"}").unwrap();
    assert_refused(hf::load(empty.path()), &["neither model.safetensors nor model.safetensors.index.json"]);
    fs::write(empty.path().join("pytorch_model.bin"), "").unwrap();
    assert_refused(hf::load(empty.path()), &["pytorch_model.bin"]);
}

#[test]
fn damaged_weight_files_are_refused_at_every_length() {
    let (dir, _) = toy_dir();
    let path = dir.path().join("model.safetensors");
    let whole = fs::read(&path).unwrap();
    let header = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    for length in [0, 1, 7, 8, 9, header, header + 7, header + 8, header + 9, whole.len() - 4, whole.len() - 1] {
        fs::write(&path, &whole[..length]).unwrap();
        assert_refused(hf::load(dir.path()), &["model.safetensors", "not a whole safetensors file"]);
    }
    let longer = [whole.as_slice(), &[0; 3]].concat();
    let huge_header = [&u64::MAX.to_le_bytes(), &whole[8..]].concat();
    let no_json = [&whole[..8], &vec![b'x'; whole.len() - 8]].concat();
    let offsets = |from: &str, to: &str| {
        let text = String::from_utf8(whole[8..8 + header].to_vec()).unwrap();
        assert!(text.contains(from));
        let text = text.replacen(from, to, 1);
        [&(text.len() as u64).to_le_bytes(), text.as_bytes(), &whole[8 + header..]].concat()
    };
    let far = offsets("\"data_offsets\":[0,", "\"data_offsets\":[18446744073709551000,");
    let wide = offsets("\"shape\":[11,6]", "\"shape\":[4611686018427387904,16]");
    for (what, bytes) in [
        ("longer", longer),
        ("huge header", huge_header),
        ("no JSON", no_json),
        ("far offsets", far),
        ("overflowing shape", wide),
    ] {
        fs::write(&path, bytes).unwrap();
        eprintln!("{what}");
        assert_refused(hf::load(dir.path()), &["model.safetensors", "not a whole safetensors file"]);
    }
}

#[test]
fn a_broken_index_is_refused_by_shard_and_tensor() {
    let dir = tempfile::tempdir().unwrap();
    let values = counted(&toy());
    let options = SaveOptions { max_shard_bytes: 2000, ..single(StoredDtype::F32) };
    let saved = hf::save(dir.path(), &toy(), &options, |id| Ok(values[id].clone())).unwrap();
    let shards: Vec<_> = saved.files.iter().filter(|f| f.ends_with(".safetensors")).collect();
    let index = dir.path().join("model.safetensors.index.json");
    let good: Value = serde_json::from_slice(&fs::read(&index).unwrap()).unwrap();
    let with_map = |change: &dyn Fn(&mut Value)| {
        let mut value = good.clone();
        change(&mut value);
        fs::write(&index, value.to_string()).unwrap();
        hf::load(dir.path())
    };
    assert!(with_map(&|_| ()).is_ok());
    let renamed = |to: &'static str| move |v: &mut Value| v["weight_map"]["model.norm.weight"] = json!(to);
    assert_refused(with_map(&renamed("model-9.safetensors")), &["model-9.safetensors", "index.json", "not in"]);
    assert_refused(with_map(&renamed("../model.safetensors")), &["../model.safetensors", "not a file name"]);
    assert_refused(with_map(&renamed("/etc/hostname")), &["not a file name"]);
    assert_refused(with_map(&renamed("..")), &["not a file name"]);
    assert_refused(with_map(&|v| v["weight_map"]["model.norm.weight"] = json!(3)), &["model.norm.weight", "not a file name"]);
    // The last shard ends with the final norm, the first does not hold it.
    assert_refused(
        with_map(&|v| v["weight_map"]["model.norm.weight"] = json!(shards[0])),
        &["`model.norm.weight` in model-00001"],
    );
    assert_refused(with_map(&|v| v["weight_map"] = json!({})), &["empty"]);
    assert_refused(with_map(&|v| v["weight_map"] = json!([])), &["weight_map"]);
    assert_refused(
        with_map(&|v| _ = v["weight_map"].as_object_mut().unwrap().remove("model.norm.weight")),
        &["missing", "model.norm.weight"],
    );
    fs::write(&index, "{").unwrap();
    assert_refused(hf::load(dir.path()), &["index.json", "JSON"]);
    fs::write(&index, good.to_string()).unwrap();
    let shard = dir.path().join(shards[1]);
    let bytes = fs::read(&shard).unwrap();
    fs::write(&shard, &bytes[..bytes.len() - 1]).unwrap();
    assert_refused(hf::load(dir.path()), &[shards[1], "not a whole safetensors file"]);
    fs::remove_file(&shard).unwrap();
    assert_refused(hf::load(dir.path()), &[shards[1], "not in"]);
}

#[test]
fn a_save_that_fails_or_would_overwrite_leaves_nothing_behind() {
    let config = toy();
    let dir = tempfile::tempdir().unwrap();
    let mut left = 40;
    let result = hf::save(dir.path(), &config, &SaveOptions { max_shard_bytes: 1000, ..single(StoredDtype::F32) }, |id| {
        left -= 1;
        anyhow::ensure!(left > 0, "the disk that held the checkpoint is gone");
        Ok(counted(&config)[id].clone())
    });
    assert!(format!("{:#}", result.unwrap_err()).contains("is gone"));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);

    let wrong_length = hf::save(dir.path(), &config, &single(StoredDtype::F32), |_| Ok(vec![0.0; 3]));
    assert!(format!("{:#}", wrong_length.unwrap_err()).contains("3 values"));
    let no_tokenizer = SaveOptions { tokenizer: Some("no/tokenizer.json".into()), ..single(StoredDtype::F32) };
    assert_refused(hf::save(dir.path(), &config, &no_tokenizer, |id| Ok(counted(&config)[id].clone())), &["no/tokenizer.json"]);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);

    let (full, values) = toy_dir();
    let before = fs::read(full.path().join("model.safetensors")).unwrap();
    let result = hf::save(full.path(), &config, &single(StoredDtype::F32), |id| Ok(values[id].clone()));
    assert_refused(result, &["already holds a model"]);
    assert_eq!(fs::read(full.path().join("model.safetensors")).unwrap(), before);
}

#[test]
fn the_legacy_layout_is_refused_where_it_has_no_words() {
    let dir = tempfile::tempdir().unwrap();
    let mut config =
        ModelConfig { attention: vec![AttentionKind::Full, AttentionKind::Sliding], sliding_window: Some(2), ..toy() };
    let options = SaveOptions { layout: Layout::Legacy, ..single(StoredDtype::F32) };
    let save = |name: &str, config: &ModelConfig| {
        hf::save(&dir.path().join(name), config, &options, |id| Ok(counted(config)[id].clone()))
    };
    save("window-2", &config).unwrap();
    assert_eq!(hf::load(&dir.path().join("window-2")).unwrap().config, config);
    config.sliding_window = Some(1); // would be written as 0, which means full attention
    assert_refused(save("window-1", &config), &["sliding_window"]);
    config.sliding_window = Some(2);
    config.rope_sliding.partial_rotary_factor = 1.0;
    assert_refused(save("two-shares", &config), &["partial_rotary_factor"]);
}
