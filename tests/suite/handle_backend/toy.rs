//! The training step of the program, unchanged, on a backend whose buffers nobody but itself can read.

use zaya::model::config::{AttentionKind, ModelConfig};
use zaya::model::init::initial_values;
use zaya::model::{Model, ParamId, presets};
use zaya::optim::balance::BalanceConfig;
use zaya::optim::update::OptimizerConfig;
use zaya::parallel::Alone;
use zaya::tensor::Backend;
use zaya::tensor::backend::Batch;
use zaya::tensor::cpu::Cpu;
use zaya::train::engine::{Engine, Native};
use zaya::train::state::TrainState;
use zaya::train::step::{StepConfig, Watch, step};

use super::HandleBackend;

fn config() -> ModelConfig {
    ModelConfig {
        vocab_size: 11,
        hidden_size: 12,
        num_query_heads: 2,
        num_kv_heads: 1,
        head_dim: 4,
        num_experts: 3,
        expert_width: 8,
        router_width: 6,
        attention: vec![AttentionKind::Full, AttentionKind::Sliding],
        sliding_window: Some(4),
        initializer_range: 0.2,
        max_position_embeddings: 16,
        ..presets::bench_15m()
    }
}

/// Two micro-batches of a pattern that can be learned: each token is the one before plus two, in documents of four.
fn micro_batches() -> Vec<Batch> {
    let token = |row: u32, s: u32| 1 + (row * 3 + 2 * s) % 10;
    let batch = |first: u32| Batch {
        batch: 2,
        seq: 8,
        ids: (0..2).flat_map(|row| (0..8).map(move |s| token(first + row, s))).collect(),
        labels: (0..2).flat_map(|row| (0..8).map(move |s| i64::from(token(first + row, s + 1)))).collect(),
        doc_start: (0..16).map(|row| row % 8 / 4 * 4).collect(),
        ..Batch::default()
    };
    vec![batch(0), batch(2)]
}

fn start<B: Backend>(backend: B) -> (Native<B>, TrainState<B>) {
    let engine = Native { backend, model: Model::new(config()) };
    let specs = &engine.model.table.specs;
    let values = |id: ParamId| Ok(initial_values(&specs[id], &config(), 5));
    let state = TrainState::new(&engine.backend, &config(), &BalanceConfig::default(), values).unwrap();
    (engine, state)
}

/// Mean loss of each step.
fn train<E: Engine>(engine: &E, state: &mut TrainState<E::B>, steps: usize) -> Vec<f64> {
    let cfg = StepConfig { optimizer: OptimizerConfig::default(), router_freeze_tokens: 0, by_sequence: None };
    let alone = Alone::new(&state.table);
    let mut one = || step(engine, state, &cfg, &alone, &micro_batches(), 0.02, &Watch::NONE).unwrap().done().unwrap().mean_loss();
    (0..steps).map(|_| one()).collect()
}

#[test]
fn a_toy_learns() {
    let (engine, mut state) = start(HandleBackend::default());
    let buffers = engine.backend.live_buffers();
    let losses = train(&engine, &mut state, 40);
    assert!(losses[0] > 0.8 * 11f64.ln() && losses[39] < 0.2 * losses[0], "{losses:?}");
    assert_eq!(engine.backend.live_buffers(), buffers, "a step gives back what it took");
    assert_eq!((state.step, state.tokens_seen), (40, 40 * 32));
}

/// The same run in f64 on handles and in f32 on slices.
#[test]
fn both_backends_take_the_same_steps() {
    let (handles, mut state) = start(HandleBackend::default());
    let exact = train(&handles, &mut state, 5);
    let (cpu, mut state) = start(Cpu::default());
    for (t, (got, want)) in train(&cpu, &mut state, 5).iter().zip(&exact).enumerate() {
        assert!((got - want).abs() <= 1e-5 * want, "step {t}: loss {got}, in f64 {want}");
    }
}
