//! The recipe's whole step on made-up tokens: the code that `zaya pretrain` runs, its parts timed by the recorder.

use std::time::Instant;

use anyhow::{Result, ensure};

use super::report::StepLine;
use super::synthetic;
use super::timing::{Times, cpu_seconds};
use crate::error::bad_input;
use crate::machine;
use crate::model::init::initial_values;
use crate::model::peers::Peers;
use crate::model::stack::MicroBatch;
use crate::model::{Cx, ParamStore, ParamTable};
use crate::optim::schedule::Schedule;
use crate::optim::update::{ADAMW, MUON};
use crate::parallel::{Alone, Cutting, Layout};
use crate::plan::{Flops, memory};
use crate::recipe::Recipe;
use crate::tensor::Backend;
use crate::tensor::backend::{Batch, Loss, PinnedRoutes};
use crate::tensor::cpu::Cpu;
use crate::tensor::trace;
use crate::train::backend::native;
use crate::train::config::balance_config;
use crate::train::engine::{Engine, Native};
use crate::train::state::TrainState;
use crate::train::step::{FORWARD_BACKWARD, StepConfig, Watch, step};

/// Least steps that are timed.
const LEAST_STEPS: usize = 3;

/// The native engine, with routes that are dealt out evenly in place of the routers' own: those of a router that has not
/// learned yet send most tokens to a few experts, and another number of them at every step. All of the router is computed.
pub(super) struct EvenRoutes {
    native: Native<Cpu>,
    /// One entry per block, for every micro-batch alike.
    routes: Vec<PinnedRoutes>,
}

impl EvenRoutes {
    /// For micro-batches of `tokens` rows. `sharing`: as in [`Step`](crate::train::backend::Step).
    pub(super) fn new(recipe: &Recipe, sharing: Option<(Layout, Cutting)>, tokens: usize) -> Result<Self> {
        let model = &recipe.model;
        let routes = (0..model.num_blocks() as u64).map(|i| synthetic::even_routes(i, tokens, model.num_experts)).collect();
        Ok(Self { native: native(recipe, sharing)?, routes })
    }
}

impl Engine for EvenRoutes {
    type B = Cpu;

    fn backend(&self) -> &Cpu {
        &self.native.backend
    }

    fn forward_backward(
        &self,
        params: &ParamStore<Cpu>,
        grads: &mut ParamStore<Cpu>,
        batch: &Batch,
        grad_scale: f32,
        peers: Peers<'_, Cpu>,
    ) -> Result<MicroBatch> {
        let Native { backend, model } = &self.native;
        let rows = backend.rows(batch)?;
        let cx = Cx { pinned: Some(&self.routes), peers, ..Cx::new(backend, params, &rows) };
        Ok(model.forward_backward(&cx, grads, grad_scale)?.0)
    }

    fn loss(&self, params: &ParamStore<Cpu>, batch: &Batch, peers: Peers<'_, Cpu>) -> Result<Loss> {
        self.native.loss(params, batch, peers)
    }
}

/// Seconds of one step: whole, of the process's CPUs, and of its parts.
#[derive(Clone, Copy, Default)]
struct Round {
    wall: f64,
    cpu: f64,
    forward_backward: f64,
    adamw: f64,
    muon: f64,
}

