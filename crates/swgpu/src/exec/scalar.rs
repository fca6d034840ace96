//! Scalar instructions.

use super::wave::Wave;
use crate::isa::instruction::{EXEC, Operand};
use crate::isa::names::{ScalarCompare, ScalarOp};

/// Runs one scalar instruction; `next_address` is the absolute address of the instruction behind it.
pub fn run(wave: &mut Wave, op: ScalarOp, dst: u8, a: &Operand, b: &Operand, next_address: u64) {
    use ScalarOp::*;
    let (a64, b64) = (wave.scalar(a), wave.scalar(b));
    let (a, b) = (a64 as u32, b64 as u32);
    let old = wave.scalars[usize::from(dst)];
    let scc = wave.scc;
    /// A result of 32 bits that leaves SCC alone.
    macro_rules! plain {
        ($value:expr) => {{
            wave.scalars[usize::from(dst)] = $value;
        }};
    }
    /// A result of 32 bits; SCC is its second part.
    macro_rules! with_scc {
        ($pair:expr) => {{
            let (value, flag) = $pair;
            wave.scalars[usize::from(dst)] = value;
            wave.scc = flag;
        }};
    }
    /// A result of 32 bits; SCC says that it is not 0.
    macro_rules! tested {
        ($value:expr) => {{
            let value: u32 = $value;
            wave.scalars[usize::from(dst)] = value;
            wave.scc = value != 0;
        }};
    }
    macro_rules! plain64 {
        ($value:expr) => {
            wave.write64(dst, $value)
        };
    }
    macro_rules! tested64 {
        ($value:expr) => {{
            let value: u64 = $value;
            wave.write64(dst, value);
            wave.scc = value != 0;
        }};
    }
    /// The old EXEC is saved, the new one computed from it.
    macro_rules! save_exec {
        ($function:expr) => {{
            let exec = wave.exec();
            let function: fn(u64, u64) -> u64 = $function;
            let value = function(a64, exec);
            wave.write64(dst, exec);
            wave.write64(EXEC, value);
            wave.scc = value != 0;
        }};
    }
    let constant = a as u16 as i16 as i32;
    match op {
        s_mov_b32 => plain!(a),
        s_mov_b64 => plain64!(a64),
        s_movk_i32 => plain!(constant as u32),
        s_cmov_b32 => plain!(if scc { a } else { old }),
        s_cmovk_i32 => plain!(if scc { constant as u32 } else { old }),
        s_cmov_b64 => {
            if scc {
                wave.write64(dst, a64);
            }
        }
        s_not_b32 => tested!(!a),
        s_not_b64 => tested64!(!a64),
        s_brev_b32 => plain!(a.reverse_bits()),
        s_brev_b64 => plain64!(a64.reverse_bits()),
        s_abs_i32 => tested!((a as i32).unsigned_abs()),
        s_bcnt0_i32_b32 => tested!(a.count_zeros()),
        s_bcnt0_i32_b64 => tested!(a64.count_zeros()),
        s_bcnt1_i32_b32 => tested!(a.count_ones()),
        s_bcnt1_i32_b64 => tested!(a64.count_ones()),
        s_ff0_i32_b32 => plain!(if a == u32::MAX { u32::MAX } else { a.trailing_ones() }),
        s_ff0_i32_b64 => plain!(if a64 == u64::MAX { u32::MAX } else { a64.trailing_ones() }),
        s_ff1_i32_b32 => plain!(if a == 0 { u32::MAX } else { a.trailing_zeros() }),
        s_ff1_i32_b64 => plain!(if a64 == 0 { u32::MAX } else { a64.trailing_zeros() }),
        s_flbit_i32_b32 => plain!(if a == 0 { u32::MAX } else { a.leading_zeros() }),
        s_flbit_i32_b64 => plain!(if a64 == 0 { u32::MAX } else { a64.leading_zeros() }),
        s_flbit_i32 => plain!(match a {
            0 | u32::MAX => u32::MAX,
            _ if (a as i32) < 0 => a.leading_ones(),
            _ => a.leading_zeros(),
        }),
        s_sext_i32_i8 => plain!(a as u8 as i8 as u32),
        s_sext_i32_i16 => plain!(constant as u32),
        s_bitset0_b32 => plain!(old & !(1 << (a & 31))),
        s_bitset1_b32 => plain!(old | 1 << (a & 31)),
        s_getpc_b64 => plain64!(next_address),
        s_and_saveexec_b64 => save_exec!(|source, exec| source & exec),
        s_or_saveexec_b64 => save_exec!(|source, exec| source | exec),
        s_xor_saveexec_b64 => save_exec!(|source, exec| source ^ exec),
        s_andn2_saveexec_b64 => save_exec!(|source, exec| source & !exec),
        s_orn2_saveexec_b64 => save_exec!(|source, exec| source | !exec),
        s_andn1_saveexec_b64 => save_exec!(|source, exec| !source & exec),
        s_add_u32 => with_scc!(a.overflowing_add(b)),
        s_sub_u32 => with_scc!(a.overflowing_sub(b)),
        s_add_i32 => with_scc!((a.wrapping_add(b), (a as i32).overflowing_add(b as i32).1)),
        s_sub_i32 => with_scc!((a.wrapping_sub(b), (a as i32).overflowing_sub(b as i32).1)),
        s_addc_u32 => {
            let sum = u64::from(a) + u64::from(b) + u64::from(scc);
            with_scc!((sum as u32, sum >> 32 != 0));
        }
        s_subb_u32 => {
            let difference = i64::from(a) - i64::from(b) - i64::from(scc);
            with_scc!((difference as u32, difference < 0));
        }
        s_addk_i32 => {
            let (value, overflow) = (old as i32).overflowing_add(constant);
            with_scc!((value as u32, overflow));
        }
        s_mulk_i32 => plain!((old as i32).wrapping_mul(constant) as u32),
        s_mul_i32 => plain!(a.wrapping_mul(b)),
        s_mul_hi_i32 => plain!(((i64::from(a as i32) * i64::from(b as i32)) >> 32) as u32),
        s_mul_hi_u32 => plain!(((u64::from(a) * u64::from(b)) >> 32) as u32),
        s_min_i32 => with_scc!(((a as i32).min(b as i32) as u32, (a as i32) < b as i32)),
        s_max_i32 => with_scc!(((a as i32).max(b as i32) as u32, a as i32 > b as i32)),
        s_min_u32 => with_scc!((a.min(b), a < b)),
        s_max_u32 => with_scc!((a.max(b), a > b)),
        s_absdiff_i32 => tested!((a as i32).wrapping_sub(b as i32).unsigned_abs()),
        s_cselect_b32 => plain!(if scc { a } else { b }),
        s_cselect_b64 => plain64!(if scc { a64 } else { b64 }),
        s_and_b32 => tested!(a & b),
        s_or_b32 => tested!(a | b),
        s_xor_b32 => tested!(a ^ b),
        s_andn2_b32 => tested!(a & !b),
        s_orn2_b32 => tested!(a | !b),
        s_nand_b32 => tested!(!(a & b)),
        s_nor_b32 => tested!(!(a | b)),
        s_xnor_b32 => tested!(!(a ^ b)),
        s_and_b64 => tested64!(a64 & b64),
        s_or_b64 => tested64!(a64 | b64),
        s_xor_b64 => tested64!(a64 ^ b64),
        s_andn2_b64 => tested64!(a64 & !b64),
        s_orn2_b64 => tested64!(a64 | !b64),
        s_nand_b64 => tested64!(!(a64 & b64)),
        s_nor_b64 => tested64!(!(a64 | b64)),
        s_xnor_b64 => tested64!(!(a64 ^ b64)),
        s_lshl_b32 => tested!(a << (b & 31)),
        s_lshr_b32 => tested!(a >> (b & 31)),
        s_ashr_i32 => tested!((a as i32 >> (b & 31)) as u32),
        s_lshl_b64 => tested64!(a64 << (b & 63)),
        s_lshr_b64 => tested64!(a64 >> (b & 63)),
        s_ashr_i64 => tested64!((a64 as i64 >> (b & 63)) as u64),
        s_bfm_b32 => plain!(((1u32 << (a & 31)) - 1) << (b & 31)),
        s_bfm_b64 => plain64!(((1u64 << (a & 63)) - 1) << (b & 63)),
        s_bfe_u32 => tested!(field(u64::from(a), b & 31, b >> 16 & 0x7f, 32) as u32),
        s_bfe_i32 => tested!(signed_field(u64::from(a), b & 31, b >> 16 & 0x7f, 32) as u32),
        s_bfe_u64 => tested64!(field(a64, b & 63, b >> 16 & 0x7f, 64)),
        s_bfe_i64 => tested64!(signed_field(a64, b & 63, b >> 16 & 0x7f, 64)),
        s_lshl1_add_u32 => with_scc!(shift_add(a, b, 1)),
        s_lshl2_add_u32 => with_scc!(shift_add(a, b, 2)),
        s_lshl3_add_u32 => with_scc!(shift_add(a, b, 3)),
        s_lshl4_add_u32 => with_scc!(shift_add(a, b, 4)),
        s_pack_ll_b32_b16 => plain!(a & 0xffff | b << 16),
        s_pack_lh_b32_b16 => plain!(a & 0xffff | b & 0xffff_0000),
        s_pack_hh_b32_b16 => plain!(a >> 16 | b & 0xffff_0000),
    }
}

