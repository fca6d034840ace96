//! CCA's mixing, one number at a time.

use zaya::tensor::backend::{CcaIn, CcaParams, CcaShape, Halo, Qkv};

use super::matrix::Mat;
use super::rows::Rows;

/// What the backward pass reads again.
pub struct CcaSaved {
    /// Output of the depthwise convolution.
    u: Mat,
    /// `[T, q_dim + kv_dim]`: queries and keys before their norm.
    qk: Mat,
}

/// Which of the rows before a row: in the batch, in the halo (k-th of its rows), or before the document.
enum Before {
    Row(usize),
    Halo(usize),
    Nothing,
}

fn before(rows: &Rows, row: usize, back: usize, halo_rows: usize) -> Before {
    let s = row % rows.seq;
    if !rows.reaches_back(row, back) {
        Before::Nothing
    } else if s >= back {
        Before::Row(row - back)
    } else if halo_rows + s >= back {
        Before::Halo(row / rows.seq * halo_rows + halo_rows + s - back)
    } else {
        Before::Nothing
    }
}

fn side_by_side(a: &Mat, b: &Mat) -> Mat {
    Mat::from_fn(a.rows, a.cols + b.cols, |r, c| if c < a.cols { a[(r, c)] } else { b[(r, c - a.cols)] })
}

/// Rotates channel pairs (j, j + r/2) of one head by the position's angle, or back (`direction` = -1).
fn rotate(head: &mut [f64], shape: CcaShape, position: usize, direction: f64) {
    let half = shape.rotary_dim / 2;
    for j in 0..half {
        let power = shape.rope_theta.powf(f64::from(2.0 * j as f32 / shape.rotary_dim as f32)) as f32;
        let angle = direction * f64::from(position as f32 * (1.0 / power)); // in f32, as Hugging Face's code has it
        let (a, b) = (head[j], head[j + half]);
        head[j] = a * angle.cos() - b * angle.sin();
        head[j + half] = b * angle.cos() + a * angle.sin();
    }
}

pub fn cca_mix(
    rows: &Rows,
    shape: CcaShape,
    x: CcaIn<&Mat>,
    p: CcaParams<&Mat>,
    halo: Option<Halo<&Mat>>,
) -> (Qkv<Mat>, CcaSaved) {
    let (d, heads, kv_heads) = (shape.head_dim, shape.num_query_heads, shape.num_kv_heads);
    let (channels, group, half) = ((heads + kv_heads) * d, heads / kv_heads, kv_heads * d / 2);
    let xs = side_by_side(x.q, x.k);
    let halo_xs = halo.as_ref().map(|h| side_by_side(h.q, h.k));
    let halo_rows = if halo.is_some() { 2 } else { 0 };

    let x_at = |row: usize, back: usize, c: usize| match before(rows, row, back, halo_rows) {
        Before::Row(r) => xs[(r, c)],
        Before::Halo(r) => halo_xs.as_ref().map_or(0.0, |h| h[(r, c)]),
        Before::Nothing => 0.0,
    };
    // The depthwise output `back` tokens before a row, made of what lies in the row's document.
    let u_at = |row: usize, back: usize, c: usize| {
        p.conv0_weight[(c, 0)] * x_at(row, back + 1, c) + p.conv0_weight[(c, 1)] * x_at(row, back, c) + p.conv0_bias[(0, c)]
    };
    let u = Mat::from_fn(rows.tokens(), channels, |row, c| u_at(row, 0, c));
    let mut qk = Mat::from_fn(rows.tokens(), channels, |row, o| {
        let first = o / d * d;
        let head: f64 = (0..d)
            .map(|i| p.conv1_weight[(o, 2 * i)] * u_at(row, 1, first + i) + p.conv1_weight[(o, 2 * i + 1)] * u[(row, first + i)])
            .sum();
        head + p.conv1_bias[(0, o)]
    });
    for row in 0..rows.tokens() {
        for a in 0..heads {
            for i in 0..d {
                let mean = 0.5 * (x.q[(row, a * d + i)] + x.k[(row, a / group * d + i)]);
                qk[(row, a * d + i)] += mean;
                qk[(row, (heads + a / group) * d + i)] += mean / group as f64;
            }
        }
    }

    let mut normed = qk.clone();
    for row in 0..rows.tokens() {
        for h in 0..heads + kv_heads {
            let temp = if h < heads { 1.0 } else { p.temp[(0, h - heads)] };
            let head = &mut normed.data[row * channels + h * d..][..d];
            let factor = temp * (d as f64 / (head.iter().map(|v| v * v).sum::<f64>() + 1e-12)).sqrt();
            head.iter_mut().for_each(|v| *v *= factor);
            rotate(head, shape, rows.position(row), 1.0);
        }
    }
    let v = Mat::from_fn(rows.tokens(), 2 * half, |row, c| {
        if c < half {
            return x.v_current[(row, c)];
        }
        match before(rows, row, 1, halo_rows / 2) {
            Before::Row(r) => x.v_delayed[(r, c - half)],
            Before::Halo(r) => halo.as_ref().map_or(0.0, |h| h.v_delayed[(r, c - half)]),
            Before::Nothing => 0.0,
        }
    });
    let out = Qkv {
        q: Mat::from_fn(rows.tokens(), heads * d, |r, c| normed[(r, c)]),
        k: Mat::from_fn(rows.tokens(), kv_heads * d, |r, c| normed[(r, heads * d + c)]),
        v,
    };
    (out, CcaSaved { u, qk })
}

