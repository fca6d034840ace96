//! `zaya pretrain` under mpirun: the same bits as ranks that are threads, and what happens when a process dies.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use zaya::checkpoint::{self, CKPT_DIR, Checkpoint};
use zaya::data::shard::TokenType;
use zaya::data::writer::ShardWriter;

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
num_experts = 5
expert_width = 16
router_width = 8
max_position_embeddings = 64
[[data.sources]]
name = "a"
path = "a"
[train]
steps = 5
global_batch_tokens = 112
micro_batch = 1
seq_len = 16
threads = 4
peak_flops = 1e12
[schedule]
lr = 5e-3
[checkpoint]
every = 2
[parallel]
timeout = "20s"
"#;

/// Layouts of four ranks.
const LAYOUTS: [(&str, &[&str]); 4] = [
    ("dp", &[]),
    ("cp-zigzag", &["parallel.cp=4", "parallel.cp_chunks=zigzag"]),
    ("ep-two-stage", &["parallel.ep=4", "parallel.ranks_per_node=2", "parallel.bucket_mib=1"]),
    ("cp-ep", &["parallel.cp=2", "parallel.ep=2", "parallel.ranks_per_node=2", "train.recompute=all"]),
];

struct Lab(tempfile::TempDir);

impl Lab {
    fn new() -> Self {
        let lab = Self(tempfile::tempdir().expect("a temporary folder"));
        fs::write(lab.path("r.toml"), RECIPE).expect("the recipe is written");
        let mut writer = ShardWriter::create(&lab.path("a"), TokenType::U16, true).expect("a shard");
        for d in 0..8u32 {
            let ids: Vec<u32> = (0..40 + 7 * d).map(|i| (i * i * 5 + 3 * d + i) % 64).collect();
            writer.push(&ids).expect("a document is written");
        }
        writer.publish(|_| Ok("{}".into())).expect("the shard is written");
        // These ids stand for no text.
        fs::remove_file(lab.path("a").with_extension("json")).expect("its sidecar is removed");
        lab
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Trains in the run directory `run`, started by `launcher` (empty: by itself).
    fn train(&self, launcher: &[&str], run: &str, args: &[&str], sets: &[&str], fail: &str) -> (Option<i32>, String) {
        let program = env!("CARGO_BIN_EXE_zaya");
        let mut words: Vec<&str> = launcher.to_vec();
        words.push(program);
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).arg("pretrain").arg("--recipe").arg(self.path("r.toml"));
        command.arg("--set").arg(format!("run.dir={run}")).args(args);
        for set in sets {
            command.arg("--set").arg(set);
        }
        let out = command.env("ZAYA_FAIL", fail).stdin(Stdio::null()).output().expect("it can be started");
        let text = String::from_utf8_lossy(&out.stderr).into_owned() + &String::from_utf8_lossy(&out.stdout);
        (out.status.code(), text)
    }

    /// Hashes of all tensors of the newest checkpoint, and its step.
    fn state(&self, run: &str) -> Result<(u64, BTreeMap<String, Vec<String>>), String> {
        let root = self.path(run).join(CKPT_DIR);
        let step = *checkpoint::list(&root).map_err(|e| format!("{e:#}"))?.first().ok_or("no checkpoint")?;
        let dir = root.join(checkpoint::step_dir(step));
        let entries = |c: &Checkpoint| {
            let hashes = |e: &checkpoint::Entry| (e.name.clone(), e.parts.iter().map(|p| p.xxh3.clone()).collect());
            c.manifest().entries.iter().map(hashes).collect()
        };
        Checkpoint::open(Path::new(&dir)).map(|c| (step, entries(&c))).map_err(|e| format!("{e:#}"))
    }
}

/// Each case with its time, what it said, and what is wrong with it.
pub fn run_all(mpirun: &[&str], mut judge: impl FnMut(&str, f64, &str, Option<String>)) {
    let lab = Lab::new();
    for (name, sets) in LAYOUTS {
        let begun = Instant::now();
        let (threads, mpi) = (format!("{name}-threads"), format!("{name}-mpi"));
        let (code_a, text_a) = lab.train(&[], &threads, &["--ranks", "4"], sets, "");
        let (code_b, text_b) = lab.train(mpirun, &mpi, &[], sets, "");
        let problem = match (code_a, code_b, lab.state(&threads), lab.state(&mpi)) {
            (Some(0), Some(0), Ok(a), Ok(b)) => (a != b || a.0 != 5).then(|| "processes and threads differ".to_string()),
            (a, b, x, y) => Some(format!("exit codes {a:?} and {b:?}, {:?} {:?}", x.err(), y.err())),
        };
        judge(&format!("train {name}"), begun.elapsed().as_secs_f64(), &(text_a + &text_b), problem);
    }

    // A process that is killed in the middle takes the others with it; the run goes on from what was saved, on other ranks too. Training
    // waits for the save, so that the checkpoint is whole before the kill comes, on slow disks too: each sync takes its time here.
    let begun = Instant::now();
    let fail = "ckpt.before_file_sync:sleep=300ms,step:kill@3/rank1";
    let (code, text) = lab.train(mpirun, "killed", &[], &["parallel.ep=2", "checkpoint.async=false"], fail);
    let at = lab.state("killed").map(|(step, _)| step);
    let (resumed, more) = lab.train(&[], "killed", &["--resume", "--ranks", "3"], &[], "");
    let ended = lab.state("killed").map(|(step, _)| step);
    let is_right = code != Some(0) && at == Ok(2) && resumed == Some(0) && ended == Ok(5);
    let problem = (!is_right).then(|| format!("exit codes {code:?} and {resumed:?}, saved {at:?}, then {ended:?}"));
    judge("train killed", begun.elapsed().as_secs_f64(), &(text + &more), problem);

    // What cannot be is refused once, by the first of them.
    let begun = Instant::now();
    let (code, text) = lab.train(mpirun, "refused", &[], &["parallel.cp=3"], "");
    let said = text.matches("parallel.cp = 3 does not divide the number of ranks, 4").count();
    let problem = (code == Some(0) || said != 1).then(|| format!("exit code {code:?}, said {said} times"));
    judge("train refused", begun.elapsed().as_secs_f64(), &text, problem);
}
