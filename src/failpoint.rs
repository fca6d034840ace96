//! Failpoints: `ZAYA_FAIL=name:action[@n][/rank][,name:action...]` makes a named point of the program fail, so that the tests (and
//! anybody who wants to see it) can kill a run in the middle of a save. Inert unless set: one relaxed atomic load a point.
//!
//! | action | what happens at the point |
//! |---|---|
//! | `kill` | the process sends itself SIGKILL |
//! | `exit=3` | the process exits with that code at once, without cleaning up |
//! | `panic` | the thread panics |
//! | `error` | an I/O error (EIO) is returned |
//! | `enospc` | "no space left on device" is returned |
//! | `sleep=200ms` | the point waits (`ms` or `s`) |
//! | `partial` | only half of the bytes reach the file, and nobody is told (points that write) |
//! | `bitflip` | one bit of what is written is wrong, and nobody is told (points that write) |
//! | `nan`, `spike` | numbers are not a number, or 10,000 times too large (points of numbers) |
//!
//! `@n` restricts the action to the n-th hit of the point, counted from 1. A point with a number of its own (`step`) compares
//! `n` with that number: `step:kill@7` is step 7 also after a resume. `/rank1` restricts it to that rank of several; each rank counts
//! its own hits. The points are listed in [`POINTS`].

use std::cell::Cell;
use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};

use crate::error::{bad_input, did_you_mean};

/// What a failpoint's `@n` counts, and which actions it can take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// `@n` is the n-th time the point is reached.
    Counted,
    /// As `Counted`; bytes are about to be written, so `partial` and `bitflip` are possible.
    Write,
    /// `@n` is the point's own number, such as the step.
    Numbered,
    /// As `Numbered`; numbers are at hand, so `nan` and `spike` are possible.
    Numbers,
}

/// One place of the program that can be made to fail.
#[derive(Debug, Clone, Copy)]
pub struct Point {
    pub name: &'static str,
    pub kind: Kind,
    pub doc: &'static str,
}

const fn point(name: &'static str, kind: Kind, doc: &'static str) -> Point {
    Point { name, kind, doc }
}

