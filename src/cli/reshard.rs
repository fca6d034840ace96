//! `zaya reshard`.

use anyhow::Result;

/// Convert a checkpoint.
#[derive(Debug, clap::Args)]
pub struct Args {}

pub fn run(_args: Args) -> Result<u8> {
    anyhow::bail!("`zaya reshard` is not built yet")
}
