//! The step, the loop, stopping and resuming.

pub mod backend;
mod benchmarks;
pub mod candle_engine;
pub mod config;
pub mod context_report;
pub mod engine;
pub mod extend;
pub mod gpu;
mod guards;
mod lock;
mod prefetch;
mod profile;
pub mod ranks;
mod report;
mod run;
mod spans;
mod stages;
pub mod staging;
mod start;
pub mod state;
pub mod step;
pub mod stop;
mod uploader;
pub mod validate;
mod writer;

pub use extend::Extend;
pub(crate) use run::is_staged;
pub use run::{EngineKind, Options, RECIPE_FILE, TOKENIZER_FILE, run};
pub use stop::Outcome;
pub(crate) use writer::save_options;
