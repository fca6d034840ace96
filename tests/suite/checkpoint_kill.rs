//! A save is killed, or fails, at every point of its protocol. Whatever happens there is a valid checkpoint, nothing wrong is
//! ever loaded, and the next save works.

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, ExitStatus};

use zaya::checkpoint::{self, Checkpoint, RetainPolicy, SaveOptions};
use zaya::failpoint::{self, Kind, POINTS, Point};

use super::checkpoint::{assert_is_toy, save_toy_with, tiny};

const CHILD: &str = "checkpoint_kill::child_that_saves";
const ROOT: &str = "ZAYA_TEST_KILL_ROOT";
/// Set when the child saves with a pool.
const POOL: &str = "ZAYA_TEST_KILL_POOL";
/// The child's exit code when a save of it returned an error.
const SAVE_FAILED: i32 = 41;

/// Not a test of its own: the process that the others start and kill. It saves a new step, saves it again in another version,
/// and lets retention run.
#[test]
fn child_that_saves() {
    let Some(root) = std::env::var_os(ROOT) else { return };
    let root = Path::new(&root);
    failpoint::init().unwrap();
    let pool = std::env::var_os(POOL).is_some();
    let work = || -> anyhow::Result<()> {
        save_toy(root, 300, 31, pool)?;
        if pool {
            // Once more: nothing of it is written.
            save_toy(root, 300, 31, pool)?;
        }
        save_toy(root, 300, 32, pool)?;
        checkpoint::retain(root, &RetainPolicy { keep_last: 2, ..RetainPolicy::default() })?;
        checkpoint::collect_garbage(root)?;
        Ok(())
    };
    if let Err(e) = work() {
        eprintln!("{e:#}");
        std::process::exit(SAVE_FAILED);
    }
}

fn save_toy(root: &Path, step: u64, version: u64, pool: bool) -> anyhow::Result<()> {
    save_toy_with(root, step, version, &SaveOptions { pool, ..tiny() }).map(drop)
}

fn run_child(root: &Path, fail: &str, pool: bool) -> ExitStatus {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", CHILD, "--nocapture", "--test-threads=1"]).env(ROOT, root).env("ZAYA_FAIL", fail);
    if pool {
        child.env(POOL, "1");
    }
    let out = child.output().unwrap();
    let text = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(text.contains("failpoints are armed"), "{fail}: {text}");
    out.status
}

/// Steps 100 and 200, valid.
fn prepare(root: &Path, pool: bool) {
    save_toy(root, 100, 1, pool).unwrap();
    save_toy(root, 200, 2, pool).unwrap();
}

/// The points that a child passes; those of the pool only with one.
fn points(pool: bool) -> impl Iterator<Item = &'static Point> {
    POINTS.iter().filter(move |p| p.name.starts_with("ckpt.") && (pool || !p.name.starts_with("ckpt.pool")))
}

const WAYS: [bool; 2] = [false, true];

/// What must hold whatever happened to the child. Returns the newest valid step.
fn check(root: &Path, fail: &str) -> u64 {
    // Retention keeps the newest two, and 200 is always one of them.
    let c = Checkpoint::open(&root.join("step-00000200")).unwrap();
    c.verify().unwrap();
    assert_is_toy(&c, 2);
    let found = checkpoint::latest_valid(root).unwrap();
    let c = found.checkpoint.unwrap_or_else(|| panic!("{fail}: no valid checkpoint"));
    let step = c.meta().step;
    match step {
        200 => {}
        300 => {
            // One version or the other, never a mixture.
            let version = c.meta().get_u64("version").unwrap();
            assert!(version == 31 || version == 32, "{fail}: version {version}");
            assert_is_toy(&c, version);
        }
        other => panic!("{fail}: step {other}"),
    }
    step
}

/// The run goes on: the same step again, and the next one. Then nothing of the accident is left.
fn go_on(root: &Path, fail: &str, pool: bool) {
    save_toy(root, 300, 33, pool).unwrap_or_else(|e| panic!("{fail}: {e:#}"));
    save_toy(root, 400, 4, pool).unwrap_or_else(|e| panic!("{fail}: {e:#}"));
    checkpoint::retain(root, &RetainPolicy { keep_last: 2, ..RetainPolicy::default() }).unwrap();
    checkpoint::collect_garbage(root).unwrap();
    let mut held: Vec<String> = Vec::new();
    for (step, version) in [(400, 4), (300, 33)] {
        let c = Checkpoint::open(&root.join(checkpoint::step_dir(step))).unwrap();
        c.verify().unwrap();
        assert_is_toy(&c, version);
        assert_eq!(std::fs::read_dir(c.dir()).unwrap().count(), c.manifest().files.len() + 1, "{fail}");
        held.extend(c.manifest().files.iter().map(|f| f.blake3.clone()));
    }
    held.sort();
    held.dedup();
    let mut names: Vec<String> =
        std::fs::read_dir(root).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    let objects = if pool { &["objects"][..] } else { &[] };
    assert_eq!(names, [&[".lock", "LATEST"], objects, &["step-00000300", "step-00000400"]].concat(), "{fail}");
    if pool {
        assert_eq!(super::checkpoint::objects(root), held, "{fail}: the pool holds what the checkpoints do");
    }
    assert_eq!(std::fs::read_to_string(root.join("LATEST")).unwrap(), "step-00000400\n");
}

