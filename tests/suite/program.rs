//! The executable under test: the one in `ZAYA` where that is set, else the one that cargo has just built.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A command that runs zaya, from any folder.
pub fn zaya() -> Command {
    Command::new(path())
}

pub fn path() -> PathBuf {
    match env::var_os("ZAYA").filter(|z| !z.is_empty()).map(PathBuf::from) {
        // A bare name is searched for in PATH; any other path is relative to the repository, and tests change folders.
        Some(given) if given.components().count() > 1 => Path::new(env!("CARGO_MANIFEST_DIR")).join(given),
        Some(given) => given,
        None => env!("CARGO_BIN_EXE_zaya").into(),
    }
}
