//! A wave's registers, and how operands are read from and results written to them.

use super::{Lanes, WAVE};
use crate::isa::instruction::{EXEC, M0, Operand, Output, Part, Source, Unused, VCC};

/// What registers hold before anyone writes them: a NaN, and no plausible index or address.
const JUNK: u32 = 0x7fba_dbad;
const VECTOR_REGISTERS: usize = 512;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Running,
    AtBarrier,
    Done,
}

#[derive(Debug)]
pub struct Wave {
    /// Index of the next instruction.
    pub pc: u32,
    pub scalars: [u32; 128],
    pub vectors: Vec<Lanes>,
    pub scc: bool,
    pub state: State,
    pub steps: u64,
}

impl Default for Wave {
    fn default() -> Self {
        let vectors = vec![[JUNK; WAVE]; VECTOR_REGISTERS];
        Self { pc: 0, scalars: [JUNK; 128], vectors, scc: false, state: State::Running, steps: 0 }
    }
}

impl Wave {
    /// Back to the state before a launch; only `vgprs` and `agprs` registers can have been touched.
    pub fn reset(&mut self, entry: u32, vgprs: usize, agprs: usize) {
        self.pc = entry;
        self.scalars = [JUNK; 128];
        self.scc = false;
        self.state = State::Running;
        self.steps = 0;
        self.vectors[..vgprs.min(256)].fill([JUNK; WAVE]);
        self.vectors[256..256 + agprs.min(256)].fill([JUNK; WAVE]);
        self.write64(VCC, 0);
        self.scalars[usize::from(M0)] = 0;
    }

    #[inline(always)]
    pub fn read64(&self, register: u8) -> u64 {
        let register = usize::from(register);
        u64::from(self.scalars[register]) | u64::from(self.scalars[register + 1]) << 32
    }

    #[inline(always)]
    pub fn write64(&mut self, register: u8, value: u64) {
        let register = usize::from(register);
        self.scalars[register] = value as u32;
        self.scalars[register + 1] = (value >> 32) as u32;
    }

    #[inline(always)]
    pub fn exec(&self) -> u64 {
        self.read64(EXEC)
    }

    /// A scalar value of 64 bits; for 32 bits take the low half.
    #[inline(always)]
    pub fn scalar(&self, operand: &Operand) -> u64 {
        match operand.source {
            Source::Scalar(register) if register < 127 => self.read64(register),
            Source::Scalar(register) => u64::from(self.scalars[usize::from(register)]),
            Source::Literal(value) => value,
            Source::Scc => u64::from(self.scc),
            Source::VccIsZero => u64::from(self.read64(VCC) == 0),
            Source::ExecIsZero => u64::from(self.exec() == 0),
            Source::Vector(register) => u64::from(self.vectors[usize::from(register)][0]),
        }
    }

    /// The 32-bit value of all lanes: the register itself, or `space` filled with the modified value.
    #[inline(always)]
    pub fn lanes<'a>(&'a self, operand: &Operand, space: &'a mut Lanes) -> &'a Lanes {
        match operand.source {
            Source::Vector(register) if operand.is_plain() => &self.vectors[usize::from(register)],
            Source::Vector(register) => {
                *space = self.vectors[usize::from(register)];
                modify(operand, space);
                space
            }
            _ => {
                *space = [self.scalar(operand) as u32; WAVE];
                if !operand.is_plain() {
                    modify(operand, space);
                }
                space
            }
        }
    }

    /// The 64-bit value of all lanes, with float modifiers applied to the high half.
    pub fn lanes64(&self, operand: &Operand) -> [u64; WAVE] {
        let mut values = match operand.source {
            Source::Vector(register) => {
                let register = usize::from(register);
                let (low, high) = (&self.vectors[register], &self.vectors[register + 1]);
                std::array::from_fn(|lane| u64::from(low[lane]) | u64::from(high[lane]) << 32)
            }
            _ => [self.scalar(operand); WAVE],
        };
        if operand.absolute || operand.negate {
            for value in &mut values {
                *value = if operand.absolute { *value & !(1 << 63) } else { *value } ^ u64::from(operand.negate) << 63;
            }
        }
        values
    }

    /// Writes the lanes of `mask`.
    #[inline(always)]
    pub fn write(&mut self, register: u16, values: &Lanes, mask: u64) {
        let target = &mut self.vectors[usize::from(register)];
        if mask == u64::MAX {
            *target = *values;
            return;
        }
        for lane in 0..WAVE {
            target[lane] = if mask >> lane & 1 == 1 { values[lane] } else { target[lane] };
        }
    }

    pub fn write_lanes64(&mut self, register: u16, values: &[u64; WAVE], mask: u64) {
        self.write(register, &values.map(|value| value as u32), mask);
        self.write(register + 1, &values.map(|value| (value >> 32) as u32), mask);
    }

    /// Writes a result through its output modifiers.
    pub fn write_output(&mut self, register: u16, values: &mut Lanes, mask: u64, output: &Output) {
        if output.scale != 1.0 || output.clamp {
            for value in values.iter_mut() {
                let scaled = f32::from_bits(*value) * output.scale;
                // `max` first, and not `clamp`: a NaN becomes 0.
                #[expect(clippy::manual_clamp, reason = "`clamp` keeps a NaN")]
                let clamped = scaled.max(0.0).min(1.0);
                *value = if output.clamp { clamped } else { scaled }.to_bits();
            }
        }
        if output.part != Part::Whole {
            let old = &self.vectors[usize::from(register)];
            for (value, old) in values.iter_mut().zip(old) {
                *value = insert(*value, *old, output.part, output.unused);
            }
        }
        self.write(register, values, mask);
    }
}

fn modify(operand: &Operand, values: &mut Lanes) {
    for value in values {
        let mut x = *value;
        x = match (operand.part, operand.sign_extend) {
            (Part::Whole, _) => x,
            (Part::Byte(index), false) => x >> (8 * index) & 0xff,
            (Part::Byte(index), true) => (x >> (8 * index)) as u8 as i8 as u32,
            (Part::Word(index), false) => x >> (16 * index) & 0xffff,
            (Part::Word(index), true) => (x >> (16 * index)) as u16 as i16 as u32,
        };
        if operand.absolute {
            x &= 0x7fff_ffff;
        }
        *value = x ^ u32::from(operand.negate) << 31;
    }
}

/// `value` put into `part` of a register.
fn insert(value: u32, old: u32, part: Part, unused: Unused) -> u32 {
    let (shift, bits) = match part {
        Part::Whole => return value,
        Part::Byte(index) => (8 * u32::from(index), 8),
        Part::Word(index) => (16 * u32::from(index), 16),
    };
    let field = value & ((1 << bits) - 1);
    match unused {
        Unused::Pad => field << shift,
        Unused::Preserve => old & !(((1 << bits) - 1) << shift) | field << shift,
        Unused::SignExtend => (((field << (32 - bits)) as i32 >> (32 - bits)) as u32) << shift,
    }
}
