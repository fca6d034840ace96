//! The machine: what it is, and what its arithmetic units and its memory reach. Every fraction of a limit that zaya prints
//! is of these figures.

mod cpu;
mod flops;
mod memory;

use std::time::{Duration, Instant};

use serde::Serialize;

use crate::tensor::backend::Precision;
use crate::tensor::work::Limits;
pub use cpu::{available_memory, describe, is_intel, peak_resident_bytes};

/// What stands on the box, and what it says of itself.
#[derive(Debug, Clone, Serialize)]
pub struct Cpu {
    pub name: String,
    /// Processors that this process may use.
    pub processors: usize,
    pub arch: &'static str,
    /// Features that the kernels care for, those that were found.
    pub features: Vec<&'static str>,
    pub l3_bytes: Option<u64>,
    pub memory_bytes: Option<u64>,
}

/// The best of several rounds, in units of 1e9 a second.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Peak {
    /// One thread, the others idle.
    pub one_thread: f64,
    /// All threads of the pool together.
    pub all_threads: f64,
}

#[derive(Debug, Clone, Serialize)]
pub struct ComputePeak {
    /// The instruction that was measured.
    pub kernel: &'static str,
    #[serde(flatten)]
    pub gflops: Peak,
}

/// GB/s, bytes counted as read and written by the program (STREAM's way).
#[derive(Debug, Clone, Serialize)]
pub struct MemoryPeak {
    pub read: Peak,
    pub write: Peak,
    pub copy: Peak,
    pub triad: Peak,
    /// Cache lines at places without a pattern.
    pub random: Peak,
    /// Of each of the arrays.
    pub buffer_bytes: usize,
}

#[derive(Debug, Clone, Serialize)]
pub struct Peaks {
    /// Threads of the pool.
    pub threads: usize,
    pub f32: ComputePeak,
    /// None: no bf16 instruction, and bf16 products run on the f32 units.
    pub bf16: Option<ComputePeak>,
    pub memory: MemoryPeak,
}

impl Peaks {
    /// Measures on the thread pool that it is called in, for about `seconds` in all.
    pub fn measure(seconds: f64) -> Self {
        let each = Duration::from_secs_f64(seconds.max(0.0) / 14.0);
        let f32 = flops::f32_kernel();
        let compute = |k: flops::Kernel| ComputePeak { kernel: k.name, gflops: flops::peak(k, each) };
        Self {
            threads: rayon::current_num_threads(),
            f32: compute(f32),
            bf16: flops::bf16_kernel().map(compute),
            memory: memory::measure(each),
        }
    }

    /// GFLOP/s that products in this precision can reach at most.
    pub fn gflops(&self, precision: Precision) -> Peak {
        match (precision, &self.bf16) {
            (Precision::Bf16, Some(bf16)) => bf16.gflops,
            _ => self.f32.gflops,
        }
    }

    /// Limits of all threads together. Memory: the best of the three figures.
    pub fn limits(&self, precision: Precision) -> Limits {
        let memory = [self.memory.read, self.memory.copy, self.memory.triad];
        Limits {
            flops_per_s: 1e9 * self.gflops(precision).all_threads,
            bytes_per_s: 1e9 * memory.iter().map(|p| p.all_threads).fold(0.0, f64::max),
        }
    }
}

/// FLOP/s of all threads of the pool that products in `precision` can reach at most; takes a moment.
pub fn peak_flops(precision: Precision) -> f64 {
    let kernel = match precision {
        Precision::F32 => None,
        Precision::Bf16 => flops::bf16_kernel(),
    };
    1e9 * flops::peak(kernel.unwrap_or_else(flops::f32_kernel), Duration::from_millis(50)).all_threads
}

/// Least rounds of a figure, however little time there is.
const LEAST_ROUNDS: usize = 3;

/// The best of several rounds, each of which gives its rate, after one for warming up.
fn best(time: Duration, mut round: impl FnMut() -> f64) -> f64 {
    round();
    let (began, mut best, mut rounds) = (Instant::now(), 0.0, 0);
    while rounds < LEAST_ROUNDS || began.elapsed() < time {
        best = round().max(best);
        rounds += 1;
    }
    best
}
