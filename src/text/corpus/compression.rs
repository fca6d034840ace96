//! Looking through `.gz` and `.zst`.

use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Compression {
    None,
    Gzip,
    Zstd,
}

/// Bytes read, and decompressed, at a time.
const BUFFER_BYTES: usize = 1 << 18;

/// The name without `.gz` or `.zst`, and what was there.
fn split(path: &Path) -> (PathBuf, Compression) {
    match extension(path).as_deref() {
        Some("gz" | "gzip") => (path.with_extension(""), Compression::Gzip),
        Some("zst" | "zstd") => (path.with_extension(""), Compression::Zstd),
        _ => (path.to_path_buf(), Compression::None),
    }
}

fn extension(path: &Path) -> Option<String> {
    path.extension().map(|e| e.to_string_lossy().to_ascii_lowercase())
}

/// Extension below `.gz` or `.zst`, in small letters.
pub(super) fn inner_extension(path: &Path) -> Option<String> {
    extension(&split(path).0)
}

pub(super) fn of(path: &Path) -> Compression {
    split(path).1
}

/// What a file holds, decompressed on the way if its name says so.
///
/// # Errors
/// When the decompressor cannot be set up. What is damaged or cut off is found while reading.
pub fn unpacked(path: &Path, file: impl Read + 'static) -> io::Result<Box<dyn BufRead>> {
    let file = BufReader::with_capacity(BUFFER_BYTES, file);
    Ok(match of(path) {
        Compression::None => Box::new(file),
        Compression::Gzip => Box::new(BufReader::with_capacity(BUFFER_BYTES, flate2::bufread::MultiGzDecoder::new(file))),
        Compression::Zstd => {
            let mut decoder = zstd::stream::read::Decoder::with_buffer(file)?;
            // `zstd --long=31` is the largest window there is.
            decoder.window_log_max(31)?;
            Box::new(BufReader::with_capacity(BUFFER_BYTES, decoder))
        }
    })
}
