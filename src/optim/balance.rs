//! Expert balancing: the biases that a router adds before it chooses move with the load of the experts, never with the loss.
//!
//! Once a step, over the counts of the whole global batch: `g_e = counts_e / total - 1/E`, where `total` includes the tokens
//! that chose the skip class, and a controller turns g into a new bias. An expert with too many tokens loses bias.
//! Only the E real experts move; the skip class keeps its bias (`include_skip` makes it an ordinary class with target
//! `1/(E+1)`).
//!
//! | rule | update, s = gain ramp |
//! |---|---|
//! | `adamw` | `m = b1 m + (1-b1) g`, `v = b2 v + (1-b2) g^2`, `bias -= s lr m^ / (sqrt(v^) + eps)` |
//! | `sign` | `bias -= s u sign(g)` |
//! | `pid` | `bias = start - s (Kp g + Ki sum(g) + Kd (g - g_before))` |
//!
//! The gain ramp rises linearly to 1 over `warmup` updates.

use anyhow::{Result, ensure};

/// How a router's load error becomes a bias.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Rule {
    /// AdamW on the load error, without weight decay.
    AdamW { lr: f64, beta1: f64, beta2: f64, eps: f64 },
    /// A fixed step against the sign of the load error.
    Sign { step: f64 },
    /// Proportional, integral and differential parts of the load error.
    Pid { kp: f64, ki: f64, kd: f64 },
}

impl Default for Rule {
    /// AdamW with lr 1e-3, betas (0.9, 0.999), eps 1e-8.
    fn default() -> Self {
        Rule::AdamW { lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8 }
    }
}

