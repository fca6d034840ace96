//! The integration tests, one binary: `cargo test --release --test suite`.

mod fixtures;
mod forward_oracle;
mod hf;
mod reference_oracle;
mod training_oracle;
