//! Generated programs in the sandbox: the right verdicts, and nothing of them survives.

use std::time::{Duration, Instant};

use serde_json::Value;
use zaya::eval::harness::score::code::{CodeRunner, Verdict};
use zaya::eval::sandbox::{Limits, Sandbox};

use super::support::{fixtures, records};

fn sandbox(folder: &std::path::Path) -> Sandbox {
    Sandbox::new(Limits { cpu_seconds: 2, wall: Duration::from_secs(20), ..Limits::default() }).with_folder(folder.into())
}

/// Prompt and check of HumanEval/0, from a sample record.
fn problem() -> (String, String) {
    let (record, _) = records(&fixtures().join("samples_humaneval.jsonl")).remove(0);
    let text = |v: &Value| v.as_str().unwrap().to_string();
    (text(&record["doc"]["prompt"]), text(&record["target"]))
}

/// Whether this machine has Python at all; a sentence where not.
fn has_python(sandbox: &Sandbox) -> bool {
    let has = sandbox.run("", "").unwrap() != Verdict::NoPython;
    if !has {
        eprintln!("skipped: no python3 in PATH");
    }
    has
}

#[test]
fn cases_get_the_right_verdicts() {
    let folder = tempfile::tempdir().unwrap();
    let sandbox = sandbox(folder.path());
    if !has_python(&sandbox) {
        return;
    }
    let (prompt, check) = problem();
    let mut tried = 0;
    for (case, _) in records(&fixtures().join("humaneval_exec_cases.jsonl")) {
        let verdict = sandbox.run(&format!("{prompt}{}", case["completion"].as_str().unwrap()), &check).unwrap();
        let right = case["right_verdict"].as_str().unwrap();
        let want = match case["case"].as_str().unwrap() {
            "infinite_loop" | "swallow_timeout" => Verdict::Timeout,
            _ if right.starts_with("pass") => Verdict::Pass,
            _ => Verdict::Fail,
        };
        assert_eq!(verdict, want, "{case}");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "files are left of {case}");
        tried += 1;
    }
    assert_eq!(tried, 23);
}

#[test]
fn nothing_survives_and_nobody_is_reached() {
    let folder = tempfile::tempdir().unwrap();
    let sandbox = sandbox(folder.path());
    if !has_python(&sandbox) {
        return;
    }
    let check = "def check(f):\n    assert f() == 1\n\ncheck(f)";
    // A child in a session of its own would write a file outside, a second later.
    let mark = folder.path().join("mark");
    let orphan = format!(
        "import os, time\ndef f():\n    if os.fork() == 0:\n        os.setsid()\n        if os.fork() == 0:\n            time.sleep(1)\n            open({:?}, 'w').write('x')\n        os._exit(0)\n    return 1\n",
        mark.display().to_string()
    );
    sandbox.run(&orphan, check).unwrap();
    std::thread::sleep(Duration::from_millis(1500));
    assert!(!mark.exists(), "a process outlived its program");
    let exits_with_token = "import os\ndef f():\n    os.write(3, b'0' * 32)\n    os._exit(0)\n";
    assert_eq!(sandbox.run(exits_with_token, check).unwrap(), Verdict::Fail);
    let hungry = "def f():\n    x = bytearray(1 << 40)\n    return 1\n";
    assert_eq!(sandbox.run(hungry, check).unwrap(), Verdict::Fail);
    let crash = "import ctypes\ndef f():\n    ctypes.string_at(0)\n    return 1\n";
    assert_ne!(sandbox.run(crash, check).unwrap(), Verdict::Pass);
    let locked = "import os\ndef f():\n    os.mkdir('d')\n    open('d/x', 'w')\n    os.chmod('d', 0)\n    os.chmod('.', 0)\n    return 1\n";
    assert_eq!(sandbox.run(locked, check).unwrap(), Verdict::Pass);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn sleepers_end_by_the_wall_clock() {
    let folder = tempfile::tempdir().unwrap();
    let limits = Limits { wall: Duration::from_secs(1), ..Limits::default() };
    let sandbox = Sandbox::new(limits).with_folder(folder.path().into());
    if !has_python(&sandbox) {
        return;
    }
    let start = Instant::now();
    let verdict = sandbox.run("import time\ndef f():\n    time.sleep(60)\n", "def check(f):\n    f()\n\ncheck(f)").unwrap();
    assert_eq!(verdict, Verdict::Timeout);
    assert!(start.elapsed() < Duration::from_secs(20));
}