fn shift_add(a: u32, b: u32, by: u32) -> (u32, bool) {
    let sum = (u64::from(a) << by) + u64::from(b);
    (sum as u32, sum >> 32 != 0)
}

/// `width` bits of `value` from bit `offset` on; what would lie beyond `limit` bits is cut.
fn field(value: u64, offset: u32, width: u32, limit: u32) -> u64 {
    let width = width.min(limit - offset);
    let mask = if width >= 64 { u64::MAX } else { (1 << width) - 1 };
    value >> offset & mask
}

fn signed_field(value: u64, offset: u32, width: u32, limit: u32) -> u64 {
    let width = width.min(limit - offset);
    if width == 0 { 0 } else { ((field(value, offset, width, limit) << (64 - width)) as i64 >> (64 - width)) as u64 }
}

pub fn compare(wave: &mut Wave, op: ScalarCompare, a: &Operand, b: &Operand) {
    use ScalarCompare::*;
    let (a64, b64) = (wave.scalar(a), wave.scalar(b));
    let (a, b) = (a64 as u32, b64 as u32);
    let (signed_a, signed_b) = (a as i32, b as i32);
    let (low, constant) = (b & 0xffff, b as u16 as i16 as i32);
    wave.scc = match op {
        s_cmp_eq_i32 | s_cmp_eq_u32 => a == b,
        s_cmp_lg_i32 | s_cmp_lg_u32 => a != b,
        s_cmp_gt_i32 => signed_a > signed_b,
        s_cmp_ge_i32 => signed_a >= signed_b,
        s_cmp_lt_i32 => signed_a < signed_b,
        s_cmp_le_i32 => signed_a <= signed_b,
        s_cmp_gt_u32 => a > b,
        s_cmp_ge_u32 => a >= b,
        s_cmp_lt_u32 => a < b,
        s_cmp_le_u32 => a <= b,
        s_cmp_eq_u64 => a64 == b64,
        s_cmp_lg_u64 => a64 != b64,
        s_cmpk_eq_i32 => signed_a == constant,
        s_cmpk_lg_i32 => signed_a != constant,
        s_cmpk_gt_i32 => signed_a > constant,
        s_cmpk_ge_i32 => signed_a >= constant,
        s_cmpk_lt_i32 => signed_a < constant,
        s_cmpk_le_i32 => signed_a <= constant,
        s_cmpk_eq_u32 => a == low,
        s_cmpk_lg_u32 => a != low,
        s_cmpk_gt_u32 => a > low,
        s_cmpk_ge_u32 => a >= low,
        s_cmpk_lt_u32 => a < low,
        s_cmpk_le_u32 => a <= low,
        s_bitcmp0_b32 => a >> (b & 31) & 1 == 0,
        s_bitcmp1_b32 => a >> (b & 31) & 1 == 1,
        s_bitcmp0_b64 => a64 >> (b & 63) & 1 == 0,
        s_bitcmp1_b64 => a64 >> (b & 63) & 1 == 1,
    };
}
