//! Training on several ranks with a GPU each, on the software GPU, which shows several devices.

use super::gpu::{BF16, curve, gpu_command};
use super::*;
use crate::hip::has_kernels;
use crate::hip_ranks::{as_rank, free_port};

const STEPS: &str = "3";

/// Few steps of the lab's recipe in bf16, with these arguments.
fn few<'a>(args: &[&'a str]) -> Vec<&'a str> {
    [&BF16[..], &["--set", "checkpoint.every=100", "--stop-at", STEPS], args].concat()
}

/// On so many ranks, which are threads.
fn on_gpus(lab: &Lab, run: &str, ranks: usize, args: &[&str]) -> Command {
    let ranks = ranks.to_string();
    let mut command = gpu_command(lab, run, &[args, &["--ranks", &ranks]].concat());
    command.env("SWGPU_DEVICES", &ranks);
    command
}

/// Losses and gradient norms within bf16 bounds.
#[track_caller]
fn assert_alike(lab: &Lab, a: &str, b: &str) {
    let (a_curve, b_curve) = (curve(lab, a), curve(lab, b));
    assert_eq!(a_curve.len(), b_curve.len());
    for (step, (x, y)) in a_curve.iter().zip(&b_curve).enumerate() {
        for (what, x, y, bound) in [("loss", x[0], y[0], 5e-3), ("norm", x[1], y[1], 5e-2)] {
            assert!((x - y).abs() <= bound * x.abs(), "step {}: {what} of {a} is {x}, of {b} {y}", step + 1);
        }
    }
}

/// Launches of what the software GPU counts under a name.
fn launches(path: &Path, name: &str) -> u64 {
    let counted: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    counted[name]["launches"].as_u64().unwrap_or(0)
}

#[test]
fn replicas_train_as_the_processors_do() {
    if !has_kernels() {
        return;
    }
    let lab = Lab::new();
    lab.run("cpu-1", &few(&[])).expect(0);
    for ranks in [2, 4] {
        let (cpu, gpu) = (format!("cpu-{ranks}"), format!("gpu-{ranks}"));
        let counters = lab.path(&format!("{gpu}.json"));
        lab.run(&cpu, &few(&["--ranks", &ranks.to_string()])).expect(0);
        finish(on_gpus(&lab, &gpu, ranks, &few(&[])).env("SWGPU_COUNTERS", &counters)).expect(0);
        assert_alike(&lab, &cpu, &gpu);
        assert_alike(&lab, "cpu-1", &gpu);
        // Gradients to their owners, and weights back, by RCCL.
        for call in ["ncclReduce", "ncclBroadcast"] {
            assert!(launches(&counters, call) > 0, "no {call} in {}", fs::read_to_string(&counters).unwrap());
        }
    }
}

/// The same ranks give the same bits; others, one among them, and the processor go on from what they have saved.
#[test]
fn runs_repeat_and_resume_on_other_ranks() {
    if !has_kernels() {
        return;
    }
    let lab = Lab::new();
    let args = |until: &'static str| [BF16[0], BF16[1], "--stop-at", until];
    finish(&mut on_gpus(&lab, "whole", 2, &args("3"))).expect(0);
    finish(&mut on_gpus(&lab, "again", 2, &args("3"))).expect(0);
    lab.assert_same_run("whole", "again");
    let resumed = |until| [&args(until)[..], &["--resume"]].concat();
    finish(&mut on_gpus(&lab, "parts", 2, &args("2"))).expect(0);
    finish(&mut on_gpus(&lab, "parts", 2, &resumed("3"))).expect(0);
    lab.assert_same_state("whole", "parts", 3);
    finish(&mut on_gpus(&lab, "parts", 4, &resumed("4"))).expect(0).says(&["resuming at step 3"]);
    finish(&mut gpu_command(&lab, "parts", &resumed("5"))).expect(0).says(&["resuming at step 4"]);
    lab.run("parts", &[&resumed("6")[..], &["--ranks", "2"]].concat()).expect(0).says(&["resuming at step 5"]);
    assert_eq!(lab.steps("parts").first(), Some(&6));
    finish(&mut on_gpus(&lab, "parts", 2, &resumed("7"))).expect(0).says(&["resuming at step 6"]);
}

#[test]
fn experts_and_chunks_are_shared() {
    if !has_kernels() {
        return;
    }
    let lab = Lab::new();
    lab.run("cpu-1", &few(&[])).expect(0);
    for (name, ranks, sets) in [
        ("ep", 2, &["--set", "parallel.ep=2"][..]),
        ("cp", 2, &["--set", "parallel.cp=2"]),
        ("zigzag", 2, &["--set", "parallel.cp=2", "--set", "parallel.cp_chunks=zigzag", "--set", "train.recompute=all"]),
        ("both", 4, &["--set", "parallel.cp=2", "--set", "parallel.ep=4"]),
    ] {
        let (cpu, counters) = (format!("cpu-{name}"), lab.path(&format!("{name}.json")));
        lab.run(&cpu, &few(&[sets, &["--ranks", &ranks.to_string()]].concat())).expect(0);
        finish(on_gpus(&lab, name, ranks, &few(sets)).env("SWGPU_COUNTERS", &counters)).expect(0);
        assert_alike(&lab, &cpu, name);
        assert_alike(&lab, "cpu-1", name);
        assert!(launches(&counters, "ncclSend") > 0);
    }
}

