//! Matrix products (MFMA) of one block: `D = A * B + C` with f32 accumulators.
//!
//! With `M x M` results, lane `l` holds row `l % M` of A and column `l % M` of B, of which `K * M / 64` values from
//! `K * M / 64 * (l / M)` on. Result register `r` of lane `l` is column `l % M` and, for `M = 16`, row `4 * (l / 16) + r`; for
//! `M = 32`, row `8 * (r / 4) + 4 * (l / 32) + r % 4` (AMD's published layouts).
//!
//! Products of bf16 values are exact in f32. The order of summation inside the hardware is not published; here it is by
//! ascending `k`, one rounding per step.

use multiversion::multiversion;

use super::wave::Wave;
use super::{Lanes, WAVE};
use crate::isa::instruction::{Operand, Source};
use crate::isa::names::MatrixOp;

/// `K x M` values, row by row: `values[k * M + i]`.
type Panel = [f32; 512];

fn bf16(bits: u32) -> f32 {
    f32::from_bits(bits << 16)
}

/// A or B as a panel. `pair`: two bf16 values per register.
#[inline(always)]
fn panel<const M: usize>(registers: &[Lanes], per_lane: usize, pair: bool) -> Panel {
    let mut panel = [0.0; 512];
    for lane in 0..WAVE {
        let (i, first) = (lane % M, per_lane * (lane / M));
        for step in 0..per_lane {
            let value = match pair {
                true => bf16(registers[step / 2][lane] >> (16 * (step & 1)) & 0xffff),
                false => f32::from_bits(registers[step][lane]),
            };
            panel[(first + step) * M + i] = value;
        }
    }
    panel
}

#[inline(always)]
fn row_of<const M: usize>(register: usize, lane: usize) -> usize {
    if M == 16 { 4 * (lane / 16) + register } else { 8 * (register / 4) + 4 * (lane / 32) + register % 4 }
}

#[inline(always)]
fn multiply<const M: usize, const K: usize>(a: &[Lanes], b: &[Lanes], sums: &mut [Lanes], pair: bool) {
    let per_lane = K * M / WAVE;
    let (a, b) = (panel::<M>(a, per_lane, pair), panel::<M>(b, per_lane, pair));
    for (register, values) in sums.iter_mut().enumerate() {
        for block in 0..WAVE / M {
            let row = row_of::<M>(register, block * M);
            let values = &mut values[block * M..(block + 1) * M];
            let mut sum: [f32; M] = std::array::from_fn(|column| f32::from_bits(values[column]));
            for k in 0..K {
                let factor = a[k * M + row];
                for column in 0..M {
                    sum[column] = factor.mul_add(b[k * M + column], sum[column]);
                }
            }
            for column in 0..M {
                values[column] = sum[column].to_bits();
            }
        }
    }
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+avx2+fma", "x86_64+avx2+fma"))]
fn compute(op: MatrixOp, a: &[Lanes], b: &[Lanes], sums: &mut [Lanes]) {
    match op {
        MatrixOp::v_mfma_f32_16x16x16_bf16 => multiply::<16, 16>(a, b, sums, true),
        MatrixOp::v_mfma_f32_32x32x8_bf16 => multiply::<32, 8>(a, b, sums, true),
        MatrixOp::v_mfma_f32_16x16x4_f32 => multiply::<16, 4>(a, b, sums, false),
        MatrixOp::v_mfma_f32_32x32x2_f32 => multiply::<32, 2>(a, b, sums, false),
    }
}

pub fn run(wave: &mut Wave, op: MatrixOp, dst: u16, a: u16, b: u16, c: &Operand) -> Result<(), String> {
    if wave.exec() != u64::MAX {
        return Err(format!("matrix product with EXEC {:#018x}: all 64 lanes must be active", wave.exec()));
    }
    let (source_registers, result_registers) = match op {
        MatrixOp::v_mfma_f32_16x16x16_bf16 => (2, 4),
        MatrixOp::v_mfma_f32_32x32x8_bf16 => (2, 16),
        MatrixOp::v_mfma_f32_16x16x4_f32 => (1, 4),
        MatrixOp::v_mfma_f32_32x32x2_f32 => (1, 16),
    };
    let mut sums = [[0u32; WAVE]; 16];
    let sums = &mut sums[..result_registers];
    for (index, values) in sums.iter_mut().enumerate() {
        *values = match c.source {
            Source::Vector(register) => wave.vectors[usize::from(register) + index],
            _ => [wave.scalar(c) as u32; WAVE],
        };
    }
    let range = |first: u16| usize::from(first)..usize::from(first) + source_registers;
    compute(op, &wave.vectors[range(a)], &wave.vectors[range(b)], sums);
    let dst = usize::from(dst);
    wave.vectors[dst..dst + result_registers].copy_from_slice(sums);
    Ok(())
}
