//! Documents: from JSONL files, plain or `.zst`, with a field `text`; or each after its length, as `mix` writes them.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use anyhow::{Context, Result};

/// Documents of `path` until they have `limit_bytes` together.
pub fn read(path: &Path, limit_bytes: usize) -> Result<Vec<String>> {
    let file = std::fs::File::open(path).with_context(|| format!("opening {}", path.display()))?;
    let zst = path.extension().is_some_and(|e| e == "zst");
    let reader: Box<dyn Read> = if zst { Box::new(zstd::Decoder::new(file)?) } else { Box::new(file) };
    let (mut documents, mut total) = (Vec::new(), 0);
    for line in BufReader::new(reader).lines() {
        let line = line.with_context(|| format!("reading {}", path.display()))?;
        let mut record: serde_json::Value =
            serde_json::from_str(&line).with_context(|| format!("a line of {}", path.display()))?;
        let serde_json::Value::String(text) = record["text"].take() else { continue };
        total += text.len();
        documents.push(text);
        if total >= limit_bytes {
            break;
        }
    }
    Ok(documents)
}

/// Documents of all `paths`, `limit_bytes` of each.
pub fn read_all(paths: &[std::path::PathBuf], limit_bytes: usize) -> Result<Vec<String>> {
    let mut all = Vec::new();
    for path in paths {
        all.extend(read(path, limit_bytes)?);
    }
    Ok(all)
}

/// Documents each after its length in bytes (8, little-endian).
pub fn read_framed(path: &Path) -> Result<Vec<String>> {
    let bytes = std::fs::read(path).with_context(|| format!("reading {}", path.display()))?;
    let (mut rest, mut documents) = (&bytes[..], Vec::new());
    while let Some((length, after)) = rest.split_first_chunk::<8>() {
        let (text, after) = after.split_at_checked(u64::from_le_bytes(*length) as usize).context("a document is cut off")?;
        documents.push(std::str::from_utf8(text)?.to_string());
        rest = after;
    }
    Ok(documents)
}
