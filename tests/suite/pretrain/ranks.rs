//! `--ranks`: one run on several ranks.

use std::time::{Duration, Instant};

use super::*;

const LAYOUT_BITS: &str = "train.deterministic=layout";

fn numbers(lab: &Lab, run: &str, key: &str) -> Vec<f64> {
    lab.metrics(run).iter().map(|line| line[key].as_f64().unwrap()).collect()
}

#[test]
fn every_layout_trains_alike() {
    let lab = Lab::with(&format!("{RECIPE}[[data.validation]]\nname = \"v\"\npath = \"held-out\"\n[eval]\nevery = 4\n"));
    lab.reference("one", &[]);
    let expected = numbers(&lab, "one", "loss");
    let validation = |run: &str| -> Vec<f64> {
        lab.metrics(run).iter().filter_map(|l| l.get("val_loss")).map(|v| v.as_f64().unwrap()).collect()
    };
    assert_eq!(validation("one").len(), 2);
    for (i, (ranks, sets)) in [
        ("2", &[][..]),
        ("3", &["--set", "parallel.ep=3"]),
        ("4", &["--set", "parallel.cp=2", "--set", "parallel.cp_chunks=zigzag"]),
        ("4", &["--set", "parallel.cp=2", "--set", "parallel.ep=4", "--set", "parallel.ranks_per_node=2"]),
        ("3", &["--set", "parallel.cp=3", "--set", "train.recompute=all"]),
    ]
    .into_iter()
    .enumerate()
    {
        let run = format!("many-{i}");
        lab.run(&run, &[&["--ranks", ranks], sets].concat()).expect(0).says(&["finished"]);
        assert_close(&numbers(&lab, &run, "loss"), &expected, 1e-4);
        assert_close(&validation(&run), &validation("one"), 1e-4);
        assert_eq!(numbers(&lab, &run, "tokens_seen"), numbers(&lab, "one", "tokens_seen"));
        assert_eq!(lab.steps(&run), lab.steps("one"));
        // Everything that a checkpoint holds is there, whoever kept it.
        let (a, b) = (State::of(&lab.checkpoint(&run, 8)), State::of(&lab.checkpoint("one", 8)));
        assert_eq!(a.tensors.keys().collect::<Vec<_>>(), b.tensors.keys().collect::<Vec<_>>());
        assert_eq!((a.step, a.tokens_seen, a.scalars, a.loader), (b.step, b.tokens_seen, b.scalars, b.loader));
    }
}

#[test]
fn sums_over_sequences_give_the_same_run_on_any_ranks_and_across_them() {
    let lab = Lab::new();
    let bits = ["--set", LAYOUT_BITS];
    lab.reference("one", &bits);
    for (run, args) in [
        ("two", &["--ranks", "2"][..]),
        ("three", &["--ranks", "3", "--set", "train.micro_batch=1"]),
        ("four", &["--ranks", "4", "--set", "parallel.ep=4", "--set", "parallel.ranks_per_node=2"]),
    ] {
        lab.run(run, &[&bits, args].concat()).expect(0);
        lab.assert_same_run("one", run);
    }
    // From one layout to the next in the middle of the run.
    for (i, args) in [
        &["--stop-at", "3"][..],
        &["--resume", "--ranks", "2", "--set", "parallel.ep=2", "--stop-at", "5"],
        &["--resume", "--ranks", "3"],
    ]
    .into_iter()
    .enumerate()
    {
        let done = lab.run("changing", &[&bits, args].concat()).expect(0);
        if i == 2 {
            done.says(&["resuming at step 5", "parallel.ep"]);
        }
    }
    lab.assert_same_run("one", "changing");
}

#[test]
fn stopping_and_resuming_a_layout_gives_the_same_bits() {
    let lab = Lab::new();
    let args = ["--ranks", "4", "--set", "parallel.cp=2", "--set", "parallel.ep=2"];
    lab.reference("whole", &args);
    lab.run("again", &args).expect(0);
    lab.assert_same_run("whole", "again");
    lab.run("pieces", &[&args[..], &["--stop-at", "3"]].concat()).expect(0);
    lab.run("pieces", &[&args[..], &["--resume"]].concat()).expect(0);
    lab.assert_same_run("whole", "pieces");
}

