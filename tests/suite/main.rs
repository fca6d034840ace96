//! The integration tests, one binary: `cargo test --release --test suite`.

mod data;
mod tokenize;
mod vocab;
