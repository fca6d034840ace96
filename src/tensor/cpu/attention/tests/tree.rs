//! Segments of a tree: the same as each segment alone, and the same bits however rows are cut.

use super::super::super::test_support::{all_cores, on, series};
use super::super::{tree, tree_scratch};
use crate::tensor::backend::{AttentionShape, Backend, Precision, Qkv};
use crate::tensor::cpu::Cpu;
use crate::tensor::tree::{self as verbs, Before, Segment, Tree};

const POOL: usize = 700;

/// A path of 300 keys that lie in pieces, with branches of several lengths, one of them with a past of its own only.
fn branches() -> Tree {
    let path = [40..170, 3..4, 200..369];
    let mut segments: Vec<Segment> = Vec::new();
    let mut add = |past: &[std::ops::Range<usize>], n: usize, own: std::ops::Range<usize>| {
        let start = segments.last().map_or(0, |s: &Segment| s.rows.end);
        let position = past.iter().map(|r| r.len()).sum();
        let keys = past.iter().cloned().chain([own]).collect();
        segments.push(Segment { rows: start..start + n, position, before: [Before::Halo(1), Before::Halo(0)], keys });
    };
    add(&path, 1, 400..401);
    add(&path, 37, 401..438);
    add(&path[..2], 2, 10..12);
    add(&[], 5, 20..25);
    add(&[20..25, 500..501, 13..14], 130, 510..640);
    add(&[], 1, 690..691);
    Tree { segments }
}

#[test]
fn segments_equal_sequences_of_their_own() {
    let tree = branches();
    for (precision, tolerance) in [(Precision::F32, 2e-6), (Precision::Bf16, 2e-2)] {
        let cpu = Cpu::new(precision);
        for (heads, kv_heads, head_dim, window) in [(6, 2, 8, None), (4, 1, 24, Some(9)), (1, 1, 64, Some(200)), (8, 8, 6, None)]
        {
            let shape = AttentionShape { num_query_heads: heads, num_kv_heads: kv_heads, head_dim, window };
            let buf = |rows: usize, cols: usize, seed| cpu.upload(&series(rows * cols, seed), rows, cols).unwrap();
            let (q_dim, kv_dim) = (heads * head_dim, kv_heads * head_dim);
            let (q, k, v) = (buf(tree.tokens(), q_dim, 1), buf(POOL, kv_dim, 2), buf(POOL, kv_dim, 3));
            let x = Qkv { q: &q, k: &k, v: &v };
            let got = cpu.download(&cpu.tree_attention(&tree, shape, x).unwrap()).unwrap();
            let expected = cpu.download(&verbs::attention(&cpu, &tree, shape, x).unwrap()).unwrap();
            for (i, (a, b)) in got.iter().zip(&expected).enumerate() {
                assert!((a - b).abs() <= tolerance, "{precision:?} {shape:?}: number {i} is {a}, not {b}");
            }
        }
    }
}

/// One sequence of 290 rows, cut at several places, on a pool that holds it in one piece or in many.
#[test]
fn a_row_has_the_same_bits_however_the_rows_are_cut() {
    let (n, heads, kv_heads, head_dim) = (290, 6, 2, 8);
    for core in all_cores() {
        for window in [None, Some(7), Some(130)] {
            let shape = AttentionShape { num_query_heads: heads, num_kv_heads: kv_heads, head_dim, window };
            let q = series(n * heads * head_dim, 4);
            let (k, v) = (series(n * kv_heads * head_dim, 5), series(n * kv_heads * head_dim, 6));
            let run = |cuts: &[usize], piece: usize| {
                // Position p lies in row `place(p)`: pieces of the pool, in reverse.
                let pieces = n.div_ceil(piece);
                let place = |p: usize| (pieces - 1 - p / piece) * piece + p % piece;
                let width = kv_heads * head_dim;
                let mut pool = [vec![f32::NAN; pieces * piece * width], vec![f32::NAN; pieces * piece * width]];
                for p in 0..n {
                    for (pool, x) in pool.iter_mut().zip([&k, &v]) {
                        pool[place(p) * width..][..width].copy_from_slice(&x[p * width..][..width]);
                    }
                }
                let segment = |w: &[usize]| {
                    let starts = (0..w[1]).step_by(piece);
                    let keys = starts.map(|p| place(p)..place(p) + piece.min(w[1] - p)).collect();
                    Segment { rows: w[0]..w[1], position: w[0], before: [Before::Halo(1), Before::Halo(0)], keys }
                };
                let cut = Tree { segments: cuts.windows(2).map(segment).collect() };
                let mut out = vec![f32::NAN; q.len()];
                let mut scratch = vec![f32::NAN; tree_scratch(&core, shape)];
                tree(&core, &cut, shape, Qkv { q: &q, k: &pool[0], v: &pool[1] }, &mut out, &mut scratch);
                out.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
            };
            let whole = on(1, || run(&[0, n], n));
            assert!(whole.iter().all(|x| f32::from_bits(*x).is_finite()), "{core:?}");
            let single: Vec<usize> = (0..=n).collect();
            for cuts in [&[0, 1, n][..], &[0, 3, 128, 129, 200, n], &[0, 64, 65, 66, n], &single] {
                for piece in [n, 128, 50, 1] {
                    assert!(on(2, || run(cuts, piece)) == whole, "{core:?} {window:?}: {cuts:?}, {piece}");
                }
            }
        }
    }
}
