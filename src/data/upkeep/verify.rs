//! `zaya tokenize verify`: everything about a shard that can be checked without its text.

use std::path::Path;

use anyhow::{Context, Result};

use super::{check_hashes, shards_of};
use crate::data::companions;
use crate::data::manifest::{Manifest, ShardEntry};
use crate::data::shard::{Shard, with_suffix};
use crate::data::sidecar::Sidecar;

/// What was looked at, and what is wrong.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Verified {
    pub shards: u64,
    pub documents: u64,
    pub tokens: u64,
    /// A sentence for each thing that is wrong.
    pub problems: Vec<String>,
    /// What could not be checked.
    pub notes: Vec<String>,
}

/// Problems of one kind that are told, at most, of one shard.
const TOLD: usize = 5;

/// Checks every shard that `prefix` names: sizes and hashes, the whole index, every id against the vocabulary, the end of
/// every document, counts, files for other programs, and of a set the manifest.
///
/// # Errors
/// Only where there is nothing to check; what is wrong with a shard stands in the result.
pub fn verify(prefix: &Path) -> Result<Verified> {
    let (shards, manifest) = shards_of(prefix)?;
    let mut found = Verified::default();
    let mut sidecars = Vec::new();
    for shard in &shards {
        found.shards += 1;
        match check(shard, &mut found) {
            Ok(sidecar) => sidecars.push(sidecar),
            Err(e) => {
                found.problems.push(format!("{e:#}"));
                sidecars.push(None);
            }
        }
    }
    if let Some(manifest) = manifest {
        check_manifest(prefix, &manifest, &sidecars, &mut found);
    }
    Ok(found)
}

fn check(prefix: &Path, found: &mut Verified) -> Result<Option<Sidecar>> {
    let shard = Shard::open(prefix)?;
    shard.check_index()?;
    let (documents, tokens) = (shard.num_documents(), shard.num_tokens());
    found.documents += documents;
    found.tokens += tokens;
    let shown = shard.bin_path().display().to_string();
    let sidecar = shard.sidecar().cloned();
    match &sidecar {
        None => found.notes.push(format!("{shown} has no sidecar: hashes, ids and ends of documents cannot be checked")),
        Some(sidecar) => {
            check_hashes(prefix, sidecar)?;
            if (sidecar.documents, sidecar.tokens, sidecar.dtype.as_str()) != (documents, tokens, shard.token_type().name()) {
                found.problems.push(format!(
                    "{shown}: the sidecar speaks of {} documents and {} tokens ({}), the index of {documents} and {tokens} ({})",
                    sidecar.documents,
                    sidecar.tokens,
                    sidecar.dtype,
                    shard.token_type().name()
                ));
            }
            check_ids(&shard, sidecar, &shown, &mut found.problems)?;
        }
    }
    check_companions(prefix, &shard, &mut found.problems)?;
    Ok(sidecar)
}

/// Ids below the size of the vocabulary, the end-of-document id at the end of every document and nowhere else.
fn check_ids(shard: &Shard, sidecar: &Sidecar, shown: &str, problems: &mut Vec<String>) -> Result<()> {
    let vocab_size = sidecar.tokenizer.vocab_size as u32;
    let mut ids = Vec::new();
    let mut told = 0;
    // A chat template may end turns with the same token.
    let anywhere = sidecar.chat.is_some();
    for document in 0..shard.num_documents() {
        let (start, end) = (shard.document_start(document)?, shard.document_start(document + 1)?);
        ids.clear();
        shard.read(start, end, &mut ids);
        let beyond = ids.iter().position(|id| *id >= vocab_size);
        let wrong = match (&sidecar.eod, beyond) {
            (_, Some(at)) => {
                Some(format!("id {} is beyond the vocabulary of {vocab_size} (token {})", ids[at], start + at as u64))
            }
            (Some(eod), None) => match ids.split_last() {
                Some((last, text)) if *last == eod.id => text
                    .iter()
                    .position(|id| *id == eod.id && !anywhere)
                    .map(|at| format!("`{}` (id {}) stands within it, at token {}", eod.token, eod.id, start + at as u64)),
                _ => Some(format!("it does not end with `{}` (id {})", eod.token, eod.id)),
            },
            (None, None) => None,
        };
        if let Some(wrong) = wrong {
            told += 1;
            if told <= TOLD {
                problems.push(format!("{shown}, document {document}: {wrong}"));
            }
        }
    }
    if told > TOLD {
        problems.push(format!("{shown}: {} further documents like this", told - TOLD));
    }
    Ok(())
}

/// Files for other programs must say the same as the index.
fn check_companions(prefix: &Path, shard: &Shard, problems: &mut Vec<String>) -> Result<()> {
    let ends = || (0..shard.num_documents()).map(|d| shard.document_start(d + 1));
    let path = with_suffix(prefix, ".ds.index");
    if path.exists() {
        let bytes = std::fs::read(&path).with_context(|| format!("reading {}", path.display()))?;
        let (found, rest) = bytes.as_chunks::<8>();
        let mut same = rest.is_empty() && found.len() as u64 == shard.num_documents();
        for (end, found) in ends().zip(found) {
            same &= end? == u64::from_le_bytes(*found);
        }
        if !same {
            problems.push(format!("{} does not say where the documents of the .idx end", path.display()));
        }
    }
    let path = with_suffix(prefix, ".csv.gz");
    if path.exists() {
        let mut rows = companions::rows(&path)?;
        let (mut same, mut start) = (true, 0);
        for (number, end) in (0..).zip(ends()) {
            let end = end?;
            same &= rows.next().and_then(Result::ok).is_some_and(|row| (row.0, row.1, row.2) == (start, end, number));
            start = end;
        }
        if !same || rows.next().is_some() {
            problems.push(format!("{} does not say where the documents of the .idx lie", path.display()));
        }
    }
    Ok(())
}

fn check_manifest(prefix: &Path, manifest: &Manifest, sidecars: &[Option<Sidecar>], found: &mut Verified) {
    let shown = prefix.display();
    let mut expected = crate::text::corpus::Place::default();
    for (entry, sidecar) in manifest.shards.iter().zip(sidecars) {
        let same = sidecar.as_ref().is_some_and(|s| {
            ShardEntry::of(entry.name.clone(), s).is_ok_and(|of| of == *entry)
                && s.part.as_ref().is_some_and(|p| p.set == manifest.set)
                && (&s.tokenizer, &s.eod) == (&manifest.tokenizer, &manifest.eod)
        });
        if !same {
            found.problems.push(format!("{shown}: the manifest and the sidecar of {} do not say the same", entry.name));
        }
        if entry.from != expected {
            found.problems.push(format!("{shown}: {} does not begin where the shard before it ends", entry.name));
        }
        expected = entry.to;
    }
    if expected.input != manifest.sources.len() {
        found.problems.push(format!("{shown}: the last shard does not reach the end of the inputs"));
    }
    let sum = |count: fn(&ShardEntry) -> u64| manifest.shards.iter().map(count).sum::<u64>();
    if (sum(|s| s.documents), sum(|s| s.tokens)) != (manifest.documents, manifest.tokens) {
        found.problems.push(format!("{shown}: the manifest's counts are not those of its shards together"));
    }
}
