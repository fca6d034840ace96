//! Buffers and the verbs that work on them.

pub mod backend;
pub mod cpu;

pub use backend::Backend;
