mod chunks;
mod tree;

use super::super::packed::Format;
use super::super::test_support::all_cores;
use super::*;
use crate::tensor::backend::Qkv;

/// Numbers that look random, from -1 to 1.
fn numbers(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..n)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        })
        .collect()
}

struct Case {
    rows: Rows,
    shape: AttentionShape,
    x: Qkv<Vec<f32>>,
    d_out: Vec<f32>,
}

impl Case {
    fn new(batch: usize, seq: usize, heads: usize, kv_heads: usize, head: usize) -> Self {
        Self::with_past(batch, seq, heads, kv_heads, head, 0)
    }

    fn with_past(batch: usize, seq: usize, heads: usize, kv_heads: usize, head: usize, past: usize) -> Self {
        let tokens = batch * seq;
        let keys = batch * (past + seq) * kv_heads * head;
        // Large enough that the softmax is far from even.
        let scaled = |n, seed| numbers(n, seed).iter().map(|x| x * 3.0).collect();
        Self {
            rows: Rows {
                batch,
                seq,
                past,
                ids: vec![],
                labels: vec![],
                valid: vec![],
                doc_start: vec![0; tokens],
                chunks: None,
                tree: None,
            },
            shape: AttentionShape { num_query_heads: heads, num_kv_heads: kv_heads, head_dim: head, window: None },
            x: Qkv { q: scaled(tokens * heads * head, 1), k: scaled(keys, 2), v: numbers(keys, 3) },
            d_out: numbers(tokens * heads * head, 4),
        }
    }

    fn window(mut self, window: usize) -> Self {
        self.shape.window = Some(window);
        self
    }

    /// Documents of the given length, shifted in each sequence.
    fn documents(mut self, len: usize) -> Self {
        for t in 0..self.rows.tokens() {
            let (b, s) = (t / self.rows.seq, t % self.rows.seq);
            self.rows.doc_start[t] = ((s + b) / len * len).saturating_sub(b) as u32;
        }
        self
    }

    /// Padding before sequence 0, after sequence 1, and here and there in the others.
    fn padding(mut self, count: usize) -> Self {
        let seq = self.rows.seq;
        let valid = |b, s| match b {
            0 => s >= count,
            1 => s + count < seq,
            _ => (s * 7 + b) % 5 != 0,
        };
        self.rows.valid = (0..self.rows.tokens()).map(|t| valid(t / seq, t % seq)).collect();
        self
    }

    fn keys(&self) -> usize {
        self.rows.past + self.rows.seq
    }

    fn sees(&self, t: usize, key: usize) -> bool {
        let (first, end) = visible(&self.rows, &self.shape, t);
        let row = t / self.rows.seq * self.rows.seq + key.saturating_sub(self.rows.past);
        (first..end).contains(&key) && (key < self.rows.past || self.rows.is_valid(row))
    }

    fn forward(&self, core: &Core) -> (Vec<f32>, Vec<f32>) {
        // Scratch is handed in dirty.
        let mut scratch = vec![f32::NAN; forward_scratch(core, &self.rows, self.shape)];
        let (mut out, mut lse) =
            (vec![f32::NAN; self.x.q.len()], vec![f32::NAN; self.rows.tokens() * self.shape.num_query_heads]);
        forward(core, &self.rows, self.shape, slices(&self.x), &mut out, &mut lse, &mut scratch);
        (out, lse)
    }

    fn backward(&self, core: &Core, out: &[f32], lse: &[f32]) -> Qkv<Vec<f32>> {
        let mut scratch = vec![f32::NAN; backward_scratch(core, &self.rows, self.shape)];
        let nan = |x: &Vec<f32>| vec![f32::NAN; x.len()];
        let mut d = Qkv { q: nan(&self.x.q), k: nan(&self.x.k), v: nan(&self.x.v) };
        let to = Qkv { q: &mut d.q[..], k: &mut d.k[..], v: &mut d.v[..] };
        backward(core, &self.rows, self.shape, slices(&self.x), out, lse, &self.d_out, to, &mut scratch);
        d
    }

