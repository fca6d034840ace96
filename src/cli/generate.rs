//! `zaya generate`.

use anyhow::Result;

/// Continue a prompt.
#[derive(Debug, clap::Args)]
pub struct Args {}

pub fn run(_args: Args) -> Result<u8> {
    anyhow::bail!("`zaya generate` is not built yet")
}
