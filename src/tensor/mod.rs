//! Buffers and the verbs that work on them.

pub mod backend;
pub mod cpu;
pub mod trace;
<<<<<<< HEAD
=======
pub mod work;
>>>>>>> bench

pub use backend::Backend;
