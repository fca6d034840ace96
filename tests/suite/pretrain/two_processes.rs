//! Two processes in one run directory.

use super::*;

#[test]
fn the_second_is_refused_and_the_first_goes_on() {
    let lab = Lab::new();
    lab.reference("whole", &[]);
    let mut first = Running::start(lab.command("run", &[]).env("ZAYA_FAIL", "micro_batch:sleep=60ms"));
    let pid = format!("(process {})", first.child.id());
    // Before anything is saved, and afterwards.
    first.wait_for("failpoint micro_batch");
    let busy = ["is training in", "right now", "wait for it or stop it", &pid];
    lab.run("run", &[]).expect(2).says(&busy);
    for _ in 0..4 {
        first.wait_for("failpoint micro_batch");
    }
    lab.run("run", &["--resume"]).expect(2).says(&busy);
    lab.run("run", &[]).expect(2).says(&["already holds a checkpoint"]);
    first.finish().expect(0);
    lab.assert_same_run("whole", "run");
    assert_eq!(lab.metrics("run").len(), 8, "each step once");
    // The lock went with its process.
    lab.run("run", &["--resume"]).expect(0).says(&["nothing left to do"]);
}

#[test]
fn of_two_that_start_at_once_one_trains() {
    let lab = Lab::new();
    lab.reference("whole", &[]);
    for round in 0..3 {
        let run = format!("run-{round}");
        let start = || Running::start(lab.command(&run, &[]).env("ZAYA_FAIL", "micro_batch:sleep=20ms"));
        let (a, b) = (start(), start());
        let (a, b) = (a.finish(), b.finish());
        assert_eq!([a.code.min(b.code), a.code.max(b.code)], [Some(0), Some(2)], "{a:?}\n{b:?}");
        lab.assert_same_run("whole", &run);
        assert_eq!(lab.metrics(&run).len(), 8);
    }
}
