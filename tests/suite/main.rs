//! The integration tests, one binary: `cargo test --release --test suite`.

mod balance;
mod bench;
mod checkpoint;
mod checkpoint_kill;
mod checkpoint_pool;
mod cpu_step;
mod data;
mod encoder;
mod fixtures;
mod forward_oracle;
mod generation;
mod handle_backend;
mod hf;
mod layers_vs_autograd;
mod parallel;
mod pretrain;
mod program;
mod recipe;
mod reference_documents;
mod reference_oracle;
mod reshard;
mod reshard_memory;
mod s3_server;
mod tokenize;
mod training_oracle;
mod vocab;
