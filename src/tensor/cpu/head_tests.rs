use super::*;
use crate::tensor::cpu::packed::Format;
use crate::tensor::cpu::test_support::{all_cores, on, pack_right, series};

/// What `d_head` holds before.
const START: f64 = 1.0 / 1024.0;

struct Case {
    labels: Vec<i64>,
    y: Vec<f32>,
    head: Vec<f32>,
    d: usize,
    vocab: usize,
}

impl Case {
    /// Every `unlabelled`-th row has no label (0 = all have one, 1 = none has).
    fn new(t: usize, d: usize, vocab: usize, unlabelled: usize) -> Self {
        let label = |t: usize| if unlabelled > 0 && t % unlabelled == unlabelled - 1 { -100 } else { (t * 7919 % vocab) as i64 };
        let labels: Vec<i64> = (0..t).map(label).collect();
        // Logits of about 1.
        let mut y: Vec<f32> = series(t * d, 1).iter().map(|y| y * 3.0 / (d as f32).sqrt()).collect();
        let head = series(vocab * d, 2);
        // A third of the rows points at its label, so that losses near 0 occur.
        for (row, label) in y.chunks_mut(d).zip(&labels).step_by(3).filter(|(_, label)| **label >= 0) {
            let norm = head[*label as usize * d..][..d].iter().map(|h| h * h).sum::<f32>();
            row.iter_mut().zip(&head[*label as usize * d..]).for_each(|(y, h)| *y += 8.0 / norm * h);
        }
        Self { labels, y, head, d, vocab }
    }

    fn run(&self, core: &Core, scale: Option<f32>) -> (Loss, Vec<f32>, Vec<f32>) {
        let (d, v) = (self.d, self.vocab);
        let (fl, fd) = pack_right(core, Source::transposed(&self.head, d), d, v);
        let (bl, bd) = pack_right(core, Source::rows(&self.head, d), v, d);
        let (mut d_head, mut dy) = (vec![START as f32; v * d], vec![f32::NAN; self.y.len()]);
        let mut scratch = vec![f32::NAN; scratch_len(core, self.labels.len(), d, v, scale.is_some())];
        let gradient = scale.map(|scale| Gradient { scale, d_head: &mut d_head, dy: &mut dy, backward: Panels::new(bl, &bd) });
        let loss = cross_entropy(core, &self.labels, &self.y, &self.head, Panels::new(fl, &fd), d, gradient, &mut scratch);
        (loss, d_head, dy)
    }

    /// In f64; `round` is what the products' format does to a number.
    fn reference(&self, scale: f32, round: impl Fn(f32) -> f32) -> (f64, Vec<f64>, Vec<f64>) {
        let (d, v, mut sum) = (self.d, self.vocab, 0.0);
        let (mut d_head, mut dy) = (vec![START; v * d], vec![0.0; self.y.len()]);
        let wide = |x: &[f32]| -> Vec<f64> { x.iter().map(|x| round(*x) as f64).collect() };
        let (y, head) = (wide(&self.y), wide(&self.head));
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        for (t, label) in self.labels.iter().enumerate().filter(|(_, label)| **label >= 0) {
            let z: Vec<f64> = (0..v).map(|j| dot(&y[t * d..][..d], &head[j * d..][..d])).collect();
            let top = z.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let rest: f64 = z.iter().enumerate().filter(|(j, _)| *j as i64 != *label).map(|(_, z)| (z - top).exp()).sum();
            let at_label = (z[*label as usize] - top).exp();
            sum += (rest / at_label).ln_1p();
            for j in 0..v {
                let target = j as i64 == *label;
                let p = if target { -rest / (rest + at_label) } else { (z[j] - top).exp() / (rest + at_label) } * scale as f64;
                // The label's own term never is rounded.
                let (p, y, head) = if target {
                    let exact = |x: &[f32]| x.iter().map(|x| *x as f64).collect::<Vec<_>>();
                    (p, exact(&self.y[t * d..][..d]), exact(&self.head[j * d..][..d]))
                } else {
                    (round(p as f32) as f64, y[t * d..][..d].to_vec(), head[j * d..][..d].to_vec())
                };
                d_head[j * d..][..d].iter_mut().zip(&y).for_each(|(g, y)| *g += p * y);
                dy[t * d..][..d].iter_mut().zip(&head).for_each(|(g, h)| *g += p * h);
            }
        }
        (sum, d_head, dy)
    }
}

/// |a - b| / |b| as vectors, and the largest difference in terms of the largest number.
fn distance(a: &[f32], b: &[f64], offset: f64) -> (f64, f64) {
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    let differences = || a.iter().zip(b).map(|(a, b)| *a as f64 - b);
    let largest = differences().fold(0.0, |m: f64, x| if x.is_nan() { f64::INFINITY } else { m.max(x.abs()) });
    let size = b.iter().fold(0.0, |m: f64, x| m.max((x - offset).abs()));
    (norm(&mut differences()) / norm(&mut b.iter().map(|x| x - offset)), largest / size)
}

fn rounded(x: f32) -> f32 {
    half::bf16::from_f32(x).to_f32()
}

const SHAPES: [(usize, usize, usize, usize); 9] = [
    (1, 8, 17, 0),
    (7, 33, 257, 3),
    (130, 8, 17, 2),
    (300, 33, 700, 5),
    (97, 300, 257, 0),
    (65, 256, 1000, 7),
    (1100, 8, 33, 0),
    (2500, 16, 300, 4),
    (70, 24, 50_001, 6),
];

