//! Router and experts, token by token.

use zaya::model::config::SkipMode;
use zaya::tensor::backend::{PinnedRoutes, RouterParams};

use super::matrix::{Mat, gelu, gelu_slope, inverse_rms, rms_norm, rms_norm_backward, softmax};
use super::rows::Rows;

pub struct Routing {
    pub choice: Vec<u32>,
    pub prob: Vec<f64>,
    pub counts: Vec<u64>,
}

/// Every stage of the router.
pub struct RouteSaved {
    state: Mat,
    inverse: Vec<f64>,
    normed: Mat,
    /// Before the two GELUs.
    z1: Mat,
    z2: Mat,
    pub logits: Mat,
    probs: Mat,
}

/// `x wᵀ`, plus a bias for every row.
fn linear(x: &Mat, w: &Mat, bias: Option<&Mat>) -> Mat {
    let mut y = x.times(&w.transposed());
    if let Some(bias) = bias {
        y.add(&Mat::from_fn(x.rows, w.rows, |_, c| bias[(0, c)]));
    }
    y
}

fn map(x: &Mat, f: impl Fn(f64) -> f64) -> Mat {
    Mat::from_fn(x.rows, x.cols, |r, c| f(x[(r, c)]))
}

pub fn route(
    rows: &Rows,
    h: &Mat,
    prev: Option<&Mat>,
    p: RouterParams<&Mat>,
    biases: &Mat,
    eps: f64,
    pinned: Option<&PinnedRoutes>,
) -> (Routing, Mat, RouteSaved) {
    let mut state = linear(h, p.down_weight, Some(p.down_bias));
    if let (Some(prev), Some(gamma)) = (prev, p.gamma) {
        state.add(&Mat::from_fn(prev.rows, prev.cols, |r, c| prev[(r, c)] * gamma[(0, c)]));
    }
    let inverse = inverse_rms(&state, eps);
    let normed = rms_norm(&state, p.norm, &inverse);
    let z1 = linear(&normed, p.fc1_weight, Some(p.fc1_bias));
    let z2 = linear(&map(&z1, gelu), p.fc2_weight, Some(p.fc2_bias));
    let logits = linear(&map(&z2, gelu), p.out, None);
    let probs = softmax(&logits);

    let mut routing = Routing { choice: Vec::new(), prob: Vec::new(), counts: vec![0; logits.cols] };
    for row in 0..h.rows {
        let mut best = 0;
        for class in 1..logits.cols {
            if probs[(row, class)] + biases[(0, class)] > probs[(row, best)] + biases[(0, best)] {
                best = class;
            }
        }
        let class = pinned.map_or(best, |p| p.0[row] as usize);
        routing.choice.push(class as u32);
        routing.prob.push(probs[(row, class)]);
        routing.counts[class] += u64::from(rows.valid[row]);
    }
    (routing, state.clone(), RouteSaved { state, inverse, normed, z1, z2, logits, probs })
}

/// Gradients of `h`, of `prev` (when there is one), and of the parameters.
pub fn route_backward(
    h: &Mat,
    prev: Option<&Mat>,
    p: RouterParams<&Mat>,
    routing: &Routing,
    saved: &RouteSaved,
    d_prob: &Mat,
    d_state: Option<&Mat>,
) -> (Mat, Option<Mat>, RouterParams<Mat>) {
    let d_logits = Mat::from_fn(h.rows, saved.logits.cols, |r, c| {
        let chosen = routing.choice[r] as usize;
        let own = if c == chosen { 1.0 } else { 0.0 };
        d_prob[(r, 0)] * saved.probs[(r, chosen)] * (own - saved.probs[(r, c)])
    });
    let d_out = d_logits.transposed().times(&map(&saved.z2, gelu));
    let d_z2 = d_logits.times(p.out).map2(&saved.z2, |d, z| d * gelu_slope(z));
    let d_fc2 = d_z2.transposed().times(&map(&saved.z1, gelu));
    let d_z1 = d_z2.times(p.fc2_weight).map2(&saved.z1, |d, z| d * gelu_slope(z));
    let d_fc1 = d_z1.transposed().times(&saved.normed);
    let d_normed = d_z1.times(p.fc1_weight);
    let (mut d_r, d_norm) = rms_norm_backward(&saved.state, p.norm, &saved.inverse, &d_normed);
    if let Some(d_state) = d_state {
        d_r.add(d_state);
    }
    let eda = prev.zip(p.gamma);
    let grads = RouterParams {
        down_weight: d_r.transposed().times(h),
        down_bias: d_r.column_sums(),
        gamma: eda.map(|(prev, _)| d_r.map2(prev, |d, x| d * x).column_sums()),
        norm: d_norm,
        fc1_weight: d_fc1,
        fc1_bias: d_z1.column_sums(),
        fc2_weight: d_fc2,
        fc2_bias: d_z2.column_sums(),
        out: d_out,
    };
    let d_prev = eda.map(|(_, gamma)| Mat::from_fn(d_r.rows, d_r.cols, |r, c| d_r[(r, c)] * gamma[(0, c)]));
    (d_r.times(p.down_weight), d_prev, grads)
}

