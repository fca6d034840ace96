//! `zaya tokenize verify|merge|stats|cat`: looking after shards that are there.

use std::ops::Range;
use std::path::PathBuf;

use anyhow::Result;
use clap::{Subcommand, ValueEnum};
use indicatif::HumanCount;
use serde_json::json;

use crate::data::companions::Companion;
use crate::data::dataset::Dataset;
use crate::data::upkeep::{Stats, merge, shards_of, stats, verify};
use crate::error::{bad_input, exit_code};
use crate::text::{Encoder, Eod};

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Check shards: hashes, index, ids, ends of documents; of a set its manifest. Exit code 1 if anything is wrong
    Verify {
        /// Shards (PREFIX of PREFIX.bin and .idx) or sets (PREFIX of PREFIX.manifest.json)
        #[arg(required = true, value_name = "PREFIX")]
        shards: Vec<PathBuf>,
    },
    /// Write several shards as one: the bytes that tokenizing their inputs in one run gives
    Merge {
        /// PREFIX of the shard to write
        #[arg(value_name = "OUT")]
        output: PathBuf,
        /// Shards or sets, in the order of the documents
        #[arg(required = true, value_name = "PREFIX")]
        shards: Vec<PathBuf>,
        /// Also write files for other programs, as `zaya tokenize --sidecars`
        #[arg(long, value_enum, value_name = "NAME", value_delimiter = ',')]
        sidecars: Vec<CompanionName>,
        /// Replace an output that exists
        #[arg(long)]
        overwrite: bool,
    },
    /// Count documents and tokens, and show how long documents are
    Stats {
        /// Shards or sets; the figures are of all together
        #[arg(required = true, value_name = "PREFIX")]
        shards: Vec<PathBuf>,
        /// As one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Print documents as JSON lines: ids, or text with --tokenizer
    Cat {
        /// A shard or a set
        #[arg(value_name = "PREFIX")]
        shard: PathBuf,
        /// Documents, numbered from 0: one (7), or from one up to before another (7..9, 7.., ..9)
        #[arg(long, value_name = "I[..J]", value_parser = parse_range)]
        doc: (u64, Option<u64>),
        /// tokenizer.json to turn ids into text by; special tokens are spelt out
        #[arg(long, value_name = "FILE")]
        tokenizer: Option<PathBuf>,
    },
}

/// Files for other programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum CompanionName {
    /// PREFIX.ds.index and PREFIX.ds.metadata of datatrove and nanotron
    Ds,
    /// PREFIX.csv.gz of OLMo-core and Dolma
    Olmo,
}

impl CompanionName {
    /// Each once, in a fixed order.
    pub fn all(names: &[Self]) -> Vec<Companion> {
        let known = [(Self::Ds, Companion::Ds), (Self::Olmo, Companion::Olmo)];
        known.into_iter().filter(|(name, _)| names.contains(name)).map(|(_, companion)| companion).collect()
    }
}

fn parse_range(text: &str) -> Result<(u64, Option<u64>), String> {
    let number =
        |text: &str| text.parse::<u64>().map_err(|_| "expected a document such as 7, or a range such as 7..9".to_string());
    match text.split_once("..") {
        None => number(text).map(|i| (i, Some(i + 1))),
        Some(("", "")) => Ok((0, None)),
        Some(("", end)) => Ok((0, Some(number(end)?))),
        Some((start, "")) => Ok((number(start)?, None)),
        Some((start, end)) => Ok((number(start)?, Some(number(end)?))),
    }
}

pub(super) fn run(command: Command) -> Result<u8> {
    match command {
        Command::Verify { shards } => verify_all(&shards),
        Command::Merge { output, shards, sidecars, overwrite } => {
            let done = merge(&output, &shards, &CompanionName::all(&sidecars), overwrite)?;
            let (documents, tokens) = (HumanCount(done.documents), HumanCount(done.tokens));
            say!("{documents} documents, {tokens} tokens: {}.bin", crate::data::shard::prefix_of(&output).display());
            Ok(exit_code::OK)
        }
        Command::Stats { shards, json } => {
            let stats = stats(&shards)?;
            if json {
                say!("{}", serde_json::to_string_pretty(&stats)?)
            } else {
                say!("{}", table(&stats))
            }
            Ok(exit_code::OK)
        }
        Command::Cat { shard, doc, tokenizer } => cat(&shard, doc, tokenizer),
    }
}

