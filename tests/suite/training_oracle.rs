//! The hand-written model and the optimizers against tensors and training runs that PyTorch wrote (`tests/fixtures/tiny`).

use serde_json::Value;
use zaya::model::reference::Precision;
use zaya::model::{Model, ParamId};
use zaya::optim::balance::BalanceConfig;
use zaya::optim::update::OptimizerConfig;
use zaya::parallel::Alone;
use zaya::tensor::Backend;
use zaya::tensor::backend::{Batch, MuonItem, MuonStep};
use zaya::tensor::cpu::Cpu;
use zaya::train::candle_engine::Candle;
use zaya::train::engine::{Engine, Native};
use zaya::train::state::TrainState;
use zaya::train::step::{StepConfig, StepReport, Watch};

use crate::fixtures::*;

/// A step that nothing interrupts.
fn step<E: Engine>(engine: &E, state: &mut TrainState<E::B>, cfg: &StepConfig, batches: &[Batch], lr: f64) -> StepReport {
    let alone = Alone::new(&state.table);
    zaya::train::step::step(engine, state, cfg, &alone, batches, lr, &Watch::NONE).unwrap().done().unwrap()
}

fn f32s(t: &candle_core::Tensor) -> Vec<f32> {
    t.to_dtype(candle_core::DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

#[test]
fn muon_equals_the_reference() {
    let t = read("muon", "muon.safetensors");
    let cpu = Cpu::default();
    let step = MuonStep { lr: 6e-4, weight_decay: 0.1, momentum: 0.95, ns_steps: 5, grad_scale: 1.0 };
    for (name, rows, cols) in [("wide", 24, 64), ("tall", 96, 32), ("square", 48, 48)] {
        let mut weight = cpu.upload(&f32s(&t[&format!("{name}.w0")]), rows, cols).unwrap();
        let mut momentum = cpu.zeros(rows, cols).unwrap();
        for i in 0..3 {
            let grad = cpu.upload(&f32s(&t[&format!("{name}.g{i}")]), rows, cols).unwrap();
            let item = MuonItem { weight: &mut weight, grad: &grad, momentum: &mut momentum, row_blocks: 1 };
            cpu.muon(&mut [item], step).unwrap();
            let expected = f32s(&t[&format!("{name}.w{}_fp32", i + 1)]);
            let e = relative_error(&cpu.download(&weight).unwrap(), &expected);
            assert!(e <= 1e-5, "{name} step {i}: {e:.2e}");
        }
    }
}

#[test]
fn muon_on_a_zero_gradient_only_decays() {
    let cpu = Cpu::default();
    let (mut weight, mut momentum) = (cpu.upload(&[2.0; 12], 3, 4).unwrap(), cpu.zeros(3, 4).unwrap());
    let grad = cpu.zeros(3, 4).unwrap();
    let step = MuonStep { lr: 0.5, weight_decay: 0.1, momentum: 0.95, ns_steps: 5, grad_scale: 1.0 };
    let item = MuonItem { weight: &mut weight, grad: &grad, momentum: &mut momentum, row_blocks: 1 };
    cpu.muon(&mut [item], step).unwrap();
    assert_eq!(cpu.download(&weight).unwrap(), [1.9; 12]);
}

/// A fused gate_up taken as two matrices moves as gate and up would alone.
#[test]
fn muon_row_blocks_are_separate_matrices() {
    let cpu = Cpu::default();
    let t = read("muon", "muon.safetensors");
    let step = MuonStep { lr: 6e-4, weight_decay: 0.1, momentum: 0.95, ns_steps: 5, grad_scale: 1.0 };
    let run = |w: &[f32], g: &[f32], rows: usize, row_blocks: usize| {
        let (mut weight, mut momentum) = (cpu.upload(w, rows, 32).unwrap(), cpu.zeros(rows, 32).unwrap());
        let grad = cpu.upload(g, rows, 32).unwrap();
        cpu.muon(&mut [MuonItem { weight: &mut weight, grad: &grad, momentum: &mut momentum, row_blocks }], step).unwrap();
        cpu.download(&weight).unwrap()
    };
    let (w, g) = (f32s(&t["tall.w0"]), f32s(&t["tall.g0"]));
    let half = 48 * 32;
    let apart = [run(&w[..half], &g[..half], 48, 1), run(&w[half..], &g[half..], 48, 1)].concat();
    assert_eq!(run(&w, &g, 96, 2), apart);
    assert_ne!(run(&w, &g, 96, 1), apart);
}

fn meta() -> Value {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/tiny/train/meta.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn state<E: Engine>(engine: &E) -> TrainState<E::B> {
    let values = values(&tiny_config(), &read("noskip", "model.safetensors"));
    TrainState::new(engine.backend(), &tiny_config(), &BalanceConfig::default(), |id: ParamId| Ok(values[id].clone())).unwrap()
}

/// The run's batches: tokens[step] is [4, 33], inputs [:, :-1], targets [:, 1:].
fn batches(micro: usize) -> Vec<Vec<Batch>> {
    let tokens = &read("train", "data.safetensors")["tokens"];
    let sequence = |step: usize, row: usize| tokens.get(step).unwrap().get(row).unwrap().to_vec1::<i64>().unwrap();
    let micro_batch = |step: usize, first: usize| {
        let rows: Vec<Vec<i64>> = (first..first + micro).map(|row| sequence(step, row)).collect();
        Batch {
            batch: micro,
            seq: 32,
            ids: rows.iter().flat_map(|r| r[..32].iter().map(|id| *id as u32)).collect(),
            labels: rows.iter().flat_map(|r| r[1..].to_vec()).collect(),
            ..Batch::default()
        }
    };
    (0..8).map(|step| (0..4).step_by(micro).map(|first| micro_batch(step, first)).collect()).collect()
}

/// Loss, gradient norm, biases and final weights within 1e-5, expert counts equal.
fn eight_steps_equal_the_reference<E: Engine>(engine: &E, micro: usize) {
    let meta = meta();
    let mut state = state(engine);
    let cfg = StepConfig { optimizer: OptimizerConfig::default(), router_freeze_tokens: 0, by_sequence: None };
    for (t, (batches, log)) in batches(micro).iter().zip(meta["log"].as_array().unwrap()).enumerate() {
        let report = step(engine, &mut state, &cfg, batches, log["lr"].as_f64().unwrap());
        let close = |name: &str, got: f64| {
            let expected = log[name].as_f64().unwrap();
            assert!((got - expected).abs() <= 1e-5 * expected, "step {t}: {name} is {got}, not {expected}");
        };
        close("loss", report.mean_loss());
        close("grad_norm", report.grad_norm);
        let lists = |name: &str| -> Vec<Vec<f64>> { serde_json::from_value(log[name].clone()).unwrap() };
        let counts: Vec<Vec<f64>> = report.expert_counts.iter().map(|c| c.iter().map(|n| *n as f64).collect()).collect();
        assert_eq!(counts, lists("counts"), "step {t}");
        for (got, expected) in state.balancing_biases(engine.backend()).unwrap().iter().zip(lists("biases")) {
            let expected: Vec<f32> = expected.iter().map(|x| *x as f32).collect();
            let e = relative_error(got, &expected);
            assert!(e <= 1e-5, "step {t}: biases are off by {e:.2e}");
        }
    }
    let expected = values(&tiny_config(), &read("train", "final.safetensors"));
    for (id, spec) in state.table.specs.iter().enumerate() {
        let e = relative_error(&engine.backend().download(&state.params[id]).unwrap(), &expected[id]);
        assert!(e <= 1e-5, "final {} is off by {e:.2e}", spec.name);
    }
    assert_eq!((state.step, state.tokens_seen), (8, 8 * 4 * 32));
}

fn native() -> Native<Cpu> {
    Native { backend: Cpu::new(Precision::F32), model: Model::new(tiny_config()) }
}

#[test]
fn eight_steps_of_the_hand_written_model() {
    eight_steps_equal_the_reference(&native(), 4);
}

#[test]
fn eight_steps_with_accumulation() {
    eight_steps_equal_the_reference(&native(), 1);
    eight_steps_equal_the_reference(&native(), 2);
}

#[test]
fn eight_steps_on_candle_autograd() {
    eight_steps_equal_the_reference(&Candle::new(tiny_config(), Precision::F32).unwrap(), 4);
}

/// The whole step at 1, 2 and 3 threads: the same bits.
#[test]
fn thread_count_does_not_change_a_step() {
    let run = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let engine = native();
            let mut state = state(&engine);
            let cfg = StepConfig { optimizer: OptimizerConfig::default(), router_freeze_tokens: 0, by_sequence: None };
            let batches = batches(4);
            let losses: Vec<u64> =
                (0..3).map(|t| step(&engine, &mut state, &cfg, &batches[t], 1e-3).loss.sum.to_bits()).collect();
            let weights: Vec<Vec<u32>> = (0..state.params.len())
                .map(|id| engine.backend.download(&state.params[id]).unwrap().iter().map(|v| v.to_bits()).collect())
                .collect();
            (losses, weights)
        })
    };
    let one = run(1);
    assert!(run(2) == one && run(3) == one);
}

