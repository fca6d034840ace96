//! The interpreter's loop: runs one wave until it ends, waits at a barrier, or does something wrong.

use super::wave::{State, Wave};
use super::{WAVE, carry, compare, float, integer, lanes, matrix, packed, scalar, wide};
use crate::cache::Caches;
use crate::counters::Counts;
use crate::isa::decode::Program;
use crate::isa::instruction::{Action, Condition, EXEC, Operand, Output, VCC};
use crate::isa::names::NarrowOp;
use crate::memory::{Segment, View};

/// What the waves of one workgroup share.
pub struct Machine<'a> {
    pub program: &'a Program,
    /// Address at which the module's image lies.
    pub load_address: u64,
    pub view: &'a View,
    pub lds: Segment,
    pub check_unwritten: bool,
    pub max_instructions: u64,
    /// Fault on purpose: every value stored to global memory is wrong.
    pub corrupt: bool,
    pub counts: Counts,
    /// With `SWGPU_DETAILS`: how often each instruction of the program ran, and the caches that global memory is reached through.
    pub details: Option<Details>,
}

pub struct Details {
    pub executed: Vec<u64>,
    pub caches: Caches,
}

impl Machine<'_> {
    /// Runs `wave` until its state changes. The error says what the instruction before `wave.pc` did wrong.
    pub fn run(&mut self, wave: &mut Wave) -> Result<(), String> {
        wave.state = State::Running;
        while wave.state == State::Running {
            let Some(instruction) = self.program.code.get(wave.pc as usize) else {
                return Err("runs past the end of the code".into());
            };
            wave.pc += 1;
            wave.steps += 1;
            if wave.steps > self.max_instructions {
                return Err(format!(
                    "endless loop? a wave has run {} instructions (SWGPU_MAX_INSTRUCTIONS)",
                    self.max_instructions
                ));
            }
            self.counts.instructions[instruction.class as usize] += 1;
            if let Some(details) = &mut self.details {
                details.executed[wave.pc as usize - 1] += 1;
            }
            self.step(wave, &instruction.action)?;
        }
        Ok(())
    }

    fn step(&mut self, wave: &mut Wave, action: &Action) -> Result<(), String> {
        match action {
            Action::Narrow { op, dst, sources, output } => narrow(wave, *op, *dst, sources, output),
            Action::Matrix { op, dst, a, b, c } => matrix::run(wave, *op, *dst, *a, *b, c)?,
            Action::Load { address, dst, bytes, signed, half } => self.load(wave, address, *dst, *bytes, *signed, *half)?,
            Action::Store { address, data, bytes, half } => self.store(wave, address, *data, *bytes, *half)?,
            Action::LoadPair { vector, dst, bytes, offsets } => self.load_pair(wave, *vector, *dst, *bytes, *offsets)?,
            Action::StorePair { vector, data, bytes, offsets } => self.store_pair(wave, *vector, *data, *bytes, *offsets)?,
            Action::Atomic { address, op, data, returns } => self.atomic(wave, address, *op, *data, *returns)?,
            Action::Scalar { op, dst, a, b } => {
                let next = self.program.code.get(wave.pc as usize).map_or(0, |next| next.address);
                scalar::run(wave, *op, *dst, a, b, self.load_address.wrapping_add(next));
            }
            Action::ScalarCompare { op, a, b } => scalar::compare(wave, *op, a, b),
            Action::ScalarLoad { dwords, dst, base, index, offset } => {
                self.load_scalar(wave, *dwords, *dst, *base, *index, *offset)?
            }
            Action::ReadClock { dst } => wave.write64(*dst, wave.steps),
            Action::ReadZero { dst } => wave.scalars[usize::from(*dst)] = 0,
            Action::Branch { condition, target } => {
                if holds(wave, *condition) {
                    wave.pc = *target;
                }
            }
            Action::Jump { link, to } => self.jump(wave, *link, *to)?,
            Action::Packed { op, dst, sources, select_low, select_high, negate_low, negate_high } => {
                let selection = packed::Selection {
                    low: *select_low,
                    high: *select_high,
                    negate_low: *negate_low,
                    negate_high: *negate_high,
                };
                packed::run(wave, *op, *dst, sources, selection);
            }
            Action::Wide { op, dst, sources } => wide::run(wave, *op, *dst, sources),
            Action::Carry { op, dst, carry_out, sources } => carry::run(wave, *op, *dst, *carry_out, sources),
            Action::DivFmas { double, dst, sources } => carry::div_fmas(wave, *double, *dst, sources),
            Action::Select { dst, sources, mask, output } => select(wave, *dst, sources, mask, output),
            Action::Compare { relation, kind, dst, sources, write_exec } => {
                let mask = compare::run(wave, *relation, *kind, sources) & wave.exec();
                wave.write64(*dst, mask);
                if *write_exec {
                    wave.write64(EXEC, mask);
                }
            }
            Action::ReadFirstLane { dst, source } => {
                // With no lane active the hardware reads lane 0.
                let exec = wave.exec();
                let lane = if exec == 0 { 0 } else { exec.trailing_zeros() as usize };
                wave.scalars[usize::from(*dst)] = wave.lanes(source, &mut [0; WAVE])[lane];
            }
            Action::ReadLane { dst, source, lane } => {
                let lane = wave.scalar(lane) as usize % WAVE;
                wave.scalars[usize::from(*dst)] = wave.lanes(source, &mut [0; WAVE])[lane];
            }
            Action::WriteLane { dst, value, lane } => {
                let (value, lane) = (wave.scalar(value) as u32, wave.scalar(lane) as usize % WAVE);
                wave.vectors[usize::from(*dst)][lane] = value;
            }
            Action::SwapRegisters { a, b } => {
                let (old_a, old_b, exec) = (wave.vectors[usize::from(*a)], wave.vectors[usize::from(*b)], wave.exec());
                wave.write(*a, &old_b, exec);
                wave.write(*b, &old_a, exec);
            }
            Action::PermuteBackward { dst, index, data, offset } => {
                let (index, data, exec) = (&wave.vectors[usize::from(*index)], &wave.vectors[usize::from(*data)], wave.exec());
                let moved = lanes::permute_backward(index, data, *offset, exec);
                wave.write(*dst, &moved, exec);
            }
            Action::PermuteForward { dst, index, data, offset } => {
                let (index, data, exec) = (&wave.vectors[usize::from(*index)], &wave.vectors[usize::from(*data)], wave.exec());
                let moved = lanes::permute_forward(index, data, *offset, exec);
                wave.write(*dst, &moved, exec);
            }
            Action::Swizzle { dst, data, pattern } => {
                let exec = wave.exec();
                let moved = lanes::swizzle(&wave.vectors[usize::from(*data)], *pattern, exec);
                wave.write(*dst, &moved, exec);
            }
            Action::Barrier => wave.state = State::AtBarrier,
            Action::EndProgram => wave.state = State::Done,
            Action::Trap => return Err("the kernel trapped".into()),
            Action::Nothing => {}
            Action::Unsupported => {
                let problem = self.program.problems.get(&(wave.pc - 1)).map_or("", String::as_str);
                return Err(format!("this instruction is not emulated: {problem}"));
            }
        }
        Ok(())
    }

    fn jump(&self, wave: &mut Wave, link: Option<u8>, to: u8) -> Result<(), String> {
        let target = wave.read64(to);
        if let Some(link) = link {
            let next = self.program.code.get(wave.pc as usize).map_or(0, |next| next.address);
            wave.write64(link, self.load_address.wrapping_add(next));
        }
        let index = self.program.index_of.get(&target.wrapping_sub(self.load_address));
        wave.pc = *index.ok_or_else(|| format!("jump to {target:#x}, where no instruction starts"))?;
        Ok(())
    }
}