impl Rule {
    /// Names of the vectors of state that this rule keeps for each router, each as long as the biases.
    pub fn slots(&self) -> &'static [&'static str] {
        match self {
            Rule::AdamW { .. } => &["m", "v"],
            Rule::Sign { .. } => &[],
            Rule::Pid { .. } => &["integral", "previous", "start"],
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct BalanceConfig {
    pub rule: Rule,
    /// Updates over which the gain rises linearly to 1; 0 or 1 = full gain from the first.
    pub warmup: u64,
    /// Balance the skip class too.
    pub include_skip: bool,
}

/// The controllers of all routers, and their state.
#[derive(Debug, Clone, PartialEq)]
pub struct Balancer {
    config: BalanceConfig,
    updates: u64,
    /// `[block][slot][E + 1]`
    state: Vec<Vec<Vec<f32>>>,
}

impl Balancer {
    /// Fresh state for routers whose biases now are `biases`, `[block][E + 1]`.
    pub fn new(config: BalanceConfig, biases: &[Vec<f32>]) -> Self {
        let slot = |name: &&str, b: &Vec<f32>| if *name == "start" { b.clone() } else { vec![0.0; b.len()] };
        let state = biases.iter().map(|b| config.rule.slots().iter().map(|name| slot(name, b)).collect()).collect();
        Self { config, updates: 0, state }
    }

    pub fn config(&self) -> &BalanceConfig {
        &self.config
    }
    /// Updates made so far. Goes to the checkpoint with the state.
    pub fn updates(&self) -> u64 {
        self.updates
    }
    pub fn set_updates(&mut self, updates: u64) {
        self.updates = updates;
    }
    /// State of slot `Rule::slots()[slot]` of one block, `[E + 1]`.
    pub fn slot(&self, block: usize, slot: usize) -> &[f32] {
        &self.state[block][slot]
    }
    pub fn slot_mut(&mut self, block: usize, slot: usize) -> &mut [f32] {
        &mut self.state[block][slot]
    }

    /// One update of all routers. `biases[block]` and `counts[block]` are `[E + 1]`, the skip class last; the counts are
    /// those of the global batch. A router without a token keeps its biases and state; a batch without a token is no update.
    ///
    /// # Errors
    /// When the shapes are not those that the balancer was made for.
    pub fn update(&mut self, biases: &mut [Vec<f32>], counts: &[Vec<u64>]) -> Result<()> {
        let blocks = self.state.len();
        ensure!(
            biases.len() == blocks && counts.len() == blocks,
            "expert balancing was made for {blocks} blocks, and got {} biases and {} counts",
            biases.len(),
            counts.len()
        );
        for (b, c) in biases.iter().zip(counts) {
            ensure!(b.len() == c.len() && b.len() >= 2, "a router has {} biases and {} counts", b.len(), c.len());
        }
        if counts.iter().flatten().all(|c| *c == 0) {
            return Ok(());
        }
        self.updates += 1;
        for ((state, biases), counts) in self.state.iter_mut().zip(biases).zip(counts) {
            ensure!(state.iter().all(|s| s.len() == biases.len()), "balancing state of another number of experts");
            let Some(g) = load_error(counts, self.config.include_skip) else { continue };
            let moved = &mut biases[..g.len()];
            control(self.config.rule, gain(self.updates, self.config.warmup), self.updates, &g, state, moved);
        }
        Ok(())
    }
}

/// `counts / total - 1 / classes` of the classes that are balanced; None without a token.
/// In f64 and rounded once: then the error of a perfectly loaded expert is exactly 0, for counts of any size.
fn load_error(counts: &[u64], include_skip: bool) -> Option<Vec<f32>> {
    let total: u64 = counts.iter().sum();
    let classes = if include_skip { counts.len() } else { counts.len() - 1 };
    let target = 1.0 / classes as f64;
    (total > 0).then(|| counts[..classes].iter().map(|c| (*c as f64 / total as f64 - target) as f32).collect())
}

/// Gain of update `t`, counted from 1.
fn gain(t: u64, warmup: u64) -> f64 {
    if t < warmup { t as f64 / warmup as f64 } else { 1.0 }
}

fn control(rule: Rule, gain: f64, t: u64, g: &[f32], state: &mut [Vec<f32>], biases: &mut [f32]) {
    match (rule, state) {
        (Rule::AdamW { lr, beta1, beta2, eps }, [m, v]) => {
            // Factors are formed in f64 and rounded once; the state is f32 throughout.
            let correction = |beta: f64| (1.0 - beta.powf(t as f64)) as f32;
            let (c1, c2) = (correction(beta1), correction(beta2));
            let (keep_m, add_m) = (beta1 as f32, (1.0 - beta1) as f32);
            let (keep_v, add_v) = (beta2 as f32, (1.0 - beta2) as f32);
            let (step, eps) = ((gain * lr) as f32, eps as f32);
            for (i, g) in g.iter().enumerate() {
                m[i] = m[i] * keep_m + g * add_m;
                v[i] = v[i] * keep_v + g * g * add_v;
                biases[i] -= step * ((m[i] / c1) / ((v[i] / c2).sqrt() + eps));
            }
        }
        (Rule::Sign { step }, []) => {
            for (bias, g) in biases.iter_mut().zip(g) {
                // f32::signum(0.0) is 1: a balanced expert would drift.
                let sign = f32::from(*g > 0.0) - f32::from(*g < 0.0);
                *bias -= (gain * step) as f32 * sign;
            }
        }
        (Rule::Pid { kp, ki, kd }, [integral, previous, start]) => {
            let (kp, ki, kd) = ((gain * kp) as f32, (gain * ki) as f32, (gain * kd) as f32);
            for (i, g) in g.iter().enumerate() {
                if t == 1 {
                    // Nothing came before the first error: no difference either.
                    previous[i] = *g;
                }
                integral[i] += g;
                biases[i] = start[i] - (kp * g + ki * integral[i] + kd * (g - previous[i]));
                previous[i] = *g;
            }
        }
        (rule, state) => unreachable!("{} slots of state for {rule:?}", state.len()),
    }
}

/// How evenly a router spreads its tokens: the numbers that go to the metrics.
#[derive(Debug, Clone, PartialEq)]
pub struct ExpertLoad {
    /// Share of all tokens that went to each class, the skip class last; zeros without a token.
    pub fractions: Vec<f64>,
    /// H(p) / ln E over the real experts: 1 = perfectly even, 0 = one expert does everything. 1 for a single expert.
    pub entropy: f64,
    /// Load of the busiest expert over the mean load, minus 1: 0 = perfectly even, E - 1 = one expert does everything.
    pub max_violation: f64,
}

impl ExpertLoad {
    /// `counts` is `[E + 1]`, the skip class last.
    pub fn of(counts: &[u64]) -> Self {
        let total: u64 = counts.iter().sum();
        let fractions = counts.iter().map(|c| if total > 0 { *c as f64 / total as f64 } else { 0.0 }).collect();
        let real = &counts[..counts.len().saturating_sub(1)];
        let routed: u64 = real.iter().sum();
        if routed == 0 {
            return Self { fractions, entropy: 0.0, max_violation: 0.0 };
        }
        let share = real.iter().filter(|c| **c > 0).map(|c| *c as f64 / routed as f64);
        let h: f64 = share.map(|p| -p * p.ln()).sum();
        // abs: a sum of nothing but -1 ln 1 is -0.
        let entropy = if real.len() > 1 { h.abs() / (real.len() as f64).ln() } else { 1.0 };
        let busiest = real.iter().copied().max().unwrap_or(0) as f64;
        Self { fractions, entropy, max_violation: busiest * real.len() as f64 / routed as f64 - 1.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn balancer(rule: Rule, warmup: u64, include_skip: bool) -> Balancer {
        Balancer::new(BalanceConfig { rule, warmup, include_skip }, &[vec![0.0, 0.0, -1.0]])
    }

    #[test]
    fn sign_moves_against_the_load_and_rests_when_even() {
        let mut b = balancer(Rule::Sign { step: 0.5 }, 0, false);
        let mut biases = vec![vec![0.0, 0.0, -1.0]];
        b.update(&mut biases, &[vec![3, 1, 0]]).unwrap();
        assert_eq!(biases, [[-0.5, 0.5, -1.0]]);
        b.update(&mut biases, &[vec![2, 2, 0]]).unwrap();
        assert_eq!(biases, [[-0.5, 0.5, -1.0]]);
        // Tokens of the skip class count in the total: here both experts have too few.
        b.update(&mut biases, &[vec![1, 1, 2]]).unwrap();
        assert_eq!(biases, [[0.0, 1.0, -1.0]]);
        // As an ordinary class it has target 1/3 and moves too.
        let mut b = balancer(Rule::Sign { step: 0.5 }, 0, true);
        let mut biases = vec![vec![0.0, 0.0, -1.0]];
        b.update(&mut biases, &[vec![1, 1, 2]]).unwrap();
        assert_eq!(biases, [[0.5, 0.5, -1.5]]);
    }

    #[test]
    fn pid_is_the_sum_of_its_three_parts() {
        let mut b = balancer(Rule::Pid { kp: 1.0, ki: 0.5, kd: 0.25 }, 0, false);
        let mut biases = vec![vec![0.0, 0.0, -1.0]];
        // g = +-0.25, then +-0.125.
        b.update(&mut biases, &[vec![6, 2, 0]]).unwrap();
        assert_eq!(biases, [[-0.375, 0.375, -1.0]]);
        b.update(&mut biases, &[vec![5, 3, 0]]).unwrap();
        let want = 0.125 + 0.5 * 0.375 + 0.25 * -0.125;
        assert_eq!(biases, [[-want, want, -1.0]]);
        assert_eq!((b.slot(0, 0), b.slot(0, 1)), (&[0.375, -0.375, 0.0][..], &[0.125, -0.125, 0.0][..]));
        // A model that comes with biases keeps them as the place to start from.
        let mut biases = vec![vec![0.5, 0.25, -1.0]];
        let rule = Rule::Pid { kp: 1.0, ki: 0.0, kd: 0.0 };
        let mut b = Balancer::new(BalanceConfig { rule, ..Default::default() }, &biases);
        b.update(&mut biases, &[vec![6, 2, 0]]).unwrap();
        b.update(&mut biases, &[vec![4, 4, 0]]).unwrap();
        assert_eq!(biases, [[0.5, 0.25, -1.0]]);
    }

    #[test]
    fn the_gain_rises_linearly() {
        let mut b = balancer(Rule::Sign { step: 1.0 }, 4, false);
        let mut biases = vec![vec![0.0, 0.0, -1.0]];
        let mut moved = Vec::new();
        for _ in 0..6 {
            let before = biases[0][1];
            b.update(&mut biases, &[vec![2, 0, 0]]).unwrap();
            moved.push(biases[0][1] - before);
        }
        assert_eq!(moved, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]);
        // With AdamW the first update is lr in size, whatever the load error: here a quarter of it.
        let mut b = balancer(Rule::default(), 4, false);
        let mut biases = vec![vec![0.0, 0.0, -1.0]];
        b.update(&mut biases, &[vec![3, 1, 0]]).unwrap();
        assert!((biases[0][0] + 0.25e-3).abs() < 1e-9 && (biases[0][1] - 0.25e-3).abs() < 1e-9);
        // The controllers' own memory is not ramped: only what reaches the biases is.
        let mut b = balancer(Rule::Pid { kp: 0.0, ki: 1.0, kd: 0.0 }, 2, false);
        let mut biases = vec![vec![0.0, 0.0, -1.0]];
        b.update(&mut biases, &[vec![6, 2, 0]]).unwrap();
        assert_eq!(biases[0][0], -0.125);
        b.update(&mut biases, &[vec![6, 2, 0]]).unwrap();
        assert_eq!(biases[0][0], -0.5);
    }

    #[test]
    fn no_token_no_update() {
        for rule in [Rule::default(), Rule::Sign { step: 1.0 }, Rule::Pid { kp: 1.0, ki: 1.0, kd: 1.0 }] {
            let mut biases = vec![vec![0.1, 0.2, -1.0], vec![0.1, 0.2, -1.0]];
            let mut b = Balancer::new(BalanceConfig { rule, ..Default::default() }, &biases);
            let before = (b.clone(), biases.clone());
            b.update(&mut biases, &[vec![0; 3], vec![0; 3]]).unwrap();
            assert_eq!((b.clone(), biases.clone()), before);
            b.update(&mut biases, &[vec![0; 3], vec![3, 1, 0]]).unwrap();
            assert_eq!(biases[0], before.1[0]);
            assert_ne!(biases[1], before.1[1]);
        }
        let mut b = balancer(Rule::default(), 0, false);
        assert!(b.update(&mut [vec![0.0; 3]], &[vec![1; 4]]).is_err());
        assert!(b.update(&mut [], &[]).is_err());
        assert!(b.update(&mut [vec![0.0; 4]], &[vec![1; 4]]).is_err());
    }

    #[test]
    fn load_statistics() {
        let even = ExpertLoad::of(&[4, 4, 4, 4, 0]);
        assert!((even.entropy - 1.0).abs() < 1e-12 && even.max_violation.abs() < 1e-12);
        let one = ExpertLoad::of(&[8, 0, 0, 0, 8]);
        assert_eq!((one.entropy, one.max_violation, one.fractions[4]), (0.0, 3.0, 0.5));
        let half = ExpertLoad::of(&[4, 4, 0, 0, 0]);
        assert!((half.entropy - 0.5).abs() < 1e-12 && (half.max_violation - 1.0).abs() < 1e-12);
        assert_eq!(ExpertLoad::of(&[5, 0]).entropy, 1.0);
        let none = ExpertLoad::of(&[0, 0, 0]);
        assert_eq!((none.entropy, none.max_violation, none.fractions), (0.0, 0.0, vec![0.0; 3]));
    }
}
