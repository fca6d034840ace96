//! A software GPU for tests: one shared library that answers under the C names of libamdhip64, libhipblaslt and librccl,
//! and runs real gfx942 code objects wave by wave. It is never part of the shipped executable. What it shows and what it
//! cannot show is written in this crate's README.

// A loop over the lanes of a wave indexes several registers at once.
#![allow(clippy::needless_range_loop)]

#[allow(non_snake_case)]
pub mod blaslt;
pub mod cache;
#[allow(non_snake_case)]
pub mod counters;
pub mod exec;
pub mod faults;
#[allow(non_snake_case)]
pub mod hip;
pub mod isa;
pub mod memory;
#[allow(non_snake_case)]
pub mod rccl;
pub mod settings;
