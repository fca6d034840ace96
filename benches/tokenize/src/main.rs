//! Checks and times the tokenizing engine: `sweep` compares it with `tokenizers` over text and vocabularies of one's own, `passes`
//! times it for bench.py, `runs` tries text made to be slow, `mix` and `text` make samples of corpora.

#[allow(dead_code, unused_imports)] // Tests and the trainer of vocabularies use what a benchmark does not.
#[path = "../../../src/text/engine/mod.rs"]
mod engine;

#[path = "../../../src/text/engine/tests/fuzz.rs"]
mod fuzz;

mod clock;
mod corpus;
mod mix;
mod passes;
mod runs;
mod sweep;
mod tokenizer;

use std::process::ExitCode;

use anyhow::{Result, bail};

fn run() -> Result<bool> {
    let mut args = std::env::args().skip(1);
    match args.next().as_deref() {
        Some("sweep") => sweep::run(args),
        Some("passes") => passes::run(args),
        Some("runs") => runs::run(args),
        Some("mix") => mix::run(true, args),
        Some("text") => mix::run(false, args),
        _ => bail!("usage: tokenize-bench sweep|passes|runs|mix|text ..."),
    }
}

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(2)
        }
    }
}
