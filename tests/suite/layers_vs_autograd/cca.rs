//! cca_mix, where every index can go wrong.

use candle_core::{DType, Device};
use zaya::model::reference::cca::cca_mix as reference;
use zaya::model::reference::sequence::Sequences;
use zaya::tensor::backend::Precision;
use zaya::tensor::backend::{Batch, CcaIn, CcaParams, CcaShape, Qkv};

use super::harness::{Exact, Grad, Input, Rng, Rows, assert_buf, assert_gradient, on_every_backend, pull_back, random_batch};

on_every_backend!(chosen_shapes, random_shapes, zero_vectors);

/// The inputs of one `cca_mix`, in the order of the fields of `CcaIn` and `CcaParams`.
pub struct Case {
    pub shape: CcaShape,
    pub batch: Batch,
    pub x: [Input; 4],
    pub p: [Input; 5],
}

impl Case {
    pub fn new(rng: &mut Rng, shape: CcaShape, batch: Batch) -> Self {
        let (d, tokens) = (shape.head_dim, batch.tokens());
        let (q, kv) = (shape.num_query_heads * d, shape.num_kv_heads * d);
        let x = [q, kv, kv / 2, kv / 2].map(|cols| Input::random(rng, tokens, cols, 0.0, 1.0));
        let p = [
            Input::random(rng, q + kv, 2, 0.0, 0.5),
            Input::random(rng, 1, q + kv, 0.0, 0.3),
            Input::random(rng, q + kv, d * 2, 0.0, 0.3),
            Input::random(rng, 1, q + kv, 0.0, 0.3),
            Input::random(rng, 1, shape.num_kv_heads, 1.0, 0.3),
        ];
        Self { shape, batch, x, p }
    }
}

pub fn cca_in<T>(x: &[T; 4]) -> CcaIn<&T> {
    CcaIn { q: &x[0], k: &x[1], v_current: &x[2], v_delayed: &x[3] }
}

pub fn cca_params<T>(p: &[T; 5]) -> CcaParams<&T> {
    CcaParams { conv0_weight: &p[0], conv0_bias: &p[1], conv1_weight: &p[2], conv1_bias: &p[3], temp: &p[4] }
}

fn check<B: Exact>(b: &B, rng: &mut Rng, case: &Case, tolerance: f64) {
    let (shape, batch) = (case.shape, &case.batch);
    let what = |part: &str| format!("{part} of {shape:?} on {batch:?}");
    let (d, channels) = (shape.head_dim, case.p[1].cols);

    let x = [0, 1, 2, 3].map(|i: usize| case.x[i].shaped((batch.batch, batch.seq, case.x[i].cols)));
    let p = [
        case.p[0].shaped((channels, 2)),
        case.p[1].vector(),
        case.p[2].shaped((channels, d, 2)),
        case.p[3].vector(),
        case.p[4].vector(),
    ];
    let sequences = Sequences::new(batch, DType::F64, &Device::Cpu).unwrap();
    let want = reference(&sequences, shape, cca_in(&x), cca_params(&p), Precision::F32).unwrap();
    let outputs = [&want.q_rotated, &want.k_rotated, &want.v];
    let dy = outputs.map(|t| Input::random(rng, batch.tokens(), t.elem_count() / batch.tokens(), 0.0, 1.0));
    let store = pull_back(&[(outputs[0], &dy[0]), (outputs[1], &dy[1]), (outputs[2], &dy[2])]);

    let rows = b.rows(batch).unwrap();
    let x = [0, 1, 2, 3].map(|i: usize| case.x[i].upload(b));
    let p = [0, 1, 2, 3, 4].map(|i: usize| case.p[i].upload(b));
    let (got, saved) = b.cca_mix(&rows, shape, cca_in(&x), cca_params(&p), None).unwrap();
    for (part, got, want) in [("q", &got.q, outputs[0]), ("k", &got.k, outputs[1]), ("v", &got.v, outputs[2])] {
        assert_buf(&what(part), b, got, want, tolerance);
    }
    let mut grads = [0, 1, 2, 3, 4].map(|i: usize| Grad::of(b, &case.p[i], rng));
    let [g0, g1, g2, g3, g4] = &mut grads;
    let into = CcaParams {
        conv0_weight: &mut g0.buf,
        conv0_bias: &mut g1.buf,
        conv1_weight: &mut g2.buf,
        conv1_bias: &mut g3.buf,
        temp: &mut g4.buf,
    };
    let [dq, dk, dv] = [0, 1, 2].map(|i: usize| dy[i].upload(b));
    let back = Qkv { q: &dq, k: &dk, v: &dv };
    let (dx, d_halo) = b.cca_mix_backward(&rows, shape, cca_in(&x), cca_params(&p), None, &saved, back, into).unwrap();
    assert!(d_halo.is_none());
    for (i, (part, got)) in
        [("q", &dx.q), ("k", &dx.k), ("v_current", &dx.v_current), ("v_delayed", &dx.v_delayed)].into_iter().enumerate()
    {
        assert_gradient(&what(part), b, got, &store, &case.x[i], tolerance);
    }
    for (i, part) in ["conv0_weight", "conv0_bias", "conv1_weight", "conv1_bias", "temp"].into_iter().enumerate() {
        grads[i].assert(&what(part), b, &store, &case.p[i], tolerance);
    }
}

