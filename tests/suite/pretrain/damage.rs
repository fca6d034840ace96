//! Damaged checkpoints, full disks, old checkpoints that go, losses that are no numbers.

use super::*;

#[test]
fn a_damaged_newest_checkpoint_is_passed_over_with_a_reason() {
    Lab::both().iter().for_each(a_damaged_newest_checkpoint_is_passed_over_with_a_reason_in);
}

fn a_damaged_newest_checkpoint_is_passed_over_with_a_reason_in(lab: &Lab) {
    lab.reference("whole", &[]);
    type Harm = fn(&Path);
    let harms: [(&str, &str, Harm); 5] = [
        ("bit", "damaged", |d| flip_a_bit(&d.join("optimizer-00000.safetensors"))),
        ("manifest", "manifest", |d| flip_a_bit(&d.join("manifest.json"))),
        ("absent", "manifest.json", |d| fs::remove_file(d.join("manifest.json")).unwrap()),
        ("short", "bytes", |d| {
            let path = d.join("weights-00000.safetensors");
            let bytes = fs::read(&path).unwrap();
            fs::write(&path, &bytes[..bytes.len() - 3]).unwrap();
        }),
        ("empty", "step-00000005", |d| {
            fs::remove_dir_all(d).unwrap();
            fs::create_dir(d).unwrap();
        }),
    ];
    lab.run("start", &["--stop-at", "5"]).expect(0);
    for (run, reason, harm) in harms {
        copy_dir(&lab.path("start"), &lab.path(run));
        harm(&lab.path(run).join("ckpt/step-00000005"));
        let done = lab.run(run, &["--resume"]).expect(0);
        done.says(&["warning: skipped", "step-00000005", reason, "resuming at step 4 of 8"]);
        lab.assert_same_run("whole", run);
        // Saved anew in place of the damaged one.
        lab.checkpoint(run, 5).verify().unwrap();
        lab.assert_same_state("whole", run, 5);
    }
}

#[test]
fn only_damaged_checkpoints_are_refused() {
    let lab = Lab::new();
    lab.run("run", &["--stop-at", "2"]).expect(0);
    for step in ["1", "2"] {
        flip_a_bit(&lab.path("run").join(format!("ckpt/step-0000000{step}/weights-00000.safetensors")));
    }
    let before = snapshot(&lab.path("run/ckpt"));
    let done = lab.run("run", &["--resume"]).expect(1);
    done.says(&["holds 2 checkpoints, and none of them is valid", "Move them away to start at step 0", "step-00000001"]);
    assert_eq!(snapshot(&lab.path("run/ckpt")), before);
}

#[test]
fn old_checkpoints_go_as_the_recipe_says() {
    Lab::both().iter().for_each(old_checkpoints_go_as_the_recipe_says_in);
}

fn old_checkpoints_go_as_the_recipe_says_in(lab: &Lab) {
    let sets = ["--set", "train.steps=10", "--set", "checkpoint.keep_last=2", "--set", "checkpoint.keep_every=4"];
    lab.run("run", &[&sets[..], &["--stop-at", "5"]].concat()).expect(0);
    assert_eq!(lab.steps("run"), [5, 4]);
    lab.run("run", &[&sets[..], &["--resume", "--stop-at", "7"]].concat()).expect(0);
    assert_eq!(lab.steps("run"), [7, 6, 5, 4], "5 is where this process began");
    fs::write(lab.path("run/ckpt/step-00000006/PIN"), "").unwrap();
    fs::create_dir(lab.path("run/ckpt/step-00000003.mine")).unwrap();
    lab.run("run", &[&sets[..], &["--resume"]].concat()).expect(0);
    assert_eq!(lab.steps("run"), [10, 9, 8, 7, 6, 4]);
    assert!(lab.path("run/ckpt/step-00000003.mine").is_dir());
}

#[test]
fn a_full_disk_at_a_save_does_not_end_training() {
    Lab::both().iter().for_each(a_full_disk_at_a_save_does_not_end_training_in);
}

