//! What kernels did: launches, instructions by class, bytes. Written as JSON to `$SWGPU_COUNTERS` when the process ends, or asked for
//! (`swgpuTakeCounters`).

use std::collections::BTreeMap;
use std::ffi::c_char;
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

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
    /// Bytes that passed the caches of the chiplets ([`crate::cache`]); counted with `SWGPU_DETAILS` alone.
    pub memory_bytes_read: u64,
    pub memory_bytes_written: u64,
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
        self.memory_bytes_read += other.memory_bytes_read;
        self.memory_bytes_written += other.memory_bytes_written;
    }
}

/// Of one kernel: its counts, and how often each mnemonic ran (with `SWGPU_DETAILS`).
#[derive(Clone, Debug, Default)]
pub struct Total {
    pub counts: Counts,
    pub mnemonics: BTreeMap<String, u64>,
}

static TOTALS: Mutex<BTreeMap<String, Total>> = Mutex::new(BTreeMap::new());

fn lock() -> MutexGuard<'static, BTreeMap<String, Total>> {
    TOTALS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Adds one call of a library, under its own name.
pub fn record_call(name: &str) {
    record(name, &Counts { launches: 1, ..Counts::default() }, &BTreeMap::new());
}

/// Adds one launch.
pub fn record(kernel: &str, counts: &Counts, mnemonics: &BTreeMap<&str, u64>) {
    static AT_EXIT: Once = Once::new();
    AT_EXIT.call_once(|| {
        // SAFETY: a plain C call; the handler takes nothing and unwinds nowhere.
        unsafe { libc::atexit(write_at_exit) };
    });
    let mut totals = lock();
    let total = totals.entry(kernel.to_string()).or_default();
    total.counts.add(counts);
    for (mnemonic, count) in mnemonics {
        *total.mnemonics.entry((*mnemonic).to_string()).or_insert(0) += count;
    }
}

/// All counts so far, by kernel.
pub fn totals() -> BTreeMap<String, Total> {
    lock().clone()
}

/// Counts as one JSON object, one kernel a line.
pub fn json(totals: &BTreeMap<String, Total>) -> String {
    let lines: Vec<String> = totals
        .iter()
        .map(|(kernel, Total { counts: c, mnemonics })| {
            let mut fields = vec![format!("\"launches\": {}", c.launches), format!("\"workgroups\": {}", c.workgroups)];
            fields.extend(CLASS_NAMES.iter().zip(c.instructions).map(|(name, count)| format!("\"{name}\": {count}")));
            let bytes = [
                ("bytes_read", c.bytes_read),
                ("bytes_written", c.bytes_written),
                ("lds_bytes_read", c.lds_bytes_read),
                ("lds_bytes_written", c.lds_bytes_written),
            ];
            fields.extend(bytes.map(|(name, bytes)| format!("\"{name}\": {bytes}")));
            if !mnemonics.is_empty() {
                fields.push(format!("\"memory_bytes_read\": {}", c.memory_bytes_read));
                fields.push(format!("\"memory_bytes_written\": {}", c.memory_bytes_written));
                let of_each: Vec<String> = mnemonics.iter().map(|(name, count)| format!("\"{name}\": {count}")).collect();
                fields.push(format!("\"mnemonics\": {{{}}}", of_each.join(", ")));
            }
            format!("  {kernel:?}: {{{}}}", fields.join(", "))
        })
        .collect();
    format!("{{\n{}\n}}\n", lines.join(",\n"))
}

/// Not of HIP: the counts since the last call as JSON, for a program that wants those of each launch. Writes at most `bytes` bytes to
/// `to`, without a closing 0, and returns how many there are; where they do not fit nothing is taken.
///
/// # Safety
/// `to` must have room for `bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn swgpuTakeCounters(to: *mut c_char, bytes: usize) -> usize {
    let mut totals = lock();
    let text = json(&totals);
    if text.len() <= bytes {
        // SAFETY: the caller vouches for the room.
        unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), to.cast(), text.len()) };
        totals.clear();
    }
    text.len()
}

extern "C" fn write_at_exit() {
    if let Some(path) = std::env::var_os("SWGPU_COUNTERS")
        && let Err(error) = std::fs::write(&path, json(&totals()))
    {
        eprintln!("swgpu: cannot write the counters to {}: {error}", path.display());
    }
}
