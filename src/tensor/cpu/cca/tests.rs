//! Chunks of sequences against whole sequences.

use super::super::Cpu;
use super::super::arena::ArenaUse;
use super::super::test_support::{Part, Split, gather, on, relative, scatter, series};
use super::*;
use crate::tensor::backend::{Backend, Batch, CcaParams, Chunks, Precision, Qkv};

const SHAPE: CcaShape = CcaShape { num_query_heads: 4, num_kv_heads: 2, head_dim: 8, rotary_dim: 4, rope_theta: 10_000.0 };
const Q: usize = 32;
const K: usize = 16;
const C: usize = Q + K;
/// Widths of the projections, of the outputs, of the halo.
const IN: [usize; 4] = [Q, K, K / 2, K / 2];
const OUT: [usize; 3] = [Q, K, K];
const PARAMS: [(usize, usize); 5] = [(C, 2), (1, C), (C, 16), (1, C), (1, 2)];

/// Inputs of some rows, in the order of `IN`, and gradients of the outputs.
struct Numbers {
    x: Vec<Vec<f32>>,
    d: Vec<Vec<f32>>,
}

impl Numbers {
    /// Padding rows are zero, as the model makes them.
    fn new(batch: &Batch) -> Self {
        let of = |widths: &[usize], seed: u32| {
            let one = |(i, width): (usize, &usize)| series(batch.tokens() * width, seed + i as u32);
            widths.iter().enumerate().map(one).collect::<Vec<_>>()
        };
        let (mut x, d) = (of(&IN, 1), of(&OUT, 7));
        for (x, width) in x.iter_mut().zip(IN) {
            for (row, _) in x.chunks_mut(width).zip(&batch.valid).filter(|(_, valid)| !**valid) {
                row.fill(0.0);
            }
        }
        Self { x, d }
    }

    fn part(&self, part: &Part) -> Self {
        let of = |x: &[Vec<f32>], widths: &[usize]| x.iter().zip(widths).map(|(x, w)| gather(x, &part.rows, *w)).collect();
        Self { x: of(&self.x, &IN), d: of(&self.d, &OUT) }
    }

    /// The rows before each chunk, whatever document they belong to; zeros before a sequence.
    fn halo(&self, whole: &Batch, part: &Part) -> Vec<Vec<f32>> {
        let before = |x: &[f32], width: usize, count: usize| {
            let mut halo = vec![];
            for first in part.rows.iter().step_by(part.batch.seq) {
                for back in (1..=count).rev() {
                    let inside = first % whole.seq >= back;
                    halo.extend((0..width).map(|i| if inside { x[(first - back) * width + i] } else { 0.0 }));
                }
            }
            halo
        };
        vec![before(&self.x[0], Q, 2), before(&self.x[1], K, 2), before(&self.x[3], K / 2, 1)]
    }
}

/// Where the gradients of a halo belong: `back` rows before the first row of each chunk.
fn add_halo(d: &[f32], part: &Part, whole: &Batch, width: usize, count: usize, to: &mut [f32]) {
    for (i, d) in d.chunks_exact(width).enumerate() {
        let (first, back) = (part.rows[i / count * part.batch.seq], count - i % count);
        if first % whole.seq >= back {
            scatter(d, &[first - back], width, to);
        } else {
            assert!(d.iter().all(|d| *d == 0.0), "a gradient of nothing");
        }
    }
}

/// Outputs; gradients of the inputs, of the halo (if any) and of the parameters.
struct Results {
    out: Vec<Vec<f32>>,
    dx: Vec<Vec<f32>>,
    d_halo: Vec<Vec<f32>>,
    d_params: Vec<Vec<f32>>,
    used: ArenaUse,
}