#[test]
fn f32_equals_a_sum_in_f64() {
    for (t, d, vocab, unlabelled) in SHAPES {
        let case = Case::new(t, d, vocab, unlabelled);
        let (sum, d_head_exact, dy_exact) = case.reference(0.5, |x| x);
        for core in all_cores().into_iter().filter(|core| core.format == Format::F32) {
            let (loss, d_head, dy) = case.run(&core, Some(0.5));
            assert_eq!(loss.count as usize, case.labels.iter().filter(|l| **l >= 0).count());
            let (h, y) = (distance(&d_head, &d_head_exact, START), distance(&dy, &dy_exact, 0.0));
            let all = [(loss.sum - sum).abs() / sum, h.0, y.0, h.1, y.1];
            println!("{t} {d} {vocab}: {all:?}");
            assert!(all[..3].iter().all(|x| *x < 1e-6) && all[3..].iter().all(|x| *x < 2e-6), "{t} {d} {vocab}: {all:?}");
            let (only, ..) = case.run(&core, None);
            assert_eq!((only.sum.to_bits(), only.count), (loss.sum.to_bits(), loss.count));
        }
    }
}

#[test]
fn bf16_products_equal_a_sum_over_rounded_numbers() {
    for (t, d, vocab, unlabelled) in SHAPES {
        let case = Case::new(t, d, vocab, unlabelled);
        let (as_rounded, exact) = (case.reference(0.5, rounded), case.reference(0.5, |x| x));
        for core in all_cores().into_iter().filter(|core| core.format != Format::F32) {
            let (loss, d_head, dy) = case.run(&core, Some(0.5));
            let differ = |(sum, d_head_exact, dy_exact): &(f64, Vec<f64>, Vec<f64>)| {
                let gradients = (distance(&d_head, d_head_exact, START).0, distance(&dy, dy_exact, 0.0).0);
                [(loss.sum - sum).abs() / sum, gradients.0, gradients.1]
            };
            // Gradients next to the middle of two bf16 numbers may round the other way: a few of many terms by 0.4%.
            let all = differ(&as_rounded);
            assert!(all[0] < 1e-6 && all[1] < 5e-5 && all[2] < 5e-5, "{t} {d} {vocab}: {all:?}");
            // And the whole is close to what it approximates.
            let all = differ(&exact);
            assert!(all[0] < 5e-3 && all[1] < 1e-2 && all[2] < 1e-2, "{t} {d} {vocab}: {all:?}");
        }
    }
}

#[test]
fn threads_do_not_change_a_bit() {
    let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    for core in [Core::f32(), Core::bf16()] {
        for (t, d, vocab, unlabelled) in [(1300, 40, 700, 5), (150, 300, 5000, 0), (7, 33, 257, 3)] {
            let case = Case::new(t, d, vocab, unlabelled);
            let run = |threads| {
                on(threads, || {
                    let (loss, d_head, dy) = case.run(&core, Some(0.01));
                    (loss.sum.to_bits(), bits(&d_head), bits(&dy))
                })
            };
            let one = run(1);
            assert!([2, 3, 5].into_iter().all(|threads| run(threads) == one));
        }
    }
}

#[test]
fn without_labels_or_rows_all_is_zero() {
    for (t, unlabelled) in [(0, 0), (5, 1)] {
        let case = Case::new(t, 12, 31, unlabelled);
        let (loss, d_head, dy) = case.run(&Core::f32(), Some(1.0));
        assert_eq!(loss, Loss::default());
        assert!(d_head.iter().all(|g| *g == START as f32) && dy.iter().all(|g| *g == 0.0));
        assert_eq!(case.run(&Core::f32(), None).0, Loss::default());
    }
}

#[test]
fn extreme_logits_stay_finite_and_nan_stays_visible() {
    let mut case = Case::new(9, 8, 40, 0);
    case.y.iter_mut().for_each(|y| *y *= 1e4);
    let (loss, d_head, dy) = case.run(&Core::f32(), Some(1.0));
    let (sum, d_head_exact, dy_exact) = case.reference(1.0, |x| x);
    assert!((loss.sum - sum).abs() <= 1e-5 * sum);
    assert!(distance(&d_head, &d_head_exact, START).0 < 1e-5 && distance(&dy, &dy_exact, 0.0).0 < 1e-5);
    case.y[3] = f32::NAN;
    assert!(case.run(&Core::f32(), None).0.sum.is_nan());
}

#[test]
#[should_panic(expected = "row 1 has label 40, but the vocabulary ends at 39")]
fn a_label_beyond_the_vocabulary_is_named() {
    let mut case = Case::new(3, 8, 40, 0);
    case.labels[1] = 40;
    case.run(&Core::f32(), None);
}

#[test]
fn memory_of_the_largest_vocabulary_is_bounded() {
    on(2, || {
        let len = scratch_len(&Core::f32(), 1 << 20, 2048, 262_272, true);
        assert!(len < 40 << 20, "{} MB", len >> 18);
    });
}

#[test]
fn the_exponential_is_close() {
    for i in 0..8730 {
        let x = i as f32 * -0.01;
        let exact = (x as f64).exp();
        assert!((exp_of_negative(x) as f64 - exact).abs() <= 2.5e-7 * exact, "{x}");
    }
    assert_eq!(exp_of_negative(0.0), 1.0);
    assert!(exp_of_negative(f32::NEG_INFINITY) < 2e-38);
    assert!(exp_of_negative(f32::NAN).is_nan());
}
