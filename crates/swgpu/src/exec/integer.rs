//! Vector instructions on 32-bit and 16-bit integers: one result of 32 bits from up to three sources.

use multiversion::multiversion;

use super::{Lanes, WAVE};
use crate::isa::names::NarrowOp;

#[inline(always)]
fn median<T: Ord + Copy>(a: T, b: T, c: T) -> T {
    a.max(b).min(a.min(b).max(c))
}

/// `v_perm_b32`: bytes of `a:b` chosen by the bytes of `selector`.
#[inline(always)]
fn permute_bytes(a: u32, b: u32, selector: u32) -> u32 {
    let both = u64::from(a) << 32 | u64::from(b);
    let mut result = 0;
    for place in 0..4 {
        let byte = match selector >> (8 * place) & 0xff {
            index @ 0..=7 => (both >> (8 * index)) as u32 & 0xff,
            // Sign of the 16-bit value whose high byte is 1, 3, 5 or 7.
            index @ 8..=11 => ((both >> (16 * (index - 8) + 15)) as u32 & 1) * 0xff,
            12 => 0,
            _ => 0xff,
        };
        result |= byte << (8 * place);
    }
    result
}

#[inline(always)]
fn bit_field(value: u32, offset: u32, width: u32) -> u32 {
    value >> (offset & 31) & ((1 << (width & 31)) - 1)
}

#[inline(always)]
fn signed_bit_field(value: u32, offset: u32, width: u32) -> u32 {
    let width = width & 31;
    if width == 0 { 0 } else { ((bit_field(value, offset, width) << (32 - width)) as i32 >> (32 - width)) as u32 }
}

#[inline(always)]
fn first_bit_high_signed(value: u32) -> u32 {
    match value {
        0 | u32::MAX => u32::MAX,
        _ if (value as i32) < 0 => value.leading_ones(),
        _ => value.leading_zeros(),
    }
}

#[inline(always)]
fn signed24(x: u32) -> i64 {
    i64::from((x << 8) as i32 >> 8)
}

#[inline(always)]
fn unsigned24(x: u32) -> u64 {
    u64::from(x & 0xff_ffff)
}

/// Bits below `lane` in the low or high half of a wave mask.
#[inline(always)]
fn lanes_below(lane: usize, high: bool) -> u32 {
    let below = (1u64 << lane) - 1;
    if high { (below >> 32) as u32 } else { below as u32 }
}

