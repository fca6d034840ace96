//! Stopping and resuming gives the bits of never stopping.

use super::*;
use zaya::optim::schedule::Schedule;

/// Runs the recipe with `args` in one go, then in pieces of one step, each on another number of threads; compares the state
/// after every step.
fn in_pieces(recipe: &str, args: &[&str]) {
    let lab = Lab::with(recipe);
    lab.reference("whole", args);
    let steps = lab.steps("whole")[0];
    for k in 0..=steps {
        let stop = k.to_string();
        let threads = (1 + k % 3).to_string();
        let more: &[&str] = if k == 0 { &[] } else { &["--resume"] };
        let args = [args, more, &["--stop-at", &stop, "--threads", &threads]].concat();
        let done = lab.run("pieces", &args).expect(0);
        if k > 0 {
            done.says(&[&format!("resuming at step {} of {steps}", k - 1)]);
        }
        assert_eq!(lab.steps("pieces")[0], k);
        if k > 0 {
            lab.assert_same_state("whole", "pieces", k);
        }
    }
    lab.assert_same_run("whole", "pieces");
    // The loss of a run that learns nothing would prove little.
    let losses: Vec<f64> = lab.metrics("whole").iter().map(|l| l["loss"].as_f64().unwrap()).collect();
    assert!(losses.windows(2).all(|w| w[0] != w[1]), "{losses:?}");
}

#[test]
fn at_every_step() {
    Lab::both().iter().for_each(at_every_step_in);
}

fn at_every_step_in(lab: &Lab) {
    lab.reference("whole", &[]);
    for k in 0..=8 {
        let (run, stop) = (format!("stopped-{k}"), k.to_string());
        lab.run(&run, &["--stop-at", &stop, "--set", "checkpoint.every=100"]).expect(0);
        assert_eq!(lab.steps(&run), [k]);
        lab.run(&run, &["--resume"]).expect(0);
        lab.assert_same_run("whole", &run);
    }
    // Both sources went round more than once, so borders of epochs were crossed.
    let counts = lab.checkpoint("whole", 8).meta().loader["counts"].clone();
    let (a, b) = (counts[0].as_u64().unwrap(), counts[1].as_u64().unwrap());
    assert_eq!((a, b), (22, 10), "0.7 and 0.3 of 32 samples");
    for (name, samples) in [("a", a), ("b", b)] {
        let tokens = fs::metadata(lab.path(name).with_extension("bin")).unwrap().len() / 2;
        assert!(samples * 16 > tokens + 16, "{name}: {samples} samples of {tokens} tokens");
    }
}

#[test]
fn in_pieces_adamw() {
    in_pieces(RECIPE, &[]);
}

#[test]
fn in_pieces_sign_frozen_router_and_document_mask() {
    // 200 tokens end within the fourth step.
    in_pieces(
        &format!("{RECIPE}[data]\ndocument_mask = true\n"),
        &[
            "--set",
            "router.balance=sign",
            "--set",
            "router.freeze_tokens=200",
            "--set",
            "schedule.kind=wsd",
            "--set",
            "schedule.decay_steps=4",
        ],
    );
}

#[test]
fn in_pieces_pid_and_identity_skip() {
    let pid = ["pid_proportional=0.2", "pid_integral=0.05", "pid_derivative=0.1", "balance_skip_class=true", "balance=pid"];
    let sets: Vec<String> = pid.iter().map(|s| format!("--set=router.{s}")).collect();
    let mut args: Vec<&str> = sets.iter().map(String::as_str).collect();
    args.extend(["--set=model.skip_mode=identity", "--set=schedule.kind=linear"]);
    in_pieces(RECIPE, &args);
}

#[test]
fn in_pieces_bf16_split_gate_up_and_sliding_window() {
    let args = [
        "--set=train.precision=bf16",
        "--set=optimizer.muon_split_gate_up=true",
        "--set=data.eod_mask_loss=true",
        "--set=model.attention=[\"full\", \"sliding\"]",
        "--set=model.sliding_window=5",
        "--set=train.micro_batch=4",
    ];
    in_pieces(RECIPE, &args);
}

#[test]
fn in_pieces_candle() {
    in_pieces(RECIPE, &["--backend", "candle", "--set", "train.steps=4"]);
}

