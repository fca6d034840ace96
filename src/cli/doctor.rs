//! `zaya doctor`: what this machine has, what is missing, what to install.

use std::path::PathBuf;

use anyhow::{Context, Result};

use crate::doctor::{self, Topic};
use crate::error::{bad_input, exit_code};

/// Look at this machine: processor, GPUs and their libraries, limits, file system; and say what is missing and what to install.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Folder that runs would write into; a few files are written there and removed again.
    #[arg(long, default_value = ".")]
    dir: PathBuf,
    /// One JSON document in place of the table.
    #[arg(long)]
    json: bool,
}

pub fn run(args: Args) -> Result<u8> {
    if !args.dir.is_dir() {
        return Err(bad_input(format!("--dir {}: expected a folder that is there", args.dir.display())));
    }
    let findings = doctor::examine(&args.dir)?;
    if args.json {
        say!("{}", serde_json::to_string_pretty(&findings).context("writing JSON")?);
        return Ok(exit_code::OK);
    }
    for topic in [Topic::Host, Topic::Gpu, Topic::Launcher, Topic::Files] {
        say!("\n# {}\n", topic.title());
        for f in findings.iter().filter(|f| f.topic == topic) {
            say!("{:<42} {}", f.what, f.found);
            if let Some(advice) = &f.advice {
                say!("{:<42}   -> {advice}", "");
            }
        }
    }
    Ok(exit_code::OK)
}
