//! Evaluation that agrees with lm-evaluation-harness 0.4.13 ("lm-eval"), all of it that needs no model.
//!
//! `tasks` turns task definitions and documents into requests, `encode` turns requests into token ids, a model runner answers
//! them, `score` turns answers into metrics, `results.json` and sample records. `docs/EVAL.md` describes the formats.

pub mod compat;
pub mod core_metric;
pub mod encode;
pub mod python;
pub mod request;
pub mod rounds;
pub mod run;
pub mod score;
pub mod stop;
pub mod tasks;
