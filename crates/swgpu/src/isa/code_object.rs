//! The ELF file that clang writes for an AMD GPU: metadata note, kernel descriptors, loadable segments.
//! Layouts: LLVM's "User Guide for AMDGPU Backend", sections "Code Object V5 Metadata" and "Kernel Descriptor".

use object::elf::{FileHeader64, PT_LOAD};
use object::read::elf::{ElfFile, FileHeader, NoteIterator, ProgramHeader};
use object::{LittleEndian, Object, ObjectSymbol};
use serde::Deserialize;

use super::LoadError;

/// The processor that the software GPU plays.
pub const TARGET: &str = "gfx942";
const NT_AMDGPU_METADATA: u32 = 32;
const EM_AMDGPU: u16 = 224;
const R_AMDGPU_ABS64: u32 = 3;
const R_AMDGPU_RELATIVE64: u32 = 13;

/// One argument of a kernel, as the metadata describes it. Offsets and sizes in bytes of the kernarg segment.
#[derive(Debug, Clone, Deserialize)]
pub struct Argument {
    #[serde(rename = ".offset")]
    pub offset: usize,
    #[serde(rename = ".size")]
    pub size: usize,
    #[serde(rename = ".value_kind")]
    pub kind: String,
}

impl Argument {
    /// Arguments that the runtime fills in, not the caller.
    pub fn is_hidden(&self) -> bool {
        self.kind.starts_with("hidden_")
    }
}

#[derive(Debug, Clone, Deserialize)]
struct KernelMetadata {
    #[serde(rename = ".name")]
    name: String,
    #[serde(rename = ".symbol")]
    symbol: String,
    #[serde(rename = ".kernarg_segment_size")]
    kernarg_bytes: usize,
    #[serde(rename = ".group_segment_fixed_size")]
    lds_bytes: usize,
    #[serde(rename = ".private_segment_fixed_size")]
    scratch_bytes: usize,
    #[serde(rename = ".max_flat_workgroup_size")]
    max_workgroup: usize,
    #[serde(rename = ".wavefront_size")]
    wave: usize,
    #[serde(rename = ".vgpr_count")]
    vgprs: usize,
    #[serde(rename = ".agpr_count", default)]
    agprs: usize,
    #[serde(rename = ".sgpr_count")]
    sgprs: usize,
    #[serde(rename = ".args", default)]
    arguments: Vec<Argument>,
}

#[derive(Deserialize)]
struct Metadata {
    #[serde(rename = "amdhsa.target", default)]
    target: String,
    #[serde(rename = "amdhsa.kernels", default)]
    kernels: Vec<KernelMetadata>,
}

/// What a launch needs to know about one kernel.
#[derive(Debug, Clone)]
pub struct KernelInfo {
    pub name: String,
    /// Address of the first instruction, relative to the code object's load address.
    pub entry: u64,
    pub kernarg_bytes: usize,
    pub lds_bytes: usize,
    pub max_workgroup: usize,
    pub vgprs: usize,
    pub agprs: usize,
    pub sgprs: usize,
    pub arguments: Vec<Argument>,
    pub setup: RegisterSetup,
}

/// Which values the hardware puts into scalar registers before a wave starts, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegisterSetup {
    pub dispatch_pointer: bool,
    pub kernarg_pointer: bool,
    pub dispatch_id: bool,
    pub workgroup_id: [bool; 3],
}

/// A parsed code object: its memory image (position independent) and its kernels.
#[derive(Debug)]
pub struct CodeObject {
    /// The loadable segments, laid out from relative address 0.
    pub image: Vec<u8>,
    /// Places of 8 bytes in the image that hold a relative address to which the load address must be added.
    pub relocations: Vec<(u64, u64)>,
    pub kernels: Vec<KernelInfo>,
    /// Length of the ELF file in bytes.
    pub file_bytes: usize,
}

/// Length in bytes of the ELF file that starts at `header`, from its section header table (which linkers put last).
pub fn file_length(header: &[u8; 64]) -> Result<usize, LoadError> {
    if &header[..4] != b"\x7fELF" {
        let magic = &header[..4];
        return Err(LoadError::Object(format!(
            "no ELF file (first bytes {magic:02x?}); pass what `clang --no-gpu-bundle-output` wrote"
        )));
    }
    let number =
        |at: usize, bytes: usize| header[at..at + bytes].iter().rev().fold(0u64, |sum, &byte| sum << 8 | u64::from(byte));
    let sections = number(40, 8) + number(58, 2) * number(60, 2);
    let segments = number(32, 8) + number(54, 2) * number(56, 2);
    Ok(sections.max(segments) as usize)
}