/// Every point there is. `docs/CHECKPOINT.md` shows the same list.
pub const POINTS: &[Point] = &[
    point("step", Kind::Numbered, "a training step is about to begin; @n is its number"),
    point("comm", Kind::Counted, "an operation of several ranks is about to begin"),
    point("micro_batch", Kind::Counted, "a micro-batch of a training step is about to be computed"),
    point("gradient", Kind::Numbers, "a micro-batch's gradients are about to be computed; @n is the batch's number in the run"),
    point("loss", Kind::Numbers, "a micro-batch's loss is known; @n is the batch's number in the run"),
    point("guard.rollback", Kind::Counted, "a checkpoint is about to be gone back to"),
    point("eval", Kind::Counted, "a batch of held-out data is about to be scored"),
    point("eval.log", Kind::Counted, "a round of an evaluation's answers is about to be written to requests.log"),
    point("benchmarks", Kind::Counted, "a round of benchmark tasks is about to run in training"),
    point("ckpt.begin", Kind::Counted, "a save was asked for, nothing is on disk yet"),
    point("ckpt.tmp_created", Kind::Counted, "the temporary folder exists and is empty"),
    point("ckpt.write", Kind::Write, "a piece of a tensor file is about to be written"),
    point("ckpt.before_file_sync", Kind::Counted, "a tensor file is written, not yet synced"),
    point("ckpt.after_file", Kind::Counted, "a tensor file is written and synced"),
    point("ckpt.pool_take", Kind::Counted, "`checkpoint.incremental`: a file is about to be taken from the pool"),
    point("ckpt.pool_put", Kind::Counted, "`checkpoint.incremental`: a file that was written is about to be put into the pool"),
    point(
        "ckpt.pool_collect",
        Kind::Counted,
        "`checkpoint.incremental`: an object that no valid checkpoint holds is about to be deleted",
    ),
    point("ckpt.before_manifest", Kind::Counted, "all tensor files are safe, no manifest yet"),
    point("ckpt.manifest_write", Kind::Write, "manifest.json.tmp is about to be written"),
    point("ckpt.before_manifest_rename", Kind::Counted, "manifest.json.tmp is written and synced"),
    point("ckpt.before_commit", Kind::Counted, "the temporary folder is complete, not yet renamed"),
    point("ckpt.replace_file", Kind::Counted, "saving a step again: a new file moves beside the old ones"),
    point("ckpt.before_replace", Kind::Counted, "saving a step again: the new manifest is about to replace the old one"),
    point("ckpt.after_replace", Kind::Counted, "saving a step again: the new manifest holds, old files remain"),
    point("ckpt.after_commit", Kind::Counted, "the checkpoint is visible, its parent folder not yet synced"),
    point("ckpt.before_latest", Kind::Counted, "the checkpoint is visible, LATEST is old"),
    point("ckpt.before_latest_rename", Kind::Counted, "LATEST.tmp is written, not yet renamed"),
    point("upload.begin", Kind::Counted, "a checkpoint is about to be uploaded"),
    point("upload.file", Kind::Counted, "a file of an upload is about to be looked for and sent"),
    point("upload.after_file", Kind::Counted, "a file of an upload has arrived"),
    point("upload.before_manifest", Kind::Counted, "all files of an upload have arrived, its manifest has not"),
    point("upload.after_manifest", Kind::Counted, "the manifest of an upload was sent, the folder does not say so yet"),
    point("fetch.file", Kind::Counted, "a file is about to be fetched from a store"),
    point("fetch.before_manifest", Kind::Counted, "all files are fetched, the manifest is not"),
    point("fetch.before_commit", Kind::Counted, "a fetched checkpoint is verified and not yet renamed"),
    point("ckpt.retain", Kind::Counted, "an old checkpoint is about to be deleted"),
    point("ckpt.retain_renamed", Kind::Counted, "an old checkpoint has lost its name, its manifest is still there"),
    point("ckpt.retain_manifest_gone", Kind::Counted, "an old checkpoint has lost its manifest, its data is still there"),
    point("shard.before_publish", Kind::Counted, "a token shard is complete under temporary names"),
    point("shard.before_index", Kind::Counted, "a token shard has its names, but for the index"),
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Action {
    Kill,
    Panic,
    Exit(i32),
    Error,
    NoSpace,
    Sleep(Duration),
    Partial,
    BitFlip,
    NaN,
    Spike,
}

const ACTIONS: [&str; 10] = ["kill", "panic", "exit", "error", "enospc", "sleep", "partial", "bitflip", "nan", "spike"];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Rule {
    /// Index into `POINTS`.
    point: usize,
    action: Action,
    at: Option<u64>,
    rank: Option<usize>,
}

/// A parsed `ZAYA_FAIL` with its hit counters.
#[derive(Debug)]
struct Plan {
    rules: Vec<Rule>,
    /// By point and rank.
    hits: Mutex<BTreeMap<(usize, usize), u64>>,
}

thread_local! {
    static RANK: Cell<usize> = const { Cell::new(0) };
}

/// Says which rank this thread works for.
pub fn set_rank(rank: usize) {
    RANK.set(rank);
}

static ARMED: AtomicBool = AtomicBool::new(false);
static PLAN: OnceLock<Plan> = OnceLock::new();

/// How a write is to go wrong without anybody being told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WriteFault {
    None,
    /// Only the first half of the bytes reaches the file.
    Partial,
    /// One bit of the bytes is inverted.
    BitFlip,
}

/// What numbers are to become.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NumberFault {
    None,
    NaN,
    /// 10,000 times as large.
    Spike,
}

/// How a point goes wrong for whoever passes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    None,
    Write(WriteFault),
    Number(NumberFault),
}

/// Reads `ZAYA_FAIL`. Call once, before anything else; without the variable every point stays inert.
///
/// # Errors
/// `BadInput` when the variable is malformed or names a point that does not exist.
pub fn init() -> Result<()> {
    let Some(text) = std::env::var_os("ZAYA_FAIL") else { return Ok(()) };
    let text = text.into_string().map_err(|_| bad_input("ZAYA_FAIL is not valid UTF-8"))?;
    if text.trim().is_empty() {
        return Ok(());
    }
    let plan = Plan::parse(&text)?;
    if PLAN.set(plan).is_ok() {
        ARMED.store(true, Ordering::Relaxed);
        tell!("failpoints are armed: ZAYA_FAIL={text}");
    }
    Ok(())
}

