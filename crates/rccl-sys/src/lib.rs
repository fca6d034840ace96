//! Bindings to RCCL, opened at run time: this crate builds, and what uses it starts, without ROCm.
//!
//! [`ffi`] holds the C declarations under their C names and a table of function pointers; the rest is what a trainer uses, in Rust's
//! terms. Errors are those of `hip-sys`.
//!
//! ```no_run
//! # fn exchange(id: rccl_sys::UniqueId) -> rccl_sys::UniqueId { id }
//! # fn main() -> Result<(), rccl_sys::Error> {
//! # let (rank, ranks) = (0, 1);
//! let (hip, rccl) = (hip_sys::Hip::open()?, rccl_sys::Rccl::open()?);
//! let id = exchange(rccl.unique_id()?); // rank 0's, sent to all
//! let comm = rccl_sys::Communicator::new(rccl, id, rank, ranks)?;
//! let stream = hip_sys::Stream::new(hip)?;
//! let sums = hip_sys::DeviceBuffer::new(hip, 4 * 1000)?;
//! // SAFETY: the buffer holds 1000 numbers and outlives the stream's work.
//! unsafe { comm.all_reduce(sums.pointer(), sums.pointer(), 1000, rccl_sys::DataType::F32, rccl_sys::Op::Sum, &stream)? };
//! stream.synchronize()?;
//! comm.destroy()
//! # }
//! ```

mod collectives;
mod communicator;
pub mod ffi;

use std::ffi::CStr;
use std::path::PathBuf;
use std::ptr::null_mut;
use std::sync::OnceLock;

pub use collectives::{DataType, Op};
pub use communicator::{Communicator, State, UniqueId};
pub use hip_sys::Error;

use ffi::{RcclFunctions, ncclResult_t};
use hip_sys::library::{Library, Source};

const SOURCE: Source = Source { library: "RCCL", names: &["librccl.so.1", "librccl.so"], variable: "ZAYA_RCCL_LIB" };

/// RCCL, opened.
#[derive(Debug)]
pub struct Rccl {
    functions: RcclFunctions,
}

impl Rccl {
    /// Opens RCCL at the first call; later ones give the same answer. `ZAYA_RCCL_LIB` names the file to open; without it the usual
    /// places are searched.
    ///
    /// # Errors
    /// There is no such library, or it lacks a function.
    pub fn open() -> Result<&'static Rccl, Error> {
        static RCCL: OnceLock<Result<Rccl, Error>> = OnceLock::new();
        RCCL.get_or_init(|| {
            let library = Library::open(&SOURCE)?;
            // SAFETY: the signatures are RCCL's, compared with AMD's own by `scripts/check-bindings.sh`.
            Ok(Rccl { functions: unsafe { RcclFunctions::load(library) }? })
        })
        .as_ref()
        .map_err(Error::clone)
    }

    /// The functions themselves, for what the safe layer lacks. What they return goes to [`Rccl::check`].
    pub fn functions(&self) -> &RcclFunctions {
        &self.functions
    }

    /// The file that was opened.
    pub fn file(&self) -> PathBuf {
        self.functions.library().file_of(self.functions.ncclGetVersion as *const ())
    }

    /// The version of NCCL that RCCL implements: 23004 is 2.30.4.
    ///
    /// # Errors
    /// The library refuses.
    pub fn version(&self) -> Result<i32, Error> {
        let mut version = 0;
        // SAFETY: `version` is a place for the number.
        let result = unsafe { (self.functions.ncclGetVersion)(&mut version) };
        self.check("ncclGetVersion", result, || "asking for the version".into())?;
        Ok(version)
    }

    /// A new identity of a communicator: one rank makes it, and all get it.
    ///
    /// # Errors
    /// The library finds no network interface to be reached by.
    pub fn unique_id(&self) -> Result<UniqueId, Error> {
        let mut id = UniqueId::from_bytes([0; UniqueId::BYTES]);
        // SAFETY: `id` is a place for one.
        let result = unsafe { (self.functions.ncclGetUniqueId)(&mut id.raw) };
        self.check("ncclGetUniqueId", result, || "making an identity of a communicator".into())?;
        Ok(id)
    }

    /// Makes one operation of those that `work` queues: sends and receives that need each other, or collectives of several
    /// communicators. They start at the end.
    ///
    /// # Errors
    /// That of `work`, or of the group.
    pub fn group<E: From<Error>>(&self, work: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
        // SAFETY: takes nothing.
        let result = unsafe { (self.functions.ncclGroupStart)() };
        self.check("ncclGroupStart", result, || "beginning a group".into())?;
        let outcome = work();
        // SAFETY: takes nothing. Also after an error: a group left open would swallow all that follows.
        let result = unsafe { (self.functions.ncclGroupEnd)() };
        outcome?;
        Ok(self.check("ncclGroupEnd", result, || "starting a group's operations".into())?)
    }

    /// `Ok` for success, and for work that goes on in the background (see [`Communicator::state`]).
    ///
    /// # Errors
    /// The name of `result`, the library's text for it, and what the library says of its last error.
    pub fn check(&self, function: &'static str, result: ncclResult_t, doing: impl FnOnce() -> String) -> Result<(), Error> {
        if matches!(result, ffi::ncclSuccess | ffi::ncclInProgress) {
            return Ok(());
        }
        let text = |pointer: *const std::ffi::c_char| {
            // SAFETY: null, or the library's text, which ends in a zero byte and is not changed while this thread reads it.
            (!pointer.is_null()).then(|| unsafe { CStr::from_ptr(pointer) }.to_string_lossy().trim().to_string())
        };
        // SAFETY: the one takes any result; the other takes a communicator, of which it makes no use, or null.
        let (meaning, last) =
            unsafe { (text((self.functions.ncclGetErrorString)(result)), text((self.functions.ncclGetLastError)(null_mut()))) };
        let mut said = meaning.unwrap_or_else(|| "(no text)".into());
        if let Some(last) = last.filter(|last| !last.is_empty()) {
            said = format!("{said}; the last error was: {last}");
        }
        let name = result.name().unwrap_or("unknown result").to_string();
        Err(Error::Call { function, doing: doing(), code: result.0, name, text: said })
    }
}
