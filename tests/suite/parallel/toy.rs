//! A small model, made-up batches with everything nasty in them, and five steps of training in any layout.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use rayon::ThreadPoolBuilder;
use zaya::model::config::AttentionKind;
use zaya::model::init::initial_values;
use zaya::model::peers::Peers;
use zaya::model::presets::bench_15m;
use zaya::model::stack::{MicroBatch, Recompute};
use zaya::model::{Cx, Model, ModelConfig, ParamStore, ParamTable, Probe};
use zaya::optim::balance::{BalanceConfig, Rule};
use zaya::optim::update::OptimizerConfig;
use zaya::parallel::threads::Hub;
use zaya::parallel::{Alone, Comm, Cut, Cutting, Layout, Mesh, Sharing, Stages, Together, Transport};
use zaya::tensor::Backend;
use zaya::tensor::backend::{Batch, CcaIn, Loss};
use zaya::tensor::cpu::router::{Routing, Saved};
use zaya::tensor::cpu::{Buf, Cpu};
use zaya::train::engine::{Engine, Native};
use zaya::train::state::TrainState;
use zaya::train::step::{StepConfig, Watch, step};

pub const STEPS: u64 = 5;
/// Sequences of a global batch.
pub const SEQUENCES: usize = 7;

/// How the work is cut.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Layout1 {
    pub ranks: usize,
    pub cp: usize,
    pub ep: usize,
    pub cut: Cut,
    pub stages: Stages,
    /// Sequences of a micro-batch.
    pub micro: usize,
    pub recompute: Recompute,
    pub bucket_bytes: usize,
    /// `train.deterministic = "layout"`.
    pub by_sequence: bool,
}

impl Layout1 {
    pub const ONE: Self = Self {
        ranks: 1,
        cp: 1,
        ep: 1,
        cut: Cut::Contiguous,
        stages: Stages::Flat,
        micro: SEQUENCES,
        recompute: Recompute::None,
        bucket_bytes: 16 << 20,
        by_sequence: false,
    };

    pub fn new(ranks: usize, cp: usize, ep: usize) -> Self {
        Self { ranks, cp, ep, ..Self::ONE }
    }
}

/// What the batches hold.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Data {
    pub seq: usize,
    /// Documents end within sequences, at every distance from chunk borders.
    pub documents: bool,
    /// Some tokens are padding, most of one sequence among them.
    pub padding: bool,
    /// Biases that send every token to expert 0.
    pub one_expert: bool,
}

pub fn config() -> ModelConfig {
    ModelConfig {
        vocab_size: 61,
        hidden_size: 20,
        num_query_heads: 4,
        num_kv_heads: 2,
        head_dim: 6,
        num_experts: 5,
        expert_width: 12,
        router_width: 10,
        initializer_range: 0.4,
        attention: vec![AttentionKind::Full, AttentionKind::Sliding, AttentionKind::Full],
        sliding_window: Some(9),
        max_position_embeddings: 64,
        ..bench_15m()
    }
}

/// A number below `n` that depends on all of `key`.
fn pick(key: [usize; 4], n: usize) -> usize {
    let mut h = 0xcbf2_9ce4_8422_2325u64;
    for k in key {
        h = (h ^ k as u64).wrapping_mul(0x0100_0000_01b3);
        h ^= h >> 29;
    }
    (h % n as u64) as usize
}

/// Sequences `range` of the global batch of a step.
pub fn batch(data: Data, step: u64, range: std::ops::Range<usize>) -> Batch {
    let (seq, step) = (data.seq, step as usize);
    let mut b = Batch { batch: range.len(), seq, ..Batch::default() };
    for s in range {
        let id = |p: usize| pick([1, step, s, p], 61);
        let mut start = 0;
        for p in 0..seq {
            if data.documents && pick([2, step, s, p], 6) == 0 {
                start = p;
            }
            let real = !data.padding || (if s == 2 { p < 3 } else { pick([3, step, s, p], 9) > 0 });
            b.ids.push(id(p) as u32);
            // Sequences have very different numbers of labels.
            let labelled = real && p + 1 < seq && pick([4, step, s, p], SEQUENCES) >= s / 2;
            b.labels.push(if labelled { id(p + 1) as i64 } else { -1 });
            if data.documents {
                b.doc_start.push(start as u32);
            }
            if data.padding {
                b.valid.push(real);
            }
        }
    }
    b
}

