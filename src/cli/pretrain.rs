//! `zaya pretrain`.

use anyhow::Result;

/// Train a model as a recipe says.
#[derive(Debug, clap::Args)]
pub struct Args {}

pub fn run(_args: Args) -> Result<u8> {
    anyhow::bail!("`zaya pretrain` is not built yet")
}
