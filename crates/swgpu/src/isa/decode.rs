//! Disassembled lines to instructions. What is not known becomes [`Action::Unsupported`], an error only when a wave gets there.

use std::collections::HashMap;

use super::disassembly::Line;
use super::instruction::{Action, Class, Condition, Instruction, Operand, Source};
use super::names::{ScalarCompare, ScalarOp};
use super::operands::{Parts, integer, operand};
use super::{decode_memory, decode_vector};

/// A module's instructions in address order.
#[derive(Debug)]
pub struct Program {
    pub code: Vec<Instruction>,
    /// Texts of the instructions, for messages.
    pub listing: Vec<String>,
    /// Why an instruction was not decoded, by its index.
    pub problems: HashMap<u32, String>,
    /// Index of the instruction at a relative address.
    pub index_of: HashMap<u64, u32>,
}

/// Decodes all lines.
pub fn decode(lines: &[Line]) -> Program {
    let index_of: HashMap<u64, u32> = lines.iter().enumerate().map(|(index, line)| (line.address, index as u32)).collect();
    let mut program = Program { code: Vec::new(), listing: Vec::new(), problems: HashMap::new(), index_of };
    for (index, line) in lines.iter().enumerate() {
        let action = instruction(line, &program.index_of).unwrap_or_else(|problem| {
            program.problems.insert(index as u32, problem);
            Action::Unsupported
        });
        program.code.push(Instruction { address: line.address, class: class(&action), action });
        program.listing.push(line.text.clone());
    }
    program
}

fn class(action: &Action) -> Class {
    use super::instruction::Space;
    match action {
        Action::Matrix { .. } => Class::Matrix,
        Action::Scalar { .. } | Action::ScalarCompare { .. } | Action::ReadClock { .. } | Action::ReadZero { .. } => {
            Class::Scalar
        }
        Action::ScalarLoad { .. } => Class::ScalarMemory,
        Action::Load { address, .. } | Action::Store { address, .. } | Action::Atomic { address, .. } => match address.space {
            Space::Lds => Class::Lds,
            Space::Global | Space::Flat => Class::VectorMemory,
        },
        Action::LoadPair { .. }
        | Action::StorePair { .. }
        | Action::PermuteBackward { .. }
        | Action::PermuteForward { .. }
        | Action::Swizzle { .. } => Class::Lds,
        Action::Branch { .. }
        | Action::Jump { .. }
        | Action::Barrier
        | Action::EndProgram
        | Action::Trap
        | Action::Nothing
        | Action::Unsupported => Class::Control,
        _ => Class::Vector,
    }
}

/// Decodes one line; the error says what is not supported about it.
pub fn instruction(line: &Line, index_of: &HashMap<u64, u32>) -> Result<Action, String> {
    let parts = Parts::new(&line.text);
    match parts.name.split('_').next() {
        Some("s") => scalar(&parts, line.address, index_of),
        Some("v") => decode_vector::vector(&parts),
        Some("ds") => decode_memory::lds(&parts),
        Some("global" | "flat") => decode_memory::global(&parts),
        // Write-back and invalidation of caches: memory is always coherent here.
        Some("buffer") if ["buffer_wbl2", "buffer_inv", "buffer_wbinvl1"].contains(&parts.name) => Ok(Action::Nothing),
        Some("scratch") => Err("scratch memory is not emulated; the kernel must not spill".into()),
        _ => Err("unknown instruction".into()),
    }
}

fn scalar(parts: &Parts, address: u64, index_of: &HashMap<u64, u32>) -> Result<Action, String> {
    let name = parts.name;
    if let Some(condition) = condition(name) {
        let words = i64::from(integer(parts.operand(0)?)? as u16 as i16);
        let target = address.wrapping_add_signed(4 + 4 * words);
        let target = *index_of.get(&target).ok_or_else(|| format!("branch to {target:#x}, where no instruction starts"))?;
        return Ok(Action::Branch { condition, target });
    }
    if let Some(op) = ScalarCompare::from_mnemonic(name) {
        let a = operand(parts.operand(0)?, false)?;
        return Ok(Action::ScalarCompare { op, a, b: operand(parts.operand(1)?, false)? });
    }
    if let Some(op) = ScalarOp::from_mnemonic(name) {
        let dst = parts.scalar(0)?;
        let double = name.ends_with("_b64");
        let zero = Operand::new(Source::Literal(0));
        let optional = |index: usize| parts.operands.get(index).map_or(Ok(zero), |text| operand(text, double));
        return Ok(Action::Scalar { op, dst, a: optional(1)?, b: optional(2)? });
    }
    if let Some(dwords) = name.strip_prefix("s_load_dword") {
        let dwords = if dwords.is_empty() { Ok(1) } else { dwords.trim_start_matches('x').parse() };
        let dwords = dwords.map_err(|_| "unknown width of a scalar load")?;
        let last = parts.operand(2)?;
        let (index, offset) = match parts.scalar(2) {
            Ok(register) => (Some(register), parts.number("offset")?),
            Err(_) => (None, integer(last)?),
        };
        return Ok(Action::ScalarLoad { dwords, dst: parts.scalar(0)?, base: parts.scalar(1)?, index, offset });
    }
    match name {
        "s_endpgm" => Ok(Action::EndProgram),
        "s_barrier" => Ok(Action::Barrier),
        "s_trap" => Ok(Action::Trap),
        "s_waitcnt" | "s_nop" | "s_sleep" | "s_setprio" | "s_icache_inv" | "s_dcache_inv" | "s_dcache_wb" | "s_inst_prefetch"
        | "s_code_end" | "s_ttracedata" | "s_wakeup" => Ok(Action::Nothing),
        "s_memtime" | "s_memrealtime" => Ok(Action::ReadClock { dst: parts.scalar(0)? }),
        "s_getreg_b32" if parts.operand(1)?.starts_with("hwreg(HW_REG_XCC_ID") => Ok(Action::ReadZero { dst: parts.scalar(0)? }),
        "s_setpc_b64" => Ok(Action::Jump { link: None, to: parts.scalar(0)? }),
        "s_swappc_b64" => Ok(Action::Jump { link: Some(parts.scalar(0)?), to: parts.scalar(1)? }),
        _ => Err("unknown instruction".into()),
    }
}

fn condition(name: &str) -> Option<Condition> {
    Some(match name {
        "s_branch" => Condition::Always,
        "s_cbranch_scc0" => Condition::SccZero,
        "s_cbranch_scc1" => Condition::SccOne,
        "s_cbranch_vccz" => Condition::VccZero,
        "s_cbranch_vccnz" => Condition::VccNonZero,
        "s_cbranch_execz" => Condition::ExecZero,
        "s_cbranch_execnz" => Condition::ExecNonZero,
        _ => return None,
    })
}
