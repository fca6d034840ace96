//! Vector instructions with a 64-bit result or a 64-bit source.

use super::WAVE;
use super::wave::Wave;
use crate::isa::instruction::Operand;
use crate::isa::names::WideOp;

/// `v_div_fixup_f64`, as [`super::float::div_fixup`].
fn div_fixup(quotient: f64, denominator: f64, numerator: f64) -> f64 {
    let special = denominator == 0.0 || numerator == 0.0 || !denominator.is_finite() || !numerator.is_finite();
    match special {
        true => numerator / denominator,
        false => quotient.abs().copysign(f64::from_bits(denominator.to_bits() ^ numerator.to_bits())),
    }
}

fn scale(x: f64, exponent: i32) -> f64 {
    let exponent = exponent.clamp(-2200, 2200);
    // Three factors, as one power of two may lie outside the range; only the last product can round.
    let power = |e: i32| f64::from_bits(((e + 1023) as u64) << 52);
    let third = exponent / 3;
    x * power(third) * power(third) * power(exponent - 2 * third)
}

pub fn run(wave: &mut Wave, op: WideOp, dst: u16, sources: &[Operand; 3]) {
    use WideOp::*;
    let exec = wave.exec();
    let mut space = [0; WAVE];
    let [a, b, c] = match op {
        // Their first source has 32 bits and is read where it is used.
        v_lshlrev_b64 | v_lshrrev_b64 | v_ashrrev_i64 | v_cvt_f64_f32 | v_cvt_f64_i32 | v_cvt_f64_u32 => [[0; WAVE]; 3],
        _ => [0, 1, 2].map(|k| wave.lanes64(&sources[k])),
    };
    macro_rules! double {
        (|$x:ident $(, $y:ident $(, $z:ident)?)?| $value:expr) => {{
            let values: [u64; WAVE] = std::array::from_fn(|lane| {
                let $x = f64::from_bits(a[lane]);
                $(let $y = f64::from_bits(b[lane]); $(let $z = f64::from_bits(c[lane]);)?)?
                let value: f64 = $value;
                value.to_bits()
            });
            wave.write_lanes64(dst, &values, exec);
        }};
    }
    /// A 32-bit source, a 64-bit result.
    macro_rules! from_narrow {
        (|$x:ident| $value:expr) => {{
            let a = wave.lanes(&sources[0], &mut space);
            let values: [u64; WAVE] = std::array::from_fn(|lane| {
                let $x = a[lane];
                $value
            });
            wave.write_lanes64(dst, &values, exec);
        }};
    }
    /// A 64-bit source, a 32-bit result.
    macro_rules! to_narrow {
        (|$x:ident| $value:expr) => {{
            let values: [u32; WAVE] = std::array::from_fn(|lane| {
                let $x = f64::from_bits(a[lane]);
                $value
            });
            wave.write(dst, &values, exec);
        }};
    }
    /// Shift amount (32 bits) first, 64-bit value second.
    macro_rules! shift {
        (|$by:ident, $x:ident| $value:expr) => {{
            let x = wave.lanes64(&sources[1]);
            let by = wave.lanes(&sources[0], &mut space);
            let values: [u64; WAVE] = std::array::from_fn(|lane| {
                let ($by, $x) = (by[lane] & 63, x[lane]);
                $value
            });
            wave.write_lanes64(dst, &values, exec);
        }};
    }
    match op {
        v_mov_b64 => wave.write_lanes64(dst, &a, exec),
        v_lshl_add_u64 => {
            let by = wave.lanes(&sources[1], &mut space);
            let values: [u64; WAVE] = std::array::from_fn(|lane| (a[lane] << (by[lane] & 7)).wrapping_add(c[lane]));
            wave.write_lanes64(dst, &values, exec);
        }
        v_lshlrev_b64 => shift!(|by, x| x << by),
        v_lshrrev_b64 => shift!(|by, x| x >> by),
        v_ashrrev_i64 => shift!(|by, x| (x as i64 >> by) as u64),
        v_add_f64 => double!(|x, y| x + y),
        v_mul_f64 => double!(|x, y| x * y),
        v_fma_f64 | v_fmac_f64 => double!(|x, y, z| x.mul_add(y, z)),
        v_max_f64 => double!(|x, y| x.max(y)),
        v_min_f64 => double!(|x, y| x.min(y)),
        v_rcp_f64 => double!(|x| 1.0 / x),
        v_rsq_f64 => double!(|x| 1.0 / x.sqrt()),
        v_sqrt_f64 => double!(|x| x.sqrt()),
        v_trunc_f64 => double!(|x| x.trunc()),
        v_floor_f64 => double!(|x| x.floor()),
        v_ceil_f64 => double!(|x| x.ceil()),
        v_rndne_f64 => double!(|x| x.round_ties_even()),
        v_div_fixup_f64 => double!(|x, y, z| div_fixup(x, y, z)),
        v_ldexp_f64 => {
            let by = wave.lanes(&sources[1], &mut space);
            let values: [u64; WAVE] = std::array::from_fn(|lane| scale(f64::from_bits(a[lane]), by[lane] as i32).to_bits());
            wave.write_lanes64(dst, &values, exec);
        }
        v_cvt_f64_f32 => from_narrow!(|x| f64::from(f32::from_bits(x)).to_bits()),
        v_cvt_f64_i32 => from_narrow!(|x| f64::from(x as i32).to_bits()),
        v_cvt_f64_u32 => from_narrow!(|x| f64::from(x).to_bits()),
        v_cvt_f32_f64 => to_narrow!(|x| (x as f32).to_bits()),
        v_cvt_i32_f64 => to_narrow!(|x| x as i32 as u32),
        v_cvt_u32_f64 => to_narrow!(|x| x as u32),
    }
}
