//! hipBLASLt: dense matrix products.

pub mod ffi;
mod matmul;

use std::path::PathBuf;
use std::ptr::null_mut;
use std::sync::OnceLock;

pub use matmul::{Algorithm, Handle, Layout, Layouts, Operands, Preference, Product};

use crate::Error;
use crate::library::{Library, Source};
use ffi::{HipBlasLtFunctions, hipblasLtHandle_t, hipblasStatus_t};

const SOURCE: Source = Source {
    library: "hipBLASLt",
    names: &["libhipblaslt.so.1", "libhipblaslt.so.0", "libhipblaslt.so"],
    variable: "ZAYA_HIPBLASLT_LIB",
};

/// hipBLASLt, opened.
#[derive(Debug)]
pub struct HipBlasLt {
    functions: HipBlasLtFunctions,
}

impl HipBlasLt {
    /// Opens hipBLASLt at the first call; later ones give the same answer. `ZAYA_HIPBLASLT_LIB` names the file to open; without it
    /// the usual places are searched.
    ///
    /// # Errors
    /// There is no such library, or it lacks a function.
    pub fn open() -> Result<&'static HipBlasLt, Error> {
        static HIPBLASLT: OnceLock<Result<HipBlasLt, Error>> = OnceLock::new();
        HIPBLASLT
            .get_or_init(|| {
                let library = Library::open(&SOURCE)?;
                // SAFETY: the signatures are hipBLASLt's, compared with AMD's own by `scripts/check-bindings.sh`.
                Ok(HipBlasLt { functions: unsafe { HipBlasLtFunctions::load(library) }? })
            })
            .as_ref()
            .map_err(Error::clone)
    }

    /// The functions themselves, for what the safe layer lacks. What they return goes to [`HipBlasLt::check`].
    pub fn functions(&self) -> &HipBlasLtFunctions {
        &self.functions
    }

    /// The file that was opened.
    pub fn file(&self) -> PathBuf {
        self.functions.library().file_of(self.functions.hipblasLtCreate as *const ())
    }

    /// `Ok` for success. `doing` says for what `function` was called.
    ///
    /// # Errors
    /// The status by name; hipBLASLt has no text of its own for it.
    pub fn check(&self, function: &'static str, status: hipblasStatus_t, doing: impl FnOnce() -> String) -> Result<(), Error> {
        if status == ffi::HIPBLAS_STATUS_SUCCESS {
            return Ok(());
        }
        let name = status.name().unwrap_or("unknown status").to_string();
        let text = meaning(status).to_string();
        Err(Error::Call { function, doing: doing(), code: status.0, name, text })
    }

    /// A handle on the current device.
    fn create(&self) -> Result<hipblasLtHandle_t, Error> {
        let mut raw = null_mut();
        // SAFETY: `raw` is a place for the handle.
        let status = unsafe { (self.functions.hipblasLtCreate)(&mut raw) };
        self.check("hipblasLtCreate", status, || "beginning to use the library".into())?;
        Ok(raw)
    }
}

/// What a status means.
fn meaning(status: hipblasStatus_t) -> &'static str {
    match status {
        ffi::HIPBLAS_STATUS_NOT_INITIALIZED => "the library is not initialized",
        ffi::HIPBLAS_STATUS_ALLOC_FAILED => "the library could not allocate memory",
        ffi::HIPBLAS_STATUS_INVALID_VALUE => "an argument is not allowed",
        ffi::HIPBLAS_STATUS_EXECUTION_FAILED => "the work could not be started on the device",
        ffi::HIPBLAS_STATUS_NOT_SUPPORTED => "this product is not supported",
        ffi::HIPBLAS_STATUS_ARCH_MISMATCH => "the device's architecture is not supported",
        _ => "the library gives no reason",
    }
}
