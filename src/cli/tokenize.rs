//! `zaya tokenize`.

use anyhow::Result;

/// Turn text into token shards, or learn a vocabulary.
#[derive(Debug, clap::Args)]
pub struct Args {}

pub fn run(_args: Args) -> Result<u8> {
    anyhow::bail!("`zaya tokenize` is not built yet")
}
