//! `zaya eval ls`, `show` and `validate`: what is asked, without asking it.

use std::path::PathBuf;

use anyhow::Result;

use super::{CompatName, tasks};
use crate::checkpoint::ModelSource;
use crate::error::{bad_input, exit_code};
use crate::eval::harness::tasks::build::Options;
use crate::eval::harness::tasks::documents::Library;
use crate::eval::harness::tasks::registry::{Node, Registry};
use crate::eval::session::{Encoding, Tasks, select, show};
use crate::eval::tokenizer::EvalTokenizer;

/// List tasks and groups.
#[derive(Debug, clap::Args)]
pub struct ListArgs {
    /// Only names that hold this.
    #[arg(default_value = "")]
    filter: String,
    /// Folders or files (.toml, .yaml) that define tasks of one's own.
    #[arg(long, value_name = "PATH", num_args = 1..)]
    task_path: Vec<PathBuf>,
}

/// Show what a task asks of one document: prompt, ids, and where context and continuation part.
#[derive(Debug, clap::Args)]
pub struct ShowArgs {
    task: String,
    /// Which document of the evaluated split, from 0.
    #[arg(long, value_name = "I", default_value_t = 0)]
    doc: usize,
    /// Folders that hold the task's data.
    #[arg(long, value_name = "FOLDER", num_args = 1.., required = true)]
    data: Vec<PathBuf>,
    /// A model, whose tokenizer and context are used; without it only texts are shown.
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// tokenizer.json; by default the model's own.
    #[arg(long, value_name = "FILE", requires = "model")]
    tokenizer: Option<PathBuf>,
    #[arg(long, value_name = "K")]
    num_fewshot: Option<usize>,
    /// Seed of the choice of examples.
    #[arg(long, default_value_t = 1234)]
    seed: u64,
    #[arg(long, value_enum, default_value_t = CompatName::LmEval)]
    compat: CompatName,
    /// Longest input, tokens; by default the model's context.
    #[arg(long, value_name = "L", requires = "model")]
    max_length: Option<usize>,
    /// Whether the tokenizer's special tokens are put around texts.
    #[arg(long, value_name = "BOOL", requires = "model")]
    add_bos_token: Option<bool>,
    #[arg(long, value_name = "PATH", num_args = 1..)]
    task_path: Vec<PathBuf>,
}

/// Check a file or folder of task definitions, with --data also against documents.
#[derive(Debug, clap::Args)]
pub struct ValidateArgs {
    /// .toml or .yaml files, or folders of such.
    #[arg(required = true)]
    files: Vec<PathBuf>,
    /// Folders of data: the first documents of each task are built.
    #[arg(long, value_name = "FOLDER", num_args = 1..)]
    data: Vec<PathBuf>,
}

pub fn list(args: &ListArgs) -> Result<u8> {
    say!("{}", show::list(&tasks::registry(&args.task_path)?, &args.filter)?.trim_end());
    Ok(exit_code::OK)
}

pub fn show(args: &ShowArgs) -> Result<u8> {
    let nodes = select(&tasks::registry(&args.task_path)?, std::slice::from_ref(&args.task))?;
    let [Node::Task(_)] = &nodes[..] else {
        let names: Vec<String> = nodes.iter().flat_map(Node::tasks).map(|t| t.name.clone()).collect();
        return Err(bad_input(format!("{} is a group; show one of its tasks: {}", args.task, names.join(", "))));
    };
    let options = Options {
        compat: args.compat.compat(),
        num_fewshot: args.num_fewshot,
        // Examples are drawn document by document: those before it decide which it gets.
        limit: Some((args.doc + 1) as f64),
        fewshot_seed: args.seed,
        ..Options::default()
    };
    let built = Tasks::build(nodes, &Library::new(args.data.clone()), &options)?.built;
    let tokenizer = args.model.as_ref().map(|model| -> Result<_> {
        let source = ModelSource::open(model)?;
        let tokenizer = tasks::tokenizer(args.tokenizer.as_deref(), model, &source)?;
        let max_length = args.max_length.unwrap_or(source.config().max_position_embeddings);
        let encoding = Encoding { compat: args.compat.compat(), add_special: args.add_bos_token, max_length };
        Ok((tokenizer, encoding))
    });
    let tokenizer: Option<(EvalTokenizer, Encoding)> = tokenizer.transpose()?;
    say!("{}", show::document(&built[0], args.doc, tokenizer.as_ref().map(|(t, e)| (t, e)))?.trim_end());
    Ok(exit_code::OK)
}

pub fn validate(args: &ValidateArgs) -> Result<u8> {
    // Groups of the files may name tasks that come with the program.
    let mut registry = Registry::built_in()?;
    let mut own = Registry::default();
    for file in &args.files {
        own.add_path(file)?;
        registry.add_path(file)?;
    }
    let names: Vec<String> = own.names().into_iter().map(str::to_string).collect();
    if names.is_empty() {
        return Err(bad_input("the files define no task (.toml, .yaml and .yml are read)"));
    }
    let nodes = select(&registry, &names)?;
    let count = nodes.iter().filter(|n| matches!(n, Node::Task(_))).count();
    say!("{count} tasks and {} groups are well formed: {}", names.len() - count.min(names.len()), names.join(", "));
    if !args.data.is_empty() {
        let options = Options { limit: Some(3.0), ..Options::default() };
        let tasks = Tasks::build(nodes, &Library::new(args.data.clone()), &options)?;
        for task in &tasks.built {
            say!("{}: {} documents, {} built", task.spec.name, task.original, task.asked.len());
        }
        tasks.notes().iter().for_each(|n| say!("note: {n}"));
        tasks.skipped.iter().for_each(|(_, says)| say!("left out: {says}"));
        if !tasks.skipped.is_empty() {
            return Ok(exit_code::PARTIAL);
        }
    }
    Ok(exit_code::OK)
}