#[test]
fn the_router_stays_frozen_until_its_border() {
    let lab = Lab::new();
    lab.run("run", &["--set", "router.freeze_tokens=200"]).expect(0);
    let router = |step| {
        let c = lab.checkpoint("run", step);
        let mut names: Vec<String> = c.tensors().into_iter().map(|t| t.name).collect();
        names.retain(|n| n.contains(".router.") && !n.starts_with("opt/") && !n.contains("balanc"));
        assert!(names.len() > 4, "{names:?}");
        names.iter().map(|n| c.read(n).unwrap()).collect::<Vec<_>>()
    };
    // Steps 1 to 4 begin with 0, 64, 128, 192 tokens seen.
    assert_eq!(router(1), router(4));
    assert_ne!(router(4), router(5));
}

#[test]
fn a_longer_run_follows_the_new_curve_from_there_on() {
    let lab = Lab::new();
    lab.run("run", &["--stop-at", "5"]).expect(0);
    let done = lab.run("run", &["--resume", "--set", "train.steps=12", "--set", "checkpoint.every=4", "--threads", "1"]);
    done.expect(0).says(&["note: `train.steps` was 8 and is now 12", "new curve", "resuming at step 5 of 12"]);
    let (old, new) = (Schedule::of(&lab.recipe(&[])), Schedule::of(&lab.recipe(&["train.steps=12"])));
    let lr: Vec<f64> = lab.metrics("run").iter().map(|l| l["lr"].as_f64().unwrap()).collect();
    let expected: Vec<f64> = (0..12).map(|t| if t < 5 { old.lr_at(t) } else { new.lr_at(t) }).collect();
    assert_close(&lr, &expected, LAST_DIGIT);
    assert_eq!(lab.steps("run"), [12, 8, 5, 4, 3, 2, 1]);
    // Finished; made longer once more it goes on, made shorter there is nothing left.
    lab.run("run", &["--resume", "--set", "train.steps=13"]).expect(0).says(&["resuming at step 12 of 13"]);
    let before = snapshot(&lab.path("run"));
    lab.run("run", &["--resume", "--set", "train.steps=6"]).expect(0).says(&["nothing left to do: step 13 is done"]);
    assert!(changed(&before, &snapshot(&lab.path("run"))).is_empty());
}

/// Files that differ, the lock apart, which names the last process.
fn changed(a: &BTreeMap<PathBuf, Vec<u8>>, b: &BTreeMap<PathBuf, Vec<u8>>) -> Vec<PathBuf> {
    let differs = |p: &&PathBuf| a.get(*p) != b.get(*p) && !p.ends_with(".lock");
    a.keys().chain(b.keys()).filter(differs).cloned().collect()
}

#[test]
fn stop_at_the_edges() {
    let lab = Lab::new();
    // Beyond the end: the run ends as usual.
    lab.reference("whole", &["--stop-at", "1000"]);
    assert_eq!(lab.steps("whole")[0], 8);
    // At 0: the initial state is saved, and nothing is trained.
    lab.run("zero", &["--stop-at", "0"]).expect(0).says(&["stopped as asked"]);
    assert_eq!((lab.steps("zero"), lab.lines("zero").len()), (vec![0], 0));
    // At or below where the run stands: nothing happens.
    lab.run("zero", &["--resume", "--stop-at", "3"]).expect(0);
    for stop in ["3", "2", "0"] {
        let before = snapshot(&lab.path("zero"));
        lab.run("zero", &["--resume", "--stop-at", stop]).expect(0).says(&["nothing left to do: step 3 is done"]);
        assert!(changed(&before, &snapshot(&lab.path("zero"))).is_empty());
    }
    lab.run("zero", &["--resume"]).expect(0);
    lab.assert_same_run("whole", "zero");
}

#[test]
fn resume_with_nothing_there_starts_at_step_0() {
    let lab = Lab::new();
    lab.reference("whole", &[]);
    lab.run("fresh", &["--resume"])
        .expect(0)
        .says(&["holds no checkpoint yet, so this run starts at step 0", "starting at step 0"]);
    lab.assert_same_run("whole", "fresh");
}

#[test]
fn data_and_run_may_move() {
    let lab = Lab::new();
    lab.reference("whole", &[]);
    lab.run("run", &["--stop-at", "3"]).expect(0);
    fs::create_dir(lab.path("elsewhere")).unwrap();
    for name in ["a.bin", "a.idx", "b.bin", "b.idx"] {
        fs::rename(lab.path(name), lab.path("elsewhere").join(name)).unwrap();
    }
    fs::rename(lab.path("run"), lab.path("moved")).unwrap();
    let args = ["--resume", "--set", "data.sources.0.path=elsewhere/a", "--set", "data.sources.1.path=elsewhere/b"];
    lab.run("moved", &args).expect(0).says(&["taken as the same files at another place"]);
    lab.assert_same_run("whole", "moved");
}
