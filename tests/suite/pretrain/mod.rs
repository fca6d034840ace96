//! `zaya pretrain`, the program itself, on a tiny model: runs, stops, kills, resumes, refusals.

mod background;
mod benchmarks;
mod damage;
mod data;
mod extend;
mod gpu;
mod gpu_memory;
mod gpu_ranks;
mod guards;
mod incremental;
mod kills;
mod numbers;
mod profile;
mod ranks;
mod refusals;
mod resume;
mod run_dir;
mod signals;
mod stages;
mod two_processes;
mod upload;

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Stdio};

use serde_json::{Map, Value};
use tempfile::TempDir;
use zaya::checkpoint::{self, CKPT_DIR, Checkpoint};
use zaya::data::shard::TokenType;
use zaya::data::writer::ShardWriter;
use zaya::parallel::launch;
use zaya::recipe::{self, Recipe};

/// Fields that hold times, or follow from one: they alone may differ between equal runs.
const TIMES: [&str; 6] = ["tokens_per_s", "step_time_s", "data_time_s", "data_wait_s", "mfu", "unix_time"];
/// Such fields of runs on several ranks.
const WAITS: [&str; 3] = ["gradient_wait_s", "weight_wait_s", "operations_s"];

/// The program under test.
fn zaya() -> Command {
    let mut command = crate::program::zaya();
    for name in launch::variables().chain(["ZAYA_FAIL"]) {
        command.env_remove(name);
    }
    command
}

/// 8 steps of 64 tokens on two small sources, which the run goes through several times.
const RECIPE: &str = r#"[run]
dir = "run"
seed = 7
[model]
vocab_size = 64
hidden_size = 32
num_blocks = 2
num_query_heads = 2
num_kv_heads = 1
head_dim = 16
num_experts = 4
expert_width = 16
router_width = 8
max_position_embeddings = 64
[[data.sources]]
name = "a"
path = "a"
weight = 0.7
[[data.sources]]
name = "b"
path = "b"
weight = 0.3
[train]
steps = 8
global_batch_tokens = 64
micro_batch = 2
seq_len = 16
threads = 2
peak_flops = 1e12
[schedule]
lr = 5e-3
min_lr = 5e-4
warmup_steps = 2
[router]
balance_warmup = 4
[checkpoint]
every = 1
"#;

/// A folder with a recipe and its data; runs live in it side by side.
struct Lab {
    dir: TempDir,
    /// `checkpoint.async`; None = as the recipe says.
    background: Option<bool>,
}

/// How a process ended.
#[derive(Debug)]
struct Done {
    code: Option<i32>,
    signal: Option<i32>,
    err: String,
}

impl Done {
    #[track_caller]
    fn expect(self, code: i32) -> Self {
        assert_eq!(self.code, Some(code), "signal {:?}\n{}", self.signal, self.err);
        self
    }

    /// The message holds every one of these pieces.
    #[track_caller]
    fn says(self, pieces: &[&str]) -> Self {
        for piece in pieces {
            assert!(self.err.contains(piece), "no `{piece}` in:\n{}", self.err);
        }
        self
    }
}

/// A shard of documents that a small model can learn: every token follows from the one before it, with a little noise.
fn write_shard(prefix: &Path, documents: usize, seed: u64, vocab: u32) {
    let mut writer = ShardWriter::create(prefix, TokenType::U16, true).unwrap();
    let mut random = Random(seed);
    for _ in 0..documents {
        let mut token = random.below(vocab.into()) as u32;
        let ids: Vec<u32> = (0..5 + random.below(40))
            .map(|_| {
                token = if random.below(10) == 0 { random.below(vocab.into()) as u32 } else { (token * 5 + 3) % vocab };
                token
            })
            .collect();
        writer.push(&ids).unwrap();
    }
    writer.publish(|_| Ok("{}".into())).unwrap();
    // These ids stand for no text.
    fs::remove_file(prefix.with_extension("json")).unwrap();
}