    /// out, log-sum-exp and the gradients of q, k, v in f64, row by row.
    fn plain(&self) -> (Vec<f64>, Vec<f64>, Qkv<Vec<f64>>) {
        let (s, keys) = (&self.shape, self.keys());
        let (heads, kv_heads, head) = (s.num_query_heads, s.num_kv_heads, s.head_dim);
        let scale = 1.0 / (head as f64).sqrt();
        let (mut out, mut lse) = (vec![0.0; self.x.q.len()], vec![]);
        let mut d = Qkv { q: vec![0.0; self.x.q.len()], k: vec![0.0; self.x.k.len()], v: vec![0.0; self.x.v.len()] };
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| *a as f64 * *b as f64).sum::<f64>();
        for t in 0..self.rows.tokens() {
            for h in 0..heads {
                let q_at = (t * heads + h) * head;
                let key_at = |j| ((t / self.rows.seq * keys + j) * kv_heads + h / (heads / kv_heads)) * head;
                let q = &self.x.q[q_at..q_at + head];
                let score = |j| dot(q, &self.x.k[key_at(j)..][..head]) * scale;
                let seen: Vec<usize> = (0..keys).filter(|j| self.sees(t, *j)).collect();
                let max = seen.iter().map(|j| score(*j)).fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = seen.iter().map(|j| (score(*j) - max).exp()).sum();
                lse.push(if seen.is_empty() { f64::INFINITY } else { max + sum.ln() });
                let p: Vec<(usize, f64)> = if seen.is_empty() {
                    (0..keys).map(|j| (j, 1.0 / keys as f64)).collect()
                } else {
                    seen.iter().map(|j| (*j, (score(*j) - max).exp() / sum)).collect()
                };
                let d_out = &self.d_out[q_at..q_at + head];
                let mean: f64 = p.iter().map(|(j, p)| p * dot(d_out, &self.x.v[key_at(*j)..][..head])).sum();
                for (j, p) in p {
                    let at = key_at(j);
                    let ds = p * (dot(d_out, &self.x.v[at..at + head]) - mean) * scale;
                    for i in 0..head {
                        out[q_at + i] += p * self.x.v[at + i] as f64;
                        d.q[q_at + i] += ds * self.x.k[at + i] as f64;
                        d.k[at + i] += ds * q[i] as f64;
                        d.v[at + i] += p * d_out[i] as f64;
                    }
                }
            }
        }
        (out, lse, d)
    }
}

fn slices(x: &Qkv<Vec<f32>>) -> Qkv<&[f32]> {
    Qkv { q: &x.q, k: &x.k, v: &x.v }
}

/// |a - b| / |b|.
fn distance(a: &[f32], b: &[f64]) -> f64 {
    let square = |x: f64| x * x;
    let norm = b.iter().map(|b| square(*b)).sum::<f64>().sqrt();
    a.iter().zip(b).map(|(a, b)| square(*a as f64 - b)).sum::<f64>().sqrt() / norm.max(1e-30)
}

fn cases() -> Vec<(&'static str, Case)> {
    let mut cases = vec![
        ("one token", Case::new(2, 1, 2, 1, 8)),
        ("seven", Case::new(3, 7, 2, 2, 12)),
        ("odd head", Case::new(2, 65, 3, 1, 37)),
        ("wide head", Case::new(1, 70, 2, 1, 256)),
        ("many heads", Case::new(1, 65, 12, 2, 16)),
        ("several segments", Case::new(1, 450, 2, 1, 24)),
        ("window of one", Case::new(2, 100, 2, 2, 16).window(1)),
        ("window", Case::new(2, 300, 4, 2, 20).window(37)),
        ("window over segments", Case::new(1, 700, 2, 2, 8).window(210)),
        ("documents", Case::new(3, 300, 2, 1, 16).documents(45)),
        ("documents of one", Case::new(2, 40, 2, 1, 16).documents(1)),
        ("padding", Case::new(4, 300, 3, 1, 17).padding(100)),
        ("much padding", Case::new(3, 420, 2, 2, 8).padding(415)),
        ("everything", Case::new(3, 300, 6, 2, 32).padding(55).documents(70).window(50)),
    ];
    for (name, case) in [("no key at all", Case::new(1, 30, 2, 1, 8)), ("nor here", Case::new(2, 1, 2, 1, 8))] {
        let mut case = case;
        case.rows.valid = vec![false; case.rows.tokens()];
        cases.push((name, case));
    }
    cases
}

