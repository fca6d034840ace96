//! The command line: one file a subcommand. Arguments in, one library call, what is printed.

pub mod bench;
pub mod debug;
pub mod doctor;
pub mod eval;
pub mod extend_context;
pub mod generate;
pub mod pretrain;
pub mod reshard;
pub mod tokenize;

use std::path::Path;

use anyhow::Result;
use clap::{Parser, Subcommand, ValueEnum};

use crate::tensor::cpu::par;
use crate::train::EngineKind;

/// Pretraining for ZAYA mixture-of-experts models.
#[derive(Debug, Parser)]
#[command(name = "zaya", version, about)]
pub struct Cli {
    /// Who computes the model, in every subcommand that runs one.
    #[arg(long, value_enum, global = true, default_value_t = BackendName::Cpu)]
    pub backend: BackendName,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    Tokenize(tokenize::Args),
    Pretrain(pretrain::Args),
    ExtendContext(extend_context::Args),
    Eval(eval::Args),
    Generate(generate::Args),
    Reshard(reshard::Args),
    Bench(bench::Args),
    Doctor(doctor::Args),
    Debug(debug::Args),
}

/// Who computes the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BackendName {
    /// zaya's own kernels with hand-written backward.
    Cpu,
    /// AMD GPUs through HIP: our kernels, and hipBLASLt's products.
    Hip,
    /// The plain reference on candle's autograd: slow, and the most readable.
    Candle,
}

impl BackendName {
    fn engine(self) -> EngineKind {
        match self {
            BackendName::Cpu => EngineKind::Cpu,
            BackendName::Hip => EngineKind::Hip,
            BackendName::Candle => EngineKind::Candle,
        }
    }
}

/// Runs one subcommand; the value is the process's exit code.
pub fn run(cli: Cli) -> Result<u8> {
    crate::failpoint::init()?;
    crate::tensor::cpu::level::Level::check_variable().map_err(crate::error::bad_input)?;
    match cli.command {
        Command::Tokenize(args) => tokenize::run(args),
        Command::Pretrain(args) => pretrain::run(args, cli.backend),
        Command::ExtendContext(args) => extend_context::run(args, cli.backend),
        Command::Eval(args) => eval::run(args, cli.backend),
        Command::Generate(args) => generate::run(args, cli.backend),
        Command::Reshard(args) => reshard::run(args),
        Command::Bench(args) => bench::run(args, cli.backend),
        Command::Doctor(args) => doctor::run(args),
        Command::Debug(args) => debug::run(args, cli.backend),
    }
}

/// Runs `f` on a pool of `threads` threads (all cores when not given).
fn in_pool<R: Send>(threads: Option<usize>, f: impl FnOnce() -> Result<R> + Send) -> Result<R> {
    if threads == Some(0) {
        return Err(crate::error::bad_input("--threads must be at least 1"));
    }
    par::pool(threads)?.install(f)
}

/// Sees to it before the work that its outcome can be written: opens `path` as it is, and creates it where it is not there.
fn claim_output(path: &Path) -> Result<()> {
    std::fs::File::options().create(true).append(true).open(path).map_err(|e| unwritable(path, &e))?;
    Ok(())
}

fn unwritable(path: &Path, e: &std::io::Error) -> anyhow::Error {
    crate::error::bad_input(format!("{} cannot be written: {e}; choose another place for the output", path.display()))
}
