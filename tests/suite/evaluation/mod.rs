//! Evaluation against lm-eval 0.4.13's own records (`tests/fixtures/eval`, and the whole of them where they are at hand).

mod command;
mod edges;
mod execution;
mod faults;
mod model;
mod oracle;
mod own_model;
mod support;
mod truthfulqa;
mod user_tasks;