#[test]
fn a_rank_that_fails_ends_all_of_them() {
    let lab = Lab::new();
    let args = ["--ranks", "3", "--set", "parallel.timeout=2s"];
    for (run, fail, says) in [
        ("error", "step:error@3/rank1", &["rank 1: ", "Input/output error"][..]),
        ("panic", "step:panic@3/rank2", &["rank 2: it panicked: failpoint step"]),
        // Stuck, and not coming: the others say in which step and operation they miss it.
        ("stuck", "step:sleep=600s@3/rank1", &["for rank 1", "step 4", "rank 1 was last in"]),
        // While gradients are on their way.
        ("error-in-backward", "comm:error@40/rank1", &["Input/output error"]),
        ("panic-in-backward", "comm:panic@47/rank0", &["it panicked: failpoint comm"]),
        ("stuck-first", "step:sleep=600s@3/rank0", &["for rank 0", "step 4"]),
    ] {
        let begun = Instant::now();
        let done = lab.run_failing(run, fail, &args).expect(1).says(says);
        assert!(!done.err.contains("training goes on"), "{}", done.err);
        assert!(begun.elapsed() < Duration::from_secs(60), "{run} took {:?}", begun.elapsed());
        // What was saved is whole, and the run goes on from it.
        let saved = lab.steps(run).first().copied();
        assert!(!fail.starts_with("step") || saved == Some(3), "{run}: {saved:?}");
        lab.run(run, &[&args[..], &["--resume"]].concat()).expect(0).says(&["finished"]);
    }
}

#[test]
fn a_signal_saves_one_step_of_all_ranks() {
    let lab = Lab::with(&RECIPE.replace("micro_batch = 2", "micro_batch = 1"));
    let args = ["--ranks", "2", "--set", "checkpoint.every=100"];
    lab.reference("whole", &args);
    let mut running = Running::start(lab.command("run", &args).env("ZAYA_FAIL", "micro_batch:sleep=30ms"));
    for _ in 0..9 {
        running.wait_for("failpoint micro_batch");
    }
    running.signal(libc::SIGTERM);
    running.finish().expect(143).says(&["stopped by a signal, saved"]);
    let step = lab.steps("run")[0];
    assert!((1..8).contains(&step), "{step}");
    lab.run("run", &[&args[..], &["--resume"]].concat()).expect(0);
    lab.assert_same_run("whole", "run");
}

#[test]
fn impossible_layouts_are_refused_before_anything_is_written() {
    let lab = Lab::new();
    for (args, says) in [
        (&["--ranks", "4", "--set", "parallel.cp=3"][..], "parallel.cp = 3 does not divide the number of ranks, 4"),
        (&["--ranks", "1", "--set", "parallel.ep=2"], "parallel.ep = 2 does not divide the number of ranks, 1"),
        (&["--ranks", "8", "--set", "parallel.ep=8"], "the model has 4 experts"),
        (&["--ranks", "8", "--set", "parallel.cp=8", "--set", "parallel.cp_chunks=zigzag"], "16 chunks of 1"),
        (&["--ranks", "2", "--set", "parallel.cp=2", "--set", LAYOUT_BITS], "set parallel.cp = 1"),
        (&["--ranks", "4", "--set", "parallel.cp=2", "--set", "parallel.partial_nodes=error"], "part of a node of 4 ranks"),
        (&["--ranks", "0"], "--ranks"),
        (&["--ranks", "2", "--backend", "candle"], "--backend candle trains on one rank"),
    ] {
        lab.run("run", args).expect(2).says(&[says]);
        assert!(!lab.path("run").exists(), "{args:?}");
    }
    let warned = ["--ranks", "4", "--set", "parallel.cp=2", "--stop-at", "1"];
    lab.run("run", &warned).expect(0).says(&["warning: parallel.cp = 2: a context group is a part of a node of 4 ranks"]);
}

