//! Corpus readers and tokenizers.
//!
//! [`corpus`] reads files into records, [`record`] turns a record into a document's text, [`filter`] says which are wanted,
//! [`encoder`] turns text into ids (with [`engine`], where that knows the tokenizer),
//! [`chat`] makes marked tokens of conversations, and [`vocab`] learns a vocabulary. What becomes of odd input is told in `docs/TOKENIZE.md`.

pub mod chat;
pub mod corpus;
pub mod encoder;
mod engine;
pub mod filter;
mod guard;
mod json_line;
pub mod record;
pub mod vocab;

pub use encoder::{Encoder, Eod};

/// SHA-256 of bytes, in hexadecimal: how a tokenizer file, or a document, is told from another.
pub fn sha256_hex(bytes: &[u8]) -> String {
    use sha2::{Digest, Sha256};
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

/// Version of the Unicode tables that the engine cuts text by, those of `regex-syntax`: found by letters that came with each version.
pub fn unicode_version() -> &'static str {
    // The first new letter of each, the newest first.
    const NEW: [(char, &str); 3] = [('\u{16ea0}', "17.0"), ('\u{16d40}', "16.0"), ('\u{2ebf0}', "15.1")];
    let is_letter = |c: char| match regex_syntax::parse(r"\p{L}").map(regex_syntax::hir::Hir::into_kind) {
        Ok(regex_syntax::hir::HirKind::Class(regex_syntax::hir::Class::Unicode(class))) => {
            class.ranges().iter().any(|range| (range.start()..=range.end()).contains(&c))
        }
        _ => false,
    };
    NEW.into_iter().find(|(letter, _)| is_letter(*letter)).map_or("15.0 or older", |(_, version)| version)
}

/// SHA-256 of a tokenizer file.
pub fn tokenizer_sha256(path: &std::path::Path) -> anyhow::Result<String> {
    use anyhow::Context;
    Ok(sha256_hex(&std::fs::read(path).with_context(|| format!("reading the tokenizer {}", path.display()))?))
}