/// Gradients of the inputs, and of the parameters.
pub fn cca_mix_backward(
    rows: &Rows,
    shape: CcaShape,
    x: CcaIn<&Mat>,
    p: CcaParams<&Mat>,
    saved: &CcaSaved,
    dy: Qkv<&Mat>,
) -> (CcaIn<Mat>, CcaParams<Mat>) {
    let (d, heads, kv_heads) = (shape.head_dim, shape.num_query_heads, shape.num_kv_heads);
    let (channels, group, half) = ((heads + kv_heads) * d, heads / kv_heads, kv_heads * d / 2);
    let tokens = rows.tokens();
    let xs = side_by_side(x.q, x.k);
    let like = |m: &Mat| Mat::zeros(m.rows, m.cols);
    let mut g = CcaParams {
        conv0_weight: like(p.conv0_weight),
        conv0_bias: like(p.conv0_bias),
        conv1_weight: like(p.conv1_weight),
        conv1_bias: like(p.conv1_bias),
        temp: like(p.temp),
    };
    let mut dx = like(&xs);
    let mut d_delayed = like(x.v_delayed);

    // Rotation, temperature, norm: from the outputs to queries and keys before their norm.
    let mut dqk = side_by_side(dy.q, dy.k);
    for row in 0..tokens {
        for h in 0..heads + kv_heads {
            let at = row * channels + h * d;
            let grad = &mut dqk.data[at..at + d];
            rotate(grad, shape, rows.position(row), -1.0);
            let head = &saved.qk.data[at..at + d];
            let inverse = 1.0 / (head.iter().map(|v| v * v).sum::<f64>() + 1e-12).sqrt();
            let root = (d as f64).sqrt();
            let along: f64 = head.iter().zip(&*grad).map(|(v, g)| v * g).sum();
            let mut temp = 1.0;
            if h >= heads {
                temp = p.temp[(0, h - heads)];
                g.temp[(0, h - heads)] += root * inverse * along;
            }
            for (grad, v) in grad.iter_mut().zip(head) {
                *grad = temp * root * (inverse * *grad - inverse.powi(3) * v * along);
            }
        }
    }

    // q-k-mean.
    for row in 0..tokens {
        for a in 0..heads {
            for i in 0..d {
                let (query, key) = (a * d + i, (heads + a / group) * d + i);
                let d_mean = dqk[(row, query)] + dqk[(row, key)] / group as f64;
                dx[(row, query)] += 0.5 * d_mean;
                dx[(row, key)] += 0.5 * d_mean;
            }
        }
    }

    // Convolution within heads; what stands before a document is the first convolution's bias.
    let mut du = like(&saved.u);
    for row in 0..tokens {
        let previous = before(rows, row, 1, 0);
        for o in 0..channels {
            let grad = dqk[(row, o)];
            g.conv1_bias[(0, o)] += grad;
            for i in 0..d {
                let c = o / d * d + i;
                g.conv1_weight[(o, 2 * i + 1)] += grad * saved.u[(row, c)];
                du[(row, c)] += grad * p.conv1_weight[(o, 2 * i + 1)];
                let from_before = grad * p.conv1_weight[(o, 2 * i)];
                if let Before::Row(r) = previous {
                    g.conv1_weight[(o, 2 * i)] += grad * saved.u[(r, c)];
                    du[(r, c)] += from_before;
                } else {
                    g.conv1_weight[(o, 2 * i)] += grad * p.conv0_bias[(0, c)];
                    g.conv0_bias[(0, c)] += from_before;
                }
            }
        }
    }

    // Depthwise convolution.
    for row in 0..tokens {
        for c in 0..channels {
            let grad = du[(row, c)];
            g.conv0_bias[(0, c)] += grad;
            g.conv0_weight[(c, 1)] += grad * xs[(row, c)];
            dx[(row, c)] += grad * p.conv0_weight[(c, 1)];
            if let Before::Row(r) = before(rows, row, 1, 0) {
                g.conv0_weight[(c, 0)] += grad * xs[(r, c)];
                dx[(r, c)] += grad * p.conv0_weight[(c, 0)];
            }
        }
    }

    // Values.
    for row in 0..tokens {
        if let Before::Row(r) = before(rows, row, 1, 0) {
            for c in 0..half {
                d_delayed[(r, c)] += dy.v[(row, half + c)];
            }
        }
    }
    let d_in = CcaIn {
        q: Mat::from_fn(tokens, heads * d, |r, c| dx[(r, c)]),
        k: Mat::from_fn(tokens, kv_heads * d, |r, c| dx[(r, heads * d + c)]),
        v_current: Mat::from_fn(tokens, half, |r, c| dy.v[(r, c)]),
        v_delayed: d_delayed,
    };
    (d_in, g)
}