/// Passes a point of kind `Counted`.
///
/// # Errors
/// The failure that `ZAYA_FAIL` asks for.
#[inline]
pub fn hit(name: &str) -> Result<()> {
    if !ARMED.load(Ordering::Relaxed) {
        return Ok(());
    }
    pass(name, None).map(|_| ())
}

/// Passes a point of kind `Numbered`, whose number now is `n`.
///
/// # Errors
/// The failure that `ZAYA_FAIL` asks for.
#[inline]
pub fn hit_at(name: &str, n: u64) -> Result<()> {
    if !ARMED.load(Ordering::Relaxed) {
        return Ok(());
    }
    pass(name, Some(n)).map(|_| ())
}

/// Passes a point of kind `Write`; the caller applies the fault to the bytes it is about to write.
///
/// # Errors
/// The failure that `ZAYA_FAIL` asks for.
#[inline]
pub fn hit_write(name: &str) -> Result<WriteFault> {
    if !ARMED.load(Ordering::Relaxed) {
        return Ok(WriteFault::None);
    }
    Ok(match pass(name, None)? {
        Fault::Write(fault) => fault,
        _ => WriteFault::None,
    })
}

/// Passes a point of kind `Numbers`, whose number now is `n`; the caller applies the fault.
///
/// # Errors
/// The failure that `ZAYA_FAIL` asks for.
#[inline]
pub fn hit_number(name: &str, n: u64) -> Result<NumberFault> {
    if !ARMED.load(Ordering::Relaxed) {
        return Ok(NumberFault::None);
    }
    Ok(match pass(name, Some(n))? {
        Fault::Number(fault) => fault,
        _ => NumberFault::None,
    })
}

fn pass(name: &str, number: Option<u64>) -> Result<Fault> {
    let Some(plan) = PLAN.get() else { return Ok(Fault::None) };
    match plan.action_at(name, number, RANK.get()) {
        Some(action) => perform(name, action),
        None => Ok(Fault::None),
    }
}

fn perform(name: &str, action: Action) -> Result<Fault> {
    tell!("failpoint {name}: {action:?}");
    match action {
        Action::Kill => {
            // SIGKILL and not abort(): no handler, no destructor and no buffer gets a chance, as with `kill -9`.
            unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
            loop {
                std::thread::park();
            }
        }
        Action::Panic => panic!("failpoint {name}"),
        Action::Exit(code) => unsafe { libc::_exit(code) },
        Action::Error => Err(io::Error::from_raw_os_error(libc::EIO)).with_context(|| format!("failpoint {name}")),
        Action::NoSpace => Err(io::Error::from_raw_os_error(libc::ENOSPC)).with_context(|| format!("failpoint {name}")),
        Action::Sleep(time) => {
            std::thread::sleep(time);
            Ok(Fault::None)
        }
        Action::Partial => Ok(Fault::Write(WriteFault::Partial)),
        Action::BitFlip => Ok(Fault::Write(WriteFault::BitFlip)),
        Action::NaN => Ok(Fault::Number(NumberFault::NaN)),
        Action::Spike => Ok(Fault::Number(NumberFault::Spike)),
    }
}

impl Plan {
    fn parse(text: &str) -> Result<Self> {
        let rules = text
            .split(',')
            .map(|item| parse_rule(item.trim()).map_err(|why| bad_input(format!("ZAYA_FAIL={text}: {why}"))))
            .collect::<Result<_>>()?;
        Ok(Self { rules, hits: Mutex::default() })
    }

    /// What is to happen now at this point; counts the hit.
    fn action_at(&self, name: &str, number: Option<u64>, rank: usize) -> Option<Action> {
        let point = POINTS.iter().position(|p| p.name == name)?;
        let n = {
            let mut hits = self.hits.lock().unwrap_or_else(PoisonError::into_inner);
            let hits = hits.entry((point, rank)).or_default();
            *hits += 1;
            number.unwrap_or(*hits)
        };
        let fits = |r: &&Rule| r.point == point && r.at.is_none_or(|at| at == n) && r.rank.is_none_or(|of| of == rank);
        self.rules.iter().find(fits).map(|r| r.action)
    }
}

