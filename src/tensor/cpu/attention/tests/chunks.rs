//! Chunks of sequences against whole sequences.

use super::super::super::Cpu;
use super::super::super::test_support::{Split, gather, on, relative, scatter};
use super::*;
use crate::tensor::backend::{Backend, Batch, Chunks, Precision};

impl Case {
    /// As `new`, of a batch with chunks of sequences or whole ones.
    fn of(batch: &Batch, heads: usize, kv_heads: usize, head: usize) -> Self {
        let mut case = Self::new(batch.batch, batch.seq, heads, kv_heads, head);
        case.rows = Rows::new(batch).unwrap();
        case
    }
}

/// Whether row `t` lies in a panel that begins before its chunk, among rows of another document: their keys are not known here, so
/// the panel's tiles may begin elsewhere.
fn is_cut_off(rows: &Rows, n: &Dims, nr: usize, t: usize) -> bool {
    let first = t / rows.seq * rows.seq;
    let column = rows.position(first) * n.group;
    let straddles = rows.position(t) * n.group < column.next_multiple_of(nr);
    straddles && (rows.doc_start[first] as usize) > column / nr * nr / n.group
}

struct Tolerance {
    gradient: f64,
    cut_off: f64,
}

fn ranks_agree_with_the_whole(core: &Core, split: Split, case: Case, whole: &Batch, tolerance: Tolerance) {
    let s = case.shape;
    let (q, kv) = (s.num_query_heads * s.head_dim, s.num_kv_heads * s.head_dim);
    let what = format!("{split:?}, {s:?}, {} documents, {} padding", whole.doc_start.len(), whole.valid.len());
    let (out, lse) = case.forward(core);
    let want = case.backward(core, &out, &lse);
    let mut sum = Qkv { q: vec![0.0; want.q.len()], k: vec![0.0; want.k.len()], v: vec![0.0; want.v.len()] };
    for part in split.parts(whole) {
        let own = Case {
            rows: Rows::new(&part.batch).unwrap(),
            shape: s,
            x: Qkv { q: gather(&case.x.q, &part.rows, q), k: case.x.k.clone(), v: case.x.v.clone() },
            d_out: gather(&case.d_out, &part.rows, q),
        };
        let n = Dims::new(&own.rows, &s);
        let (got, got_lse) = own.forward(core);
        for (i, t) in part.rows.iter().enumerate() {
            let heads = s.num_query_heads;
            let pairs = [(&got[i * q..][..q], &out[t * q..][..q]), (&got_lse[i * heads..][..heads], &lse[t * heads..][..heads])];
            for (a, b) in pairs {
                if is_cut_off(&own.rows, &n, core.nr, i) {
                    let error = if a == b { 0.0 } else { relative(a, b) };
                    assert!(error <= tolerance.cut_off, "{what}: row {t} is off by {error}");
                } else {
                    assert!(a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits()), "{what}: row {t} differs");
                }
            }
        }
        let d = own.backward(core, &got, &got_lse);
        scatter(&d.q, &part.rows, q, &mut sum.q);
        let all: Vec<usize> = (0..whole.tokens()).collect();
        scatter(&d.k, &all, kv, &mut sum.k);
        scatter(&d.v, &all, kv, &mut sum.v);
    }
    for (which, got, want) in [("q", &sum.q, &want.q), ("k", &sum.k, &want.k), ("v", &sum.v, &want.v)] {
        let error = relative(got, want);
        assert!(error <= tolerance.gradient, "{what}: d{which} is off by {error}");
    }
}

const EXACT: Tolerance = Tolerance { gradient: 2e-6, cut_off: 1e-6 };
const ROUNDED: Tolerance = Tolerance { gradient: 1e-2, cut_off: 1e-2 };

/// Windows, documents and padding, alone and together.
fn every_kind(core: &Core, split: Split, [heads, kv_heads, head]: [usize; 3], tolerance: fn() -> Tolerance) {
    for (window, documents, padding) in [
        (None, false, false),
        (Some(7), false, false),
        (Some(40), true, false),
        (None, true, false),
        (None, false, true),
        (Some(11), true, true),
    ] {
        let whole = split.whole(documents, padding);
        let mut case = Case::of(&whole, heads, kv_heads, head);
        case.shape.window = window;
        ranks_agree_with_the_whole(core, split, case, &whole, tolerance());
    }
}

