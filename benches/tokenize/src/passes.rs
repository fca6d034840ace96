//! Times the engine as `peers.py` times others: `passes TOKENIZER.json DOCUMENTS PASSES [IDS]`.

use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow};

use crate::engine::{Cache, Worker};
use crate::{clock, corpus, tokenizer};

/// As `zaya tokenize` gives all its threads.
const CACHE_BYTES: usize = 128 << 20;

pub fn run(args: impl Iterator<Item = String>) -> Result<bool> {
    let args: Vec<String> = args.collect();
    let [path, documents, passes, rest @ ..] = &args[..] else {
        anyhow::bail!("usage: passes TOKENIZER.json DOCUMENTS PASSES [IDS]")
    };
    let engine = tokenizer::load(&PathBuf::from(path))?.engine;
    let engine = engine.map_err(|why| anyhow!("{path}: the engine does not take it: {why}"))?;
    let documents = corpus::read_framed(&PathBuf::from(documents))?;
    let mut worker = Worker::new(Arc::new(Cache::new(CACHE_BYTES)));
    let (mut thread, mut process, mut ids, mut tokens) = (Vec::new(), Vec::new(), Vec::new(), 0);
    for _ in 0..passes.parse::<usize>().context("the number of passes")? {
        let start = (clock::thread_cpu(), clock::process_cpu());
        tokens = 0;
        for text in &documents {
            ids.clear();
            worker.encode(&engine, text, &mut ids);
            tokens += ids.len();
        }
        thread.push(clock::thread_cpu() - start.0);
        process.push(clock::process_cpu() - start.1);
    }
    if let Some(path) = rest.first() {
        let mut file = std::io::BufWriter::new(std::fs::File::create(path).with_context(|| format!("creating {path}"))?);
        for text in &documents {
            ids.clear();
            worker.encode(&engine, text, &mut ids);
            file.write_all(&(ids.len() as u32).to_le_bytes())?;
            ids.iter().try_for_each(|id| file.write_all(&id.to_le_bytes()))?;
        }
        file.flush()?;
    }
    let version = env!("CARGO_PKG_VERSION");
    println!("{}", serde_json::json!({"thread": thread, "process": process, "tokens": tokens, "version": version}));
    Ok(true)
}
