//! affine, residual_scale, rms_norm, linear.

use zaya::model::reference::ops;
use zaya::tensor::backend::Merge;
use zaya::tensor::backend::Precision;

use super::harness::{Exact, Grad, Input, Rng, assert_buf, assert_gradient, on_every_backend, pull_back};

on_every_backend!(affine, residual_scale, rms_norm, linear);

/// Rows and columns: single, odd, and wider than any vector register.
const SHAPES: [(usize, usize); 6] = [(1, 1), (1, 7), (5, 3), (3, 17), (13, 33), (2, 129)];

fn affine<B: Exact>(b: &B, tolerance: f64) {
    for (seed, (rows, cols)) in SHAPES.into_iter().enumerate() {
        let rng = &mut Rng::new(seed as u64);
        let x = Input::random(rng, rows, cols, 0.0, 1.0);
        let scale = Input::random(rng, 1, cols, 1.0, 0.5);
        let bias = Input::random(rng, 1, cols, 0.0, 0.5);
        let dy = Input::random(rng, rows, cols, 0.0, 1.0);
        let want = ops::affine(&x.var, &scale.vector(), &bias.vector()).unwrap();
        let store = pull_back(&[(&want, &dy)]);

        let (xb, sb, bb) = (x.upload(b), scale.upload(b), bias.upload(b));
        assert_buf("affine", b, &b.affine(&xb, &sb, &bb).unwrap(), &want, tolerance);
        let (mut d_scale, mut d_bias) = (Grad::of(b, &scale, rng), Grad::of(b, &bias, rng));
        let dx = b.affine_backward(&xb, &sb, &bb, &dy.upload(b), &mut d_scale.buf, &mut d_bias.buf).unwrap();
        assert_gradient("x", b, &dx, &store, &x, tolerance);
        d_scale.assert("scale", b, &store, &scale, tolerance);
        d_bias.assert("bias", b, &store, &bias, tolerance);
    }
}

fn residual_scale<B: Exact>(b: &B, tolerance: f64) {
    for (seed, (rows, cols)) in SHAPES.into_iter().enumerate() {
        let rng = &mut Rng::new(100 + seed as u64);
        let branch = Input::random(rng, rows, cols, 0.0, 1.0);
        let stream = Input::random(rng, rows, cols, 0.0, 1.0);
        let p: [Input; 4] = [1.0, 0.0, 1.0, 0.0].map(|mean| Input::random(rng, 1, cols, mean, 0.5));
        let dy = Input::random(rng, rows, cols, 0.0, 1.0);
        let [s1, b1, s2, b2] = [0, 1, 2, 3].map(|i: usize| p[i].vector());
        let vectors = Merge { branch_scale: &s1, branch_bias: &b1, stream_scale: &s2, stream_bias: &b2 };
        let want = ops::residual_scale(&branch.var, &stream.var, vectors).unwrap();
        let store = pull_back(&[(&want, &dy)]);

        let (branch_buf, stream_buf) = (branch.upload(b), stream.upload(b));
        let bufs = [0, 1, 2, 3].map(|i: usize| p[i].upload(b));
        let [s1, b1, s2, b2] = &bufs;
        let merge = Merge { branch_scale: s1, branch_bias: b1, stream_scale: s2, stream_bias: b2 };
        let got = b.residual_scale(&branch_buf, &stream_buf, merge).unwrap();
        assert_buf("residual_scale", b, &got, &want, tolerance);
        let mut grads = [0, 1, 2, 3].map(|i: usize| Grad::of(b, &p[i], rng));
        let [g1, g2, g3, g4] = &mut grads;
        let into =
            Merge { branch_scale: &mut g1.buf, branch_bias: &mut g2.buf, stream_scale: &mut g3.buf, stream_bias: &mut g4.buf };
        let (d_branch, d_stream) = b.residual_scale_backward(&branch_buf, &stream_buf, merge, &dy.upload(b), into).unwrap();
        assert_gradient("branch", b, &d_branch, &store, &branch, tolerance);
        assert_gradient("stream", b, &d_stream, &store, &stream, tolerance);
        for (i, name) in ["branch_scale", "branch_bias", "stream_scale", "stream_bias"].into_iter().enumerate() {
            grads[i].assert(name, b, &store, &p[i], tolerance);
        }
    }
}

fn rms_norm<B: Exact>(b: &B, tolerance: f64) {
    for (seed, (rows, cols)) in SHAPES.into_iter().enumerate() {
        let rng = &mut Rng::new(200 + seed as u64);
        let mut x = Input::random(rng, rows, cols, 0.2, 1.0);
        if rows > 2 {
            x.values[cols..2 * cols].fill(0.0); // a zero row has a norm, and a gradient
            x = Input::new(rows, cols, x.values);
        }
        let weight = Input::random(rng, 1, cols, 1.0, 0.5);
        let dy = Input::random(rng, rows, cols, 0.0, 1.0);
        for eps in [1e-5, 1e-2] {
            let want = ops::rms_norm(&x.var, &weight.vector(), eps).unwrap();
            let store = pull_back(&[(&want, &dy)]);
            let (xb, wb) = (x.upload(b), weight.upload(b));
            let (y, saved) = b.rms_norm(&xb, &wb, eps).unwrap();
            assert_buf("rms_norm", b, &y, &want, tolerance);
            let mut d_weight = Grad::of(b, &weight, rng);
            let dx = b.rms_norm_backward(&xb, &wb, &saved, &dy.upload(b), &mut d_weight.buf).unwrap();
            assert_gradient("x", b, &dx, &store, &x, tolerance);
            d_weight.assert("weight", b, &store, &weight, tolerance);
        }
    }
}

fn linear<B: Exact>(b: &B, tolerance: f64) {
    let shapes = [(1, 1, 1), (1, 5, 9), (7, 3, 1), (3, 1, 5), (33, 19, 11), (6, 64, 31), (65, 7, 130)];
    for (seed, (rows, inner, out)) in shapes.into_iter().enumerate() {
        let rng = &mut Rng::new(300 + seed as u64);
        let x = Input::random(rng, rows, inner, 0.0, 1.0);
        let weight = Input::random(rng, out, inner, 0.0, 1.0);
        let dy = Input::random(rng, rows, out, 0.0, 1.0);
        let want = ops::linear(&x.var, &weight.var, Precision::F32).unwrap();
        let store = pull_back(&[(&want, &dy)]);
        let (xb, wb) = (x.upload(b), weight.upload(b));
        assert_buf("linear", b, &b.linear(&xb, &wb).unwrap(), &want, tolerance);
        let mut d_weight = Grad::of(b, &weight, rng);
        let dx = b.linear_backward(&xb, &wb, &dy.upload(b), &mut d_weight.buf).unwrap();
        assert_gradient("x", b, &dx, &store, &x, tolerance);
        d_weight.assert("weight", b, &store, &weight, tolerance);
    }
}
