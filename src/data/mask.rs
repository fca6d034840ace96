//! `PREFIX.mask`: what is known of each token of a shard of conversations, beside its `.bin`.
//!
//! | bytes | meaning |
//! |---|---|
//! | 8 | `ZAYAMASK` |
//! | 8 | version, u64 little-endian = 1 |
//! | 1 a token | bits of [`marks`](crate::text::chat::marks), in the order of the `.bin` |
//!
//! Tokens of a shard without this file are all learnt.

use std::fs::File;
use std::hash::Hasher;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use memmap2::Mmap;
use twox_hash::XxHash3_64;

use super::shard::with_suffix;
use super::writer::create_temporary;
use crate::error::bad_input;

pub const SUFFIX: &str = ".mask";
const TEMPORARY: &str = ".mask.tmp";
const MAGIC: &[u8; 8] = b"ZAYAMASK";
const VERSION: u64 = 1;
const HEADER_BYTES: usize = 16;

/// The mask of an open shard.
#[derive(Debug)]
pub struct Mask(Mmap);

impl Mask {
    /// The mask of the shard `prefix`, which has `tokens` tokens; None where there is none.
    ///
    /// # Errors
    /// When the file is no mask, or not that of this shard.
    pub fn open(prefix: &Path, tokens: u64) -> Result<Option<Self>> {
        let path = with_suffix(prefix, SUFFIX);
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e).with_context(|| format!("opening the mask {}", path.display())),
        };
        let refuse = |why: String| bad_input(format!("{} cannot be used: {why}; tokenize again", path.display()));
        // SAFETY: the map is read-only; as with the other files of a shard, nobody shortens it while it is open.
        let map = unsafe { Mmap::map(&file) }.with_context(|| format!("mapping the mask {} into memory", path.display()))?;
        if map.len() < HEADER_BYTES || !map.starts_with(MAGIC) {
            return Err(refuse("it does not begin as a mask does (ZAYAMASK)".into()));
        }
        let version = map[8..HEADER_BYTES].iter().rev().fold(0u64, |v, b| v << 8 | u64::from(*b));
        if version != VERSION {
            return Err(refuse(format!("its version is {version}; zaya reads version {VERSION}")));
        }
        let found = (map.len() - HEADER_BYTES) as u64;
        if found != tokens {
            return Err(refuse(format!("it speaks of {found} tokens, the .bin holds {tokens}")));
        }
        Ok(Some(Self(map)))
    }

    /// Appends the marks of tokens `from..to`.
    pub fn read(&self, from: u64, to: u64, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.0[HEADER_BYTES + from as usize..HEADER_BYTES + to as usize]);
    }
}

/// Writes the mask of a shard that is being written, under a temporary name.
pub struct MaskWriter {
    prefix: PathBuf,
    file: BufWriter<File>,
    hash: XxHash3_64,
    bytes: u64,
    published: bool,
}

impl MaskWriter {
    /// # Errors
    /// When the file cannot be made, or another process writes it.
    pub fn create(prefix: &Path) -> Result<Self> {
        let file = BufWriter::with_capacity(1 << 20, create_temporary(&with_suffix(prefix, TEMPORARY))?);
        let mut writer = Self { prefix: prefix.to_path_buf(), file, hash: XxHash3_64::new(), bytes: 0, published: false };
        writer.write(&[&MAGIC[..], &VERSION.to_le_bytes()].concat())?;
        Ok(writer)
    }

    /// Appends the marks of the next tokens.
    pub fn write(&mut self, marks: &[u8]) -> Result<()> {
        self.hash.write(marks);
        self.bytes += marks.len() as u64;
        self.file.write_all(marks).with_context(|| format!("writing {}{TEMPORARY}", self.prefix.display()))
    }

    /// Makes the file durable; its size and hash.
    pub fn finish(&mut self) -> Result<(u64, String)> {
        let writing = || format!("writing {}{TEMPORARY}", self.prefix.display());
        self.file.flush().with_context(writing)?;
        self.file.get_ref().sync_all().with_context(writing)?;
        Ok((self.bytes, format!("{:016x}", self.hash.finish())))
    }

    /// Finishes the file and gives it its name. The shard's index must not be there: whoever sees an index takes the mask beside
    /// it for the shard's own.
    pub fn publish(&mut self) -> Result<(u64, String)> {
        let finished = self.finish()?;
        let (from, to) = (with_suffix(&self.prefix, TEMPORARY), with_suffix(&self.prefix, SUFFIX));
        std::fs::rename(&from, &to).with_context(|| format!("renaming {} to {}", from.display(), to.display()))?;
        self.published = true;
        Ok(finished)
    }
}

impl Drop for MaskWriter {
    fn drop(&mut self) {
        if !self.published {
            // Best effort: a file that stays is overwritten by the next run.
            let _ = std::fs::remove_file(with_suffix(&self.prefix, TEMPORARY));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_read_and_other_files_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let prefix = dir.path().join("x");
        assert!(Mask::open(&prefix, 3).unwrap().is_none());
        let mut writer = MaskWriter::create(&prefix).unwrap();
        writer.write(&[1, 2]).unwrap();
        writer.write(&[9]).unwrap();
        let (bytes, hash) = writer.publish().unwrap();
        let file = std::fs::read(dir.path().join("x.mask")).unwrap();
        assert_eq!(file, b"ZAYAMASK\x01\0\0\0\0\0\0\0\x01\x02\x09");
        assert_eq!((bytes, hash), (19, format!("{:016x}", xxhash_rust::xxh3::xxh3_64(&file))));
        let mut marks = Vec::new();
        Mask::open(&prefix, 3).unwrap().unwrap().read(1, 3, &mut marks);
        assert_eq!(marks, [2, 9]);
        assert!(Mask::open(&prefix, 4).unwrap_err().to_string().contains("3 tokens, the .bin holds 4"));
        for (at, what) in [(0, "ZAYAMASK"), (8, "version")] {
            let mut bad = file.clone();
            bad[at] ^= 2;
            std::fs::write(dir.path().join("x.mask"), bad).unwrap();
            assert!(Mask::open(&prefix, 3).unwrap_err().to_string().contains(what));
        }
        drop(MaskWriter::create(&dir.path().join("y")).unwrap());
        assert!(!dir.path().join("y.mask.tmp").exists());
    }
}
