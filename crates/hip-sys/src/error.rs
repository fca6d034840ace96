//! What can go wrong with a library that is opened at run time.

use std::path::PathBuf;

/// An error as a value: what was tried, and the library's own words.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The library could not be opened under any of its names.
    #[error("{library} cannot be opened. Tried {}. Install ROCm 6 or 7, or set {variable} to the file", tried.join("; "))]
    NotFound {
        library: &'static str,
        variable: &'static str,
        /// Names and why they did not do.
        tried: Vec<String>,
    },

    /// The file that a variable names could not be opened; no other is tried then.
    #[error(
        "{library} cannot be opened: {variable} names {}, but {reason}. Correct {variable}, or unset it to look in the usual places",
        file.display()
    )]
    NotOpened { library: &'static str, variable: &'static str, file: PathBuf, reason: String },

    /// A fully static executable cannot open libraries: glibc would crash.
    #[error("{library} cannot be opened: this executable is fully static and runs on the CPU only; use the ordinary build")]
    Static { library: &'static str },

    /// The library lacks a function.
    #[error(
        "{} has no function {symbol}: it is not {library}, or too old (ROCm 6 or newer is needed). {variable} can name another file",
        file.display()
    )]
    Symbol { library: &'static str, variable: &'static str, file: PathBuf, symbol: String },

    /// A function of the library failed.
    #[error("{function} ({doing}) failed: {name} ({code}): {text}")]
    Call {
        function: &'static str,
        doing: String,
        code: i32,
        /// The code's name, such as `hipErrorOutOfMemory`.
        name: String,
        /// What the library says about it.
        text: String,
    },

    /// What was asked for makes no sense; the library was not called.
    #[error("{0}")]
    Invalid(String),
}

impl Error {
    /// The library's code, if one of its functions failed.
    pub fn code(&self) -> Option<i32> {
        match self {
            Error::Call { code, .. } => Some(*code),
            _ => None,
        }
    }

    /// Whether a HIP function found too little memory: a smaller micro-batch may fit.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, Error::Call { name, .. } if name == "hipErrorOutOfMemory")
    }
}
