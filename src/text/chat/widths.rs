//! Which bytes of a text a token stands for.

use std::ops::Range;

use anyhow::Result;
use serde_json::Value;

use crate::text::Encoder;

/// Bytes of text that each id stands for, by the spelling of its entry.
#[derive(Debug)]
pub struct Widths(Vec<u32>);

impl Widths {
    /// By a parsed `tokenizer.json`. An entry whose width cannot be known is found out when a text does not add up.
    pub fn of(encoder: &Encoder, tokenizer: &Value) -> Self {
        let uses = |part: &str, kind: &str| tokenizer[part].to_string().contains(&format!("\"{kind}\""));
        let bytes = uses("decoder", "ByteLevel") || uses("pre_tokenizer", "ByteLevel");
        let mut widths: Vec<u32> = (0..encoder.vocab_size() as u32)
            .map(|id| {
                encoder.id_to_token(id).map_or(0, |token| if bytes { token.chars().count() } else { sentence(&token) } as u32)
            })
            .collect();
        for token in tokenizer["added_tokens"].as_array().into_iter().flatten() {
            if let (Some(id), Some(text)) = (token["id"].as_u64(), token["content"].as_str())
                && let Some(width) = widths.get_mut(id as usize)
            {
                *width = text.len() as u32;
            }
        }
        Self(widths)
    }

    /// Ids of `text`, and the bytes that each stands for. Where a normaliser changes the text, `tokenizers` tells what came from where.
    pub fn encode(&self, encoder: &Encoder, text: &str) -> Result<Vec<(u32, Range<usize>)>> {
        let ids = encoder.encode(text)?;
        let mut end = 0;
        let placed: Vec<(u32, Range<usize>)> = ids
            .into_iter()
            .map(|id| {
                let start = end;
                end += self.0[id as usize] as usize;
                (id, start..end)
            })
            .collect();
        if end == text.len() { Ok(placed) } else { encoder.encode_with_places(text) }
    }
}

/// Of an entry of a SentencePiece vocabulary: `▁` is a space, `<0x0A>` a byte.
fn sentence(token: &str) -> usize {
    let byte = token.strip_prefix("<0x").and_then(|t| t.strip_suffix('>')).is_some_and(|hex| hex.len() == 2);
    if byte { 1 } else { token.len() - 2 * token.matches('▁').count() }
}
