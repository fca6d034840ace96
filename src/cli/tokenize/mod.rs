//! `zaya tokenize`.

mod make;
mod upkeep;

use anyhow::Result;

/// Turn text into token shards, or learn a vocabulary.
///
/// With --tokenizer: reads text, JSON lines or Parquet, also .gz and .zst, and writes the Megatron-LM shard PREFIX.bin, PREFIX.idx
/// and a description PREFIX.json, or several shards of bounded size. With --train-vocab N: learns a byte-level BPE and writes
/// tokenizer.json. The commands below look after shards that are there. Odd input (empty, not Unicode, cut off, ...) has
/// defined results: docs/TOKENIZE.md.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct Args {
    #[command(subcommand)]
    command: Option<upkeep::Command>,
    #[command(flatten)]
    make: make::Make,
}

pub fn run(args: Args) -> Result<u8> {
    match args.command {
        Some(command) => upkeep::run(command),
        None => make::run(args.make),
    }
}
