//! The candle reference against tensors that Hugging Face's `transformers` wrote (`tests/fixtures/tiny`).

use candle_core::{DType, Device, Tensor};
use zaya::model::config::{ModelConfig, SkipMode};
use zaya::model::reference::{Output, Precision, Reference};
use zaya::tensor::backend::{Batch, PinnedRoutes};

use crate::fixtures::*;

fn model(config: ModelConfig, case: &str, precision: Precision) -> Reference {
    let values = values(&config, &read(case, "model.safetensors"));
    Reference::new(config, &values, DType::F32, &Device::Cpu, precision).unwrap()
}

fn forward(model: &Reference, batch: &Batch, pinned: Option<&[PinnedRoutes]>) -> (Output, Tensors) {
    let mut seen = Tensors::new();
    let mut probe = |name: &str, t: &Tensor| {
        assert!(seen.insert(name.to_string(), t.clone()).is_none(), "{name} was shown twice");
    };
    let output = model.forward(batch, pinned, &mut probe).unwrap();
    (output, seen)
}

/// Every floating-point tensor of the fixture is there and close, every integer one is equal.
fn assert_intermediates(case: &str, seen: &Tensors, io: &Tensors) {
    let given = ["input_ids", "labels", "attention_mask"];
    for (name, expected) in io.iter().filter(|(name, _)| !given.contains(&name.as_str())) {
        let got = seen.get(name).unwrap_or_else(|| panic!("{case}: {name} was not computed"));
        if expected.dtype() == DType::I64 {
            assert_eq!(host(got), host(expected), "{case}: {name}");
        } else {
            let e = error(name, got, expected);
            assert!(e <= FORWARD_TOLERANCE, "{case}: {name} is off by {e:.2e}");
        }
    }
    assert_eq!(seen.len() + given.len() - usize::from(!io.contains_key("attention_mask")), io.len(), "{case}: names");
}

/// Gradients of the mean loss, stacked as the fixture has them.
fn assert_gradients(case: &str, model: &Reference, batch: &Batch) {
    let fixture = read(case, "grads.safetensors");
    let mut ignore = |_: &str, _: &Tensor| {};
    let got = model.loss_and_grads(batch, None, 1.0 / batch.num_labels() as f64, &mut ignore).unwrap();
    let mut covered = std::collections::BTreeSet::new();
    for (spec, grad) in model.table().specs.iter().zip(&got.grads) {
        let Some(expected) = fixture.get(&spec.hf.tensor) else {
            assert!(spec.name.ends_with("balancing_biases"), "{case}: {} has no gradient in the fixture", spec.name);
            assert!(host(grad).iter().all(|g| *g == 0.0), "{case}: balancing biases got a gradient");
            continue;
        };
        covered.insert(&spec.hf.tensor);
        let expected = spec.hf.expert.map_or_else(|| expected.clone(), |e| expected.get(e).unwrap());
        if host(&expected).iter().all(|g| *g == 0.0) {
            assert!(host(grad).iter().all(|g| *g == 0.0), "{case}: {} should get no gradient", spec.name);
            continue;
        }
        let e = error(&spec.name, &grad.reshape(spec.hf.shape.as_slice()).unwrap(), &expected);
        assert!(e <= GRADIENT_TOLERANCE, "{case}: gradient of {} is off by {e:.2e}", spec.name);
    }
    assert_eq!(covered.len(), fixture.len(), "{case}: every gradient of the fixture is compared");
}

#[test]
fn without_skipped_tokens_everything_equals_transformers() {
    let io = read("noskip", "io.safetensors");
    let model = model(tiny_config(), "noskip", Precision::F32);
    assert_intermediates("noskip", &forward(&model, &batch(&io), None).1, &io);
    assert_gradients("noskip", &model, &batch(&io));
}

#[test]
fn with_skipped_tokens_everything_equals_transformers() {
    let io = read("fp32", "io.safetensors");
    let model = model(tiny_config(), "fp32", Precision::F32);
    let (output, seen) = forward(&model, &batch(&io), None);
    assert_intermediates("fp32", &seen, &io);
    assert_gradients("fp32", &model, &batch(&io));
    let counts: [[u64; 5]; 3] = [[7, 13, 16, 7, 31], [0, 31, 9, 20, 14], [0, 23, 0, 49, 2]];
    assert_eq!(output.class_counts, counts);
}

