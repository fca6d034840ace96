//! Reading a token shard: Megatron-LM's indexed dataset, version 1, memory-mapped.
//!
//! `PREFIX.bin` holds token ids, nothing else. `PREFIX.idx`, little-endian:
//!
//! | bytes | meaning |
//! |---|---|
//! | 9 | `MMIDIDX\0\0` |
//! | 8 | version, u64 = 1 |
//! | 1 | code of the ids' type: 8 = uint16, 4 = int32 |
//! | 8, 8 | number of sequences S, number of document borders D + 1 |
//! | 4 S | tokens of each sequence, i32 |
//! | 8 S | place of each sequence's first byte in the `.bin`, i64 |
//! | 8 (D + 1) | first sequence of each document, i64, then S |
//!
//! zaya writes one sequence a document and reads any number.

use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use memmap2::Mmap;

use super::mask::Mask;
use super::sidecar::Sidecar;
use crate::error::bad_input;

pub(super) const MAGIC: &[u8; 9] = b"MMIDIDX\0\0";
pub(super) const VERSION: u64 = 1;
/// Bytes before the first length.
pub(super) const HEADER_BYTES: u64 = 9 + 8 + 1 + 8 + 8;

/// How ids lie in a `.bin`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenType {
    U16,
    I32,
}

impl TokenType {
    /// What Megatron-LM's own writer takes: uint16 for fewer than 65,500 ids (not for the 65,536 that would fit), so
    /// that its readers, which decide by the same number, agree.
    pub fn for_vocab(vocab_size: usize) -> Self {
        if vocab_size < 65_500 { Self::U16 } else { Self::I32 }
    }
    pub fn bytes(self) -> u64 {
        match self {
            Self::U16 => 2,
            Self::I32 => 4,
        }
    }
    pub fn code(self) -> u8 {
        match self {
            Self::U16 => 8,
            Self::I32 => 4,
        }
    }
    pub fn name(self) -> &'static str {
        match self {
            Self::U16 => "uint16",
            Self::I32 => "int32",
        }
    }
    /// Appends ids, all of which the type can hold, as they lie in a `.bin`.
    pub fn append(self, ids: &[u32], bytes: &mut Vec<u8>) {
        match self {
            Self::U16 => {
                let first = bytes.len();
                bytes.resize(first + ids.len() * 2, 0);
                bytes[first..].as_chunks_mut().0.iter_mut().zip(ids).for_each(|(to, id)| *to = (*id as u16).to_le_bytes());
            }
            // As they lie in memory.
            Self::I32 if cfg!(target_endian = "little") => bytes.extend_from_slice(bytemuck::cast_slice(ids)),
            Self::I32 => bytes.extend(ids.iter().flat_map(|id| id.to_le_bytes())),
        }
    }
    fn from_code(code: u8) -> Result<Self> {
        let name = match code {
            8 => return Ok(Self::U16),
            4 => return Ok(Self::I32),
            1 => "uint8",
            2 => "int8",
            3 => "int16",
            5 => "int64",
            6 => "float64",
            7 => "float32",
            _ => bail!("its type code is {code}, which Megatron-LM does not define"),
        };
        bail!("its ids are {name}; zaya reads uint16 and int32")
    }
}

/// An index up to this size is looked through when a dataset is opened. Of a larger one each document is looked at when it is used,
/// so that a thousand million documents are opened as fast as ten.
pub(super) const LARGE_INDEX_BYTES: usize = 64 << 20;

/// One `.bin`/`.idx` pair. Opening looks at the header and the ends only, so it takes the same time for any size; what
/// lies between is checked where it is used, and gives an error rather than a wrong token.
///
/// The files must not be shortened while they are open: the operating system then ends the process (SIGBUS).
#[derive(Debug)]
pub struct Shard {
    bin_path: PathBuf,
    token_type: TokenType,
    bin: Mmap,
    idx: Mmap,
    num_sequences: u64,
    num_documents: u64,
    sidecar: Option<Sidecar>,
    mask: Option<Mask>,
}

