//! `zaya tokenize merge`: several shards as one, byte for byte what tokenizing their inputs in one run gives.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::{check_hashes, shards_of};
use crate::data::companions::{self, Companion, Origin};
use crate::data::shard::{Shard, prefix_of, with_suffix};
use crate::data::sidecar::{ChatInfo, Sidecar};
use crate::data::writer::{ShardWriter, Tokens, check_prefix};
use crate::error::bad_input;

/// Writes the documents of `parts` (shards or sets, in this order) as the shard `output`.
///
/// # Errors
/// Damaged parts; parts of different tokenizers, types, ends of documents, selections or chat options; parts without a sidecar, which does not say
/// what they are made of; documents of several sequences.
pub fn merge(output: &Path, parts: &[PathBuf], companions: &[Companion], overwrite: bool) -> Result<Sidecar> {
    let output = prefix_of(output);
    check_prefix(&output, overwrite)?;
    let mut prefixes = Vec::new();
    for part in parts {
        prefixes.extend(shards_of(part)?.0);
    }
    let same_file = |a: &Path, b: &Path| matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b);
    if let Some(part) = prefixes.iter().find(|p| same_file(&with_suffix(p, ".bin"), &with_suffix(&output, ".bin"))) {
        return Err(bad_input(format!("the output would replace {}.bin, which is merged: choose another", part.display())));
    }
    let mut shards: Vec<(PathBuf, Shard, Sidecar)> = Vec::new();
    for prefix in prefixes {
        let (shard, sidecar) = open(&prefix)?;
        if let Some((first, _, known)) = shards.first() {
            compatible(first, known, &prefix, &sidecar)?;
        }
        shards.push((prefix, shard, sidecar));
    }
    let Some((_, first, known)) = shards.first() else {
        return Err(bad_input("there is nothing to merge: name at least one shard"));
    };
    let mut merged = Sidecar { part: None, sources: Vec::new(), tool: crate::data::build::tool(), ..known.clone() };
    let tokenizer = merged.tokenizer.file.clone();
    let mut writer = ShardWriter::create_with(&output, first.token_type(), overwrite, companions)?;
    if merged.chat.is_some() {
        writer = writer.with_mask()?;
    }
    let mut before: Option<&Sidecar> = None;
    for (prefix, shard, sidecar) in &shards {
        copy(prefix, shard, companions.contains(&Companion::Olmo), &mut writer)?;
        add(&mut merged, before, sidecar);
        before = Some(sidecar);
    }
    writer.publish_from(&tokenizer, |written| {
        merged.set_written(written);
        merged.to_text()
    })?;
    Ok(merged)
}

fn open(prefix: &Path) -> Result<(Shard, Sidecar)> {
    let shard = Shard::open(prefix)?;
    shard.check_index()?;
    let shown = shard.bin_path().display();
    let Some(sidecar) = shard.sidecar().cloned() else {
        return Err(bad_input(format!(
            "{shown} has no sidecar .json: which tokenizer made it is not known, so it cannot be merged"
        )));
    };
    check_hashes(prefix, &sidecar)?;
    if shard.mask().is_some() && sidecar.chat.is_none() {
        return Err(bad_input(format!("{shown} has a .mask of which its sidecar .json does not speak: it cannot be merged")));
    }
    if shard.num_sequences() != shard.num_documents() {
        return Err(bad_input(format!("{shown} has documents of several sequences, which zaya does not write")));
    }
    Ok((shard, sidecar))
}

fn compatible(first: &Path, a: &Sidecar, other: &Path, b: &Sidecar) -> Result<()> {
    let differs = if a.tokenizer.sha256 != b.tokenizer.sha256 {
        "different tokenizers"
    } else if a.eod != b.eod {
        "different ends of documents"
    } else if a.dtype != b.dtype {
        "different types of ids"
    } else if a.selection != b.selection {
        "different selections of documents"
    } else if how(a) != how(b) {
        "different kinds of documents (conversations: another template or other options)"
    } else {
        return Ok(());
    };
    Err(bad_input(format!("{} and {} have {differs}: they cannot be one shard", first.display(), other.display())))
}

/// How conversations became tokens, without what is counted of them.
fn how(sidecar: &Sidecar) -> Option<ChatInfo> {
    let uncounted = |chat: ChatInfo| ChatInfo {
        template_file: String::new(),
        trimmed: 0,
        learnt_tokens: 0,
        mask_bytes: 0,
        mask_xxh3_64: String::new(),
        ..chat
    };
    sidecar.chat.clone().map(uncounted)
}

/// Appends the documents of a part. `origins`: its `.csv.gz` says where they come from, if there is one.
fn copy(prefix: &Path, shard: &Shard, origins: bool, writer: &mut ShardWriter) -> Result<()> {
    let size = shard.token_type().bytes();
    let csv = with_suffix(prefix, ".csv.gz");
    let mut rows = (origins && csv.exists()).then(|| companions::rows(&csv)).transpose()?;
    let own = shard.bin_path().display().to_string();
    let mut marks = Vec::new();
    for d in 0..shard.num_documents() {
        let (start, end) = (shard.document_start(d)?, shard.document_start(d + 1)?);
        let row =
            rows.as_mut().map(|rows| rows.next().with_context(|| format!("{} has fewer lines than documents", csv.display())));
        let row = row.transpose()?.transpose().with_context(|| format!("reading {}", csv.display()))?;
        let origin = row.as_ref().map_or(Origin { source: &own, line: d + 1 }, |row| Origin { source: &row.3, line: row.4 });
        marks.clear();
        if let Some(mask) = shard.mask() {
            mask.read(start, end, &mut marks);
        }
        let bytes = &shard.token_bytes()[(start * size) as usize..(end * size) as usize];
        writer.push_tokens(Tokens { bytes, marks: &marks }, &origin)?;
    }
    Ok(())
}

/// Adds the counts of a part that follows `before`. The first part is counted already, but for its sources.
fn add(merged: &mut Sidecar, before: Option<&Sidecar>, part: &Sidecar) {
    if before.is_some() {
        merged.documents += part.documents;
        merged.tokens += part.tokens;
        merged.text_bytes += part.text_bytes;
        merged.skipped = merged.skipped + part.skipped;
        merged.replaced = merged.replaced + part.replaced;
        merged.unknown_tokens += part.unknown_tokens;
        if let (Some(merged), Some(part)) = (&mut merged.chat, &part.chat) {
            merged.learnt_tokens += part.learnt_tokens;
            merged.trimmed += part.trimmed;
        }
    }
    let mut sources: VecDeque<_> = part.sources.iter().cloned().collect();
    // Two shards of one set may share a file: the one ends in its middle, the other goes on there.
    let parts = before.and_then(|b| b.part.as_ref()).zip(part.part.as_ref());
    let goes_on = parts.is_some_and(|(a, b)| a.set == b.set && a.to == b.from && b.from.is_inside());
    if goes_on
        && let Some(last) = merged.sources.last_mut()
        && let Some(first) = sources.pop_front()
    {
        last.add(&first);
    }
    merged.sources.extend(sources);
}
