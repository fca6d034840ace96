//! The HIP runtime: devices, memory, streams, kernels, graphs.

mod device;
pub mod ffi;
mod graph;
mod memory;
mod module;
mod stream;

use std::ffi::{CStr, c_char};
use std::path::PathBuf;
use std::sync::OnceLock;

pub use device::{DeviceProperties, Link, MemoryInfo, Version};
pub use graph::{Graph, GraphExec};
pub use memory::{DeviceBuffer, HostBuffer};
pub use module::{Argument, Arguments, Function, Launch, Module};
pub use stream::{Event, Stream};

use crate::Error;
use crate::library::{Library, Source};
use ffi::{HipFunctions, hipError_t};

const SOURCE: Source = Source {
    library: "HIP (libamdhip64)",
    names: &["libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"],
    variable: "ZAYA_HIP_LIB",
};

/// HIP, opened.
#[derive(Debug)]
pub struct Hip {
    functions: HipFunctions,
}

impl Hip {
    /// Opens HIP at the first call; later ones give the same answer. `ZAYA_HIP_LIB` names the file to open; without it the usual
    /// places are searched. Opening asks for no device: see [`Hip::device_count`].
    ///
    /// # Errors
    /// There is no such library, or it lacks a function.
    pub fn open() -> Result<&'static Hip, Error> {
        static HIP: OnceLock<Result<Hip, Error>> = OnceLock::new();
        HIP.get_or_init(|| {
            let library = Library::open(&SOURCE)?;
            // SAFETY: the signatures are those of HIP 6 and 7, compared with AMD's own by `scripts/check-bindings.sh`.
            Ok(Hip { functions: unsafe { HipFunctions::load(library) }? })
        })
        .as_ref()
        .map_err(Error::clone)
    }

    /// The functions themselves, for what the safe layer lacks. What they return goes to [`Hip::check`].
    pub fn functions(&self) -> &HipFunctions {
        &self.functions
    }

    /// The file that was opened.
    pub fn file(&self) -> PathBuf {
        self.functions.library().file_of(self.functions.hipInit as *const ())
    }

    /// `Ok` for success. `doing` says for what `function` was called: "allocating 5 bytes".
    ///
    /// # Errors
    /// The library's name and text for `status`. HIP also keeps it as the thread's last error; that is cleared, so that no later
    /// call reports it again.
    pub fn check(&self, function: &'static str, status: hipError_t, doing: impl FnOnce() -> String) -> Result<(), Error> {
        if status == ffi::hipSuccess {
            return Ok(());
        }
        // SAFETY: these take any code and return text that lives as long as the library, or null.
        let (name, text) = unsafe {
            (self.functions.hipGetLastError)();
            (text((self.functions.hipGetErrorName)(status)), text((self.functions.hipGetErrorString)(status)))
        };
        Err(Error::Call { function, doing: doing(), code: status.0, name, text })
    }

    /// As [`Hip::check`], of a query: `Ok(false)` when what was asked about has not happened yet.
    fn check_ready(&self, function: &'static str, status: hipError_t, doing: impl FnOnce() -> String) -> Result<bool, Error> {
        if status == ffi::hipErrorNotReady {
            // SAFETY: takes nothing. Clears the "not ready", which is no error.
            unsafe { (self.functions.hipGetLastError)() };
            return Ok(false);
        }
        self.check(function, status, doing).map(|()| true)
    }
}

/// The library's text, of which it may have none.
///
/// # Safety
/// `pointer` is null or points to a string that ends in a zero byte.
pub(crate) unsafe fn text(pointer: *const c_char) -> String {
    if pointer.is_null() {
        return "(no text)".into();
    }
    // SAFETY: not null, so a string by the caller's word.
    unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned()
}
