//! `zaya`: pretraining of ZAYA mixture-of-experts models. The map of the rooms is in `docs/ARCHITECTURE.md`.

#[macro_use]
pub mod print;

pub mod bench;
pub mod checkpoint;
pub mod cli;
pub mod data;
pub mod doctor;
pub mod error;
pub mod eval;
pub mod failpoint;
pub mod hf;
pub mod inspect;
pub mod machine;
pub mod model;
pub mod monitor;
pub mod optim;
pub mod parallel;
pub mod plan;
pub mod recipe;
pub mod robust;
pub mod tensor;
pub mod text;
pub mod train;
