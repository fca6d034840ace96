//! One safetensors file, written, hashed on the way, and synced.

use std::fs::File;
use std::io::Write;
use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, ensure};
use twox_hash::XxHash3_128;

use super::layout::{Dtype, PlannedFile, TensorInfo, rows_of};
use super::manifest::{FileEntry, Part};
use crate::failpoint::{self, WriteFault};
use crate::model::numbers::{Numbers, each_piece};

/// Numbers written, hashed and looked at a time.
const CHUNK_NUMBERS: usize = 1 << 18;
/// The disk is asked to begin with so many bytes at a time.
const WRITE_BACK_BYTES: usize = 16 << 20;
/// A row block of at least so many bytes is hashed on a thread of its own while it is written.
const BESIDE_BYTES: usize = 256 << 10;

/// Gives the data of a tensor (by its place in the list), `[numel]`.
pub(super) type ReadTensor<'a> = dyn FnMut(usize) -> Result<Vec<f32>> + 'a;

/// Begins to read a tensor (by its place in the list).
pub(super) type OpenTensor<'a> = dyn FnMut(usize) -> Result<Numbers<'a>> + 'a;

/// Where the numbers come from.
pub(super) enum Source<'a> {
    /// One tensor at a time, on demand.
    Read {
        read: &'a mut ReadTensor<'a>,
        /// The tensor last asked for: row blocks of one tensor follow one another, so one in memory is enough.
        index: usize,
        values: Vec<f32>,
    },
    /// One tensor at a time, in pieces: no tensor is ever in memory whole.
    Stream {
        open: &'a mut OpenTensor<'a>,
        /// The tensor that is being read: its row blocks follow one another.
        current: Option<(usize, Numbers<'a>)>,
        buffer: Vec<f32>,
    },
    /// All of them lie in memory, in the order of the list.
    Slices(&'a [&'a [f32]]),
}

impl<'a> Source<'a> {
    pub fn read(read: &'a mut ReadTensor<'a>) -> Self {
        Self::Read { read, index: usize::MAX, values: Vec::new() }
    }

    pub fn stream(open: &'a mut OpenTensor<'a>) -> Self {
        Self::Stream { open, current: None, buffer: Vec::new() }
    }

    /// Shows numbers `range` of a tensor, in one piece where they lie in memory. Of a stream, a tensor's ranges follow one another.
    fn show(
        &mut self,
        tensors: &[TensorInfo],
        wanted: usize,
        range: Range<u64>,
        visit: &mut dyn FnMut(&[f32]) -> Result<()>,
    ) -> Result<()> {
        let info = &tensors[wanted];
        let values: &[f32] = match self {
            Self::Stream { open, current, buffer } => {
                let reading = || format!("reading tensor {} for the checkpoint", info.name);
                let numbers = match current {
                    Some((index, numbers)) if *index == wanted => numbers,
                    _ => &mut current.insert((wanted, open(wanted).with_context(reading)?)).1,
                };
                return each_piece(numbers, (range.end - range.start) as usize, buffer, visit);
            }
            Self::Read { read, index, values } => {
                if *index != wanted {
                    // Freed before the next one is made: never two in memory.
                    *values = Vec::new();
                    *values = read(wanted).with_context(|| format!("reading tensor {} for the checkpoint", info.name))?;
                    *index = wanted;
                }
                values
            }
            Self::Slices(all) => all.get(wanted).copied().with_context(|| format!("tensor {} was not given", info.name))?,
        };
        let numbers: usize = info.shape.iter().product();
        ensure!(
            values.len() == numbers,
            "tensor {} has {} numbers, its shape {:?} says {numbers}",
            info.name,
            values.len(),
            info.shape
        );
        visit(&values[range.start as usize..range.end as usize])
    }
}

/// A file's entry, and its parts by tensor.
pub(super) type Written = (FileEntry, Vec<(usize, Part)>);

/// A file that is written, and not known to be on the disk.
pub(super) struct Unsynced {
    file: File,
    path: PathBuf,
    size: u64,
}

