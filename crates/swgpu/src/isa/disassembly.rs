//! Runs `llvm-objdump -d` once per module and cuts its text into lines of mnemonic and operands.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use super::LoadError;

/// One instruction as the disassembler printed it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line {
    /// Address relative to the load address.
    pub address: u64,
    pub text: String,
}

impl Line {
    pub fn mnemonic(&self) -> &str {
        self.text.split_whitespace().next().unwrap_or("")
    }
}

/// The disassembler to use: `$SWGPU_OBJDUMP`, else the first `llvm-objdump` that is found.
fn candidates() -> Vec<PathBuf> {
    if let Some(path) = std::env::var_os("SWGPU_OBJDUMP") {
        return vec![path.into()];
    }
    let names = [
        "llvm-objdump-19",
        "llvm-objdump-20",
        "llvm-objdump-21",
        "llvm-objdump-22",
        "llvm-objdump",
        "/opt/rocm/llvm/bin/llvm-objdump",
    ];
    names.iter().map(PathBuf::from).collect()
}

/// Disassembles a whole ELF file.
pub fn disassemble(file: &[u8]) -> Result<Vec<Line>, LoadError> {
    let fail = |problem: String| LoadError::Disassembler(problem);
    let place = std::env::temp_dir().join(format!("swgpu-{}-{:x}.co", std::process::id(), file.as_ptr() as usize));
    let written = std::fs::File::create(&place).and_then(|mut output| output.write_all(file));
    written.map_err(|error| fail(format!("cannot write {}: {error}", place.display())))?;
    let mut answer = None;
    for program in candidates() {
        let run = Command::new(&program).arg("-d").arg("--no-show-raw-insn").arg(&place).stdin(Stdio::null()).output();
        match run {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            Err(error) => answer = Some(Err(fail(format!("{}: {error}", program.display())))),
            Ok(output) if !output.status.success() => {
                let said = String::from_utf8_lossy(&output.stderr).into_owned();
                answer = Some(Err(fail(format!("{} failed: {said}", program.display()))));
            }
            Ok(output) => answer = Some(Ok(String::from_utf8_lossy(&output.stdout).into_owned())),
        }
        break;
    }
    // Only a left-over file in the temporary folder if it fails.
    let _ = std::fs::remove_file(&place);
    let text = answer.unwrap_or_else(|| Err(fail("no llvm-objdump found; install llvm-19 or set SWGPU_OBJDUMP".into())))?;
    parse(&text)
}

/// Cuts the disassembler's text into instructions. Lines look like `\ts_nop 0  // 000000001900: BF800000`.
pub fn parse(text: &str) -> Result<Vec<Line>, LoadError> {
    let mut lines = Vec::new();
    for line in text.lines() {
        let Some((instruction, comment)) = line.split_once("//") else { continue };
        let instruction = instruction.trim();
        if instruction.is_empty() {
            continue;
        }
        let digits = comment.trim().split([':', ' ']).next().unwrap_or("");
        let address = u64::from_str_radix(digits, 16).map_err(|_| {
            LoadError::Disassembler(format!("no address in the line `{line}`; is this llvm-objdump 19 or newer?"))
        })?;
        lines.push(Line { address, text: instruction.to_string() });
    }
    if lines.is_empty() {
        return Err(LoadError::Disassembler("printed no instruction".into()));
    }
    Ok(lines)
}
