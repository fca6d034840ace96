//! The one way this backend uses threads: numbered tasks on the rayon pool that the caller runs in.
//!
//! Threads take the next task when they are free, so tasks should be listed with the long ones first. A task may not start
//! tasks itself. Nothing here allocates buffers; what a task needs to work in is handed in, one part per thread.

use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, Result};
use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::tensor::trace;

const STARTING: &str = "starting the threads";

/// A pool of `threads` threads, of all cores when not given.
pub fn pool(threads: Option<usize>) -> Result<ThreadPool> {
    builder(threads).build().context(STARTING)
}

fn builder(threads: Option<usize>) -> ThreadPoolBuilder {
    // 0 is rayon's word for all cores.
    ThreadPoolBuilder::new().num_threads(threads.unwrap_or(0))
}

/// As `pool`; the threads' names begin with `name`.
pub fn pool_named(threads: Option<usize>, name: String) -> Result<ThreadPool> {
    let named = move |i| format!("{name}, thread {i}");
    builder(threads).thread_name(named).build().context(STARTING)
}

/// Threads that tasks run on.
pub fn threads() -> usize {
    rayon::current_num_threads()
}

/// Runs `f(i)` for every i below `n`.
pub fn tasks(n: usize, f: impl Fn(usize) + Sync) {
    on_threads(n, |_, i| f(i));
}

/// Runs `f(i, part)` for every i below `n`; `part` is the thread's own part of `scratch`, `per_thread` long, with whatever an
/// earlier task left in it. `scratch` holds `threads() * per_thread` elements.
pub fn tasks_with<T: Send>(n: usize, scratch: &mut [T], per_thread: usize, f: impl Fn(usize, &mut [T]) + Sync) {
    assert!(scratch.len() >= threads() * per_thread, "scratch of tasks is too short");
    let parts = Shared::new(scratch);
    on_threads(n, |thread, i| {
        // SAFETY: one part per thread, and a thread runs one task at a time.
        f(i, unsafe { parts.range(thread * per_thread, per_thread) });
    });
}

/// Runs `f(range)` over 0..`n` in ranges of `chunk`, the last one shorter.
pub fn chunks(n: usize, chunk: usize, f: impl Fn(std::ops::Range<usize>) + Sync) {
    tasks(n.div_ceil(chunk), |i| f(i * chunk..((i + 1) * chunk).min(n)));
}

fn on_threads(n: usize, f: impl Fn(usize, usize) + Sync) {
    let f = |thread, i| {
        let _span = trace::task();
        f(thread, i);
    };
    if n <= 1 || threads() == 1 {
        (0..n).for_each(|i| f(0, i));
        return;
    }
    let next = AtomicUsize::new(0);
    rayon::broadcast(|thread| {
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            if i >= n {
                break;
            }
            f(thread.index(), i);
        }
    });
}

/// A slice whose parts are written by different tasks.
#[derive(Clone, Copy)]
pub struct Shared<T> {
    start: *mut T,
    len: usize,
}

// SAFETY: `range` demands that parts handed out at one time do not overlap.
unsafe impl<T: Send> Send for Shared<T> {}
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Shared<T> {
    /// The slice must stay borrowed while parts of it are in use; callers keep the `&mut` alive around their tasks.
    pub fn new(slice: &mut [T]) -> Self {
        Self { start: slice.as_mut_ptr(), len: slice.len() }
    }

    /// `len` elements from `start` on.
    ///
    /// # Safety
    /// No other part in use overlaps this one, and the slice is still borrowed.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn range<'a>(&self, start: usize, len: usize) -> &'a mut [T] {
        assert!(start.checked_add(len).is_some_and(|end| end <= self.len), "part {start}+{len} of {}", self.len);
        // SAFETY: inside the slice; not overlapping, as the caller promises.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(start), len) }
    }

    /// Address of element `at`.
    pub fn at(&self, at: usize) -> *mut T {
        assert!(at < self.len, "element {at} of {}", self.len);
        // SAFETY: inside the slice.
        unsafe { self.start.add(at) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once_with_its_own_scratch() {
        for threads in [1, 2, 5] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| {
                let mut seen = vec![0u32; 1000];
                let out = Shared::new(&mut seen);
                let mut scratch = vec![0u32; threads * 3];
                tasks_with(1000, &mut scratch, 3, |i, part| {
                    part.fill(i as u32);
                    // SAFETY: one element per task.
                    let element = unsafe { out.range(i, 1) };
                    element[0] += part.iter().sum::<u32>();
                });
                assert!(seen.iter().enumerate().all(|(i, n)| *n == 3 * i as u32));
            });
        }
    }
}
