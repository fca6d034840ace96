//! Opening a library by name, and finding its functions.

use std::ffi::{CStr, OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::Error;

/// Which library, and where to look for it.
#[derive(Debug)]
pub struct Source {
    /// As people call it: "HIP".
    pub library: &'static str,
    /// File names (sonames), best first.
    pub names: &'static [&'static str],
    /// The environment variable that names one file, and then no other is tried.
    pub variable: &'static str,
}

/// An open library.
#[derive(Debug)]
pub struct Library {
    handle: libloading::Library,
    file: PathBuf,
    source: &'static Source,
}

impl Library {
    /// Opens the file that `source.variable` names; without it the first that opens of: `source.names` as the dynamic loader finds
    /// them, those in `$ROCM_PATH/lib`, those in `/opt/rocm/lib`.
    ///
    /// # Errors
    /// None of them opens; the error names each and the reason.
    pub fn open(source: &'static Source) -> Result<Self, Error> {
        if cfg!(target_feature = "crt-static") {
            return Err(Error::Static { library: source.library });
        }
        let open = |file: &Path| {
            // SAFETY: opening runs the library's initializers. The file is ROCm's, or one that the user chose to run.
            unsafe { libloading::Library::new(file) }.map_err(|error| reason(file, &error))
        };
        if let Some(file) = set(source.variable).map(PathBuf::from) {
            return match open(&file) {
                Ok(handle) => Ok(Self { handle, file, source }),
                Err(reason) => Err(Error::NotOpened { library: source.library, variable: source.variable, file, reason }),
            };
        }
        // Names that failed for the same reason, one after the other, and that reason.
        let mut tried: Vec<(String, String)> = Vec::new();
        for file in candidates(source.names, set("ROCM_PATH")) {
            match (open(&file), tried.last_mut()) {
                (Ok(handle), _) => return Ok(Self { handle, file, source }),
                (Err(reason), Some((names, last))) if *last == reason => *names += &format!(", {}", file.display()),
                (Err(reason), _) => tried.push((file.display().to_string(), reason)),
            }
        }
        let tried = tried.into_iter().map(|(names, reason)| format!("{names} ({reason})")).collect();
        Err(Error::NotFound { library: source.library, variable: source.variable, tried })
    }

    /// The file that `function` is in: the library's, where the dynamic loader found it.
    pub fn file_of(&self, function: *const ()) -> PathBuf {
        let mut found = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
        // SAFETY: takes any address, and `found` is a place for what it finds. Null pointers are values of its fields.
        let (status, found) = unsafe { (libc::dladdr(function.cast(), found.as_mut_ptr()), found.assume_init()) };
        if status == 0 || found.dli_fname.is_null() {
            return self.file.clone(); // the name under which it was opened
        }
        // SAFETY: not null, so a string that lives as long as the library.
        let name = unsafe { CStr::from_ptr(found.dli_fname) };
        PathBuf::from(OsStr::from_bytes(name.to_bytes()))
    }

    /// The function `name`, which ends in a zero byte.
    ///
    /// # Errors
    /// The library has no such function.
    ///
    /// # Safety
    /// `T` must be the type of a pointer to that function, and must not be used after the library is dropped.
    pub unsafe fn symbol<T: Copy>(&self, name: &'static str) -> Result<T, Error> {
        // SAFETY: the caller vouches for the type.
        match unsafe { self.handle.get::<T>(name) } {
            Ok(symbol) => Ok(*symbol),
            Err(_) => Err(Error::Symbol {
                library: self.source.library,
                variable: self.source.variable,
                file: self.file.clone(),
                symbol: name.trim_end_matches('\0').to_string(),
            }),
        }
    }
}

/// The value of an environment variable; empty counts as unset.
fn set(variable: &str) -> Option<OsString> {
    std::env::var_os(variable).filter(|value| !value.is_empty())
}

/// What to try, in order.
fn candidates(names: &[&str], rocm_path: Option<OsString>) -> Vec<PathBuf> {
    let mut folders = vec![PathBuf::new()];
    folders.extend(rocm_path.map(|root| Path::new(&root).join("lib")));
    if !folders.contains(&PathBuf::from("/opt/rocm/lib")) {
        folders.push("/opt/rocm/lib".into());
    }
    folders.iter().flat_map(|folder| names.iter().map(|name| folder.join(name))).collect()
}

/// The dynamic loader's words, without `file`, which they often begin with and the messages here have already. Another file that they
/// begin with, one that the library needs, stays.
fn reason(file: &Path, error: &libloading::Error) -> String {
    let text = std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string);
    let prefix = format!("{}: ", file.display());
    text.strip_prefix(&prefix).unwrap_or(&text).trim_end_matches('.').to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loaders_places_come_first_then_rocm_path_then_opt() {
        let files = |root: Option<&str>| {
            candidates(&["a.so.2", "a.so"], root.map(OsString::from)).iter().map(|p| p.display().to_string()).collect::<Vec<_>>()
        };
        assert_eq!(files(None), ["a.so.2", "a.so", "/opt/rocm/lib/a.so.2", "/opt/rocm/lib/a.so"]);
        assert_eq!(
            files(Some("/r")),
            ["a.so.2", "a.so", "/r/lib/a.so.2", "/r/lib/a.so", "/opt/rocm/lib/a.so.2", "/opt/rocm/lib/a.so"]
        );
        assert_eq!(files(Some("/opt/rocm")), files(None));
    }
}
