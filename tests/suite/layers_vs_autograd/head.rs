//! embed, logits and cross_entropy.

use zaya::model::reference::ops;
use zaya::tensor::backend::Precision;
use zaya::tensor::backend::{Batch, Loss};

use super::harness::{
    Exact, Grad, Input, Rng, Rows, assert_buf, assert_close, assert_gradient, host, on_every_backend, pull_back, random_batch,
};

on_every_backend!(embed, cross_entropy, nothing_to_predict, large_logits);

fn embed<B: Exact>(b: &B, tolerance: f64) {
    for (seed, (batch, seq, vocab, width)) in [(1, 1, 1, 1), (2, 5, 3, 7), (3, 4, 50, 5), (1, 40, 9, 33)].into_iter().enumerate()
    {
        let rng = &mut Rng::new(10_000 + seed as u64);
        let batch = random_batch(rng, batch, seq, vocab, Rows::Plain);
        let table = Input::random(rng, vocab, width, 0.0, 1.0);
        let dy = Input::random(rng, batch.tokens(), width, 0.0, 1.0);
        let rows = b.rows(&batch).unwrap();
        for pad in [None, Some(batch.ids[0]), Some(0)] {
            let want = ops::embed(&table.var, &batch.ids, pad).unwrap();
            let store = pull_back(&[(&want, &dy)]);
            assert_buf("embed", b, &b.embed(&rows, &table.upload(b)).unwrap(), &want, tolerance);
            let mut grad = Grad::of(b, &table, rng);
            b.embed_backward(&rows, &dy.upload(b), pad, &mut grad.buf).unwrap();
            grad.assert("embedding", b, &store, &table, tolerance);
        }
    }
}

/// Compares loss, logits and gradients of one head.
fn check<B: Exact>(b: &B, rng: &mut Rng, batch: &Batch, y: &Input, head: &Input, tolerance: f64) -> Loss {
    let grad_scale = 0.125f32;
    let logits = ops::linear(&y.var, &head.var, Precision::F32).unwrap();
    let sum = ops::cross_entropy(&logits, &batch.labels).unwrap();
    let store = (&sum * f64::from(grad_scale)).unwrap().backward().unwrap();
    let (yb, hb) = (y.upload(b), head.upload(b));
    let rows = b.rows(batch).unwrap();
    assert_buf("logits", b, &b.logits(&yb, &hb).unwrap(), &logits, tolerance);
    let loss = b.cross_entropy(&rows, &yb, &hb).unwrap();
    assert_eq!(loss.count, batch.num_labels());
    assert_close("loss", &[loss.sum], &host(&sum), tolerance);
    let mut d_head = Grad::of(b, head, rng);
    let (again, dy) = b.cross_entropy_backward(&rows, &yb, &hb, grad_scale, &mut d_head.buf).unwrap();
    assert_eq!(again, loss, "the backward pass reports the same loss, bit for bit");
    assert_gradient("y", b, &dy, &store, y, tolerance);
    d_head.assert("head", b, &store, head, tolerance);
    loss
}

fn cross_entropy<B: Exact>(b: &B, tolerance: f64) {
    let shapes = [(1, 1, 1, 1), (1, 1, 2, 3), (2, 3, 17, 5), (3, 7, 33, 9), (1, 70, 130, 8), (2, 150, 11, 4)];
    for (seed, (batch, seq, vocab, width)) in shapes.into_iter().enumerate() {
        let rng = &mut Rng::new(11_000 + seed as u64);
        let mut batch = random_batch(rng, batch, seq, vocab, Rows::Plain);
        batch.labels[0] = 0;
        let y = Input::random(rng, batch.tokens(), width, 0.0, 1.0);
        let head = Input::random(rng, vocab, width, 0.0, 1.0);
        check(b, rng, &batch, &y, &head, tolerance);
    }
}

/// A batch without a single label: no loss, no gradient, no division by zero. The same without a list of labels.
fn nothing_to_predict<B: Exact>(b: &B, tolerance: f64) {
    let rng = &mut Rng::new(12_000);
    let mut batch = random_batch(rng, 2, 3, 7, Rows::Plain);
    batch.labels = vec![-100; 6];
    let (y, head) = (Input::random(rng, 6, 4, 0.0, 1.0), Input::random(rng, 7, 4, 0.0, 1.0));
    assert_eq!(check(b, rng, &batch, &y, &head, tolerance), Loss { sum: 0.0, count: 0 });
    batch.labels = Vec::new();
    let rows = b.rows(&batch).unwrap();
    assert_eq!(b.cross_entropy(&rows, &y.upload(b), &head.upload(b)).unwrap(), Loss { sum: 0.0, count: 0 });
}

/// Logits beyond the range of `exp` in f32: the maximum must be taken out first.
fn large_logits<B: Exact>(b: &B, tolerance: f64) {
    let rng = &mut Rng::new(13_000);
    let mut batch = random_batch(rng, 1, 4, 3, Rows::Plain);
    batch.labels = vec![0, 1, 2, 0];
    let y = Input::new(4, 1, vec![200.0, -300.0, 1.0, 150.0]);
    let head = Input::new(3, 1, vec![1.0, -1.0, 0.5]);
    let loss = check(b, rng, &batch, &y, &head, tolerance);
    assert!(loss.sum.is_finite() && loss.sum > 0.0);
}
