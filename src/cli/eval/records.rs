//! `zaya eval compare`, `contamination` and `score`: what can be said of runs that are done.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::Result;
use serde_json::{Map, Value, json};

use super::tasks;
use crate::cli::{in_pool, unwritable};
use crate::data::shard::Shard;
use crate::error::{bad_input, exit_code};
use crate::eval::compare::{Comparison, compare};
use crate::eval::contamination::{Wanted, query, report, search};
use crate::eval::harness::run::line;
use crate::eval::harness::score::code::CodeRunner;
use crate::eval::harness::score::results::{self, RunInfo, results};
use crate::eval::harness::tasks::registry::{Node, Registry};
use crate::eval::harness::tasks::spec::TaskSpec;
use crate::eval::harness::tasks::template::Templates;
use crate::eval::rescore::rescore;
use crate::eval::session::records::{TaskRecords, read};
use crate::eval::session::{files, table};
use crate::text::{Encoder, Eod};

/// Compare two runs over the same documents: exact McNemar, an interval of the difference, and the documents that flipped.
#[derive(Debug, clap::Args)]
pub struct CompareArgs {
    /// Output folder of a run, or one of its samples_<task>.jsonl.
    a: PathBuf,
    /// The same of another run.
    b: PathBuf,
    /// Also write all of it as JSON.
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Flipped documents to list for each metric.
    #[arg(long, value_name = "N", default_value_t = 10)]
    flipped: usize,
}

/// Look for a run's documents in training data (13 words in a row), and score the clean and the dirty ones apart.
#[derive(Debug, clap::Args)]
pub struct ContaminationArgs {
    /// Output folder of a run, or one of its samples_<task>.jsonl.
    samples: PathBuf,
    /// Token shards: prefixes of .bin and .idx.
    #[arg(long, value_name = "PREFIX", num_args = 1.., required = true)]
    shards: Vec<PathBuf>,
    /// tokenizer.json of the shards.
    #[arg(long, value_name = "FILE")]
    tokenizer: PathBuf,
    /// Also write all of it as JSON.
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Folders or files (.toml, .yaml) that define tasks of one's own.
    #[arg(long, value_name = "PATH", num_args = 1..)]
    task_path: Vec<PathBuf>,
    /// Threads; by default all cores.
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
}

/// Score saved answers again, without a model.
#[derive(Debug, clap::Args)]
pub struct ScoreArgs {
    /// Output folder of a run, or one of its samples_<task>.jsonl.
    samples: PathBuf,
    /// Folder that results.json and the new samples go to.
    #[arg(long, value_name = "OUT")]
    output: PathBuf,
    /// Run the programs that the model wrote (HumanEval), each in a sandbox.
    #[arg(long)]
    allow_code_exec: bool,
    /// Resamples of standard errors without a formula; 0 = none.
    #[arg(long, value_name = "N", default_value_t = 100_000)]
    bootstrap_iters: usize,
    /// Folders or files (.toml, .yaml) that define tasks of one's own.
    #[arg(long, value_name = "PATH", num_args = 1..)]
    task_path: Vec<PathBuf>,
    /// Threads; by default all cores.
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
}

pub fn compare_runs(args: &CompareArgs) -> Result<u8> {
    let comparisons = compare(&read(&args.a)?, &read(&args.b)?)?;
    for c in &comparisons {
        show(c, args.flipped);
    }
    if let Some(path) = &args.output {
        write_json(path, &json!({"comparisons": comparisons.iter().map(Comparison::json).collect::<Vec<_>>()}))?;
    }
    Ok(exit_code::OK)
}

fn show(c: &Comparison, flipped: usize) {
    let test = c.mcnemar.map_or(String::new(), |m| {
        let holm = c.p_holm.map_or(String::new(), |p| format!(", Holm {p:.4}"));
        format!("; only A right {}, only B right {}, McNemar p {:.4}{holm}", m.only_a, m.only_b, m.p)
    });
    say!(
        "{} {},{}: A {:.4}, B {:.4}, difference {:+.4} [{:+.4}, {:+.4}] over {} documents{test}",
        c.task,
        c.metric,
        c.filter,
        c.a,
        c.b,
        c.b - c.a,
        c.interval.0,
        c.interval.1,
        c.documents
    );
    if c.mcnemar.is_some() && !c.flipped.is_empty() {
        let ids: Vec<String> = c.flipped.iter().take(flipped).map(|(id, a, b)| format!("{id} ({a} -> {b})")).collect();
        let more = c.flipped.len().saturating_sub(flipped);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        say!("  flipped: {}{more}", ids.join(", "));
    }
}