#[test]
fn micro_batches_shrink_until_they_fit() {
    let recipe = RECIPE.replace("micro_batch = 2", "micro_batch = 4").replace("hidden_size = 32", "hidden_size = 160");
    let lab = Lab::with(&recipe.replace("seq_len = 16", "seq_len = 64").replace("_tokens = 64", "_tokens = 256"));
    lab.reference("whole", &["--set", "train.micro_batch=1"]);
    let needed = |micro: &str, ranks: &str| -> u64 {
        // With a limit that nothing meets: the least that a step can do with.
        let mut command =
            lab.command("plan", &["--dry-run", "--ranks", ranks, "--set", micro, "--set", "train.memory_limit_mib=1"]);
        let out = String::from_utf8(command.output().unwrap().stdout).unwrap();
        let line = out.lines().find(|l| l.starts_with("together")).unwrap();
        let words: Vec<&str> = line.split_whitespace().collect();
        let bytes = words[1].parse::<f64>().unwrap() * if words[2] == "MiB" { 1.0 } else { 1.0 / 1024.0 };
        bytes.ceil() as u64
    };
    for ranks in ["1", "2"] {
        let (one, four) = (needed("train.micro_batch=1", ranks), needed("train.micro_batch=4", ranks));
        assert!(one < four, "{one} and {four} MiB");
        let limit = format!("train.memory_limit_mib={one}");
        let run = format!("shrunk-{ranks}");
        lab.run(&run, &["--ranks", ranks, "--set", &limit]).expect(0).says(&["the micro-batch is 1 sequences in place of 4"]);
        let event = &lab.events(&run)[0];
        assert_eq!(
            (event["event"].as_str(), event["asked"].as_u64(), event["used"].as_u64()),
            (Some("micro_batch_reduced"), Some(4), Some(1))
        );
        assert!(fs::read_to_string(lab.path(&run).join("recipe.toml")).unwrap().contains("micro_batch = 1"));
    }
    lab.assert_same_state("whole", "shrunk-1", 8);
    lab.run("none", &["--set", "train.memory_limit_mib=1"]).expect(2).says(&["train.memory_limit_mib is 1, but a step needs"]);
}

/// The system refuses memory, as under `ulimit -v`.
#[test]
#[cfg(target_os = "linux")]
fn micro_batches_shrink_when_the_system_gives_no_more() {
    use std::os::unix::process::CommandExt;
    let recipe = RECIPE.replace("micro_batch = 2", "micro_batch = 512").replace("hidden_size = 32", "hidden_size = 256");
    let recipe = recipe.replace("seq_len = 16", "seq_len = 64").replace("_tokens = 64", "_tokens = 32768");
    let lab = Lab::with(&recipe.replace("steps = 8", "steps = 1"));
    let mut command = lab.command("run", &[]);
    let limit = libc::rlimit { rlim_cur: 400 << 20, rlim_max: 400 << 20 };
    // SAFETY: one system call between fork and exec, on a value of its own.
    unsafe {
        command.pre_exec(move || {
            if libc::setrlimit(libc::RLIMIT_AS, &limit) == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
        })
    };
    finish(&mut command).expect(0).says(&["sequences in place of 512", "the global batch stays at 32768 tokens"]);
}