/// `PREFIX` of `PREFIX.bin`, `PREFIX.idx` or `PREFIX`.
pub fn prefix_of(path: &Path) -> PathBuf {
    match path.extension() {
        Some(e) if e == "bin" || e == "idx" => path.with_extension(""),
        _ => path.to_path_buf(),
    }
}

/// `PREFIX` + `suffix`, where the prefix may contain dots.
pub fn with_suffix(prefix: &Path, suffix: &str) -> PathBuf {
    let mut name = prefix.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

fn map(path: &Path) -> Result<Mmap> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            let text = format!("token shard {}: there is no such file; make it with `zaya tokenize`", path.display());
            return Err(bad_input(text));
        }
        Err(e) => return Err(e).with_context(|| format!("opening the token shard {}", path.display())),
    };
    // SAFETY: the map is read-only, and the type's documentation asks that nobody shortens the file.
    unsafe { Mmap::map(&file) }.with_context(|| format!("mapping the token shard {} into memory", path.display()))
}

fn read_u64(bytes: &[u8], at: u64) -> u64 {
    let at = at as usize;
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

impl Shard {
    /// `path` is the prefix, the `.bin` or the `.idx`.
    pub fn open(path: &Path) -> Result<Self> {
        let prefix = prefix_of(path);
        let (bin_path, idx_path) = (with_suffix(&prefix, ".bin"), with_suffix(&prefix, ".idx"));
        let idx = map(&idx_path)?;
        let bin = map(&bin_path)?;
        let (token_type, num_sequences, num_documents) =
            check_index(&idx, &bin, &bin_path).with_context(|| format!("token shard {} cannot be used", idx_path.display()))?;
        let sidecar = Sidecar::read(&with_suffix(&prefix, ".json"))?;
        if let Some(s) = &sidecar {
            ensure!(
                (s.bin_bytes, s.idx_bytes) == (bin.len() as u64, idx.len() as u64),
                "token shard {}: its sidecar {}.json was written for other files ({} bytes of .bin, {} of .idx; here {} and {}); \
                 tokenize again",
                bin_path.display(),
                prefix.display(),
                s.bin_bytes,
                s.idx_bytes,
                bin.len(),
                idx.len()
            );
        }
        let mask = Mask::open(&prefix, bin.len() as u64 / token_type.bytes())?;
        if mask.is_none() && sidecar.as_ref().is_some_and(|s| s.chat.is_some()) {
            return Err(bad_input(format!(
                "token shard {}: it holds conversations, and {}.mask, which says what of them is to be learnt, is not there",
                bin_path.display(),
                prefix.display()
            )));
        }
        Ok(Self { bin_path, token_type, bin, idx, num_sequences, num_documents, sidecar, mask })
    }

    pub fn bin_path(&self) -> &Path {
        &self.bin_path
    }
    pub fn token_type(&self) -> TokenType {
        self.token_type
    }
    pub fn num_documents(&self) -> u64 {
        self.num_documents
    }
    /// Sequences; zaya writes one a document.
    pub fn num_sequences(&self) -> u64 {
        self.num_sequences
    }
    pub fn num_tokens(&self) -> u64 {
        self.bin.len() as u64 / self.token_type.bytes()
    }
    pub fn sidecar(&self) -> Option<&Sidecar> {
        self.sidecar.as_ref()
    }
    /// What is known of its tokens, where it says more than that they are learnt.
    pub fn mask(&self) -> Option<&Mask> {
        self.mask.as_ref()
    }
    /// Contents of the `.bin`.
    pub fn token_bytes(&self) -> &[u8] {
        &self.bin
    }
    /// Contents of the `.idx`.
    pub fn index_bytes(&self) -> &[u8] {
        &self.idx
    }

    /// Reads the whole index: lengths, places and documents must follow from one another, as every writer of the format has
    /// them. Without this a damaged index would quietly train on other text.
    pub fn check_index(&self) -> Result<()> {
        let size = self.token_type.bytes();
        let (places, documents) = (HEADER_BYTES + 4 * self.num_sequences, HEADER_BYTES + 12 * self.num_sequences);
        let damaged = |what: String| {
            bad_input(format!(
                "token shard {} is damaged: {what} in its .idx; tokenize again, or restore the file",
                self.bin_path.display()
            ))
        };
        let mut place = 0;
        for s in 0..self.num_sequences {
            let at = (HEADER_BYTES + 4 * s) as usize;
            let length = i32::from_le_bytes(self.idx[at..at + 4].try_into().expect("four bytes"));
            if length < 0 || read_u64(&self.idx, places + 8 * s) != place {
                return Err(damaged(format!("sequence {s} has a length or place that does not follow from those before")));
            }
            place += length as u64 * size;
        }
        if place != self.bin.len() as u64 {
            return Err(damaged(format!("the lengths add up to {place} bytes, the .bin has {}", self.bin.len())));
        }
        let mut last = 0;
        for d in 0..=self.num_documents {
            let sequence = read_u64(&self.idx, documents + 8 * d);
            if sequence < last || sequence > self.num_sequences || (d == 0 && sequence != 0) {
                return Err(damaged(format!("document {d} begins at sequence {}", sequence as i64)));
            }
            last = sequence;
        }
        Ok(())
    }

    /// Whether the index is too large to be looked through.
    pub fn is_large(&self) -> bool {
        self.idx.len() > LARGE_INDEX_BYTES
    }

    fn sequence_of_document(&self, d: u64) -> u64 {
        read_u64(&self.idx, HEADER_BYTES + 12 * self.num_sequences + 8 * d)
    }

    /// Place of the first byte of sequence `s`; of the one after the last, the end of the `.bin`.
    fn place(&self, s: u64) -> u64 {
        match s < self.num_sequences {
            true => read_u64(&self.idx, HEADER_BYTES + 4 * self.num_sequences + 8 * s),
            false => self.bin.len() as u64,
        }
    }

    /// Whether what the index says of document `d` follows from one another: what [`Shard::check_index`] finds out for all.
    ///
    /// # Errors
    /// When it does not.
    pub fn check_document(&self, d: u64) -> Result<()> {
        let (from, to) = (self.sequence_of_document(d), self.sequence_of_document(d + 1));
        let follows = |s: u64| {
            let at = (HEADER_BYTES + 4 * s) as usize;
            let length = i32::from_le_bytes(self.idx[at..at + 4].try_into().expect("four bytes"));
            u64::try_from(length).is_ok_and(|n| self.place(s).checked_add(n * self.token_type.bytes()) == Some(self.place(s + 1)))
        };
        let sound = from <= to && to <= self.num_sequences && (from == to || (follows(from) && follows(to - 1)));
        ensure!(
            sound,
            "token shard {} is damaged: document {d} has lengths or places in the .idx that do not follow from one another; tokenize again, \
             or restore the file",
            self.bin_path.display()
        );
        Ok(())
    }

    /// Where each of the documents `d` begins, as [`Shard::document_start`]. Of a large index by reading the file, which leaves no
    /// part of it in this process's memory.
    pub fn document_starts(&self, documents: impl Iterator<Item = u64>) -> Result<Vec<u64>> {
        use std::os::unix::fs::FileExt;
        if !self.is_large() {
            return documents.map(|d| self.document_start(d)).collect();
        }
        let path = self.bin_path.with_extension("idx");
        let file = File::open(&path).with_context(|| format!("reading {}", path.display()))?;
        // Numbers that lie far apart: reading ahead of each would read the whole file. Where the advice is not taken, it is only slow.
        // SAFETY: the descriptor is open, and the call touches no memory of this process.
        let _ = unsafe { libc::posix_fadvise(std::os::fd::AsRawFd::as_raw_fd(&file), 0, 0, libc::POSIX_FADV_RANDOM) };
        let number = |at: u64| -> Result<u64> {
            let mut bytes = [0; 8];
            file.read_exact_at(&mut bytes, at).with_context(|| format!("reading {}", path.display()))?;
            Ok(u64::from_le_bytes(bytes))
        };
        let start = |d: u64| {
            let sequence = number(HEADER_BYTES + 12 * self.num_sequences + 8 * d)?;
            let byte = match sequence.cmp(&self.num_sequences) {
                std::cmp::Ordering::Less => number(HEADER_BYTES + 4 * self.num_sequences + 8 * sequence)?,
                std::cmp::Ordering::Equal => self.bin.len() as u64,
                std::cmp::Ordering::Greater => u64::MAX,
            };
            self.token_at(d, sequence, byte)
        };
        documents.map(start).collect()
    }

    /// Where document `d` begins, in tokens from the start of the `.bin`; `d = num_documents` gives the end.
    pub fn document_start(&self, d: u64) -> Result<u64> {
        let sequence = self.sequence_of_document(d);
        let byte = if sequence <= self.num_sequences { self.place(sequence) } else { u64::MAX };
        self.token_at(d, sequence, byte)
    }

    /// The token at `byte`, where document `d` begins with `sequence`.
    fn token_at(&self, d: u64, sequence: u64, byte: u64) -> Result<u64> {
        ensure!(
            byte <= self.bin.len() as u64 && byte.is_multiple_of(self.token_type.bytes()),
            "token shard {} is damaged: its index puts document {d} at a place that does not exist (sequence {} of {})",
            self.bin_path.display(),
            sequence as i64,
            self.num_sequences
        );
        Ok(byte / self.token_type.bytes())
    }

    /// Appends tokens `from..to` (counted from the start of the `.bin`) to `out`.
    pub fn read(&self, from: u64, to: u64, out: &mut Vec<u32>) {
        let size = self.token_type.bytes();
        let bytes = &self.bin[(from * size) as usize..(to * size) as usize];
        match self.token_type {
            TokenType::U16 => out.extend(bytes.as_chunks::<2>().0.iter().map(|b| u32::from(u16::from_le_bytes(*b)))),
            TokenType::I32 => out.extend(bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b))),
        }
    }
}

