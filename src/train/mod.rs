//! The step, the loop, stopping and resuming.

pub mod backend;
pub mod candle_engine;
pub mod config;
pub mod engine;
mod lock;
mod profile;
pub mod ranks;
mod report;
mod run;
mod start;
pub mod state;
pub mod step;
mod stop;
pub mod validate;

pub use run::{EngineKind, Options, RECIPE_FILE, TOKENIZER_FILE, run};
pub use stop::Outcome;
