//! Speed on text made to be slow: long runs, base64, Chinese without a break.

use std::path::Path;
use std::sync::Arc;

use anyhow::Result;

use crate::engine::{Cache, Worker};
use crate::fuzz::Random;
use crate::{clock, tokenizer};

const CACHE_BYTES: usize = 64 << 20;
/// Speed below which a case counts as failed, in MB/s.
const LEAST: f64 = 1.0;

fn cases() -> Vec<(String, String)> {
    let mut cases: Vec<(String, String)> =
        "aA^- \n\t中é0\u{301}👍▁".chars().map(|c| (format!("10^6 x {c:?}"), c.to_string().repeat(1_000_000))).collect();
    let mut random = Random(3);
    let alphabet = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    cases.push(("10 MB of base64".into(), (0..10_000_000).map(|_| alphabet[random.below(64)] as char).collect()));
    let chinese = (0..3_333_333).filter_map(|_| char::from_u32(0x4e00 + random.below(0x5000) as u32));
    cases.push(("10 MB of Chinese".into(), chinese.collect()));
    let frequent: Vec<char> =
        "的一是不了人我在有他这为之大来以个中上们到说国和地也子时道出而要于就下得可你年生".chars().collect();
    let frequent = (0..3_333_333).map(|_| frequent[random.below(frequent.len())]).collect();
    cases.push(("10 MB of frequent Chinese".into(), frequent));
    cases.push(("10 MB of small letters".into(), (0..10_000_000).map(|_| (b'a' + random.below(26) as u8) as char).collect()));
    cases
}

/// `runs TOKENIZER.json ...`
pub fn run(args: impl Iterator<Item = String>) -> Result<bool> {
    let cases = cases();
    let mut fast = true;
    for path in args {
        let both = tokenizer::load(Path::new(&path))?;
        let engine = both.engine.map_err(|why| anyhow::anyhow!("{path}: the engine does not take it: {why}"))?;
        for (name, text) in &cases {
            let (mut worker, mut ids) = (Worker::new(Arc::new(Cache::new(CACHE_BYTES))), Vec::new());
            let start = clock::thread_cpu();
            worker.encode(&engine, text, &mut ids);
            let speed = text.len() as f64 / 1e6 / (clock::thread_cpu() - start);
            fast &= speed >= LEAST;
            println!("{path}: {name}: {speed:.1} MB/s, {} tokens{}", ids.len(), if speed < LEAST { ", TOO SLOW" } else { "" });
        }
    }
    Ok(fast)
}