/// Header, sizes and both ends of the index; returns the ids' type, the number of sequences and of documents.
fn check_index(idx: &[u8], bin: &[u8], bin_path: &Path) -> Result<(TokenType, u64, u64)> {
    ensure!(idx.len() as u64 >= HEADER_BYTES, "it has {} bytes, less than a header: it was not written to its end", idx.len());
    ensure!(&idx[..9] == MAGIC, "it does not begin with the magic bytes MMIDIDX: not a Megatron-LM index");
    let version = read_u64(idx, 9);
    ensure!(version == VERSION, "its version is {version}; zaya reads version {VERSION}");
    let token_type = TokenType::from_code(idx[17])?;
    let (sequences, borders) = (read_u64(idx, 18), read_u64(idx, 26));
    let expected = || sequences.checked_mul(12)?.checked_add(borders.checked_mul(8)?)?.checked_add(HEADER_BYTES);
    let found = idx.len() as u64;
    match expected() {
        Some(e) if e == found => {}
        Some(e) if e.checked_add(sequences) == Some(found) => {
            bail!("it is a multimodal dataset (a mode for each sequence); zaya reads text")
        }
        e => bail!(
            "its header speaks of {sequences} sequences and {borders} document borders, which takes {} bytes, but it has {found}: \
             it was cut or is damaged",
            e.map_or("too many".into(), |e| e.to_string())
        ),
    }
    ensure!(borders >= 1, "it has no document borders");
    let docs_at = HEADER_BYTES + 12 * sequences;
    let (first, last) = (read_u64(idx, docs_at), read_u64(idx, docs_at + 8 * (borders - 1)));
    ensure!(first == 0 && last == sequences, "its document borders run from {first} to {last} instead of 0 to {sequences}");
    let end = match sequences {
        0 => 0,
        n => {
            let at = (HEADER_BYTES + 4 * (n - 1)) as usize;
            let len = i32::from_le_bytes(idx[at..at + 4].try_into().expect("four bytes"));
            let place = read_u64(idx, HEADER_BYTES + 4 * n + 8 * (n - 1));
            let end = u64::try_from(len).ok().and_then(|len| place.checked_add(len * token_type.bytes()));
            end.context("its last sequence has an impossible length or place: it is damaged")?
        }
    };
    let (have, path) = (bin.len() as u64, bin_path.display());
    ensure!(have >= end, "{path} has {have} bytes, but the index speaks of {end}: the .bin was cut; copy or tokenize it again");
    ensure!(have == end, "{path} has {have} bytes, but the index speaks of {end}: the two files do not belong together");
    Ok((token_type, sequences, borders - 1))
}
