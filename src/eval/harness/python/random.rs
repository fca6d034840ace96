//! CPython's `random.Random`: MT19937 with `init_by_array` seeding, and the methods that few-shot choice and the bootstrap use.

use std::collections::HashSet;

const N: usize = 624;
const M: usize = 397;

/// `random.Random(seed)` for a non-negative seed.
#[derive(Clone)]
pub struct Random {
    state: [u32; N],
    next: usize,
}

impl Random {
    /// Seeds as CPython seeds from an int: its 32-bit digits, lowest first, are the key.
    pub fn new(seed: u64) -> Self {
        let (low, high) = (seed as u32, (seed >> 32) as u32);
        let key: &[u32] = if high == 0 { &[low] } else { &[low, high] };
        let mut state = [0u32; N];
        state[0] = 19_650_218;
        for i in 1..N {
            state[i] = 1_812_433_253u32.wrapping_mul(state[i - 1] ^ (state[i - 1] >> 30)).wrapping_add(i as u32);
        }
        let (mut i, mut j) = (1, 0);
        for _ in 0..N.max(key.len()) {
            let mixed = (state[i - 1] ^ (state[i - 1] >> 30)).wrapping_mul(1_664_525);
            state[i] = (state[i] ^ mixed).wrapping_add(key[j]).wrapping_add(j as u32);
            i += 1;
            j = (j + 1) % key.len();
            if i == N {
                state[0] = state[N - 1];
                i = 1;
            }
        }
        for _ in 0..N - 1 {
            let mixed = (state[i - 1] ^ (state[i - 1] >> 30)).wrapping_mul(1_566_083_941);
            state[i] = (state[i] ^ mixed).wrapping_sub(i as u32);
            i += 1;
            if i == N {
                state[0] = state[N - 1];
                i = 1;
            }
        }
        state[0] = 0x8000_0000;
        Self { state, next: N }
    }

    fn refill(&mut self) {
        for i in 0..N {
            let y = (self.state[i] & 0x8000_0000) | (self.state[(i + 1) % N] & 0x7fff_ffff);
            let twist = if y & 1 == 1 { 0x9908_b0df } else { 0 };
            self.state[i] = self.state[(i + M) % N] ^ (y >> 1) ^ twist;
        }
        self.next = 0;
    }

    fn word(&mut self) -> u32 {
        if self.next == N {
            self.refill();
        }
        let mut y = self.state[self.next];
        self.next += 1;
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c_5680;
        y ^= (y << 15) & 0xefc6_0000;
        y ^ (y >> 18)
    }

    /// `getrandbits(bits)` for 1 to 64 bits.
    pub fn getrandbits(&mut self, bits: u32) -> u64 {
        assert!((1..=64).contains(&bits), "getrandbits of {bits} bits");
        if bits <= 32 {
            return u64::from(self.word() >> (32 - bits));
        }
        let low = u64::from(self.word());
        let high = u64::from(self.word() >> (64 - bits));
        (high << 32) | low
    }

    /// `random()`: 53 random bits in [0, 1).
    pub fn random(&mut self) -> f64 {
        let a = f64::from(self.word() >> 5);
        let b = f64::from(self.word() >> 6);
        (a * 67_108_864.0 + b) * (1.0 / 9_007_199_254_740_992.0)
    }

    /// `_randbelow(n)`, n > 0: rejection of bit strings.
    pub fn below(&mut self, n: usize) -> usize {
        assert!(n > 0, "a random number below 0");
        let bits = usize::BITS - n.leading_zeros();
        loop {
            let r = self.getrandbits(bits) as usize;
            if r < n {
                return r;
            }
        }
    }

    /// Indices of `sample(range(n), k)`, k <= n.
    pub fn sample(&mut self, n: usize, k: usize) -> Vec<usize> {
        assert!(k <= n, "a sample of {k} out of {n}");
        // CPython keeps a list of the rest where that takes less memory than a set of the chosen.
        let mut set_size = 21u64;
        if k > 5 {
            set_size += 4u64.pow((((3 * k) as f64).ln() / 4f64.ln()).ceil() as u32);
        }
        if n as u64 <= set_size {
            let mut pool: Vec<usize> = (0..n).collect();
            return (0..k)
                .map(|i| {
                    let j = self.below(n - i);
                    let last = pool[n - i - 1];
                    std::mem::replace(&mut pool[j], last)
                })
                .collect();
        }
        let mut chosen = HashSet::new();
        (0..k)
            .map(|_| {
                loop {
                    let j = self.below(n);
                    if chosen.insert(j) {
                        return j;
                    }
                }
            })
            .collect()
    }

    /// Index of one draw of `choices(population, k=...)`: floor(random() * n).
    pub fn choice_index(&mut self, n: usize) -> usize {
        (self.random() * n as f64).floor() as usize
    }

    /// `shuffle(items)`
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            let j = self.below(i + 1);
            items.swap(i, j);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // All vectors are CPython's.
    #[test]
    fn words() {
        let mut r = Random::new(1234);
        let words: Vec<u64> = (0..4).map(|_| r.getrandbits(32)).collect();
        assert_eq!(words, [4150886329, 3342196574, 1892932127, 501869158]);
        let mut r = Random::new(1 << 40);
        assert_eq!((r.getrandbits(64), r.getrandbits(5)), (6515814827016330625, 21));
    }

    #[test]
    fn samples() {
        let mut r = Random::new(1234);
        assert_eq!(r.sample(7473, 5), [6374, 3610, 957, 61, 742]);
        assert_eq!(r.sample(7473, 5), [7462, 6610, 4769, 286, 5501]);
        assert_eq!(r.sample(7473, 5), [5677, 687, 806, 6279, 2905]);
        let want = [
            902, 239, 15, 185, 71, 171, 201, 726, 484, 35, 63, 32, 708, 991, 949, 304, 186, 374, 234, 29, 1030, 996, 511, 132,
            1108,
        ];
        assert_eq!(Random::new(1234).sample(1119, 25), want);
        assert_eq!(Random::new(1234).sample(1267, 6), [902, 239, 15, 185, 1192, 71]);
        let mut r = Random::new(1234);
        assert_eq!(r.sample(10, 5), [7, 1, 0, 9, 4]);
        assert_eq!(r.sample(10, 5), [0, 1, 8, 6, 2]);
    }

    #[test]
    fn choices_and_shuffle() {
        let mut r = Random::new(7);
        let drawn: Vec<usize> = (0..8).map(|_| r.choice_index(60)).collect();
        assert_eq!(drawn, [19, 9, 39, 4, 32, 21, 3, 30]);
        let mut items: Vec<usize> = (0..10).collect();
        Random::new(1337).shuffle(&mut items);
        assert_eq!(items, [0, 3, 7, 2, 1, 6, 4, 5, 8, 9]);
    }
}
