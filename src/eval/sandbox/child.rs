//! What a child does between fork and exec: name spaces, limits, descriptors. Only async-signal-safe calls.

use std::io;

use super::Limits;

/// Puts this process, about to become Python, into its cell. With name spaces it returns in a grandchild that is process 1 of its own
/// world, which ends with it; the process between waits for it and ends the same way.
pub fn enter(verdict: i32, limits: Limits) -> io::Result<()> {
    // SAFETY: plain system calls on values of our own; no memory is shared with other threads, no locks are taken.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        let spaces = libc::CLONE_NEWUSER | libc::CLONE_NEWPID | libc::CLONE_NEWNET | libc::CLONE_NEWIPC | libc::CLONE_NEWUTS;
        let apart = libc::unshare(spaces) == 0;
        set(libc::RLIMIT_CORE, 0, 0)?;
        if apart {
            match libc::fork() {
                -1 => return Err(io::Error::last_os_error()),
                0 => {
                    libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                }
                inner => stand_between(inner),
            }
        }
        if libc::dup2(verdict, 3) < 0 {
            return Err(io::Error::last_os_error());
        }
        if verdict == 3 {
            libc::fcntl(3, libc::F_SETFD, 0);
        }
        set(libc::RLIMIT_CPU, limits.cpu_seconds, limits.cpu_seconds + 1)?;
        set(libc::RLIMIT_AS, limits.memory_bytes, limits.memory_bytes)?;
        set(libc::RLIMIT_FSIZE, limits.file_bytes, limits.file_bytes)?;
        set(libc::RLIMIT_NOFILE, 64, 64)?;
        // Outside a name space a process that leaves its group would outlive us: then there are no further processes at all.
        let processes = if apart { 64 } else { 1 };
        set(libc::RLIMIT_NPROC, processes, processes)
    }
}

/// Never returns: waits for `inner` and ends as it ended.
///
/// # Safety
/// To be called between fork and exec, in a process that nobody else uses.
unsafe fn stand_between(inner: libc::pid_t) -> ! {
    // SAFETY: system calls only. The descriptors are closed since the one that tells our parent of a failed exec is among them.
    unsafe {
        libc::syscall(libc::SYS_close_range, 3u32, u32::MAX, 0u32);
        let mut status = 0;
        while libc::waitpid(inner, &raw mut status, 0) < 0 && *libc::__errno_location() == libc::EINTR {}
        if libc::WIFSIGNALED(status) {
            libc::signal(libc::WTERMSIG(status), libc::SIG_DFL);
            libc::raise(libc::WTERMSIG(status));
        }
        libc::_exit(libc::WEXITSTATUS(status))
    }
}

fn set(what: libc::__rlimit_resource_t, soft: u64, hard: u64) -> io::Result<()> {
    let limit = libc::rlimit { rlim_cur: soft, rlim_max: hard };
    // SAFETY: the pointer is to a live value.
    if unsafe { libc::setrlimit(what, &raw const limit) } == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
