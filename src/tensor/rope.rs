//! Angles of rotary position embedding (spec 1.4), alike on all backends.

/// Angle of position 1 for each pair of channels: `theta^(-2j / rotary_dim)`. In f32, as everyone's are.
pub fn inverse_frequencies(rotary_dim: usize, theta: f64) -> Vec<f32> {
    (0..rotary_dim / 2).map(|j| 1.0 / theta.powf((2 * j) as f64 / rotary_dim as f64) as f32).collect()
}
