//! A `tokenizer.json` for the engine and for `tokenizers`, set up alike.

use std::path::Path;

use anyhow::{Context, Result, anyhow};
use tokenizers::Tokenizer;

use crate::engine::Engine;

pub struct Both {
    pub reference: Tokenizer,
    /// The engine, or why it does not take the file.
    pub engine: Result<Engine, String>,
    /// Texts of the added tokens.
    pub added: Vec<String>,
}

pub fn load(path: &Path) -> Result<Both> {
    let bytes = std::fs::read(path).with_context(|| format!("reading {}", path.display()))?;
    let json: serde_json::Value = serde_json::from_slice(&bytes).with_context(|| format!("parsing {}", path.display()))?;
    let mut reference = Tokenizer::from_bytes(&bytes).map_err(|e| anyhow!("{}: {e}", path.display()))?;
    reference.with_padding(None);
    reference.with_truncation(None).map_err(|e| anyhow!("{e}"))?;
    reference.set_encode_special_tokens(true);
    let engine = Engine::from_json(&json, |token| reference.token_to_id(token));
    let added = json["added_tokens"].as_array().into_iter().flatten();
    let added = added.filter_map(|t| t["content"].as_str()).map(str::to_string).collect();
    Ok(Both { reference, engine, added })
}
