//! CPU time: what other work on the machine does not slow down by taking turns.

/// Seconds that this thread has worked.
pub fn thread_cpu() -> f64 {
    cpu(libc::CLOCK_THREAD_CPUTIME_ID)
}

/// Seconds that all threads of this process have worked.
pub fn process_cpu() -> f64 {
    cpu(libc::CLOCK_PROCESS_CPUTIME_ID)
}

fn cpu(clock: libc::clockid_t) -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is valid for writing, and these clocks exist on every Linux.
    let status = unsafe { libc::clock_gettime(clock, &mut time) };
    assert_eq!(status, 0, "the CPU clock cannot be read");
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}
