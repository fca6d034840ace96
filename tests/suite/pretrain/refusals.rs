//! What is refused before anything starts: exit code 2, a sentence that helps, nothing touched.

use super::*;

/// Refused with these words, and the whole folder is as before.
#[track_caller]
fn refused(lab: &Lab, run: &str, args: &[&str], pieces: &[&str]) {
    let before = snapshot(lab.dir.path());
    lab.run(run, args).expect(2).says(pieces);
    let after = snapshot(lab.dir.path());
    let names: Vec<_> = after.keys().filter(|p| before.get(*p) != after.get(*p) && !p.ends_with(".lock")).collect();
    assert!(names.is_empty() && before.len() <= after.len(), "touched: {names:?}");
}

#[test]
fn a_run_directory_with_a_checkpoint_needs_resume() {
    let lab = Lab::new();
    lab.run("run", &["--stop-at", "2"]).expect(0);
    refused(&lab, "run", &[], &["already holds a checkpoint of step 2", "--resume", "another run.dir"]);
    refused(&lab, "run", &["--stop-at", "5"], &["--resume"]);
    // A damaged one is a checkpoint too: nobody's work is written over.
    flip_a_bit(&lab.path("run/ckpt/step-00000002/manifest.json"));
    refused(&lab, "run", &[], &["already holds a checkpoint"]);
    fs::write(lab.path("file"), "").unwrap();
    refused(&lab, "file", &[], &["is a file", "run.dir"]);
}

#[test]
fn a_recipe_that_makes_it_another_run() {
    let lab = Lab::new();
    lab.run("run", &["--stop-at", "2"]).expect(0);
    let fixed = [
        ("run.seed=8", "`run.seed` was 7 and is now 8"),
        ("train.precision=bf16", "`train.precision` was \"f32\" and is now \"bf16\""),
        ("train.seq_len=32", "`train.seq_len`"),
        ("train.global_batch_tokens=128", "`train.global_batch_tokens` was 64 and is now 128"),
        ("model.hidden_size=64", "`model.hidden_size` was 32 and is now 64"),
        ("model.norm_eps=1e-6", "`model.norm_eps`"),
        ("model.skip_mode=identity", "`model.skip_mode`"),
        ("data.packing=best-fit", "`data.packing` was \"stream\" and is now \"best-fit\""),
        ("data.sources.0.name=c", "`data.sources.0.name`"),
        ("data.sources.0.path=held-out", "`data.sources.0.path`"),
        ("data.document_mask=true", "`data.document_mask`"),
        ("data.eod_mask_loss=true", "`data.eod_mask_loss`"),
        ("router.balance=pid", "`router.balance` was \"adamw\" and is now \"pid\""),
        ("optimizer.muon_split_gate_up=true", "`optimizer.muon_split_gate_up`"),
    ];
    for (set, sentence) in fixed {
        refused(&lab, "run", &["--resume", "--set", set], &[sentence, "Set these back", "docs/RECIPE.md"]);
    }
    // These may change, and say what comes of it.
    let free = ["schedule.lr=1e-3", "optimizer.clip=0.5", "checkpoint.every=2", "train.micro_batch=1", "router.balance_lr=0.01"];
    let sets: Vec<&str> = free.iter().flat_map(|s| ["--set", s]).collect();
    lab.run("run", &[&sets[..], &["--resume"]].concat()).expect(0).says(&["note: `schedule.lr`", "note: `optimizer.clip`"]);
}

#[test]
fn data_that_changed_since() {
    let lab = Lab::new();
    lab.run("run", &["--stop-at", "2"]).expect(0);
    let good = fs::read(lab.path("a.bin")).unwrap();
    // One token of the same length.
    let mut bytes = good.clone();
    bytes[10] ^= 1;
    fs::write(lab.path("a.bin"), bytes).unwrap();
    refused(&lab, "run", &["--resume"], &["hold other tokens", "Put the old shards back"]);
    fs::write(lab.path("a.bin"), good).unwrap();
    write_shard(&lab.path("b"), 5, 2, 64);
    refused(&lab, "run", &["--resume"], &["hold other tokens"]);
    write_shard(&lab.path("b"), 4, 2, 64);
    lab.run("run", &["--resume"]).expect(0);
}

#[test]
fn shards_that_do_not_fit_the_model() {
    let lab = Lab::new();
    // 200 is not among the model's 64 ids.
    let mut writer = ShardWriter::create(&lab.path("a"), TokenType::U16, true).unwrap();
    writer.push(&[1; 37]).unwrap();
    writer.push(&[2, 3, 200, 4]).unwrap();
    writer.publish(|_| Ok("{}".into())).unwrap();
    fs::remove_file(lab.path("a.json")).unwrap();
    lab.run("run", &[]).expect(2).says(&["a.bin", "token 39 (document 1 of its source)", "id 200", "vocabulary of 64"]);
    // A shard that says how many ids its tokenizer has is refused at the start.
    write_texts(&lab);
    tokenize(&lab, 270, "tokenizer.json", "a");
    refused(&lab, "fresh", &[], &["data source `a`", "a.bin", "tokenizer of 270 ids", "`vocab_size` 64"]);
    assert!(!lab.path("fresh").exists());
}

