//! Instructions on pairs of 32-bit values in neighbouring registers.

use multiversion::multiversion;

use super::wave::Wave;
use super::{Lanes, WAVE};
use crate::isa::instruction::{Operand, Source};
use crate::isa::names::PackedOp;

/// Which half of each source the low and the high result take, and the signs: bit `k` is for source `k`.
#[derive(Clone, Copy)]
pub struct Selection {
    pub low: u8,
    pub high: u8,
    pub negate_low: u8,
    pub negate_high: u8,
}

/// One half of a source: its register, the one behind it, or a literal for both halves.
fn half(wave: &Wave, operand: &Operand, upper: bool, negate: bool) -> Lanes {
    let step = u16::from(upper);
    let mut values = match operand.source {
        Source::Vector(register) => wave.vectors[usize::from(register + step)],
        Source::Scalar(register) => [wave.scalars[usize::from(register) + usize::from(step)]; WAVE],
        _ => [wave.scalar(operand) as u32; WAVE],
    };
    if negate {
        values.iter_mut().for_each(|value| *value ^= 0x8000_0000);
    }
    values
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+avx2+fma", "x86_64+avx2+fma"))]
fn compute(op: PackedOp, a: &Lanes, b: &Lanes, c: &Lanes, out: &mut Lanes) {
    let float = f32::from_bits;
    match op {
        PackedOp::v_pk_fma_f32 => {
            (0..WAVE).for_each(|lane| out[lane] = float(a[lane]).mul_add(float(b[lane]), float(c[lane])).to_bits())
        }
        PackedOp::v_pk_mul_f32 => (0..WAVE).for_each(|lane| out[lane] = (float(a[lane]) * float(b[lane])).to_bits()),
        PackedOp::v_pk_add_f32 => (0..WAVE).for_each(|lane| out[lane] = (float(a[lane]) + float(b[lane])).to_bits()),
        PackedOp::v_pk_mov_b32 => *out = *a,
    }
}

pub fn run(wave: &mut Wave, op: PackedOp, dst: u16, sources: &[Operand; 3], selection: Selection) {
    let exec = wave.exec();
    let mut results = [[0; WAVE]; 2];
    for (place, result) in results.iter_mut().enumerate() {
        let (select, negate) = match place {
            0 => (selection.low, selection.negate_low),
            _ => (selection.high, selection.negate_high),
        };
        if op == PackedOp::v_pk_mov_b32 {
            // The low result comes from the first source, the high one from the second, both by `op_sel`.
            *result = half(wave, &sources[place], selection.low >> place & 1 == 1, false);
            continue;
        }
        let value = |k: usize| half(wave, &sources[k], select >> k & 1 == 1, negate >> k & 1 == 1);
        let c = if op == PackedOp::v_pk_fma_f32 { value(2) } else { [0; WAVE] };
        compute(op, &value(0), &value(1), &c, result);
    }
    wave.write(dst, &results[0], exec);
    wave.write(dst + 1, &results[1], exec);
}
