//! The tokenizer of a model as evaluation uses it: special tokens spelled out in a text are recognised, as by `transformers`.

use std::collections::{BTreeSet, HashSet};
use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow};
use serde_json::Value;
use tokenizers::Tokenizer;

use super::harness::encode::Encode;
use super::harness::run::Decode;
use crate::error::bad_input;
use crate::model::ModelConfig;
use crate::text::{Encoder, Eod};

/// The engine of this project, for texts without special tokens.
struct Fast {
    engine: Encoder,
    specials: Specials,
    /// What the tokenizer puts around a text where special tokens are asked for.
    around: (Vec<u32>, Vec<u32>),
    /// A text can be encoded in parts: nothing is put behind it, and special tokens neither hold spaces nor take them.
    in_parts: bool,
}

/// Texts of special tokens.
struct Specials {
    texts: HashSet<String>,
    lengths: BTreeSet<usize>,
    first_bytes: [bool; 256],
}

impl Specials {
    fn new(texts: HashSet<String>) -> Self {
        let mut first_bytes = [false; 256];
        texts.iter().filter_map(|t| t.bytes().next()).for_each(|b| first_bytes[b as usize] = true);
        Self { lengths: texts.iter().map(String::len).collect(), texts, first_bytes }
    }

    fn occur_in(&self, text: &str) -> bool {
        let at = |i: usize| self.lengths.iter().filter_map(move |n| text.get(i..i + n)).any(|part| self.texts.contains(part));
        text.bytes().enumerate().any(|(i, b)| self.first_bytes[b as usize] && at(i))
    }
}

/// A `tokenizer.json` with the tokens that begin and end a text.
pub struct EvalTokenizer {
    pub path: PathBuf,
    /// SHA-256 of the file, hexadecimal.
    pub sha256: String,
    tokenizer: Tokenizer,
    fast: Option<Fast>,
    bos: Option<(u32, String)>,
    eos: Option<(u32, String)>,
    pad: Option<(u32, String)>,
}

impl EvalTokenizer {
    /// Reads `path`. BOS, EOS and padding are those of the `tokenizer_config.json` beside it, else the model's.
    ///
    /// # Errors
    /// `BadInput`: no tokenizer, or one with ids that the model does not have.
    pub fn load(path: &Path, config: &ModelConfig) -> Result<Self> {
        let shown = path.display();
        let bytes = std::fs::read(path).map_err(|e| bad_input(format!("the tokenizer {shown} cannot be read: {e}")))?;
        let not_one = |e: &dyn std::fmt::Display| bad_input(format!("{shown} is not a Hugging Face tokenizer.json: {e}"));
        let mut tokenizer = Tokenizer::from_bytes(&bytes).map_err(|e| not_one(&e))?;
        tokenizer.with_padding(None);
        tokenizer.with_truncation(None).map_err(|e| not_one(&e))?;
        let largest = tokenizer.get_vocab(true).into_values().max().unwrap_or(0) as usize;
        if largest >= config.vocab_size {
            return Err(bad_input(format!(
                "the tokenizer {shown} has ids up to {largest}, but the model's vocabulary ends at {}: it is not the model's",
                config.vocab_size - 1
            )));
        }
        let named = special_tokens(path);
        let token = |key: &str, of_model: Option<u32>| {
            let named =
                named.as_ref().and_then(|c| text_of(&c[key])).and_then(|text| Some((tokenizer.token_to_id(&text)?, text)));
            named.or_else(|| of_model.and_then(|id| Some((id, tokenizer.id_to_token(id)?))))
        };
        let bos = token("bos_token", config.bos_token_id);
        let eos = token("eos_token", config.eos_token_id);
        let pad = token("pad_token", config.pad_token_id);
        Ok(Self { path: path.to_path_buf(), sha256: crate::text::sha256_hex(&bytes), tokenizer, fast: None, bos, eos, pad })
    }

    /// Has texts without special tokens encoded by the engine of this project, where that knows the tokenizer: the same ids, sooner.
    /// Setting it up takes a moment, so this is for many texts.
    pub fn speed_up(&mut self) -> Result<()> {
        let Some(around) = self.around()? else { return Ok(()) };
        let added = self.tokenizer.get_added_tokens_decoder();
        let special = added.values().filter(|t| t.special);
        // Text could become one of these only on its way through the normalizer.
        if self.tokenizer.get_normalizer().is_some() && special.clone().any(|t| t.normalized) {
            return Ok(());
        }
        let specials = Specials::new(special.clone().map(|t| t.content.clone()).filter(|t| !t.is_empty()).collect());
        let engine = Encoder::load(&self.path, &Eod::Absent)?;
        if engine.slow_because().is_none() {
            let plain =
                |t: &tokenizers::AddedToken| !t.lstrip && !t.rstrip && !t.single_word && !t.content.contains(char::is_whitespace);
            let in_parts = around.1.is_empty() && special.clone().all(plain);
            self.fast = Some(Fast { engine, specials, around, in_parts });
        }
        Ok(())
    }

    /// The ids in front of and behind a text that was encoded with special tokens; none if it is not as simple as that.
    fn around(&self) -> Result<Option<(Vec<u32>, Vec<u32>)>> {
        let mut found = None;
        for sample in ["a", "b c"] {
            let (plain, with) = (self.by_tokenizers(sample, false)?, self.by_tokenizers(sample, true)?);
            let Some(at) = with.windows(plain.len().max(1)).position(|w| w == plain) else { return Ok(None) };
            let this = (with[..at].to_vec(), with[at + plain.len()..].to_vec());
            if found.get_or_insert_with(|| this.clone()) != &this {
                return Ok(None);
            }
        }
        Ok(found)
    }