pub fn contamination(args: &ContaminationArgs) -> Result<u8> {
    let registry = tasks::registry(&args.task_path)?;
    let samples = read(&args.samples)?;
    let tokenizer = Encoder::load(&args.tokenizer, &Eod::Absent)?;
    let shards = args.shards.iter().map(|s| Shard::open(s)).collect::<Result<Vec<_>>>()?;
    let templates = Templates::default();
    // Documents of all tasks are looked for at once.
    let (mut places, mut queries) = (Vec::new(), Vec::new());
    for (name, records) in &samples {
        let spec = definition(&registry, name)?;
        let mut seen = BTreeMap::new();
        for record in &records.records {
            let id = record["doc_id"].as_u64().unwrap_or_default();
            if seen.insert(id, ()).is_none() {
                places.push((name.as_str(), id));
                queries.push(query(&spec, &record["doc"], &templates)?);
            }
        }
    }
    let wanted = Wanted::new(&queries);
    let dirty = in_pool(args.threads, || search(&wanted, &shards, &tokenizer, |_| {}))?;
    let mut out = Map::new();
    for (name, records) in &samples {
        let own = || places.iter().zip(dirty.iter().zip(&wanted.too_short)).filter(|((task, _), _)| task == name);
        let by_id: BTreeMap<u64, bool> = own().map(|((_, id), (dirty, _))| (*id, *dirty)).collect();
        let block = report(&definition(&registry, name)?, records, &by_id, own().filter(|(_, (_, short))| **short).count());
        say!(
            "{name}: {} of {} documents are dirty, {} have too few words to tell",
            block["dirty"],
            block["documents"],
            block["too_short"]
        );
        for (metric, parts) in block["scores"].as_object().into_iter().flatten() {
            let number = |v: &Value| v.as_f64().map_or("none".to_string(), |x| format!("{x:.4}"));
            say!(
                "  {metric}: all {}, clean {}, dirty {}",
                number(&parts["all"]),
                number(&parts["clean"]),
                number(&parts["dirty"])
            );
        }
        out.insert(name.clone(), block);
    }
    if let Some(path) = &args.output {
        write_json(path, &json!({"words": crate::eval::contamination::WORDS, "tasks": out}))?;
    }
    Ok(exit_code::OK)
}

pub fn score(args: &ScoreArgs) -> Result<u8> {
    let registry = tasks::registry(&args.task_path)?;
    let samples: BTreeMap<String, TaskRecords> = read(&args.samples)?;
    let specs = samples.keys().map(|name| definition(&registry, name)).collect::<Result<Vec<_>>>()?;
    let nodes: Vec<Node> = specs.iter().map(|s| Node::Task(Box::new(s.clone()))).collect();
    let sandbox = tasks::sandbox(&nodes, args.allow_code_exec)?;
    std::fs::create_dir_all(&args.output).map_err(|e| unwritable(&args.output, &e))?;
    in_pool(args.threads, || {
        let code = sandbox.as_ref().map(|s| s as &dyn CodeRunner);
        let mut scored = BTreeMap::new();
        for (spec, (name, records)) in specs.iter().zip(&samples) {
            scored.insert(name.clone(), rescore(spec, records, code, args.bootstrap_iters)?);
        }
        for (name, (_, score)) in &scored {
            let text: String = score.samples.iter().map(line).collect();
            files::write(&args.output.join(format!("samples_{name}.jsonl")), &text)?;
        }
        let results = results(&nodes, &scored, &RunInfo::default());
        files::write(&args.output.join("results.json"), &results::text(&results))?;
        say!("{}", table::render(&results).trim_end());
        Ok(exit_code::OK)
    })
}

fn definition(registry: &Registry, name: &str) -> Result<TaskSpec> {
    match registry.resolve(name)?.into_iter().next() {
        Some(Node::Task(task)) if task.name == name => Ok(*task),
        _ => Err(bad_input(format!("{name} is no task"))),
    }
}

fn write_json(path: &Path, value: &Value) -> Result<()> {
    files::write(path, &(serde_json::to_string_pretty(value)? + "\n"))
}