#[test]
fn chunks_give_what_whole_sequences_give() {
    for core in cores(Format::F32) {
        for split in Split::all(&[2, 3, 23]) {
            every_kind(&core, split, [4, 2, 8], || EXACT);
        }
        every_kind(&core, Split { ranks: 2, zigzag: true, len: 23 }, [3, 1, 5], || EXACT);
    }
}

#[test]
fn chunks_have_several_blocks_and_segments() {
    for core in cores(Format::F32) {
        every_kind(&core, Split { ranks: 2, zigzag: true, len: 150 }, [2, 1, 8], || EXACT);
        every_kind(&core, Split { ranks: 2, zigzag: false, len: 430 }, [2, 2, 8], || EXACT);
    }
}

#[test]
fn chunks_in_bfloat16() {
    for core in cores(Format::RoundedF32).into_iter().chain(cores(Format::Bf16)) {
        every_kind(&core, Split { ranks: 2, zigzag: true, len: 23 }, [4, 2, 8], || ROUNDED);
    }
}

/// As without chunks: what a single key's score would get is rounding.
#[test]
fn a_row_with_one_key_has_no_gradient_through_its_score() {
    for padding in [false, true] {
        let split = Split { ranks: 2, zigzag: true, len: 23 };
        let mut whole = split.whole(false, false);
        if padding {
            whole.valid = (0..whole.tokens()).map(|t| (t % whole.seq).is_multiple_of(2)).collect();
        }
        for part in split.parts(&whole) {
            let mut case = Case::of(&whole, 2, 1, 16).window(if padding { 2 } else { 1 });
            case.rows = Rows::new(&part.batch).unwrap();
            (case.x.q, case.d_out) = (gather(&case.x.q, &part.rows, 32), gather(&case.d_out, &part.rows, 32));
            for core in cores(Format::F32) {
                let (out, lse) = case.forward(&core);
                let d = case.backward(&core, &out, &lse);
                assert!(d.q.iter().chain(&d.k).all(|x| *x == 0.0));
            }
        }
    }
}

#[test]
fn threads_do_not_change_a_bit() {
    let split = Split { ranks: 2, zigzag: true, len: 150 };
    let whole = split.whole(true, true);
    let part = &split.parts(&whole)[1];
    let mut case = Case::of(&whole, 4, 2, 8);
    case.rows = Rows::new(&part.batch).unwrap();
    (case.x.q, case.d_out) = (gather(&case.x.q, &part.rows, 32), gather(&case.d_out, &part.rows, 32));
    for core in all_cores() {
        let bits = |threads| {
            on(threads, || {
                let (out, lse) = case.forward(&core);
                let d = case.backward(&core, &out, &lse);
                [out, lse, d.q, d.k, d.v].map(|x| x.iter().map(|x| x.to_bits()).collect::<Vec<u32>>())
            })
        };
        let one = bits(1);
        assert!([2, 3, 5].into_iter().all(|threads| bits(threads) == one));
    }
}

/// Both directions as verbs; returns the most memory they took.
fn verbs(cpu: &Cpu, batch: &Batch) -> usize {
    let shape = AttentionShape { num_query_heads: 4, num_kv_heads: 2, head_dim: 8, window: None };
    let rows = cpu.rows(batch).unwrap();
    let keys = rows.sequences() * rows.keys();
    let x = |rows: usize, cols: usize| cpu.upload(&numbers(rows * cols, 1), rows, cols).unwrap();
    let (q, k, v, d) = (x(batch.tokens(), 32), x(keys, 16), x(keys, 16), x(batch.tokens(), 32));
    let x = Qkv { q: &q, k: &k, v: &v };
    let (out, saved) = cpu.causal_attention(&rows, shape, x).unwrap();
    let grads = cpu.causal_attention_backward(&rows, shape, x, &out, &saved, &d).unwrap();
    assert_eq!([&grads.q, &grads.k, &grads.v].map(|d| cpu.shape(d)[0]), [batch.tokens(), keys, keys]);
    cpu.arena_use().peak
}

#[test]
fn a_plan_of_chunks_is_what_they_use() {
    let split = Split { ranks: 2, zigzag: true, len: 23 };
    let part = &split.parts(&split.whole(true, true))[0];
    let planned = verbs(&Cpu::planning(Precision::F32, Precision::F32), &part.batch);
    assert_eq!(planned, verbs(&Cpu::new(Precision::F32), &part.batch));
}

#[test]
fn a_rank_may_have_no_chunks() {
    let chunks = Some(Chunks { per_sequence: 2, keys: 64, ..Chunks::default() });
    verbs(&Cpu::new(Precision::F32), &Batch { batch: 0, seq: 16, chunks, ..Batch::default() });
}
