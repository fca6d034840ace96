//! `[[eval.tasks]]`: benchmark tasks on the weights of a run, while it trains.
//!
//! Requests are built once, when a stage starts. Each evaluation asks them of the weights as they are, every rank a part of each round.
//! Nothing that training reads is written, so not one bit of the run changes.

use std::fmt;
use std::path::Path;
use std::time::Instant;

use anyhow::{Result, ensure};
use bytemuck::Pod;
use serde_json::{Map, Value};

use super::engine::Engine;
use super::step::agree;
use crate::error::bad_input;
use crate::eval::harness::compat::Compat;
use crate::eval::harness::encode::{Encode, Pair};
use crate::eval::harness::run::{Generation, Runner, Usage, Work};
use crate::eval::harness::score::results::{RunInfo, results};
use crate::eval::harness::tasks::build::Options as BuildOptions;
use crate::eval::harness::tasks::documents::Library;
use crate::eval::harness::tasks::registry::{Node, Registry};
use crate::eval::runner::{ModelRunner, Options as RunnerOptions};
use crate::eval::session::log::RequestLog;
use crate::eval::session::work::{Unwatched, answer};
use crate::eval::session::{Encoding, TaskPlan, Tasks, plan_all, score_all, select};
use crate::eval::tokenizer::EvalTokenizer;
use crate::failpoint;
use crate::model::{Model, ParamStore};
use crate::parallel::group::even_pieces;
use crate::parallel::{Group, Sharing};
use crate::recipe::{EvalTask, Recipe};

/// Resamples of a standard error that has no formula, as lm-eval does it.
const BOOTSTRAP_ITERS: usize = 100_000;

/// The benchmark tasks of a recipe.
pub struct Benchmarks {
    tokenizer: EvalTokenizer,
    model: Model,
    max_length: usize,
    seed: u64,
    each: Vec<Benchmark>,
}

/// One entry of `[[eval.tasks]]`.
struct Benchmark {
    every: Option<u64>,
    tasks: Tasks,
    plans: Vec<TaskPlan>,
    work: Work,
}

/// What came out of the tasks that were due at a step.
#[derive(Debug, Clone, PartialEq)]
pub struct Results {
    /// lm-eval's rows by task and by group: `{"acc,none": 0.25, "acc_stderr,none": 0.01, ...}`.
    pub tasks: Map<String, Value>,
    pub seconds: f64,
}

impl Benchmarks {
    /// Reads definitions and documents, and builds all requests. None of a recipe without tasks.
    ///
    /// # Errors
    /// `BadInput`: no such task, no data, or a task that runs programs which a model writes.
    pub fn open(recipe: &Recipe) -> Result<Option<Self>> {
        let Some(tokenizer) = recipe.tokenizer.as_deref().filter(|_| !recipe.eval.tasks.is_empty()) else { return Ok(None) };
        let mut benchmarks = Self {
            tokenizer: EvalTokenizer::load(tokenizer, &recipe.model)?,
            model: Model::new(recipe.model.clone()),
            max_length: recipe.model.max_position_embeddings,
            seed: recipe.run.seed,
            each: Vec::new(),
        };
        let registry = Registry::built_in()?;
        for task in &recipe.eval.tasks {
            let one = benchmarks.entry(&registry, task)?;
            benchmarks.each.push(one);
        }
        Ok(Some(benchmarks))
    }

    fn entry(&self, registry: &Registry, task: &EvalTask) -> Result<Benchmark> {
        let nodes = select(registry, std::slice::from_ref(&task.task))?;
        if let Some(unsafe_one) = nodes.iter().flat_map(Node::tasks).find(|t| t.unsafe_code) {
            return Err(bad_input(format!(
                "[[eval.tasks]] {}: {} runs programs that the model writes, which is not done in training; evaluate checkpoints with \
                 `zaya eval --allow-code-exec`",
                task.task, unsafe_one.name
            )));
        }
        check_folder(&task.task, &task.data)?;
        let limit = task.limit.map(|n| n as f64);
        let options = BuildOptions { num_fewshot: task.num_fewshot, limit, ..BuildOptions::default() };
        let tasks = Tasks::build(nodes, &Library::new(vec![task.data.clone()]), &options)?;
        tasks.skipped.iter().for_each(|(_, says)| tell!("warning: [[eval.tasks]] {}: left out: {says}", task.task));
        let encoding = Encoding { compat: Compat::LmEval, add_special: None, max_length: self.max_length };
        let (plans, work) = plan_all(&tasks.built, &self.tokenizer, &encoding)?;
        Ok(Benchmark { every: task.every, tasks, plans, work })
    }

    /// Whether some task runs after `step`; all do after the `last` one.
    pub fn due(&self, step: u64, last: bool) -> bool {
        self.each.iter().any(|b| b.due(step, last))
    }