fn parse_rule(item: &str) -> std::result::Result<Rule, String> {
    let Some((name, rest)) = item.split_once(':') else {
        return Err(format!("`{item}` is not of the form name:action[@n]"));
    };
    let Some(point) = POINTS.iter().position(|p| p.name == name) else {
        let names: Vec<&str> = POINTS.iter().map(|p| p.name).collect();
        let hint = did_you_mean(name, names.iter().copied());
        return Err(format!("no failpoint is called `{name}`{hint}; there are: {}", names.join(", ")));
    };
    let kind = POINTS[point].kind;
    let (rest, rank) = match rest.split_once('/') {
        None => (rest, None),
        Some((rest, of)) => match of.strip_prefix("rank").and_then(|n| n.parse().ok()) {
            Some(rank) => (rest, Some(rank)),
            None => return Err(format!("`/{of}` in `{item}` is not a rank, as in /rank1")),
        },
    };
    let (action_text, at) = match rest.split_once('@') {
        None => (rest, None),
        Some((action, n)) => {
            let n: u64 = n.parse().map_err(|_| format!("`@{n}` in `{item}` is not a whole number"))?;
            if n == 0 && !matches!(kind, Kind::Numbered | Kind::Numbers) {
                return Err(format!("`@0` in `{item}`: hits are counted from 1"));
            }
            (action, Some(n))
        }
    };
    let action = parse_action(action_text).map_err(|why| format!("{why} in `{item}`"))?;
    let needs = match action {
        Action::Partial | Action::BitFlip => Some((Kind::Write, "a point that writes")),
        Action::NaN | Action::Spike => Some((Kind::Numbers, "a point of numbers")),
        _ => None,
    };
    if let Some((needed, what)) = needs.filter(|(needed, _)| *needed != kind) {
        let able: Vec<&str> = POINTS.iter().filter(|p| p.kind == needed).map(|p| p.name).collect();
        return Err(format!("`{action_text}` needs {what} ({}), `{name}` is not one", able.join(", ")));
    }
    Ok(Rule { point, action, at, rank })
}

fn parse_action(text: &str) -> std::result::Result<Action, String> {
    let (word, value) = match text.split_once('=') {
        Some((word, value)) => (word, Some(value)),
        None => (text, None),
    };
    match (word, value) {
        ("kill", None) => Ok(Action::Kill),
        ("panic", None) => Ok(Action::Panic),
        ("error", None) => Ok(Action::Error),
        ("enospc", None) => Ok(Action::NoSpace),
        ("partial", None) => Ok(Action::Partial),
        ("bitflip", None) => Ok(Action::BitFlip),
        ("nan", None) => Ok(Action::NaN),
        ("spike", None) => Ok(Action::Spike),
        ("exit", Some(code)) => {
            code.parse::<u8>().map(|c| Action::Exit(c.into())).map_err(|_| format!("`exit={code}` needs a code from 0 to 255"))
        }
        ("sleep", Some(time)) => {
            parse_duration(time).map(Action::Sleep).ok_or_else(|| format!("`sleep={time}` needs a time such as 200ms or 2s"))
        }
        ("exit", None) => Err("`exit` needs a code, as in exit=3".into()),
        ("sleep", None) => Err("`sleep` needs a time, as in sleep=200ms".into()),
        (word, Some(_)) if ACTIONS.contains(&word) => Err(format!("`{word}` takes no value")),
        (word, _) => Err(format!("unknown action `{word}`{}; there are: {}", did_you_mean(word, ACTIONS), ACTIONS.join(", "))),
    }
}