/// Lines of words, enough of them for a small vocabulary.
fn varied_text(lines: usize) -> String {
    let words =
        ["under", "matter", "ordering", "winter", "harvest", "gather", "another", "river", "silver", "morning", "evening"];
    let mut random = Random(9);
    let mut line = || (0..9).map(|_| words[random.below(11) as usize]).collect::<Vec<_>>().join(" ") + "\n";
    (0..lines).map(|_| line()).collect()
}

/// JSON read by serde_json may differ in the last digit.
const LAST_DIGIT: f64 = 1e-15;

#[track_caller]
fn assert_close(a: &[f64], b: &[f64], tolerance: f64) {
    assert_eq!(a.len(), b.len());
    for (x, y) in a.iter().zip(b) {
        assert!((x - y).abs() <= tolerance * x.abs(), "{a:?}\n{b:?}");
    }
}

/// A reproducible sequence of numbers.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }
}

impl Lab {
    fn new() -> Self {
        Self::with(RECIPE)
    }

    /// Two of them: checkpoints are written while training waits, and while it goes on.
    fn both() -> [Self; 2] {
        [false, true].map(|background| Self { background: Some(background), ..Self::new() })
    }

    fn with(recipe: &str) -> Self {
        let lab = Self { dir: tempfile::tempdir().unwrap(), background: None };
        fs::write(lab.path("r.toml"), recipe).unwrap();
        write_shard(&lab.path("a"), 6, 1, 64);
        write_shard(&lab.path("b"), 4, 2, 64);
        write_shard(&lab.path("held-out"), 5, 3, 64);
        lab
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The command that trains in the run directory `run`, whatever the recipe says.
    fn command(&self, run: &str, args: &[&str]) -> Command {
        let mut command = zaya();
        command.arg("pretrain").arg("--recipe").arg(self.path("r.toml"));
        command.arg("--set").arg(format!("run.dir={run}"));
        if let Some(background) = self.background {
            command.arg("--set").arg(format!("checkpoint.async={background}"));
        }
        command.args(args);
        command
    }

    fn run(&self, run: &str, args: &[&str]) -> Done {
        finish(&mut self.command(run, args))
    }

    fn run_failing(&self, run: &str, fail: &str, args: &[&str]) -> Done {
        finish(self.command(run, args).env("ZAYA_FAIL", fail))
    }

    /// The recipe as the program reads it.
    fn recipe(&self, sets: &[&str]) -> Recipe {
        recipe::load(&self.path("r.toml"), &sets.iter().map(|s| s.to_string()).collect::<Vec<_>>()).unwrap()
    }

    fn steps(&self, run: &str) -> Vec<u64> {
        checkpoint::list(&self.path(run).join(CKPT_DIR)).unwrap()
    }

    fn checkpoint(&self, run: &str, step: u64) -> Checkpoint {
        Checkpoint::open(&self.path(run).join(CKPT_DIR).join(checkpoint::step_dir(step))).unwrap()
    }

    /// Every line of metrics by step, as text without times; where a step stands twice the later one.
    fn lines(&self, run: &str) -> BTreeMap<u64, String> {
        let text = fs::read_to_string(self.path(run).join("metrics.jsonl")).unwrap();
        let line = |text: &str| Some((serde_json::from_str::<Value>(text).ok()?.get("step")?.as_u64()?, without_times(text)));
        text.lines().filter_map(line).collect()
    }

    /// The parsed lines of metrics that have a step, in the order of the file.
    fn metrics(&self, run: &str) -> Vec<Map<String, Value>> {
        self.objects(run).into_iter().filter(|o| o.contains_key("step")).collect()
    }

    fn events(&self, run: &str) -> Vec<Map<String, Value>> {
        self.objects(run).into_iter().filter(|o| !o.contains_key("step")).collect()
    }

    fn objects(&self, run: &str) -> Vec<Map<String, Value>> {
        let text = fs::read_to_string(self.path(run).join("metrics.jsonl")).unwrap();
        text.lines().filter_map(|l| serde_json::from_str(l).ok()).collect()
    }

    /// A run that was never stopped.
    fn reference(&self, run: &str, args: &[&str]) {
        self.run(run, args).expect(0);
    }

    /// Checkpoint `step` of both runs holds the same state, bit for bit.
    #[track_caller]
    fn assert_same_state(&self, a: &str, b: &str, step: u64) {
        let (x, y) = (State::of(&self.checkpoint(a, step)), State::of(&self.checkpoint(b, step)));
        for (name, hash) in &x.tensors {
            assert_eq!(Some(hash), y.tensors.get(name), "{name} differs between {a} and {b} at step {step}");
        }
        assert_eq!(x, y, "{a} and {b} at step {step}");
    }

    /// Both runs ended in the same state, and their metrics agree to the last digit.
    #[track_caller]
    fn assert_same_run(&self, a: &str, b: &str) {
        let last = self.steps(a)[0];
        assert_eq!(self.steps(b)[0], last);
        self.assert_same_state(a, b, last);
        assert_eq!(self.lines(a), self.lines(b), "{a} and {b}");
    }
}

/// What training goes on from.
#[derive(Debug, PartialEq)]
struct State {
    tensors: BTreeMap<String, Vec<String>>,
    step: u64,
    tokens_seen: u64,
    scalars: BTreeMap<String, Value>,
    loader: Value,
}

impl State {
    fn of(c: &Checkpoint) -> Self {
        let m = c.manifest();
        let hashes = |e: &checkpoint::Entry| (e.name.clone(), e.parts.iter().map(|p| p.xxh3.clone()).collect());
        Self {
            tensors: m.entries.iter().map(hashes).collect(),
            step: m.meta.step,
            tokens_seen: m.meta.tokens_seen,
            scalars: m.meta.scalars.clone(),
            loader: m.meta.loader.clone(),
        }
    }
}

fn without_times(line: &str) -> String {
    let mut line = line.to_string();
    for name in TIMES {
        let key = format!("\"{name}\":");
        let at = line.find(&key).unwrap_or_else(|| panic!("no {name} in {line}"));
        let end = at + line[at..].find([',', '}']).unwrap();
        line.replace_range(at..end, "");
    }
    for name in WAITS {
        let key = format!("\"{name}\":");
        if let Some(at) = line.find(&key) {
            let end = at + line[at..].find(',').unwrap() + 1;
            line.replace_range(at..end, "");
        }
    }
    line
}

fn finish(command: &mut Command) -> Done {
    use std::os::unix::process::ExitStatusExt;
    let out = command.stdin(Stdio::null()).output().unwrap();
    let err = String::from_utf8_lossy(&out.stderr).into_owned();
    Done { code: out.status.code(), signal: out.status.signal(), err }
}

/// A program that is running.
struct Running {
    child: Child,
    stderr: BufReader<ChildStderr>,
    err: String,
}

impl Running {
    fn start(command: &mut Command) -> Self {
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        Self { child, stderr, err: String::new() }
    }

