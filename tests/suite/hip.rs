//! `--backend hip` on the software GPU: the very machine code that the executable brings for gfx942, run by `crates/swgpu`, against the CPU
//! backend in bf16.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use candle_core::{Device, Tensor};

use crate::fixtures::{error, host};
use crate::program::zaya as program;

/// Where cargo has put the software GPU's library, which is a dependency of the tests: beside their executable. `ZAYA_HIP_LIB` names
/// another.
pub fn software_gpu() -> PathBuf {
    let beside = || std::env::current_exe().unwrap().with_file_name("libswgpu.so");
    let path = std::env::var_os("ZAYA_HIP_LIB").map_or_else(beside, PathBuf::from);
    assert!(path.is_file(), "the software GPU is not at {}", path.display());
    path
}

/// Whether the executable has kernels to test. Without a compiler for AMD at hand it was built without; `make setup` installs one.
pub fn has_kernels() -> bool {
    let found = !zaya::tensor::hip::architectures().is_empty();
    if !found {
        println!("skipped: built without GPU kernels, as no clang compiles for AMD here");
    }
    found
}

/// A command that finds the software GPU in place of ROCm.
pub fn on_gpu() -> Command {
    let mut command = program();
    for variable in ["ZAYA_HIP_LIB", "ZAYA_HIPBLASLT_LIB", "ZAYA_RCCL_LIB"] {
        command.env(variable, software_gpu());
    }
    command
}

fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(path)
}

/// Without a GPU there is a sentence and no training, never a silent fall-back.
#[test]
fn no_gpu_is_a_sentence() {
    if !has_kernels() {
        return;
    }
    let forward = |command: &mut Command, out: &Path| {
        command.args(["debug", "forward", "--backend", "hip", "--precision", "bf16", "--model"]).arg(fixture("tiny/fp32"));
        command.arg("--ids").arg(fixture("tiny/fp32/io.safetensors")).arg("--out").arg(out).output().unwrap()
    };
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out.safetensors");
    let no_file = forward(program().env("ZAYA_HIP_LIB", "/nowhere/libamdhip64.so"), &out);
    assert!(!no_file.status.success() && said(&no_file).contains("ZAYA_HIP_LIB"), "{}", said(&no_file));
    let other = dir.path().join("text.so");
    std::fs::write(&other, "this is no library").unwrap();
    let no_library = forward(program().env("ZAYA_HIP_LIB", &other), &out);
    assert!(!no_library.status.success() && said(&no_library).contains("text.so"), "{}", said(&no_library));
    let no_device = forward(on_gpu().env("SWGPU_DEVICES", "0"), &out);
    assert!(!no_device.status.success() && said(&no_device).contains("finds no GPU"), "{}", said(&no_device));
}

/// Every gradient and the loss of `zaya debug forward`, on the same routes: no further from f32 than bfloat16 is on the processor.
#[test]
fn gradients_are_the_processors() {
    if !has_kernels() {
        return;
    }
    for case in ["tiny/fp32", "tiny/padded", "tiny/noskip"] {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let run = |mut command: Command, name: &str, args: &[&str]| {
            command
                .args(["debug", "forward", "--model"])
                .arg(fixture(case))
                .arg("--ids")
                .arg(fixture(case).join("io.safetensors"));
            command.arg("--out").arg(at(&format!("{name}.out"))).arg("--grads").arg(at(&format!("{name}.grads"))).args(args);
            if name != "f32" {
                command.arg("--pin-routing").arg(at("f32.out"));
            }
            let output = command.output().unwrap();
            assert!(output.status.success(), "{case} {name}: {}", said(&output));
        };
        run(program(), "f32", &["--precision", "f32"]);
        run(program(), "cpu", &["--precision", "bf16"]);
        run(on_gpu(), "hip", &["--precision", "bf16", "--backend", "hip"]);
        let load = |name: &str| -> HashMap<String, Tensor> { candle_core::safetensors::load(at(name), &Device::Cpu).unwrap() };
        let (cpu, hip) = (load("cpu.out"), load("hip.out"));
        for name in ["logits", "loss"] {
            let e = error(name, &hip[name], &cpu[name]);
            assert!(e <= 2e-2, "{case}: {name} is off by {e:.2e}");
        }
        let (exact, cpu, hip) = (load("f32.grads"), load("cpu.grads"), load("hip.grads"));
        assert_eq!(exact.len(), hip.len());
        let (mut of_cpu, mut of_hip) = (Vec::new(), Vec::new());
        for (name, expected) in &exact {
            if host(expected).iter().all(|x| *x == 0.0) {
                assert!(host(&hip[name]).iter().all(|x| *x == 0.0), "{case}: {name} should get no gradient");
                continue;
            }
            let e = error(name, &hip[name], expected);
            // The terms of a temperature's gradient nearly cancel: what is left has fewer digits than they have.
            let bound = if name.ends_with("qk_norm.temp") { 2e-1 } else { 1e-1 };
            assert!(e <= bound, "{case}: the gradient of {name} is off by {e:.2e}");
            of_hip.push(e);
            of_cpu.push(error(name, &cpu[name], expected));
        }
        let mean = |errors: &[f64]| errors.iter().sum::<f64>() / errors.len() as f64;
        let (of_cpu, of_hip) = (mean(&of_cpu), mean(&of_hip));
        println!("{case}: gradients are off by {of_hip:.2e} on average, by {of_cpu:.2e} on the processor");
        assert!(of_hip <= 1.5 * of_cpu, "{case}: {of_hip:.2e}, and {of_cpu:.2e} on the processor");
    }
}

/// `zaya doctor` finds the device, its libraries, and what is missing.
#[test]
fn the_doctor_sees_the_device() {
    let dir = tempfile::tempdir().unwrap();
    let ask = |mut command: Command| {
        let output = command.args(["doctor", "--json", "--dir"]).arg(dir.path()).output().unwrap();
        assert!(output.status.success(), "{}", said(&output));
        String::from_utf8(output.stdout).unwrap()
    };
    let with = ask(on_gpu());
    assert!(with.contains("gfx942") && with.contains("libswgpu.so"), "{with}");
    let mut without = program();
    without.env("ZAYA_HIP_LIB", "/nowhere/libamdhip64.so");
    let without = ask(without);
    assert!(without.contains("ZAYA_HIP_LIB names /nowhere") && without.contains("\"hard links\""), "{without}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing stays behind");
    let output = program().args(["doctor", "--dir", "/nowhere"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
}
