//! Runs of several stages: by themselves, stopped and killed around every border, on one rank and on two.

use super::*;
use zaya::checkpoint::ModelSource;
use zaya::optim::schedule::Schedule;

/// Steps 1 to 3, 4 and 5, 6 to 8. The second has longer sequences, the third goes on with samples of the first one's length.
const STAGES: &str = r#"
[[stages]]
name = "first"
steps = 3
[[stages]]
name = "long"
steps = 2
seq_len = 32
micro_batch = 1
recompute = "all"
rope_theta = 40000
kind = "constant"
lr = 2e-3
weights = { a = 0.25, b = 0.75 }
[[stages]]
name = "last"
steps = 3
global_batch_tokens = 96
kind = "linear"
warmup_steps = 1
"#;
const BORDERS: [u64; 2] = [3, 5];

fn staged() -> Lab {
    Lab::with(&format!("{RECIPE}{STAGES}"))
}

/// A run saved at its ends and at borders only.
const RARELY: [&str; 2] = ["--set", "checkpoint.every=100"];

#[test]
fn stages_follow_one_another_each_with_its_own_settings() {
    let lab = staged();
    let done = lab.run("run", &[]).expect(0).says(&[
        "stage 1 of 3, `first`: steps 1 to 3, 4 sequences of 16 tokens a step",
        "stage 2 of 3, `long`: steps 4 to 5, 2 sequences of 32 tokens a step, RoPE base 40000",
        "stage 3 of 3, `last`: steps 6 to 8, 6 sequences of 16 tokens a step, RoPE base 10000",
        "finished",
    ]);
    assert_eq!(done.err.matches("starting at step 0 of 8").count(), 1, "{}", done.err);
    let recipe = lab.recipe(&[]);
    assert_eq!((recipe.stage_ends(), recipe.stage_at(2), recipe.stage_at(3), recipe.stage_at(8)), (vec![3, 5, 8], 0, 1, 2));
    let lines = lab.metrics("run");
    let names: Vec<&str> = lines.iter().map(|l| l["stage"].as_str().unwrap()).collect();
    assert_eq!(names, ["first", "first", "first", "long", "long", "last", "last", "last"]);
    // A stage's curve spans the stage.
    let lr: Vec<f64> = lines.iter().map(|l| l["lr"].as_f64().unwrap()).collect();
    let of = |i: usize| {
        let stage = recipe.stage(i).unwrap();
        (0..stage.train.steps).map(|t| Schedule::of(&stage).lr_at(t)).collect::<Vec<_>>()
    };
    assert_close(&lr, &[of(0), of(1), of(2)].concat(), LAST_DIGIT);
    let seen: Vec<u64> = lines.iter().map(|l| l["tokens_seen"].as_u64().unwrap()).collect();
    assert_eq!(seen, [64, 128, 192, 256, 320, 416, 512, 608]);
    // A checkpoint holds the model as its stage trains it, and where the data stands.
    let theta = |step| lab.checkpoint("run", step).meta().model.rope.theta;
    assert_eq!([2, 3, 4, 5, 6].map(theta), [1e4, 1e4, 4e4, 4e4, 1e4]);
    let of_model = |step| ModelSource::open(lab.checkpoint("run", step).dir()).unwrap().recipe().unwrap().train.seq_len;
    assert_eq!([2, 3, 4, 5, 6].map(of_model), [16, 16, 32, 32, 16]);
    let loader = |step| lab.checkpoint("run", step).meta().loader.clone();
    let of_first = loader(3);
    assert_eq!((&of_first["stage"], &of_first["samples"]), (&0.into(), &12.into()));
    let tokens = |state: &Value, length: u64| -> Vec<u64> {
        let earlier = state["earlier_tokens"].as_array().unwrap().iter().map(|t| t.as_u64().unwrap());
        let counts = state["counts"].as_array().unwrap().iter().map(|c| c.as_u64().unwrap() * length);
        earlier.zip(counts).map(|(a, b)| a + b).collect()
    };
    assert_eq!(serde_json::json!(tokens(&of_first, 16)), loader(4)["earlier_tokens"]);
    assert_eq!(serde_json::json!(tokens(&loader(5), 32)), loader(6)["earlier_tokens"]);
    assert_eq!(tokens(&loader(8), 16).iter().sum::<u64>(), 608);
    // The first stage is the run that it would be alone.
    let alone = lab.recipe(&["stages=[]", "train.steps=3"]);
    assert_eq!(alone.train.seq_len, 16);
    lab.reference("alone", &["--set", "stages=[]", "--set", "train.steps=3"]);
    let (a, b) = (State::of(&lab.checkpoint("alone", 3)), State::of(&lab.checkpoint("run", 3)));
    assert_eq!((a.tensors, a.scalars), (b.tensors, b.scalars));
    // Nothing follows the end.
    lab.run("run", &["--resume"]).expect(0).says(&["nothing left to do: step 8 is done"]);
}

