use super::*;
use crate::tensor::cpu::test_support::{all_cores, pack_right};

fn series(n: usize, step: f32) -> Vec<f32> {
    (0..n).map(|i| ((i as f32 * step).sin() * 3.0).fract()).collect()
}

fn rounded(x: &[f32]) -> Vec<f32> {
    x.iter().map(|v| half::bf16::from_f32(*v).to_f32()).collect()
}

/// a b on packed operands, the left one as rows or as panels.
#[allow(clippy::too_many_arguments)]
fn product(core: &Core, m: usize, n: usize, k: usize, a: Source, b: Source, c: &mut [f32], accumulate: bool) {
    let (layout, data) = pack_right(core, b, k, n);
    let b = Panels::new(layout, &data);
    for block in 0..layout.num_blocks() {
        let ((k0, kk), slots) = (layout.block(block), layout.block_slots(block));
        let keep = accumulate || block > 0;
        if a.col_stride == 1 {
            let mut left = vec![0; m * slots];
            pack::rows(core.format, m, kk, |r| &a.from(r, k0).data[..kk], &mut left);
            multiply_block(core, m, n, slots, Left::rows(&left, slots), b.from(block, 0), c, n, keep);
        } else {
            let mut left = vec![0; m.div_ceil(core.mr) * core.mr * slots];
            pack::left_panels(core, a.flipped().from(k0, 0), kk, m, &mut left);
            multiply_block(core, m, n, slots, Left::panels(core, &left, slots), b.from(block, 0), c, n, keep);
        }
    }
}

#[test]
fn every_level_and_layout_gives_the_plain_sum() {
    for core in all_cores() {
        for (m, n, k) in [
            (1, 1, 1),
            (3, 5, 7),
            (13, 17, 33),
            (29, 70, 300),
            (64, 33, 513),
            (1, 257, 19),
            (25, 1, 65),
            (12, 32, 256),
            (100, 96, 512),
        ] {
            let (a, b) = (series(m * k, 0.7), series(k * n, 0.3));
            let (ra, rb) = if core.format == Format::F32 { (a.clone(), b.clone()) } else { (rounded(&a), rounded(&b)) };
            let at: Vec<f32> = (0..k * m).map(|x| a[x % m * k + x / m]).collect();
            let bt: Vec<f32> = (0..k * n).map(|x| b[x % k * n + x / k]).collect();
            let plain: Vec<f64> =
                (0..m * n).map(|x| (0..k).map(|l| ra[x / n * k + l] as f64 * rb[l * n + x % n] as f64).sum::<f64>()).collect();
            let mut first: Option<Vec<u32>> = None;
            for (va, vb) in [
                (Source::rows(&a, k), Source::rows(&b, n)),
                (Source::transposed(&at, m), Source::rows(&b, n)),
                (Source::rows(&a, k), Source::transposed(&bt, k)),
                (Source::transposed(&at, m), Source::transposed(&bt, k)),
            ] {
                let mut c = vec![1.0; m * n];
                product(&core, m, n, k, va, vb, &mut c, true);
                for (i, (x, y)) in c.iter().zip(&plain).enumerate() {
                    let close = (*x as f64 - 1.0 - y).abs() < 1e-4 * (1.0 + y.abs());
                    assert!(close, "{:?} {m} {n} {k}: row {} column {}: {x} not {}", core.format, i / n, i % n, y + 1.0);
                }
                let bits: Vec<u32> = c.iter().map(|x| x.to_bits()).collect();
                assert_eq!(first.get_or_insert(bits.clone()), &bits, "layouts differ in a bit");
                let mut fresh = vec![f32::NAN; m * n];
                product(&core, m, n, k, va, vb, &mut fresh, false);
                assert!(fresh.iter().zip(&plain).all(|(x, y)| (*x as f64 - y).abs() < 1e-4 * (1.0 + y.abs())));
            }
        }
    }
}

#[test]
fn the_place_in_a_tile_does_not_change_a_bit() {
    for core in all_cores() {
        let (m, n, k) = (31, 45, 70);
        let (a, b) = (series(m * k, 0.71), series(k * n, 0.37));
        let mut whole = vec![0.0; m * n];
        product(&core, m, n, k, Source::rows(&a, k), Source::rows(&b, n), &mut whole, false);
        for i in 0..m {
            let mut row = vec![0.0; n];
            product(&core, 1, n, k, Source::rows(&a[i * k..], k), Source::rows(&b, n), &mut row, false);
            assert!(row.iter().zip(&whole[i * n..]).all(|(x, y)| x.to_bits() == y.to_bits()));
        }
    }
}

/// What packing writes, number by number, for formats this machine may not have a kernel for.
#[test]
fn packing_puts_every_number_in_its_slot() {
    let core = |format, mr, nr| Core { format, mr, nr, ..Core::f32() };
    let bits = |x: f32| half::bf16::from_f32(x).to_bits() as u32;
    for format in [Format::F32, Format::RoundedF32, Format::Bf16] {
        for (mr, nr) in [(6, 16), (12, 32)] {
            let core = core(format, mr, nr);
            for (n, k) in [(1, 1), (5, 7), (17, 33), (70, 300), (33, 513), (257, 19), (64, 256)] {
                let x = series(k * n, 0.3);
                let xt: Vec<f32> = (0..n * k).map(|i| x[i % k * n + i / k]).collect();
                // Slot s of column j.
                let slot = |s: usize, j: usize| match format {
                    Format::F32 => x[s * n + j].to_bits(),
                    Format::RoundedF32 => bits(x[s * n + j]) << 16,
                    Format::Bf16 => {
                        let next = if 2 * s + 1 < k { bits(x[(2 * s + 1) * n + j]) } else { 0 };
                        bits(x[2 * s * n + j]) | next << 16
                    }
                };
                let slots = core.slots(k);
                for source in [Source::rows(&x, n), Source::transposed(&xt, k)] {
                    for width in [mr, nr] {
                        for j0 in (0..n).step_by(width) {
                            let columns = width.min(n - j0);
                            let mut out = vec![u32::MAX; slots * width];
                            pack::panel(format, source.from(0, j0), k, columns, &mut out, width);
                            for (i, got) in out.iter().enumerate() {
                                let (s, j) = (i / width, i % width);
                                let expected = if j < columns { slot(s, j0 + j) } else { 0 };
                                assert_eq!(*got, expected, "{format:?} {n} {k}: slot {s} of column {}", j0 + j);
                            }
                        }
                    }
                }
                let mut out = vec![u32::MAX; n * slots];
                pack::rows(format, n, k, |r| &xt[r * k..][..k], &mut out);
                for (i, got) in out.iter().enumerate() {
                    assert_eq!(*got, slot(i % slots, i / slots), "{format:?} {n} {k}: slot {} of row {}", i % slots, i / slots);
                }
            }
        }
    }
}