    /// Reads until a line holds `piece`.
    #[track_caller]
    fn wait_for(&mut self, piece: &str) {
        loop {
            let before = self.err.len();
            if self.stderr.read_line(&mut self.err).unwrap() == 0 {
                panic!("it ended before it said `{piece}`:\n{}", self.err);
            }
            if self.err[before..].contains(piece) {
                return;
            }
        }
    }

    fn signal(&self, signal: i32) {
        // SAFETY: sends a signal to a child that has not been waited for, so the number is still its own.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
    }

    fn finish(mut self) -> Done {
        use std::os::unix::process::ExitStatusExt;
        self.stderr.read_to_string(&mut self.err).unwrap();
        let status = self.child.wait().unwrap();
        Done { code: status.code(), signal: status.signal(), err: self.err }
    }
}

fn copy_dir(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() { copy_dir(&entry.path(), &target) } else { drop(fs::copy(entry.path(), target)) }
    }
}

/// Inverts a bit in the middle of a file.
fn flip_a_bit(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(path, bytes).unwrap();
}

/// The names and contents of everything in a folder.
fn snapshot(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut out = BTreeMap::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            out.extend(snapshot(&path));
            out.insert(path, Vec::new());
        } else {
            out.insert(path.clone(), fs::read(&path).unwrap());
        }
    }
    out
}
