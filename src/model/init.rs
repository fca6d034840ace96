//! Initial values: each number is a function of the seed, the parameter's name and its own index, so that any process can
//! make any part of any parameter, in any order.

use super::config::ModelConfig;
use super::params::{Init, ParamSpec};

/// Values of one parameter, row-major.
pub fn initial_values(spec: &ParamSpec, cfg: &ModelConfig, seed: u64) -> Vec<f32> {
    let n = spec.numel();
    match spec.init {
        Init::Const(value) => vec![value; n],
        Init::BalancingBiases => {
            let mut biases = vec![0.0; n];
            if let Some(skip) = biases.last_mut() {
                *skip = -1.0;
            }
            biases
        }
        Init::Normal | Init::Embedding => {
            let key = stream_key(seed, &spec.name);
            let mut values: Vec<f32> = (0..n as u64).map(|i| (normal(key, i) * cfg.initializer_range) as f32).collect();
            if let (Init::Embedding, Some(pad)) = (spec.init, cfg.pad_token_id) {
                let width = cfg.hidden_size;
                values[pad as usize * width..][..width].fill(0.0);
            }
            values
        }
    }
}

/// One independent stream of random numbers per name.
fn stream_key(seed: u64, name: &str) -> u64 {
    mix(seed ^ twox_hash::XxHash3_64::oneshot(name.as_bytes()))
}

/// The finaliser of SplitMix64: a bijection of u64 whose outputs for consecutive inputs look independent.
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Number `counter` of a stream, uniform in (0, 1).
fn uniform(key: u64, counter: u64) -> f64 {
    let bits = mix(key.wrapping_add(counter.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15)));
    ((bits >> 11) as f64 + 0.5) / (1u64 << 53) as f64
}

/// Standard normal number `i` of a stream (Box-Muller: numbers 2j and 2j + 1 share a radius).
fn normal(key: u64, i: u64) -> f64 {
    let (pair, second) = (i & !1, i & 1 == 1);
    let radius = (-2.0 * uniform(key, pair).ln()).sqrt();
    let angle = std::f64::consts::TAU * uniform(key, pair + 1);
    radius * if second { angle.sin() } else { angle.cos() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{params::ParamTable, presets};

    #[test]
    fn normal_numbers_have_the_right_moments() {
        let n = 200_000;
        let x: Vec<f64> = (0..n).map(|i| normal(stream_key(1, "a"), i)).collect();
        let moment = |p: i32| x.iter().map(|v| v.powi(p)).sum::<f64>() / n as f64;
        assert!(moment(1).abs() < 0.01 && (moment(2) - 1.0).abs() < 0.02);
        assert!(moment(3).abs() < 0.05 && (moment(4) - 3.0).abs() < 0.1);
    }

    #[test]
    fn values_depend_on_seed_and_name_only() {
        let cfg = presets::demo_6m();
        let table = ParamTable::new(&cfg);
        let q = |block: usize, seed| initial_values(&table.specs[table.blocks[block].attention.q], &cfg, seed);
        assert_eq!(q(0, 1), q(0, 1));
        assert_ne!(q(0, 1), q(0, 2));
        assert_ne!(q(0, 1), q(1, 1));
        let biases = initial_values(&table.specs[table.blocks[0].moe.balancing_biases], &cfg, 1);
        assert_eq!(biases, [vec![0.0; cfg.num_experts], vec![-1.0]].concat());
    }

    #[test]
    fn the_padding_row_is_zero() {
        let cfg = ModelConfig { pad_token_id: Some(3), ..presets::demo_6m() };
        let table = ParamTable::new(&cfg);
        let e = initial_values(&table.specs[table.embed], &cfg, 1);
        let d = cfg.hidden_size;
        assert!(e[3 * d..4 * d].iter().all(|v| *v == 0.0) && e[2 * d] != 0.0 && e[4 * d] != 0.0);
    }
}