    fn by_tokenizers(&self, text: &str, special: bool) -> Result<Vec<u32>> {
        let encoding = self.tokenizer.encode_fast(text, special);
        let encoding = encoding.map_err(|e| anyhow!("the tokenizer cannot encode a text of {} bytes: {e}", text.len()))?;
        Ok(encoding.get_ids().to_vec())
    }

    pub fn pad(&self) -> Option<(u32, &str)> {
        self.pad.as_ref().map(|(id, text)| (*id, text.as_str()))
    }

    /// The text of one token, as it stands in the vocabulary.
    pub fn token(&self, id: u32) -> Option<String> {
        self.tokenizer.id_to_token(id)
    }
}

/// `tokenizer_config.json` beside the tokenizer; none where it is missing or no JSON.
fn special_tokens(tokenizer: &Path) -> Option<Value> {
    let text = std::fs::read_to_string(tokenizer.with_file_name("tokenizer_config.json")).ok()?;
    serde_json::from_str(&text).ok()
}

/// A token as a text, or as an object with its `content`.
fn text_of(token: &Value) -> Option<String> {
    token.as_str().or_else(|| token["content"].as_str()).map(str::to_string)
}

impl Encode for EvalTokenizer {
    fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>> {
        let fast = self.fast.as_ref().filter(|f| !f.specials.occur_in(text));
        // Where the engine finds a special token in it all the same, `tokenizers` says what is right.
        let Some((fast, ids)) = fast.and_then(|f| Some((f, f.engine.encode(text).ok()?))) else {
            return self.by_tokenizers(text, special);
        };
        if !special {
            return Ok(ids);
        }
        let (before, after) = &fast.around;
        Ok([before.as_slice(), &ids, after.as_slice()].concat())
    }

    fn cut_after(&self, text: &str, from: usize) -> Option<usize> {
        self.fast.as_ref().filter(|f| f.in_parts)?.engine.cut_after(text, from)
    }

    fn bos(&self) -> Option<(u32, &str)> {
        self.bos.as_ref().map(|(id, text)| (*id, text.as_str()))
    }

    fn eos(&self) -> Option<(u32, &str)> {
        self.eos.as_ref().map(|(id, text)| (*id, text.as_str()))
    }
}

impl Decode for EvalTokenizer {
    fn decode(&self, ids: &[u32]) -> Result<String> {
        self.tokenizer.decode(ids, true).map_err(|e| anyhow!("the tokenizer cannot decode {} ids: {e}", ids.len()))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, json};

    use super::*;

    /// A byte-level tokenizer with two merges that puts a BOS in front.
    fn byte_level() -> Value {
        let added = |id: usize, content: &str| json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true});
        let mut vocab: Map<String, Value> = Map::new();
        for (id, special) in ["<pad>", "<eos>", "<bos>"].iter().enumerate() {
            vocab.insert(special.to_string(), id.into());
        }
        let mut moved = 0x100;
        for byte in 0..=255u32 {
            let plain = matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
            let letter = if plain { byte } else { moved };
            moved += u32::from(!plain);
            vocab.insert(char::from_u32(letter).unwrap().to_string(), (byte + 3).into());
        }
        vocab.insert("\u{120}t".into(), 259.into());
        vocab.insert("he".into(), 260.into());
        json!({
            "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
            "added_tokens": [added(0, "<pad>"), added(1, "<eos>"), added(2, "<bos>")],
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
            "post_processor": {"type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<bos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {"<bos>": {"id": "<bos>", "ids": [2], "tokens": ["<bos>"]}}},
            "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
            "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false, "vocab": vocab,
                "merges": [["\u{120}", "t"], ["h", "e"]]}
        })
    }

    #[test]
    fn the_engine_gives_the_ids_of_tokenizers() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        std::fs::write(&path, byte_level().to_string()).unwrap();
        let config =
            ModelConfig { vocab_size: 300, bos_token_id: Some(2), eos_token_id: Some(1), ..crate::model::presets::bench_15m() };
        let mut tokenizer = EvalTokenizer::load(&path, &config).unwrap();
        assert_eq!((tokenizer.bos(), tokenizer.eos()), (Some((2, "<bos>")), Some((1, "<eos>"))));
        tokenizer.speed_up().unwrap();
        assert!(tokenizer.fast.is_some(), "the engine does not know the tokenizer");
        assert_eq!(tokenizer.encode(" the", true).unwrap(), [2, 259, 260]);
        let texts = [
            "",
            " ",
            "the then: a\n\nAnswer:",
            "1 < 2 <<3>> <bos> <eo",
            "<eos>",
            "\u{3000}日本\u{301} é\r\n\t  x",
            "a  b   c\n\n\n\nd ",
        ];
        for text in texts {
            for special in [false, true] {
                assert_eq!(tokenizer.encode(text, special).unwrap(), tokenizer.by_tokenizers(text, special).unwrap(), "{text:?}");
            }
        }
        let (text, special) = ("the <eos> then the", "a <bos> b");
        assert_eq!(tokenizer.cut_after(text, 4), Some(9));
        for text in [text, special] {
            let at = tokenizer.cut_after(text, 0).unwrap();
            let parts = [tokenizer.encode(&text[..at], true).unwrap(), tokenizer.encode(&text[at..], false).unwrap()];
            assert_eq!(parts.concat(), tokenizer.by_tokenizers(text, true).unwrap(), "{text:?}");
        }
        let specials = &tokenizer.fast.as_ref().unwrap().specials;
        assert!(specials.occur_in("a<bos>") && !specials.occur_in("a<bo s>é"));
        assert!(EvalTokenizer::load(&path, &ModelConfig { vocab_size: 260, ..config }).is_err());
    }
}