#[test]
fn stopped_anywhere_and_resumed() {
    let lab = staged();
    lab.reference("whole", &[]);
    for k in 0..=8 {
        let (run, stop) = (format!("stopped-{k}"), k.to_string());
        let done = lab.run(&run, &[&RARELY[..], &["--stop-at", &stop]].concat()).expect(0);
        assert_eq!(done.err.contains("finished"), k == 8);
        // Where a stage ended, a checkpoint is.
        let saved: Vec<u64> = [k].into_iter().chain(BORDERS.into_iter().rev().filter(|b| *b < k)).collect();
        assert_eq!(lab.steps(&run), saved);
        let done = lab.run(&run, &["--resume"]).expect(0);
        // The stage whose turn it is, not the last one.
        let next = [(3, "stage 1 of 3, `first`"), (5, "stage 2 of 3, `long`"), (8, "stage 3 of 3, `last`")];
        if let Some((_, says)) = next.into_iter().find(|(end, _)| k < *end) {
            let first = done.err.find("\nstage ").map_or("", |at| &done.err[at + 1..]);
            assert!(first.starts_with(says), "{k}: {}", done.err);
        }
        lab.assert_same_run("whole", &run);
    }
    // At a border, asked for once more.
    lab.run("again", &["--stop-at", "3"]).expect(0).says(&["stopped as asked"]);
    lab.run("again", &["--resume", "--stop-at", "3"]).expect(0).says(&["nothing left to do: step 3 is done"]);
    lab.run("again", &["--resume", "--stop-at", "4"]).expect(0).says(&["resuming at step 3 of 8", "`long`"]);
    lab.run("again", &["--resume"]).expect(0);
    lab.assert_same_run("whole", "again");
}

#[test]
fn killed_anywhere_and_resumed() {
    let lab = staged();
    lab.reference("whole", &[]);
    for k in 0..8 {
        let run = format!("killed-{k}");
        let done = lab.run_failing(&run, &format!("step:kill@{k}"), &RARELY);
        assert_eq!(done.signal, Some(libc::SIGKILL), "{done:?}");
        let border = BORDERS.into_iter().rev().find(|b| *b <= k);
        assert_eq!(lab.steps(&run).first().copied(), border);
        lab.run(&run, &["--resume"])
            .expect(0)
            .says(&[&border.map_or("starting at step 0 of 8".into(), |b| format!("resuming at step {b} of 8"))]);
        lab.assert_same_run("whole", &run);
    }
    // While a border is saved: what is half written is none.
    let done = lab.run_failing("saving", "ckpt.before_manifest:kill@1", &RARELY);
    assert_eq!(done.signal, Some(libc::SIGKILL), "{done:?}");
    lab.run("saving", &["--resume"]).expect(0).says(&["starting at step 0"]);
    lab.assert_same_run("whole", "saving");
}

#[test]
fn signals_around_a_border() {
    let lab = staged();
    lab.reference("whole", &[]);
    // Micro-batches of two sequences: two a step, then two of one.
    for (nth, step) in [(6, 2), (7, 3), (9, 4), (11, 5), (12, 5)] {
        let run = format!("signalled-{nth}");
        let mut running = Running::start(lab.command(&run, &RARELY).env("ZAYA_FAIL", "micro_batch:sleep=60ms"));
        for _ in 0..nth {
            running.wait_for("failpoint micro_batch");
        }
        running.signal(libc::SIGTERM);
        running.finish().expect(143).says(&["stopped by a signal, saved"]);
        let saved = lab.steps(&run)[0];
        assert!(saved == step || saved == step + 1, "{saved} after the signal in micro-batch {nth}");
        lab.run(&run, &["--resume"]).expect(0);
        lab.assert_same_run("whole", &run);
    }
}

#[test]
fn a_stages_last_validation_is_its_own() {
    let held_out = "[[data.validation]]\nname = \"held-out\"\npath = \"held-out\"\n[eval]\nevery = 100\n";
    let lab = Lab::with(&format!("{RECIPE}{held_out}{STAGES}"));
    lab.reference("whole", &[]);
    let validated: Vec<u64> =
        lab.metrics("whole").iter().filter(|l| l.contains_key("val_loss")).map(|l| l["step"].as_u64().unwrap()).collect();
    assert_eq!(validated, [3, 5, 8], "one after each stage");
    // Cut short at the border, it is made up for as the stage that ended there makes it.
    let mut running = Running::start(lab.command("run", &RARELY).env("ZAYA_FAIL", "eval:sleep=150ms"));
    running.wait_for("failpoint eval");
    running.signal(libc::SIGTERM);
    running.finish().expect(143);
    assert_eq!(lab.steps("run"), [3]);
    assert!(!lab.lines("run")[&3].contains("val_loss"));
    lab.run("run", &["--resume", "--stop-at", "4"]).expect(0).says(&["resuming at step 3", "stage 2 of 3"]);
    assert_eq!(lab.lines("run")[&3], lab.lines("whole")[&3]);
    lab.run("run", &["--resume"]).expect(0);
    lab.assert_same_run("whole", "run");
}

