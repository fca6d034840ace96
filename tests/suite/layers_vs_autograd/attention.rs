//! causal_attention under every kind of mask.

use candle_core::{DType, Device};
use zaya::model::reference::attention::causal_attention as reference;
use zaya::model::reference::sequence::Sequences;
use zaya::tensor::backend::{AttentionShape, Batch, Qkv};

use super::harness::{Exact, Input, Rng, Rows, assert_buf, assert_gradient, on_every_backend, pull_back, random_batch};

on_every_backend!(random_shapes, windows, rows_that_see_nothing, longer_than_a_block);

fn check<B: Exact>(b: &B, rng: &mut Rng, shape: AttentionShape, batch: &Batch, tolerance: f64) {
    let what = |part: &str| format!("{part} of {shape:?} on {batch:?}");
    let (heads, kv, d) = (shape.num_query_heads, shape.num_kv_heads, shape.head_dim);
    let x = [heads, kv, kv].map(|h| Input::random(rng, batch.tokens(), h * d, 0.0, 1.0));
    let dy = Input::random(rng, batch.tokens(), heads * d, 0.0, 1.0);
    let [q, k, v] = [(0, heads), (1, kv), (2, kv)].map(|(i, h): (usize, usize)| x[i].shaped((batch.batch, batch.seq, h, d)));
    let sequences = Sequences::new(batch, DType::F64, &Device::Cpu).unwrap();
    let (want, _) = reference(&sequences, shape, Qkv { q: &q, k: &k, v: &v }).unwrap();
    let store = pull_back(&[(&want, &dy)]);

    let rows = b.rows(batch).unwrap();
    let [q, k, v] = [0, 1, 2].map(|i: usize| x[i].upload(b));
    let qkv = Qkv { q: &q, k: &k, v: &v };
    let (got, saved) = b.causal_attention(&rows, shape, qkv).unwrap();
    assert_buf(&what("output"), b, &got, &want, tolerance);
    let dx = b.causal_attention_backward(&rows, shape, qkv, &got, &saved, &dy.upload(b)).unwrap();
    for (i, (part, got)) in [("q", &dx.q), ("k", &dx.k), ("v", &dx.v)].into_iter().enumerate() {
        assert_gradient(&what(part), b, got, &store, &x[i], tolerance);
    }
}

fn shape(num_query_heads: usize, num_kv_heads: usize, head_dim: usize, window: Option<usize>) -> AttentionShape {
    AttentionShape { num_query_heads, num_kv_heads, head_dim, window }
}

fn random_shapes<B: Exact>(b: &B, tolerance: f64) {
    for seed in 0..60 {
        let rng = &mut Rng::new(4000 + seed);
        let kv = rng.pick(1, 3);
        let window = if rng.chance(50) { Some(rng.pick(1, 8)) } else { None };
        let shape = shape(kv * rng.pick(1, 4), kv, rng.pick(1, 10), window);
        let (batch, seq) = (rng.pick(1, 3), rng.pick(1, 11));
        let kind = if seed % 3 == 0 { Rows::Plain } else { Rows::Ragged };
        let batch = random_batch(rng, batch, seq, 5, kind);
        check(b, rng, shape, &batch, tolerance);
    }
}

/// A window counts the current token: 1 is the token alone, one as long as the sequence is no window at all.
fn windows<B: Exact>(b: &B, tolerance: f64) {
    for window in [1, 2, 5, 6, 7, 1000] {
        let rng = &mut Rng::new(5000 + window as u64);
        for kind in [Rows::Plain, Rows::Ragged] {
            let batch = random_batch(rng, 2, 6, 5, kind);
            check(b, rng, shape(4, 2, 3, Some(window)), &batch, tolerance);
        }
    }
    let rng = &mut Rng::new(5100);
    let batch = random_batch(rng, 1, 6, 5, Rows::Plain);
    let rows = b.rows(&batch).unwrap();
    let [q, k, v] = [4, 2, 2].map(|h| Input::random(rng, 6, h * 3, 0.0, 1.0).upload(b));
    let run = |window| {
        let (out, _) = b.causal_attention(&rows, shape(4, 2, 3, window), Qkv { q: &q, k: &k, v: &v }).unwrap();
        b.read(&out)
    };
    assert_eq!(run(None), run(Some(6)));
    assert_ne!(run(None), run(Some(5)));
}

/// Padding before the first real token sees nothing and attends to the whole sequence alike, as Hugging Face's does. The
/// last such row is the one that predicts the first real token, so its gradient counts.
fn rows_that_see_nothing<B: Exact>(b: &B, tolerance: f64) {
    let rng = &mut Rng::new(6000);
    for (left, right) in [(3, 0), (0, 3), (5, 0), (1, 0)] {
        let mut batch = random_batch(rng, 2, 5, 5, Rows::Plain);
        batch.valid = (0..10).map(|row| row >= 5 || (row >= left && row < 5 - right)).collect();
        for window in [None, Some(2)] {
            check(b, rng, shape(2, 1, 4, window), &batch, tolerance);
        }
    }
}

/// Long enough for a backend that works in blocks to have several, with a ragged end.
fn longer_than_a_block<B: Exact>(b: &B, tolerance: f64) {
    for (window, kind) in [(None, Rows::Plain), (None, Rows::Ragged), (Some(70), Rows::Ragged), (Some(9), Rows::Plain)] {
        let rng = &mut Rng::new(7000);
        let batch = random_batch(rng, 1, 149, 5, kind);
        check(b, rng, shape(2, 1, 6, window), &batch, tolerance);
    }
}
