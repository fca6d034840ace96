//! Cuts one instruction's text into operands and modifiers, and reads registers and numbers.

use super::instruction::{EXEC, FIRST_ACCUMULATION_REGISTER, M0, Operand, SHARED_APERTURE, Source, VCC};

/// An instruction's text, cut up.
#[derive(Debug, Clone)]
pub struct Parts<'a> {
    /// Mnemonic without its encoding suffix.
    pub name: &'a str,
    /// `dpp` or `sdwa`, else empty.
    pub encoding: &'a str,
    pub operands: Vec<&'a str>,
    pub modifiers: Vec<&'a str>,
}

impl<'a> Parts<'a> {
    pub fn new(text: &'a str) -> Self {
        let (mnemonic, rest) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
        let (name, encoding) = match mnemonic.rsplit_once('_') {
            Some((name, "e32" | "e64")) => (name, ""),
            Some((name, suffix @ ("dpp" | "sdwa"))) => (name, suffix),
            _ => (mnemonic, ""),
        };
        let (mut operands, mut modifiers) = (Vec::new(), Vec::new());
        let pieces = split_outside_brackets(rest);
        let last = pieces.len().saturating_sub(1);
        for (index, piece) in pieces.into_iter().enumerate() {
            let mut words = piece.split_whitespace();
            let Some(first) = words.next() else { continue };
            operands.push(first);
            if index == last {
                modifiers.extend(words);
            }
        }
        Self { name, encoding, operands, modifiers }
    }

    /// Value text of the modifier `key:value`.
    pub fn value(&self, key: &str) -> Option<&'a str> {
        self.modifiers.iter().find_map(|word| word.strip_prefix(key)?.strip_prefix(':'))
    }

    pub fn has(&self, word: &str) -> bool {
        self.modifiers.contains(&word)
    }

    /// Number of the modifier `key:number`, 0 if there is none.
    pub fn number(&self, key: &str) -> Result<i64, String> {
        self.value(key).map_or(Ok(0), integer)
    }

    /// Bits of a modifier such as `op_sel:[0,1,1]`, first entry lowest.
    pub fn bits(&self, key: &str, default: u8) -> Result<u8, String> {
        let Some(text) = self.value(key) else { return Ok(default) };
        let entries = text.trim_matches(['[', ']']).split(',');
        entries.enumerate().try_fold(0, |sum, (place, entry)| match entry {
            "0" => Ok(sum),
            "1" => Ok(sum | 1 << place),
            other => Err(format!("bit `{other}` in {key}")),
        })
    }

    pub fn operand(&self, index: usize) -> Result<&'a str, String> {
        self.operands.get(index).copied().ok_or_else(|| format!("operand {index} is missing"))
    }

    pub fn vector(&self, index: usize) -> Result<u16, String> {
        vector_register(self.operand(index)?)
    }

    pub fn scalar(&self, index: usize) -> Result<u8, String> {
        scalar_register(self.operand(index)?)
    }
}

fn split_outside_brackets(text: &str) -> Vec<&str> {
    let (mut depth, mut start, mut pieces) = (0, 0, Vec::new());
    for (place, letter) in text.char_indices() {
        match letter {
            '[' | '(' => depth += 1,
            ']' | ')' => depth -= 1,
            ',' if depth == 0 => {
                pieces.push(text[start..place].trim());
                start = place + 1;
            }
            _ => {}
        }
    }
    pieces.push(text[start..].trim());
    pieces
}

pub fn integer(text: &str) -> Result<i64, String> {
    let (negative, digits) = text.strip_prefix('-').map_or((false, text), |digits| (true, digits));
    let value = match digits.strip_prefix("0x") {
        Some(hex) => i64::from_str_radix(hex, 16),
        None => digits.parse(),
    };
    let value = value.map_err(|_| format!("`{text}` is no number"))?;
    Ok(if negative { -value } else { value })
}

