//! A GPU's memory and its launches: planned, taken once, reduced micro-batches where there is too little; launches repeated as graphs.

use super::gpu::{BF16, curve, gpu_command};
use super::*;
use crate::hip::has_kernels;

/// Calls that a run made, as the software GPU counted them.
fn counted(lab: &Lab, run: &str, args: &[&str]) -> Value {
    let counters = lab.path(&format!("{run}.json"));
    finish(gpu_command(lab, run, &[&BF16[..], args].concat()).env("SWGPU_COUNTERS", &counters)).expect(0);
    serde_json::from_str(&fs::read_to_string(&counters).unwrap()).unwrap()
}

fn times(counters: &Value, name: &str) -> u64 {
    counters[name]["launches"].as_u64().unwrap_or(0)
}

/// Memory is taken before the first step, in one piece, and graphs change no bit.
#[test]
fn memory_is_taken_once_and_graphs_repeat_the_same_bits() {
    if !has_kernels() {
        return;
    }
    let lab = Lab::new();
    let short = counted(&lab, "short", &["--stop-at", "2"]);
    let long = counted(&lab, "long", &["--stop-at", "6"]);
    assert_eq!(times(&short, "hipMalloc"), times(&long, "hipMalloc"), "steps took memory from the device");
    assert_eq!(times(&long, "hipMalloc"), 1, "the plan was too small");
    // Some micro-batches are as those before; the first of all are not yet.
    let of_long = times(&long, "hipGraphLaunch");
    assert!(of_long > 0 && of_long >= times(&short, "hipGraphLaunch"), "{of_long} graphs were launched");
    let plain = counted(&lab, "plain", &["--stop-at", "6", "--set", "train.gpu_graphs=false"]);
    assert_eq!(times(&plain, "hipGraphLaunch"), 0);
    assert_eq!(curve(&lab, "long"), curve(&lab, "plain"));
    lab.assert_same_state("long", "plain", 6);
    // The kernels ran as often, whoever queued them.
    for kernel in ["attention_fwd_16", "experts_gate_up_bf16", "adamw"] {
        assert_eq!(times(&long, kernel), times(&plain, kernel), "{kernel}");
    }
}

#[test]
fn too_little_memory_halves_the_micro_batch() {
    if !has_kernels() {
        return;
    }
    let lab = Lab::new();
    // Wide and long enough for MiB to matter.
    let wide =
        ["model.hidden_size=128", "model.max_position_embeddings=256", "train.seq_len=256", "train.global_batch_tokens=1024"]
            .map(|set| ["--set", set])
            .concat();
    // What a dry run plans is what a run takes.
    let planned = |micro: &str| {
        let set = format!("train.micro_batch={micro}");
        let args = [&BF16[..], &wide, &["--dry-run", "--set", &set[..]]].concat();
        let text = String::from_utf8(gpu_command(&lab, "plan", &args).output().unwrap().stdout).unwrap();
        assert!(text.contains("# Memory of the GPU, one process") && text.contains("free on the GPU here"), "{text}");
        let line = text.lines().find(|l| l.starts_with("together")).unwrap();
        let words: Vec<&str> = line.split_whitespace().collect();
        assert_eq!(words[2], "MiB", "{line}");
        words[1].parse::<f64>().unwrap()
    };
    let (one, four) = (planned("1"), planned("4"));
    assert!(one.ceil() + 1.0 < four, "{one} MiB for one sequence at once, {four} for four");
    // Ranks that share sequences hold a part of each, and room for what travels between them.
    let shared = |cp: &str| {
        let set = format!("parallel.cp={cp}");
        let args = [&BF16[..], &wide, &["--dry-run", "--ranks", "2", "--set", "train.micro_batch=1", "--set", &set[..]]].concat();
        let text = String::from_utf8(gpu_command(&lab, "plan", &args).output().unwrap().stdout).unwrap();
        let mib = |name: &str| {
            let line = text.lines().find(|l| l.starts_with(name)).unwrap_or_else(|| panic!("no {name} in {text}"));
            line[name.len()..].split_whitespace().next().unwrap().parse::<f64>().unwrap()
        };
        assert!(mib("gradients and weights on their way") > 0.0);
        mib("working memory of a step")
    };
    let (whole, halves) = (shared("1"), shared("2"));
    assert!(halves < 0.8 * whole && halves > 0.3 * whole, "{halves} of {whole}");
    let run = |name: &str, args: &[&str], fault: &str| {
        let args = [&BF16[..], &["--stop-at", "2"], args].concat();
        finish(gpu_command(&lab, name, &args).env("SWGPU_FAULT", fault))
    };
    let reduced = |name: &str| {
        let event = lab.events(name).into_iter().find(|e| e["event"] == "micro_batch_reduced").unwrap();
        (event["asked"].as_u64().unwrap(), event["used"].as_u64().unwrap())
    };
    // By a limit of the recipe, and by a device that refuses the first piece of memory that is asked for.
    let limit = format!("train.memory_limit_mib={}", one.ceil() as u64);
    run("limit", &[&wide[..], &["--set", "train.micro_batch=4", "--set", &limit[..]]].concat(), "")
        .expect(0)
        .says(&["the micro-batch is 1 sequences in place of 4", "the GPU's memory"]);
    assert_eq!(reduced("limit"), (4, 1));
    run("refused", &[], "oom=1").expect(0).says(&["the micro-batch is 1 sequences in place of 2"]);
    assert_eq!(reduced("refused"), (2, 1));
    // Where nothing helps there is a sentence.
    run("none", &["--set", "train.memory_limit_mib=1"], "").expect(2).says(&["train.memory_limit_mib is 1, but a step needs"]);
    let args = [&BF16[..], &["--stop-at", "2"]].concat();
    let tiny = finish(gpu_command(&lab, "tiny", &args).env("SWGPU_MEMORY_MIB", "1"));
    assert_ne!(tiny.code, Some(0));
    tiny.says(&["MiB of the GPU's memory", "train.recompute = \"all\""]);
}
