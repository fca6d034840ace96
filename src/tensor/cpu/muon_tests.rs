use super::*;
use crate::tensor::cpu::test_support::{all_cores, on, series};

fn product(m: usize, n: usize, k: usize, a: impl Fn(usize, usize) -> f64, b: impl Fn(usize, usize) -> f64) -> Vec<f64> {
    let b: Vec<f64> = (0..k * n).map(|x| b(x / n, x % n)).collect();
    let mut c = vec![0.0; m * n];
    for (i, c) in c.chunks_mut(n).enumerate() {
        for l in 0..k {
            let a = a(i, l);
            c.iter_mut().zip(&b[l * n..]).for_each(|(c, b)| *c += a * b);
        }
    }
    c
}

fn transpose(x: &[f64], rows: usize, cols: usize) -> Vec<f64> {
    (0..rows * cols).map(|i| x[i % rows * cols + i / rows]).collect()
}

/// The plain form in f64, operands of products through `round`.
fn newton_schulz(u: &[f64], rows: usize, cols: usize, steps: usize, round: impl Fn(f64) -> f64) -> Vec<f64> {
    let (m, n) = (rows.min(cols), rows.max(cols));
    let norm = u.iter().map(|u| u * u).sum::<f64>().sqrt().max(EPS as f64);
    let mut x: Vec<f64> = if rows > cols { transpose(u, rows, cols) } else { u.to_vec() };
    x.iter_mut().for_each(|x| *x /= norm);
    for _ in 0..steps {
        let r: Vec<f64> = x.iter().map(|x| round(*x)).collect();
        let a = product(m, m, n, |i, l| r[i * n + l], |l, j| r[j * n + l]);
        let a2 = product(m, m, m, |i, l| round(a[i * m + l]), |l, j| round(a[l * m + j]));
        let p = product(m, n, m, |i, l| round(B as f64 * a[i * m + l] + C as f64 * a2[i * m + l]), |l, j| r[l * n + j]);
        x.iter_mut().zip(&p).for_each(|(x, p)| *x = A as f64 * *x + p);
    }
    if rows > cols { transpose(&x, cols, rows) } else { x }
}

/// Orthonormal rows from a random matrix.
fn orthonormal(m: usize, n: usize, seed: u32) -> Vec<f64> {
    let mut q: Vec<f64> = series(m * n, seed).iter().map(|x| *x as f64).collect();
    for i in 0..m {
        for _ in 0..2 {
            for k in 0..i {
                let dot: f64 = (0..n).map(|j| q[i * n + j] * q[k * n + j]).sum();
                (0..n).for_each(|j| q[i * n + j] -= dot * q[k * n + j]);
            }
        }
        let norm = q[i * n..][..n].iter().map(|x| x * x).sum::<f64>().sqrt();
        q[i * n..][..n].iter_mut().for_each(|x| *x /= norm);
    }
    q
}

/// Singular values spread evenly in their logarithms over 1e-4..1.
fn spread(rows: usize, cols: usize) -> Vec<f32> {
    let (m, n) = (rows.min(cols), rows.max(cols));
    let (u, v) = (orthonormal(m, m, 3), orthonormal(m, n, 4));
    let value = |i: usize| 10f64.powf(-4.0 * i as f64 / (m - 1).max(1) as f64);
    let x = product(m, n, m, |i, l| u[l * m + i] * value(l), |l, j| v[l * n + j]);
    let x = if rows > cols { transpose(&x, m, n) } else { x };
    x.iter().map(|x| *x as f32).collect()
}

fn distance(a: &[f32], b: &[f64]) -> f64 {
    let squares = a.iter().zip(b).map(|(a, b)| (*a as f64 - b).powi(2)).sum::<f64>();
    (squares / b.iter().map(|b| b * b).sum::<f64>()).sqrt()
}

/// Newton-Schulz of `u` by this backend, in one form and one mode.
fn run(core: &Core, u: &[f32], rows: usize, cols: usize, steps: usize, parallel: bool) -> Vec<f32> {
    let shape = Shape::new(rows, cols);
    let work = Work { core, shape, parallel };
    let mut scratch = vec![f32::NAN; work.scratch_len() - aligned(u.len())];
    let norm = u.iter().map(|u| *u as f64 * *u as f64).sum::<f64>().sqrt() as f32;
    let mut x: Vec<f32> = u.iter().map(|u| u * (1.0 / norm.max(EPS))).collect();
    work.newton_schulz(&mut x, steps, &mut scratch);
    x
}