fn holds(wave: &Wave, condition: Condition) -> bool {
    match condition {
        Condition::Always => true,
        Condition::SccZero => !wave.scc,
        Condition::SccOne => wave.scc,
        Condition::VccZero => wave.read64(VCC) == 0,
        Condition::VccNonZero => wave.read64(VCC) != 0,
        Condition::ExecZero => wave.exec() == 0,
        Condition::ExecNonZero => wave.exec() != 0,
    }
}

fn narrow(wave: &mut Wave, op: NarrowOp, dst: u16, sources: &[Operand; 3], output: &Output) {
    let (mut space_a, mut space_b, mut space_c) = ([0; WAVE], [0; WAVE], [0; WAVE]);
    let mut result = [0; WAVE];
    let mut mask = wave.exec();
    let mut a = wave.lanes(&sources[0], &mut space_a);
    let moved;
    if let Some(dpp) = &output.dpp {
        let (values, enabled) = lanes::dpp(a, dpp, mask);
        moved = values;
        a = &moved;
        mask &= enabled;
    }
    let b = wave.lanes(&sources[1], &mut space_b);
    let c = wave.lanes(&sources[2], &mut space_c);
    if !float::run(op, a, b, c, &mut result) && !integer::run(op, a, b, c, &mut result) {
        unreachable!("every narrow operation is a float or an integer one: {op:?}");
    }
    wave.write_output(dst, &mut result, mask, output);
}

/// `v_cndmask_b32`: the second source where the mask has a 1, else the first.
fn select(wave: &mut Wave, dst: u16, sources: &[Operand; 2], mask: &Operand, output: &Output) {
    let (mut space_a, mut space_b) = ([0; WAVE], [0; WAVE]);
    let mut exec = wave.exec();
    let chosen = wave.scalar(mask);
    let mut a = wave.lanes(&sources[0], &mut space_a);
    let moved;
    if let Some(dpp) = &output.dpp {
        let (values, enabled) = lanes::dpp(a, dpp, exec);
        moved = values;
        a = &moved;
        exec &= enabled;
    }
    let b = wave.lanes(&sources[1], &mut space_b);
    let mut result = std::array::from_fn(|lane| if chosen >> lane & 1 == 1 { b[lane] } else { a[lane] });
    wave.write_output(dst, &mut result, exec, output);
}
