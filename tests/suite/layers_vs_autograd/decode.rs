//! A sequence taken in pieces, with caches, gives the rows of the whole sequence.

use zaya::tensor::backend::{AttentionShape, Backend, Batch, CcaIn, CcaShape, Halo, Qkv};

use super::cca::{Case, cca_params};
use super::harness::{Exact, Input, Rng, Rows, assert_close, on_every_backend, random_batch};

on_every_backend!(cca_mix_with_a_halo, attention_with_a_past);

/// Sequence lengths, and where they are cut: a prefill then single tokens, all single tokens, several at once.
const CUTS: [(usize, &[usize]); 4] = [(7, &[4, 5, 6, 7]), (4, &[1, 2, 3, 4]), (9, &[2, 5, 9]), (3, &[3])];

/// Rows `from..to` of each sequence.
fn piece<B: Backend>(b: &B, input: &Input, batch: usize, from: usize, to: usize) -> B::Buf {
    let rows = input.values.chunks(input.values.len() / batch);
    let values: Vec<f32> = rows.flat_map(|x| &x[from * input.cols..to * input.cols]).copied().collect();
    b.upload(&values, batch * (to - from), input.cols).unwrap()
}

/// The batch that continues `whole` from position `from`.
fn piece_of_batch(whole: &Batch, from: usize, to: usize) -> Batch {
    let ids = whole.ids.chunks(whole.seq).flat_map(|x| &x[from..to]).copied().collect();
    Batch { batch: whole.batch, seq: to - from, past: from, ids, ..Batch::default() }
}

/// `[a so far; b]`, or b alone at the beginning.
fn append<B: Backend>(b: &B, batch: usize, so_far: Option<B::Buf>, new: B::Buf) -> B::Buf {
    match so_far {
        Some(so_far) => b.concat_rows(batch, &so_far, &new).unwrap(),
        None => new,
    }
}

fn cca_mix_with_a_halo<B: Exact>(b: &B, tolerance: f64) {
    let shapes = [(4, 2, 4, 2), (3, 1, 6, 6), (3, 3, 2, 0)];
    for (seed, (heads, kv_heads, d, rotary_dim)) in shapes.into_iter().enumerate() {
        let shape = CcaShape { num_query_heads: heads, num_kv_heads: kv_heads, head_dim: d, rotary_dim, rope_theta: 10_000.0 };
        for (seq, cuts) in CUTS {
            for batch in [1, 3] {
                let rng = &mut Rng::new(20_000 + seed as u64);
                let whole = random_batch(rng, batch, seq, 5, Rows::Plain);
                let case = Case::new(rng, shape, whole);
                let p = [0, 1, 2, 3, 4].map(|i: usize| case.p[i].upload(b));
                let run = |from: usize, to: usize, halo: Option<Halo<&B::Buf>>| {
                    let rows = b.rows(&piece_of_batch(&case.batch, from, to)).unwrap();
                    let x = [0, 1, 2, 3].map(|i: usize| piece(b, &case.x[i], batch, from, to));
                    let [q, k, v_current, v_delayed] = &x;
                    let x_in = CcaIn { q, k, v_current, v_delayed };
                    let (out, _) = b.cca_mix(&rows, shape, x_in, cca_params(&p), halo).unwrap();
                    (out, x)
                };
                let (want, _) = run(0, seq, None);

                let tail_widths = [(2, heads * d), (2, kv_heads * d), (1, kv_heads * d / 2)];
                let mut tails = tail_widths.map(|(n, cols)| b.zeros(batch * n, cols).unwrap());
                let (mut q, mut k, mut v) = (None, None, None);
                let mut from = 0;
                for to in cuts {
                    let (out, x) = run(from, *to, Some(Halo { q: &tails[0], k: &tails[1], v_delayed: &tails[2] }));
                    for (i, source) in [(0, 0), (1, 1), (2, 3)] {
                        let joined = b.concat_rows(batch, &tails[i], &x[source]).unwrap();
                        tails[i] = b.last_rows(batch, &joined, tail_widths[i].0).unwrap();
                    }
                    q = Some(append(b, batch, q, out.q));
                    k = Some(append(b, batch, k, out.k));
                    v = Some(append(b, batch, v, out.v));
                    from = *to;
                }
                for (part, got, want) in [("q", q, want.q), ("k", k, want.k), ("v", v, want.v)] {
                    let what = format!("{part} of {shape:?}, {batch} x {seq} cut at {cuts:?}");
                    assert_close(&what, &b.read(&got.unwrap()), &b.read(&want), tolerance);
                }
            }
        }
    }
}

fn attention_with_a_past<B: Exact>(b: &B, tolerance: f64) {
    for window in [None, Some(1), Some(3), Some(100)] {
        let shape = AttentionShape { num_query_heads: 4, num_kv_heads: 2, head_dim: 3, window };
        for (seq, cuts) in CUTS {
            for batch in [1, 3] {
                let rng = &mut Rng::new(21_000 + seq as u64);
                let whole = random_batch(rng, batch, seq, 5, Rows::Plain);
                let [q, k, v] = [4, 2, 2].map(|heads| Input::random(rng, batch * seq, heads * 3, 0.0, 1.0));
                let run = |from: usize, to: usize| {
                    let rows = b.rows(&piece_of_batch(&whole, from, to)).unwrap();
                    let q = piece(b, &q, batch, from, to);
                    let (k, v) = (piece(b, &k, batch, 0, to), piece(b, &v, batch, 0, to));
                    b.causal_attention(&rows, shape, Qkv { q: &q, k: &k, v: &v }).unwrap().0
                };
                let want = run(0, seq);
                let mut got = None;
                let mut from = 0;
                for to in cuts {
                    got = Some(append(b, batch, got, run(from, *to)));
                    from = *to;
                }
                let what = format!("window {window:?}, {batch} x {seq} cut at {cuts:?}");
                assert_close(&what, &b.read(&got.unwrap()), &b.read(&want), tolerance);
            }
        }
    }
}
