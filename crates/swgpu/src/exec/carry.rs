//! Instructions that write a mask beside their result: carries, and the scaling step of division.

use super::WAVE;
use super::float::{exponent, scale_by_power};
use super::wave::Wave;
use crate::isa::instruction::{Operand, VCC};
use crate::isa::names::CarryOp;

/// `v_div_scale_f32`: `value` (the denominator or the numerator) scaled so that the Newton steps of a division neither
/// overflow nor lose bits, and whether `v_div_fmas` must scale the quotient back.
/// By the pseudo code in AMD's ISA documents, with the one case where both operands are huge scaled down instead of up.
fn div_scale(value: f32, denominator: f32, numerator: f32) -> (f32, bool) {
    let same = |a: f32, b: f32| a.to_bits() == b.to_bits();
    if numerator == 0.0 || denominator == 0.0 {
        return (f32::NAN, false);
    }
    if exponent(numerator) - exponent(denominator) >= 96 {
        return (if same(value, denominator) { scale_by_power(value, 64) } else { value }, true);
    }
    if denominator.is_subnormal() {
        return (scale_by_power(value, 64), false);
    }
    let reciprocal_is_small = (1.0 / denominator).is_subnormal();
    let quotient_is_small = (numerator / denominator).is_subnormal() || (numerator / denominator) == 0.0;
    match (reciprocal_is_small, quotient_is_small) {
        (true, true) => (if same(value, denominator) { scale_by_power(value, -64) } else { value }, true),
        (true, false) => (scale_by_power(value, -64), false),
        (false, true) => (if same(value, numerator) { scale_by_power(value, 64) } else { value }, true),
        (false, false) if exponent(numerator) <= 23 => (scale_by_power(value, 64), false),
        (false, false) => (value, false),
    }
}

/// `v_div_fmas_f32`: the last fused step of a division; where VCC is set it takes the scaling of `div_scale` back.
pub fn div_fmas(wave: &mut Wave, double: bool, dst: u16, sources: &[Operand; 3]) {
    let (exec, vcc) = (wave.exec(), wave.read64(VCC));
    if double {
        let [a, b, c] = [0, 1, 2].map(|k| wave.lanes64(&sources[k]));
        let values: [u64; WAVE] = std::array::from_fn(|lane| {
            let [a, b, c] = [a[lane], b[lane], c[lane]].map(f64::from_bits);
            let power = if (c.to_bits() >> 52 & 0x7ff) > 1023 { 128 } else { -128 };
            let factor = if vcc >> lane & 1 == 1 { 2f64.powi(power) } else { 1.0 };
            (a.mul_add(b, c) * factor).to_bits()
        });
        return wave.write_lanes64(dst, &values, exec);
    }
    let (mut space_a, mut space_b, mut space_c) = ([0; WAVE], [0; WAVE], [0; WAVE]);
    let a = wave.lanes(&sources[0], &mut space_a);
    let b = wave.lanes(&sources[1], &mut space_b);
    let c = wave.lanes(&sources[2], &mut space_c);
    let values: [u32; WAVE] = std::array::from_fn(|lane| {
        let [a, b, c] = [a[lane], b[lane], c[lane]].map(f32::from_bits);
        if vcc >> lane & 1 == 0 {
            return a.mul_add(b, c).to_bits();
        }
        // One rounding: the fused sum is exact to well below half a unit of the scaled result in 64 bits.
        let power = if exponent(c) > 127 { 64 } else { -64 };
        let sum = f64::from(a).mul_add(f64::from(b), f64::from(c));
        ((sum * 2f64.powi(power)) as f32).to_bits()
    });
    wave.write(dst, &values, exec);
}

