//! Runs the jobs under mpirun and reads what they say.

use std::io::Read;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::JOB;

const RANKS: usize = 4;
/// A job that takes longer hangs: each takes few seconds, of which one or two are its own waiting.
const LIMIT: Duration = Duration::from_secs(60);

/// A job, whether it succeeds, and what stands in its output: each of these sentences, of which `|` parts those that stand for one
/// another. (Where two ranks disagree, either may be the first to find it, and is the one that tells.)
struct Job {
    name: &'static str,
    succeeds: bool,
    says: &'static [&'static str],
}

const JOBS: [Job; 11] = [
    Job { name: "checks", succeeds: true, says: &["rank 0 is fine", "rank 1 is fine", "rank 2 is fine", "rank 3 is fine"] },
    Job { name: "whole", succeeds: true, says: &["rank 0 is fine", "rank 1 is fine", "rank 2 is fine", "rank 3 is fine"] },
    Job {
        name: "other-name",
        succeeds: false,
        says: &["ranks disagree", "gradients #2 of the world group (step 40, layer 7, backward)", "counts #2 of the world group"],
    },
    Job {
        name: "other-size",
        succeeds: false,
        says: &[
            "ranks disagree",
            "and expects 400000 bytes from rank 0|and expects 200000 bytes from rank ",
            "sent 200000 bytes|sent 400000 bytes",
        ],
    },
    Job {
        name: "other-short-size",
        succeeds: false,
        says: &["ranks disagree", "and expects 8 bytes from rank 0|and expects 4 bytes from rank ", "sent 4 bytes|sent 8 bytes"],
    },
    Job {
        name: "late",
        succeeds: false,
        says: &[
            "waits in gradients #2 of the world group (step 40, layer 7, backward) for rank 2 for 3 s",
            "rank 2 was last in start #1 of the world group",
        ],
    },
    Job {
        name: "fail",
        succeeds: false,
        says: &[
            "error: rank 1 failed: the disk is full",
            "rank 0 got: rank 1 failed: the disk is full",
            "rank 2 got: rank 1 failed: the disk is full",
        ],
    },
    Job {
        name: "panic",
        succeeds: false,
        says: &["panicked at", "rank 0 got: rank 1 failed: it panicked: on purpose", "rank 3 got: rank 1 failed: it panicked"],
    },
    Job { name: "panic-aside", succeeds: false, says: &["panicked at", "rank 0 got: rank 1 failed: it panicked: on purpose"] },
    Job { name: "leave", succeeds: false, says: &["for rank 3 and some of these have ended: rank 3 has ended"] },
    // Only the launcher can tell.
    Job { name: "die", succeeds: false, says: &[] },
];

/// What a job came to.
struct Outcome {
    /// None: it was stopped.
    succeeded: Option<bool>,
    text: String,
    seconds: f64,
}

pub fn run_all() {
    let version = Command::new("mpirun").arg("--version").output();
    let Ok(version) = version else {
        println!("skipped: there is no `mpirun` here (Debian and Ubuntu: apt-get install openmpi-bin)");
        return;
    };
    let is_open_mpi = String::from_utf8_lossy(&version.stdout).contains("Open MPI");
    let mut failed = Vec::new();
    let mut judge = |name: &str, seconds: f64, text: &str, problem: Option<String>| {
        println!("{name:20} {seconds:4.1} s  {}", problem.as_deref().unwrap_or("ok"));
        if let Some(problem) = problem {
            println!("--- its output:\n{text}---");
            failed.push(format!("{name}: {problem}"));
        }
    };
    let ranks = RANKS.to_string();
    let own: &[&str] = if is_open_mpi { &["--allow-run-as-root", "--oversubscribe"] } else { &[] };
    let mpirun = [&["mpirun"], own, &["-n", &ranks]].concat();
    for job in &JOBS {
        let mut command = Command::new(mpirun[0]);
        command.args(&mpirun[1..]).arg(own_path());
        let outcome = run(command, job.name);
        let problem = problem_of(job, &outcome);
        judge(job.name, outcome.seconds, &outcome.text, problem);
    }
    super::training::run_all(&mpirun, &mut judge);
    // A launcher of which MPI knows nothing: each process alone.
    let mut command = Command::new(own_path());
    command.env("RANK", "1").env("WORLD_SIZE", "4");
    let outcome = run(command, "checks");
    let is_told = outcome.text.contains("torchrun says that this is rank 1 of 4, and MPI says that it is rank 0 of 1");
    let problem = (outcome.succeeded != Some(false) || !is_told).then(|| "the contradiction is not told".to_string());
    judge("no MPI launcher", outcome.seconds, &outcome.text, problem);
    if !failed.is_empty() {
        eprintln!("{} failed:\n{}", failed.len(), failed.join("\n"));
        std::process::exit(1);
    }
}

fn own_path() -> std::path::PathBuf {
    std::env::current_exe().expect("a running program has a path")
}

fn problem_of(job: &Job, outcome: &Outcome) -> Option<String> {
    match outcome.succeeded {
        None => return Some(format!("it did not end within {} s", LIMIT.as_secs())),
        Some(succeeded) if succeeded != job.succeeds => return Some("it ended the wrong way".into()),
        _ => {}
    }
    if let Some(missing) = job.says.iter().find(|s| !s.split('|').any(|s| outcome.text.contains(s))) {
        return Some(format!("it does not say {missing:?}"));
    }
    let pids: Vec<&str> = outcome.text.lines().filter_map(|l| l.strip_prefix("pid ")).collect();
    if pids.len() != RANKS {
        return Some(format!("{} processes instead of {RANKS}", pids.len()));
    }
    // Processes that the launcher has killed may take a moment to go.
    let end = Instant::now() + Duration::from_secs(5);
    loop {
        let left: Vec<&&str> = pids.iter().filter(|pid| is_running(pid)).collect();
        if left.is_empty() {
            return None;
        }
        if Instant::now() > end {
            return Some(format!("processes {left:?} are still there"));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Whether a process is there and no zombie.
fn is_running(pid: &str) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, state)| !state.starts_with('Z'))
}

/// Runs `command` for `job`, for a limited time.
fn run(mut command: Command, job: &str) -> Outcome {
    let begun = Instant::now();
    command.arg(format!("{JOB}{job}")).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap_or_else(|e| panic!("{command:?} could not be started: {e}"));
    let text = Arc::new(Mutex::new(Vec::new()));
    let out: [Box<dyn Read + Send>; 2] = [Box::new(child.stdout.take().unwrap()), Box::new(child.stderr.take().unwrap())];
    let readers = out.map(|mut out| {
        let text = text.clone();
        std::thread::spawn(move || {
            let mut part = [0; 4096];
            while let Ok(n @ 1..) = out.read(&mut part) {
                text.lock().unwrap().extend_from_slice(&part[..n]);
            }
        })
    });
    let status = loop {
        match child.try_wait().expect("a child can be waited for") {
            Some(status) => break Some(status),
            None if begun.elapsed() > LIMIT => {
                // mpirun passes this on to its processes; their pipes may stay open if it does not.
                let _ = child.kill();
                let _ = child.wait();
                break None;
            }
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    if status.is_some() {
        for reader in readers {
            reader.join().expect("reading does not panic");
        }
    }
    let seconds = begun.elapsed().as_secs_f64();
    let text = String::from_utf8_lossy(&text.lock().unwrap()).into_owned();
    Outcome { succeeded: status.map(|s| s.success()), text, seconds }
}
