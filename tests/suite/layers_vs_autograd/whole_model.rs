//! The hand-written model as a whole, on any backend, against the reference model under autograd in f64.

use candle_core::{DType, Device, Tensor};
use zaya::model::config::{AttentionKind, ModelConfig, Rope, SkipMode};
use zaya::model::params::{Init, ParamSpec, ParamTable};
use zaya::model::reference::{LossAndGrads, Reference};
use zaya::model::{Cx, Model, ParamStore};
use zaya::tensor::backend::{Batch, PinnedRoutes, Precision};

use super::harness::{Exact, F32_TOLERANCE, Input, Rng, Rows, assert_close, host, on_every_backend, random_batch};

on_every_backend!(loss_and_gradients, decoding);

/// A small model of odd shape: every block of a random kind.
fn config(rng: &mut Rng) -> ModelConfig {
    let num_kv_heads = rng.pick(1, 3);
    let half_dims = rng.pick(1, 3);
    let kind = |rng: &mut Rng| if rng.chance(50) { AttentionKind::Full } else { AttentionKind::Sliding };
    ModelConfig {
        vocab_size: rng.pick(5, 23),
        hidden_size: rng.pick(5, 17),
        num_query_heads: num_kv_heads * rng.pick(1, 3),
        num_kv_heads,
        head_dim: 2 * half_dims,
        num_experts: rng.pick(1, 4),
        expert_width: rng.pick(3, 9),
        router_width: rng.pick(3, 8),
        attention: (0..rng.pick(1, 3)).map(|_| kind(rng)).collect(),
        sliding_window: Some(rng.pick(1, 5)),
        rope: Rope { theta: 10_000.0, partial_rotary_factor: 1.0 },
        rope_sliding: Rope { theta: 100.0, partial_rotary_factor: 0.0 },
        max_position_embeddings: 64,
        norm_eps: 1e-5,
        router_norm_eps: 1e-6,
        skip_mode: if rng.chance(50) { SkipMode::Identity } else { SkipMode::Zero },
        initializer_range: 0.02,
        pad_token_id: Some(1),
        bos_token_id: None,
        eos_token_id: None,
    }
}

/// Values as far from their usual start as a trained model's: no scale is 1, no bias is 0.
fn values(rng: &mut Rng, config: &ModelConfig) -> Vec<Vec<f32>> {
    let one = |spec: &ParamSpec| {
        let [rows, cols] = spec.matrix_shape();
        let (mean, spread) = match spec.init {
            Init::Const(mean) => (f64::from(mean), 0.2),
            Init::BalancingBiases => (0.0, 0.1),
            Init::Embedding => (0.0, 0.5),
            Init::Normal => (0.0, 1.0 / (cols as f64).sqrt()),
        };
        Input::random(rng, rows, cols, mean, spread).values
    };
    ParamTable::new(config).specs.iter().map(one).collect()
}

const GRAD_SCALE: f64 = 0.25;

fn autograd(
    config: &ModelConfig,
    values: &[Vec<f32>],
    batch: &Batch,
    dtype: DType,
    pinned: Option<&[PinnedRoutes]>,
) -> LossAndGrads {
    let model = Reference::new(config.clone(), values, dtype, &Device::Cpu, Precision::F32).unwrap();
    model.loss_and_grads(batch, pinned, GRAD_SCALE, &mut |_: &str, _: &Tensor| {}).unwrap()
}

/// Largest relative error of any gradient.
fn worst_error(got: &LossAndGrads, want: &LossAndGrads) -> f64 {
    let error = |(got, want): (&Tensor, &Tensor)| {
        let (got, want) = (host(got), host(want));
        let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
        norm(&mut got.iter().zip(&want).map(|(g, w)| g - w)) / norm(&mut want.iter().copied()).max(1e-2)
    };
    got.grads.iter().zip(&want.grads).map(error).fold(0.0, f64::max)
}