fn run(cpu: &Cpu, shape: CcaShape, batch: &Batch, numbers: &Numbers, halo: Option<&[Vec<f32>]>) -> Results {
    let rows = cpu.rows(batch).unwrap();
    let up = |x: &Vec<f32>, width: usize| cpu.upload(x, x.len() / width, width).unwrap();
    let down = |b: &Buf| cpu.download(b).unwrap();
    let x: Vec<Buf> = numbers.x.iter().zip(IN).map(|(x, width)| up(x, width)).collect();
    let x = CcaIn { q: &x[0], k: &x[1], v_current: &x[2], v_delayed: &x[3] };
    let params: Vec<Buf> =
        PARAMS.iter().zip(20..).map(|((r, c), seed)| cpu.upload(&series(r * c, seed), *r, *c).unwrap()).collect();
    let p = CcaParams {
        conv0_weight: &params[0],
        conv0_bias: &params[1],
        conv1_weight: &params[2],
        conv1_bias: &params[3],
        temp: &params[4],
    };
    let halo: Option<Vec<Buf>> = halo.map(|h| h.iter().zip([Q, K, K / 2]).map(|(x, width)| up(x, width)).collect());
    let halo = halo.as_ref().map(|h| Halo { q: &h[0], k: &h[1], v_delayed: &h[2] });
    let (out, saved) = cpu.cca_mix(&rows, shape, x, p, halo).unwrap();

    let d: Vec<Buf> = numbers.d.iter().zip(OUT).map(|(x, width)| up(x, width)).collect();
    let d = Qkv { q: &d[0], k: &d[1], v: &d[2] };
    let mut grads = PARAMS.map(|(r, c)| cpu.zeros(r, c).unwrap());
    let [conv0_weight, conv0_bias, conv1_weight, conv1_bias, temp] = &mut grads;
    let g = CcaParams { conv0_weight, conv0_bias, conv1_weight, conv1_bias, temp };
    let (dx, d_halo) = cpu.cca_mix_backward(&rows, shape, x, p, halo, &saved, d, g).unwrap();
    assert_eq!(d_halo.is_some(), halo.is_some());
    Results {
        out: [&out.q, &out.k, &out.v].map(down).to_vec(),
        dx: [&dx.q, &dx.k, &dx.v_current, &dx.v_delayed].map(down).to_vec(),
        d_halo: d_halo.map_or(vec![], |h| [&h.q, &h.k, &h.v_delayed].map(down).to_vec()),
        d_params: grads.iter().map(down).collect(),
        used: cpu.arena_use(),
    }
}

/// Memory that verbs get holds NaN.
fn dirty(precision: Precision) -> Cpu {
    let cpu = Cpu::new(precision);
    cpu.block::<f32>(1 << 21).unwrap().fill(f32::NAN);
    cpu
}

fn ranks_agree_with_the_whole(precision: Precision, split: Split, documents: bool, padding: bool, tolerance: f64) {
    let cpu = dirty(precision);
    let whole = split.whole(documents, padding);
    let numbers = Numbers::new(&whole);
    let want = run(&cpu, SHAPE, &whole, &numbers, None);
    let mut dx: Vec<Vec<f32>> = want.dx.iter().map(|x| vec![0.0; x.len()]).collect();
    let mut d_params: Vec<Vec<f32>> = want.d_params.iter().map(|x| vec![0.0; x.len()]).collect();
    let what = format!("{split:?}, documents {documents}, padding {padding}");
    for part in split.parts(&whole) {
        let own = numbers.part(&part);
        let got = run(&cpu, SHAPE, &part.batch, &own, Some(&numbers.halo(&whole, &part)));
        for ((got, want), width) in got.out.iter().zip(&want.out).zip(OUT) {
            let want = gather(want, &part.rows, width);
            assert!(got.iter().zip(&want).all(|(a, b)| a.to_bits() == b.to_bits()), "{what}: outputs differ");
        }
        for ((got, dx), width) in got.dx.iter().zip(&mut dx).zip(IN) {
            scatter(got, &part.rows, width, dx);
        }
        for (got, (to, width, count)) in got.d_halo.iter().zip([(0, Q, 2), (1, K, 2), (3, K / 2, 1)]) {
            add_halo(got, &part, &whole, width, count, &mut dx[to]);
        }
        for (got, sum) in got.d_params.iter().zip(&mut d_params) {
            sum.iter_mut().zip(got).for_each(|(sum, got)| *sum += got);
        }
    }
    for (i, (got, want)) in dx.iter().zip(&want.dx).chain(d_params.iter().zip(&want.d_params)).enumerate() {
        let error = relative(got, want);
        assert!(error <= tolerance, "{what}: gradient {i} is off by {error}");
    }
}