#[test]
fn a_batch_without_labels_changes_nothing() {
    let engine = native();
    let mut state = state(&engine);
    let before = engine.backend.download(&state.params[state.table.embed]).unwrap();
    let mut batch = batches(4)[0][0].clone();
    batch.labels.fill(-100);
    let cfg = StepConfig { optimizer: OptimizerConfig::default(), router_freeze_tokens: 0, by_sequence: None };
    let report = step(&engine, &mut state, &cfg, &[batch], 1e-3);
    assert!(!report.updated && report.mean_loss() == 0.0 && report.grad_norm == 0.0);
    assert_eq!(engine.backend.download(&state.params[state.table.embed]).unwrap(), before);
    assert_eq!(state.balancing_biases(&engine.backend).unwrap()[0][4], -1.0);
    assert_eq!(state.step, 1);
}

/// Frozen routers keep their weights and stay out of the norm; balancing goes on.
#[test]
fn a_frozen_router_keeps_its_weights() {
    let engine = native();
    let mut state = state(&engine);
    let router: Vec<ParamId> = (0..state.table.specs.len())
        .filter(|id| state.table.specs[*id].name.contains(".router.") && !state.table.specs[*id].name.ends_with("biases"))
        .collect();
    let weights = |state: &TrainState<Cpu>| -> Vec<Vec<f32>> {
        router.iter().map(|id| engine.backend.download(&state.params[*id]).unwrap()).collect()
    };
    let (before, biases) = (weights(&state), state.balancing_biases(&engine.backend).unwrap());
    let cfg = StepConfig { optimizer: OptimizerConfig::default(), router_freeze_tokens: 129, by_sequence: None };
    let batches = batches(4);
    for batches in &batches[..2] {
        step(&engine, &mut state, &cfg, batches, 1e-3);
    }
    assert_eq!(weights(&state), before);
    assert_ne!(state.balancing_biases(&engine.backend).unwrap(), biases);
    step(&engine, &mut state, &cfg, &batches[2], 1e-3);
    assert_ne!(weights(&state), before);
    assert_eq!((state.optimizer.updates, state.optimizer.router_updates), (3, 1));
}
