//! Peak of the arithmetic units: independent chains of fused multiply-adds on registers, no memory.

use std::hint::black_box;
use std::time::Duration;

use super::{Peak, best};
#[cfg(target_arch = "x86_64")]
use crate::tensor::cpu::{level::Level, packed::amx};

/// A loop of multiply-adds, on the widest units that were found.
#[derive(Clone, Copy)]
pub(super) struct Kernel {
    pub name: &'static str,
    flops_per_iteration: f64,
    /// That take a few milliseconds.
    iterations: u64,
    /// Runs so many iterations; the value keeps the compiler from dropping them.
    run: fn(u64) -> f32,
}

/// Chains: enough to hide the latency of two units, few enough for the registers.
const CHAINS: usize = 12;

/// `x = x * FACTOR + TERM` converges, so that no chain overflows or becomes subnormal.
const FACTOR: f32 = 0.75;
const TERM: f32 = 0.5;
/// Both as bfloat16.
#[cfg(target_arch = "x86_64")]
const HALVES: (u16, u16) = ((FACTOR.to_bits() >> 16) as u16, (TERM.to_bits() >> 16) as u16);

pub(super) fn f32_kernel() -> Kernel {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the feature was found.
            return kernel("AVX-512 f32 FMA", 16 * 2, |n| unsafe { x86::avx512(n) });
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            // SAFETY: both features were found.
            return kernel("AVX2 f32 FMA", 8 * 2, |n| unsafe { x86::avx2(n) });
        }
    }
    kernel("portable f32 multiply and add", PORTABLE_LANES * 2, portable)
}

/// None without an instruction for bf16 products, and where f32 units are faster at them.
pub(super) fn bf16_kernel() -> Option<Kernel> {
    #[cfg(target_arch = "x86_64")]
    if amx::available() {
        const { assert!(amx::PRODUCTS == CHAINS) };
        // SAFETY: AMX is there.
        let run = |n| unsafe { amx::products_of_registers(n, black_box(HALVES.0), black_box(HALVES.1)) };
        // A tile's product takes some 32 times as long as a vector's.
        return Some(Kernel { iterations: 1 << 16, ..kernel("AMX tdpbf16ps", amx::PRODUCT_FLOPS, run) });
    }
    #[cfg(target_arch = "x86_64")]
    if Level::preferred() == Level::Avx512Bf16 {
        // Each of 16 lanes sums two products. SAFETY: the level was found.
        return Some(kernel("AVX-512 vdpbf16ps", 16 * 4, |n| unsafe { x86::avx512bf16(n) }));
    }
    None
}

fn kernel(name: &'static str, flops_per_instruction: usize, run: fn(u64) -> f32) -> Kernel {
    Kernel { name, flops_per_iteration: (CHAINS * flops_per_instruction) as f64, iterations: 1 << 21, run }
}

/// GFLOP/s of one thread, and of all threads of the pool together, each over its own CPU time: what it loses to other
/// programs does not count, and what it loses to a thread that shares its core does.
pub(super) fn peak(kernel: Kernel, time: Duration) -> Peak {
    let one = || {
        let started = thread_cpu_seconds();
        black_box((kernel.run)(kernel.iterations));
        kernel.iterations as f64 * kernel.flops_per_iteration / (thread_cpu_seconds() - started).max(1e-9) / 1e9
    };
    Peak { one_thread: best(time, one), all_threads: best(time, || rayon::broadcast(|_| one()).iter().sum()) }
}

/// CPU time of this thread so far.
fn thread_cpu_seconds() -> f64 {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `t` is a place for one timespec; should the call fail it stays as it is.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut t) };
    t.tv_sec as f64 + t.tv_nsec as f64 * 1e-9
}

const PORTABLE_LANES: usize = 4;

fn portable(iterations: u64) -> f32 {
    let (factor, term) = (black_box(FACTOR), black_box(TERM));
    let mut chains = [[0f32; PORTABLE_LANES]; CHAINS];
    for _ in 0..iterations {
        for x in chains.as_flattened_mut() {
            *x = *x * factor + term;
        }
    }
    chains.as_flattened().iter().sum()
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;
    use std::hint::black_box;

    use super::{CHAINS, FACTOR, TERM};

    #[target_feature(enable = "avx2,fma")]
    pub fn avx2(iterations: u64) -> f32 {
        let (factor, term) = (_mm256_set1_ps(black_box(FACTOR)), _mm256_set1_ps(black_box(TERM)));
        let mut chains = [_mm256_setzero_ps(); CHAINS];
        for _ in 0..iterations {
            for x in &mut chains {
                *x = _mm256_fmadd_ps(*x, factor, term);
            }
        }
        // All lanes are wanted, though one is looked at.
        black_box(chains).iter().map(|x| _mm256_cvtss_f32(*x)).sum()
    }

    #[target_feature(enable = "avx512f")]
    pub fn avx512(iterations: u64) -> f32 {
        let (factor, term) = (_mm512_set1_ps(black_box(FACTOR)), _mm512_set1_ps(black_box(TERM)));
        let mut chains = [_mm512_setzero_ps(); CHAINS];
        for _ in 0..iterations {
            for x in &mut chains {
                *x = _mm512_fmadd_ps(*x, factor, term);
            }
        }
        black_box(chains).iter().map(|x| _mm512_cvtss_f32(*x)).sum()
    }

    /// Here the chain is the sum, which grows slowly and exactly up to f32's precision.
    #[target_feature(enable = "avx512f,avx512bf16")]
    pub fn avx512bf16(iterations: u64) -> f32 {
        let halves = |x: f32| _mm512_set1_ps(black_box(x));
        let (a, b) = (_mm512_cvtne2ps_pbh(halves(FACTOR), halves(FACTOR)), _mm512_cvtne2ps_pbh(halves(TERM), halves(TERM)));
        let mut chains = [_mm512_setzero_ps(); CHAINS];
        for _ in 0..iterations {
            for x in &mut chains {
                *x = _mm512_dpbf16_ps(*x, a, b);
            }
        }
        black_box(chains).iter().map(|x| _mm512_cvtss_f32(*x)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every kernel that this machine has does the arithmetic that is counted.
    #[test]
    fn kernels_compute_what_they_claim() {
        // x = x * 0.75 + 0.5 goes to 2; one iteration gives 0.5, two give 0.875.
        for k in [f32_kernel(), kernel("portable f32 multiply and add", PORTABLE_LANES * 2, portable)] {
            let lanes = if k.name.starts_with("portable") { PORTABLE_LANES } else { 1 };
            for (n, x) in [(1, 0.5), (2, 0.875), (200, 2.0)] {
                assert!(((k.run)(n) - x * (CHAINS * lanes) as f32).abs() < 1e-3, "{} {n}", k.name);
            }
        }
        if let Some(k) = bf16_kernel() {
            // An element of a sum takes two numbers at a time, or with AMX a row of 32.
            let products = if k.name.starts_with("AMX") { 32.0 } else { 2.0 };
            assert_eq!((k.run)(3), CHAINS as f32 * 3.0 * products * 0.375);
        }
    }
}
