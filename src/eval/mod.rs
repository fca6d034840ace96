//! Evaluation tasks and scoring, and generation.

pub mod generate;
pub mod harness;
pub mod perplexity;
pub mod runner;
pub mod sandbox;
