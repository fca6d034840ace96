//! A plain f64 matrix and the few operations that several verbs need.

use std::ops::{Index, IndexMut};

#[derive(Debug, Clone, PartialEq)]
pub struct Mat {
    pub rows: usize,
    pub cols: usize,
    pub data: Vec<f64>,
}

impl Mat {
    pub fn zeros(rows: usize, cols: usize) -> Self {
        Self { rows, cols, data: vec![0.0; rows * cols] }
    }

    pub fn from_fn(rows: usize, cols: usize, value: impl Fn(usize, usize) -> f64) -> Self {
        let mut m = Self::zeros(rows, cols);
        for r in 0..rows {
            for c in 0..cols {
                m[(r, c)] = value(r, c);
            }
        }
        m
    }

    /// self `[m, k]` times other `[k, n]`.
    pub fn times(&self, other: &Mat) -> Mat {
        assert_eq!(self.cols, other.rows);
        let dot = |r: usize, c: usize| (0..self.cols).map(|i| self[(r, i)] * other[(i, c)]).sum();
        Mat::from_fn(self.rows, other.cols, dot)
    }

    pub fn transposed(&self) -> Mat {
        Mat::from_fn(self.cols, self.rows, |r, c| self[(c, r)])
    }

    pub fn add(&mut self, other: &Mat) {
        assert_eq!((self.rows, self.cols), (other.rows, other.cols));
        self.data.iter_mut().zip(&other.data).for_each(|(a, b)| *a += b);
    }

    /// Each column summed, `[1, cols]`.
    pub fn column_sums(&self) -> Mat {
        Mat::from_fn(1, self.cols, |_, c| (0..self.rows).map(|r| self[(r, c)]).sum())
    }

    pub fn map2(&self, other: &Mat, f: impl Fn(f64, f64) -> f64) -> Mat {
        Mat::from_fn(self.rows, self.cols, |r, c| f(self[(r, c)], other[(r, c)]))
    }

    pub fn norm(&self) -> f64 {
        self.data.iter().map(|x| x * x).sum::<f64>().sqrt()
    }
}

impl Index<(usize, usize)> for Mat {
    type Output = f64;
    fn index(&self, (r, c): (usize, usize)) -> &f64 {
        assert!(r < self.rows && c < self.cols);
        &self.data[r * self.cols + c]
    }
}

impl IndexMut<(usize, usize)> for Mat {
    fn index_mut(&mut self, (r, c): (usize, usize)) -> &mut f64 {
        assert!(r < self.rows && c < self.cols);
        &mut self.data[r * self.cols + c]
    }
}

/// The error function by its all-positive series, exact to rounding.
fn erf(x: f64) -> f64 {
    if x.abs() > 6.5 {
        return x.signum();
    }
    let (mut term, mut sum, mut n) = (x, x, 0.0);
    while term.abs() > 1e-18 * sum.abs() && n < 500.0 {
        n += 1.0;
        term *= 2.0 * x * x / (2.0 * n + 1.0);
        sum += term;
    }
    2.0 / std::f64::consts::PI.sqrt() * (-x * x).exp() * sum
}

fn normal_cdf(x: f64) -> f64 {
    0.5 * (1.0 + erf(x / 2f64.sqrt()))
}

pub fn gelu(x: f64) -> f64 {
    x * normal_cdf(x)
}

pub fn gelu_slope(x: f64) -> f64 {
    normal_cdf(x) + x * (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt()
}

/// Softmax of each row.
pub fn softmax(logits: &Mat) -> Mat {
    let max = |r: usize| (0..logits.cols).map(|c| logits[(r, c)]).fold(f64::NEG_INFINITY, f64::max);
    let exp = Mat::from_fn(logits.rows, logits.cols, |r, c| (logits[(r, c)] - max(r)).exp());
    Mat::from_fn(logits.rows, logits.cols, |r, c| exp[(r, c)] / (0..logits.cols).map(|c| exp[(r, c)]).sum::<f64>())
}

/// 1 / sqrt(mean(x^2) + eps) of each row.
pub fn inverse_rms(x: &Mat, eps: f64) -> Vec<f64> {
    (0..x.rows).map(|r| 1.0 / ((0..x.cols).map(|c| x[(r, c)].powi(2)).sum::<f64>() / x.cols as f64 + eps).sqrt()).collect()
}

pub fn rms_norm(x: &Mat, weight: &Mat, inverse: &[f64]) -> Mat {
    Mat::from_fn(x.rows, x.cols, |r, c| x[(r, c)] * inverse[r] * weight[(0, c)])
}

/// Gradients of `x` and of `weight`.
pub fn rms_norm_backward(x: &Mat, weight: &Mat, inverse: &[f64], dy: &Mat) -> (Mat, Mat) {
    let mut dx = Mat::zeros(x.rows, x.cols);
    for r in 0..x.rows {
        let along: f64 = (0..x.cols).map(|c| dy[(r, c)] * weight[(0, c)] * x[(r, c)]).sum::<f64>() / x.cols as f64;
        for c in 0..x.cols {
            dx[(r, c)] = inverse[r] * dy[(r, c)] * weight[(0, c)] - inverse[r].powi(3) * x[(r, c)] * along;
        }
    }
    (dx, Mat::from_fn(x.rows, x.cols, |r, c| dy[(r, c)] * x[(r, c)] * inverse[r]).column_sums())
}
