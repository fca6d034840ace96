//! One safetensors file, written, hashed on the way, and synced.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use xxhash_rust::xxh3::Xxh3;

use super::layout::{Dtype, PlannedFile, TensorInfo, rows_of};
use super::manifest::{FileEntry, Part};
use crate::failpoint::{self, WriteFault};

/// Numbers converted and written at a time.
const CHUNK_NUMBERS: usize = 1 << 20;

/// Gives the data of a tensor (by its place in the list), `[numel]`.
pub(super) type ReadTensor<'a> = dyn FnMut(usize) -> Result<Vec<f32>> + 'a;

/// The tensor last asked for: row blocks of one tensor follow one another, so one in memory is enough.
pub(super) struct Current {
    index: usize,
    values: Vec<f32>,
}

impl Current {
    pub fn none() -> Self {
        Self { index: usize::MAX, values: Vec::new() }
    }

    fn get(&mut self, tensors: &[TensorInfo], index: usize, read: &mut ReadTensor) -> Result<&[f32]> {
        if self.index != index {
            // Freed before the next one is made: never two in memory.
            self.values = Vec::new();
            self.values = read(index).with_context(|| format!("reading tensor {} for the checkpoint", tensors[index].name))?;
            self.index = index;
            let wanted: usize = tensors[index].shape.iter().product();
            ensure!(
                self.values.len() == wanted,
                "tensor {} has {} numbers, its shape {:?} says {wanted}",
                tensors[index].name,
                self.values.len(),
                tensors[index].shape
            );
        }
        Ok(&self.values)
    }
}

/// Writes one planned file into `dir`. Returns its entry, and its parts by tensor.
pub(super) fn write_file(
    dir: &Path,
    plan: &PlannedFile,
    tensors: &[TensorInfo],
    current: &mut Current,
    read: &mut ReadTensor,
) -> Result<(FileEntry, Vec<(usize, Part)>)> {
    let path = dir.join(&plan.name);
    let what = || format!("writing {}", path.display());
    let mut file = File::options().write(true).create_new(true).open(&path).with_context(what)?;
    let mut whole = blake3::Hasher::new();
    file.write_all(&plan.header).with_context(what)?;
    whole.update(&plan.header);

    let mut parts = Vec::with_capacity(plan.parts.len());
    let mut bytes = Vec::new();
    for part in &plan.parts {
        let info = &tensors[part.tensor];
        let values = current.get(tensors, part.tensor, read)?;
        let (_, row) = rows_of(&info.shape).context("shape")?;
        let values = &values[(part.rows.start * row) as usize..(part.rows.end * row) as usize];
        let mut hash = Xxh3::new();
        for chunk in values.chunks(CHUNK_NUMBERS) {
            encode(info.dtype, chunk, &mut bytes);
            hash.update(&bytes);
            whole.update(&bytes);
            write_or_fault(&mut file, &mut bytes, failpoint::hit_write("ckpt.write")?).with_context(what)?;
        }
        let start = plan.header.len() as u64;
        parts.push((
            part.tensor,
            Part {
                file: plan.name.clone(),
                rows: [part.rows.start, part.rows.end],
                bytes: [start + part.bytes.start, start + part.bytes.end],
                xxh3: format!("{:032x}", hash.digest128()),
            },
        ));
    }
    failpoint::hit("ckpt.before_file_sync")?;
    file.sync_all().with_context(what)?;
    let size = file.metadata().with_context(what)?.len();
    ensure!(size == plan.size(), "{} has {size} bytes after writing {}: the file system lost some", path.display(), plan.size());
    failpoint::hit("ckpt.after_file")?;
    Ok((FileEntry { name: plan.name.clone(), size, blake3: whole.finalize().to_hex().to_string() }, parts))
}

/// A small file, written in one piece and synced.
pub(super) fn write_small(path: &Path, bytes: &[u8], fault: WriteFault) -> Result<()> {
    let what = || format!("writing {}", path.display());
    let mut file = File::create(path).with_context(what)?;
    write_or_fault(&mut file, &mut bytes.to_vec(), fault).with_context(what)?;
    file.sync_all().with_context(what)
}

/// Makes the entries of a folder (names, renames) durable.
pub(super) fn sync_dir(dir: &Path) -> Result<()> {
    File::open(dir).and_then(|d| d.sync_all()).with_context(|| format!("syncing the folder {}", dir.display()))
}

fn write_or_fault(file: &mut File, bytes: &mut [u8], fault: WriteFault) -> std::io::Result<()> {
    match fault {
        WriteFault::None => file.write_all(bytes),
        WriteFault::Partial => file.write_all(&bytes[..bytes.len() / 2]),
        WriteFault::BitFlip => {
            let middle = bytes.len() / 2;
            if let Some(byte) = bytes.get_mut(middle) {
                *byte ^= 1;
            }
            file.write_all(bytes)
        }
    }
}

/// Numbers as they lie on disk: little-endian, bf16 rounded to nearest even.
fn encode(dtype: Dtype, values: &[f32], out: &mut Vec<u8>) {
    out.resize(values.len() * dtype.bytes() as usize, 0);
    match dtype {
        Dtype::F32 => {
            for (bytes, x) in out.chunks_exact_mut(4).zip(values) {
                bytes.copy_from_slice(&x.to_le_bytes());
            }
        }
        Dtype::BF16 => {
            for (bytes, x) in out.chunks_exact_mut(2).zip(values) {
                bytes.copy_from_slice(&half::bf16::from_f32(*x).to_le_bytes());
            }
        }
    }
}

/// The reverse of `encode`.
pub(super) fn decode(dtype: Dtype, bytes: &[u8], out: &mut Vec<f32>) {
    match dtype {
        Dtype::F32 => out.extend(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))),
        Dtype::BF16 => out.extend(bytes.chunks_exact(2).map(|b| half::bf16::from_le_bytes([b[0], b[1]]).to_f32())),
    }
}
