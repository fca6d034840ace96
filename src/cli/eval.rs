//! `zaya eval`.

use anyhow::Result;

/// Evaluate a model offline.
#[derive(Debug, clap::Args)]
pub struct Args {}

pub fn run(_args: Args) -> Result<u8> {
    anyhow::bail!("`zaya eval` is not built yet")
}
