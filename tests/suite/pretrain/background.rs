//! Checkpoints that are written while training goes on.

use super::*;

const ASYNC: [&str; 2] = ["--set", "checkpoint.async=true"];
const SYNC: [&str; 2] = ["--set", "checkpoint.async=false"];

/// The events of one name, by step.
fn events_of(lab: &Lab, run: &str, name: &str) -> BTreeMap<u64, Map<String, Value>> {
    let events = lab.events(run).into_iter().filter(|e| e["event"] == name);
    events.map(|e| (e["at_step"].as_u64().unwrap(), e)).collect()
}

fn number(event: &Map<String, Value>, key: &str) -> f64 {
    event[key].as_f64().unwrap_or_else(|| panic!("no {key} in {event:?}"))
}

#[test]
fn a_slow_writer_never_mixes_two_steps() {
    let lab = Lab::new();
    lab.reference("whole", &SYNC);
    let args = [&ASYNC[..], &["--set", "checkpoint.every=3"]].concat();
    // So slow that three steps take less time on a busy machine too.
    lab.run_failing("slow", "ckpt.write:sleep=20ms", &args).expect(0);
    assert_eq!(lab.steps("slow"), [8, 6, 3]);
    for step in [3, 6, 8] {
        lab.checkpoint("slow", step).verify().unwrap();
        lab.assert_same_state("whole", "slow", step);
    }
    assert_eq!(lab.lines("slow"), lab.lines("whole"));

    let saved = events_of(&lab, "slow", "checkpoint_saved");
    assert_eq!(saved.keys().copied().collect::<Vec<_>>(), [3, 6, 8]);
    for (step, event) in &saved {
        let files = lab.checkpoint("slow", *step).manifest().total_bytes();
        assert_eq!(event["bytes"].as_u64(), Some(files));
        assert!(number(event, "wait_s") <= number(event, "stall_s"), "{event:?}");
        assert!(number(event, "write_s") > 0.2, "{event:?}");
    }
    // Steps 4 to 6 were trained while 3 was written: only then was it waited for.
    assert!(number(&saved[&3], "stall_s") < 0.5 * number(&saved[&3], "write_s"), "{saved:?}");
    assert!(number(&saved[&6], "wait_s") > 0.3 * number(&saved[&3], "write_s"), "{saved:?}");
    let objects = lab.objects("slow");
    let at = |key: &str, step: u64| objects.iter().position(|o| o.get(key).is_some_and(|s| *s == step)).unwrap();
    assert!(at("at_step", 3) > at("step", 6));
}

#[test]
fn a_kill_while_one_is_written_leaves_the_one_before() {
    let lab = Lab::new();
    lab.reference("whole", &[]);
    let args = [&ASYNC[..], &["--set", "checkpoint.every=2"]].concat();
    for (i, point) in ["ckpt.write", "ckpt.after_file", "ckpt.before_manifest_rename", "ckpt.before_commit"].iter().enumerate() {
        let run = format!("run-{i}");
        // The save of step 4 hangs at the point, which it has time to reach before step 5 begins.
        let hits = match *point {
            "ckpt.write" => writes_of_a_save(&lab) + 2,
            "ckpt.after_file" => 3,
            _ => 2,
        };
        let fail = format!("{point}:sleep=20s@{hits},step:sleep=1500ms@4,step:kill@5");
        let done = lab.run_failing(&run, &fail, &args);
        assert_eq!(done.signal, Some(libc::SIGKILL), "{fail}: {done:?}");
        assert!(done.err.contains(&format!("failpoint {point}: Sleep")), "{fail}: {done:?}");
        assert_eq!(lab.steps(&run), [2], "{fail}");
        lab.checkpoint(&run, 2).verify().unwrap();
        lab.run(&run, &[&args[..], &["--resume"]].concat())
            .expect(0)
            .says(&["resuming at step 2", "an interrupted save had left"]);
        lab.assert_same_run("whole", &run);
    }
}