#[test]
fn buckets_that_are_sized_by_measuring_change_no_bit() {
    let lab = Lab::new();
    let auto = ["--set", "parallel.bucket_mib=auto"];
    lab.reference("sixteen", &["--ranks", "3"]);
    let sized = |run: &str| -> Vec<Map<String, Value>> {
        lab.events(run).into_iter().filter(|e| e["event"] == "buckets_sized").collect()
    };
    lab.run("auto", &[&auto[..], &["--ranks", "3", "--stop-at", "5"]].concat())
        .expect(0)
        .says(&["parallel.bucket_mib = \"auto\": buckets of ", "a reduce-scatter between 3 ranks moves 1 MiB at "]);
    lab.run("auto", &[&auto[..], &["--ranks", "3", "--resume"]].concat()).expect(0);
    lab.assert_same_run("sixteen", "auto");
    let events = sized("auto");
    assert_eq!(events.iter().map(|e| e["at_step"].as_u64().unwrap()).collect::<Vec<_>>(), [0, 5]);
    for event in events {
        let tried: Vec<u64> = event["reduce_scatter"].as_array().unwrap().iter().map(|r| r["mib"].as_u64().unwrap()).collect();
        assert!([1, 4, 16, 64].starts_with(&tried) && tried.contains(&event["bucket_mib"].as_u64().unwrap()), "{event:?}");
    }
    // Measured once, although a run of several stages forms its groups anew; and never where there is nobody to talk to.
    let stages = "[[stages]]\nname = \"x\"\nsteps = 2\n[[stages]]\nname = \"y\"\nsteps = 2\nep = 2\n";
    fs::write(lab.path("r.toml"), format!("{RECIPE}{stages}")).unwrap();
    lab.run("stages", &[&auto[..], &["--ranks", "2"]].concat()).expect(0);
    assert_eq!(sized("stages").len(), 1);
    fs::write(lab.path("r.toml"), RECIPE).unwrap();
    let alone = lab.run("alone", &auto).expect(0);
    assert!(sized("alone").is_empty() && !alone.err.contains("buckets of"), "{}", alone.err);
    assert!(fs::read_to_string(lab.path("alone/recipe.toml")).unwrap().contains("bucket_mib = \"auto\""));
    lab.run("wrong", &["--set", "parallel.bucket_mib=automatic"]).expect(2).says(&["parallel.bucket_mib", "or \"auto\""]);
}

#[test]
fn a_profile_is_of_the_first_rank() {
    let lab = Lab::new();
    let mut command = lab.command("run", &["--ranks", "4", "--set", "parallel.cp=2", "--profile"]);
    let table = String::from_utf8(command.output().unwrap().stdout).unwrap();
    assert!(table.contains("profile of steps 3 to 5"), "{table}");
    assert!(!table.contains(" -"), "{table}");
    let text = fs::read_to_string(lab.path("run").join("profile.json")).unwrap();
    assert!(text.contains("all-gather of keys and values"), "operations with others are in it");
    assert!(text.contains("rank 0, thread 0") && !text.contains("rank 1, thread"), "threads are named by rank");
}

#[test]
fn validation_is_the_same_bits_too_where_they_are_promised() {
    let lab = Lab::with(&format!("{RECIPE}[[data.validation]]\nname = \"v\"\npath = \"held-out\"\n[eval]\nevery = 1\n"));
    let bits = ["--set", LAYOUT_BITS];
    lab.reference("one", &bits);
    for (run, args) in [("micro", &["--set", "train.micro_batch=1"][..]), ("three", &["--ranks", "3"])] {
        lab.run(run, &[&bits, args].concat()).expect(0);
        lab.assert_same_run("one", run);
    }
}

#[test]
fn a_save_that_takes_longer_than_ranks_wait_is_no_failure_of_the_run() {
    let lab = Lab::new();
    let args = ["--ranks", "3", "--set", "parallel.timeout=2s"];
    let slow = "ckpt.after_commit:sleep=5s@4/rank0";
    lab.reference("whole", &["--ranks", "3"]);
    // The others are told that they wait for a disk.
    lab.run_failing("background", "ckpt.after_commit:sleep=5s@4", &args).expect(0).says(&["finished"]);
    lab.assert_same_state("whole", "background", 8);
    // Where all wait for each tensor they give up, but not for want of a checkpoint.
    let waiting = [&args[..], &["--set", "checkpoint.async=false"]].concat();
    let done = lab.run_failing("waiting", slow, &waiting).expect(1).says(&["for rank 0"]);
    assert!(!done.err.contains("training goes on"), "{}", done.err);
    assert_eq!(lab.steps("waiting")[0], 4);
    lab.run("waiting", &[&waiting[..], &["--resume"]].concat()).expect(0);
    lab.assert_same_state("whole", "waiting", 8);
}
