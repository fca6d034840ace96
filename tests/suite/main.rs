//! The integration tests, one binary: `cargo test --release --test suite`.

mod recipe;
