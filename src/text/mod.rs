//! Corpus readers and tokenizers.
//!
//! [`corpus`] reads files into records, [`record`] turns a record into a document's text, [`encoder`] turns text into ids
//! (with [`engine`], where that knows the tokenizer),
//! [`chat`] makes marked tokens of conversations, and [`vocab`] learns a vocabulary. What becomes of odd input is told in `docs/TOKENIZE.md`.

pub mod chat;
pub mod corpus;
pub mod encoder;
mod engine;
mod guard;
pub mod record;
pub mod vocab;

pub use encoder::{Encoder, Eod};

/// SHA-256 of bytes, in hexadecimal: how a tokenizer file, or a document, is told from another.
pub fn sha256_hex(bytes: &[u8]) -> String {
    use sha2::{Digest, Sha256};
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

/// SHA-256 of a tokenizer file.
pub fn tokenizer_sha256(path: &std::path::Path) -> anyhow::Result<String> {
    use anyhow::Context;
    Ok(sha256_hex(&std::fs::read(path).with_context(|| format!("reading the tokenizer {}", path.display()))?))
}
