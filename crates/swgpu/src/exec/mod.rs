//! Running decoded instructions: waves of 64 lanes in lock-step, workgroup by workgroup in order, so that the same launch
//! always gives the same bits.

mod atomic;
mod carry;
mod compare;
mod float;
mod integer;
mod lanes;
pub mod launch;
mod matrix;
mod memory_access;
mod packed;
mod scalar;
mod step;
mod wave;
mod wide;

/// Lanes of a wave.
pub const WAVE: usize = 64;
/// One vector register.
pub type Lanes = [u32; WAVE];