impl Unsynced {
    /// Waits until the file outlives a power cut.
    pub fn sync(self) -> Result<()> {
        let Self { file, path, size: planned } = self;
        let what = || format!("writing {}", path.display());
        failpoint::hit("ckpt.before_file_sync")?;
        file.sync_all().with_context(what)?;
        let size = file.metadata().with_context(what)?.len();
        ensure!(size == planned, "{} has {size} bytes after writing {planned}: the file system lost some", path.display());
        failpoint::hit("ckpt.after_file")
    }
}

/// Writes one planned file into `dir`, to be synced: the disk may be at work on it while the next one is written. `finite`: numbers that are
/// not are an error.
pub(super) fn write_file(
    dir: &Path,
    plan: &PlannedFile,
    tensors: &[TensorInfo],
    source: &mut Source,
    finite: bool,
) -> Result<(Written, Unsynced)> {
    let path = dir.join(&plan.name);
    let what = || format!("writing {}", path.display());
    let mut file = File::options().write(true).create_new(true).open(&path).with_context(what)?;
    file.write_all(&plan.header).with_context(what)?;
    let written = each_part(Some(&mut file), plan, tensors, source, finite).with_context(what)?;
    begin_write_back(&file);
    Ok((written, Unsynced { file, path, size: plan.size() }))
}

/// What [`write_file`] would return, of a file that is not written. Not of a stream, which goes by only once.
pub(super) fn hash_file(plan: &PlannedFile, tensors: &[TensorInfo], source: &mut Source, finite: bool) -> Result<Written> {
    ensure!(!matches!(source, Source::Stream { .. }), "a stream cannot be hashed before it is written");
    each_part(None, plan, tensors, source, finite).with_context(|| format!("hashing what {} would hold", plan.name))
}

/// Goes through the row blocks of a file behind its header: hashes them, and writes them where there is a file.
fn each_part(
    mut file: Option<&mut File>,
    plan: &PlannedFile,
    tensors: &[TensorInfo],
    source: &mut Source,
    finite: bool,
) -> Result<Written> {
    let mut whole = blake3::Hasher::new();
    whole.update(&plan.header);
    let mut parts = Vec::with_capacity(plan.parts.len());
    let mut dirty = 0;
    for part in &plan.parts {
        let info = &tensors[part.tensor];
        let (_, row) = rows_of(&info.shape).context("shape")?;
        let mut seen = Seen { xxh3: XxHash3_128::new(), finite: true };
        source.show(tensors, part.tensor, part.rows.start * row..part.rows.end * row, &mut |values| match &mut file {
            Some(file) => write_piece(file, info.dtype, values, &mut seen, &mut whole, &mut dirty),
            None => {
                hash_piece(info.dtype, values, &mut seen, &mut whole);
                Ok(())
            }
        })?;
        ensure!(seen.finite || !finite, "`{}` holds numbers that are not finite", info.name);
        let start = plan.header.len() as u64;
        parts.push((
            part.tensor,
            Part {
                file: plan.name.clone(),
                rows: [part.rows.start, part.rows.end],
                bytes: [start + part.bytes.start, start + part.bytes.end],
                xxh3: format!("{:032x}", seen.xxh3.finish_128()),
            },
        ));
    }
    Ok((FileEntry { name: plan.name.clone(), size: plan.size(), blake3: whole.finalize().to_hex().to_string() }, parts))
}

/// What was found while a row block was hashed.
struct Seen {
    xxh3: XxHash3_128,
    finite: bool,
}