/// Pieces that one save of the run consists of.
fn writes_of_a_save(lab: &Lab) -> usize {
    let done = lab.run_failing("counting", "ckpt.write:sleep=0ms", &["--stop-at", "0"]).expect(0);
    done.err.matches("failpoint ckpt.write").count()
}

#[test]
fn one_that_fails_is_told_of_and_training_goes_on() {
    let lab = Lab::new();
    lab.reference("whole", &[]);
    let args = [&ASYNC[..], &["--set", "checkpoint.every=2"]].concat();
    for (run, fail, why) in [
        ("full", "ckpt.before_commit:enospc@2", "No space left on device"),
        ("panic", "ckpt.before_manifest:panic@2", "the thread that wrote the checkpoint panicked"),
    ] {
        let done = lab.run_failing(run, fail, &args).expect(0);
        done.says(&["warning: step 4 could not be saved", why, "training goes on"]);
        assert_eq!(lab.steps(run), [8, 6, 2]);
        let failed = events_of(&lab, run, "checkpoint_failed");
        assert_eq!(failed.keys().copied().collect::<Vec<_>>(), [4]);
        assert_eq!(failed[&4]["checkpoint_failures"], 1);
        assert_eq!(events_of(&lab, run, "checkpoint_saved").keys().copied().collect::<Vec<_>>(), [2, 6, 8]);
        assert_eq!(lab.metrics(run)[7]["checkpoint_failures"], 1);
        lab.assert_same_state("whole", run, 8);
    }
    // The save in flight fails when the run ends at its step: it is made once more.
    let done = lab.run_failing("again", "ckpt.before_commit:enospc@2", &[&args[..], &["--stop-at", "5"]].concat()).expect(0);
    done.says(&["step 4 could not be saved"]);
    assert_eq!(lab.steps("again"), [5, 2]);
}

#[test]
fn a_signal_waits_for_it() {
    let lab = Lab::new();
    lab.reference("whole", &[]);
    let args = [&ASYNC[..], &["--set", "checkpoint.every=2"]].concat();
    let fail = "ckpt.before_commit:sleep=700ms@1,micro_batch:sleep=60ms";
    let mut running = Running::start(lab.command("run", &args).env("ZAYA_FAIL", fail));
    running.wait_for("failpoint ckpt.before_commit");
    running.signal(libc::SIGTERM);
    running.finish().expect(143).says(&["stopped by a signal, saved"]);
    let steps = lab.steps("run");
    assert!(steps == [2] || steps == [3, 2], "{steps:?}");
    assert_eq!(events_of(&lab, "run", "checkpoint_saved").len(), steps.len());
    lab.run("run", &["--resume"]).expect(0);
    lab.assert_same_run("whole", "run");
}

#[test]
fn ranks_wait_for_a_save_longer_than_for_each_other() {
    let lab = Lab::new();
    let ranks = ["--ranks", "2", "--set", "parallel.ep=2", "--set", "parallel.timeout=2s"];
    lab.reference("whole", &[&ranks[..], &SYNC].concat());
    let args = [&ranks[..], &ASYNC, &["--set", "checkpoint.every=3"]].concat();
    lab.run_failing("slow", "ckpt.before_manifest:sleep=4s@1", &args).expect(0);
    assert_eq!(lab.steps("slow"), [8, 6, 3]);
    for step in [3, 6, 8] {
        lab.assert_same_state("whole", "slow", step);
    }
    assert!(number(&events_of(&lab, "slow", "checkpoint_saved")[&6], "wait_s") > 2.0);
}

#[test]
fn its_memory_is_planned() {
    let lab = Lab::new();
    let row = |args: &[&str]| -> Option<String> {
        let out = String::from_utf8(lab.command("plan", &[&["--dry-run"], args].concat()).output().unwrap().stdout).unwrap();
        out.lines().find(|l| l.starts_with("checkpoint staging (f32)")).map(str::to_string)
    };
    assert!(row(&[]).is_some());
    assert_eq!(row(&SYNC), None);
    assert_eq!(row(&["--set", "checkpoint.every=8"]), None, "the last one is written from the state itself");
}
