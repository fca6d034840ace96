//! Decoding of vector instructions (VOP1, VOP2, VOP3, VOPC, VOP3P, with DPP and SDWA).

use super::instruction::{Action, CompareType, Dpp, LaneControl, Operand, Output, Part, Relation, Source, Unused, VCC};
use super::names::{CarryOp, MatrixOp, NarrowOp, PackedOp, WideOp};
use super::operands::{Parts, integer, operand};

const KNOWN_MODIFIERS: &[&str] = &[
    "quad_perm",
    "row_shl",
    "row_shr",
    "row_ror",
    "row_bcast",
    "row_newbcast",
    "row_mask",
    "bank_mask",
    "bound_ctrl",
    "dst_sel",
    "dst_unused",
    "src0_sel",
    "src1_sel",
    "mul",
    "div",
    "op_sel",
    "op_sel_hi",
    "neg_lo",
    "neg_hi",
    "wave_shl",
    "wave_rol",
    "wave_shr",
    "wave_ror",
];

pub fn vector(parts: &Parts) -> Result<Action, String> {
    let name = parts.name;
    check_modifiers(parts)?;
    if let Some(op) = MatrixOp::from_mnemonic(name) {
        if !parts.modifiers.is_empty() {
            return Err(format!("modifiers {:?} of a matrix product", parts.modifiers));
        }
        let c = operand(parts.operand(3)?, false)?;
        return Ok(Action::Matrix { op, dst: parts.vector(0)?, a: parts.vector(1)?, b: parts.vector(2)?, c });
    }
    if let Some(op) = PackedOp::from_mnemonic(name) {
        return Ok(Action::Packed {
            op,
            dst: parts.vector(0)?,
            sources: sources(parts, 1, false)?,
            select_low: parts.bits("op_sel", 0)?,
            select_high: parts.bits("op_sel_hi", 7)?,
            negate_low: parts.bits("neg_lo", 0)?,
            negate_high: parts.bits("neg_hi", 0)?,
        });
    }
    if ["op_sel", "op_sel_hi", "neg_lo", "neg_hi"].iter().any(|key| parts.value(key).is_some()) {
        return Err("half-register selection is not supported for this instruction".into());
    }
    if let Some(rest) = name.strip_prefix("v_cmp_").or_else(|| name.strip_prefix("v_cmpx_")) {
        return compare(parts, rest);
    }
    if let Some(op) = CarryOp::from_mnemonic(name) {
        plain_output(parts)?;
        let sources = sources(parts, 2, name.ends_with("f64"))?;
        return Ok(Action::Carry { op, dst: parts.vector(0)?, carry_out: parts.scalar(1)?, sources });
    }
    if let Some(op) = WideOp::from_mnemonic(name) {
        plain_output(parts)?;
        let mut sources = sources(parts, 1, name.ends_with("f64"))?;
        if op == WideOp::v_fmac_f64 {
            sources[2] = operand(parts.operand(0)?, true)?;
        }
        return Ok(Action::Wide { op, dst: parts.vector(0)?, sources });
    }
    match name {
        "v_cndmask_b32" => {
            let [a, b, _] = sources(parts, 1, false)?;
            let mask = operand(parts.operands.get(3).copied().unwrap_or("vcc"), false)?;
            Ok(Action::Select { dst: parts.vector(0)?, sources: [a, b], mask, output: output(parts)? })
        }
        "v_div_fmas_f32" | "v_div_fmas_f64" => {
            plain_output(parts)?;
            let double = name.ends_with("f64");
            Ok(Action::DivFmas { double, dst: parts.vector(0)?, sources: sources(parts, 1, double)? })
        }
        "v_readfirstlane_b32" => Ok(Action::ReadFirstLane { dst: parts.scalar(0)?, source: operand(parts.operand(1)?, false)? }),
        "v_readlane_b32" => {
            let lane = operand(parts.operand(2)?, false)?;
            Ok(Action::ReadLane { dst: parts.scalar(0)?, source: operand(parts.operand(1)?, false)?, lane })
        }
        "v_writelane_b32" => {
            let lane = operand(parts.operand(2)?, false)?;
            Ok(Action::WriteLane { dst: parts.vector(0)?, value: operand(parts.operand(1)?, false)?, lane })
        }
        "v_swap_b32" => Ok(Action::SwapRegisters { a: parts.vector(0)?, b: parts.vector(1)? }),
        "v_nop" => Ok(Action::Nothing),
        _ => narrow(parts),
    }
}