/// Takes steps for `seconds`, after one for warming up.
pub fn measure(recipe: &Recipe, seconds: f64) -> Result<StepLine> {
    let table = ParamTable::new(&recipe.model);
    refuse_too_large(recipe, &table)?;
    let (model, train) = (&recipe.model, &recipe.train);
    let tokens = train.sequences_at_once() * train.seq_len;
    let engine = EvenRoutes::new(recipe, None, tokens)?;
    let mut state = TrainState::new(engine.backend(), model, &balance_config(recipe), |id| {
        Ok(initial_values(&table.specs[id], model, recipe.run.seed))
    })?;
    let (cfg, schedule) = (StepConfig::of(recipe), Schedule::of(recipe));
    let (mut rounds, mut timed_s) = (Vec::new(), 0.0);
    while rounds.len() < LEAST_STEPS || timed_s < seconds {
        let micro = train.micro_batches_per_step();
        let stream = |i| state.step * micro + i;
        let batches: Vec<_> =
            (0..micro).map(|i| synthetic::batch(stream(i), model.vocab_size, train.sequences_at_once(), train.seq_len)).collect();
        let lr = schedule.lr_at(state.step);
        trace::start();
        let (started, cpu_before) = (Instant::now(), cpu_seconds());
        let done = step(&engine, &mut state, &cfg, &Alone::new(&table), &batches, lr, &Watch::NONE);
        let (wall, cpu) = (started.elapsed().as_secs_f64(), cpu_seconds() - cpu_before);
        let trace = trace::finish();
        let updated = done?.done()?.updated;
        ensure!(updated, "a step on made-up tokens updated nothing");
        // The first one warms up.
        if state.step > 1 {
            let [forward_backward, adamw, muon] = [FORWARD_BACKWARD, ADAMW, MUON].map(|name| trace.phase_seconds(name));
            rounds.push(Round { wall, cpu, forward_backward, adamw, muon });
            timed_s += wall;
        }
    }

    let of = |field: fn(&Round) -> f64| rounds.iter().map(field).collect::<Vec<_>>();
    let times = Times::of(of(|r| r.wall), of(|r| r.cpu), 1);
    let middle = middle(&mut rounds);
    let flops = Flops::of(recipe, &table);
    let step_flops = flops.per_token() * train.global_batch_tokens as f64;
    Ok(StepLine {
        tokens: train.global_batch_tokens,
        tokens_per_s: train.global_batch_tokens as f64 / times.median_s,
        forward_backward_s: middle.forward_backward,
        adamw_s: middle.adamw,
        muon_s: middle.muon,
        other_s: middle.wall - middle.forward_backward - middle.adamw - middle.muon,
        muon_share: middle.muon / middle.wall,
        flops: step_flops,
        newton_schulz_flops: flops.newton_schulz,
        gflops: step_flops / middle.forward_backward / 1e9,
        limit_gflops: None,
        mfu: None,
        peak_resident_bytes: machine::peak_resident_bytes(),
        times,
    })
}

/// The round of median length, or the mean of the two in the middle: parts that add up.
fn middle(rounds: &mut [Round]) -> Round {
    rounds.sort_by(|a, b| a.wall.total_cmp(&b.wall));
    let n = rounds.len();
    let (a, b) = (rounds[(n - 1) / 2], rounds[n / 2]);
    let mean = |field: fn(&Round) -> f64| (field(&a) + field(&b)) / 2.0;
    Round {
        wall: mean(|r| r.wall),
        cpu: mean(|r| r.cpu),
        forward_backward: mean(|r| r.forward_backward),
        adamw: mean(|r| r.adamw),
        muon: mean(|r| r.muon),
    }
}

/// A model of a cluster's size would be killed for its memory after minutes of filling it.
fn refuse_too_large(recipe: &Recipe, table: &ParamTable) -> Result<()> {
    let mut recipe = recipe.clone();
    // Nothing is saved here.
    recipe.checkpoint.asynchronous = false;
    let needed: u64 = memory::parts(&recipe, table, None)?.1.iter().map(|p| p.bytes).sum();
    match machine::available_memory() {
        Some(free) if needed > free => Err(bad_input(format!(
            "cannot measure a whole step of this recipe: training it takes about {:.1} GiB, and this machine has {:.1} GiB free. \
             Choose a smaller model (--set model.num_blocks=...), or leave the step out with --parts machine,gemm,verbs",
            needed as f64 / (1u64 << 30) as f64,
            free as f64 / (1u64 << 30) as f64
        ))),
        _ => Ok(()),
    }
}