/// `train.deterministic = "layout"`: parts are sent as they are, and summed in one order by their owner.
#[test]
fn sums_over_sequences_are_the_same_bits_on_any_ranks() {
    if !has_kernels() {
        return;
    }
    let lab = Lab::new();
    let bits = few(&["--set", "train.deterministic=layout"]);
    finish(&mut gpu_command(&lab, "one", &bits)).expect(0);
    for ranks in [2, 3] {
        let run = format!("ranks-{ranks}");
        finish(&mut on_gpus(&lab, &run, ranks, &bits)).expect(0);
        lab.assert_same_run("one", &run);
    }
}

/// `world` processes with a GPU each.
fn processes(lab: &Lab, run: &str, world: usize, args: &[&str], change: impl Fn(usize, &mut Command)) -> Vec<Done> {
    let port = free_port();
    let start = |rank| {
        let mut command = gpu_command(lab, run, args);
        as_rank(&mut command, rank, world, port);
        command.env("SWGPU_DEVICES", world.to_string());
        change(rank, &mut command);
        Running::start(&mut command)
    };
    let running: Vec<Running> = (0..world).map(start).collect();
    running.into_iter().map(Running::finish).collect()
}

#[test]
fn processes_train_as_threads_do() {
    if !has_kernels() {
        return;
    }
    let lab = Lab::new();
    let args = few(&["--set", "parallel.ep=2"]);
    finish(&mut on_gpus(&lab, "threads", 2, &args)).expect(0);
    for done in processes(&lab, "processes", 2, &args, |_, _| {}) {
        done.expect(0);
    }
    lab.assert_same_run("threads", "processes");
}

#[test]
fn what_goes_wrong_between_gpus_is_a_sentence() {
    if !has_kernels() {
        return;
    }
    let lab = Lab::new();
    let args = [&BF16[..], &["--set", "parallel.timeout=2s"]].concat();
    // An operation that never ends on one device.
    finish(on_gpus(&lab, "hang", 2, &args).env("SWGPU_FAULT", "hang=1:6")).expect(1).says(&[
        " waits in reduce-scatter of gradients #",
        " of the world group (step 2",
        "for 2 s for ranks ",
    ]);
    // One that fails.
    finish(on_gpus(&lab, "remote", 2, &args).env("SWGPU_FAULT", "remote=1:6")).expect(1).says(&["ncclRemoteError"]);
    // A rank that fails in something else, and one that does not come.
    finish(on_gpus(&lab, "error", 2, &args).env("ZAYA_FAIL", "step:error@3/rank1")).expect(1).says(&["rank 1: "]);
    finish(on_gpus(&lab, "stuck", 2, &args).env("ZAYA_FAIL", "step:sleep=600s@3/rank1")).expect(1).says(&["rank 1 was last in"]);
    // What was saved before is whole.
    assert!(lab.steps("stuck").first() == Some(&3), "{:?}", lab.steps("stuck"));
    finish(&mut on_gpus(&lab, "stuck", 2, &[&BF16[..], &["--resume", "--stop-at", "4"]].concat())).expect(0);
    // A process that dies.
    let kill = |_: usize, command: &mut Command| {
        command.env("SWGPU_FAULT", "kill=1:40");
    };
    let ranks = processes(&lab, "die", 2, &args, kill);
    assert_eq!((ranks[0].code, ranks[1].code), (Some(1), Some(9)), "{ranks:?}");
    assert!(ranks[0].err.contains("error: "), "{ranks:?}");
    // No RCCL there.
    finish(on_gpus(&lab, "none", 2, &args).env("ZAYA_RCCL_LIB", "/nowhere/librccl.so"))
        .expect(1)
        .says(&["ZAYA_RCCL_LIB names /nowhere"]);
}

#[test]
fn processes_that_cannot_meet_are_told_why() {
    if !has_kernels() {
        return;
    }
    let lab = Lab::new();
    let alone = |rank: usize, command: &mut Command| {
        if rank == 1 {
            command.env("WORLD_SIZE", "3").env("LOCAL_WORLD_SIZE", "3").env("SWGPU_DEVICES", "3");
        }
    };
    let ranks = processes(&lab, "meet", 2, &[&BF16[..], &["--set", "parallel.timeout=1s"]].concat(), alone);
    assert!(ranks[0].err.contains("for rank 1") && ranks[0].code == Some(1), "{ranks:?}");
    let mut command = gpu_command(&lab, "where", &BF16);
    as_rank(&mut command, 0, 2, 1);
    finish(command.env_remove("ZAYA_MASTER_PORT").env("SWGPU_DEVICES", "2")).expect(2).says(&["set MASTER_PORT"]);
}
