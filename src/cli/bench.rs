//! `zaya bench`.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::ValueEnum;

use super::BackendName;
use crate::bench::{self, Case, Options, Part, TokenizeInput};
use crate::error::{bad_input, exit_code};
use crate::parallel::launch;
use crate::recipe;

/// Measure what this machine reaches, and what zaya reaches on it.
///
/// Peaks of the machine, the products and the fused verbs of a recipe's model, its whole step: achieved against limit. No
/// data is needed but for the part `data`; tokens are made up. docs/BENCH.md explains every figure and the document that --json writes.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// What is measured, as --parts.
    #[arg(value_enum, value_name = "PART")]
    only: Vec<PartName>,

    /// The recipe whose model and geometry are measured.
    #[arg(long, value_name = "FILE")]
    recipe: Option<PathBuf>,

    /// Writes a value over the recipe's: --set train.precision=bf16. May be given many times.
    #[arg(long, value_name = "KEY=VALUE", requires = "recipe")]
    set: Vec<String>,

    /// Threads; by default the recipe's `train.threads`, else all cores.
    #[arg(long, value_name = "N")]
    threads: Option<usize>,

    /// What is measured [default: all that is measured on one rank; none when only --case is given]
    #[arg(long, value_enum, value_delimiter = ',')]
    parts: Vec<PartName>,

    /// Ranks of the parts `collectives` and `ranks`: threads of this process, each with a GPU under --backend hip. Under a launcher of a
    /// build with MPI, `collectives` are between its processes.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = super::pretrain::parse_ranks)]
    ranks: usize,

    /// The part `gemm` goes over many shapes, too: a table, and advice about the model's own. On a GPU it always does.
    #[arg(long)]
    sweep: bool,

    /// Largest m, n and k of the sweep [default: 2048, on a GPU 16384].
    #[arg(long, value_name = "N", requires = "sweep", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    largest: Option<u32>,

    /// Writes the sweep as a page with drawings (HTML; nothing beside the file is needed to look at it).
    #[arg(long, value_name = "PATH", requires = "sweep")]
    plot: Option<PathBuf>,

    /// Where the part `checkpoint` writes; by default a temporary folder beside the recipe's run.
    #[arg(long, value_name = "FOLDER")]
    dir: Option<PathBuf>,

    /// The tokenizer.json of the part `tokenize`.
    #[arg(long, value_name = "FILE", requires = "input")]
    tokenizer: Option<PathBuf>,

    /// Files that the part `tokenize` reads, as `zaya tokenize --input`.
    #[arg(long, value_name = "F", num_args = 1.., requires = "tokenizer")]
    input: Vec<PathBuf>,

    /// Field of the inputs that holds the text.
    #[arg(long, value_name = "NAME", default_value = "text")]
    field: String,

    /// One kernel at a given shape, such as gemm:m=4096,n=256,k=256 or
    /// linear_ce:tokens=4096,dim=256,vocab=32768,precision=bf16. May be given many times.
    #[arg(long, value_name = "SPEC")]
    case: Vec<Case>,

    /// Seconds of each measurement.
    #[arg(long, value_name = "S", default_value_t = 0.5, value_parser = parse_seconds)]
    seconds: f64,

    /// Writes everything to a file as JSON; `-` is stdout, and the table then goes to stderr.
    #[arg(long, value_name = "PATH")]
    json: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum PartName {
    /// Peaks of arithmetic units and memory.
    Machine,
    /// The products of the recipe's model.
    Gemm,
    /// Every fused verb.
    Verbs,
    /// A whole optimizer step.
    Step,
    /// Collectives between ranks, against what they can copy; the size of gradient buckets that follows.
    Collectives,
    /// A whole step on several ranks, against one rank with all their threads.
    Ranks,
    /// Saving and loading the recipe's state, against memory and disk.
    Checkpoint,
    /// Reading the recipe's training data, against what training uses up.
    Data,
    /// Text files to token shards, against the tokenizer alone; needs --tokenizer and --input, no recipe.
    Tokenize,
}

impl PartName {
    fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_string())
    }

    fn part(self) -> Part {
        match self {
            Self::Machine => Part::Machine,
            Self::Gemm => Part::Gemm,
            Self::Verbs => Part::Verbs,
            Self::Step => Part::Step,
            Self::Collectives => Part::Collectives,
            Self::Ranks => Part::Ranks,
            Self::Checkpoint => Part::Checkpoint,
            Self::Data => Part::Data,
            Self::Tokenize => Part::Tokenize,
        }
    }
}

fn parse_seconds(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|s| (0.0..=3600.0).contains(s)).ok_or_else(|| "expected seconds from 0 to 3600".to_string())
}

