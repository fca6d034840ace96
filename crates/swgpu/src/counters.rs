//! What kernels did: launches, instructions by class, bytes. Written as JSON to `$SWGPU_COUNTERS` when the process ends.

use std::collections::BTreeMap;
use std::sync::{Mutex, Once, PoisonError};

use crate::isa::instruction::{CLASS_NAMES, CLASSES, Class};

/// Counts of one launch, or of all launches of one kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub launches: u64,
    pub workgroups: u64,
    /// Wave instructions by [`Class`].
    pub instructions: [u64; CLASSES],
    /// Bytes of global memory that lanes read and wrote (every lane counts, whatever a cache would do).
    pub bytes_read: u64,
    pub bytes_written: u64,
    pub lds_bytes_read: u64,
    pub lds_bytes_written: u64,
}

impl Counts {
    pub fn of(&self, class: Class) -> u64 {
        self.instructions[class as usize]
    }

    pub fn total(&self) -> u64 {
        self.instructions.iter().sum()
    }

    pub fn add(&mut self, other: &Self) {
        self.launches += other.launches;
        self.workgroups += other.workgroups;
        for (sum, count) in self.instructions.iter_mut().zip(other.instructions) {
            *sum += count;
        }
        self.bytes_read += other.bytes_read;
        self.bytes_written += other.bytes_written;
        self.lds_bytes_read += other.lds_bytes_read;
        self.lds_bytes_written += other.lds_bytes_written;
    }
}

static TOTALS: Mutex<BTreeMap<String, Counts>> = Mutex::new(BTreeMap::new());

/// Adds one launch (or a library call, under the library's own name).
pub fn record(kernel: &str, counts: &Counts) {
    static AT_EXIT: Once = Once::new();
    AT_EXIT.call_once(|| {
        // SAFETY: a plain C call; the handler takes nothing and unwinds nowhere.
        unsafe { libc::atexit(write_at_exit) };
    });
    let mut totals = TOTALS.lock().unwrap_or_else(PoisonError::into_inner);
    totals.entry(kernel.to_string()).or_default().add(counts);
}

/// All counts so far, by kernel.
pub fn totals() -> BTreeMap<String, Counts> {
    TOTALS.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

pub fn reset() {
    TOTALS.lock().unwrap_or_else(PoisonError::into_inner).clear();
}

/// All counts as one JSON object, one kernel a line.
pub fn json() -> String {
    let lines: Vec<String> = totals().iter().map(|(kernel, counts)| {
        let classes: Vec<String> = CLASS_NAMES.iter().zip(counts.instructions).map(|(name, count)| format!("\"{name}\": {count}")).collect();
        format!(
            "  {:?}: {{\"launches\": {}, \"workgroups\": {}, {}, \"bytes_read\": {}, \"bytes_written\": {}, \"lds_bytes_read\": {}, \"lds_bytes_written\": {}}}",
            kernel, counts.launches, counts.workgroups, classes.join(", "), counts.bytes_read, counts.bytes_written, counts.lds_bytes_read,
            counts.lds_bytes_written
        )
    }).collect();
    format!("{{\n{}\n}}\n", lines.join(",\n"))
}

extern "C" fn write_at_exit() {
    if let Some(path) = std::env::var_os("SWGPU_COUNTERS")
        && let Err(error) = std::fs::write(&path, json())
    {
        eprintln!("swgpu: cannot write the counters to {}: {error}", path.display());
    }
}
