//! Evaluation tasks and scoring, and generation.

pub mod generate;
pub mod perplexity;