#[test]
fn chunks_give_what_whole_sequences_give() {
    for split in Split::all(&[2, 3, 23]) {
        for (documents, padding) in [(false, false), (true, false), (false, true), (true, true)] {
            ranks_agree_with_the_whole(Precision::F32, split, documents, padding, 2e-6);
        }
    }
}

#[test]
fn blocks_of_rows_end_anywhere_in_a_chunk() {
    // More rows than a task takes.
    ranks_agree_with_the_whole(Precision::F32, Split { ranks: 2, zigzag: true, len: 70 }, true, true, 2e-6);
}

#[test]
fn chunks_in_bfloat16() {
    ranks_agree_with_the_whole(Precision::Bf16, Split { ranks: 2, zigzag: true, len: 23 }, true, true, 1e-3);
}

#[test]
fn a_plan_of_chunks_is_what_they_use() {
    let split = Split { ranks: 2, zigzag: true, len: 23 };
    let whole = split.whole(true, true);
    let part = &split.parts(&whole)[1];
    let numbers = Numbers::new(&whole);
    let (own, halo) = (numbers.part(part), numbers.halo(&whole, part));
    let peak = |cpu: Cpu| run(&cpu, SHAPE, &part.batch, &own, Some(&halo)).used.peak;
    let planned = peak(Cpu::planning(Precision::F32, Precision::F32));
    assert_eq!(planned, peak(Cpu::new(Precision::F32)));
}

#[test]
fn a_rank_may_have_no_chunks() {
    let chunks = Some(Chunks { per_sequence: 2, keys: 64, ..Chunks::default() });
    let batch = Batch { batch: 0, seq: 16, chunks, ..Batch::default() };
    let numbers = Numbers::new(&batch);
    let got = run(&dirty(Precision::F32), SHAPE, &batch, &numbers, Some(&[vec![], vec![], vec![]]));
    assert!(got.dx.iter().all(|x| x.is_empty()) && got.d_params.iter().flatten().all(|d| *d == 0.0));
}

/// Without chunks, both rows of a halo are history. Where RoPE does not tell positions apart, that is what a chunk in the middle of
/// a document has.
#[test]
fn a_halo_of_whole_sequences_has_gradients() {
    let cpu = dirty(Precision::F32);
    let shape = CcaShape { rotary_dim: 0, ..SHAPE };
    let whole = Batch { batch: 1, seq: 9, ids: vec![0; 9], ..Batch::default() };
    let part = Part { batch: Batch { batch: 1, seq: 5, ids: vec![0; 5], ..Batch::default() }, rows: (4..9).collect() };
    let numbers = Numbers::new(&whole);
    let (own, halo) = (numbers.part(&part), numbers.halo(&whole, &part));
    let got = run(&cpu, shape, &part.batch, &own, Some(&halo));
    let chunks = Some(Chunks { start: vec![4], per_sequence: 1, keys: 9, ..Chunks::default() });
    let chunk = run(&cpu, shape, &Batch { chunks, ..part.batch }, &own, Some(&halo));
    assert!(got.out == chunk.out && got.dx == chunk.dx && got.d_halo == chunk.d_halo && got.d_params == chunk.d_params);
    assert!(got.d_halo.iter().flatten().all(|d| *d != 0.0));
}

#[test]
fn threads_do_not_change_a_bit() {
    let split = Split { ranks: 2, zigzag: true, len: 70 };
    let whole = split.whole(true, true);
    let (part, numbers) = (&split.parts(&whole)[1], Numbers::new(&whole));
    let (own, halo) = (numbers.part(part), numbers.halo(&whole, part));
    let bits = |threads| {
        let got = on(threads, || run(&dirty(Precision::F32), SHAPE, &part.batch, &own, Some(&halo)));
        let all = got.out.iter().chain(&got.dx).chain(&got.d_halo).chain(&got.d_params).flatten();
        all.map(|x| x.to_bits()).collect::<Vec<u32>>()
    };
    let one = bits(1);
    assert!([2, 3, 5].into_iter().all(|threads| bits(threads) == one));
}
