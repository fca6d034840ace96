//! Lists the instructions of gfx942 code objects that the emulator does not know, and fails if there are any:
//! `cargo run --example unsupported -- kernels/build/*.gfx942.co`

use std::process::ExitCode;

use swgpu::isa::{code_object, decode, disassembly};

fn unsupported(path: &str) -> Result<usize, Box<dyn std::error::Error>> {
    let file = std::fs::read(path)?;
    let object = code_object::parse(&file)?;
    let program = decode::decode(&disassembly::disassemble(&file)?);
    let mut problems: Vec<_> = program.problems.iter().collect();
    problems.sort();
    for (index, problem) in &problems {
        println!("{path}: {}: {problem}", program.listing[**index as usize]);
    }
    println!("{path}: {} kernels, {} instructions, {} not emulated", object.kernels.len(), program.code.len(), problems.len());
    Ok(problems.len())
}

fn main() -> ExitCode {
    let mut failed = false;
    for path in std::env::args().skip(1) {
        match unsupported(&path) {
            Ok(count) => failed |= count > 0,
            Err(error) => {
                println!("{path}: {error}");
                failed = true;
            }
        }
    }
    if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}
