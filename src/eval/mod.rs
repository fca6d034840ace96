//! Evaluation tasks and scoring.
