//! Buffers and the verbs that work on them.

pub mod backend;
pub mod cpu;
pub mod hip;
mod places;
mod rope;
pub mod trace;
pub mod tree;
pub mod work;

pub use backend::Backend;