fn verify_all(shards: &[PathBuf]) -> Result<u8> {
    let mut good = true;
    for prefix in shards {
        let found = verify(prefix)?;
        let shown = prefix.display();
        for note in &found.notes {
            tell!("note: {note}");
        }
        for problem in &found.problems {
            tell!("error: {problem}");
        }
        let (shards, documents, tokens) = (HumanCount(found.shards), HumanCount(found.documents), HumanCount(found.tokens));
        let verdict = if found.problems.is_empty() { "good" } else { "DAMAGED" };
        say!(
            "{shown}: {verdict}: {shards} shard{}, {documents} documents, {tokens} tokens",
            if found.shards == 1 { "" } else { "s" }
        );
        good &= found.problems.is_empty();
    }
    Ok(if good { exit_code::OK } else { exit_code::FAILURE })
}

fn table(stats: &Stats) -> String {
    let mut text = format!(
        "shards     {}\ndocuments  {}\ntokens     {} ({} bytes each)\n",
        HumanCount(stats.shards as u64),
        HumanCount(stats.documents),
        HumanCount(stats.tokens),
        stats.id_bytes
    );
    match (stats.text_bytes, stats.bytes_per_token) {
        (Some(bytes), Some(ratio)) => text += &format!("text       {} bytes, {ratio:.3} a token\n", HumanCount(bytes)),
        _ => text += "text       unknown: not every shard has a sidecar\n",
    }
    if let Some(l) = &stats.lengths {
        text += &format!(
            "length     min {}, median {}, mean {:.1}, 90 % {}, 99 % {}, max {}\n\n{:>23}  {:>12}  {:>15}\n",
            l.min, l.p50, l.mean, l.p90, l.p99, l.max, "tokens of a document", "documents", "tokens"
        );
    }
    let most = stats.histogram.iter().map(|b| b.documents).max().unwrap_or(1).max(1);
    for b in &stats.histogram {
        let bar = "#".repeat((b.documents * 30).div_ceil(most) as usize);
        let range = format!("{} .. {}", b.from, b.to);
        text += &format!(
            "{range:>23}  {:>12}  {:>15}  {bar}\n",
            HumanCount(b.documents).to_string(),
            HumanCount(b.tokens).to_string()
        );
    }
    text.trim_end().to_string()
}

fn cat(prefix: &std::path::Path, (first, end): (u64, Option<u64>), tokenizer: Option<PathBuf>) -> Result<u8> {
    let dataset = Dataset::open(&shards_of(prefix)?.0)?;
    let count = dataset.num_documents();
    let range = Range { start: first, end: end.unwrap_or(count) };
    if range.start > range.end || range.end > count {
        return Err(bad_input(format!(
            "--doc {}..{}: {} has {count} documents, numbered from 0",
            range.start,
            range.end,
            prefix.display()
        )));
    }
    let encoder = tokenizer.map(|path| Encoder::load(&path, &Eod::Absent)).transpose()?;
    if let (Some(encoder), Some(sha256)) = (&encoder, dataset.tokenizer_sha256())
        && encoder.sha256() != sha256
    {
        tell!("warning: the shard was written with another tokenizer: the text may be wrong");
    }
    for document in range {
        let (start, end) = dataset.document(document)?;
        let mut ids = Vec::new();
        dataset.read(start, end, usize::MAX, &mut ids)?;
        let line = match &encoder {
            Some(encoder) => json!({ "document": document, "tokens": ids.len(), "text": encoder.decode(&ids, false)? }),
            None => json!({ "document": document, "tokens": ids.len(), "ids": ids }),
        };
        say!("{line}");
    }
    Ok(exit_code::OK)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_of_documents() {
        for (text, range) in
            [("7", (7, Some(8))), ("7..9", (7, Some(9))), ("7..", (7, None)), ("..9", (0, Some(9))), ("..", (0, None))]
        {
            assert_eq!(parse_range(text), Ok(range), "{text}");
        }
        for text in ["", "x", "1..x", "-1", "1...2"] {
            assert!(parse_range(text).is_err(), "{text}");
        }
    }
}