/// Padding rows included: what they compute is defined, and read by the loss of the first real token.
#[test]
fn left_padding_equals_transformers() {
    let io = read("padded", "io.safetensors");
    let model = model(tiny_config(), "padded", Precision::F32);
    let (output, seen) = forward(&model, &batch(&io), None);
    assert_intermediates("padded", &seen, &io);
    assert_eq!(output.class_counts[0].iter().sum::<u64>(), 74 - 9, "padding is not counted");
}

/// The same weights as `fp32`, run by the code ZAYA1-base was published with.
#[test]
fn identity_skip_equals_the_november_2025_code() {
    let io = read("legacy", "io.safetensors");
    let config = ModelConfig { skip_mode: SkipMode::Identity, router_norm_eps: 1e-6, ..tiny_config() };
    let (output, seen) = forward(&model(config, "fp32", Precision::F32), &batch(&io), None);
    assert!(error("logits", &output.logits, &io["logits"]) <= FORWARD_TOLERANCE);
    for i in 0..3 {
        let (ours, theirs) = (format!("layers.{i}.router"), format!("layers.{}.router", 2 * i + 1));
        assert_eq!(host(&seen[&format!("{ours}.choice")]), host(&io[&format!("{theirs}.choice")]));
        for part in ["prob", "state"] {
            let e = error(part, &seen[&format!("{ours}.{part}")], &io[&format!("{theirs}.{part}")]);
            assert!(e <= FORWARD_TOLERANCE, "{ours}.{part} is off by {e:.2e}");
        }
    }
}

#[test]
fn bf16_stays_close_to_transformers() {
    let io = read("bf16", "io.safetensors");
    let model = model(tiny_config(), "bf16", Precision::Bf16);
    let routes = |i: usize| host(&io[&format!("layers.{i}.router.choice")]).iter().map(|c| *c as u32).collect::<Vec<u32>>();
    let pinned: Vec<PinnedRoutes> = (0..3).map(|i| PinnedRoutes(routes(i))).collect();
    let (output, _) = forward(&model, &batch(&io), Some(&pinned));
    let e = error("logits", &output.logits, &io["logits"]);
    assert!(e <= 2e-2, "logits are off by {e:.2e}");
    let (free, _) = forward(&model, &batch(&io), None);
    for i in 0..3 {
        let flips = free.choices[i].iter().zip(routes(i)).filter(|(a, b)| **a != *b).count();
        assert!(flips <= 3, "block {i}: {flips} of 74 routes differ");
    }
}

#[test]
fn bad_batches_are_refused_with_a_sentence() {
    let model = model(tiny_config(), "noskip", Precision::F32);
    let mut ignore = |_: &str, _: &Tensor| {};
    let good = Batch { batch: 1, seq: 2, ids: vec![3, 4], ..Batch::default() };
    let mut refuses = |batch: Batch, pinned: Option<&[PinnedRoutes]>, word: &str| {
        let Err(e) = model.forward(&batch, pinned, &mut ignore) else { panic!("accepted although {word}") };
        assert!(e.to_string().contains(word), "{e}");
        assert_eq!(zaya::error::exit_code_of(&e), zaya::error::exit_code::BAD_INPUT);
    };
    refuses(Batch { ids: vec![3, 256], ..good.clone() }, None, "token id 256");
    refuses(Batch { ids: vec![3], ..good.clone() }, None, "`ids`");
    refuses(Batch { labels: vec![3, 999], ..good.clone() }, None, "label 999");
    refuses(Batch { past: 1, ..good.clone() }, None, "past");
    refuses(Batch { seq: 0, ids: vec![], ..good.clone() }, None, "at least one token");
    refuses(good.clone(), Some(&[]), "3 blocks");
    refuses(good, Some(&[PinnedRoutes(vec![0, 9]), PinnedRoutes(vec![0, 0]), PinnedRoutes(vec![0, 0])]), "pinned routes");
}