fn loss_and_gradients<B: Exact>(b: &B, tolerance: f64) {
    let mut checked = 0;
    for seed in 0..25 {
        let rng = &mut Rng::new(40_000 + seed);
        let config = config(rng);
        assert!(config.problems().is_empty());
        let values = values(rng, &config);
        let (batch, seq) = (rng.pick(1, 3), rng.pick(1, 9));
        let mut batch = random_batch(rng, batch, seq, config.vocab_size, Rows::Ragged);
        batch.labels[0] = 0;
        let want = autograd(&config, &values, &batch, DType::F64, None);
        let pinned: Vec<PinnedRoutes> = want.output.choices.iter().map(|c| PinnedRoutes(c.clone())).collect();
        // Where rounding alone takes autograd in f32 that far, an f32 backend proves nothing.
        let in_f32 = autograd(&config, &values, &batch, DType::F32, Some(&pinned));
        if tolerance == F32_TOLERANCE && worst_error(&in_f32, &want) > F32_TOLERANCE / 2.0 {
            continue;
        }
        checked += 1;

        let model = Model::new(config);
        let params = ParamStore::from_host(b, &model.table, |id| Ok(values[id].clone())).unwrap();
        let mut grads = ParamStore::zeros(b, &model.table).unwrap();
        let rows = b.rows(&batch).unwrap();
        let cx = Cx { pinned: Some(&pinned), ..Cx::new(b, &params, &rows) };
        // Twice, each with half the scale: the second pass must add to the first.
        let (got, _) = model.forward_backward(&cx, &mut grads, 0.125).unwrap();
        let (again, _) = model.forward_backward(&cx, &mut grads, 0.125).unwrap();
        assert_eq!(got.loss, again.loss, "seed {seed}");
        assert_eq!(got.loss.count, want.loss.count);
        assert_close(&format!("seed {seed}: loss"), &[got.loss.sum], &[want.loss.sum], tolerance);
        assert_eq!(model.loss(&cx).unwrap(), got.loss, "seed {seed}: loss without gradients");
        assert_eq!(got.expert_counts, want.output.class_counts);
        let logits = b.read(&model.logits(&cx).unwrap());
        assert_close(&format!("seed {seed}: logits"), &logits, &host(&want.output.logits), tolerance);
        for (id, spec) in model.table.specs.iter().enumerate() {
            assert_close(&format!("seed {seed}: {}", spec.name), &b.read(&grads[id]), &host(&want.grads[id]), tolerance);
        }
    }
    assert!(checked >= 22, "only {checked} of 25 models were fit for the comparison");
}

/// A prefill and then single tokens through the caches: the hidden states of the whole sequence.
fn decoding<B: Exact>(b: &B, tolerance: f64) {
    for seed in 0..10 {
        let rng = &mut Rng::new(41_000 + seed);
        let config = config(rng);
        let values = values(rng, &config);
        let (batch, seq) = (rng.pick(1, 3), rng.pick(4, 9));
        let whole = random_batch(rng, batch, seq, config.vocab_size, Rows::Plain);
        let model = Model::new(config);
        let params = ParamStore::from_host(b, &model.table, |id| Ok(values[id].clone())).unwrap();
        let rows = b.rows(&whole).unwrap();
        let want = model.hidden(&Cx::new(b, &params, &rows)).unwrap();

        let mut cache = model.cache();
        let mut got: Option<B::Buf> = None;
        let mut from = 0;
        for to in [rng.pick(1, 3)].into_iter().chain(1..=seq).filter(|to| *to <= seq) {
            if to <= from {
                continue;
            }
            let ids = whole.ids.chunks(seq).flat_map(|x| &x[from..to]).copied().collect();
            let rows = b.rows(&Batch { batch, seq: to - from, past: from, ids, ..Batch::default() }).unwrap();
            let new = model.decode(&Cx::new(b, &params, &rows), batch, &mut cache).unwrap();
            got = Some(match got {
                Some(got) => b.concat_rows(batch, &got, &new).unwrap(),
                None => new,
            });
            from = to;
        }
        assert_close(&format!("seed {seed}"), &b.read(&got.unwrap()), &b.read(&want), tolerance);
    }
}
