//! pass@k of generated programs (Chen et al., 2021).

use super::numeric::numpy_sum;

/// What became of a program that was run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    /// The check returned.
    Pass,
    /// It raised, could not be compiled, or left before the check returned.
    Fail,
    /// Out of time.
    Timeout,
    /// Ended by a signal that it brought on itself.
    Crash,
    /// Ended by a limit on memory, files or processes.
    Killed,
    /// There is no Python to run it.
    NoPython,
}

/// Runs a program that ends with its check.
pub trait CodeRunner: Sync {
    /// `candidate` is prompt and completion, `check` the test that follows.
    fn run(&self, candidate: &str, check: &str) -> anyhow::Result<Verdict>;
}

/// Unbiased pass@k of `correct` out of `n` programs: 1 - C(n - c, k) / C(n, k), as a product like the reference code's.
pub fn pass_at_k(n: usize, correct: usize, k: usize) -> f64 {
    if n - correct < k {
        return 1.0;
    }
    1.0 - ((n - correct + 1)..=n).fold(1.0, |p, i| p * (1.0 - k as f64 / i as f64))
}

/// Mean of pass@k over problems.
pub fn mean_pass_at_k(counts: &[(usize, usize)], k: usize) -> f64 {
    let each: Vec<f64> = counts.iter().map(|(n, c)| pass_at_k(*n, *c, k)).collect();
    numpy_sum(&each) / each.len() as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equals_the_binomial_form() {
        let choose = |n: usize, k: usize| (0..k).fold(1.0, |p, i| p * (n - i) as f64 / (k - i) as f64);
        for (n, c, k) in [(64, 3, 2), (64, 10, 8), (64, 0, 16), (1, 1, 1), (1, 0, 1), (5, 4, 2), (5, 1, 5)] {
            let want = if n - c < k { 1.0 } else { 1.0 - choose(n - c, k) / choose(n, k) };
            assert!((pass_at_k(n, c, k) - want).abs() < 1e-12, "{n} {c} {k}");
        }
        assert_eq!(mean_pass_at_k(&[(1, 1), (1, 0)], 1), 0.5);
    }
}
