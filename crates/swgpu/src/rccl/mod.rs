//! The subset of RCCL's C interface that the trainer uses, for ranks that are threads or processes of one machine.
//!
//! Whoever makes the unique id also starts a hub: a thread that all ranks of the communicator connect to over loopback TCP. A rank's
//! stream worker sends the hub its part of an operation and waits for its share of the result. The hub sees what every rank
//! asks for, so it can say who disagrees about what, and who is missing when time runs out.
//!
//! Reductions add in rank order, in f32 for bf16 with one rounding at the end: the same bits every time, for any timing.

pub mod api;
mod communicator;
mod hub;
mod reduce;
mod wire;

use std::ffi::c_int;

/// `ncclResult_t`.
pub type Status = c_int;
pub const SUCCESS: Status = 0;
pub const SYSTEM_ERROR: Status = 2;
pub const INVALID_ARGUMENT: Status = 4;
pub const INVALID_USAGE: Status = 5;
pub const REMOTE_ERROR: Status = 6;
pub const IN_PROGRESS: Status = 7;
pub const TIMEOUT: Status = 8;

#[derive(Debug, Clone)]
pub struct Failure {
    pub status: Status,
    pub text: String,
}

pub fn failure<T>(status: Status, text: impl Into<String>) -> Result<T, Failure> {
    Err(Failure { status, text: text.into() })
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Self { status: REMOTE_ERROR, text: format!("the connection to the communicator's hub failed: {error}") }
    }
}