fn write_texts(lab: &Lab) {
    let lines: Vec<String> = varied_text(60).lines().map(|l| format!("{{\"text\": \"{l}\"}}\n")).collect();
    fs::write(lab.path("t.jsonl"), lines.concat()).unwrap();
}

/// Learns a vocabulary from t.jsonl and writes t.jsonl with it as the shard `prefix`.
fn tokenize(lab: &Lab, size: usize, tokenizer: &str, prefix: &str) {
    let input = lab.path("t.jsonl");
    let common = |c: &mut Command, output: &str| {
        finish(c.arg("--overwrite").arg("--input").arg(&input).arg("--output").arg(lab.path(output))).expect(0);
    };
    common(zaya().args(["tokenize", "--train-vocab", &size.to_string()]), tokenizer);
    common(zaya().arg("tokenize").arg("--tokenizer").arg(lab.path(tokenizer)), prefix);
}

#[test]
fn another_tokenizer_than_that_of_the_shards() {
    let lab = Lab::new();
    write_texts(&lab);
    tokenize(&lab, 280, "other.json", "b");
    tokenize(&lab, 270, "tokenizer.json", "a");
    let model = ["--set", "model.vocab_size=300"];
    refused(&lab, "run", &model, &["`a` and `b` were written with different tokenizers"]);
    let args = [&model[..], &["--set", "data.sources.1.weight=1", "--set", "tokenizer.path=other.json"]].concat();
    tokenize(&lab, 270, "tokenizer.json", "b");
    refused(&lab, "run", &args, &["written with another tokenizer than the recipe's tokenizer", "other.json"]);
    assert!(!lab.path("run").exists());
    lab.run("run", &[&model[..], &["--set", "tokenizer.path=tokenizer.json", "--stop-at", "2"]].concat()).expect(0);
    // Held-out shards are looked at as well.
    tokenize(&lab, 275, "third.json", "held-out");
    let held_out = ["--set", "data.validation=[{path=\"held-out\"}]", "--set", "eval.every=1"];
    let args = [&model[..], &["--set", "tokenizer.path=tokenizer.json"], &held_out].concat();
    refused(&lab, "new", &args, &["the shards of `held-out`", "another tokenizer"]);
}

#[test]
fn files_that_are_not_there() {
    let lab = Lab::new();
    fs::remove_file(lab.path("a.idx")).unwrap();
    let args = ["--set", "tokenizer.path=none.json"];
    refused(&lab, "run", &args, &["2 files that the recipe names are not there", "a.idx", "none.json"]);
    // A dry run only marks them.
    finish(lab.command("run", &["--dry-run"]).args(args)).expect(0);
    assert!(!lab.path("run").exists());
    // A shard that was cut.
    let lab = Lab::new();
    let bytes = fs::read(lab.path("a.bin")).unwrap();
    fs::write(lab.path("a.bin"), &bytes[..bytes.len() - 2]).unwrap();
    let done = lab.run("run", &[]);
    assert!(matches!(done.code, Some(1 | 2)), "{done:?}");
    done.says(&["a.bin", "the .bin was cut"]);
    assert!(!lab.path("run").exists());
}

#[test]
fn one_of_several_ranks() {
    let lab = Lab::new();
    for (rank, world, n) in [
        ("RANK", "WORLD_SIZE", "4"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "2"),
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "2"),
        ("PMI_RANK", "PMI_SIZE", "3"),
    ] {
        let done = finish(lab.command("run", &[]).env(rank, "1").env(world, n)).expect(2);
        done.says(&[&format!("rank 1 of {n} processes ({world}={n})"), "one process"]);
        assert!(!lab.path("run").exists());
    }
    finish(lab.command("run", &[]).env("WORLD_SIZE", "4")).expect(2).says(&["WORLD_SIZE=4", "RANK is not set"]);
    finish(lab.command("run", &["--stop-at", "1"]).env("WORLD_SIZE", "1")).expect(0);
}

#[test]
fn a_malformed_failpoint_or_argument() {
    let lab = Lab::new();
    for (fail, piece) in [("step:kil@3", "did you mean `kill`"), ("stepp:kill", "did you mean `step`"), ("step", "name:action")] {
        lab.run_failing("run", fail, &[]).expect(2).says(&["ZAYA_FAIL", piece]);
    }
    for (args, piece) in [
        (&["--init-from", "somewhere"][..], "hf:DIR"),
        (&["--threads", "0"], "at least 1"),
        (&["--time-limit", "soon"], "soon"),
        (&["--stop-at", "-1"], "-1"),
        (&["--set", "train.stepz=3"], "did you mean"),
    ] {
        lab.run("run", args).expect(2).says(&[piece]);
    }
    assert!(!lab.path("run").exists());
}
