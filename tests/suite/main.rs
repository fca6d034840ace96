//! The integration tests, one binary: `cargo test --release --test suite`.

mod fixtures;
mod handle_backend;
mod layers_vs_autograd;
mod reference_oracle;
mod training_oracle;
