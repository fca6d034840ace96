//! Locks of the operating system on files, by which processes keep out of each other's way.

use std::fs::{File, TryLockError};
use std::time::{Duration, Instant};

/// A child that is just being started holds copies of its parent's files until it runs its own program: a lock may look
/// taken for a moment although its holder is gone.
const PATIENCE: Duration = Duration::from_secs(1);

/// Takes the lock of `file`, waiting a moment for a holder that is on its way out.
///
/// # Errors
/// `WouldBlock` when another process keeps it, `Error` where there are no locks.
pub fn try_lock(file: &File) -> Result<(), TryLockError> {
    let started = Instant::now();
    loop {
        match file.try_lock() {
            Err(TryLockError::WouldBlock) if started.elapsed() < PATIENCE => std::thread::sleep(Duration::from_millis(10)),
            outcome => return outcome,
        }
    }
}