fn parse_duration(text: &str) -> Option<Duration> {
    if let Some(ms) = text.strip_suffix("ms") {
        return ms.parse().ok().map(Duration::from_millis);
    }
    text.strip_suffix('s')?.parse().ok().map(Duration::from_secs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{BadInput, exit_code_of};

    fn refused(text: &str) -> String {
        let error = Plan::parse(text).expect_err(text);
        assert!(error.is::<BadInput>());
        assert_eq!(exit_code_of(&error), 2);
        error.to_string()
    }

    #[test]
    fn actions_fire_at_their_hit_only() {
        let plan = Plan::parse("ckpt.write:enospc@3, step:kill@7,ckpt.begin:sleep=200ms,ckpt.retain:exit=3").unwrap();
        let write: Vec<_> = (0..4).map(|_| plan.action_at("ckpt.write", None, 0)).collect();
        assert_eq!(write, [None, None, Some(Action::NoSpace), None]);
        // A numbered point looks at its number, not at how often it was passed.
        assert_eq!(plan.action_at("step", Some(6), 0), None);
        assert_eq!(plan.action_at("step", Some(7), 0), Some(Action::Kill));
        assert_eq!(plan.action_at("step", Some(8), 0), None);
        // Without @n: every time.
        for _ in 0..2 {
            assert_eq!(plan.action_at("ckpt.begin", None, 0), Some(Action::Sleep(Duration::from_millis(200))));
            assert_eq!(plan.action_at("ckpt.retain", None, 0), Some(Action::Exit(3)));
        }
        assert_eq!(plan.action_at("ckpt.after_file", None, 0), None);
    }

    #[test]
    fn a_rule_of_a_rank_counts_that_ranks_hits() {
        let plan = Plan::parse("comm:panic@2/rank1,step:error@3/rank0").unwrap();
        let of = |rank| plan.action_at("comm", None, rank);
        assert_eq!((of(0), of(0), of(0)), (None, None, None));
        assert_eq!((of(1), of(1), of(1)), (None, Some(Action::Panic), None));
        assert_eq!(plan.action_at("step", Some(3), 1), None);
        assert_eq!(plan.action_at("step", Some(3), 0), Some(Action::Error));
        assert!(refused("comm:kill/1").contains("`/1` in `comm:kill/1` is not a rank"));
    }

    #[test]
    fn mistakes_are_named() {
        assert!(refused("ckpt.before_manifst:kill").contains("did you mean `ckpt.before_manifest`?"));
        assert!(refused("ckpt.begin:kil").contains("did you mean `kill`?"));
        assert!(refused("ckpt.begin").contains("name:action"));
        assert!(refused("ckpt.begin:kill@x").contains("whole number"));
        assert!(refused("ckpt.begin:kill@0").contains("counted from 1"));
        assert!(refused("ckpt.begin:sleep=soon").contains("200ms"));
        assert!(refused("ckpt.begin:exit=300").contains("0 to 255"));
        assert!(refused("ckpt.begin:kill=9").contains("takes no value"));
        assert!(refused("ckpt.begin:bitflip").contains("ckpt.write"));
        assert!(refused("ckpt.write:nan").contains("a point of numbers (gradient, loss)"));
        assert!(refused("ckpt.begin:kill,,").contains("name:action"));
    }

    #[test]
    fn points_without_a_plan_do_nothing() {
        hit("ckpt.begin").unwrap();
        hit_at("step", 7).unwrap();
        assert_eq!(hit_write("ckpt.write").unwrap(), WriteFault::None);
    }

    #[test]
    fn the_documentation_lists_every_point() {
        let doc = include_str!("../docs/CHECKPOINT.md");
        for p in POINTS {
            assert!(doc.contains(&format!("| `{}` | {} |", p.name, p.doc)), "{}", p.name);
        }
    }

    /// A point that the code passes but the list lacks could never be armed.
    #[test]
    fn every_point_in_the_source_is_listed() {
        fn visit(dir: &std::path::Path, found: &mut std::collections::BTreeSet<String>) {
            for entry in std::fs::read_dir(dir).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    visit(&path, found);
                } else if path.extension().is_some_and(|e| e == "rs") {
                    let text = std::fs::read_to_string(&path).unwrap();
                    for call in ["hit(\"", "hit_at(\"", "hit_write(\"", "hit_number(\""].map(|call| format!("failpoint::{call}"))
                    {
                        for (at, _) in text.match_indices(&call) {
                            let rest = &text[at + call.len()..];
                            found.insert(rest[..rest.find('"').unwrap()].to_string());
                        }
                    }
                }
            }
        }
        let mut found = std::collections::BTreeSet::new();
        visit(&std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut found);
        for name in &found {
            assert!(POINTS.iter().any(|p| p.name == name), "{name} is passed but not in POINTS");
        }
        for p in POINTS {
            assert!(found.contains(p.name), "{} is in POINTS but nothing passes it", p.name);
        }
    }
}
