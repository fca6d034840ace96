//! An exact, fast encoder for byte-pair tokenizers.
//!
//! [`Engine::from_json`] understands the common kinds of `tokenizer.json` and refuses all others with the reason. For those it
//! takes, the ids are the ones `tokenizers` gives with `encode_special_tokens` and without a post-processor: special tokens in
//! text are text, other added tokens match.
//!
//! The way of a text: added tokens are found ([`added`]; but runs of one character count as pieces, see [`runs`]), the text between is
//! normalized if need be ([`nfc`]) and cut into pieces ([`split`], or [`sentence`] for vocabularies without a pre-tokenizer), pieces that a worker has seen come from the
//! workers' common cache ([`cache`]), others are merged ([`merge`]). [`pieces`] is for learning a vocabulary.

mod added;
mod batch;
mod bridge;
mod bytemap;
mod cache;
mod key;
mod load;
mod merge;
mod model;
mod nfc;
mod padded;
mod pages;
mod pairs;
mod pieces;
mod runs;
mod sentence;
mod simd;
mod split;
mod table;
mod unicode;
mod worker;

pub use batch::{BATCH, Piece};
pub use bytemap::{ByteMap, hash as hash_bytes, mix};
pub use cache::Cache;
pub use key::{Key, SHORT};
pub use load::byte_alphabet;
pub use padded::Padded;
pub use pieces::{Pieces, parts};
pub use simd::prefetch;
pub use worker::Worker;

use added::Matcher;
use model::Model;
use sentence::Sentence;
use simd::Level;
use split::Splitter;

/// How text between added tokens is cut.
#[expect(clippy::large_enum_variant, reason = "there is one for each tokenizer, looked at for each piece")]
enum Cutter {
    Rule(Splitter),
    Sentence(Sentence),
}

/// A tokenizer, shared by all workers.
pub struct Engine {
    level: Level,
    /// Added tokens found in the text as it is.
    raw: Option<Matcher>,
    /// Added tokens found in normalized text.
    normalized: Option<Matcher>,
    nfc: bool,
    cutter: Cutter,
    model: Model,
    /// No added token goes from another character on to a space.
    cuts_at_spaces: bool,
}

impl Engine {
    /// Whether the ids of a text with a space behind `left` are always those of the text before the space and those of the rest.
    ///
    /// In the known regular expressions a space only ever begins a piece or follows white space, nothing looks behind itself, and what
    /// looks ahead looks no further than to the end of white space.
    pub fn parts_before_space(&self, left: char) -> bool {
        self.cuts_at_spaces
            && !left.is_whitespace()
            && match &self.cutter {
                Cutter::Rule(_) => true,
                Cutter::Sentence(sentence) => sentence.parts_before_space(left),
            }
    }
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("level", &self.level).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
#[cfg(test)]
pub use tests::fuzz;
