//! Decoding of global, flat and LDS instructions.

use super::instruction::{Action, Address, Half, Space};
use super::names::AtomicOp;
use super::operands::{Parts, integer};

/// Cache hints, which change nothing here.
const HINTS: &[&str] = &["sc0", "sc1", "nt"];

/// `(bytes, signed, half)` of what a load or store mnemonic ends with.
fn shape(text: &str) -> Option<(u8, bool, Half)> {
    Some(match text {
        "ubyte" | "byte" | "u8" | "b8" => (1, false, Half::Whole),
        "sbyte" | "i8" => (1, true, Half::Whole),
        "ushort" | "short" | "u16" | "b16" => (2, false, Half::Whole),
        "sshort" | "i16" => (2, true, Half::Whole),
        "short_d16" | "u16_d16" => (2, false, Half::Low),
        "short_d16_hi" | "u16_d16_hi" | "b16_d16_hi" => (2, false, Half::High),
        "ubyte_d16" | "u8_d16" => (1, false, Half::Low),
        "ubyte_d16_hi" | "byte_d16_hi" | "u8_d16_hi" | "b8_d16_hi" => (1, false, Half::High),
        "sbyte_d16" | "i8_d16" => (1, true, Half::Low),
        "sbyte_d16_hi" | "i8_d16_hi" => (1, true, Half::High),
        "dword" | "b32" => (4, false, Half::Whole),
        "dwordx2" | "b64" => (8, false, Half::Whole),
        "dwordx3" | "b96" => (12, false, Half::Whole),
        "dwordx4" | "b128" => (16, false, Half::Whole),
        _ => return None,
    })
}

fn check_modifiers(parts: &Parts, allowed: &[&str]) -> Result<(), String> {
    let unknown = parts.modifiers.iter().find(|word| {
        let key = word.split(':').next().unwrap_or(word);
        !allowed.contains(&key) && !HINTS.contains(word)
    });
    unknown.map_or(Ok(()), |word| Err(format!("unknown modifier `{word}`")))
}

pub fn global(parts: &Parts) -> Result<Action, String> {
    check_modifiers(parts, &["offset"])?;
    let (space, rest) = match parts.name.split_once('_') {
        Some(("global", rest)) => (Space::Global, rest),
        Some(("flat", rest)) => (Space::Flat, rest),
        _ => return Err("unknown instruction".into()),
    };
    let offset = parts.number("offset")?;
    let address = |vector: usize, base: usize| -> Result<Address, String> {
        let scalar = match (space, parts.operands.get(base)) {
            (Space::Global, Some(&"off")) | (Space::Flat, None) => None,
            (Space::Global, Some(_)) => Some(parts.scalar(base)?),
            _ => return Err("unexpected operands".into()),
        };
        Ok(Address { space, vector: parts.vector(vector)?, scalar, offset })
    };
    if let Some(kind) = rest.strip_prefix("load_") {
        let (bytes, signed, half) = shape(kind).ok_or("unknown load")?;
        return Ok(Action::Load { address: address(1, 2)?, dst: parts.vector(0)?, bytes, signed, half });
    }
    if let Some(kind) = rest.strip_prefix("store_") {
        let (bytes, _, half) = shape(kind).ok_or("unknown store")?;
        return Ok(Action::Store { address: address(0, 2)?, data: parts.vector(1)?, bytes, half });
    }
    let op = rest.strip_prefix("atomic_").and_then(AtomicOp::from_mnemonic).ok_or("unknown instruction")?;
    match parts.has("sc0") {
        true => Ok(Action::Atomic { address: address(1, 3)?, op, data: parts.vector(2)?, returns: Some(parts.vector(0)?) }),
        false => Ok(Action::Atomic { address: address(0, 2)?, op, data: parts.vector(1)?, returns: None }),
    }
}

