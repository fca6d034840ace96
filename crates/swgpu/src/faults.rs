//! Faults on purpose, from `SWGPU_FAULT`. The one place where they are listed; several are separated by commas:
//!
//! | entry | effect |
//! |---|---|
//! | `corrupt=NAME` | every value (first dword of a vector) that kernel NAME stores to global memory has one bit flipped |
//! | `oom=N` | the N-th device allocation (1 = first) fails with hipErrorOutOfMemory |
//! | `delay=RANK:MS` | rank RANK sleeps MS milliseconds before every collective |
//! | `hang=RANK:N` | rank RANK never comes out of its N-th collective (1 = first), until its communicator is aborted |
//! | `kill=RANK:N` | rank RANK ends its process with status 9 at its N-th collective (1 = first) |
//! | `remote=RANK:N` | rank RANK sees ncclRemoteError from its N-th collective on, and takes no part any more |

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Faults {
    pub corrupt: Vec<String>,
    pub oom: Option<u64>,
    pub delay: Option<(usize, u64)>,
    pub hang: Option<(usize, u64)>,
    pub kill: Option<(usize, u64)>,
    pub remote: Option<(usize, u64)>,
}

impl Faults {
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut faults = Self::default();
        for entry in text.split(',').map(str::trim).filter(|entry| !entry.is_empty()) {
            let wrong = || format!("`{entry}` in SWGPU_FAULT is not understood; see faults.rs");
            let (key, value) = entry.split_once('=').ok_or_else(wrong)?;
            let pair = || -> Option<(usize, u64)> {
                let (rank, number) = value.split_once(':')?;
                Some((rank.parse().ok()?, number.parse().ok()?))
            };
            match key {
                "corrupt" => faults.corrupt.push(value.to_string()),
                "oom" => faults.oom = Some(value.parse().map_err(|_| wrong())?),
                "delay" => faults.delay = Some(pair().ok_or_else(wrong)?),
                "hang" => faults.hang = Some(pair().ok_or_else(wrong)?),
                "kill" => faults.kill = Some(pair().ok_or_else(wrong)?),
                "remote" => faults.remote = Some(pair().ok_or_else(wrong)?),
                _ => return Err(wrong()),
            }
        }
        Ok(faults)
    }
}

/// The faults that the environment asks for. A text that is not understood ends the process: a test that believes it has
/// injected a fault must not pass without it.
pub fn faults() -> &'static Faults {
    static FAULTS: OnceLock<Faults> = OnceLock::new();
    FAULTS.get_or_init(|| {
        let text = std::env::var("SWGPU_FAULT").unwrap_or_default();
        Faults::parse(&text).unwrap_or_else(|problem| {
            eprintln!("swgpu: {problem}");
            std::process::exit(2);
        })
    })
}

/// Whether this device allocation is the one to fail.
pub fn allocation_fails() -> bool {
    static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);
    let number = ALLOCATIONS.fetch_add(1, Ordering::Relaxed) + 1;
    faults().oom == Some(number)
}