#[test]
fn ranks_change_their_layout_at_borders() {
    let lab = staged();
    let args = ["--ranks", "2", "--set", "stages.1.cp=2", "--set", "stages.2.ep=2"];
    let done = lab.run("whole", &args).expect(0);
    done.says(&["`first`: steps 1 to 3", "cp 1, ep 1", "cp 2, ep 1", "cp 1, ep 2", "finished"]);
    lab.reference("one", &[]);
    let losses = |run: &str| lab.metrics(run).iter().map(|l| l["loss"].as_f64().unwrap()).collect::<Vec<_>>();
    assert_close(&losses("whole"), &losses("one"), 1e-4);
    for k in [2, 3, 4, 5, 6] {
        let (stopped, killed, stop) = (format!("stopped-{k}"), format!("killed-{k}"), k.to_string());
        lab.run(&stopped, &[&args[..], &RARELY, &["--stop-at", &stop]].concat()).expect(0);
        lab.run(&stopped, &[&args[..], &["--resume"]].concat()).expect(0);
        lab.assert_same_run("whole", &stopped);
        let done = lab.run_failing(&killed, &format!("step:kill@{k}"), &[&args[..], &RARELY].concat());
        assert_eq!(done.signal, Some(libc::SIGKILL), "{done:?}");
        lab.run(&killed, &[&args[..], &["--resume"]].concat()).expect(0);
        lab.assert_same_run("whole", &killed);
    }
    // Sums over sequences: the same bits on any number of ranks, across borders too.
    let bits = ["--set", "train.deterministic=layout"];
    lab.reference("bits-1", &bits);
    lab.run("bits-2", &[&bits[..], &["--ranks", "2", "--set", "stages.2.ep=2"]].concat()).expect(0);
    lab.assert_same_run("bits-1", "bits-2");
    // On other ranks a run may go on; what cannot be shared by them is refused before the first stage.
    lab.run("moved", &[&args[..], &["--stop-at", "4"]].concat()).expect(0);
    lab.run("moved", &["--resume"]).expect(0).says(&["note: `stages.1.cp` was 2 and is now 1"]);
    let refused = lab.run("none", &["--ranks", "2", "--set", "stages.2.cp=3"]).expect(2);
    refused.says(&["stage `last`", "parallel.cp = 3 does not divide the number of ranks, 2"]);
    let both = [&args[..], &bits].concat();
    lab.run("none", &both).expect(2).says(&["stage `long`", "set parallel.cp = 1"]);
    assert!(!lab.path("none").exists());
}

#[test]
fn a_rank_that_cannot_save_a_border_ends_the_run() {
    let lab = staged();
    for (run, ranks) in [("one", "1"), ("two", "2")] {
        let args = [&RARELY[..], &["--ranks", ranks]].concat();
        lab.run_failing(run, "ckpt.before_manifest:error@1", &args).expect(1).says(&["step 3 could not be saved"]);
        assert!(lab.steps(run).is_empty());
        assert_eq!(lab.events(run)[0]["event"], "checkpoint_failed");
    }
}

#[test]
fn borders_are_kept_and_the_list_of_stages_is_fixed() {
    let lab = staged();
    lab.run("kept", &["--set", "checkpoint.keep_last=1"]).expect(0);
    assert_eq!(lab.steps("kept"), [8, 5, 3]);
    lab.run("run", &["--stop-at", "4"]).expect(0);
    let before = snapshot(&lab.path("run"));
    for (set, says) in [
        ("stages.2.lr=1e-3", "`stages.2.lr` was 0.005 and is now 0.001: the stages of a run are laid out when it starts"),
        ("stages.0.steps=4", "`stages.0.steps` was 3 and is now 4"),
        ("stages=[{name=\"first\", steps=3}]", "`stages.1.name` was \"long\" and is now not given"),
        ("stages=[]", "`stages.2.steps` was 3 and is now not given"),
    ] {
        lab.run("run", &["--resume", "--set", set]).expect(2).says(&[says, "Set these back"]);
    }
    let after = snapshot(&lab.path("run"));
    assert!(before.keys().eq(after.keys()));
    let free = ["stages.2.recompute=attention", "optimizer.clip=0.9", "stages.2.weights={a=1, b=1}"];
    let args: Vec<&str> = free.iter().flat_map(|set| ["--set", *set]).chain(["--resume"]).collect();
    lab.run("run", &args).expect(0).says(&["note: `stages.2.recompute`", "note: `optimizer.clip`", "note: `stages.2.weights`"]);
}
