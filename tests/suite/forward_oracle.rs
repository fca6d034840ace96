//! Both backends, through the code of `zaya debug forward`, against every model that `transformers` wrote: the tiny cases and
//! the unusual shapes. Intermediates, logits and loss within 1e-5, gradients within 2e-5, routes equal.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use candle_core::{DType, Tensor};
use zaya::hf;
use zaya::inspect::{self, Request, Trace};
use zaya::tensor::backend::{PinnedRoutes, Precision};
use zaya::tensor::cpu::Cpu;

use crate::fixtures::{FORWARD_TOLERANCE, GRADIENT_TOLERANCE, error, host};

fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(path)
}

fn tensors(path: &Path) -> HashMap<String, Tensor> {
    candle_core::safetensors::load(path, &candle_core::Device::Cpu).unwrap()
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Who {
    Cpu,
    Candle,
}

fn trace(model_dir: &Path, io: &Path, who: Who, precision: Precision, pinned: Option<&[PinnedRoutes]>, grads: bool) -> Trace {
    let model = hf::load(model_dir).unwrap();
    let input = inspect::read_input(io, &model.config).unwrap();
    let values: Vec<Vec<f32>> = (0..model.table.specs.len()).map(|id| model.read(id).unwrap()).collect();
    let request = Request { config: &model.config, values: &values, batch: &input.batch, pinned, precision, want_grads: grads };
    match who {
        Who::Cpu => inspect::trace_native(&Cpu::new(precision), &request).unwrap(),
        Who::Candle => inspect::trace_candle(&request).unwrap(),
    }
}

fn check_all(case: &str) {
    let dir = fixture(case);
    let io = tensors(&dir.join("io.safetensors"));
    let grads = dir.join("grads.safetensors");
    for who in [Who::Cpu, Who::Candle] {
        let trace = trace(&dir, &dir.join("io.safetensors"), who, Precision::F32, None, grads.exists());
        for (name, expected) in &io {
            if ["input_ids", "labels", "attention_mask"].contains(&name.as_str()) {
                continue;
            }
            let got = trace.tensors.get(name).unwrap_or_else(|| panic!("{case} {who:?}: {name} is missing"));
            if expected.dtype() == DType::I64 {
                assert_eq!(host(got), host(expected), "{case} {who:?}: {name}");
            } else if host(expected).iter().all(|v| *v == 0.0) {
                assert!(host(got).iter().all(|v| *v == 0.0), "{case} {who:?}: {name} should be zero");
            } else {
                let e = error(name, got, expected);
                assert!(e <= FORWARD_TOLERANCE, "{case} {who:?}: {name} is off by {e:.2e}");
            }
        }
        if !grads.exists() {
            continue;
        }
        let expected = tensors(&grads);
        assert!(expected.keys().all(|name| trace.grads.contains_key(name)), "{case}: names of gradients");
        for (name, got) in &trace.grads {
            let zero = |t: &Tensor| host(t).iter().all(|v| *v == 0.0);
            match expected.get(name) {
                // A parameter that autograd never reached.
                None => assert!(zero(got), "{case} {who:?}: {name} should get no gradient"),
                Some(e) if zero(e) => assert!(zero(got), "{case} {who:?}: {name} should get no gradient"),
                Some(expected) => {
                    let e = error(name, got, expected);
                    assert!(e <= GRADIENT_TOLERANCE, "{case} {who:?}: gradient of {name} is off by {e:.2e}");
                }
            }
        }
    }
}

#[test]
fn tiny_cases() {
    for case in ["tiny/noskip", "tiny/fp32", "tiny/padded"] {
        check_all(case);
    }
}

#[test]
fn unusual_shapes() {
    let mut seen = 0;
    for entry in std::fs::read_dir(fixture("shapes")).unwrap() {
        let entry = entry.unwrap();
        if entry.path().is_dir() {
            check_all(&format!("shapes/{}", entry.file_name().to_string_lossy()));
            seen += 1;
        }
    }
    assert!(seen >= 7, "only {seen} cases");
}

/// Old files, judged by their logits and their routers.
#[test]
fn the_old_layout() {
    let dir = fixture("tiny/legacy");
    let io = tensors(&dir.join("io.safetensors"));
    for who in [Who::Cpu, Who::Candle] {
        let trace = trace(&dir, &dir.join("io.safetensors"), who, Precision::F32, None, false);
        let e = error("logits", &trace.tensors["logits"], &io["logits"]);
        assert!(e <= FORWARD_TOLERANCE, "{who:?}: logits are off by {e:.2e}");
        for block in 0..3 {
            let ours = &trace.tensors[&format!("layers.{block}.router.choice")];
            assert_eq!(host(ours), host(&io[&format!("layers.{}.router.choice", 2 * block + 1)]), "{who:?} {block}");
        }
    }
}

/// bf16: logits with pinned routes within 2e-2; at most 3 of 74 free choices differ.
#[test]
fn bf16() {
    let dir = fixture("tiny/bf16");
    let io_path = dir.join("io.safetensors");
    let io = tensors(&io_path);
    let config = hf::load(&dir).unwrap().config;
    let pinned = inspect::read_pinned_routes(&io_path, &config, 74).unwrap();
    for who in [Who::Cpu, Who::Candle] {
        let trace_pinned = trace(&dir, &io_path, who, Precision::Bf16, Some(&pinned), false);
        let e = error("logits", &trace_pinned.tensors["logits"], &io["logits"]);
        println!("{who:?}: bf16 logits are off by {e:.2e}");
        assert!(e <= 2e-2, "{who:?}: logits are off by {e:.2e}");
        let free = trace(&dir, &io_path, who, Precision::Bf16, None, false);
        let mut flips = Vec::new();
        for block in 0..3 {
            let name = format!("layers.{block}.router.choice");
            flips.push(host(&free.tensors[&name]).iter().zip(host(&io[&name])).filter(|(a, b)| *a != b).count());
        }
        println!("{who:?}: routes that differ per block: {flips:?}");
        assert!(flips.iter().all(|n| *n <= 3), "{who:?}: {flips:?}");
    }
}

/// The two implementations against each other, and the loss against what a training step would report.
#[test]
fn the_loss_is_that_of_the_training_path() {
    use zaya::model::{Cx, Model, ParamStore};
    use zaya::tensor::{Backend, cpu::Cpu};
    let dir = fixture("tiny/fp32");
    let io = dir.join("io.safetensors");
    let model = hf::load(&dir).unwrap();
    let batch = inspect::read_input(&io, &model.config).unwrap().batch;
    let cpu = Cpu::new(Precision::F32);
    let native = Model::new(model.config.clone());
    let params = ParamStore::from_host(&cpu, &native.table, |id| model.read(id)).unwrap();
    let mut grads = ParamStore::zeros(&cpu, &native.table).unwrap();
    let rows = cpu.rows(&batch).unwrap();
    let (result, _) = native.forward_backward(&Cx::new(&cpu, &params, &rows), &mut grads, 1.0).unwrap();
    let trained = (result.loss.sum / result.loss.count as f64) as f32;
    for want_grads in [false, true] {
        let traced = trace(&dir, &io, Who::Cpu, Precision::F32, None, want_grads);
        assert_eq!(traced.tensors["loss"].to_vec1::<f32>().unwrap(), [trained]);
    }
}