/// `[1, 2F]` before the activation, `[1, F]` after it, `[1, D]` out.
fn expert(x: &Mat, gate_up: &Mat, down: &Mat) -> (Mat, Mat, Mat) {
    let z = linear(x, gate_up, None);
    let width = down.cols;
    let a = Mat::from_fn(1, width, |_, c| z[(0, c)] / (1.0 + (-z[(0, c)]).exp()) * z[(0, width + c)]);
    let y = linear(&a, down, None);
    (z, a, y)
}

fn row_of(m: &Mat, row: usize) -> Mat {
    Mat::from_fn(1, m.cols, |_, c| m[(row, c)])
}

pub fn expert_ffn(h: &Mat, routing: &Routing, experts: &[Mat], skip: SkipMode) -> Mat {
    let mut out = Mat::zeros(h.rows, h.cols);
    for row in 0..h.rows {
        let (class, x) = (routing.choice[row] as usize, row_of(h, row));
        let y = match (experts.get(2 * class), skip) {
            (Some(gate_up), _) => expert(&x, gate_up, &experts[2 * class + 1]).2,
            (None, SkipMode::Identity) => x,
            (None, SkipMode::Zero) => continue,
        };
        for c in 0..h.cols {
            out[(row, c)] = routing.prob[row] * y[(0, c)];
        }
    }
    out
}

/// Gradients of `h`, of the chosen probabilities, and of the experts.
pub fn expert_ffn_backward(h: &Mat, routing: &Routing, experts: &[Mat], skip: SkipMode, dy: &Mat) -> (Mat, Mat, Vec<Mat>) {
    let mut dh = Mat::zeros(h.rows, h.cols);
    let mut d_prob = Mat::zeros(h.rows, 1);
    let mut grads: Vec<Mat> = experts.iter().map(|m| Mat::zeros(m.rows, m.cols)).collect();
    for row in 0..h.rows {
        let (class, x, p) = (routing.choice[row] as usize, row_of(h, row), routing.prob[row]);
        let dot = |a: &Mat| (0..h.cols).map(|c| a[(0, c)] * dy[(row, c)]).sum::<f64>();
        if class == experts.len() / 2 {
            if skip == SkipMode::Identity {
                d_prob[(row, 0)] = dot(&x);
                (0..h.cols).for_each(|c| dh[(row, c)] = p * dy[(row, c)]);
            }
            continue;
        }
        let (gate_up, down) = (&experts[2 * class], &experts[2 * class + 1]);
        let (z, a, y) = expert(&x, gate_up, down);
        d_prob[(row, 0)] = dot(&y);
        let d_y = map(&row_of(dy, row), |d| p * d);
        grads[2 * class + 1].add(&d_y.transposed().times(&a));
        let d_a = d_y.times(down);
        let width = down.cols;
        let d_z = Mat::from_fn(1, 2 * width, |_, c| {
            let (gate, up) = (z[(0, c % width)], z[(0, c % width + width)]);
            let sigmoid = 1.0 / (1.0 + (-gate).exp());
            let slope = if c < width { up * sigmoid * (1.0 + gate * (1.0 - sigmoid)) } else { gate * sigmoid };
            d_a[(0, c % width)] * slope
        });
        grads[2 * class].add(&d_z.transposed().times(&x));
        let d_x = d_z.times(gate_up);
        (0..h.cols).for_each(|c| dh[(row, c)] = d_x[(0, c)]);
    }
    (dh, d_prob, grads)
}
