//! `zaya debug`.

use anyhow::Result;

/// Look inside: parity checks against other frameworks.
#[derive(Debug, clap::Args)]
pub struct Args {}

pub fn run(_args: Args) -> Result<u8> {
    anyhow::bail!("`zaya debug` is not built yet")
}
