//! Causal attention with grouped heads, windows and document masks: blocks of queries against the keys they can see, so
//! that memory stays proportional to one block. The backward recomputes the probabilities from the saved log-sum-exp.

use rayon::prelude::*;

use super::gemm::{Target, View, matmul};
use super::math::exp;
use super::rows::Rows;
use crate::tensor::backend::{AttentionShape, Qkv};

/// Queries per block.
const BLOCK: usize = 64;

/// Log-sum-exp of each row and query head, `[T, heads]`; +infinity where a row sees no key.
pub struct Saved {
    lse: Vec<f32>,
}

#[derive(Clone, Copy)]
struct Dims {
    heads: usize,
    kv_heads: usize,
    head: usize,
    q: usize,
    k: usize,
    scale: f32,
}

impl Dims {
    fn of(s: &AttentionShape) -> Self {
        let head = s.head_dim;
        let scale = 1.0 / (head as f32).sqrt();
        Self {
            heads: s.num_query_heads,
            kv_heads: s.num_kv_heads,
            head,
            q: s.num_query_heads * head,
            k: s.num_kv_heads * head,
            scale,
        }
    }
}

/// First and one-past-last key (position in the sequence, past included) that row `t` may see, padding aside.
fn visible(rows: &Rows, shape: &AttentionShape, t: usize) -> (usize, usize) {
    let pos = rows.past + t % rows.seq;
    // A document that starts at the first row of the batch goes on from the cache.
    let doc = if rows.doc_start[t] == 0 { 0 } else { rows.past + rows.doc_start[t] as usize };
    let window = shape.window.map_or(0, |w| (pos + 1).saturating_sub(w));
    (doc.max(window), pos + 1)
}

/// Scores of one block of queries, turned into what `finish` makes of them.
struct Block {
    /// First row of the block in its sequence, and how many.
    s0: usize,
    len: usize,
    /// Keys that any row of the block sees.
    k0: usize,
    keys: usize,
}

fn block_of(rows: &Rows, shape: &AttentionShape, b: usize, s0: usize) -> Block {
    let len = BLOCK.min(rows.seq - s0);
    let range = (s0..s0 + len).map(|s| visible(rows, shape, b * rows.seq + s));
    let (k0, k1) = range.fold((usize::MAX, 0), |(lo, hi), (a, b)| (lo.min(a), hi.max(b)));
    Block { s0, len, k0, keys: k1 - k0 }
}

/// `scores[len, keys] = q kᵀ` (unscaled).
fn scores(n: Dims, block: &Block, q: &[f32], k: &[f32], out: &mut [f32]) {
    matmul(
        block.len,
        block.keys,
        n.head,
        View::rows(q, n.q),
        View::transposed(&k[block.k0 * n.k..], n.k),
        Target::rows(out, block.keys),
        false,
    );
}

/// Whether key `j` of sequence `b` is a real token. Keys from a cache are.
fn key_is_valid(rows: &Rows, b: usize, j: usize) -> bool {
    j < rows.past || rows.is_valid(b * rows.seq + j - rows.past)
}

/// Returns the heads' outputs `[T, q_dim]`.
pub fn forward(rows: &Rows, shape: AttentionShape, x: Qkv<&[f32]>) -> (Vec<f32>, Saved) {
    let n = Dims::of(&shape);
    let total = rows.past + rows.seq;
    let mut out = vec![0.0; rows.tokens() * n.q];
    let mut lse = vec![0.0; rows.tokens() * n.heads];
    let group = n.heads / n.kv_heads;
    // One task: one block of queries of one sequence, all heads; its rows of `out` and `lse` are contiguous.
    let mut tasks = Vec::new();
    {
        let (mut out_rest, mut lse_rest) = (&mut out[..], &mut lse[..]);
        for b in 0..rows.batch {
            for s0 in (0..rows.seq).step_by(BLOCK) {
                let len = BLOCK.min(rows.seq - s0);
                let (o, rest) = out_rest.split_at_mut(len * n.q);
                let (l, rest_lse) = lse_rest.split_at_mut(len * n.heads);
                (out_rest, lse_rest) = (rest, rest_lse);
                tasks.push((b, s0, o, l));
            }
        }
    }
    tasks.into_par_iter().with_max_len(1).for_each(|(b, s0, out, lse)| {
        let block = block_of(rows, &shape, b, s0);
        let (k_seq, v_seq) = (&x.k[b * total * n.k..][..total * n.k], &x.v[b * total * n.k..][..total * n.k]);
        let mut p = vec![0.0; block.len * block.keys];
        for h in 0..n.heads {
            let kv = h / group * n.head;
            let q = &x.q[(b * rows.seq + s0) * n.q + h * n.head..];
            scores(n, &block, q, &k_seq[kv..], &mut p);
            for (r, p) in p.chunks_mut(block.keys).enumerate() {
                lse[r * n.heads + h] = softmax_row(rows, &shape, n, b, &block, r, p);
            }
            let v = View::rows(&v_seq[block.k0 * n.k + kv..], n.k);
            let c = Target { data: &mut out[h * n.head..], row_stride: n.q };
            matmul(block.len, n.head, block.keys, View::rows(&p, block.keys), v, c, false);
            for r in 0..block.len {
                if lse[r * n.heads + h] == f32::INFINITY {
                    let row = &mut out[r * n.q + h * n.head..][..n.head];
                    mean_of_all(&v_seq[kv..], n, total, row);
                }
            }
        }
    });
    (out, Saved { lse })
}

