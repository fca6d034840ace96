//! The integration tests, one binary: `cargo test --release --test suite`.

mod balance;
mod checkpoint;
mod checkpoint_kill;
mod reshard;
