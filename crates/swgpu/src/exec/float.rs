//! Vector instructions on 32-bit floats: one result of 32 bits from up to three sources.
//!
//! Rounding is to nearest even and denormals are kept, the modes that clang sets for gfx942. The transcendental instructions
//! take and give denormals as 0, as the hardware does; their last bit may differ from the hardware's.

use half::f16;
use multiversion::multiversion;

use super::{Lanes, WAVE};
use crate::isa::names::NarrowOp;

/// Denormal numbers become 0 of the same sign.
#[inline(always)]
pub fn flush(x: f32) -> f32 {
    if x.is_subnormal() { 0f32.copysign(x) } else { x }
}

/// `x * 2^exponent`, rounded once.
#[inline(always)]
pub fn scale_by_power(x: f32, exponent: i32) -> f32 {
    let power = f64::from_bits(((exponent.clamp(-400, 400) + 1023) as u64) << 52);
    (f64::from(x) * power) as f32
}

/// Unbiased exponent field plus 127, as the ISA's `exponent()`.
#[inline(always)]
pub fn exponent(x: f32) -> i32 {
    (x.to_bits() >> 23 & 0xff) as i32
}

fn frexp_exponent(x: f32) -> i32 {
    if x == 0.0 || !x.is_finite() {
        return 0;
    }
    let wide = f64::from(x);
    ((wide.to_bits() >> 52 & 0x7ff) as i32) - 1022
}

fn frexp_mantissa(x: f32) -> f32 {
    if x == 0.0 || !x.is_finite() { x } else { scale_by_power(x, -frexp_exponent(x)) }
}

/// `v_div_fixup_f32`: the quotient with the special cases of division put in.
pub fn div_fixup(quotient: f32, denominator: f32, numerator: f32) -> f32 {
    let sign = (denominator.to_bits() ^ numerator.to_bits()) & 0x8000_0000;
    let signed = |magnitude: f32| f32::from_bits(magnitude.to_bits() & 0x7fff_ffff | sign);
    let quiet = |x: f32| f32::from_bits(x.to_bits() | 0x0040_0000);
    if numerator.is_nan() {
        quiet(numerator)
    } else if denominator.is_nan() {
        quiet(denominator)
    } else if (numerator == 0.0 && denominator == 0.0) || (numerator.is_infinite() && denominator.is_infinite()) {
        f32::from_bits(0xffc0_0000)
    } else if denominator == 0.0 || numerator.is_infinite() {
        signed(f32::INFINITY)
    } else if denominator.is_infinite() || numerator == 0.0 || exponent(numerator) - exponent(denominator) < -150 {
        signed(0.0)
    } else if quotient.is_nan() {
        // The Newton steps overflowed: infinity minus infinity.
        signed(f32::INFINITY)
    } else {
        signed(quotient)
    }
}

