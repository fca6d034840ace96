//! The step, the loop, stopping and resuming.

pub mod candle_engine;
pub mod engine;
pub mod state;
pub mod step;
