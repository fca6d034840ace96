//! What this machine's matrix products reach, as the measure of MFU when a recipe names none.

use std::time::Instant;

use crate::tensor::cpu::gemm::{Target, View, matmul};

/// FLOP/s of f32 products of 1024 x 1024 matrices on the current thread pool: the best of a few tries.
pub fn measured_peak_flops() -> f64 {
    const N: usize = 1024;
    let (a, b) = (vec![0.5f32; N * N], vec![0.25f32; N * N]);
    let mut c = vec![0f32; N * N];
    let best = (0..5)
        .map(|_| {
            let started = Instant::now();
            matmul(N, N, N, View::rows(&a, N), View::rows(&b, N), Target::rows(&mut c, N), false);
            started.elapsed().as_secs_f64()
        })
        .fold(f64::INFINITY, f64::min);
    2.0 * (N * N * N) as f64 / best.max(1e-9)
}
