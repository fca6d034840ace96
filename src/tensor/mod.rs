//! Buffers and the verbs that work on them.

pub mod backend;
pub mod cpu;
pub mod trace;

pub use backend::Backend;
