//! Muon and AdamW updates (spec 3.3).

use rayon::prelude::*;

use super::Buf;
use super::gemm::{Target, View, matmul};
use crate::tensor::backend::{AdamWStep, MuonItem, MuonStep};

const CHUNK: usize = 1 << 14;

/// Sum of squares in f64, chunks in a fixed order.
pub fn sq_norm(x: &[f32]) -> f64 {
    let parts: Vec<f64> = x.par_chunks(CHUNK).map(|c| c.iter().map(|v| *v as f64 * *v as f64).sum::<f64>()).collect();
    parts.iter().sum()
}

/// Quintic Newton-Schulz: the nearest (semi-)orthogonal matrix, roughly. `[rows, cols]` in and out. Zero stays zero.
pub fn newton_schulz(g: &[f32], rows: usize, cols: usize, steps: usize) -> Vec<f32> {
    const A: f32 = 3.4445;
    const B: f32 = -4.7750;
    const C: f32 = 2.0315;
    // Smallest norm that is divided by.
    const EPS: f32 = 1e-7;
    let flip = rows > cols;
    let (m, n) = if flip { (cols, rows) } else { (rows, cols) };
    let inv = 1.0 / (sq_norm(g).sqrt() as f32).max(EPS);
    let mut x = if flip { transpose(g, rows, cols) } else { g.to_vec() };
    x.iter_mut().for_each(|v| *v *= inv);
    let (mut gram, mut gram2, mut next) = (vec![0.0; m * m], vec![0.0; m * m], vec![0.0; m * n]);
    for _ in 0..steps {
        matmul(m, m, n, View::rows(&x, n), View::transposed(&x, n), Target::rows(&mut gram, m), false);
        matmul(m, m, m, View::rows(&gram, m), View::rows(&gram, m), Target::rows(&mut gram2, m), false);
        gram.iter_mut().zip(&gram2).for_each(|(a, a2)| *a = B * *a + C * a2);
        next.iter_mut().zip(&x).for_each(|(next, x)| *next = A * x);
        matmul(m, n, m, View::rows(&gram, m), View::rows(&x, n), Target::rows(&mut next, n), true);
        std::mem::swap(&mut x, &mut next);
    }
    if flip { transpose(&x, cols, rows) } else { x }
}

fn transpose(x: &[f32], rows: usize, cols: usize) -> Vec<f32> {
    (0..rows * cols).map(|i| x[i % rows * cols + i / rows]).collect()
}

/// M = mu M + (1-mu) G; U = (1-mu) G + mu M; W = (1 - lr wd) W - lr 0.2 sqrt(max(m, n)) NS(U). Matrices in parallel.
pub fn muon(items: &mut [MuonItem<'_, Buf>], s: MuonStep) {
    items.par_iter_mut().with_max_len(1).for_each(|item| {
        let (rows, cols) = (item.weight.rows / item.row_blocks, item.weight.cols);
        let mu = s.momentum;
        let update: Vec<f32> = (item.momentum.data.iter_mut().zip(&item.grad.data))
            .map(|(m, g)| {
                let g = g * s.grad_scale;
                *m = mu * *m + (1.0 - mu) * g;
                g + mu * (*m - g)
            })
            .collect();
        let direction: Vec<f32> =
            update.chunks(rows * cols).flat_map(|block| newton_schulz(block, rows, cols, s.ns_steps)).collect();
        let keep = 1.0 - s.lr * s.weight_decay;
        let by = s.lr * 0.2 * (rows.max(cols) as f32).sqrt();
        item.weight.data.iter_mut().zip(&direction).for_each(|(w, o)| *w = *w * keep - by * o);
    });
}

pub fn adamw(w: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32], s: AdamWStep) {
    // Powers in f64: 0.999^t loses its digits in f32 long before a run ends.
    let correct1 = (1.0 - (s.beta1 as f64).powf(s.t as f64)) as f32;
    let correct2 = (1.0 - (s.beta2 as f64).powf(s.t as f64)) as f32;
    let keep = 1.0 - s.lr * s.weight_decay;
    w.par_chunks_mut(CHUNK).zip(g.par_chunks(CHUNK)).zip(m.par_chunks_mut(CHUNK).zip(v.par_chunks_mut(CHUNK))).for_each(
        |((w, g), (m, v))| {
            for i in 0..w.len() {
                let g = g[i] * s.grad_scale;
                m[i] = s.beta1 * m[i] + (1.0 - s.beta1) * g;
                v[i] = s.beta2 * v[i] + (1.0 - s.beta2) * g * g;
                w[i] = w[i] * keep - s.lr * (m[i] / correct1) / ((v[i] / correct2).sqrt() + s.eps);
            }
        },
    );
}
