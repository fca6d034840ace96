//! `tokenizer_config.json`, without which `transformers` would take any tokenizer of a ZAYA model for Gemma's.

use serde_json::{Map, Value, json};

use crate::model::config::ModelConfig;

/// The config for a parsed `tokenizer.json`: the generic class, the context length, and the model's special tokens by their text.
pub(super) fn for_tokenizer(tokenizer: &Value, config: &ModelConfig) -> Value {
    let mut out = Map::new();
    for (key, id) in [("bos_token", config.bos_token_id), ("eos_token", config.eos_token_id), ("pad_token", config.pad_token_id)]
    {
        out.extend(id.and_then(|id| token_text(tokenizer, id)).map(|text| (key.to_string(), json!(text))));
    }
    out.insert("clean_up_tokenization_spaces".into(), json!(false));
    out.insert("model_max_length".into(), json!(config.max_position_embeddings));
    out.insert("tokenizer_class".into(), json!("PreTrainedTokenizerFast"));
    out.sort_keys();
    Value::Object(out)
}

/// The text of token `id`, among the added tokens or in the vocabulary (an object of ids, or a list in order of ids).
fn token_text(tokenizer: &Value, id: u32) -> Option<&str> {
    let added = tokenizer["added_tokens"].as_array().into_iter().flatten();
    let named = added.filter(|token| token["id"] == json!(id)).find_map(|token| token["content"].as_str());
    named.or_else(|| match &tokenizer["model"]["vocab"] {
        Value::Object(vocab) => vocab.iter().find(|(_, value)| **value == json!(id)).map(|(text, _)| text.as_str()),
        Value::Array(pieces) => pieces.get(id as usize)?.get(0)?.as_str(),
        _ => None,
    })
}