const SHAPES: [(usize, usize); 14] = [
    (1, 1),
    (1, 7),
    (5, 1),
    (16, 16),
    (17, 33),
    (33, 17),
    (50, 50),
    (32, 257),
    (257, 64),
    (270, 300),
    (300, 270),
    (64, 600),
    (600, 64),
    (256, 256),
];

#[test]
fn both_forms_equal_the_plain_one_in_f64() {
    for (rows, cols) in SHAPES {
        for (what, limit, u) in [("random", 5e-6, series(rows * cols, 9)), ("spread", 1e-5, spread(rows, cols))] {
            let wide: Vec<f64> = u.iter().map(|u| *u as f64).collect();
            for steps in [1, 5] {
                let exact = newton_schulz(&wide, rows, cols, steps, |x| x);
                for core in all_cores().into_iter().filter(|core| core.format == Format::F32) {
                    let error = distance(&run(&core, &u, rows, cols, steps, false), &exact);
                    let form = Shape::new(rows, cols).form(core.format, steps);
                    println!("{rows} x {cols}, {what}, {steps} steps, {form:?}: {error:.1e}");
                    assert!(error < limit, "{rows} x {cols}, {what}, {steps} steps, {form:?}: {error:.1e}");
                }
            }
        }
    }
}

#[test]
fn bf16_products_are_those_of_rounded_numbers() {
    let round = |x: f64| half::bf16::from_f32(x as f32).to_f64();
    for (rows, cols) in SHAPES {
        let u = series(rows * cols, 9);
        let wide: Vec<f64> = u.iter().map(|u| *u as f64).collect();
        for core in all_cores().into_iter().filter(|core| core.format != Format::F32) {
            // One step, where the roundings are the same but for numbers in the middle of two.
            let error = distance(&run(&core, &u, rows, cols, 1, false), &newton_schulz(&wide, rows, cols, 1, round));
            assert!(error < 1e-3, "{rows} x {cols}, one step: {error:.1e}");
            let error = distance(&run(&core, &u, rows, cols, 5, false), &newton_schulz(&wide, rows, cols, 5, |x| x));
            println!("{rows} x {cols}, 5 steps: {error:.1e}");
            assert!(error < 5e-2, "{rows} x {cols}, 5 steps: {error:.1e}");
        }
    }
}

#[test]
fn products_are_symmetric_to_the_bit() {
    for core in [Core::f32(), Core::bf16()] {
        for (rows, cols) in [(270, 300), (300, 270), (40, 75)] {
            let work = Work { core: &core, shape: Shape::new(rows, cols), parallel: false };
            let (m, x) = (work.shape.m, series(rows * cols, 5));
            let mut panels = vec![0; work.panels_len()];
            let mut a = vec![0.0; work.f32_layout().len()];
            work.gram(&x, &mut panels, &mut a, &mut vec![0.0; work.thread_len()]);
            let place = work.f32_layout();
            let at = |i: usize, j: usize| a[place.offset(i / KC, j / core.nr) + i % KC * core.nr + j % core.nr];
            for i in 0..m {
                for j in 0..i {
                    assert_eq!(at(i, j).to_bits(), at(j, i).to_bits(), "element ({i}, {j}) of {rows} x {cols}");
                }
            }
        }
    }
}

#[test]
fn neither_threads_nor_the_mode_change_a_bit() {
    let bits = |x: Vec<f32>| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    for core in [Core::f32(), Core::bf16()] {
        for (rows, cols) in [(270, 300), (300, 270), (256, 256)] {
            let u = series(rows * cols, 9);
            let one = bits(run(&core, &u, rows, cols, 5, false));
            for threads in [1, 2, 3, 5] {
                assert!(on(threads, || bits(run(&core, &u, rows, cols, 5, true))) == one, "{threads} threads");
            }
        }
    }
}

const STEP: MuonStep = MuonStep { lr: 0.02, weight_decay: 0.1, momentum: 0.95, ns_steps: 5, grad_scale: 0.5 };

