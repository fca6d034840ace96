//! The integration tests, one binary: `cargo test --release --test suite`.

mod data;
mod encoder;
mod tokenize;
mod vocab;
