//! One very long record at a time.
//!
//! Readers work ahead of each other, and each holds little. A record that grows beyond [`LONG`] bytes would not be little, so
//! its reader waits until its turn: until all that comes before it was handed out, and no other such record exists.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Bytes that a record may grow to without asking.
pub(super) const LONG: usize = 16 << 20;

#[derive(Debug, Default)]
struct State {
    /// First input of the files whose records are handed out now.
    front: usize,
    taken: bool,
    closed: bool,
}

#[derive(Debug, Default)]
pub(super) struct Gate {
    state: Mutex<State>,
    changed: Condvar,
}

/// The right to hold a very long record, until dropped.
#[derive(Debug)]
pub(super) struct Turn(Arc<Gate>);

impl Gate {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the turn of the files from input `first` on. None: nobody listens any more.
    pub fn wait(self: &Arc<Self>, first: usize) -> Option<Turn> {
        let blocked = |s: &mut State| !s.closed && (s.taken || s.front != first);
        let mut state = self.changed.wait_while(self.state(), blocked).unwrap_or_else(PoisonError::into_inner);
        if state.closed {
            return None;
        }
        state.taken = true;
        Some(Turn(self.clone()))
    }

    /// Records of the files from input `first` on are handed out from now.
    pub fn set_front(&self, first: usize) {
        self.state().front = first;
        self.changed.notify_all();
    }

    /// Nobody listens any more.
    pub fn close(&self) {
        self.state().closed = true;
        self.changed.notify_all();
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.0.state().taken = false;
        self.0.changed.notify_all();
    }
}