/// Runs `op` on all lanes, or says that it is none of the integer instructions.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+avx2+fma", "x86_64+avx2+fma"))]
pub fn run(op: NarrowOp, a: &Lanes, b: &Lanes, c: &Lanes, out: &mut Lanes) -> bool {
    use NarrowOp::*;
    macro_rules! each {
        (|$x:ident $(, $y:ident $(, $z:ident)?)?| $value:expr) => {
            for lane in 0..WAVE {
                let $x = a[lane];
                $(let $y = b[lane]; $(let $z = c[lane];)?)?
                out[lane] = $value;
            }
        };
    }
    /// Results of 16 bits; the high half becomes 0.
    macro_rules! short {
        (|$x:ident, $y:ident $(, $z:ident)?| $value:expr) => {
            for lane in 0..WAVE {
                let ($x, $y) = (a[lane] as u16, b[lane] as u16);
                $(let $z = c[lane] as u16;)?
                out[lane] = u32::from($value);
            }
        };
    }
    match op {
        v_mov_b32 | v_accvgpr_read_b32 | v_accvgpr_write_b32 | v_accvgpr_mov_b32 => *out = *a,
        v_add_u32 | v_add_i32 => each!(|x, y| x.wrapping_add(y)),
        v_sub_u32 | v_sub_i32 => each!(|x, y| x.wrapping_sub(y)),
        v_subrev_u32 => each!(|x, y| y.wrapping_sub(x)),
        v_add3_u32 => each!(|x, y, z| x.wrapping_add(y).wrapping_add(z)),
        v_lshl_add_u32 => each!(|x, y, z| (x << (y & 31)).wrapping_add(z)),
        v_add_lshl_u32 => each!(|x, y, z| x.wrapping_add(y) << (z & 31)),
        v_lshl_or_b32 => each!(|x, y, z| x << (y & 31) | z),
        v_and_or_b32 => each!(|x, y, z| x & y | z),
        v_or3_b32 => each!(|x, y, z| x | y | z),
        v_xad_u32 => each!(|x, y, z| (x ^ y).wrapping_add(z)),
        v_and_b32 => each!(|x, y| x & y),
        v_or_b32 => each!(|x, y| x | y),
        v_xor_b32 => each!(|x, y| x ^ y),
        v_xnor_b32 => each!(|x, y| !(x ^ y)),
        v_not_b32 => each!(|x| !x),
        v_lshlrev_b32 => each!(|x, y| y << (x & 31)),
        v_lshrrev_b32 => each!(|x, y| y >> (x & 31)),
        v_ashrrev_i32 => each!(|x, y| (y as i32 >> (x & 31)) as u32),
        v_bfe_u32 => each!(|x, y, z| bit_field(x, y, z)),
        v_bfe_i32 => each!(|x, y, z| signed_bit_field(x, y, z)),
        v_bfi_b32 => each!(|x, y, z| x & y | !x & z),
        v_bfm_b32 => each!(|x, y| ((1u32 << (x & 31)) - 1) << (y & 31)),
        v_bfrev_b32 => each!(|x| x.reverse_bits()),
        v_bcnt_u32_b32 => each!(|x, y| x.count_ones().wrapping_add(y)),
        v_ffbh_u32 => each!(|x| if x == 0 { u32::MAX } else { x.leading_zeros() }),
        v_ffbh_i32 => each!(|x| first_bit_high_signed(x)),
        v_ffbl_b32 => each!(|x| if x == 0 { u32::MAX } else { x.trailing_zeros() }),
        v_perm_b32 => each!(|x, y, z| permute_bytes(x, y, z)),
        v_alignbit_b32 => each!(|x, y, z| ((u64::from(x) << 32 | u64::from(y)) >> (z & 31)) as u32),
        v_alignbyte_b32 => each!(|x, y, z| ((u64::from(x) << 32 | u64::from(y)) >> (8 * (z & 3))) as u32),
        v_mul_lo_u32 => each!(|x, y| x.wrapping_mul(y)),
        v_mul_hi_u32 => each!(|x, y| ((u64::from(x) * u64::from(y)) >> 32) as u32),
        v_mul_hi_i32 => each!(|x, y| ((i64::from(x as i32) * i64::from(y as i32)) >> 32) as u32),
        v_mul_u32_u24 => each!(|x, y| (unsigned24(x) * unsigned24(y)) as u32),
        v_mul_i32_i24 => each!(|x, y| (signed24(x) * signed24(y)) as u32),
        v_mul_hi_u32_u24 => each!(|x, y| ((unsigned24(x) * unsigned24(y)) >> 32) as u32),
        v_mul_hi_i32_i24 => each!(|x, y| ((signed24(x) * signed24(y)) >> 32) as u32),
        v_mad_u32_u24 => each!(|x, y, z| ((unsigned24(x) * unsigned24(y)) as u32).wrapping_add(z)),
        v_mad_i32_i24 => each!(|x, y, z| ((signed24(x) * signed24(y)) as u32).wrapping_add(z)),
        v_min_i32 => each!(|x, y| (x as i32).min(y as i32) as u32),
        v_max_i32 => each!(|x, y| (x as i32).max(y as i32) as u32),
        v_min_u32 => each!(|x, y| x.min(y)),
        v_max_u32 => each!(|x, y| x.max(y)),
        v_min3_i32 => each!(|x, y, z| (x as i32).min(y as i32).min(z as i32) as u32),
        v_max3_i32 => each!(|x, y, z| (x as i32).max(y as i32).max(z as i32) as u32),
        v_med3_i32 => each!(|x, y, z| median(x as i32, y as i32, z as i32) as u32),
        v_min3_u32 => each!(|x, y, z| x.min(y).min(z)),
        v_max3_u32 => each!(|x, y, z| x.max(y).max(z)),
        v_med3_u32 => each!(|x, y, z| median(x, y, z)),
        v_sad_u32 => each!(|x, y, z| x.abs_diff(y).wrapping_add(z)),
        v_mbcnt_lo_u32_b32 | v_mbcnt_hi_u32_b32 => {
            let high = op == v_mbcnt_hi_u32_b32;
            for lane in 0..WAVE {
                out[lane] = (a[lane] & lanes_below(lane, high)).count_ones().wrapping_add(b[lane]);
            }
        }
        v_add_u16 => short!(|x, y| x.wrapping_add(y)),
        v_sub_u16 => short!(|x, y| x.wrapping_sub(y)),
        v_subrev_u16 => short!(|x, y| y.wrapping_sub(x)),
        v_mul_lo_u16 => short!(|x, y| x.wrapping_mul(y)),
        v_lshlrev_b16 => short!(|x, y| y << (x & 15)),
        v_lshrrev_b16 => short!(|x, y| y >> (x & 15)),
        v_ashrrev_i16 => short!(|x, y| (y as i16 >> (x & 15)) as u16),
        v_max_u16 => short!(|x, y| x.max(y)),
        v_min_u16 => short!(|x, y| x.min(y)),
        v_max_i16 => short!(|x, y| (x as i16).max(y as i16) as u16),
        v_min_i16 => short!(|x, y| (x as i16).min(y as i16) as u16),
        v_mad_u16 | v_mad_legacy_u16 => short!(|x, y, z| x.wrapping_mul(y).wrapping_add(z)),
        _ => return false,
    }
    true
}