/// First register number of `v7`, `v[8:11]`, and of `a7` behind the ordinary registers.
pub fn vector_register(text: &str) -> Result<u16, String> {
    let wrong = || format!("`{text}` is no vector register");
    let (base, rest) = match text.split_at_checked(1) {
        Some(("v", rest)) => (0, rest),
        Some(("a", rest)) => (FIRST_ACCUMULATION_REGISTER, rest),
        _ => return Err(wrong()),
    };
    Ok(base + first_number(rest).ok_or_else(wrong)?)
}

/// `7` of `7` and of `[7:10]`.
fn first_number(text: &str) -> Option<u16> {
    let text = text.strip_prefix('[').map_or(text, |inner| inner.trim_end_matches(']').split(':').next().unwrap_or(inner));
    text.parse().ok()
}

pub fn scalar_register(text: &str) -> Result<u8, String> {
    let special = match text {
        "vcc" | "vcc_lo" => Some(VCC),
        "vcc_hi" => Some(VCC + 1),
        "exec" | "exec_lo" => Some(EXEC),
        "exec_hi" => Some(EXEC + 1),
        "m0" => Some(M0),
        "flat_scratch" | "flat_scratch_lo" => Some(102),
        "flat_scratch_hi" => Some(103),
        "xnack_mask" | "xnack_mask_lo" => Some(104),
        "xnack_mask_hi" => Some(105),
        _ => None,
    };
    if let Some(number) = special {
        return Ok(number);
    }
    let (first, offset) = match text.strip_prefix("ttmp") {
        Some(rest) => (rest, 108),
        None => (text.strip_prefix('s').unwrap_or(""), 0),
    };
    let number = first_number(first).filter(|&number| number + offset < 128);
    number.map(|number| (number + offset) as u8).ok_or_else(|| format!("`{text}` is no scalar register"))
}

/// A source operand with `-`, `|x|` and `sext(x)` taken in. `double`: decimal numbers mean 64-bit floats.
pub fn operand(text: &str, double: bool) -> Result<Operand, String> {
    let (mut rest, mut negate, mut absolute, mut sign_extend) = (text, false, false, false);
    if let Some(after) = rest.strip_prefix('-').filter(|after| !after.starts_with(|letter: char| letter.is_ascii_digit())) {
        (negate, rest) = (true, after);
    }
    if let Some(inner) = rest.strip_prefix('|').and_then(|after| after.strip_suffix('|')) {
        (absolute, rest) = (true, inner);
    }
    if let Some(inner) = rest.strip_prefix("sext(").and_then(|after| after.strip_suffix(')')) {
        (sign_extend, rest) = (true, inner);
    }
    if let Some(inner) = rest.strip_prefix("neg(").and_then(|after| after.strip_suffix(')')) {
        (negate, rest) = (true, inner);
    }
    Ok(Operand { negate, absolute, sign_extend, ..Operand::new(source(rest, double)?) })
}

fn source(text: &str, double: bool) -> Result<Source, String> {
    match text {
        "scc" | "src_scc" => return Ok(Source::Scc),
        "vccz" | "src_vccz" => return Ok(Source::VccIsZero),
        "execz" | "src_execz" => return Ok(Source::ExecIsZero),
        "src_shared_base" => return Ok(Source::Literal(u64::from(SHARED_APERTURE) << 32)),
        _ => {}
    }
    if let Ok(register) = vector_register(text) {
        return Ok(Source::Vector(register));
    }
    if let Ok(register) = scalar_register(text) {
        return Ok(Source::Scalar(register));
    }
    if text.contains('.') {
        let wrong = |_| format!("`{text}` is no operand");
        return Ok(Source::Literal(match double {
            true => text.parse::<f64>().map_err(wrong)?.to_bits(),
            false => u64::from(text.parse::<f32>().map_err(wrong)?.to_bits()),
        }));
    }
    integer(text).map(|value| Source::Literal(value as u64)).map_err(|_| format!("`{text}` is no operand"))
}
