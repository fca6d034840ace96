//! The integration tests, one binary: `cargo test --release --test suite`.

mod handle_backend;
mod layers_vs_autograd;
mod reference_oracle;
