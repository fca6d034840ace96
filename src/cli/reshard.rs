//! `zaya reshard`.

mod diff;
mod readers;
mod remote;

use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::{Subcommand, ValueEnum};
use indicatif::{HumanBytes, HumanCount, HumanDuration};

use crate::checkpoint::repack::{RepackOptions, check_output, from_weights, repack};
use crate::checkpoint::{
    self, CKPT_DIR, Checkpoint, Contents, Dtype, Entry, MANIFEST, Manifest, ModelSource, is_optimizer, open_checkpoint,
};
use crate::error::{bad_input, exit_code};
use crate::hf::{self, StoredDtype};
use crate::machine::peak_resident_bytes;

/// Convert a checkpoint; list, inspect and verify checkpoints.
///
/// Reads a checkpoint, a run directory (its newest valid checkpoint) or a Hugging Face model, and writes a new folder. The
/// input is never changed.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct Args {
    #[command(subcommand)]
    command: Option<Command>,
    /// What to read: a checkpoint folder, a run directory, or a Hugging Face model directory.
    #[arg(long, value_name = "PATH", required = true)]
    from: Option<PathBuf>,
    /// What to write: `hf` = Hugging Face model files, `hf-legacy` = those in the layout that Zyphra published before `transformers`
    /// knew the model, `zck` = a checkpoint.
    #[arg(long, value_name = "FORMAT", required = true)]
    to: Option<Format>,
    /// Folder to write; must not exist yet, or be empty.
    #[arg(long, value_name = "DIR", required = true)]
    output: Option<PathBuf>,
    /// Number format of the weights (default: that of a Hugging Face input, else f32). Optimizer state and balancing
    /// biases stay f32.
    #[arg(long)]
    dtype: Option<DtypeArg>,
    /// Leave the optimizer state out of a `zck` output: for evaluation, generation, or another run's start.
    #[arg(long)]
    weights_only: bool,
    /// The ranks that are to read a `zck` output, such as dp=8,cp=2,ep=4: experts of one expert-parallel place go into files
    /// of their own. Any layout reads any checkpoint; dp=1 merges such files again.
    #[arg(long = "for", value_name = "SIZES")]
    readers: Option<readers::Sizes>,
    /// A `tokenizer.json` to put beside a Hugging Face output (default: the input's own).
    #[arg(long, value_name = "FILE")]
    tokenizer: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Read every byte of a checkpoint, of all checkpoints of a run, or of those in an object store (s3://..., gs://..., az://...,
    /// file:///...), and compare it with the manifest's hashes.
    Verify { dir: PathBuf },
    /// List the checkpoints of a run, or those in an object store.
    Ls { run_dir: PathBuf },
    /// Bring the newest whole checkpoint, or the one that the URL names, back from an object store; every byte is verified.
    Fetch {
        url: String,
        /// Folder to write; must not exist yet, or be empty.
        #[arg(long, value_name = "DIR")]
        output: PathBuf,
    },
    /// Show what a checkpoint holds.
    Inspect {
        dir: PathBuf,
        /// One line a tensor: number format, shape, row blocks, name.
        #[arg(long)]
        tensors: bool,
    },
    /// Say in what two checkpoints differ: tensors, step, tokens, recipe. Exit code 1 when they do.
    Diff { a: PathBuf, b: PathBuf },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    Hf,
    HfLegacy,
    Zck,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum DtypeArg {
    F32,
    Bf16,
}

pub fn run(args: Args) -> Result<u8> {
    match args.command {
        Some(Command::Verify { dir }) => match remote::url_of(&dir) {
            Some(url) => remote::verify(url),
            None => verify(&dir),
        },
        Some(Command::Ls { run_dir }) => match remote::url_of(&run_dir) {
            Some(url) => remote::ls(url),
            None => ls(&run_dir),
        },
        Some(Command::Fetch { url, output }) => remote::fetch(&url, &output),
        Some(Command::Inspect { dir, tensors }) => inspect(&dir, tensors),
        Some(Command::Diff { a, b }) => diff::run(&a, &b),
        None => {
            // clap has seen to it that the three are there.
            let (Some(from), Some(to), Some(output)) = (args.from, args.to, args.output) else {
                return Err(bad_input("`zaya reshard` needs --from, --to and --output"));
            };
            let dtype = args.dtype.map(|d| if d == DtypeArg::Bf16 { Dtype::BF16 } else { Dtype::F32 });
            convert(&from, to, &output, dtype, args.weights_only, args.readers, args.tokenizer)
        }
    }
}

fn convert(
    from: &Path,
    to: Format,
    output: &Path,
    dtype: Option<Dtype>,
    weights_only: bool,
    readers: Option<readers::Sizes>,
    tokenizer: Option<PathBuf>,
) -> Result<u8> {
    check_output(output, Some(from))?;
    let source = ModelSource::open(from)?;
    let readers = match (readers, &source) {
        (None, _) => None,
        (Some(sizes), ModelSource::Checkpoint { .. }) if to == Format::Zck => Some(sizes.layout(source.config().num_experts)?),
        (Some(_), _) => {
            return Err(bad_input("--for is for a checkpoint that becomes another one: give a checkpoint and --to zck"));
        }
    };
    if let Some(path) = &tokenizer {
        source.warn_of_other_tokenizer(path)?;
    }
    match (to, &source) {
        (Format::Hf | Format::HfLegacy, _) => {
            let dtype = match (dtype, &source) {
                (Some(Dtype::BF16), _) => StoredDtype::Bf16,
                (None, ModelSource::HuggingFace(model)) => model.dtype,
                _ => StoredDtype::F32,
            };
            let layout = if to == Format::HfLegacy { hf::Layout::Legacy } else { hf::Layout::Native };
            let tokenizer = tokenizer.or_else(|| source.tokenizer());
            let options = hf::SaveOptions { dtype, layout, tokenizer, ..hf::SaveOptions::default() };
            let saved = hf::save_streamed(output, source.config(), &options, |id| source.numbers(id))?;
            saved.notes.iter().for_each(|n| tell!("note: {n}"));
            let (size, files) = (HumanBytes(saved.tensor_bytes), saved.files.join(", "));
            say!("{}: Hugging Face model ({}), {}, {size}: {files}", output.display(), layout.name(), dtype.name());
        }
        (Format::Zck, ModelSource::Checkpoint { checkpoint, .. }) => {
            let options = RepackOptions { weights_dtype: dtype, weights_only, readers, ..RepackOptions::default() };
            let done = repack(checkpoint, output, &options)?;
            say!(
                "{}: step {}, {} tensors, {} ({} tensors left out)",
                output.display(),
                checkpoint.meta().step,
                done.tensors,
                HumanBytes(done.bytes),
                done.dropped
            );
            if let Some(layout) = readers {
                readers::tell_of(checkpoint, &Checkpoint::open(output)?, layout);
            }
        }
        (Format::Zck, ModelSource::HuggingFace(model)) => {
            let dtype = dtype.unwrap_or(Dtype::F32);
            let done = from_weights(&model.config, output, dtype, &mut |id| Ok(model.numbers(id)), &Default::default())?;
            say!("{}: weights only, {} tensors, {}", output.display(), done.tensors, HumanBytes(done.bytes));
        }
    }
    if let Some(bytes) = peak_resident_bytes() {
        say!("most memory held: {}", HumanBytes(bytes));
    }
    Ok(exit_code::OK)
}

/// The folder that holds a run's checkpoints.
fn root_of(dir: &Path) -> Result<PathBuf> {
    if !dir.is_dir() {
        return Err(bad_input(format!("{} is not a folder: expected a run directory", dir.display())));
    }
    let inner = dir.join(CKPT_DIR);
    Ok(if inner.is_dir() { inner } else { dir.to_path_buf() })
}

fn summary(c: &Checkpoint) -> String {
    let m = c.manifest();
    format!("step {}, {} tensors in {} files, {}", m.meta.step, m.entries.len(), m.files.len(), HumanBytes(m.total_bytes()))
}

fn verify(dir: &Path) -> Result<u8> {
    let one = |dir: &Path| -> bool {
        match Checkpoint::open(dir).and_then(|c| c.verify().map(|()| c)) {
            Ok(c) => {
                say!("{}: valid: {}", dir.display(), summary(&c));
                true
            }
            Err(e) => {
                say!("{}: NOT VALID: {e:#}", dir.display());
                false
            }
        }
    };
    if dir.join(MANIFEST).exists() || dir.file_name().and_then(|n| n.to_str()).and_then(checkpoint::parse_step_dir).is_some() {
        return Ok(if one(dir) { exit_code::OK } else { exit_code::FAILURE });
    }
    let root = root_of(dir)?;
    let steps = checkpoint::list(&root)?;
    if steps.is_empty() {
        return Err(bad_input(format!("{} holds no checkpoint", dir.display())));
    }
    let valid = steps.iter().filter(|step| one(&root.join(checkpoint::step_dir(**step)))).count();
    Ok(if valid == steps.len() { exit_code::OK } else { exit_code::FAILURE })
}

fn ls(run_dir: &Path) -> Result<u8> {
    let root = root_of(run_dir)?;
    let steps = checkpoint::list(&root)?;
    if steps.is_empty() {
        say!("{} holds no checkpoint", run_dir.display());
        return Ok(exit_code::OK);
    }
    ls_head();
    for step in steps {
        let opened = Checkpoint::open(&root.join(checkpoint::step_dir(step)));
        ls_line(step, opened.as_ref().map(Checkpoint::manifest));
    }
    Ok(exit_code::OK)
}

fn ls_head() {
    say!("{:>10} {:>16} {:>12} {:>10}  written", "step", "tokens", "size", "contents");
}

fn ls_line(step: u64, manifest: std::result::Result<&Manifest, &anyhow::Error>) {
    match manifest {
        Ok(m) => say!(
            "{step:>10} {:>16} {:>12} {:>10}  {}",
            HumanCount(m.meta.tokens_seen).to_string(),
            HumanBytes(m.total_bytes()).to_string(),
            contents_name(m.contents),
            age(m.written_unix_s)
        ),
        Err(e) => say!("{step:>10} not a valid checkpoint: {e:#}"),
    }
}

fn inspect(dir: &Path, tensors: bool) -> Result<u8> {
    let c = open_checkpoint(dir)?;
    let m = c.manifest();
    let or_unknown = |s: &Option<String>| s.clone().unwrap_or_else(|| "unknown".into());
    say!("folder       {}", c.dir().display());
    say!("contents     {} (format {} version {})", contents_name(m.contents), m.format, m.version);
    say!("step         {}", m.meta.step);
    say!("tokens seen  {}", HumanCount(m.meta.tokens_seen));
    say!("written      {}, by {}", age(m.written_unix_s), m.tool);
    say!("model hash   {}", m.model_hash);
    say!("tokenizer    {}", or_unknown(&m.meta.tokenizer_hash));
    say!("data         {}", or_unknown(&m.meta.data_fingerprint));
    say!("loader       {}", m.meta.loader);
    for (name, value) in &m.meta.scalars {
        say!("scalar       {name} = {value}");
    }
    for (what, optimizer) in [("weights", false), ("optimizer", true)] {
        let of_kind: Vec<&Entry> = m.entries.iter().filter(|e| is_optimizer(&e.name) == optimizer).collect();
        let numbers: u64 = of_kind.iter().map(|e| e.shape.iter().product::<usize>() as u64).sum();
        let bytes: u64 = of_kind.iter().flat_map(|e| &e.parts).map(|p| p.bytes[1] - p.bytes[0]).sum();
        say!("{what:<12} {} tensors, {} numbers, {}", of_kind.len(), HumanCount(numbers), HumanBytes(bytes));
    }
    say!("files        {}, {}", m.files.len(), HumanBytes(m.total_bytes()));
    if tensors {
        for e in &m.entries {
            say!("{:<4} {:<20} {:>3} parts  {}", e.dtype.name(), format!("{:?}", e.shape), e.parts.len(), e.name);
        }
    }
    Ok(exit_code::OK)
}

fn contents_name(contents: Contents) -> &'static str {
    match contents {
        Contents::Training => "training",
        Contents::Weights => "weights",
    }
}

fn age(written_unix_s: u64) -> String {
    let written = std::time::UNIX_EPOCH + std::time::Duration::from_secs(written_unix_s);
    match written.elapsed() {
        Ok(age) => format!("{} ago", HumanDuration(age)),
        Err(_) => "in the future".into(),
    }
}
