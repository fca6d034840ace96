//! `PREFIX.json`: what a shard was made from. Megatron-LM does not need it; zaya reads it for bits per byte and to see that
//! shards, tokenizer and model belong together.

use std::path::Path;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::text::corpus::Place;

/// Value of `format`.
pub const FORMAT: &str = "megatron-indexed-1";

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Sidecar {
    /// [`FORMAT`].
    pub format: String,
    /// Program and version that wrote the shard.
    pub tool: String,
    pub tokenizer: TokenizerInfo,
    /// Token that ends every document, counted in its length; none with `--no-eod`.
    pub eod: Option<EodInfo>,
    /// `uint16` or `int32`.
    pub dtype: String,
    /// Documents in the shard.
    pub documents: u64,
    /// Tokens in the shard, ends of documents included.
    pub tokens: u64,
    /// UTF-8 bytes of the documents' text, after repair.
    pub text_bytes: u64,
    pub skipped: Skipped,
    pub replaced: Replaced,
    /// Tokens that stand for text the vocabulary cannot spell.
    pub unknown_tokens: u64,
    /// Which documents were wanted; absent if all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selection: Option<SelectionInfo>,
    /// Of a shard that is one of several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub part: Option<Part>,
    pub bin_bytes: u64,
    pub bin_xxh3_64: String,
    pub idx_bytes: u64,
    pub idx_xxh3_64: String,
    /// Of conversations.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chat: Option<ChatInfo>,
    /// Inputs in the order they were read; their counts sum to those above. Of a part, those that its documents come from.
    pub sources: Vec<SourceInfo>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TokenizerInfo {
    /// Name of the file, without its directory.
    pub file: String,
    /// SHA-256 of the file, hexadecimal.
    pub sha256: String,
    /// Largest id + 1: rows that a model's embedding needs at least.
    pub vocab_size: usize,
    /// Version of the Unicode tables that text was cut by, where the engine of zaya's own did it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unicode: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EodInfo {
    pub token: String,
    pub id: u32,
}

/// How conversations became tokens, and the `PREFIX.mask` that says what of them is learnt.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ChatInfo {
    /// Name of the template's file, without its directory, and SHA-256 of the template.
    pub template_file: String,
    pub template_sha256: String,
    /// `assistant`, `last` or `all`.
    pub learn: String,
    /// Tags around reasoning.
    pub reasoning_tags: [String; 2],
    /// Most tokens of an example.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trim: Option<usize>,
    /// Examples that lost some of their reasoning to `trim`.
    pub trimmed: u64,
    pub learnt_tokens: u64,
    /// [`MASK_FORMAT`]
    pub mask_format: String,
    pub mask_bytes: u64,
    pub mask_xxh3_64: String,
}

/// Value of `mask_format`.
pub const MASK_FORMAT: &str = "zaya-mask-1";

/// Which documents were wanted.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct SelectionInfo {
    /// Only the first of equal texts.
    pub dedup: bool,
    pub min_chars: Option<u64>,
    pub max_chars: Option<u64>,
    /// Conditions on fields of the record.
    pub keep: Vec<String>,
}

/// Which part of a set a shard is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// Hash of all that decides about the set's bytes: inputs, tokenizer, options.
    pub set: String,
    /// 0 for the first shard.
    pub number: u32,
    /// First record that was read for this shard.
    pub from: Place,
    /// First record of the next one; an input behind the last for the last shard.
    pub to: Place,
}

/// Records that became no document.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Skipped {
    /// No text at all.
    pub empty: u64,
    /// Unusable: malformed, without the field, too large, or (with `--on-bad skip`) in need of repair.
    pub bad: u64,
    /// Fewer or more characters than wanted.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub length: u64,
    /// A condition on a field was not met.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub field: u64,
    /// The same text came before.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub duplicate: u64,
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

impl Skipped {
    pub fn all(&self) -> u64 {
        self.empty + self.bad + self.length + self.field + self.duplicate
    }
}

impl std::ops::Add for Skipped {
    type Output = Self;
    fn add(self, o: Self) -> Self {
        Self {
            empty: self.empty + o.empty,
            bad: self.bad + o.bad,
            length: self.length + o.length,
            field: self.field + o.field,
            duplicate: self.duplicate + o.duplicate,
        }
    }
}

/// Repairs to text that is not Unicode.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Replaced {
    pub documents: u64,
    /// U+FFFD put in.
    pub characters: u64,
}

impl std::ops::Add for Replaced {
    type Output = Self;
    fn add(self, o: Self) -> Self {
        Self { documents: self.documents + o.documents, characters: self.characters + o.characters }
    }
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct SourceInfo {
    /// As given on the command line.
    pub path: String,
    /// Size of the file as it lies there, compressed or not.
    pub file_bytes: u64,
    pub documents: u64,
    pub tokens: u64,
    pub text_bytes: u64,
    pub skipped: Skipped,
    pub replaced: Replaced,
}

impl SourceInfo {
    /// Counts of all inputs together.
    pub fn sum(all: &[Self]) -> Self {
        all.iter().fold(Self::default(), |mut sum, source| {
            sum.add(source);
            sum
        })
    }

    /// Adds the counts of another part of the same input.
    pub fn add(&mut self, other: &Self) {
        self.documents += other.documents;
        self.tokens += other.tokens;
        self.text_bytes += other.text_bytes;
        self.skipped = self.skipped + other.skipped;
        self.replaced = self.replaced + other.replaced;
    }
}

impl Sidecar {
    /// As it is written.
    pub fn to_text(&self) -> Result<String> {
        Ok(serde_json::to_string_pretty(self)? + "\n")
    }

    /// The sidecar at `path`, or None where there is none: no such file, or JSON of another kind that has its name.
    pub fn read(path: &Path) -> Result<Option<Self>> {
        let bytes = match std::fs::read(path) {
            Ok(bytes) => bytes,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e).with_context(|| format!("reading the sidecar {}", path.display())),
        };
        match serde_json::from_slice::<serde_json::Value>(&bytes) {
            Ok(json) if json.get("format").and_then(|f| f.as_str()) == Some(FORMAT) => {
                let text =
                    format!("the sidecar {} lacks what `zaya tokenize` writes; remove it or tokenize again", path.display());
                serde_json::from_value(json).context(text).map(Some)
            }
            _ => Ok(None),
        }
    }
}
