//! Runs generated Python programs apart from everything else: opt-in, for HumanEval.
//!
//! A program gets a process group, and where the system allows it user, process and network name spaces, of its own; limits on CPU
//! time, memory, file size and processes; a temporary folder that is removed; no environment, no input, no output. It passes only if
//! the wrapper wrote a token after the check had returned.

mod child;

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::harness::score::code::{CodeRunner, Verdict};

const WRAPPER: &str = include_str!("wrapper.py");

/// What a program may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    pub cpu_seconds: u64,
    /// Generous: a slow machine must not fail a right program.
    pub wall: Duration,
    pub memory_bytes: u64,
    pub file_bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        // 3 s is what human-eval and lm-eval allow, there by the wall clock.
        Self { cpu_seconds: 3, wall: Duration::from_secs(30), memory_bytes: 2 << 30, file_bytes: 16 << 20 }
    }
}

/// Runs programs one at a time; several threads may each call `run`.
#[derive(Debug, Clone)]
pub struct Sandbox {
    python: Option<PathBuf>,
    limits: Limits,
    /// Where temporary folders are made.
    folder: PathBuf,
}

impl Sandbox {
    /// Looks for `python3` in PATH; without it every verdict is `NoPython`.
    pub fn new(limits: Limits) -> Self {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let python = std::env::split_paths(&path).map(|d| d.join("python3")).find(|p| p.is_file());
        Self { python, limits, folder: std::env::temp_dir() }
    }

    /// Temporary folders are made in `folder`.
    pub fn with_folder(mut self, folder: PathBuf) -> Self {
        self.folder = folder;
        self
    }
}

impl CodeRunner for Sandbox {
    fn run(&self, candidate: &str, check: &str) -> Result<Verdict> {
        let Some(python) = &self.python else { return Ok(Verdict::NoPython) };
        let scratch = tempfile::Builder::new().prefix("zaya-code-").tempdir_in(&self.folder);
        let scratch = scratch.context("making a temporary folder for a generated program")?;
        // Nothing that a program can guess.
        let token = uuid::Uuid::new_v4().simple().to_string();
        let job = serde_json::json!({"candidate": candidate, "check": check, "token": token});
        std::fs::write(scratch.path().join("job.json"), job.to_string()).context("writing a generated program")?;
        let (mut verdict_end, child_end) = pipe()?;
        let pid = spawn(python, scratch.path(), &child_end, self.limits)?;
        drop(child_end);
        let ended = wait(pid, self.limits)?;
        let mut written = String::new();
        // Whoever could still hold the other end was killed with the group.
        (&mut verdict_end).take(1 << 10).read_to_string(&mut written).unwrap_or_default();
        remove(scratch)?;
        Ok(if written == token && ended == Ended::Left { Verdict::Pass } else { ended.verdict() })
    }
}

/// How a program came to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ended {
    Left,
    OutOfTime,
    Signal(i32),
}

impl Ended {
    fn verdict(self) -> Verdict {
        match self {
            Ended::Left => Verdict::Fail,
            Ended::OutOfTime => Verdict::Timeout,
            Ended::Signal(libc::SIGKILL | libc::SIGXFSZ) => Verdict::Killed,
            Ended::Signal(_) => Verdict::Crash,
        }
    }
}

fn pipe() -> Result<(File, OwnedFd)> {
    let mut ends = [0; 2];
    // SAFETY: `pipe2` writes two descriptors into the array, which has room for them.
    if unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) } != 0 {
        return Err(std::io::Error::last_os_error()).context("opening a pipe to a generated program");
    }
    // SAFETY: both descriptors are new and owned by nobody else.
    unsafe { Ok((File::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1]))) }
}

/// Starts Python in `folder`; returns the process to wait for, which leads a group of its own.
fn spawn(python: &Path, folder: &Path, verdict: &OwnedFd, limits: Limits) -> Result<libc::pid_t> {
    let verdict = verdict.as_raw_fd();
    let mut command = Command::new(python);
    command.args(["-I", "-c", WRAPPER]).env_clear().current_dir(folder).process_group(0);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    // SAFETY: `child::enter` calls only what may be called between fork and exec.
    unsafe {
        command.pre_exec(move || child::enter(verdict, limits));
    }
    let child = command.spawn().with_context(|| format!("starting {} for a generated program", python.display()))?;
    // `wait4` reaps it.
    Ok(child.id() as libc::pid_t)
}

/// Waits for the process, kills its group, and reaps it.
fn wait(pid: libc::pid_t, limits: Limits) -> Result<Ended> {
    let start = Instant::now();
    let mut pause = Duration::from_millis(1);
    let mut out_of_time = false;
    loop {
        let mut status = 0;
        // SAFETY: a zeroed rusage is a valid one.
        let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
        // SAFETY: both pointers are to live values of the right types.
        let reaped = unsafe { libc::wait4(pid, &raw mut status, libc::WNOHANG, &raw mut usage) };
        if reaped == pid {
            kill_group(pid);
            let seconds = |t: libc::timeval| t.tv_sec as f64 + t.tv_usec as f64 / 1e6;
            let cpu = seconds(usage.ru_utime) + seconds(usage.ru_stime);
            return Ok(if !libc::WIFSIGNALED(status) {
                Ended::Left
            } else if out_of_time || libc::WTERMSIG(status) == libc::SIGXCPU || cpu >= limits.cpu_seconds as f64 {
                Ended::OutOfTime
            } else {
                Ended::Signal(libc::WTERMSIG(status))
            });
        }
        if reaped < 0 {
            let e = std::io::Error::last_os_error();
            if e.kind() != std::io::ErrorKind::Interrupted {
                kill_group(pid);
                return Err(e).context("waiting for a generated program");
            }
        }
        if start.elapsed() > limits.wall && !out_of_time {
            out_of_time = true;
            kill_group(pid);
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(20));
    }
}

fn kill_group(pid: libc::pid_t) {
    // SAFETY: `kill` has no memory effects. The group is the child's own; that it is gone already is no error.
    unsafe {
        libc::kill(-pid, libc::SIGKILL);
    }
}

/// Removes the folder, also where the program took away its permissions.
fn remove(scratch: tempfile::TempDir) -> Result<()> {
    let path = scratch.path().to_path_buf();
    if scratch.close().is_err() {
        open_up(&path);
        std::fs::remove_dir_all(&path).with_context(|| format!("removing {}", path.display()))?;
    }
    Ok(())
}

fn open_up(folder: &Path) {
    use std::os::unix::fs::PermissionsExt;
    // What cannot be opened up fails to be removed, and that is reported.
    let _ = std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o700));
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|t| t.is_dir()) {
            open_up(&entry.path());
        }
    }
}
