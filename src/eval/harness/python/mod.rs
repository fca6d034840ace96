//! What Python does differently from Rust, where a score depends on it: lm-eval's prompts, filters, hashes and files are Python's.

pub mod json;
pub mod literal;
pub mod random;
pub mod regex;
pub mod repr;
pub mod text;