pub fn run(args: Args, backend: BackendName) -> Result<u8> {
    let recipe = args.recipe.as_deref().map(|path| recipe::load(path, &args.set)).transpose()?;
    let asked: Vec<PartName> = args.only.iter().chain(&args.parts).copied().collect();
    let on_gpu = backend == BackendName::Hip;
    match backend {
        BackendName::Candle => return Err(bad_input("zaya bench measures zaya's own kernels: --backend cpu or hip")),
        BackendName::Hip => check_gpu(&args, &asked)?,
        BackendName::Cpu => check(&args, &asked, recipe.is_some())?,
    }
    if args.ranks < 2 && asked.iter().any(|p| matches!(p, PartName::Collectives | PartName::Ranks)) {
        return Err(bad_input(
            "one rank has nobody to talk to: --ranks must be at least 2 for the parts `collectives` and `ranks`",
        ));
    }
    if args.sweep && !(asked.is_empty() && args.case.is_empty()) && !asked.contains(&PartName::Gemm) {
        return Err(bad_input("--sweep is of the part `gemm`: name that part, too"));
    }
    let tokenize = args.tokenizer.map(|tokenizer| TokenizeInput { tokenizer, inputs: args.input, field: args.field });
    if asked.contains(&PartName::Tokenize) && tokenize.is_none() {
        return Err(bad_input("the part `tokenize` works on text of yours: give --tokenizer FILE and --input F ..."));
    }
    let to_stdout = args.json.as_deref().is_some_and(|p| p.as_os_str() == "-");
    if let Some(path) = args.json.as_deref().filter(|_| !to_stdout) {
        super::claim_output(path)?;
    }
    if let Some(path) = &args.plot {
        super::claim_output(path)?;
    }
    let parts = match asked.as_slice() {
        [] if on_gpu => vec![Part::Machine, Part::Gemm],
        [] if args.case.is_empty() => vec![Part::Machine, Part::Gemm, Part::Verbs, Part::Step],
        given => given.iter().map(|p| p.part()).collect(),
    };
    let largest = args.largest.map(|n| n as usize);
    let (sweep, cases) = (args.sweep, args.case);
    let options =
        Options { on_gpu, parts, sweep, largest, cases, ranks: args.ranks, dir: args.dir, tokenize, seconds: args.seconds };
    let threads = args.threads.or_else(|| recipe.as_ref()?.train.threads);
    // Of processes that measure together, one speaks for all.
    let launch = if cfg!(feature = "mpi") { launch::detect(|name| std::env::var(name).ok())? } else { None };
    let speaks = launch.is_none_or(|l| l.rank == 0);
    let progress = |what: &str| {
        if speaks {
            tell!("measuring {what}");
        }
    };
    let report = super::in_pool(threads, || bench::run(recipe.as_ref(), &options, &progress))?;
    if !speaks {
        return Ok(exit_code::OK);
    }
    if let (Some(path), Some(sweep)) = (&args.plot, &report.sweep) {
        std::fs::write(path, bench::plot::page(sweep)).with_context(|| format!("writing the drawings to {}", path.display()))?;
        tell!("drawings in {}", path.display());
    }
    let (table, json) = (report.table(), serde_json::to_string_pretty(&report)?);
    if to_stdout {
        tell!("\n{table}");
        say!("{json}");
        return Ok(exit_code::OK);
    }
    say!("\n{}", table.trim_end());
    if let Some(path) = &args.json {
        std::fs::write(path, json + "\n").with_context(|| format!("writing the results to {}", path.display()))?;
        say!("\nresults in {}", path.display());
    }
    Ok(exit_code::OK)
}

/// What measuring the processor needs.
fn check(args: &Args, asked: &[PartName], has_recipe: bool) -> Result<()> {
    if asked.is_empty() && args.case.is_empty() && !has_recipe {
        return Err(bad_input("what is to be measured? Name a recipe with --recipe FILE, a kernel with --case, or a part"));
    }
    // Without a recipe the sweep has no shapes of a model to mark.
    let needs_recipe = |p: &&PartName| match p {
        PartName::Machine | PartName::Collectives | PartName::Tokenize => false,
        PartName::Gemm => !args.sweep,
        _ => true,
    };
    match asked.iter().find(needs_recipe).filter(|_| !has_recipe) {
        Some(part) => {
            Err(bad_input(format!("--parts {} measures the model of a recipe: name one with --recipe FILE", part.name())))
        }
        None => Ok(()),
    }
}

/// What measuring a GPU can do.
fn check_gpu(args: &Args, asked: &[PartName]) -> Result<()> {
    let measured = |p: &PartName| matches!(p, PartName::Machine | PartName::Gemm | PartName::Collectives);
    if let Some(part) = asked.iter().find(|p| !measured(p)) {
        let name = part.name();
        return Err(bad_input(format!(
            "--backend hip measures the parts `machine`, `gemm` and `collectives`; `{name}` is measured on the processor only"
        )));
    }
    if !args.case.is_empty() {
        return Err(bad_input("--case measures a kernel of the processor: leave --backend hip out"));
    }
    Ok(())
}
