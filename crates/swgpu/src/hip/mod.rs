//! The subset of libamdhip64's C interface (HIP 6 and 7) that the trainer uses. Signatures and values are AMD's.

pub mod api_device;
pub mod api_graph;
pub mod api_memory;
pub mod api_module;
pub mod api_stream;
pub mod copy;
pub mod device;
pub mod handles;
pub mod properties;
pub mod stream;

use std::cell::Cell;
use std::ffi::{c_char, c_int};

/// `hipError_t`.
pub type Status = c_int;

macro_rules! statuses {
    ($($name:ident $code:literal $c_name:literal $text:literal)*) => {
        $(pub const $name: Status = $code;)*

        fn describe(status: Status) -> (&'static std::ffi::CStr, &'static std::ffi::CStr) {
            match status { $($code => ($c_name, $text),)* _ => (c"hipErrorUnknown", c"unknown error") }
        }
    };
}

statuses! {
    SUCCESS 0 c"hipSuccess" c"no error"
    INVALID_VALUE 1 c"hipErrorInvalidValue" c"invalid argument"
    OUT_OF_MEMORY 2 c"hipErrorOutOfMemory" c"out of memory"
    INVALID_CONFIGURATION 9 c"hipErrorInvalidConfiguration" c"invalid configuration argument"
    INVALID_DEVICE_POINTER 17 c"hipErrorInvalidDevicePointer" c"invalid device pointer"
    INVALID_COPY_DIRECTION 21 c"hipErrorInvalidMemcpyDirection" c"invalid copy direction for memcpy"
    NO_DEVICE 100 c"hipErrorNoDevice" c"no ROCm-capable device is detected"
    INVALID_DEVICE 101 c"hipErrorInvalidDevice" c"invalid device ordinal"
    INVALID_IMAGE 200 c"hipErrorInvalidImage" c"device kernel image is invalid"
    NO_BINARY 209 c"hipErrorNoBinaryForGpu" c"no kernel image is available for execution on the device"
    INVALID_HANDLE 400 c"hipErrorInvalidHandle" c"invalid resource handle"
    NOT_FOUND 500 c"hipErrorNotFound" c"named symbol not found"
    NOT_READY 600 c"hipErrorNotReady" c"device not ready"
    PEER_ALREADY_ENABLED 704 c"hipErrorPeerAccessAlreadyEnabled" c"peer access is already enabled"
    LAUNCH_FAILURE 719 c"hipErrorLaunchFailure" c"unspecified launch failure (swgpu has written the reason to stderr)"
    NOT_SUPPORTED 801 c"hipErrorNotSupported" c"operation not supported"
    CAPTURE_UNSUPPORTED 900 c"hipErrorStreamCaptureUnsupported" c"operation not permitted when stream is capturing"
    CAPTURE_INVALIDATED 901 c"hipErrorStreamCaptureInvalidated" c"operation failed due to a previous error during capture"
    CAPTURE_UNMATCHED 903 c"hipErrorStreamCaptureUnmatched" c"the capture was not initiated in this stream"
    CAPTURE_UNJOINED 904 c"hipErrorStreamCaptureUnjoined" c"capturing stream has unjoined work"
}

/// Why a call fails: its status, and a sentence for stderr.
#[derive(Debug)]
pub struct Failure {
    pub status: Status,
    pub text: String,
}

pub fn failure<T>(status: Status, text: impl Into<String>) -> Result<T, Failure> {
    Err(Failure { status, text: text.into() })
}

impl From<Status> for Failure {
    /// A failure that needs no sentence, as it is no surprise (not ready, sticky error).
    fn from(status: Status) -> Self {
        Self { status, text: String::new() }
    }
}

thread_local! {
    static LAST: Cell<Status> = const { Cell::new(SUCCESS) };
}

/// Runs one call's body: prints why it failed, remembers the status for `hipGetLastError`.
pub fn call(name: &str, body: impl FnOnce() -> Result<(), Failure>) -> Status {
    match body() {
        Ok(()) => SUCCESS,
        Err(Failure { status, text }) => {
            if !text.is_empty() {
                eprintln!("swgpu: {name}: {text}");
            }
            if status != NOT_READY {
                LAST.set(status);
            }
            status
        }
    }
}

/// Writes a call's result.
///
/// # Safety
/// `place` is null or points to memory for a `T`, as HIP's interface demands of the caller.
pub unsafe fn give<T>(place: *mut T, value: T) -> Result<(), Failure> {
    if place.is_null() {
        return failure(INVALID_VALUE, "a null pointer for the result");
    }
    // SAFETY: not null, and valid by this function's contract.
    unsafe { place.write(value) };
    Ok(())
}

#[unsafe(no_mangle)]
pub extern "C" fn hipGetLastError() -> Status {
    LAST.replace(SUCCESS)
}

#[unsafe(no_mangle)]
pub extern "C" fn hipPeekAtLastError() -> Status {
    LAST.get()
}

#[unsafe(no_mangle)]
pub extern "C" fn hipGetErrorName(status: Status) -> *const c_char {
    describe(status).0.as_ptr()
}

#[unsafe(no_mangle)]
pub extern "C" fn hipGetErrorString(status: Status) -> *const c_char {
    describe(status).1.as_ptr()
}
