//! SIGINT and SIGTERM save and end; the second ends at once. Time limits.

use super::*;
use std::time::{Duration, Instant};

const SLOW: &str = "micro_batch:sleep=60ms";

/// Starts a slow run, sends `signal` when stderr says `when`, and returns how it ended.
fn interrupted(lab: &Lab, run: &str, fail: &str, args: &[&str], when: &str, times: usize, signal: i32) -> Done {
    let mut running = Running::start(lab.command(run, args).env("ZAYA_FAIL", fail));
    for _ in 0..times {
        running.wait_for(when);
    }
    running.signal(signal);
    running.finish()
}

#[test]
fn signals_save_and_end_with_their_code() {
    let lab = Lab::new();
    lab.reference("whole", &[]);
    // The third micro-batch is the first of the second step: the step does not happen, and step 1 is what is saved.
    for (run, signal, code) in [("int", libc::SIGINT, 130), ("term", libc::SIGTERM, 143)] {
        let args = ["--set", "checkpoint.every=100"];
        let done = interrupted(&lab, run, SLOW, &args, "failpoint micro_batch", 3, signal);
        done.expect(code).says(&["stopped by a signal, saved; go on with --resume"]);
        assert_eq!(lab.steps(run), [1]);
        assert_eq!(lab.lines(run).len(), 1);
        lab.run(run, &["--resume"]).expect(0);
        lab.assert_same_run("whole", run);
    }
}

#[test]
fn before_the_first_step_the_start_is_saved() {
    let lab = Lab::new();
    lab.reference("whole", &[]);
    interrupted(&lab, "run", "step:sleep=300ms", &[], "failpoint step", 1, libc::SIGTERM).expect(143);
    assert_eq!(lab.steps("run"), [0]);
    lab.run("run", &["--resume"]).expect(0);
    lab.assert_same_run("whole", "run");
}

#[test]
fn the_second_signal_ends_at_once() {
    let lab = Lab::new();
    lab.reference("whole", &[]);
    let mut command = lab.command("run", &["--set", "checkpoint.every=100"]);
    let mut running = Running::start(command.env("ZAYA_FAIL", format!("{SLOW},ckpt.before_manifest:sleep=30s")));
    for _ in 0..3 {
        running.wait_for("failpoint micro_batch");
    }
    running.signal(libc::SIGINT);
    running.wait_for("failpoint ckpt.before_manifest");
    let started = Instant::now();
    running.signal(libc::SIGTERM);
    running.finish().expect(143);
    assert!(started.elapsed() < Duration::from_secs(10));
    // The half-written checkpoint is none.
    assert!(lab.steps("run").is_empty());
    lab.run("run", &["--resume"]).expect(0).says(&["starts at step 0"]);
    lab.assert_same_run("whole", "run");
}

const HELD_OUT: &str = "[[data.validation]]\nname = \"held-out\"\npath = \"held-out\"\n[eval]\nevery = 2\n";

#[test]
fn a_validation_that_a_signal_cut_short_is_made_up_for() {
    let lab = Lab::with(&format!("{RECIPE}{HELD_OUT}"));
    lab.reference("whole", &[]);
    let batches = lab.recipe(&[]).data.validation.len();
    assert_eq!(batches, 1);
    // In the second of the batches of step 2, then in the last validation of all.
    let done = interrupted(&lab, "run", "eval:sleep=150ms", &[], "failpoint eval", 2, libc::SIGTERM);
    done.expect(143).says(&["saved"]);
    assert_eq!(lab.steps("run")[0], 2);
    assert!(!lab.lines("run")[&2].contains("val_loss"));
    // Cut short once more while it is made up for: nothing is lost.
    interrupted(&lab, "run", "eval:sleep=150ms", &["--resume"], "failpoint eval", 1, libc::SIGINT).expect(130);
    lab.run("run", &["--resume", "--stop-at", "7"]).expect(0);
    assert_eq!(lab.lines("run")[&2], lab.lines("whole")[&2]);
    interrupted(&lab, "run", "eval:sleep=150ms", &["--resume"], "failpoint eval", 1, libc::SIGINT).expect(130);
    assert_eq!(lab.steps("run")[0], 8);
    lab.run("run", &["--resume"]).expect(0).says(&["nothing left to do"]);
    lab.assert_same_run("whole", "run");
}

#[test]
fn a_time_limit_saves_and_ends() {
    let lab = Lab::new();
    let started = Instant::now();
    let fail = "micro_batch:sleep=100ms";
    let args = ["--set", "train.steps=1000", "--set", "checkpoint.every=1000"];
    let done = lab.run_failing("run", fail, &[&args[..], &["--time-limit", "1s"]].concat());
    done.expect(0).says(&["time limit reached, saved; go on with --resume"]);
    assert!((Duration::from_secs(1)..Duration::from_secs(20)).contains(&started.elapsed()));
    let reached = lab.steps("run")[0];
    assert!((1..1000).contains(&reached), "{reached}");
    // The recipe's own limit, and going on.
    let done = lab.run_failing("run", fail, &[&args[..], &["--set", "run.time_limit=1s", "--resume"]].concat());
    done.expect(0).says(&["time limit reached"]);
    let further = lab.steps("run")[0];
    assert!((reached + 1..1000).contains(&further), "{reached}, {further}");
}
