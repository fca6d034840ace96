//! Training on the software GPU: the machine code that the executable brings for gfx942, run by `crates/swgpu`, against the CPU backend in
//! bf16.

use super::*;
use crate::hip::{has_kernels, on_gpu};

pub const BF16: [&str; 2] = ["--set", "train.precision=bf16"];

/// `pretrain` on the software GPU in place of the processor.
pub fn gpu_command(lab: &Lab, run: &str, args: &[&str]) -> Command {
    let plain = lab.command(run, args);
    let mut command = on_gpu();
    command.args(plain.get_args()).args(["--backend", "hip"]);
    command
}

/// Losses and gradient norms of a run's steps.
pub fn curve(lab: &Lab, run: &str) -> Vec<[f64; 2]> {
    lab.metrics(run).iter().map(|m| ["loss", "grad_norm"].map(|key| m[key].as_f64().unwrap())).collect()
}

#[test]
fn a_gpu_trains_as_the_processor_does() {
    if !has_kernels() {
        return;
    }
    let lab = Lab::new();
    let counters = lab.path("counters.json");
    lab.run("cpu", &BF16).expect(0);
    finish(gpu_command(&lab, "gpu", &BF16).env("SWGPU_COUNTERS", &counters)).expect(0);
    let (cpu, gpu) = (curve(&lab, "cpu"), curve(&lab, "gpu"));
    assert_eq!((cpu.len(), gpu.len()), (8, 8));
    for (step, (cpu, gpu)) in cpu.iter().zip(&gpu).enumerate() {
        for (what, cpu, gpu, bound) in [("loss", cpu[0], gpu[0], 5e-3), ("norm", cpu[1], gpu[1], 5e-2)] {
            assert!((cpu - gpu).abs() <= bound * cpu.abs(), "step {}: {what} {gpu} where the processor has {cpu}", step + 1);
        }
    }
    // Every kind of kernel of a step ran on the device.
    let counted: Value = serde_json::from_str(&fs::read_to_string(&counters).unwrap()).unwrap();
    let text = counted.to_string();
    for kernel in [
        "embedding_fwd",
        "embedding_bwd",
        "affine_fwd",
        "affine_bwd",
        "residual_norm_fwd_512",
        "residual_norm_bwd_512",
        "cca_mix_fwd_16",
        "cca_mix_bwd_input_16",
        "cca_mix_bwd_weight_16",
        "attention_fwd_16",
        "attention_bwd_q_16",
        "attention_bwd_kv_16",
        "router_fwd_64",
        "router_bwd_mlp_64",
        "router_bwd_state_64",
        "experts_gate_up_bf16",
        "experts_down_bf16",
        "experts_d_act_bf16",
        "experts_d_input_bf16",
        "experts_weight_gradient_bf16",
        "muon_update",
        "adamw",
        "sum_of_squares",
    ] {
        assert!(text.contains(&format!("\"{kernel}\"")), "{kernel} did not run: {text}");
    }
}

/// The same run gives the same bits, and goes on from its checkpoints, also on the processor.
#[test]
fn a_gpu_run_repeats_and_resumes() {
    if !has_kernels() {
        return;
    }
    let lab = Lab::new();
    let steps = |n: &'static str| [BF16[0], BF16[1], "--stop-at", n];
    finish(&mut gpu_command(&lab, "whole", &steps("3"))).expect(0);
    finish(&mut gpu_command(&lab, "parts", &steps("2"))).expect(0);
    finish(&mut gpu_command(&lab, "parts", &[&steps("3")[..], &["--resume"]].concat())).expect(0);
    lab.assert_same_state("whole", "parts", 3);
    lab.run("parts", &[&steps("4")[..], &["--resume"]].concat()).expect(0);
    assert_eq!(lab.steps("parts").first(), Some(&4));
}

/// A kernel whose output is wrong changes the loss: nothing stands beside the device and computes it too.
#[test]
fn a_corrupted_kernel_changes_the_loss() {
    if !has_kernels() {
        return;
    }
    let lab = Lab::new();
    let one = [BF16[0], BF16[1], "--stop-at", "2"];
    finish(&mut gpu_command(&lab, "good", &one)).expect(0);
    for kernel in ["attention_fwd_16", "experts_gate_up_bf16", "adamw"] {
        let run = format!("bad-{kernel}");
        finish(gpu_command(&lab, &run, &one).env("SWGPU_FAULT", format!("corrupt={kernel}")));
        let ended_early = !lab.path(&run).join("metrics.jsonl").is_file();
        let bad = if ended_early { Vec::new() } else { curve(&lab, &run) };
        assert_ne!(curve(&lab, "good"), bad, "{kernel}");
    }
}

#[test]
fn what_a_gpu_does_not_do_is_refused() {
    if !has_kernels() {
        return;
    }
    let lab = Lab::new();
    finish(&mut gpu_command(&lab, "f32", &[])).expect(2).says(&["train.precision = \"bf16\""]);
    finish(&mut gpu_command(&lab, "ranks", &[BF16[0], BF16[1], "--ranks", "2"]))
        .expect(2)
        .says(&["2 ranks on this machine want a GPU each, and HIP finds 1"]);
}
