//! Scalar functions, written so that loops over them vectorise.

/// Splits x into `n ln 2 + r`, n whole and |r| <= ln 2 / 2: r, and a number whose low bits are those of n.
#[inline(always)]
fn reduce(x: f32) -> (f32, f32) {
    // ln 2 in two parts; n * LN2_HI is exact for the n that occur.
    const LN2_HI: f32 = 0.693_359_4;
    const LN2_LO: f32 = -2.121_944_4e-4;
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    (x - n * LN2_HI - n * LN2_LO, shifted)
}

/// Adding 1.5 * 2^23 rounds to the nearest integer and leaves it in the low bits.
const ROUND: f32 = 12_582_912.0;

/// e^r on the reduced range: Taylor terms to r^7, the remainder is below 1e-8.
#[inline(always)]
fn exp_of_reduced(r: f32) -> f32 {
    let p = 1.0 / 5040.0;
    let p = p * r + 1.0 / 720.0;
    let p = p * r + 1.0 / 120.0;
    let p = p * r + 1.0 / 24.0;
    let p = p * r + 1.0 / 6.0;
    let p = p * r + 0.5;
    let p = p * r + 1.0;
    p * r + 1.0
}

/// 2^n for the second number of `reduce`; n from -126 to 127.
#[inline(always)]
fn power_of_two(shifted: f32) -> f32 {
    f32::from_bits((shifted.to_bits() << 23).wrapping_add(1f32.to_bits()))
}

/// Below this e^x is no normal number.
const LEAST: f32 = -87.3;

/// e^x to about 1 ulp, without a call: range reduction to [-ln2/2, ln2/2] and a polynomial.
/// Below -87.3 it is 0, above 88.7 infinity.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    let (r, shifted) = reduce(x.clamp(LEAST, 88.72));
    // 2^n in two factors, since n may be 128.
    let n = (shifted - ROUND) as i32;
    let half = n >> 1;
    let scale = |n: i32| f32::from_bits(((n + 127) as u32) << 23);
    let y = exp_of_reduced(r) * scale(half) * scale(n - half);
    let y = if x < LEAST { 0.0 } else { y };
    let y = if x > 88.72 { f32::INFINITY } else { y };
    if x.is_nan() { x } else { y }
}

/// e^x for x <= 0, to about 2e-7 of its value; below -87.3 it stays at e^-87.3 (1e-38). NaN stays NaN.
#[inline(always)]
pub fn exp_of_negative(x: f32) -> f32 {
    let (r, shifted) = reduce(if x < LEAST { LEAST } else { x });
    exp_of_reduced(r) * power_of_two(shifted)
}

/// e^x for x below 88: `exp` with what a softmax over masked scores does not need left out. 0 below -87.3, NaN stays NaN.
#[inline(always)]
pub fn exp_of_score(x: f32) -> f32 {
    let (r, shifted) = reduce(if LEAST > x { LEAST } else { x });
    // The terms of `exp_of_reduced`, paired so that fewer of them wait for each other.
    let r2 = r * r;
    let low = (1.0 + r) + r2 * (0.5 + r * (1.0 / 6.0));
    let high = (1.0 / 24.0 + r * (1.0 / 120.0)) + r2 * (1.0 / 720.0 + r * (1.0 / 5040.0));
    let y = (low + r2 * r2 * high) * power_of_two(shifted);
    if x < LEAST { 0.0 } else { y }
}

/// The larger of two numbers in one instruction, unlike `f32::max`. A NaN in b is passed over.
#[inline(always)]
pub fn larger(a: f32, b: f32) -> f32 {
    if b > a { b } else { a }
}

#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// Distribution function of the standard normal, to a few units of 1e-7 of itself, also where it is tiny:
/// `exp(-z^2 / 2) t P(t)` with `z = |x|`, `t = 1 / (1 + 0.3 z)` is the part beyond z. P is the least-squares fit of the relative
/// error (4e-9) over z in [0, 13.5].
#[inline(always)]
pub fn normal_cdf(x: f32) -> f32 {
    let z = x.abs();
    let t = 1.0 / (1.0 + 0.3 * z);
    let p = -2.088_185e-2;
    let p = p * t + 1.138_260_6e-1;
    let p = p * t - 2.314_463_7e-1;
    let p = p * t + 1.960_357_8e-1;
    let p = p * t - 8.289_886e-2;
    let p = p * t + 9.798_325_4e-2;
    let p = p * t + 7.777_434e-2;
    let p = p * t + 1.103_632_3e-1;
    let p = p * t + 1.195_57e-1;
    let p = p * t + 1.196_874_2e-1;
    let beyond = exp(-0.5 * z * z) * t * p;
    if x > 0.0 { 1.0 - beyond } else { beyond }
}

/// Exact (erf) GELU.
#[inline(always)]
pub fn gelu(x: f32) -> f32 {
    x * normal_cdf(x)
}

/// Derivative of `gelu`.
#[inline(always)]
pub fn gelu_derivative(x: f32) -> f32 {
    const INV_SQRT_2PI: f32 = 0.398_942_3;
    normal_cdf(x) + x * INV_SQRT_2PI * exp(-0.5 * x * x)
}

/// Sum of `f(i)` for i in 0..n in eight interleaved lanes: vectorises, and more accurate than one running sum.
#[inline(always)]
pub fn lane_sum(n: usize, f: impl Fn(usize) -> f32) -> f32 {
    let mut lanes = [0f32; 8];
    let whole = n / 8 * 8;
    for i in (0..whole).step_by(8) {
        for (l, lane) in lanes.iter_mut().enumerate() {
            *lane += f(i + l);
        }
    }
    for i in whole..n {
        lanes[i - whole] += f(i);
    }
    ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) + ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_close_everywhere() {
        for i in -8790..8900 {
            let x = i as f32 * 0.00993;
            let exact = (x as f64).exp();
            assert!((exp(x) as f64 - exact).abs() <= 2.5e-7 * exact, "exp({x}) = {} not {exact}", exp(x));
        }
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-1e30), 0.0);
        assert_eq!(exp(1e30), f32::INFINITY);
        assert!(exp(f32::NAN).is_nan());
        assert_eq!(exp(0.0), 1.0);
    }

    #[test]
    fn gelu_and_its_derivative() {
        for i in -60..60 {
            let x = i as f64 * 0.1;
            let exact = |x: f64| 0.5 * x * libm::erfc(-x / 2f64.sqrt());
            assert!((gelu(x as f32) as f64 - exact(x)).abs() < 1e-6);
            let slope = (exact(x + 1e-5) - exact(x - 1e-5)) / 2e-5;
            assert!((gelu_derivative(x as f32) as f64 - slope).abs() < 1e-6, "{x}");
            let tail = 0.5 * libm::erfc(-x / 2f64.sqrt());
            assert!((normal_cdf(x as f32) as f64 / tail - 1.0).abs() < 2e-6, "{x}");
        }
    }
}
