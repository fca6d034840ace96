//! `zaya debug`: look inside a model.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::{Subcommand, ValueEnum};

use super::BackendName;
use crate::error::{bad_input, exit_code};
use crate::hf::{self, StoredDtype};
use crate::inspect::{self, Request, Tensors};
use crate::tensor::backend::Precision;
use crate::tensor::cpu::Cpu;
use crate::tensor::hip::Hip;
use crate::train::backend::require_bf16;

/// Look inside: parity checks against other frameworks.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Forward(Forward),
}

/// Run a Hugging Face ZAYA directory on given tokens and write every intermediate tensor, and every gradient.
#[derive(Debug, clap::Args)]
struct Forward {
    /// Directory with config.json and safetensors, native or legacy.
    #[arg(long)]
    model: PathBuf,
    /// safetensors file with `input_ids` [B, S], and `labels` and `attention_mask` if wanted.
    #[arg(long)]
    ids: PathBuf,
    /// Where the intermediate tensors go (safetensors).
    #[arg(long)]
    out: PathBuf,
    /// Where the gradients of the mean loss go (safetensors); needs `labels`.
    #[arg(long)]
    grads: Option<PathBuf>,
    /// Arithmetic of matrix products; by default bf16 for a model stored in bf16, else f32.
    #[arg(long, value_enum)]
    precision: Option<PrecisionName>,
    /// safetensors file with `layers.<i>.router.choice`: take these routes in place of the routers' choices.
    #[arg(long)]
    pin_routing: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum PrecisionName {
    F32,
    Bf16,
}

pub fn run(args: Args, backend: BackendName) -> Result<u8> {
    match args.command {
        Command::Forward(args) => forward(args, backend),
    }
}

fn forward(args: Forward, backend: BackendName) -> Result<u8> {
    let model = hf::load(&args.model)?;
    let input = inspect::read_input(&args.ids, &model.config)?;
    if args.grads.is_some() && input.batch.num_labels() == 0 {
        return Err(bad_input(format!("{}: gradients need `labels` with at least one token to predict", args.ids.display())));
    }
    let pinned = (args.pin_routing.as_deref())
        .map(|path| inspect::read_pinned_routes(path, &model.config, input.batch.tokens()))
        .transpose()?;
    let values = (0..model.table.specs.len()).map(|id| model.read(id)).collect::<Result<Vec<_>>>()?;
    let precision = match args.precision {
        Some(PrecisionName::F32) => Precision::F32,
        Some(PrecisionName::Bf16) => Precision::Bf16,
        None if model.dtype == StoredDtype::Bf16 => Precision::Bf16,
        None => Precision::F32,
    };
    let request = Request {
        config: &model.config,
        values: &values,
        batch: &input.batch,
        pinned: pinned.as_deref(),
        precision,
        want_grads: args.grads.is_some(),
    };
    for path in std::iter::once(&args.out).chain(&args.grads) {
        super::claim_output(path)?;
    }
    let trace = match backend {
        BackendName::Cpu => inspect::trace_native(&Cpu::new(precision), &request)?,
        BackendName::Hip => {
            require_bf16(precision)?;
            inspect::trace_native(&Hip::open(0)?, &request)?
        }
        BackendName::Candle => inspect::trace_candle(&request)?,
    };
    if let Some(loss) = trace.tensors.get("loss") {
        say!("loss {:.7}", loss.to_vec1::<f32>()?[0]);
    }
    save(&args.out, trace.tensors)?;
    if let Some(path) = &args.grads {
        save(path, trace.grads)?;
    }
    Ok(exit_code::OK)
}

fn save(path: &Path, tensors: Tensors) -> Result<()> {
    let count = tensors.len();
    // Into the file as it is (a link, a pipe), not over it.
    let bytes = safetensors::serialize(tensors, None)?;
    std::fs::write(path, bytes).with_context(|| format!("writing {}", path.display()))?;
    say!("{count} tensors in {}", path.display());
    Ok(())
}