    /// Runs the tasks that are due. All ranks take part; all get the results. None when `interrupted` says so between two rounds.
    ///
    /// # Errors
    /// Of the model, or of other ranks.
    pub fn run<E: Engine>(
        &self,
        (step, last): (u64, bool),
        engine: &E,
        params: &ParamStore<E::B>,
        sharing: &dyn Sharing<E::B>,
        interrupted: &dyn Fn() -> bool,
    ) -> Result<Option<Results>> {
        let started = Instant::now();
        sharing.settle(params)?;
        let options = RunnerOptions {
            end_of_text: self.tokenizer.eos().map(|(id, _)| id),
            seed: self.seed,
            ..RunnerOptions::new(self.max_length)
        };
        let inner = ModelRunner::new(engine.backend(), &self.model, params, options);
        let world = sharing.mesh().map(|mesh| &mesh.world);
        let mut runner = Spread { inner, world, interrupted };
        let mut tasks = Map::new();
        for one in self.each.iter().filter(|b| b.due(step, last)) {
            sharing.at(step, "benchmark tasks");
            let answers = answer(&mut runner, &one.work, &self.tokenizer, &mut RequestLog::none(), &mut Unwatched);
            let answers = match answers {
                Ok((answers, _)) => answers,
                Err(e) if e.is::<Interrupted>() => return Ok(None),
                Err(e) => return Err(e),
            };
            let (scored, _) = score_all(&one.tasks.built, &one.plans, &answers, None, BOOTSTRAP_ITERS, false)?;
            let mut results = results(&one.tasks.nodes, &scored, &RunInfo::default());
            for table in ["results", "groups"] {
                let Some(rows) = results[table].as_object_mut() else { continue };
                tasks.extend(std::mem::take(rows).into_iter().map(|(name, row)| (name, figures(row))));
            }
        }
        Ok(Some(Results { tasks, seconds: started.elapsed().as_secs_f64() }))
    }
}

impl Benchmark {
    fn due(&self, step: u64, last: bool) -> bool {
        last || self.every.is_some_and(|n| step.is_multiple_of(n))
    }
}

impl Results {
    /// `arc_easy acc 0.2512`, one text for each task and group.
    pub fn sentences(&self) -> Vec<String> {
        let one = |(name, row): (&String, &Value)| {
            let figures: Vec<String> = row
                .as_object()
                .into_iter()
                .flatten()
                .filter(|(key, _)| !key.contains("_stderr,"))
                .filter_map(|(key, value)| Some(format!("{} {:.4}", key.trim_end_matches(",none"), value.as_f64()?)))
                .collect();
            format!("{name}: {}", figures.join(", "))
        };
        self.tasks.iter().map(one).collect()
    }
}

/// The metrics of a row of results, without its texts.
fn figures(row: Value) -> Value {
    let Value::Object(row) = row else { return row };
    Value::Object(row.into_iter().filter(|(key, _)| key.contains(',')).collect())
}

fn check_folder(task: &str, data: &Path) -> Result<()> {
    match data.is_dir() {
        true => Ok(()),
        false => {
            Err(bad_input(format!("[[eval.tasks]] {task}: {} is not a folder; it should hold the task's data", data.display())))
        }
    }
}

/// A signal came.
#[derive(Debug)]
struct Interrupted;

impl fmt::Display for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("interrupted")
    }
}

impl std::error::Error for Interrupted {}

/// Ranks that answer a part each, and tell the others. An answer does not depend on what else is asked, so it does not depend on
/// their number either.
struct Spread<'a, R> {
    inner: R,
    world: Option<&'a Group>,
    interrupted: &'a dyn Fn() -> bool,
}

impl<R> Spread<'_, R> {
    fn go_on(&self) -> Result<()> {
        if agree(self.world, (self.interrupted)())? {
            return Err(Interrupted.into());
        }
        failpoint::hit("benchmarks")
    }

    /// This rank's part of `all`.
    fn part<'t, T>(&self, all: &'t [T]) -> &'t [T] {
        match self.world {
            None => all,
            Some(world) => &all[even_pieces(all.len(), world.size())[world.index()].clone()],
        }
    }
}

/// Lists of all members, of any length, one after the other.
fn gather<T: Pod>(world: &Group, name: &'static str, own: &[T]) -> Result<Vec<T>> {
    let (mut pieces, mut end) = (Vec::new(), 0);
    for n in world.all_gather_values(name, own.len() as u64)? {
        pieces.push(end..end + n as usize);
        end += n as usize;
    }
    let mut all = vec![T::zeroed(); end];
    all[pieces[world.index()].clone()].copy_from_slice(own);
    world.all_gather(name, &mut all, &pieces)?;
    Ok(all)
}

impl<R: Runner> Runner for Spread<'_, R> {
    fn loglikelihood(&mut self, pairs: &[Pair]) -> Result<Vec<(f64, bool)>> {
        self.go_on()?;
        let own = self.inner.loglikelihood(self.part(pairs))?;
        let Some(world) = self.world else { return Ok(own) };
        let flat: Vec<f64> = own.iter().flat_map(|(logprob, greedy)| [*logprob, f64::from(u8::from(*greedy))]).collect();
        let all = gather(world, "log-probabilities of benchmark tasks", &flat)?;
        Ok(all.chunks_exact(2).map(|a| (a[0], a[1] != 0.0)).collect())
    }

    fn generate(&mut self, requests: &[Generation], done: &dyn Fn(&Generation, &[u32]) -> bool) -> Result<Vec<Vec<u32>>> {
        self.go_on()?;
        let own = self.inner.generate(self.part(requests), done)?;
        let Some(world) = self.world else { return Ok(own) };
        let flat: Vec<u32> = own.iter().flat_map(|ids| std::iter::once(ids.len() as u32).chain(ids.iter().copied())).collect();
        let all = gather(world, "texts of benchmark tasks", &flat)?;
        let (mut texts, mut rest) = (Vec::with_capacity(requests.len()), all.as_slice());
        while let Some((n, tail)) = rest.split_first() {
            ensure!(*n as usize <= tail.len(), "the texts of other ranks are cut off");
            let (ids, after) = tail.split_at(*n as usize);
            texts.push(ids.to_vec());
            rest = after;
        }
        Ok(texts)
    }

    fn usage(&self) -> Usage {
        self.inner.usage()
    }
}