fn narrow(parts: &Parts) -> Result<Action, String> {
    let op = NarrowOp::from_mnemonic(parts.name).ok_or("unknown instruction")?;
    let output = output(parts)?;
    let is_float = parts.name.ends_with("f32");
    if (output.clamp || output.scale != 1.0) && !is_float {
        return Err("clamp or scale of an integer result is not supported".into());
    }
    let mut sources = sources(parts, 1, false)?;
    match op {
        NarrowOp::v_fmac_f32 => sources[2] = operand(parts.operand(0)?, false)?,
        // The literal is the factor in `fmamk` and the summand in `fmaak`; the text has both in the order of `fma`.
        NarrowOp::v_fmaak_f32 | NarrowOp::v_fmamk_f32 if parts.operands.len() != 4 => return Err("needs four operands".into()),
        _ => {}
    }
    Ok(Action::Narrow { op, dst: parts.vector(0)?, sources, output })
}

fn check_modifiers(parts: &Parts) -> Result<(), String> {
    let unknown = parts.modifiers.iter().find(|word| {
        let key = word.split(':').next().unwrap_or(word);
        !KNOWN_MODIFIERS.contains(&key) && !["clamp", "row_mirror", "row_half_mirror"].contains(word)
    });
    unknown.map_or(Ok(()), |word| Err(format!("unknown modifier `{word}`")))
}

/// For instructions whose output modifiers are not emulated.
fn plain_output(parts: &Parts) -> Result<(), String> {
    match (parts.modifiers.is_empty(), parts.encoding) {
        (true, "") => Ok(()),
        _ => Err("modifiers are not supported for this instruction".into()),
    }
}

/// Up to three sources from operand `first` on; missing ones read as 0.
fn sources(parts: &Parts, first: usize, double: bool) -> Result<[Operand; 3], String> {
    let mut sources = [Operand::new(Source::Literal(0)); 3];
    for (index, text) in parts.operands.iter().skip(first).take(3).enumerate() {
        sources[index] = operand(text, double)?;
    }
    for (index, key) in ["src0_sel", "src1_sel"].iter().enumerate() {
        if let Some(text) = parts.value(key) {
            sources[index].part = part(text)?;
        }
    }
    Ok(sources)
}

fn part(text: &str) -> Result<Part, String> {
    Ok(match text {
        "DWORD" => Part::Whole,
        "WORD_0" => Part::Word(0),
        "WORD_1" => Part::Word(1),
        "BYTE_0" => Part::Byte(0),
        "BYTE_1" => Part::Byte(1),
        "BYTE_2" => Part::Byte(2),
        "BYTE_3" => Part::Byte(3),
        other => return Err(format!("register part `{other}`")),
    })
}

fn output(parts: &Parts) -> Result<Output, String> {
    let scale = match (parts.value("mul"), parts.value("div")) {
        (None, None) => 1.0,
        (Some("2"), None) => 2.0,
        (Some("4"), None) => 4.0,
        (None, Some("2")) => 0.5,
        other => return Err(format!("output scale {other:?}")),
    };
    let unused = match parts.value("dst_unused") {
        None | Some("UNUSED_PAD") => Unused::Pad,
        Some("UNUSED_SEXT") => Unused::SignExtend,
        Some("UNUSED_PRESERVE") => Unused::Preserve,
        Some(other) => return Err(format!("dst_unused `{other}`")),
    };
    let part = parts.value("dst_sel").map_or(Ok(Part::Whole), part)?;
    Ok(Output { dpp: dpp(parts)?, part, unused, clamp: parts.has("clamp"), scale })
}