/// The n-th hits of a point to try: all, but of the many equal writes only some.
fn hits(point: &str) -> impl Iterator<Item = u64> {
    let many = point == "ckpt.write";
    (1..).filter(move |n| !many || *n <= 3 || n % 5 == 0)
}

#[test]
fn killed_at_every_point() {
    let mut killed = 0;
    let mut newest_seen = std::collections::BTreeSet::new();
    for (pool, point) in WAYS.into_iter().flat_map(|pool| points(pool).map(move |p| (pool, p))) {
        for n in hits(point.name) {
            let run = tempfile::tempdir().unwrap();
            let root = run.path().join("ckpt");
            prepare(&root, pool);
            let fail = format!("{}:kill@{n}", point.name);
            let status = run_child(&root, &fail, pool);
            if status.success() {
                // The child never came to an n-th hit: this point is done. It must have been reached once.
                assert!(n > 1, "{} is never reached", point.name);
                break;
            }
            assert_eq!(status.signal(), Some(libc::SIGKILL), "{fail}: {status}");
            newest_seen.insert(check(&root, &fail));
            go_on(&root, &fail, pool);
            killed += 1;
        }
    }
    assert!(killed > 100, "only {killed} kills");
    assert_eq!(newest_seen.into_iter().collect::<Vec<_>>(), [200, 300]);
    println!("killed {killed} times, recovered {killed} times");
}

#[test]
fn errors_and_a_full_disk_at_every_point() {
    for (pool, point) in WAYS.into_iter().flat_map(|pool| points(pool).map(move |p| (pool, p))) {
        for action in ["error", "enospc"] {
            let run = tempfile::tempdir().unwrap();
            let root = run.path().join("ckpt");
            prepare(&root, pool);
            let fail = format!("{}:{action}@1", point.name);
            let status = run_child(&root, &fail, pool);
            // What goes wrong with the hint or with retention is a note; everything else is the save's error.
            let harmless = point.name.contains("latest") || point.name.contains("retain");
            assert_eq!(status.code(), Some(if harmless { 0 } else { SAVE_FAILED }), "{fail}");
            check(&root, &fail);
            if !harmless {
                // What the failed save wrote is gone at once, not only at the next save.
                let tmp = std::fs::read_dir(&root).unwrap().any(|e| e.unwrap().file_name().to_str().unwrap().contains("tmp"));
                assert!(!tmp, "{fail} left a temporary folder");
            }
            go_on(&root, &fail, pool);
        }
    }
}

#[test]
fn lost_bytes_and_flipped_bits_are_seen() {
    for point in POINTS.iter().filter(|p| p.kind == Kind::Write && p.name.starts_with("ckpt.")) {
        // A hit without n: both versions of step 300 are hit.
        for (pool, (action, code)) in
            WAYS.into_iter().flat_map(|pool| [("bitflip", 0), ("partial", SAVE_FAILED)].map(|a| (pool, a)))
        {
            let run = tempfile::tempdir().unwrap();
            let root = run.path().join("ckpt");
            prepare(&root, pool);
            let fail = format!("{}:{action}", point.name);
            let status = run_child(&root, &fail, pool);
            // A short file and a damaged manifest are noticed while saving. A wrong bit in a tensor is not: it is found when
            // the checkpoint is to be used.
            let code = if point.name == "ckpt.manifest_write" { SAVE_FAILED } else { code };
            assert_eq!(status.code(), Some(code), "{fail}");
            assert_eq!(check(&root, &fail), 200, "{fail}");
            go_on(&root, &fail, pool);
        }
    }
}

#[test]
fn slow_disk_and_exit() {
    let run = tempfile::tempdir().unwrap();
    let root = run.path().join("ckpt");
    prepare(&root, false);
    let started = std::time::Instant::now();
    assert!(run_child(&root, "ckpt.before_manifest:sleep=150ms", false).success());
    assert!(started.elapsed().as_millis() >= 300);
    assert_eq!(check(&root, "sleep"), 300);
    assert_eq!(run_child(&root, "ckpt.begin:exit=3", false).code(), Some(3));
    go_on(&root, "exit", false);
}
