//! Killed anywhere, a run goes on from its last checkpoint and ends in the same bits.

use super::*;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};
use zaya::failpoint::POINTS;

fn assert_killed(done: &Done, what: &str) {
    assert_eq!(done.signal, Some(libc::SIGKILL), "{what}: {done:?}");
}

#[test]
fn at_every_step() {
    Lab::both().iter().for_each(at_every_step_in);
}

fn at_every_step_in(lab: &Lab) {
    lab.reference("whole", &[]);
    for k in 0..8 {
        // Every third step is saved, so the kill costs up to two steps, which are made again.
        let run = format!("killed-{k}");
        let args = ["--set", "checkpoint.every=3"];
        assert_killed(&lab.run_failing(&run, &format!("step:kill@{k}"), &args), &run);
        let newest = lab.steps(&run).first().copied();
        let due = (k >= 3).then_some(k / 3 * 3);
        // The kill may come before the last one is written.
        let before = due.and_then(|step: u64| step.checked_sub(3)).filter(|step| *step > 0);
        assert!(newest == due || lab.background == Some(true) && newest == before, "{newest:?} at {k}");
        let from = newest.map_or("holds no checkpoint yet".into(), |step| format!("resuming at step {step}"));
        lab.run(&run, &["--resume", "--set", "checkpoint.every=3"]).expect(0).says(&[&from]);
        lab.assert_same_run("whole", &run);
    }
    // In the middle of a step: the third micro-batch is the first of step 2.
    assert_killed(&lab.run_failing("middle", "micro_batch:kill@4", &[]), "middle");
    let steps = lab.steps("middle");
    assert!(steps == [1] || lab.background == Some(true) && steps.is_empty(), "{steps:?}");
    lab.run("middle", &["--resume"]).expect(0);
    lab.assert_same_run("whole", "middle");
}

#[test]
fn at_every_point_of_a_save() {
    for lab in Lab::both() {
        let newest = at_every_point_of_a_save_in(&lab, &[], &[], &[&[]], |point| !point.starts_with("ckpt.pool"));
        assert!(newest.len() > 2, "resumed from {newest:?}");
    }
}

/// Routers that stand still are what the pool has to give.
#[test]
fn at_every_point_of_the_pool() {
    for lab in Lab::both() {
        let common = ["checkpoint.incremental=true", "router.freeze_tokens=1000"].map(|set| ["--set", set]).concat();
        at_every_point_of_a_save_in(&lab, &common, &[], &[&[]], |point| point.starts_with("ckpt.pool"));
    }
}

/// The first rank writes what the others have brought it; whoever goes on need not be as many.
#[test]
fn at_every_point_of_a_save_by_several_ranks_and_resumed_by_others() {
    let [_, lab] = Lab::both();
    let same_bits = ["--set", "train.deterministic=layout"];
    let resumed = [&["--ranks", "1"][..], &["--ranks", "3"], &["--ranks", "2", "--set", "parallel.ep=2"]];
    let newest =
        at_every_point_of_a_save_in(&lab, &same_bits, &["--ranks", "2"], &resumed, |point| !point.starts_with("ckpt.pool"));
    assert!(newest.len() > 2, "resumed from {newest:?}");
}

/// Without the promise of the same bits in every layout: the same ranks end in the same bits, others close to them.
#[test]
fn in_a_save_by_several_ranks_without_sums_over_sequences() {
    let [_, lab] = Lab::both();
    let two = ["--ranks", "2"];
    lab.reference("whole", &two);
    let losses = |run: &str| -> Vec<f64> { lab.metrics(run).iter().map(|line| line["loss"].as_f64().unwrap()).collect() };
    // In the third save, whose step is 3; a save has two files.
    for (point, n) in [("ckpt.before_file_sync", 5), ("ckpt.before_commit", 3), ("ckpt.before_latest", 3)] {
        let run = format!("{point}-same");
        assert_killed(&lab.run_failing(&run, &format!("{point}:kill@{n}"), &two), &run);
        copy_dir(&lab.path(&run), &lab.path(&format!("{point}-other")));
        lab.run(&run, &[&two[..], &["--resume"]].concat()).expect(0).says(&["resuming at step"]);
        lab.assert_same_run("whole", &run);
        let run = format!("{point}-other");
        lab.run(&run, &["--ranks", "3", "--resume"]).expect(0).says(&["resuming at step"]);
        let lines: BTreeMap<u64, f64> =
            lab.metrics(&run).iter().map(|l| (l["step"].as_u64().unwrap(), l["loss"].as_f64().unwrap())).collect();
        assert_close(&lines.into_values().collect::<Vec<_>>(), &losses("whole"), 1e-4);
        let (a, b) = (lab.checkpoint(&run, 8), lab.checkpoint("whole", 8));
        assert_eq!((a.tensors(), &a.meta().loader), (b.tensors(), &b.meta().loader));
    }
}

