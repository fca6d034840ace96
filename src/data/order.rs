//! Random order without stored permutations: a keyed hash of counters, and bijections of `0..n` built from it.

/// A 64-bit finaliser (SplitMix64's): every input bit flips about half of the output bits.
const fn mix64(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Counter-based random number: the same for the same seed and counters, on every machine, for ever.
pub fn hash(seed: u64, counters: &[u64]) -> u64 {
    const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
    counters.iter().fold(mix64(seed.wrapping_add(GOLDEN)), |h, c| {
        // Rotation makes (1, 2) differ from (2, 1); the constant keeps a zero from being a fixed point.
        mix64(h.rotate_left(23) ^ mix64(c.wrapping_add(GOLDEN)))
    })
}

const ROUNDS: usize = 8;

/// A bijection of `0..n`, fixed by `seed` and `counters`; takes no memory and a few nanoseconds a call.
///
/// An alternating Feistel network permutes the numbers of ceil(log2 n) bits; a number that lands outside `0..n` is
/// permuted again until it is inside (cycle walking: fewer than two rounds on average, and still a bijection).
#[derive(Debug, Clone)]
pub struct Permutation {
    n: u64,
    low_bits: u32,
    low_mask: u64,
    high_mask: u64,
    keys: [u64; ROUNDS],
}

impl Permutation {
    /// `n` may be 0: then there is nothing to apply it to.
    pub fn new(n: u64, seed: u64, counters: &[u64]) -> Self {
        // Halves of fewer than four bits mix too poorly for a fair order of a few elements; walking more often is cheap there.
        let bits = (u64::BITS - n.saturating_sub(1).leading_zeros()).max(8);
        let low_bits = bits / 2;
        let key = hash(seed, counters);
        Self {
            n,
            low_bits,
            low_mask: (1 << low_bits) - 1,
            high_mask: (1 << (bits - low_bits)) - 1,
            keys: std::array::from_fn(|round| hash(key, &[round as u64])),
        }
    }

    /// Image of `i`, which must be below `n`.
    pub fn apply(&self, i: u64) -> u64 {
        assert!(i < self.n, "index {i} of a permutation of {}", self.n);
        if self.n == 1 {
            return 0;
        }
        let mut x = i;
        loop {
            let (mut low, mut high) = (x & self.low_mask, x >> self.low_bits);
            for pair in self.keys.chunks_exact(2) {
                high ^= mix64(low ^ pair[0]) & self.high_mask;
                low ^= mix64(high ^ pair[1]) & self.low_mask;
            }
            x = high << self.low_bits | low;
            if x < self.n {
                return x;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn images(n: u64, seed: u64) -> Vec<u64> {
        let p = Permutation::new(n, seed, &[7]);
        (0..n).map(|i| p.apply(i)).collect()
    }

    #[test]
    fn every_size_is_a_bijection() {
        let near_powers = (1..=16).flat_map(|k| [(1u64 << k) - 1, 1 << k, (1 << k) + 1]);
        for n in (0..=300).chain(near_powers).chain([1000, 99_991]) {
            for seed in [0, 1, u64::MAX] {
                let mut seen = images(n, seed);
                seen.sort_unstable();
                assert_eq!(seen, (0..n).collect::<Vec<_>>(), "n = {n}, seed = {seed}");
            }
        }
    }

    #[test]
    fn huge_sizes_stay_inside() {
        for n in [(1 << 40) + 1, u64::MAX / 2, u64::MAX - 1] {
            let p = Permutation::new(n, 3, &[0]);
            let a: std::collections::HashSet<u64> = (0..1000).map(|i| p.apply(i)).collect();
            assert_eq!(a.len(), 1000);
            assert!(a.iter().all(|x| *x < n));
        }
    }

    /// Each value should come first equally often. Bound: chi-square with n - 1 degrees of freedom, p < 1e-6.
    #[test]
    fn small_sizes_are_fair() {
        for (n, bound) in [(2, 24.0), (3, 28.0), (5, 34.0), (8, 41.0), (17, 61.0)] {
            let trials = 20_000;
            for position in [0, n - 1] {
                let mut count = vec![0f64; n as usize];
                for seed in 0..trials {
                    count[Permutation::new(n, seed, &[5]).apply(position) as usize] += 1.0;
                }
                let mean = trials as f64 / n as f64;
                let chi2: f64 = count.iter().map(|c| (c - mean).powi(2) / mean).sum();
                assert!(chi2 < bound, "n = {n}, position {position}: chi2 = {chi2}");
            }
        }
    }

    /// Neighbours must not stay neighbours, and another seed or counter must give another order.
    #[test]
    fn it_shuffles() {
        let n = 10_000;
        let a = images(n, 1);
        assert!(a.windows(2).filter(|w| w[0].abs_diff(w[1]) == 1).count() < 20);
        assert!(a.iter().enumerate().filter(|(i, x)| *i as u64 == **x).count() < 12);
        let same = |b: &[u64]| a.iter().zip(b).filter(|(x, y)| x == y).count();
        assert!(same(&images(n, 2)) < 12);
        let p = Permutation::new(n, 1, &[8]);
        assert!(same(&(0..n).map(|i| p.apply(i)).collect::<Vec<_>>()) < 12);
    }

    /// The order is part of the checkpoint format: a changed number here breaks every run that resumes.
    #[test]
    fn the_order_never_changes() {
        assert_eq!(hash(1, &[2, 3]), 0x761d_4273_c487_3cb9);
        assert_eq!(images(10, 42), [0, 1, 6, 9, 8, 3, 2, 7, 5, 4]);
    }

    #[test]
    fn hash_tells_counters_apart() {
        let all = [hash(1, &[]), hash(1, &[0]), hash(1, &[0, 0]), hash(1, &[1, 2]), hash(1, &[2, 1]), hash(0, &[1, 2])];
        let distinct: std::collections::HashSet<u64> = all.into_iter().collect();
        assert_eq!(distinct.len(), all.len());
    }
}
