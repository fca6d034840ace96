//! route and expert_ffn, alone and together.

use candle_core::Tensor;
use zaya::model::config::SkipMode;
use zaya::model::reference::moe::{self as reference, Route};
use zaya::tensor::backend::Precision;
use zaya::tensor::backend::{Backend, PinnedRoutes, RouterParams};

use super::harness::{
    Exact, Grad, Input, Rng, Rows, assert_buf, assert_close, assert_gradient, host, on_every_backend, pull_back, random_batch,
};

on_every_backend!(random_shapes, first_block, crowding, pinned_routes, ties_go_to_the_lowest_class, padding_is_not_counted);

/// Everything a router and its experts need. `p` is in the order of `RouterParams`.
pub struct Case {
    tokens: usize,
    pub h: Input,
    prev: Option<Input>,
    p: [Input; 9],
    pub biases: Input,
    pub experts: Vec<Input>,
    pub skip: SkipMode,
    pub eps: f64,
}

const NAMES: [&str; 9] = ["down_weight", "down_bias", "gamma", "norm", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias", "out"];

impl Case {
    pub fn new(rng: &mut Rng, tokens: usize, [d, r, experts, width]: [usize; 4], first: bool, skip: SkipMode) -> Self {
        let spread = |inner: usize| 1.5 / (inner as f64).sqrt();
        let p = [
            Input::random(rng, r, d, 0.0, spread(d)),
            Input::random(rng, 1, r, 0.0, 0.3),
            Input::random(rng, 1, r, 0.7, 0.3),
            Input::random(rng, 1, r, 1.0, 0.3),
            Input::random(rng, r, r, 0.0, spread(r)),
            Input::random(rng, 1, r, 0.0, 0.3),
            Input::random(rng, r, r, 0.0, spread(r)),
            Input::random(rng, 1, r, 0.0, 0.3),
            Input::random(rng, experts + 1, r, 0.0, 2.0 * spread(r)),
        ];
        let mut matrices = Vec::new();
        for _ in 0..experts {
            matrices.push(Input::random(rng, 2 * width, d, 0.0, spread(d)));
            matrices.push(Input::random(rng, d, width, 0.0, spread(width)));
        }
        Self {
            tokens,
            h: Input::random(rng, tokens, d, 0.0, 1.0),
            prev: (!first).then(|| Input::random(rng, tokens, r, 0.0, 1.0)),
            p,
            biases: Input::random(rng, 1, experts + 1, 0.0, 0.1),
            experts: matrices,
            skip,
            eps: 1e-5,
        }
    }

    /// Routing and output of the reference.
    pub fn reference(&self, pinned: Option<&PinnedRoutes>, precision: Precision) -> (Route, Tensor) {
        let matrix = |i: &Input| i.var.as_tensor().clone();
        let is_vector = |i: usize| matches!(i, 1 | 2 | 3 | 5 | 7);
        let p = [0, 1, 2, 3, 4, 5, 6, 7, 8].map(|i| if is_vector(i) { self.p[i].vector() } else { matrix(&self.p[i]) });
        let prev = self.prev.as_ref().map(matrix);
        let experts: Vec<Tensor> = self.experts.iter().map(matrix).collect();
        let experts: Vec<&Tensor> = experts.iter().collect();
        let (p, biases) = (params(&p, prev.is_none()), self.biases.vector());
        let route = reference::route(&self.h.var, prev.as_ref(), p, &biases, self.eps, pinned, precision).unwrap();
        let out = reference::expert_ffn(&self.h.var, &route, &experts, self.skip, precision).unwrap();
        (route, out)
    }

    pub fn upload_params<B: Backend>(&self, b: &B) -> [B::Buf; 9] {
        [0, 1, 2, 3, 4, 5, 6, 7, 8].map(|i: usize| self.p[i].upload(b))
    }
}

pub fn params<T>(p: &[T; 9], first: bool) -> RouterParams<&T> {
    RouterParams {
        down_weight: &p[0],
        down_bias: &p[1],
        gamma: if first { None } else { Some(&p[2]) },
        norm: &p[3],
        fc1_weight: &p[4],
        fc1_bias: &p[5],
        fc2_weight: &p[6],
        fc2_bias: &p[7],
        out: &p[8],
    }
}

/// How close the two best biased scores of a token may be for a f32 backend to be held to the choice.
const NEAR_TIE: f64 = 1e-5;

/// Compares routing, output and all gradients; returns the reference's choices.
fn check<B: Exact>(b: &B, rng: &mut Rng, case: &Case, pinned: Option<&PinnedRoutes>, tolerance: f64) -> Vec<u32> {
    let (tokens, first) = (case.tokens, case.prev.is_none());
    let (want, out) = case.reference(pinned, Precision::F32);
    let d_out = Input::random(rng, tokens, case.h.cols, 0.0, 1.0);
    let d_state = Input::random(rng, tokens, case.p[0].rows, 0.0, 1.0);
    let store = pull_back(&[(&out, &d_out), (&want.state, &d_state)]);

    let batch = random_batch(rng, 1, tokens, 5, Rows::Plain);
    let rows = b.rows(&batch).unwrap();
    let h = case.h.upload(b);
    let prev = case.prev.as_ref().map(|x| x.upload(b));
    let p = case.upload_params(b);
    let biases = case.biases.upload(b);

    // The free choice, where it is not a matter of rounding.
    if pinned.is_none() {
        let (routing, ..) = b.route(&rows, &h, prev.as_ref(), params(&p, first), &biases, case.eps, None).unwrap();
        let margins = margins(&host(&want.logits), &case.biases.values);
        for (row, (got, want)) in b.route_choices(&routing).unwrap().iter().zip(&want.choice).enumerate() {
            assert!(got == want || margins[row] < NEAR_TIE, "row {row}: class {got} for {want}, margin {}", margins[row]);
        }
    }
    // Gradients, on the same routes.
    let routes = PinnedRoutes(want.choice.clone());
    let (routing, state, saved) = b.route(&rows, &h, prev.as_ref(), params(&p, first), &biases, case.eps, Some(&routes)).unwrap();
    assert_eq!(b.route_choices(&routing).unwrap(), want.choice);
    assert_buf("router state", b, &state, &want.state, tolerance);
    assert_buf("router logits", b, &b.route_logits(&routing, &saved).unwrap(), &want.logits, tolerance);
    let probs: Vec<f64> = b.route_probs(&routing).unwrap().iter().map(|p| f64::from(*p)).collect();
    assert_close("router probabilities", &probs, &host(&want.prob), tolerance.max(1e-6)); // handed out in f32
    let mut counts = vec![0; case.experts.len() / 2 + 1];
    want.choice.iter().for_each(|c| counts[*c as usize] += 1);
    assert_eq!(b.route_counts(&routing).unwrap(), counts);

    let experts: Vec<B::Buf> = case.experts.iter().map(|e| e.upload(b)).collect();
    let (got, ffn_saved) = b.expert_ffn(&h, &routing, &experts, case.skip).unwrap();
    assert_buf("expert_ffn", b, &got, &out, tolerance);

    let expert_grads: Vec<Grad<B>> = case.experts.iter().map(|e| Grad::of(b, e, rng)).collect();
    let (starts, mut bufs): (Vec<_>, Vec<_>) = expert_grads.into_iter().map(Grad::split).unzip();
    let (mut dh, d_prob) =
        b.expert_ffn_backward(&h, &routing, &experts, case.skip, &ffn_saved, &d_out.upload(b), &mut bufs).unwrap();
    assert_eq!(b.shape(&d_prob), [tokens, 1]);
    let mut grads = [0, 1, 2, 3, 4, 5, 6, 7, 8].map(|i: usize| Grad::of(b, &case.p[i], rng));
    let [g0, g1, g2, g3, g4, g5, g6, g7, g8] = &mut grads;
    let into = RouterParams {
        down_weight: &mut g0.buf,
        down_bias: &mut g1.buf,
        gamma: if first { None } else { Some(&mut g2.buf) },
        norm: &mut g3.buf,
        fc1_weight: &mut g4.buf,
        fc1_bias: &mut g5.buf,
        fc2_weight: &mut g6.buf,
        fc2_bias: &mut g7.buf,
        out: &mut g8.buf,
    };
    let d_state = d_state.upload(b);
    let (p, prev) = (params(&p, first), prev.as_ref());
    let d_prev = b.route_backward(&h, prev, p, &routing, &saved, &d_prob, Some(&d_state), into, &mut dh).unwrap();
    assert_gradient("h", b, &dh, &store, &case.h, tolerance);
    assert_eq!(d_prev.is_some(), !first);
    if let (Some(got), Some(input)) = (&d_prev, &case.prev) {
        assert_gradient("prev", b, got, &store, input, tolerance);
    }
    for (i, grad) in grads.iter().enumerate() {
        grad.assert(NAMES[i], b, &store, &case.p[i], tolerance); // an absent gamma gets nothing
    }
    for (i, (start, buf)) in starts.into_iter().zip(bufs).enumerate() {
        let part = ["gate_up", "down"][i % 2];
        Grad::join(start, buf).assert(&format!("{part} of expert {}", i / 2), b, &store, &case.experts[i], tolerance);
    }
    want.choice
}

/// Distance between the two best biased probabilities of each row.
fn margins(logits: &[f64], biases: &[f32]) -> Vec<f64> {
    let margin = |row: &[f64]| {
        let sum: f64 = row.iter().map(|l| l.exp()).sum();
        let mut scores: Vec<f64> = row.iter().zip(biases).map(|(l, b)| l.exp() / sum + f64::from(*b)).collect();
        scores.sort_by(|a, b| b.total_cmp(a));
        scores[0] - scores[1]
    };
    logits.chunks(biases.len()).map(margin).collect()
}

fn random_shapes<B: Exact>(b: &B, tolerance: f64) {
    let mut seen = [0; 6];
    for seed in 0..30 {
        let rng = &mut Rng::new(8000 + seed);
        let tokens = rng.pick(1, 20);
        let shape = [rng.pick(1, 17), rng.pick(1, 13), rng.pick(1, 5), rng.pick(1, 11)];
        let skip = if rng.chance(50) { SkipMode::Identity } else { SkipMode::Zero };
        let first = rng.chance(30);
        let case = Case::new(rng, tokens, shape, first, skip);
        check(b, rng, &case, None, tolerance).iter().for_each(|c| seen[*c as usize] += 1);
    }
    assert!(seen.iter().filter(|n| **n > 0).count() >= 5, "the cases exercise many classes: {seen:?}");
}

/// Without a router before it: no gamma, and nothing to send back.
fn first_block<B: Exact>(b: &B, tolerance: f64) {
    let rng = &mut Rng::new(9000);
    let case = Case::new(rng, 9, [7, 5, 3, 4], true, SkipMode::Zero);
    check(b, rng, &case, None, tolerance);
}

/// All tokens on one expert (the others get none), every token skipped, one expert only: by balancing biases.
fn crowding<B: Exact>(b: &B, tolerance: f64) {
    for skip in [SkipMode::Zero, SkipMode::Identity] {
        for (experts, class) in [(4, 0), (4, 2), (4, 4), (1, 0), (1, 1)] {
            let rng = &mut Rng::new(9100 + 10 * experts as u64 + class as u64);
            let mut case = Case::new(rng, 11, [9, 6, experts, 5], false, skip);
            case.biases.values[class] += 5.0;
            case.biases = Input::new(1, experts + 1, case.biases.values);
            let choice = check(b, rng, &case, None, tolerance);
            assert!(choice.iter().all(|c| *c as usize == class));
        }
    }
}

/// Routes given from outside win over the router's own, and carry the gradient of their own probability.
fn pinned_routes<B: Exact>(b: &B, tolerance: f64) {
    let rng = &mut Rng::new(9200);
    for skip in [SkipMode::Zero, SkipMode::Identity] {
        let case = Case::new(rng, 10, [8, 5, 4, 6], false, skip);
        let routes = PinnedRoutes((0..10).map(|row| [4, 0, 1, 1, 3][row % 5]).collect());
        assert_eq!(check(b, rng, &case, Some(&routes), tolerance), routes.0);
    }
}

/// With a zero output matrix all classes are exactly alike.
fn ties_go_to_the_lowest_class<B: Exact>(b: &B, tolerance: f64) {
    let rng = &mut Rng::new(9300);
    let mut case = Case::new(rng, 6, [5, 4, 3, 3], false, SkipMode::Zero);
    case.p[8] = Input::new(4, 4, vec![0.0; 16]);
    for (biases, class) in [([0.0; 4], 0), ([-1.0, 0.5, 0.5, 0.5], 1), ([0.0, 0.0, 0.25, 0.25], 2)] {
        case.biases = Input::new(1, 4, biases.to_vec());
        assert_eq!(check(b, rng, &case, None, tolerance), vec![class; 6]);
    }
}

fn padding_is_not_counted<B: Exact>(b: &B, _tolerance: f64) {
    let rng = &mut Rng::new(9400);
    let case = Case::new(rng, 6, [5, 4, 2, 3], true, SkipMode::Zero);
    let mut batch = random_batch(rng, 2, 3, 5, Rows::Plain);
    batch.valid = vec![false, true, true, true, true, false];
    let rows = b.rows(&batch).unwrap();
    let p = case.upload_params(b);
    let routes = PinnedRoutes(vec![0, 0, 1, 2, 1, 1]);
    let (routing, ..) =
        b.route(&rows, &case.h.upload(b), None, params(&p, true), &case.biases.upload(b), 1e-5, Some(&routes)).unwrap();
    assert_eq!(b.route_counts(&routing).unwrap(), [1, 2, 1]);
    assert_eq!(b.route_choices(&routing).unwrap(), routes.0);
}
