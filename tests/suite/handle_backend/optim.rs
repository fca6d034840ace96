//! Muon and AdamW on one matrix.

use std::ops::Range;

use zaya::tensor::backend::{AdamWStep, MuonStep};

use super::matrix::Mat;

/// The nearest orthogonal matrix, roughly, by Newton-Schulz steps. Zero stays zero.
fn orthogonalised(u: &Mat, steps: usize) -> Mat {
    if u.rows > u.cols {
        return orthogonalised(&u.transposed(), steps).transposed();
    }
    let norm = u.norm().max(1e-7);
    let mut x = Mat::from_fn(u.rows, u.cols, |r, c| u[(r, c)] / norm);
    for _ in 0..steps {
        let a = x.times(&x.transposed());
        let b = a.map2(&a.times(&a), |a, aa| -4.7750 * a + 2.0315 * aa);
        x = x.map2(&b.times(&x), |x, bx| 3.4445 * x + bx);
    }
    x
}

/// `row_blocks` equal blocks of rows are matrices of their own.
pub fn muon(weight: &mut Mat, grad: &Mat, momentum: &mut Mat, row_blocks: usize, step: MuonStep) {
    if row_blocks > 1 {
        let rows = weight.rows / row_blocks;
        let block = |m: &Mat, i: usize| Mat::from_fn(rows, m.cols, |r, c| m[(i * rows + r, c)]);
        for i in 0..row_blocks {
            let (mut w, mut m) = (block(weight, i), block(momentum, i));
            muon(&mut w, &block(grad, i), &mut m, 1, step);
            for (into, from) in [(&mut *weight, w), (&mut *momentum, m)] {
                into.data[i * rows * from.cols..][..from.data.len()].copy_from_slice(&from.data);
            }
        }
        return;
    }
    let (mu, lr) = (f64::from(step.momentum), f64::from(step.lr));
    let g = Mat::from_fn(grad.rows, grad.cols, |r, c| f64::from(step.grad_scale) * grad[(r, c)]);
    *momentum = momentum.map2(&g, |m, g| mu * m + (1.0 - mu) * g);
    let update = orthogonalised(&momentum.map2(&g, |m, g| mu * m + (1.0 - mu) * g), step.ns_steps);
    let size = 0.2 * (weight.rows.max(weight.cols) as f64).sqrt();
    *weight = weight.map2(&update, |w, u| w * (1.0 - lr * f64::from(step.weight_decay)) - lr * size * u);
}

pub fn adamw_rows(weight: &mut Mat, grad: &Mat, rows: Range<usize>, m: &mut Mat, v: &mut Mat, at: usize, step: AdamWStep) {
    let (beta1, beta2, lr) = (f64::from(step.beta1), f64::from(step.beta2), f64::from(step.lr));
    let cols = weight.cols;
    for (i, j) in (rows.start * cols..rows.end * cols).zip(at * cols..) {
        let g = f64::from(step.grad_scale) * grad.data[i];
        m.data[j] = beta1 * m.data[j] + (1.0 - beta1) * g;
        v.data[j] = beta2 * v.data[j] + (1.0 - beta2) * g * g;
        let m_hat = m.data[j] / (1.0 - beta1.powf(step.t as f64));
        let v_hat = v.data[j] / (1.0 - beta2.powf(step.t as f64));
        let decayed = weight.data[i] * (1.0 - lr * f64::from(step.weight_decay));
        weight.data[i] = decayed - lr * m_hat / (v_hat.sqrt() + f64::from(step.eps));
    }
}