/// Scores of row `r` of a block -> probabilities; returns the log-sum-exp.
fn softmax_row(rows: &Rows, shape: &AttentionShape, n: Dims, b: usize, block: &Block, r: usize, p: &mut [f32]) -> f32 {
    let (lo, hi) = visible(rows, shape, b * rows.seq + block.s0 + r);
    let (lo, hi) = (lo - block.k0, hi - block.k0);
    p[..lo].fill(0.0);
    p[hi..].fill(0.0);
    let p = &mut p[lo..hi];
    p.iter_mut().for_each(|v| *v *= n.scale);
    if !rows.valid.is_empty() {
        for (j, v) in p.iter_mut().enumerate() {
            if !key_is_valid(rows, b, block.k0 + lo + j) {
                *v = f32::NEG_INFINITY;
            }
        }
    }
    let max = p.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if max == f32::NEG_INFINITY {
        p.fill(0.0);
        return f32::INFINITY;
    }
    p.iter_mut().for_each(|v| *v = exp(*v - max));
    let sum = super::math::lane_sum(p.len(), |i| p[i]);
    let inv = 1.0 / sum;
    p.iter_mut().for_each(|v| *v *= inv);
    max + sum.ln()
}

/// What a row without any visible key gets: the mean of all values of its sequence.
fn mean_of_all(v: &[f32], n: Dims, total: usize, out: &mut [f32]) {
    out.fill(0.0);
    for j in 0..total {
        super::elementwise::add(out, &v[j * n.k..][..n.head]);
    }
    out.iter_mut().for_each(|o| *o /= total as f32);
}

/// Gradients of one row and head that see no key: every key of the sequence weighs the same. The scores have a gradient all
/// the same, as in Hugging Face's code, which hides keys by adding a huge negative number. `k` and `v` start at their head's
/// first channel; `dq` is the row's, `dk` and `dv` are the head's alone.
#[allow(clippy::too_many_arguments)]
fn blind_row_backward(n: Dims, q: &[f32], k: &[f32], v: &[f32], d_out: &[f32], dq: &mut [f32], dk: &mut [f32], dv: &mut [f32]) {
    let keys = dk.len() / n.head;
    let weight = 1.0 / keys as f32;
    let mut ds: Vec<f32> = v.chunks(n.k).take(keys).map(|v| super::math::lane_sum(n.head, |i| d_out[i] * v[i])).collect();
    let mean = weight * super::math::lane_sum(keys, |j| ds[j]);
    ds.iter_mut().for_each(|ds| *ds = weight * (*ds - mean) * n.scale);
    for (j, ds) in ds.iter().enumerate() {
        let (k, dk, dv) = (&k[j * n.k..], &mut dk[j * n.head..], &mut dv[j * n.head..]);
        for i in 0..n.head {
            dq[i] += ds * k[i];
            dk[i] += ds * q[i];
            dv[i] += weight * d_out[i];
        }
    }
}

