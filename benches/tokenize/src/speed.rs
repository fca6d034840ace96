use crate::engine::Worker;
use crate::{clock, corpus, tokenizer};
use anyhow::Result;
use std::path::PathBuf;
pub fn run(mut args: impl Iterator<Item = String>) -> Result<bool> {
    let tok = args.next().unwrap();
    let limit: usize = args.next().unwrap().parse()?;
    let both = tokenizer::load(&PathBuf::from(tok))?;
    let engine = both.engine.unwrap();
    let files: Vec<PathBuf> = args.map(Into::into).collect();
    let docs = corpus::read_all(&files, limit)?;
    let bytes: usize = docs.iter().map(|d| d.len()).sum();
    let mut firsts = vec![];
    let mut steady = vec![];
    let mut ids = Vec::new();
    for _ in 0..3 {
        let mut worker = Worker::new(512 << 20);
        for pass in 0..std::env::var("PASSES").map_or(4, |p| p.parse().unwrap()) {
            let mut n = 0;
            let t = clock::thread_cpu();
            for d in &docs {
                ids.clear();
                worker.encode(&engine, d, &mut ids);
                n += ids.len();
            }
            let s = bytes as f64 / 1e6 / (clock::thread_cpu() - t);
            if pass == 0 {
                firsts.push(s)
            } else {
                steady.push(s)
            }
            std::hint::black_box(n);
        }
    }
    println!("{bytes} first {:.1} steady {:.1}", clock::median(&mut firsts), clock::median(&mut steady));
    Ok(true)
}
