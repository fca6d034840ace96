//! Arithmetic in the order that Python and NumPy do it, so that scores agree to the last digit.

use std::hint::black_box;

/// `sum(xs)` of Python up to 3.11: left to right.
pub fn sum(xs: &[f64]) -> f64 {
    xs.iter().fold(0.0, |a, x| a + x)
}

/// `sum(xs) / len(xs)`
pub fn mean(xs: &[f64]) -> f64 {
    sum(xs) / xs.len() as f64
}

/// `x ** 2`, which is the C library's `pow`: not always x * x, into which a compiler would turn it.
pub fn square(x: f64) -> f64 {
    x.powf(black_box(2.0))
}

/// Sample standard deviation (n - 1).
pub fn sample_stddev(xs: &[f64]) -> f64 {
    let mu = mean(xs);
    let squares: Vec<f64> = xs.iter().map(|x| square(x - mu)).collect();
    (sum(&squares) / (xs.len() as f64 - 1.0)).sqrt()
}

/// Standard error of the mean.
pub fn mean_stderr(xs: &[f64]) -> f64 {
    sample_stddev(xs) / (xs.len() as f64).sqrt()
}

/// `numpy.sum`: pairwise above 128 numbers, eight running sums below, plain below eight.
pub fn numpy_sum(xs: &[f64]) -> f64 {
    const BLOCK: usize = 128;
    let n = xs.len();
    if n < 8 {
        return xs.iter().fold(-0.0, |a, x| a + x) + 0.0;
    }
    if n > BLOCK {
        let half = (n / 2) & !7;
        return numpy_sum(&xs[..half]) + numpy_sum(&xs[half..]);
    }
    let mut r: [f64; 8] = std::array::from_fn(|i| xs[i]);
    let whole = n - n % 8;
    for chunk in xs[8..whole].chunks_exact(8) {
        for (r, x) in r.iter_mut().zip(chunk) {
            *r += x;
        }
    }
    let total = ((r[0] + r[1]) + (r[2] + r[3])) + ((r[4] + r[5]) + (r[6] + r[7]));
    xs[whole..].iter().fold(total, |a, x| a + x)
}

/// `numpy.argmax`: the first of the greatest, or the first that is no number.
pub fn argmax(xs: &[f64]) -> usize {
    let mut best = 0;
    for (i, x) in xs.iter().enumerate() {
        if x.is_nan() {
            return i;
        }
        if *x > xs[best] {
            best = i;
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn argmax_takes_the_first() {
        assert_eq!(argmax(&[1.0, 3.0, 3.0]), 1);
        assert_eq!(argmax(&[1.0, f64::NAN, 3.0, f64::NAN]), 1);
        assert_eq!(argmax(&[f64::NEG_INFINITY, f64::NEG_INFINITY]), 0);
    }

    // NumPy 2: np.sum(1.0 / np.arange(1, n + 1)).
    #[test]
    fn sums_as_numpy_does() {
        let harmonic = |n: usize| -> Vec<f64> { (1..=n).map(|i| 1.0 / i as f64).collect() };
        for (n, want) in [
            (3, 1.8333333333333333),
            (7, 2.5928571428571425),
            (8, 2.7178571428571425),
            (23, 3.73429151108684),
            (100, 5.187377517639621),
            (128, 5.433147092589173),
            (129, 5.440899030573669),
            (200, 5.878030948121444),
            (1000, 7.485470860550345),
        ] {
            assert_eq!(numpy_sum(&harmonic(n)), want, "{n}");
        }
    }
}
