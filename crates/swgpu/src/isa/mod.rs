//! From a code object's bytes to decoded instructions: the ELF file and its metadata, the disassembler's text, and the
//! compact instructions that [`crate::exec`] runs.

pub mod code_object;
pub mod decode;
mod decode_memory;
mod decode_vector;
pub mod disassembly;
pub mod instruction;
pub mod names;
pub mod operands;

/// Why a code object cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error("code object: {0}")]
    Object(String),
    #[error("code object is for {found}, this device is {expected}; compile with --offload-arch={expected}")]
    WrongTarget { found: String, expected: &'static str },
    #[error("kernel {kernel}: {problem}")]
    Kernel { kernel: String, problem: String },
    #[error("disassembler: {0}")]
    Disassembler(String),
}
