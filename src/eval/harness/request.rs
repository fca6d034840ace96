//! What is asked of a model, and what it answers.

use std::sync::Arc;

use serde_json::{Map, Value, json};

/// One question to the model, as text.
#[derive(Debug, Clone, PartialEq)]
pub enum Request {
    /// log p(continuation | context)
    Loglikelihood { context: Arc<str>, continuation: String },
    /// log p(text), every token once, in windows.
    Rolling { text: String },
    /// Text that follows `context`; `options` are lm-eval's `generation_kwargs` (until, max_gen_toks, do_sample, ...).
    Generate { context: String, options: Map<String, Value> },
}

impl Request {
    /// lm-eval's `arguments` in sample records.
    pub fn arguments(&self) -> Value {
        match self {
            Request::Loglikelihood { context, continuation } => json!([**context, continuation]),
            Request::Rolling { text } => json!([text]),
            Request::Generate { context, options } => json!([context, options]),
        }
    }

    /// The first argument, whose hash is the record's `prompt_hash`.
    pub fn prompt(&self) -> &str {
        match self {
            Request::Loglikelihood { context, .. } => context,
            Request::Generate { context, .. } => context,
            Request::Rolling { text } => text,
        }
    }
}

/// The answer to a `Request`.
#[derive(Debug, Clone, PartialEq)]
pub enum Response {
    /// Sum of log p over the continuation's `tokens` (0 where a record does not tell), nats, and whether each is the argmax.
    Loglikelihood { logprob: f64, is_greedy: bool, tokens: usize },
    /// Sum over all windows, nats.
    Rolling { logprob: f64 },
    /// As many texts as the task's `repeats`, stop strings already cut off.
    Generated(Vec<String>),
}

/// The requests of one document, in lm-eval's order: by choice, then the unconditioned ones of `acc_mutual_info`.
#[derive(Debug, Clone)]
pub struct Asked {
    /// Index in the evaluated split.
    pub doc_id: usize,
    pub doc: Value,
    /// lm-eval's `target`: a string, an index, or a list.
    pub target: Value,
    /// Bare choices of a multiple-choice document, without delimiter.
    pub choices: Vec<String>,
    /// What the choices are compared with when the contexts differ, not the continuations (WinoGrande): the index of the right one.
    pub gold: Value,
    pub requests: Vec<Request>,
}