fn cores(format: Format) -> Vec<Core> {
    all_cores().into_iter().filter(|core| core.format == format).collect()
}

#[test]
fn agrees_with_the_plain_sum() {
    for (name, case) in cases() {
        let (out, lse, d) = case.plain();
        for core in cores(Format::F32) {
            let (got, got_lse) = case.forward(&core);
            let error = distance(&got, &out);
            assert!(error < 1e-6, "{name}: out is off by {error}");
            for (got, lse) in got_lse.iter().zip(&lse) {
                let close = (*got as f64 - lse).abs() < 1e-6 * (1.0 + lse.abs());
                assert!(close || *got as f64 == *lse, "{name}: log-sum-exp {got}, not {lse}");
            }
            let grads = case.backward(&core, &got, &got_lse);
            for (which, got, d) in [("q", &grads.q, &d.q), ("k", &grads.k, &d.k), ("v", &grads.v, &d.v)] {
                if d.iter().all(|d| d.abs() < 1e-12) {
                    assert!(got.iter().all(|x| x.abs() < 1e-6), "{name}: d{which} is not zero");
                } else {
                    let error = distance(got, d);
                    assert!(error < 2e-6, "{name}: d{which} is off by {error}");
                }
            }
        }
    }
}

#[test]
fn a_row_with_one_key_has_no_gradient_through_its_score() {
    for case in [Case::new(2, 50, 2, 1, 16).window(1), Case::new(2, 50, 2, 1, 16).documents(1)] {
        for core in cores(Format::F32) {
            let (out, lse) = case.forward(&core);
            let d = case.backward(&core, &out, &lse);
            assert!(d.q.iter().chain(&d.k).all(|x| *x == 0.0));
        }
    }
}

#[test]
fn products_of_bfloat16_are_close() {
    for (name, case) in cases() {
        let (out, _, d) = case.plain();
        for core in cores(Format::RoundedF32).into_iter().chain(cores(Format::Bf16)) {
            let (got, lse) = case.forward(&core);
            assert!(distance(&got, &out) < 1e-2, "{name}: {}", distance(&got, &out));
            let grads = case.backward(&core, &got, &lse);
            for (which, got, d) in [("q", &grads.q, &d.q), ("k", &grads.k, &d.k), ("v", &grads.v, &d.v)] {
                let error = distance(got, d);
                let zero = d.iter().all(|d| d.abs() < 1e-12) && got.iter().all(|x| x.abs() < 1e-2);
                assert!(error < 3e-2 || zero, "{name}: d{which} is off by {error}");
            }
        }
    }
}

#[test]
fn a_cache_changes_nothing() {
    for (seq, past) in [(1, 200), (5, 33), (100, 129)] {
        for core in all_cores() {
            let case = Case::with_past(2, seq, 4, 2, 24, past);
            let (out, lse, _) = case.plain();
            let (got, got_lse) = case.forward(&core);
            let most = if core.format == Format::F32 { 1e-6 } else { 1e-2 };
            assert!(
                distance(&got, &out) < most && distance(&got_lse, &lse) < most,
                "{seq} after {past}: {}",
                distance(&got, &out)
            );
            let windowed = Case::with_past(2, seq, 4, 2, 24, past).window(20);
            assert!(distance(&windowed.forward(&core).0, &windowed.plain().0) < most);
        }
    }
}

#[test]
fn bits_do_not_depend_on_the_threads() {
    let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<u32>>();
    for core in all_cores() {
        for (name, case) in cases() {
            let mut first = None;
            for threads in [1, 2, 3, 5] {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                let all = pool.install(|| {
                    let (out, lse) = case.forward(&core);
                    let d = case.backward(&core, &out, &lse);
                    [&out, &lse, &d.q, &d.k, &d.v].map(|x| bits(x))
                });
                assert!(first.get_or_insert_with(|| all.clone()) == &all, "{name}: {threads} threads differ");
            }
        }
    }
}