fn shape(num_query_heads: usize, num_kv_heads: usize, head_dim: usize, rotary_dim: usize) -> CcaShape {
    CcaShape { num_query_heads, num_kv_heads, head_dim, rotary_dim, rope_theta: 10_000.0 }
}

/// Shapes chosen for their edges. With 1 or 3 key/value heads the cut between current and delayed values falls inside one.
fn chosen_shapes<B: Exact>(b: &B, tolerance: f64) {
    let shapes = [
        shape(1, 1, 2, 2),
        shape(1, 1, 2, 0),
        shape(2, 1, 4, 2),
        shape(3, 3, 4, 4),
        shape(6, 3, 2, 2),
        shape(2, 2, 3, 2),
        shape(4, 2, 5, 0),
        shape(4, 2, 16, 8),
        shape(3, 1, 10, 6),
    ];
    for (seed, shape) in shapes.into_iter().enumerate() {
        for (batch, seq) in [(1, 1), (3, 1), (1, 2), (2, 7)] {
            for kind in [Rows::Plain, Rows::Ragged] {
                let rng = &mut Rng::new(1000 + 10 * seed as u64 + seq as u64);
                let batch = random_batch(rng, batch, seq, 5, kind);
                let case = Case::new(rng, shape, batch);
                check(b, rng, &case, tolerance);
            }
        }
    }
}

fn random_shapes<B: Exact>(b: &B, tolerance: f64) {
    for seed in 0..40 {
        let rng = &mut Rng::new(2000 + seed);
        let kv_heads = rng.pick(1, 3);
        let mut d = rng.pick(2, 10);
        d += d * kv_heads % 2;
        let shape = CcaShape {
            num_query_heads: kv_heads * rng.pick(1, 4),
            num_kv_heads: kv_heads,
            head_dim: d,
            rotary_dim: 2 * rng.pick(0, d / 2),
            rope_theta: [100.0, 10_000.0, 1_000_000.0][rng.pick(0, 2)],
        };
        let (batch, seq) = (rng.pick(1, 3), rng.pick(1, 12));
        let batch = random_batch(rng, batch, seq, 5, Rows::Ragged);
        let case = Case::new(rng, shape, batch);
        check(b, rng, &case, tolerance);
    }
}

/// Padded rows have zero projections; with zero biases their queries and keys are zero vectors, which the norm must bear.
fn zero_vectors<B: Exact>(b: &B, _tolerance: f64) {
    let rng = &mut Rng::new(3000);
    let batch = Batch { batch: 2, seq: 4, ids: vec![0; 8], ..Batch::default() };
    let mut case = Case::new(rng, shape(2, 1, 4, 2), batch);
    for i in [1, 3] {
        case.p[i] = Input::new(1, case.p[i].cols, vec![0.0; case.p[i].cols]);
    }
    for x in &mut case.x {
        x.values[..2 * x.cols].fill(0.0); // the first two rows of the first sequence
        *x = Input::new(x.rows, x.cols, x.values.clone());
    }
    let rows = b.rows(&case.batch).unwrap();
    let (x, p) = ([0, 1, 2, 3].map(|i: usize| case.x[i].upload(b)), [0, 1, 2, 3, 4].map(|i: usize| case.p[i].upload(b)));
    let (got, _) = b.cca_mix(&rows, case.shape, cca_in(&x), cca_params(&p), None).unwrap();
    let q = b.read(&got.q);
    assert!(q.iter().all(|v| v.is_finite()));
    assert!(q[..16].iter().all(|v| *v == 0.0), "the query of a zero row is zero");
    assert!(q[16..].iter().any(|v| *v != 0.0));
}