/// Runs `op` on all lanes, or says that it is none of the float instructions.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+avx2+fma", "x86_64+avx2+fma"))]
pub fn run(op: NarrowOp, a: &Lanes, b: &Lanes, c: &Lanes, out: &mut Lanes) -> bool {
    use NarrowOp::*;
    /// Float sources, float result.
    macro_rules! float {
        (|$x:ident $(, $y:ident $(, $z:ident)?)?| $value:expr) => {
            for lane in 0..WAVE {
                let $x = f32::from_bits(a[lane]);
                $(let $y = f32::from_bits(b[lane]); $(let $z = f32::from_bits(c[lane]);)?)?
                let value: f32 = $value;
                out[lane] = value.to_bits();
            }
        };
    }
    /// Raw sources, raw result.
    macro_rules! bits {
        (|$x:ident $(, $y:ident)?| $value:expr) => {
            for lane in 0..WAVE {
                let $x = a[lane];
                $(let $y = b[lane];)?
                out[lane] = $value;
            }
        };
    }
    match op {
        v_add_f32 => float!(|x, y| x + y),
        v_sub_f32 => float!(|x, y| x - y),
        v_subrev_f32 => float!(|x, y| y - x),
        v_mul_f32 => float!(|x, y| x * y),
        v_mul_legacy_f32 => float!(|x, y| if x == 0.0 || y == 0.0 { 0.0 } else { x * y }),
        v_fma_f32 | v_fmac_f32 | v_fmaak_f32 | v_fmamk_f32 => float!(|x, y, z| x.mul_add(y, z)),
        v_mad_f32 => float!(|x, y, z| x * y + z),
        v_max_f32 => float!(|x, y| x.max(y)),
        v_min_f32 => float!(|x, y| x.min(y)),
        v_max3_f32 => float!(|x, y, z| x.max(y).max(z)),
        v_min3_f32 => float!(|x, y, z| x.min(y).min(z)),
        v_med3_f32 => {
            float!(|x, y, z| if x.is_nan() || y.is_nan() || z.is_nan() { x.min(y).min(z) } else { x.max(y).min(x.min(y).max(z)) })
        }
        v_rcp_f32 | v_rcp_iflag_f32 => float!(|x| flush(1.0 / flush(x))),
        v_rsq_f32 => float!(|x| flush((1.0 / f64::from(flush(x)).sqrt()) as f32)),
        v_sqrt_f32 => float!(|x| flush(x).sqrt()),
        v_exp_f32 => float!(|x| flush(f64::from(flush(x)).exp2() as f32)),
        v_log_f32 => float!(|x| f64::from(flush(x)).log2() as f32),
        v_sin_f32 => float!(|x| (f64::from(x).fract() * std::f64::consts::TAU).sin() as f32),
        v_cos_f32 => float!(|x| (f64::from(x).fract() * std::f64::consts::TAU).cos() as f32),
        v_rndne_f32 => float!(|x| x.round_ties_even()),
        v_trunc_f32 => float!(|x| x.trunc()),
        v_floor_f32 => float!(|x| x.floor()),
        v_ceil_f32 => float!(|x| x.ceil()),
        v_fract_f32 => float!(|x| (x - x.floor()).min(f32::from_bits(0x3f7f_ffff))),
        v_frexp_mant_f32 => float!(|x| frexp_mantissa(x)),
        v_div_fixup_f32 => float!(|x, y, z| div_fixup(x, y, z)),
        v_ldexp_f32 => bits!(|x, y| scale_by_power(f32::from_bits(x), y as i32).to_bits()),
        v_frexp_exp_i32_f32 => bits!(|x| frexp_exponent(f32::from_bits(x)) as u32),
        v_cvt_f32_i32 => bits!(|x| (x as i32 as f32).to_bits()),
        v_cvt_f32_u32 => bits!(|x| (x as f32).to_bits()),
        v_cvt_i32_f32 => bits!(|x| f32::from_bits(x) as i32 as u32),
        v_cvt_u32_f32 => bits!(|x| f32::from_bits(x) as u32),
        v_cvt_rpi_i32_f32 => bits!(|x| (f32::from_bits(x) + 0.5).floor() as i32 as u32),
        v_cvt_flr_i32_f32 => bits!(|x| f32::from_bits(x).floor() as i32 as u32),
        v_cvt_f32_ubyte0 => bits!(|x| ((x & 0xff) as f32).to_bits()),
        v_cvt_f32_ubyte1 => bits!(|x| ((x >> 8 & 0xff) as f32).to_bits()),
        v_cvt_f32_ubyte2 => bits!(|x| ((x >> 16 & 0xff) as f32).to_bits()),
        v_cvt_f32_ubyte3 => bits!(|x| ((x >> 24) as f32).to_bits()),
        v_cvt_f32_f16 => bits!(|x| f16::from_bits(x as u16).to_f32().to_bits()),
        v_cvt_f16_f32 => bits!(|x| u32::from(f16::from_f32(f32::from_bits(x)).to_bits())),
        v_cvt_pkrtz_f16_f32 => bits!(|x, y| u32::from(toward_zero(x)) | u32::from(toward_zero(y)) << 16),
        _ => return false,
    }
    true
}

/// A float cut to half precision, rounded towards 0.
fn toward_zero(bits: u32) -> u16 {
    let x = f32::from_bits(bits);
    let near = f16::from_f32(x);
    match near.to_f32().abs() > x.abs() {
        true => near.to_bits() - 1,
        false => near.to_bits(),
    }
}