/// Reads a code object. Refuses another processor than gfx942 and kernels that need what is not emulated (scratch memory,
/// wave32, queue pointer, preloaded arguments).
pub fn parse(file: &[u8]) -> Result<CodeObject, LoadError> {
    let bad = |what: &'static str| move |error: object::read::Error| LoadError::Object(format!("{what}: {error}"));
    let elf = ElfFile::<FileHeader64<LittleEndian>>::parse(file).map_err(bad("ELF header"))?;
    let endian = elf.endian();
    let header = elf.elf_header();
    if header.e_machine(endian) != EM_AMDGPU {
        return Err(LoadError::Object(format!("ELF machine {} is no AMD GPU (224)", header.e_machine(endian))));
    }
    let segments = header.program_headers(endian, file).map_err(bad("program headers"))?;
    let metadata = metadata(segments, endian, file)?;
    if metadata.target.rsplit("--").next().and_then(|name| name.split(':').next()) != Some(TARGET) {
        return Err(LoadError::WrongTarget { found: metadata.target, expected: TARGET });
    }
    let mut image = Vec::new();
    for segment in segments.iter().filter(|segment| segment.p_type(endian) == PT_LOAD) {
        let start = segment.p_vaddr(endian) as usize;
        let data = segment.data(endian, file).map_err(|()| LoadError::Object("a segment lies outside the file".into()))?;
        let end = start + segment.p_memsz(endian) as usize;
        image.resize(image.len().max(end), 0);
        image[start..start + data.len()].copy_from_slice(data);
    }
    let mut relocations = Vec::new();
    for (offset, relocation) in elf.dynamic_relocations().into_iter().flatten() {
        let object::RelocationFlags::Elf { r_type } = relocation.flags() else { continue };
        let symbol = match relocation.target() {
            object::RelocationTarget::Symbol(index) => {
                let table = elf.dynamic_symbol_table();
                let symbol = table.as_ref().and_then(|table| object::ObjectSymbolTable::symbol_by_index(table, index).ok());
                symbol.map_or(0, |symbol| symbol.address())
            }
            _ => 0,
        };
        match r_type {
            R_AMDGPU_ABS64 | R_AMDGPU_RELATIVE64 => {
                relocations.push((offset, symbol.wrapping_add(relocation.addend() as u64)));
            }
            other => return Err(LoadError::Object(format!("relocation type {other} at {offset:#x} is not supported"))),
        }
    }
    let mut kernels = Vec::new();
    for kernel in metadata.kernels {
        let symbol = elf.dynamic_symbols().find(|symbol| symbol.name() == Ok(kernel.symbol.as_str()));
        let Some(descriptor) = symbol.map(|symbol| symbol.address()) else {
            return Err(LoadError::Kernel { kernel: kernel.name, problem: format!("no symbol {}", kernel.symbol) });
        };
        kernels.push(kernel_info(kernel, descriptor, &image)?);
    }
    Ok(CodeObject { image, relocations, kernels, file_bytes: file.len() })
}

fn metadata(
    segments: &[object::elf::ProgramHeader64<LittleEndian>],
    endian: LittleEndian,
    file: &[u8],
) -> Result<Metadata, LoadError> {
    for segment in segments {
        let Ok(Some(notes)) = segment.notes(endian, file) else { continue };
        let mut notes: NoteIterator<FileHeader64<LittleEndian>> = notes;
        while let Ok(Some(note)) = notes.next() {
            if note.n_type(endian) == NT_AMDGPU_METADATA && note.name() == b"AMDGPU" {
                return rmp_serde::from_slice(note.desc())
                    .map_err(|error| LoadError::Object(format!("metadata note is not understood: {error}")));
            }
        }
    }
    Err(LoadError::Object("no AMDGPU metadata note; compile with -mcode-object-version=5".into()))
}

/// Reads the 64-byte kernel descriptor at relative address `at`.
fn kernel_info(kernel: KernelMetadata, at: u64, image: &[u8]) -> Result<KernelInfo, LoadError> {
    let refuse = |problem: String| LoadError::Kernel { kernel: kernel.name.clone(), problem };
    let Some(descriptor) = image.get(at as usize..at as usize + 64) else {
        return Err(refuse(format!("kernel descriptor at {at:#x} lies outside the image")));
    };
    let word = |offset: usize| u32::from_le_bytes([0, 1, 2, 3].map(|k| descriptor[offset + k]));
    let entry_offset = u64::from(word(16)) | u64::from(word(20)) << 32;
    let resources = word(52);
    let properties = word(56) & 0xffff;
    let preload = word(56) >> 16;
    let has = |bit: u32| properties >> bit & 1 == 1;
    if kernel.scratch_bytes > 0 || resources & 1 == 1 || word(4) > 0 {
        return Err(refuse(format!("needs {} bytes of scratch memory; the kernel must not spill", kernel.scratch_bytes)));
    }
    if kernel.wave != 64 {
        return Err(refuse(format!("is compiled for waves of {} lanes, gfx942 has 64", kernel.wave)));
    }
    let unsupported =
        [(0, "private segment buffer"), (2, "queue pointer"), (5, "flat scratch"), (6, "private segment size"), (10, "wave32")];
    for (bit, name) in unsupported {
        if has(bit) {
            return Err(refuse(format!("asks for {name}, which is not emulated")));
        }
    }
    if preload != 0 {
        return Err(refuse("asks for preloaded kernel arguments, which are not emulated".into()));
    }
    Ok(KernelInfo {
        entry: at.wrapping_add(entry_offset),
        kernarg_bytes: kernel.kernarg_bytes,
        lds_bytes: kernel.lds_bytes,
        max_workgroup: kernel.max_workgroup,
        vgprs: kernel.vgprs,
        agprs: kernel.agprs,
        sgprs: kernel.sgprs,
        setup: RegisterSetup {
            dispatch_pointer: has(1),
            kernarg_pointer: has(3),
            dispatch_id: has(4),
            workgroup_id: [7, 8, 9].map(|bit| resources >> bit & 1 == 1),
        },
        arguments: kernel.arguments,
        name: kernel.name,
    })
}
