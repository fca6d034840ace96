//! Handles that callers hold: numbers, never addresses, so that a stale or foreign one is an error and not a crash.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use super::{Failure, INVALID_HANDLE, failure};

/// What `T`'s live handles stand for.
pub struct Handles<T: ?Sized> {
    what: &'static str,
    live: LazyLock<Mutex<HashMap<usize, Arc<T>>>>,
}

impl<T: ?Sized> Handles<T> {
    pub const fn new(what: &'static str) -> Self {
        Self { what, live: LazyLock::new(|| Mutex::new(HashMap::new())) }
    }

    fn live(&self) -> MutexGuard<'_, HashMap<usize, Arc<T>>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn add(&self, value: Arc<T>) -> *mut c_void {
        // Distinct for all kinds, so that a stream passed as an event is caught; odd-looking, so that no pointer is taken for one.
        static NEXT: AtomicUsize = AtomicUsize::new(0x5357_0001);
        let handle = NEXT.fetch_add(2, Ordering::Relaxed);
        self.live().insert(handle, value);
        handle as *mut c_void
    }

    pub fn get(&self, handle: *mut c_void) -> Result<Arc<T>, Failure> {
        match self.live().get(&(handle as usize)) {
            Some(value) => Ok(value.clone()),
            None => failure(INVALID_HANDLE, format!("{handle:?} is no live {}", self.what)),
        }
    }

    pub fn remove(&self, handle: *mut c_void) -> Result<Arc<T>, Failure> {
        match self.live().remove(&(handle as usize)) {
            Some(value) => Ok(value),
            None => failure(INVALID_HANDLE, format!("{handle:?} is no live {}", self.what)),
        }
    }
}
