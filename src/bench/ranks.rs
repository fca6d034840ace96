//! A step on several ranks against the same step on one, in alternating rounds: as many threads, as many tokens.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use serde::Serialize;

use super::step::EvenRoutes;
use super::synthetic;
use crate::model::ParamTable;
use crate::model::init::initial_values;
use crate::optim::schedule::Schedule;
use crate::parallel::threads::Hub;
use crate::parallel::{Alone, Comm, Cutting, Layout, Mesh, Sharing, Stages, Together};
use crate::recipe::Recipe;
use crate::robust::median;
use crate::tensor::backend::Batch;
use crate::tensor::cpu::{Cpu, par};
use crate::train::config::balance_config;
use crate::train::engine::Engine;
use crate::train::ranks;
use crate::train::state::TrainState;
use crate::train::step::{StepConfig, Watch, step};

const LEAST_ROUNDS: usize = 4;
const TIMEOUT: Duration = Duration::from_secs(600);

#[derive(Debug, Clone, Serialize)]
pub struct RanksLine {
    pub ranks: usize,
    pub threads_per_rank: usize,
    pub cp: usize,
    pub ep: usize,
    pub tokens: u64,
    pub rounds: usize,
    /// Of a step on all ranks, and on one rank with all their threads: medians.
    pub step_s: f64,
    pub one_rank_step_s: f64,
    pub tokens_per_s: f64,
    pub one_rank_tokens_per_s: f64,
    /// `tokens_per_s` over `one_rank_tokens_per_s`.
    pub ratio: f64,
    /// Part of a step in which the first rank stood still for gradients, and for weights.
    pub gradient_wait: f64,
    pub weight_wait: f64,
    /// Part of a step that it was in operations with others that the computation waits for.
    pub operations: f64,
}

/// One step: its time, how long it stood still for gradients and for weights, and how long it was in other operations.
type Outcome = Result<[f64; 4]>;

/// Takes a step each time it is asked.
struct Worker {
    ask: Sender<u64>,
    done: Receiver<Outcome>,
}

impl Worker {
    fn start(name: String, body: impl FnOnce(Receiver<u64>, &Sender<Outcome>) -> Result<()> + Send + 'static) -> Result<Self> {
        let (ask, asked) = channel();
        let (tell, done) = channel();
        let body = move || {
            if let Err(e) = body(asked, &tell) {
                // Nobody listens any more when the measurement has failed elsewhere.
                let _ = tell.send(Err(e));
            }
        };
        std::thread::Builder::new().name(name).spawn(body).context("starting a rank")?;
        Ok(Self { ask, done })
    }
}

/// All ranks take step `n`; the first one's outcome.
fn round(workers: &[Worker], n: u64) -> Outcome {
    for worker in workers {
        // One that has ended shows below.
        let _ = worker.ask.send(n);
    }
    let mut outcomes = workers.iter().map(|w| w.done.recv().map_err(|_| anyhow!("a rank of the measurement panicked"))?);
    let first = outcomes.next().context("there is a first rank")?;
    outcomes.try_for_each(|o| o.map(drop))?;
    first
}

pub fn measure(recipe: &Recipe, ranks: usize, threads: usize, seconds: f64) -> Result<RanksLine> {
    let (layout, cutting) = ranks::layout(recipe, ranks)?;
    let threads_per_rank = (threads / ranks).max(1);
    let one = {
        let recipe = recipe.clone();
        let body = move |asked, tell: &Sender<Outcome>| {
            par::pool(Some(threads))?.install(|| {
                let alone = Alone::new(&ParamTable::new(&recipe.model));
                steps(&recipe, &alone, None, asked, tell)
            })
        };
        [Worker::start("one-rank".into(), body)?]
    };
    let many: Vec<Worker> = (Hub::ranks(ranks, TIMEOUT).into_iter())
        .map(|transport| {
            let recipe = recipe.clone();
            let comm = Comm::new(Arc::new(transport), Stages::Flat);
            let name = format!("rank-{}", comm.transport.rank());
            let body = move |asked, tell: &Sender<Outcome>| {
                par::pool(Some(threads_per_rank))?.install(|| {
                    let mesh = Arc::new(Mesh::new(layout, comm));
                    let (bucket_bytes, _) = ranks::bucket_bytes(&recipe, &mesh)?;
                    let together = Together::new(mesh, &recipe.model, cutting, bucket_bytes)?;
                    steps(&recipe, &together, Some((layout, cutting)), asked, tell)
                })
            };
            Worker::start(name, body)
        })
        .collect::<Result<_>>()?;
    let (mut of_one, mut of_many) = (Vec::new(), Vec::new());
    let began = Instant::now();
    let mut n = 0;
    while of_many.len() <= LEAST_ROUNDS || began.elapsed().as_secs_f64() < seconds {
        of_one.push(round(&one, n)?);
        of_many.push(round(&many, n)?);
        n += 1;
    }
    // The first steps warm up.
    let column = |rows: &[[f64; 4]], i: usize| median(rows[1..].iter().map(|r| r[i]).collect());
    let (step_s, one_rank_step_s) = (column(&of_many, 0), column(&of_one, 0));
    let tokens = recipe.train.global_batch_tokens;
    Ok(RanksLine {
        ranks,
        threads_per_rank,
        cp: layout.cp,
        ep: layout.ep,
        tokens,
        rounds: of_many.len() - 1,
        step_s,
        one_rank_step_s,
        tokens_per_s: tokens as f64 / step_s,
        one_rank_tokens_per_s: tokens as f64 / one_rank_step_s,
        ratio: one_rank_step_s / step_s,
        gradient_wait: column(&of_many, 1) / step_s,
        weight_wait: column(&of_many, 2) / step_s,
        operations: column(&of_many, 3) / step_s,
    })
}

fn steps(
    recipe: &Recipe,
    sharing: &dyn Sharing<Cpu>,
    shared: Option<(Layout, Cutting)>,
    asked: Receiver<u64>,
    tell: &Sender<Outcome>,
) -> Result<()> {
    let (model, train) = (&recipe.model, &recipe.train);
    let table = ParamTable::new(model);
    let (layout, rank) = sharing.place();
    let shares = layout.micro_batches(rank, train.sequences_per_step() as usize, train.sequences_at_once());
    let first = shares.first().map_or(0, |s| s.len());
    let rows = first * shared.map_or(train.seq_len, |(_, cutting)| cutting.chunk() * cutting.per_rank());
    let engine = EvenRoutes::new(recipe, shared, rows)?;
    let mut state = TrainState::shared(engine.backend(), model, &balance_config(recipe), sharing.ownership(), |id| {
        Ok(initial_values(&table.specs[id], model, recipe.run.seed))
    })?;
    let (cfg, schedule) = (StepConfig::of(recipe), Schedule::of(recipe));
    for n in asked {
        let batches: Vec<Batch> = (shares.iter())
            .map(|s| synthetic::batch(n << 32 | s.start as u64, model.vocab_size, s.len(), train.seq_len))
            .collect();
        let started = Instant::now();
        step(&engine, &mut state, &cfg, sharing, &batches, schedule.lr_at(n), &Watch::NONE)?.done()?;
        let waits = sharing.take_waits().unwrap_or_default();
        let times = [started.elapsed(), waits.gradients, waits.weights, waits.operations].map(|t| t.as_secs_f64());
        if tell.send(Ok(times)).is_err() {
            break;
        }
    }
    Ok(())
}
