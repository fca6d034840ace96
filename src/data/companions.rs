//! Files beside a `.bin` with which other programs read the same ids.
//!
//! The ids are the same bytes for all of them: an int32 of Megatron-LM is never negative, so it is the uint32 of the others.
//!
//! | | file | layout |
//! |---|---|---|
//! | datatrove, nanotron | `.ds.index` | end of each document in tokens, u64, little-endian, no header |
//! | | `.ds.metadata` | lines: tokenizer `\|` bytes of an id; tokens; tokens for people |
//! | OLMo-core, Dolma | `.csv.gz` | a line a document: start, end (tokens), number, source file, line there |

use std::fs::File;
use std::io::{BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use flate2::write::GzEncoder;

use super::shard::{TokenType, with_suffix};
use super::writer::create_temporary;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Companion {
    /// datatrove and nanotron.
    Ds,
    /// OLMo-core and Dolma.
    Olmo,
}

impl Companion {
    pub fn suffixes(self) -> &'static [&'static str] {
        match self {
            Self::Ds => &[".ds.metadata", ".ds.index"],
            Self::Olmo => &[".csv.gz"],
        }
    }
}

/// Where a document comes from.
#[derive(Debug, Clone, Copy, Default)]
pub struct Origin<'a> {
    pub source: &'a str,
    /// 1-based line or row; 0 for a whole file.
    pub line: u64,
}

/// Writes the files of one shard under temporary names.
pub(super) struct CompanionWriters {
    ds: Option<(PathBuf, BufWriter<File>)>,
    olmo: Option<csv::Writer<GzEncoder<BufWriter<File>>>>,
    suffixes: Vec<&'static str>,
    tokens: u64,
    documents: u64,
}

impl CompanionWriters {
    pub fn create(prefix: &Path, wanted: &[Companion]) -> Result<Self> {
        let create = |suffix: &str| create_temporary(&with_suffix(prefix, &format!("{suffix}.tmp"))).map(BufWriter::new);
        let wants = |companion| wanted.contains(&companion);
        Ok(Self {
            ds: if wants(Companion::Ds) { Some((prefix.to_path_buf(), create(".ds.index")?)) } else { None },
            olmo: match wants(Companion::Olmo) {
                // No name and no time go into the header: the same documents give the same bytes.
                true => Some(csv::Writer::from_writer(GzEncoder::new(create(".csv.gz")?, flate2::Compression::fast()))),
                false => None,
            },
            suffixes: wanted.iter().flat_map(|c| c.suffixes()).copied().collect(),
            tokens: 0,
            documents: 0,
        })
    }

    /// Suffixes of the files.
    pub fn suffixes(&self) -> Vec<&'static str> {
        self.suffixes.clone()
    }

    /// The next document, which ends at token `end`.
    pub fn push(&mut self, end: u64, tokens: u64, origin: &Origin<'_>) -> Result<()> {
        if let Some((prefix, index)) = &mut self.ds {
            index.write_all(&end.to_le_bytes()).with_context(|| format!("writing {}.ds.index.tmp", prefix.display()))?;
        }
        if let Some(lines) = &mut self.olmo {
            let row = (end - tokens, end, self.documents, origin.source, origin.line);
            lines.serialize(row).context("writing the .csv.gz.tmp of a shard")?;
        }
        self.tokens = end;
        self.documents += 1;
        Ok(())
    }

    /// Completes the files and makes them durable.
    pub fn finish(&mut self, tokenizer: &str, token_type: TokenType) -> Result<()> {
        if let Some((prefix, index)) = &mut self.ds {
            let sync = |file: &mut BufWriter<File>| file.flush().and_then(|()| file.get_ref().sync_all());
            sync(index).with_context(|| format!("writing {}.ds.index.tmp", prefix.display()))?;
            let path = with_suffix(prefix, ".ds.metadata.tmp");
            let mut file = BufWriter::new(create_temporary(&path)?);
            let text = format!("{tokenizer}|{}\n{}\n{}", token_type.bytes(), self.tokens, for_people(self.tokens));
            file.write_all(text.as_bytes())
                .and_then(|()| sync(&mut file))
                .with_context(|| format!("writing {}", path.display()))?;
        }
        if let Some(lines) = self.olmo.take() {
            let finish = || -> Result<()> {
                let gz = lines.into_inner().map_err(|e| e.into_error())?;
                let mut file = gz.finish()?;
                file.flush()?;
                Ok(file.get_ref().sync_all()?)
            };
            finish().context("writing the .csv.gz.tmp of a shard")?;
        }
        Ok(())
    }
}

/// A line of a `.csv.gz`: start, end, number, source file, line there.
pub(super) type Row = (u64, u64, u64, String, u64);

/// Lines of a `.csv.gz`.
pub(super) fn rows(path: &Path) -> Result<impl Iterator<Item = csv::Result<Row>> + use<>> {
    let file = File::open(path).with_context(|| format!("reading {}", path.display()))?;
    let lines = flate2::bufread::MultiGzDecoder::new(BufReader::new(file));
    Ok(csv::ReaderBuilder::new().has_headers(false).from_reader(lines).into_deserialize())
}

/// 12345678 as "12.3 MT".
fn for_people(tokens: u64) -> String {
    let mut value = tokens as f64;
    let mut prefixes = ["", "k", "M", "G", "T", "P"].into_iter();
    let mut prefix = prefixes.next().unwrap_or_default();
    while value >= 999.5 {
        let Some(next) = prefixes.next() else { break };
        (value, prefix) = (value / 1000.0, next);
    }
    let decimals = if prefix.is_empty() || value >= 99.95 {
        0
    } else if value >= 9.995 {
        1
    } else {
        2
    };
    format!("{value:.decimals$} {prefix}T")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_for_people_have_three_digits() {
        for (tokens, text) in
            [(0, "0 T"), (999, "999 T"), (1000, "1.00 kT"), (12_345, "12.3 kT"), (999_600, "1.00 MT"), (123_456_789, "123 MT")]
        {
            assert_eq!(for_people(tokens), text);
        }
    }
}
