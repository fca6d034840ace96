//! One process trains in a run directory at a time: two would write each other's metrics and delete each other's checkpoints.

use std::fs::{File, TryLockError};
use std::io::{Read, Seek, Write};
use std::path::Path;

use anyhow::{Context, Result};

use crate::error::bad_input;

/// Locked while a process trains; holds its number. The operating system lets go of it however the process ends.
pub const LOCK_FILE: &str = ".lock";

/// Held for as long as a run lasts.
#[derive(Debug)]
pub struct RunLock {
    /// None: the file system has no locks.
    _file: Option<File>,
}

impl RunLock {
    /// Takes the lock of the run directory `dir`, which exists.
    ///
    /// # Errors
    /// `BadInput` when another process holds it.
    pub fn take(dir: &Path) -> Result<Self> {
        let path = dir.join(LOCK_FILE);
        let what = || format!("opening {}, by which a run keeps its directory for itself", path.display());
        let open = File::options().create(true).truncate(false).read(true).write(true).open(&path);
        let mut file = open.with_context(what)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut owner = String::new();
                // Only for the message: an empty file does as well.
                let _ = file.read_to_string(&mut owner);
                let owner = owner.trim();
                let who = if owner.is_empty() { String::new() } else { format!(" ({owner})") };
                return Err(bad_input(format!(
                    "another process{who} is training in {} right now: wait for it or stop it, or choose another run.dir",
                    dir.display()
                )));
            }
            Err(TryLockError::Error(e)) => {
                tell!(
                    "warning: {} cannot be locked ({e}): make sure yourself that no other process trains there",
                    path.display()
                );
                return Ok(Self { _file: None });
            }
        }
        let write = |file: &mut File| -> std::io::Result<()> {
            file.set_len(0)?;
            file.rewind()?;
            writeln!(file, "process {}", std::process::id())
        };
        // On a full disk the message of the other process is poorer, no more.
        let _ = write(&mut file);
        Ok(Self { _file: Some(file) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::exit_code_of;

    #[test]
    fn one_holder_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let held = RunLock::take(dir.path()).unwrap();
        let error = RunLock::take(dir.path()).unwrap_err();
        assert_eq!(exit_code_of(&error), 2);
        let text = error.to_string();
        assert!(text.contains(&format!("(process {})", std::process::id())) && text.contains("another run.dir"), "{text}");
        drop(held);
        RunLock::take(dir.path()).unwrap();
    }
}
