//! The integration tests, one binary: `cargo test --release --test suite`.

mod fixtures;
mod reference_oracle;
mod training_oracle;
