//! Bindings to HIP (6 and 7) and to hipBLASLt's C interface, opened at run time: this crate builds, and what uses it starts,
//! without ROCm.
//!
//! Two layers per library. `ffi` holds the C declarations under their C names and a table of function pointers; the modules beside
//! it hold what a trainer uses, in Rust's terms: handles that release what they own, and every call checked.
//!
//! ```no_run
//! # fn main() -> Result<(), hip_sys::Error> {
//! let hip = hip_sys::Hip::open()?;
//! println!("HIP {} with {} devices", hip.runtime_version()?, hip.device_count()?);
//! let mut buffer = hip_sys::DeviceBuffer::new(hip, 16)?;
//! buffer.write(0, &[7; 16])?;
//! # Ok(()) }
//! ```
//!
//! Libraries are never closed again: their threads may run to the end of the process.

pub mod declare;
mod error;
pub mod hip;
pub mod hipblaslt;
pub mod library;

pub use error::Error;
pub use hip::{
    Arguments, DeviceBuffer, DeviceProperties, Event, Function, Graph, GraphExec, Hip, HostBuffer, Launch, Link, Module, Stream,
    Version,
};
pub use hipblaslt::HipBlasLt;