pub fn lds(parts: &Parts) -> Result<Action, String> {
    let rest = parts.name.strip_prefix("ds_").unwrap_or(parts.name);
    check_modifiers(parts, &["offset", "offset0", "offset1"])?;
    if rest == "swizzle_b32" {
        let pattern = swizzle_pattern(parts.value("offset").unwrap_or("0"))?;
        return Ok(Action::Swizzle { dst: parts.vector(0)?, data: parts.vector(1)?, pattern });
    }
    let offset = parts.number("offset")?;
    let address = |vector: usize| -> Result<Address, String> {
        Ok(Address { space: Space::Lds, vector: parts.vector(vector)?, scalar: None, offset })
    };
    match rest {
        "nop" => return Ok(Action::Nothing),
        "bpermute_b32" | "permute_b32" => {
            let (dst, index, data) = (parts.vector(0)?, parts.vector(1)?, parts.vector(2)?);
            let offset = offset as u32;
            return Ok(match rest {
                "bpermute_b32" => Action::PermuteBackward { dst, index, data, offset },
                _ => Action::PermuteForward { dst, index, data, offset },
            });
        }
        _ => {}
    }
    for (prefix, stride) in [("read2st64_", 64), ("read2_", 1), ("write2st64_", 64), ("write2_", 1)] {
        let Some(kind) = rest.strip_prefix(prefix) else { continue };
        let (bytes, ..) = shape(kind).ok_or("unknown pair access")?;
        let scale = stride * u32::from(bytes);
        let offsets = [parts.number("offset0")? as u32 * scale, parts.number("offset1")? as u32 * scale];
        return Ok(match prefix.starts_with("read") {
            true => Action::LoadPair { vector: parts.vector(1)?, dst: parts.vector(0)?, bytes, offsets },
            false => {
                let data = [parts.vector(1)?, parts.vector(2)?];
                Action::StorePair { vector: parts.vector(0)?, data, bytes, offsets }
            }
        });
    }
    if let Some(kind) = rest.strip_prefix("read_") {
        let (bytes, signed, half) = shape(kind).ok_or("unknown load")?;
        return Ok(Action::Load { address: address(1)?, dst: parts.vector(0)?, bytes, signed, half });
    }
    if let Some(kind) = rest.strip_prefix("write_") {
        let (bytes, _, half) = shape(kind).ok_or("unknown store")?;
        return Ok(Action::Store { address: address(0)?, data: parts.vector(1)?, bytes, half });
    }
    let (op, returns) = lds_atomic(rest).ok_or("unknown instruction")?;
    let first = usize::from(returns);
    let returns = if returns { Some(parts.vector(0)?) } else { None };
    Ok(Action::Atomic { address: address(first)?, op, data: parts.vector(first + 1)?, returns })
}

/// LDS atomics have names of their own: `add_rtn_u32`, `max_i32`, `or_b64`, ...
fn lds_atomic(name: &str) -> Option<(AtomicOp, bool)> {
    let (verb, kind) = name.rsplit_once('_')?;
    let (verb, returns) = verb.strip_suffix("_rtn").map_or((verb, false), |verb| (verb, true));
    let global = match (verb, kind) {
        ("add" | "sub" | "inc" | "dec", "u32") | ("and" | "or" | "xor", "b32") => verb.to_string(),
        ("add" | "sub", "u64") | ("and" | "or" | "xor", "b64") => format!("{verb}_x2"),
        ("min" | "max", "i32") => format!("s{verb}"),
        ("min" | "max", "u32") => format!("u{verb}"),
        ("min" | "max", "i64") => format!("s{verb}_x2"),
        ("min" | "max", "u64") => format!("u{verb}_x2"),
        ("add" | "min" | "max", "f32") | ("add", "f64") => format!("{verb}_{kind}"),
        ("wrxchg", "b32") => "swap".into(),
        ("wrxchg", "b64") => "swap_x2".into(),
        _ => return None,
    };
    Some((AtomicOp::from_mnemonic(&global)?, returns))
}

/// The 16-bit swizzle field from the assembler's `swizzle(MODE,...)` or a number.
/// Bit 15 set: permutation within four lanes; else `((lane & and) | or) ^ xor` within 32 lanes, five bits each.
fn swizzle_pattern(text: &str) -> Result<u16, String> {
    let Some(inner) = text.strip_prefix("swizzle(").and_then(|rest| rest.strip_suffix(')')) else {
        return integer(text).map(|number| number as u16);
    };
    let mut entries = inner.split(',').map(str::trim);
    let mode = entries.next().unwrap_or("");
    if mode == "BITMASK_PERM" {
        let mask = entries.next().unwrap_or("").trim_matches('"');
        let (mut and, mut or, mut xor) = (0u16, 0u16, 0u16);
        for letter in mask.chars() {
            (and, or, xor) = (and << 1, or << 1, xor << 1);
            match letter {
                '0' => {}
                '1' => or |= 1,
                'p' => and |= 1,
                'i' => (and, xor) = (and | 1, xor | 1),
                other => return Err(format!("`{other}` in a swizzle mask")),
            }
        }
        return Ok(and | or << 5 | xor << 10);
    }
    let numbers = entries.map(|entry| integer(entry).map(|number| number as u16)).collect::<Result<Vec<u16>, String>>()?;
    match (mode, numbers.as_slice()) {
        ("QUAD_PERM", &[a, b, c, d]) => Ok(0x8000 | a | b << 2 | c << 4 | d << 6),
        ("SWAP", &[size]) => Ok(0x1f | size << 10),
        ("REVERSE", &[size]) => Ok(0x1f | (size - 1) << 10),
        ("BROADCAST", &[size, lane]) => Ok((0x1f & !(size - 1)) | lane << 5),
        _ => Err(format!("swizzle `{inner}`")),
    }
}
