//! Text for measuring, taken evenly from all of some corpora.

use std::io::Write;
use std::path::PathBuf;

use anyhow::{Context, Result};

use crate::corpus;

/// Documents of `bytes` together, or all if there are not so many: from everywhere the same share, in their order.
fn sample(files: &[PathBuf], bytes: usize) -> Result<Vec<String>> {
    let all = corpus::read_all(files, usize::MAX)?;
    let total: usize = all.iter().map(String::len).sum();
    let (mut seen, mut taken) = (0, 0);
    let fits = |text: &String| {
        seen += text.len();
        let take = (taken + text.len()) as u128 * total as u128 <= seen as u128 * bytes as u128 || bytes >= total;
        taken += if take { text.len() } else { 0 };
        take
    };
    Ok(all.into_iter().filter(fits).collect())
}

/// `mix|text OUTPUT BYTES CORPUS ...`: writes documents framed as `peers.py` reads them, or as one text. Prints the bytes of text.
pub fn run(framed: bool, args: impl Iterator<Item = String>) -> Result<bool> {
    let args: Vec<String> = args.collect();
    let [output, bytes, files @ ..] = &args[..] else { anyhow::bail!("usage: mix|text OUTPUT BYTES CORPUS ...") };
    let files: Vec<PathBuf> = files.iter().map(PathBuf::from).collect();
    let documents = sample(&files, bytes.parse().context("the number of bytes")?)?;
    let mut file = std::io::BufWriter::new(std::fs::File::create(output).with_context(|| format!("creating {output}"))?);
    for text in &documents {
        if framed {
            file.write_all(&(text.len() as u64).to_le_bytes())?;
        }
        file.write_all(text.as_bytes())?;
        if !framed {
            file.write_all(b"\n")?;
        }
    }
    file.flush()?;
    let separators = if framed { 0 } else { documents.len() };
    println!("{}", documents.iter().map(String::len).sum::<usize>() + separators);
    Ok(true)
}
