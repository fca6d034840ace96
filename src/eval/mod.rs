//! Evaluation: tasks and their scores, perplexity, and generation.

pub mod compare;
pub mod contamination;
pub mod generate;
pub mod harness;
pub mod perplexity;
pub mod rescore;
pub mod runner;
pub mod sandbox;
pub mod session;
pub mod tokenizer;