/// Writes a piece of a row block behind what the file holds, and hashes it: beside the writing where that is worth a thread.
///
/// `dirty`: bytes that the disk has not been asked for yet.
fn write_piece(
    file: &mut File,
    dtype: Dtype,
    values: &[f32],
    seen: &mut Seen,
    whole: &mut blake3::Hasher,
    dirty: &mut usize,
) -> Result<()> {
    if dtype == Dtype::F32 && cfg!(target_endian = "little") {
        // As they lie in memory.
        let mut write = |file: &mut File| -> Result<()> {
            for chunk in values.chunks(CHUNK_NUMBERS) {
                write_or_fault(file, bytemuck::cast_slice(chunk), failpoint::hit_write("ckpt.write")?)?;
                *dirty += size_of_val(chunk);
                if *dirty >= WRITE_BACK_BYTES {
                    begin_write_back(file);
                    *dirty = 0;
                }
            }
            Ok(())
        };
        let mut hash = || hash_piece(dtype, values, seen, whole);
        if size_of_val(values) < BESIDE_BYTES {
            write(file)?;
            hash();
            return Ok(());
        }
        return std::thread::scope(|threads| {
            let hashing = threads.spawn(hash);
            let written = write(file);
            let hashed = hashing.join();
            written?;
            hashed.map_err(|_| anyhow!("the thread that hashes panicked"))
        });
    }
    let mut bytes = Vec::new();
    for chunk in values.chunks(CHUNK_NUMBERS) {
        encode(dtype, chunk, &mut bytes);
        take(chunk, &bytes, seen, whole);
        write_or_fault(file, &bytes, failpoint::hit_write("ckpt.write")?)?;
    }
    Ok(())
}

/// Hashes a piece of a row block, without writing it.
fn hash_piece(dtype: Dtype, values: &[f32], seen: &mut Seen, whole: &mut blake3::Hasher) {
    let mut bytes = Vec::new();
    for chunk in values.chunks(CHUNK_NUMBERS) {
        if dtype == Dtype::F32 && cfg!(target_endian = "little") {
            take(chunk, bytemuck::cast_slice(chunk), seen, whole);
        } else {
            encode(dtype, chunk, &mut bytes);
            take(chunk, &bytes, seen, whole);
        }
    }
}

/// Looks at a chunk of numbers, while it lies in the cache.
fn take(values: &[f32], bytes: &[u8], seen: &mut Seen, whole: &mut blake3::Hasher) {
    // Without an early end, which would keep the compiler from taking many at a time.
    seen.finite &= values.iter().fold(true, |all, x| all & x.is_finite());
    seen.xxh3.write(bytes);
    whole.update(bytes);
}

/// Asks the system to bring to the disk what was written, without waiting: else the disk would be idle until the file is synced.
fn begin_write_back(file: &File) {
    #[cfg(target_os = "linux")]
    {
        use std::os::fd::AsRawFd;
        // SAFETY: an open file; nothing of ours is read or written. 0 bytes from 0 on means all of it. Best effort: the file is synced in any case.
        unsafe { libc::sync_file_range(file.as_raw_fd(), 0, 0, libc::SYNC_FILE_RANGE_WRITE) };
    }
    #[cfg(not(target_os = "linux"))]
    let _ = file;
}

/// A small file, written in one piece and synced.
pub(super) fn write_small(path: &Path, bytes: &[u8], fault: WriteFault) -> Result<()> {
    let what = || format!("writing {}", path.display());
    let mut file = File::create(path).with_context(what)?;
    write_or_fault(&mut file, bytes, fault).with_context(what)?;
    file.sync_all().with_context(what)
}

/// Makes the entries of a folder (names, renames) durable.
pub(super) fn sync_dir(dir: &Path) -> Result<()> {
    File::open(dir).and_then(|d| d.sync_all()).with_context(|| format!("syncing the folder {}", dir.display()))
}

fn write_or_fault(file: &mut File, bytes: &[u8], fault: WriteFault) -> std::io::Result<()> {
    match fault {
        WriteFault::None => file.write_all(bytes),
        WriteFault::Partial => file.write_all(&bytes[..bytes.len() / 2]),
        WriteFault::BitFlip => {
            let (mut bytes, middle) = (bytes.to_vec(), bytes.len() / 2);
            if let Some(byte) = bytes.get_mut(middle) {
                *byte ^= 1;
            }
            file.write_all(&bytes)
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

/// The reverse of `encode`, into a buffer that fits.
pub(super) fn decode(dtype: Dtype, bytes: &[u8], out: &mut [f32]) {
    match dtype {
        Dtype::F32 => out.iter_mut().zip(bytes.as_chunks().0).for_each(|(x, b)| *x = f32::from_le_bytes(*b)),
        Dtype::BF16 => out.iter_mut().zip(bytes.as_chunks().0).for_each(|(x, b)| *x = half::bf16::from_le_bytes(*b).to_f32()),
    }
}