/// `common` decides the numbers; `killed` and `resumed` how they are computed, the latter in turn.
fn at_every_point_of_a_save_in(
    lab: &Lab,
    common: &[&str],
    killed: &[&str],
    resumed: &[&[&str]],
    of_interest: fn(&str) -> bool,
) -> BTreeSet<String> {
    let retain = [&["--set", "checkpoint.keep_last=2"][..], common].concat();
    lab.reference("whole", &retain);
    assert_eq!(lab.steps("whole"), [8, 7]);
    // Step 3 is damaged, so that step 3 is saved over it: every point of the protocol is passed.
    lab.run("start", &[common, killed, &["--stop-at", "3"]].concat()).expect(0);
    flip_a_bit(&lab.path("start/ckpt/step-00000003/weights-00000.safetensors"));
    let mut newest = BTreeSet::new();
    let mut resumed = resumed.iter().cycle();
    for point in POINTS.iter().filter(|p| p.name.starts_with("ckpt.") && of_interest(p.name)) {
        for n in [1, 2] {
            let run = format!("{}-{n}", point.name);
            copy_dir(&lab.path("start"), &lab.path(&run));
            let args = [&retain[..], &["--resume"]].concat();
            let done = lab.run_failing(&run, &format!("{}:kill@{n}", point.name), &[&args[..], killed].concat());
            if done.code == Some(0) {
                // Passed once in this run.
                assert!(n > 1, "{} is never passed", point.name);
            } else {
                assert_killed(&done, &run);
                let valid = checkpoint::latest_valid(&lab.path(&run).join(CKPT_DIR)).unwrap();
                assert!(valid.checkpoint.is_some(), "{run}: {:?}", valid.skipped);
                let others = resumed.next().copied().unwrap_or_default();
                let done = lab.run(&run, &[&args[..], others].concat()).expect(0);
                let from = done.err.split("resuming at step ").nth(1).unwrap();
                newest.insert(from.split(' ').next().unwrap().to_string());
            }
            lab.assert_same_run("whole", &run);
            // Nothing of the accident is left but the protected checkpoint that the run was resumed from.
            let names = fs::read_dir(lab.path(&run).join(CKPT_DIR)).unwrap().map(|e| e.unwrap().file_name());
            assert!(names.into_iter().all(|n| !n.to_string_lossy().contains("tmp")), "{run}");
            fs::remove_dir_all(lab.path(&run)).unwrap();
        }
    }
    newest
}

#[test]
fn at_random_times_until_it_is_done() {
    Lab::both().iter().for_each(at_random_times_until_it_is_done_in);
}

fn at_random_times_until_it_is_done_in(lab: &Lab) {
    let args = ["--resume", "--set", "checkpoint.keep_last=2", "--set", "train.steps=12"];
    lab.reference("whole", &args);
    let mut random = Random(2024);
    let (mut kills, mut finished) = (0, false);
    let started = Instant::now();
    while !finished && kills < 60 && started.elapsed() < Duration::from_secs(20) {
        // Slow enough that a kill may fall anywhere.
        let mut command = lab.command("killed", &args);
        let mut running = Running::start(command.env("ZAYA_FAIL", "micro_batch:sleep=4ms,ckpt.before_manifest:sleep=3ms"));
        running.wait_for("step ");
        std::thread::sleep(Duration::from_millis(random.below(90)));
        running.signal(libc::SIGKILL);
        finished = running.finish().code == Some(0);
        kills += u32::from(!finished);
    }
    lab.run("killed", &args).expect(0);
    assert!(kills > 2, "{kills} kills");
    lab.assert_same_run("whole", "killed");
}