fn div_scale_double(value: f64, denominator: f64, numerator: f64) -> (f64, bool) {
    let exponent = |x: f64| (x.to_bits() >> 52 & 0x7ff) as i32;
    let up = 2f64.powi(128);
    let same = |a: f64, b: f64| a.to_bits() == b.to_bits();
    let quotient = numerator / denominator;
    if numerator == 0.0 || denominator == 0.0 {
        (f64::NAN, false)
    } else if exponent(numerator) - exponent(denominator) >= 768 {
        (if same(value, denominator) { value * up } else { value }, true)
    } else if denominator.is_subnormal() {
        (value * up, false)
    } else if (1.0 / denominator).is_subnormal() && (quotient.is_subnormal() || quotient == 0.0) {
        (if same(value, denominator) { value / up } else { value }, true)
    } else if (1.0 / denominator).is_subnormal() {
        (value / up, false)
    } else if quotient.is_subnormal() || quotient == 0.0 {
        (if same(value, numerator) { value * up } else { value }, true)
    } else if exponent(numerator) <= 53 {
        (value * up, false)
    } else {
        (value, false)
    }
}

/// Runs one instruction; `carry_out` is the scalar register pair of the mask.
pub fn run(wave: &mut Wave, op: CarryOp, dst: u16, carry_out: u8, sources: &[Operand; 3]) {
    use CarryOp::*;
    let exec = wave.exec();
    let mut mask = 0u64;
    if matches!(op, v_mad_u64_u32 | v_mad_i64_i32 | v_div_scale_f64) {
        let values = wide(wave, op, sources, &mut mask);
        wave.write_lanes64(dst, &values, exec);
        return wave.write64(carry_out, mask & exec);
    }
    // The third source of the additions is the incoming carry, a mask.
    let carries = match op {
        v_addc_co_u32 | v_subb_co_u32 | v_subbrev_co_u32 => wave.scalar(&sources[2]),
        _ => 0,
    };
    let (mut space_a, mut space_b, mut space_c) = ([0; WAVE], [0; WAVE], [0; WAVE]);
    let a = wave.lanes(&sources[0], &mut space_a);
    let b = wave.lanes(&sources[1], &mut space_b);
    let c = wave.lanes(&sources[2], &mut space_c);
    let mut values = [0u32; WAVE];
    for lane in 0..WAVE {
        let (x, y) = (a[lane], b[lane]);
        let carry = carries >> lane & 1;
        let borrow = |x: u32, y: u32| {
            let difference = i64::from(x) - i64::from(y) - carry as i64;
            (difference as u32, difference < 0)
        };
        let (value, flag) = match op {
            v_add_co_u32 => x.overflowing_add(y),
            v_sub_co_u32 | v_subb_co_u32 => borrow(x, y),
            v_subrev_co_u32 | v_subbrev_co_u32 => borrow(y, x),
            v_addc_co_u32 => {
                let sum = u64::from(x) + u64::from(y) + carry;
                (sum as u32, sum >> 32 != 0)
            }
            _ => {
                let [x, y, z] = [x, y, c[lane]].map(f32::from_bits);
                let (value, flag) = div_scale(x, y, z);
                (value.to_bits(), flag)
            }
        };
        values[lane] = value;
        mask |= u64::from(flag) << lane;
    }
    wave.write(dst, &values, exec);
    wave.write64(carry_out, mask & exec);
}

fn wide(wave: &Wave, op: CarryOp, sources: &[Operand; 3], mask: &mut u64) -> [u64; WAVE] {
    let mut values = [0; WAVE];
    if op == CarryOp::v_div_scale_f64 {
        let [a, b, c] = [0, 1, 2].map(|k| wave.lanes64(&sources[k]));
        for lane in 0..WAVE {
            let [a, b, c] = [a[lane], b[lane], c[lane]].map(f64::from_bits);
            let (value, flag) = div_scale_double(a, b, c);
            values[lane] = value.to_bits();
            *mask |= u64::from(flag) << lane;
        }
        return values;
    }
    let (mut space_a, mut space_b) = ([0; WAVE], [0; WAVE]);
    let a = wave.lanes(&sources[0], &mut space_a);
    let b = wave.lanes(&sources[1], &mut space_b);
    let c = wave.lanes64(&sources[2]);
    for lane in 0..WAVE {
        let product = match op {
            CarryOp::v_mad_u64_u32 => u64::from(a[lane]) * u64::from(b[lane]),
            _ => (i64::from(a[lane] as i32) * i64::from(b[lane] as i32)) as u64,
        };
        let (value, carry) = product.overflowing_add(c[lane]);
        values[lane] = value;
        *mask |= u64::from(carry) << lane;
    }
    values
}
