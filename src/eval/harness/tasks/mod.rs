//! Tasks: definitions, documents, few-shot choice, and the requests that they give.

pub mod build;
pub mod builtin;
pub mod documents;
pub mod fewshot;
pub mod field;
pub mod parquet;
pub mod registry;
pub mod spec;
pub mod spec_parts;
pub mod template;
pub mod yaml;
