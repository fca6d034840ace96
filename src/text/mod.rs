//! Corpus readers and tokenizers.
//!
//! [`corpus`] reads files into records, [`record`] turns a record into a document's text, [`encoder`] turns text into ids,
//! and [`vocab`] learns a vocabulary. What becomes of odd input is told in `docs/TOKENIZE.md`.

pub mod corpus;
pub mod encoder;
mod guard;
pub mod record;
pub mod vocab;

pub use encoder::{Encoder, Eod};