fn dpp(parts: &Parts) -> Result<Option<Dpp>, String> {
    if parts.encoding != "dpp" {
        return Ok(None);
    }
    let amount = |key: &str| -> Result<Option<u8>, String> {
        parts.value(key).map(|text| integer(text).map(|number| number as u8)).transpose()
    };
    let control = if let Some(text) = parts.value("quad_perm") {
        let mut lanes = [0; 4];
        for (lane, entry) in lanes.iter_mut().zip(text.trim_matches(['[', ']']).split(',')) {
            *lane = integer(entry)? as u8;
        }
        LaneControl::QuadPermute(lanes)
    } else if let Some(by) = amount("row_shl")? {
        LaneControl::RowShiftLeft(by)
    } else if let Some(by) = amount("row_shr")? {
        LaneControl::RowShiftRight(by)
    } else if let Some(by) = amount("row_ror")? {
        LaneControl::RowRotateRight(by)
    } else if let Some(lane) = amount("row_newbcast")? {
        LaneControl::RowNewBroadcast(lane)
    } else if let Some(lane) = amount("row_bcast")? {
        if lane == 15 { LaneControl::RowBroadcast15 } else { LaneControl::RowBroadcast31 }
    } else if parts.has("row_mirror") {
        LaneControl::RowMirror
    } else if parts.has("row_half_mirror") {
        LaneControl::RowHalfMirror
    } else if parts.value("wave_shl").is_some() {
        LaneControl::WaveShiftLeft
    } else if parts.value("wave_rol").is_some() {
        LaneControl::WaveRotateLeft
    } else if parts.value("wave_shr").is_some() {
        LaneControl::WaveShiftRight
    } else if parts.value("wave_ror").is_some() {
        LaneControl::WaveRotateRight
    } else {
        return Err("unknown lane control".into());
    };
    let mask = |key: &str| -> Result<u8, String> { Ok(amount(key)?.unwrap_or(0xf)) };
    let zero_invalid = parts.value("bound_ctrl").is_some();
    Ok(Some(Dpp { control, row_mask: mask("row_mask")?, bank_mask: mask("bank_mask")?, zero_invalid }))
}

/// `rest` is the mnemonic without `v_cmp_`, for example `lt_f32`.
fn compare(parts: &Parts, rest: &str) -> Result<Action, String> {
    let (relation, kind) = rest.rsplit_once('_').ok_or("unknown comparison")?;
    let kind = match kind {
        "f32" => CompareType::F32,
        "f64" => CompareType::F64,
        "i32" => CompareType::I32,
        "u32" => CompareType::U32,
        "i64" => CompareType::I64,
        "u64" => CompareType::U64,
        "i16" => CompareType::I16,
        "u16" => CompareType::U16,
        other => return Err(format!("comparison of {other}")),
    };
    let relation = match relation {
        "f" => Relation::Never,
        "lt" => Relation::Less,
        "eq" => Relation::Equal,
        "le" => Relation::LessEqual,
        "gt" => Relation::Greater,
        "lg" => Relation::LessGreater,
        "ge" => Relation::GreaterEqual,
        "o" => Relation::Ordered,
        "u" => Relation::Unordered,
        "nge" => Relation::NotGreaterEqual,
        "nlg" => Relation::NotLessGreater,
        "ngt" => Relation::NotGreater,
        "nle" => Relation::NotLessEqual,
        "ne" | "neq" => Relation::NotEqual,
        "nlt" => Relation::NotLess,
        "t" | "tru" => Relation::Always,
        "class" if kind == CompareType::F32 => Relation::Class,
        other => return Err(format!("comparison `{other}`")),
    };
    if parts.encoding == "dpp" {
        return Err("comparison with DPP".into());
    }
    let [a, b, _] = sources(parts, 1, kind == CompareType::F64)?;
    let write_exec = parts.name.starts_with("v_cmpx_");
    let dst = if parts.operand(0)? == "vcc" { VCC } else { parts.scalar(0)? };
    Ok(Action::Compare { relation, kind, dst, sources: [a, b], write_exec })
}
