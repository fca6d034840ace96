//! The tied head with cross-entropy, in chunks of rows: the logits of a whole micro-batch never exist. Always full f32.

use rayon::prelude::*;

use super::gemm::{Target, View, matmul};
use super::math::{exp, lane_sum};
use super::rows::Rows;
use crate::tensor::backend::Loss;

/// Numbers of logits that exist at one time, at most (or one row of them).
const CHUNK_LOGITS: usize = 1 << 23;

/// `y headᵀ`, `[n, V]`.
pub fn logits(y: &[f32], head: &[f32], d: usize, out: &mut [f32]) {
    let (n, v) = (y.len() / d, head.len() / d);
    matmul(n, v, d, View::rows(y, d), View::transposed(head, d), Target::rows(out, v), false);
}

/// What the backward of the head needs.
pub struct Gradient<'a> {
    pub scale: f32,
    pub d_head: &'a mut [f32],
    pub dy: &'a mut [f32],
}

/// Sum of losses over rows with a label, and with `gradient` that of `scale * sum`. A micro-batch without any label
/// gives a zero loss, a zero count and zero gradients.
pub fn cross_entropy(rows: &Rows, y: &[f32], head: &[f32], d: usize, mut gradient: Option<Gradient>) -> Loss {
    let v = head.len() / d;
    // Rows with a label, so that padding and foreign targets cost nothing.
    let labelled: Vec<usize> = (0..rows.labels.len()).filter(|t| rows.labels[*t] >= 0).collect();
    let mut sum = 0f64;
    let chunk = (CHUNK_LOGITS / v).clamp(1, 1024);
    let mut buffer = vec![0.0; chunk.min(labelled.len()) * v];
    for part in labelled.chunks(chunk) {
        let n = part.len();
        let x: Vec<f32> = part.iter().flat_map(|t| &y[t * d..][..d]).copied().collect();
        let z = &mut buffer[..n * v];
        logits(&x, head, d, z);
        let scale = gradient.as_ref().map(|g| g.scale);
        let losses: Vec<f64> = z
            .par_chunks_mut(v)
            .zip(part)
            .map(|(z, t)| {
                let label = rows.labels[*t] as usize;
                let max = z.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let target = z[label];
                let Some(scale) = scale else {
                    return (max - target) as f64 + (lane_sum(v, |i| exp(z[i] - max)) as f64).ln();
                };
                z.iter_mut().for_each(|z| *z = exp(*z - max));
                let total = lane_sum(v, |i| z[i]);
                // The logits become their own gradient: scale * (softmax - onehot).
                let by = scale / total;
                z.iter_mut().for_each(|z| *z *= by);
                z[label] -= scale;
                (max - target) as f64 + (total as f64).ln()
            })
            .collect();
        sum += losses.iter().sum::<f64>();
        if let Some(g) = &mut gradient {
            let mut dx = vec![0.0; n * d];
            matmul(n, d, v, View::rows(z, v), View::rows(head, d), Target::rows(&mut dx, d), false);
            matmul(v, d, n, View::transposed(z, v), View::rows(&x, d), Target::rows(g.d_head, d), true);
            for (t, dx) in part.iter().zip(dx.chunks(d)) {
                g.dy[t * d..][..d].copy_from_slice(dx);
            }
        }
    }
    Loss { sum, count: labelled.len() as u64 }
}
