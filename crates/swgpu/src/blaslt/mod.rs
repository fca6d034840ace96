//! The subset of hipBLASLt's C interface that the trainer uses: column-major products of f32 and bf16 with f32 sums, bias,
//! strided batches. Everything else is refused with a sentence.

pub mod api;
mod descriptors;
mod product;

use std::ffi::c_int;

/// `hipblasStatus_t`.
pub type Status = c_int;
pub const SUCCESS: Status = 0;
pub const INVALID_VALUE: Status = 3;
pub const EXECUTION_FAILED: Status = 5;
pub const NOT_SUPPORTED: Status = 7;

/// Element types, as `hipDataType` numbers them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    F32,
    Bf16,
}

impl Element {
    pub fn from_hip(number: i32) -> Result<Self, Failure> {
        match number {
            0 => Ok(Self::F32),
            14 => Ok(Self::Bf16),
            other => failure(NOT_SUPPORTED, format!("element type {other}; f32 (0) and bf16 (14) are served")),
        }
    }

    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }
}

#[derive(Debug)]
pub struct Failure {
    pub status: Status,
    pub text: String,
}

pub fn failure<T>(status: Status, text: impl Into<String>) -> Result<T, Failure> {
    Err(Failure { status, text: text.into() })
}

impl From<crate::hip::Failure> for Failure {
    fn from(failure: crate::hip::Failure) -> Self {
        let status = if failure.status == crate::hip::LAUNCH_FAILURE { EXECUTION_FAILED } else { INVALID_VALUE };
        Self { status, text: failure.text }
    }
}

/// Runs one call's body and prints why it failed.
pub fn call(name: &str, body: impl FnOnce() -> Result<(), Failure>) -> Status {
    match body() {
        Ok(()) => SUCCESS,
        Err(Failure { status, text }) => {
            eprintln!("swgpu: {name}: {text}");
            status
        }
    }
}