/// Everything that layouts must agree on.
#[derive(Debug, Clone, Default)]
pub struct Trained {
    pub losses: Vec<f64>,
    pub norms: Vec<f64>,
    pub counts: Vec<Vec<Vec<u64>>>,
    pub tokens: Vec<u64>,
    pub labels: Vec<u64>,
    /// Of the first step, by parameter.
    pub grads: Vec<Vec<f32>>,
    /// After the last step, by parameter.
    pub weights: Vec<Vec<f32>>,
    /// Smallest distance between the best and the second class of any token.
    pub margin: f32,
}

/// Notes how close the routers' decisions are.
struct Margins<'a> {
    cpu: &'a Cpu,
    params: &'a ParamStore<Cpu>,
    table: &'a ParamTable,
    smallest: &'a Cell<f32>,
}

impl Probe<Cpu> for Margins<'_> {
    fn buf(&self, _: &str, _: &Buf) {}
    fn cca_inputs(&self, _: usize, _: &CcaIn<Buf>) {}
    fn routing(&self, block: usize, routing: &Routing, saved: &Saved, _: &Buf) {
        let logits = self.cpu.route_logits(routing, saved).unwrap();
        let biases = self.cpu.download(&self.params[self.table.blocks[block].moe.balancing_biases]).unwrap();
        for row in self.cpu.download(&logits).unwrap().chunks(biases.len()) {
            let top = row.iter().copied().fold(f32::MIN, f32::max);
            let sum: f32 = row.iter().map(|x| (x - top).exp()).sum();
            let mut scores: Vec<f32> = row.iter().zip(&biases).map(|(x, b)| (x - top).exp() / sum + b).collect();
            scores.sort_by(|a, b| b.total_cmp(a));
            self.smallest.set(self.smallest.get().min(scores[0] - scores[1]));
        }
    }
}

/// The native engine, watched.
struct Watched {
    native: Native<Cpu>,
    smallest: Cell<f32>,
}

impl Engine for Watched {
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
    ) -> anyhow::Result<MicroBatch> {
        let Native { backend, model } = &self.native;
        let rows = backend.rows(batch)?;
        let margins = Margins { cpu: backend, params, table: &model.table, smallest: &self.smallest };
        let cx = Cx { peers, probe: Some(&margins), ..Cx::new(backend, params, &rows) };
        Ok(model.forward_backward(&cx, grads, grad_scale)?.0)
    }

    fn loss(&self, params: &ParamStore<Cpu>, batch: &Batch, peers: Peers<'_, Cpu>) -> anyhow::Result<Loss> {
        self.native.loss(params, batch, peers)
    }
}

/// Five steps of one rank.
fn train(sharing: &dyn Sharing<Cpu>, l: Layout1, data: Data, seed: u64) -> Trained {
    let config = config();
    let table = ParamTable::new(&config);
    let cpu = Cpu::default();
    let engine = Watched {
        native: Native { backend: cpu.clone(), model: Model::new(config.clone()).with_recompute(l.recompute) },
        smallest: Cell::new(f32::MAX),
    };
    let balance =
        BalanceConfig { rule: Rule::AdamW { lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8 }, warmup: 0, include_skip: false };
    let initial = |id: usize| {
        let mut values = initial_values(&table.specs[id], &config, seed);
        if data.one_expert && table.specs[id].name.ends_with("balancing_biases") {
            values[0] = 10.0;
        }
        Ok(values)
    };
    let mut state = TrainState::shared(&cpu, &config, &balance, sharing.ownership(), initial).unwrap();
    let cfg = StepConfig {
        optimizer: OptimizerConfig::default(),
        router_freeze_tokens: 0,
        by_sequence: l.by_sequence.then_some(SEQUENCES),
    };
    let layout = Layout { world: l.ranks, cp: l.cp, ep: l.ep };
    let rank = sharing.mesh().map_or(0, |mesh| mesh.rank);
    let mut out = Trained::default();
    let full = |state: &ParamStore<Cpu>, id: usize| {
        if sharing.ownership().holds(id) { cpu.download(&state[id]).unwrap() } else { vec![] }
    };
    for s in 0..STEPS {
        let batches: Vec<Batch> = layout
            .micro_batches(rank, SEQUENCES, if l.by_sequence { 1 } else { l.micro })
            .into_iter()
            .map(|range| batch(data, s, range))
            .collect();
        let report = step(&engine, &mut state, &cfg, sharing, &batches, 2e-3, &Watch::NONE).unwrap().done().unwrap();
        out.losses.push(report.mean_loss());
        out.norms.push(report.grad_norm);
        out.counts.push(report.expert_counts);
        out.tokens.push(state.tokens_seen);
        out.labels.push(report.loss.count);
        if s == 0 {
            out.grads = (0..table.specs.len()).map(|id| full(&state.grads, id)).collect();
        }
    }
    sharing.settle(&state.params).unwrap();
    out.weights = (0..table.specs.len()).map(|id| full(&state.params, id)).collect();
    out.margin = engine.smallest.get();
    out
}