fn a_full_disk_at_a_save_does_not_end_training_in(lab: &Lab) {
    lab.reference("whole", &[]);
    for (run, fail) in
        [("write", "ckpt.write:enospc@1"), ("manifest", "ckpt.manifest_write:enospc@1"), ("error", "ckpt.begin:error@1")]
    {
        let done = lab.run_failing(run, fail, &["--set", "checkpoint.every=3"]).expect(0);
        done.says(&["warning: step 3 could not be saved", "training goes on"]);
        assert_eq!(lab.steps(run), [8, 6]);
        lab.assert_same_state("whole", run, 8);
        let failures: Vec<Option<u64>> =
            lab.metrics(run).iter().map(|l| l.get("checkpoint_failures").and_then(Value::as_u64)).collect();
        let told = failures.iter().position(Option::is_some).unwrap();
        assert!(told == 3 || lab.background == Some(true) && (3..=6).contains(&told), "{failures:?}");
        assert_eq!(failures, [vec![None; told], vec![Some(1); 8 - told]].concat());
        let events: Vec<_> = lab.events(run).into_iter().filter(|e| e["event"] == "checkpoint_failed").collect();
        assert_eq!(events.len(), 1);
        assert_eq!((events[0]["event"].as_str(), events[0]["at_step"].as_u64()), (Some("checkpoint_failed"), Some(3)));
        assert!(events[0]["error"].as_str().unwrap().contains("step-00000003"), "{events:?}");
    }
}

#[test]
fn a_full_disk_at_the_last_save_is_a_failure() {
    Lab::both().iter().for_each(a_full_disk_at_the_last_save_is_a_failure_in);
}

fn a_full_disk_at_the_last_save_is_a_failure_in(lab: &Lab) {
    lab.reference("whole", &[]);
    let done = lab.run_failing("run", "ckpt.write:enospc", &["--set", "checkpoint.every=5", "--stop-at", "4"]).expect(1);
    done.says(&["step 4 could not be saved", "No space left on device"]);
    assert!(lab.steps("run").is_empty());
    let done = lab.run_failing("run", "ckpt.begin:enospc@3", &["--resume", "--set", "checkpoint.every=3"]).expect(1);
    done.says(&["error: step 8 could not be saved"]);
    assert_eq!(lab.steps("run"), [6, 3]);
    lab.checkpoint("run", 6).verify().unwrap();
    lab.run("run", &["--resume"]).expect(0).says(&["resuming at step 6"]);
    lab.assert_same_state("whole", "run", 8);
}

#[test]
fn a_loss_that_is_no_number_ends_the_run_and_spares_the_checkpoints() {
    Lab::both().iter().for_each(a_loss_that_is_no_number_ends_the_run_and_spares_the_checkpoints_in);
}

fn a_loss_that_is_no_number_ends_the_run_and_spares_the_checkpoints_in(lab: &Lab) {
    lab.reference("whole", &[]);
    lab.run("run", &["--stop-at", "3"]).expect(0);
    // A learning rate that takes the weights out of every range, and one that is beyond f32 itself.
    for (lr, every) in [("1e37", "100"), ("1e39", "1")] {
        let (lr, every) = (format!("schedule.lr={lr}"), format!("checkpoint.every={every}"));
        let done = lab.run("run", &["--resume", "--set", &lr, "--set", "schedule.kind=constant", "--set", &every]).expect(1);
        let done = done.says(&["not a finite number", "lower learning rate"]);
        // Weights that are no numbers are not saved.
        if every.ends_with("=1") {
            done.says(&["warning: step 4 could not be saved", "holds numbers that are not finite"]);
        }
        assert_eq!(lab.steps("run")[0], 3);
        lab.checkpoint("run", 3).verify().unwrap();
    }
    lab.run("run", &["--resume"]).expect(0).says(&["resuming at step 3"]);
    lab.assert_same_state("whole", "run", 8);
}
