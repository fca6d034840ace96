//! AdamW updates and the gradient's norm (spec 3.3).

use super::level::vectorised;
use super::par::{self, Shared};
use crate::tensor::backend::AdamWStep;

const CHUNK: usize = 1 << 14;

/// Sum of squares in f64, chunks in a fixed order.
pub fn sq_norm(x: &[f32]) -> f64 {
    let mut parts = vec![0f64; x.len().div_ceil(CHUNK)];
    let out = Shared::new(&mut parts);
    par::chunks(x.len(), CHUNK, |range| {
        let i = range.start / CHUNK;
        // Sixteen interleaved sums: vectorises.
        let sum = vectorised(
            #[inline(always)]
            || {
                let mut lanes = [0f64; 16];
                let (blocks, rest) = x[range].as_chunks::<16>();
                for block in blocks {
                    for l in 0..16 {
                        lanes[l] += block[l] as f64 * block[l] as f64;
                    }
                }
                for (lane, v) in lanes.iter_mut().zip(rest) {
                    *lane += *v as f64 * *v as f64;
                }
                lanes.iter().sum::<f64>()
            },
        );
        // SAFETY: one number per chunk.
        unsafe { out.range(i, 1) }.fill(sum);
    });
    parts.iter().sum()
}

pub fn adamw(w: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32], s: AdamWStep) {
    // Powers in f64: 0.999^t loses its digits in f32 long before a run ends.
    let correct1 = (1.0 - (s.beta1 as f64).powf(s.t as f64)) as f32;
    let correct2 = (1.0 - (s.beta2 as f64).powf(s.t as f64)) as f32;
    let keep = 1.0 - s.lr * s.weight_decay;
    let len = w.len();
    let (w, m, v) = (Shared::new(w), Shared::new(m), Shared::new(v));
    par::chunks(len, CHUNK, |range| {
        let (start, n) = (range.start, range.len());
        // SAFETY: chunks are disjoint.
        let (w, m, v) = unsafe { (w.range(start, n), m.range(start, n), v.range(start, n)) };
        let g = &g[range];
        vectorised(
            #[inline(always)]
            || {
                for i in 0..n {
                    let g = g[i] * s.grad_scale;
                    m[i] = s.beta1 * m[i] + (1.0 - s.beta1) * g;
                    v[i] = s.beta2 * v[i] + (1.0 - s.beta2) * g * g;
                    w[i] = w[i] * keep - s.lr * (m[i] / correct1) / ((v[i] / correct2).sqrt() + s.eps);
                }
            },
        );
    });
}