/// Gradients of q, k, v, for `past` = 0.
pub fn backward(rows: &Rows, shape: AttentionShape, x: Qkv<&[f32]>, saved: &Saved, d_out: &[f32]) -> Qkv<Vec<f32>> {
    let n = Dims::of(&shape);
    let (seq, group) = (rows.seq, n.heads / n.kv_heads);
    // One task: one key/value head of one sequence, so that sums over its queries have one owner and one order.
    let tasks: Vec<(usize, usize)> = (0..rows.batch).flat_map(|b| (0..n.kv_heads).map(move |g| (b, g))).collect();
    let parts: Vec<Qkv<Vec<f32>>> = tasks
        .par_iter()
        .with_max_len(1)
        .map(|(b, g)| {
            let mut dq = vec![0.0; seq * group * n.head];
            let mut dk = vec![0.0; seq * n.head];
            let mut dv = vec![0.0; seq * n.head];
            let k_head = &x.k[b * seq * n.k + g * n.head..];
            let v_head = &x.v[b * seq * n.k + g * n.head..];
            for s0 in (0..seq).step_by(BLOCK) {
                let block = block_of(rows, &shape, *b, s0);
                let mut p = vec![0.0; block.len * block.keys];
                let mut ds = vec![0.0; block.len * block.keys];
                for a in 0..group {
                    let h = g * group + a;
                    let at = (b * seq + s0) * n.q + h * n.head;
                    scores(n, &block, &x.q[at..], k_head, &mut p);
                    // dP = dO Vᵀ
                    let v = View::transposed(&v_head[block.k0 * n.k..], n.k);
                    let target = Target::rows(&mut ds, block.keys);
                    matmul(block.len, block.keys, n.head, View::rows(&d_out[at..], n.q), v, target, false);
                    for (r, (p, ds)) in p.chunks_mut(block.keys).zip(ds.chunks_mut(block.keys)).enumerate() {
                        let t = b * seq + s0 + r;
                        row_backward(rows, &shape, n, *b, &block, t, saved.lse[t * n.heads + h], p, ds);
                    }
                    let q = View::rows(&x.q[at..], n.q);
                    let d_o = View::rows(&d_out[at..], n.q);
                    let keys = block.k0 * n.head..(block.k0 + block.keys) * n.head;
                    // dV += Pᵀ dO, dK += dSᵀ Q, dQ = dS K
                    let t = Target::rows(&mut dv[keys.clone()], n.head);
                    matmul(block.keys, n.head, block.len, View::transposed(&p, block.keys), d_o, t, true);
                    let t = Target::rows(&mut dk[keys], n.head);
                    matmul(block.keys, n.head, block.len, View::transposed(&ds, block.keys), q, t, true);
                    let k = View::rows(&k_head[block.k0 * n.k..], n.k);
                    let t = Target { data: &mut dq[s0 * group * n.head + a * n.head..], row_stride: group * n.head };
                    matmul(block.len, n.head, block.keys, View::rows(&ds, block.keys), k, t, false);
                    for r in 0..block.len {
                        if saved.lse[(b * seq + s0 + r) * n.heads + h] == f32::INFINITY {
                            let (q, d_out) = (&x.q[at + r * n.q..], &d_out[at + r * n.q..]);
                            let dq = &mut dq[(s0 + r) * group * n.head + a * n.head..];
                            blind_row_backward(n, q, k_head, v_head, d_out, dq, &mut dk, &mut dv);
                        }
                    }
                }
            }
            Qkv { q: dq, k: dk, v: dv }
        })
        .collect();
    let mut d = Qkv { q: vec![0.0; x.q.len()], k: vec![0.0; x.k.len()], v: vec![0.0; x.v.len()] };
    let scatter = |to: &mut [f32], width: usize, part: fn(&Qkv<Vec<f32>>) -> &Vec<f32>, each: usize| {
        to.par_chunks_mut(width * seq).enumerate().for_each(|(b, to)| {
            for g in 0..n.kv_heads {
                let from = part(&parts[b * n.kv_heads + g]);
                for (to, from) in to.chunks_mut(width).zip(from.chunks(each)) {
                    to[g * each..(g + 1) * each].copy_from_slice(from);
                }
            }
        });
    };
    scatter(&mut d.q, n.q, |p| &p.q, group * n.head);
    scatter(&mut d.k, n.k, |p| &p.k, n.head);
    scatter(&mut d.v, n.k, |p| &p.v, n.head);
    d
}

/// Row of scores -> probabilities P; row of dP -> dS = P (dP - sum of P dP) scale. Hidden keys get 0.
#[allow(clippy::too_many_arguments)]
fn row_backward(
    rows: &Rows,
    shape: &AttentionShape,
    n: Dims,
    b: usize,
    block: &Block,
    t: usize,
    lse: f32,
    p: &mut [f32],
    ds: &mut [f32],
) {
    let (lo, hi) = visible(rows, shape, t);
    let (lo, hi) = (lo - block.k0, hi - block.k0);
    for x in [&mut p[..lo], &mut ds[..lo]] {
        x.fill(0.0);
    }
    for x in [&mut p[hi..], &mut ds[hi..]] {
        x.fill(0.0);
    }
    let (p, ds) = (&mut p[lo..hi], &mut ds[lo..hi]);
    p.iter_mut().for_each(|p| *p = exp(*p * n.scale - lse));
    if !rows.valid.is_empty() {
        for (j, p) in p.iter_mut().enumerate() {
            if !key_is_valid(rows, b, block.k0 + lo + j) {
                *p = 0.0;
            }
        }
    }
    // Summed over the keys, not taken from the output: then a row with a single key has a gradient of exactly zero.
    let delta = super::math::lane_sum(p.len(), |j| p[j] * ds[j]);
    ds.iter_mut().zip(p).for_each(|(ds, p)| *ds = *p * (*ds - delta) * n.scale);
}