/// Trains in a layout. Gradients and weights are put together from the ranks that have them.
pub fn run(l: Layout1, data: Data, seed: u64) -> Trained {
    let in_pool = |f: &(dyn Fn() -> Trained + Sync)| ThreadPoolBuilder::new().num_threads(1).build().unwrap().install(f);
    let table = ParamTable::new(&config());
    if l.ranks == 1 && l.stages == Stages::Flat {
        return in_pool(&|| train(&Alone::new(&table), l, data, seed));
    }
    let layout = Layout::new(l.ranks, l.cp, l.ep, config().num_experts).unwrap();
    let cutting = Cutting::new(l.cp, l.cut, data.seq).unwrap();
    let ranks = Hub::ranks(l.ranks, Duration::from_secs(60));
    let done: Vec<(Trained, zaya::parallel::Ownership)> = std::thread::scope(|scope| {
        let started: Vec<_> = (ranks.into_iter())
            .map(|transport| {
                scope.spawn(move || {
                    let pool = ThreadPoolBuilder::new().num_threads(1).build().unwrap();
                    pool.install(|| {
                        let transport: Arc<dyn Transport> = Arc::new(transport);
                        let mesh = Arc::new(Mesh::new(layout, Comm::new(transport, l.stages)));
                        let mut together = Together::new(mesh, &config(), cutting, l.bucket_bytes).unwrap();
                        if l.by_sequence {
                            together = together.by_sequence(&Cpu::default(), SEQUENCES).unwrap();
                        }
                        let trained = train(&together, l, data, seed);
                        (trained, together.ownership().clone())
                    })
                })
            })
            .collect();
        started.into_iter().map(|t| t.join().expect("a rank panicked")).collect()
    });
    // What all ranks know is the same everywhere.
    for (other, _) in &done[1..] {
        let first = &done[0].0;
        assert_eq!((&other.losses, &other.norms), (&first.losses, &first.norms), "ranks disagree");
        assert_eq!((&other.counts, &other.tokens, &other.labels), (&first.counts, &first.tokens, &first.labels));
        for (id, weights) in other.weights.iter().enumerate() {
            let same = weights.is_empty() || first.weights[id].is_empty() || *weights == first.weights[id];
            assert!(same, "weights of {} differ between ranks", table.specs[id].name);
        }
    }
    let mut out = done[0].0.clone();
    for (id, spec) in table.specs.iter().enumerate() {
        let [rows, cols] = spec.matrix_shape();
        let holder = done.iter().find(|(t, _)| !t.weights[id].is_empty()).expect("somebody holds it");
        out.weights[id] = holder.0.weights[id].clone();
        out.grads[id] = vec![0.0; rows * cols];
        for (trained, ownership) in &done {
            for r in ownership.rows(id) {
                let r = r.start * cols..r.end * cols;
                out.grads[id][r.clone()].copy_from_slice(&trained.grads[id][r]);
            }
        }
    }
    out.margin = done.iter().map(|(t, _)| t.margin).fold(f32::MAX, f32::min);
    out
}
