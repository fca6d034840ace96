//! Compares the engine with `tokenizers`, document by document, over vocabularies and text of one's own.
//!
//! `sweep --fuzz 60000 --limit-mb 20 --corpus A.jsonl --corpus B.jsonl.zst tokenizer.json ...`
//!
//! `--store FOLDER` keeps fingerprints of what `tokenizers` gave, which is slow, for the next time.
//!
//! Files that are not there, and vocabularies the engine does not take, are named as skipped. Exit status 1 if any document
//! differs.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use anyhow::{Result, bail};
use rayon::prelude::*;

use crate::engine::{Cache, Engine, Worker};
use crate::fuzz::{Random, document};
use crate::{corpus, tokenizer};

const CACHE_BYTES: usize = 64 << 20;

struct Options {
    fuzz: usize,
    limit_bytes: usize,
    corpora: Vec<PathBuf>,
    store: Option<PathBuf>,
    tokenizers: Vec<PathBuf>,
}

fn options(mut args: impl Iterator<Item = String>) -> Result<Options> {
    let mut options = Options { fuzz: 60_000, limit_bytes: usize::MAX, corpora: Vec::new(), store: None, tokenizers: Vec::new() };
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or_else(|| anyhow::anyhow!("{arg} needs a value"));
        match arg.as_str() {
            "--fuzz" => options.fuzz = value()?.parse()?,
            "--limit-mb" => options.limit_bytes = value()?.parse::<usize>()? * 1_000_000,
            "--corpus" => options.corpora.push(value()?.into()),
            "--store" => options.store = Some(value()?.into()),
            option if option.starts_with("--") => bail!("unknown option {option}"),
            path => options.tokenizers.push(path.into()),
        }
    }
    Ok(options)
}

pub fn run(args: impl Iterator<Item = String>) -> Result<bool> {
    let options = options(args)?;
    let (there, missing): (Vec<_>, Vec<_>) = options.corpora.into_iter().partition(|p| p.is_file());
    for path in &missing {
        println!("skipped: corpus {} is not there", path.display());
    }
    let documents = corpus::read_all(&there, options.limit_bytes)?;
    let mut same = true;
    for path in &options.tokenizers {
        let name = path.display();
        if !path.is_file() {
            println!("skipped: tokenizer {name} is not there");
            continue;
        }
        let both = tokenizer::load(path)?;
        let engine = match &both.engine {
            Ok(engine) => engine,
            Err(why) => {
                println!("skipped: {name}: the engine does not take it: {why}");
                continue;
            }
        };
        let mut random = Random(options.fuzz as u64);
        let fuzz: Vec<String> = (0..options.fuzz).map(|_| document(&mut random, &both.added)).collect();
        let bytes: usize = documents.iter().map(String::len).sum();
        let store = options.store.as_ref().map(|folder| {
            let stem = path.file_stem().unwrap_or_default().to_string_lossy();
            folder.join(format!("{stem}-{}-{bytes}.u64", documents.len()))
        });
        same &= compare(&format!("{name} on text"), engine, &both.reference, &documents, store.as_deref())?;
        same &= compare(&format!("{name} on fuzz"), engine, &both.reference, &fuzz, None)?;
    }
    Ok(same)
}

/// What `tokenizers` makes of a document: a hash of the ids, which is all that is kept of them.
fn fingerprint(ids: &[u32]) -> u64 {
    ids.iter().fold(ids.len() as u64, |hash, id| (hash ^ *id as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29))
}

/// Fingerprints of all documents by the reference, from `store` if it has them, as the reference is slow.
fn expected(store: Option<&Path>, reference: &tokenizers::Tokenizer, documents: &[String]) -> Result<Vec<u64>> {
    if let Some(path) = store.filter(|path| path.is_file()) {
        let bytes = std::fs::read(path)?;
        return Ok(bytes.as_chunks::<8>().0.iter().map(|b| u64::from_le_bytes(*b)).collect());
    }
    let encode = |text: &String| {
        let encoding = reference.encode_fast(text.as_str(), false).map_err(|e| anyhow::anyhow!("the reference fails: {e}"))?;
        Ok(fingerprint(encoding.get_ids()))
    };
    let found = documents.par_iter().map(encode).collect::<Result<Vec<u64>>>()?;
    if let Some(path) = store {
        std::fs::write(path, found.iter().flat_map(|f| f.to_le_bytes()).collect::<Vec<u8>>())?;
    }
    Ok(found)
}

fn compare(
    what: &str,
    engine: &Engine,
    reference: &tokenizers::Tokenizer,
    documents: &[String],
    store: Option<&Path>,
) -> Result<bool> {
    let start = Instant::now();
    let expected = expected(store, reference, documents)?;
    anyhow::ensure!(expected.len() == documents.len(), "stored fingerprints are of other documents");
    // Shared, as by the workers of `zaya tokenize`.
    let cache = Arc::new(Cache::new(CACHE_BYTES));
    let (tokens, shown) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let different: usize = documents
        .par_iter()
        .zip(expected)
        .map_init(
            || (Worker::new(cache.clone()), Vec::new()),
            |(worker, ids), (text, expected)| {
                ids.clear();
                worker.encode(engine, text, ids);
                tokens.fetch_add(ids.len(), Ordering::Relaxed);
                let same = fingerprint(ids) == expected;
                if !same && shown.fetch_add(1, Ordering::Relaxed) < 3 {
                    show(text, ids, reference);
                }
                usize::from(!same)
            },
        )
        .sum();
    let bytes: usize = documents.iter().map(String::len).sum();
    println!(
        "{what}: {} documents, {bytes} bytes, {} tokens, {different} documents differ ({:.0} s)",
        documents.len(),
        tokens.load(Ordering::Relaxed),
        start.elapsed().as_secs_f64()
    );
    Ok(different == 0)
}

fn show(text: &str, ids: &[u32], reference: &tokenizers::Tokenizer) {
    let Ok(encoding) = reference.encode_fast(text, false) else { return };
    let expected = encoding.get_ids();
    let first = expected.iter().zip(ids).take_while(|(a, b)| a == b).count();
    let spell = |ids: &[u32]| {
        let part = &ids[first.saturating_sub(3).min(ids.len())..(first + 6).min(ids.len())];
        part.iter().map(|id| reference.id_to_token(*id).unwrap_or_default()).collect::<Vec<_>>()
    };
    let text: String = text.chars().take(300).collect();
    println!("  token {first}: reference {:?}, engine {:?}, text {text:?}", spell(expected), spell(ids));
}