/// Weights and momenta after two steps of all of `shapes` (rows, cols, row blocks).
fn two_steps(core: &Core, shapes: &[(usize, usize, usize)]) -> Vec<(Vec<f32>, Vec<f32>)> {
    let mut states: Vec<(Vec<f32>, Vec<f32>)> = Vec::new();
    let grads: Vec<Vec<f32>> = shapes.iter().zip(50..).map(|((rows, cols, _), seed)| series(rows * cols, seed)).collect();
    for ((rows, cols, _), seed) in shapes.iter().zip(0..) {
        states.push((series(rows * cols, seed), series(rows * cols, seed + 20)));
    }
    let blocks = shapes.iter().map(|(rows, cols, blocks)| (rows / blocks, *cols));
    let mut scratch = vec![f32::NAN; scratch_len(core, blocks)];
    for _ in 0..2 {
        let mut items: Vec<Item> = (states.iter_mut().zip(&grads).zip(shapes))
            .map(|(((weight, momentum), grad), (rows, cols, row_blocks))| Item {
                weight,
                grad,
                momentum,
                rows: *rows,
                cols: *cols,
                row_blocks: *row_blocks,
            })
            .collect();
        muon(core, &mut items, STEP, &mut scratch);
    }
    states
}

#[test]
fn a_step_follows_the_formula() {
    let shapes = [(48, 20, 2), (20, 48, 1), (33, 33, 1), (90, 64, 3), (1, 5, 1)];
    for ((rows, cols, row_blocks), (got, momentum), seed) in
        shapes.iter().zip(two_steps(&Core::f32(), &shapes)).zip(0u32..).map(|((a, b), c)| (a, b, c))
    {
        let wide = |x: Vec<f32>| x.iter().map(|x| *x as f64).collect::<Vec<_>>();
        let (mut w, mut m) = (wide(series(rows * cols, seed)), wide(series(rows * cols, seed + 20)));
        let g: Vec<f64> = wide(series(rows * cols, seed + 50)).iter().map(|g| g * 0.5).collect();
        let (mu, lr, block) = (STEP.momentum as f64, STEP.lr as f64, rows / row_blocks);
        for _ in 0..2 {
            m.iter_mut().zip(&g).for_each(|(m, g)| *m = mu * *m + (1.0 - mu) * g);
            let u: Vec<f64> = m.iter().zip(&g).map(|(m, g)| (1.0 - mu) * g + mu * m).collect();
            let o: Vec<f64> = u.chunks(block * cols).flat_map(|u| newton_schulz(u, block, *cols, 5, |x| x)).collect();
            let by = lr * 0.2 * (block.max(*cols) as f64).sqrt();
            w.iter_mut().zip(&o).for_each(|(w, o)| *w = (1.0 - lr * STEP.weight_decay as f64) * *w - by * o);
        }
        assert!(distance(&momentum, &m) < 1e-6 && distance(&got, &w) < 1e-6, "{rows} x {cols}: {}", distance(&got, &w));
    }
}

#[test]
fn threads_do_not_change_a_bit_of_a_step() {
    let bits = |states: Vec<(Vec<f32>, Vec<f32>)>| -> Vec<u32> {
        states.iter().flat_map(|(w, m)| w.iter().chain(m)).map(|x| x.to_bits()).collect()
    };
    // The last one is large enough for tasks within.
    let shapes = [(48, 20, 2), (20, 48, 1), (33, 33, 1), (64, 64, 1), (130, 70, 1), (40, 27_000, 1)];
    for core in [Core::f32(), Core::bf16()] {
        let one = on(1, || bits(two_steps(&core, &shapes)));
        assert!([2, 3, 5].into_iter().all(|threads| on(threads, || bits(two_steps(&core, &shapes))) == one));
    }
}

#[test]
fn zero_stays_zero_and_no_items_are_no_work() {
    let core = Core::f32();
    muon(&core, &mut [], STEP, &mut []);
    let (mut weight, grad, mut momentum) = (vec![1.0; 60], vec![0.0; 60], vec![0.0; 60]);
    let mut scratch = vec![0.0; scratch_len(&core, [(6, 10)].into_iter())];
    let item = Item { weight: &mut weight, grad: &grad, momentum: &mut momentum, rows: 6, cols: 10, row_blocks: 1 };
    muon(&core, &mut [item], STEP, &mut scratch);
    assert!(momentum.iter().all(|m| *m == 0.0) && weight.iter().all(|w| *w == 1.0 - 0.02 * 0.1));
}

#[test]
fn segments_make_up_the_steps() {
    assert_eq!(segments(0).count(), 0);
    assert_eq!(segments(5).collect::<Vec<_>>(), [3, 2]);
    assert_eq!(segments(8).collect::<Vec<_>>(), [3, 2, 2, 1]);
    assert!((0..20).all(|steps| segments(steps).sum::<usize>() == steps));
}
