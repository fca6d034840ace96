//! `--profile`: the trace of a few steps, and the table at the end.

use super::*;

/// The program's exit code and what it printed on stdout.
fn profiled(command: &mut Command) -> (Option<i32>, String) {
    let out = command.stdin(Stdio::null()).output().unwrap();
    (out.status.code(), String::from_utf8_lossy(&out.stdout).into_owned())
}

/// Names of the trace's spans of one kind, in order of time.
fn spans(path: &Path, category: &str) -> Vec<String> {
    let document: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    let mut spans: Vec<(f64, String)> = document["traceEvents"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|e| e["ph"] == "X" && e["cat"] == category)
        .map(|e| (e["ts"].as_f64().unwrap(), e["name"].as_str().unwrap().to_string()))
        .collect();
    spans.sort_by(|a, b| a.0.total_cmp(&b.0));
    spans.into_iter().map(|(_, name)| name).collect()
}

#[test]
fn steps_three_to_five_are_recorded_and_nothing_else_changes() {
    let lab = Lab::new();
    lab.reference("plain", &[]);
    let (code, out) = profiled(&mut lab.command("profiled", &["--profile"]));
    assert_eq!(code, Some(0));
    let path = lab.path("profiled/profile.json");
    let step = ["step", "data", "forward and backward", "AdamW update", "Muon update"];
    assert_eq!(spans(&path, "phase"), [step, step, step].concat());
    for piece in
        ["profile of steps 3 to 5", "verb", "of limit", "outside of verbs: forward and backward", "whole step", "profile.json"]
    {
        assert!(out.contains(piece), "no `{piece}` in:\n{out}");
    }
    lab.assert_same_run("plain", "profiled");
}

#[test]
fn a_short_run_has_its_last_steps_recorded_wherever_the_trace_is_to_go() {
    let lab = Lab::new();
    for (steps, recorded, said) in [("4", 2, "steps 3 to 4"), ("2", 1, "steps 2 to 2")] {
        let path = lab.path("trace.json");
        let (code, out) = profiled(lab.command(steps, &["--stop-at", steps, "--profile"]).arg(&path));
        assert_eq!(code, Some(0));
        assert_eq!(spans(&path, "phase").iter().filter(|name| *name == "step").count(), recorded);
        assert!(out.contains(said) && out.contains("trace.json"), "{out}");
        assert!(!lab.path(steps).join("profile.json").exists());
    }
    lab.run("none", &["--profile", "no/such/folder/trace.json"])
        .expect(2)
        .says(&["no/such/folder/trace.json", "cannot be written"]);
    assert!(!lab.path("none").exists());
}

#[test]
fn a_profile_follows_the_run_into_its_next_stages() {
    let stages = "[[stages]]\nname = \"x\"\nsteps = 4\n[[stages]]\nname = \"y\"\nsteps = 2\nseq_len = 32\nmicro_batch = 1\n";
    let lab = Lab::with(&format!("{RECIPE}{stages}"));
    lab.reference("plain", &[]);
    // Steps 3 and 4 are of the one stage, 5 is of the other. Resumed after step 3, the third step of the process is the other's last.
    for (run, args, steps, said) in [
        ("whole", &[][..], 3, "profile of steps 3 to 5"),
        ("rest", &["--resume"], 1, "profile of steps 3 to 3"),
        ("stopped", &["--stop-at", "4"], 2, "profile of steps 3 to 4"),
    ] {
        if run == "rest" {
            lab.run(run, &["--stop-at", "3"]).expect(0);
        }
        let (code, out) = profiled(&mut lab.command(run, &[args, &["--profile"]].concat()));
        assert_eq!(code, Some(0), "{run}");
        assert!(out.matches("profile of steps").count() == 1, "{run}: {out}");
        let recorded = spans(&lab.path(run).join("profile.json"), "phase").iter().filter(|name| *name == "step").count();
        assert!(recorded == steps && out.contains(said), "{run}: {recorded} steps, {out}");
        if run != "stopped" {
            lab.assert_same_run("plain", run);
        }
    }
}

#[test]
fn a_run_that_fails_to_write_its_trace_goes_on() {
    let lab = Lab::new();
    fs::create_dir_all(lab.path("run/profile.json.tmp")).unwrap();
    lab.run("run", &["--profile"]).expect(0).says(&["warning: writing", "training goes on without the trace"]);
    assert_eq!(lab.steps("run")[0], 8);
}
