//! Processor, memory, NUMA nodes, limits of the process, and who started it.

use std::fs;

use super::{Finding, Topic, gib};
use crate::machine;
use crate::parallel::launch;
use crate::tensor::cpu::level::Level;

/// Files that a run may hold open at a time: shards, checkpoints, libraries.
const FEWEST_FILES: u64 = 1024;

pub fn examine() -> Vec<Finding> {
    let cpu = machine::describe();
    let line = |what: &str, found: String| Finding::new(Topic::Host, what, found);
    let level = Level::detected();
    let mut out = vec![
        line("processor", format!("{}, {} processors for this process", cpu.name, cpu.processors)),
        match level {
            Level::Avx512Bf16 => line("instructions", level.name().into()),
            _ => line("instructions", level.name().into())
                .advise("no AVX512-BF16: train.precision = \"f32\" is the faster one on this processor"),
        },
    ];
    let memory = match (cpu.memory_bytes, machine::available_memory()) {
        (Some(all), Some(free)) => format!("{}, {} of it available", gib(all), gib(free)),
        (Some(all), None) => gib(all),
        _ => "the system does not say".into(),
    };
    out.push(line("memory", memory));
    let nodes = numa_nodes();
    out.push(match nodes {
        0 | 1 => line("NUMA nodes", "1".into()),
        n => line("NUMA nodes", n.to_string())
            .advise("start one rank a node and bind it there (numactl --cpunodebind, mpirun --bind-to numa): memory of the other node is slower"),
    });
    out.push(match limit(libc::RLIMIT_NOFILE) {
        Some(n) if n < FEWEST_FILES => {
            line("open files", n.to_string()).advise(format!("raise it: ulimit -n {}", 16 * FEWEST_FILES))
        }
        n => line("open files", n.map_or("no limit".into(), |n| n.to_string())),
    });
    out.push(match limit(libc::RLIMIT_MEMLOCK) {
        None => line("locked memory", "no limit".into()),
        Some(bytes) => line("locked memory", format!("{} KiB", bytes >> 10))
            .advise("GPUs copy from locked memory, and InfiniBand sends from it: ulimit -l unlimited"),
    });
    out
}

/// How many ranks the launcher's variables announce.
pub fn launcher() -> Finding {
    let line = |found: String| Finding::new(Topic::Launcher, "started as", found);
    match launch::detect(|name| std::env::var(name).ok()) {
        Ok(None) => line("one process, by no launcher".into()),
        Ok(Some(l)) if cfg!(feature = "mpi") => line(format!("rank {} of {}", l.rank, l.world)),
        Ok(Some(l)) => line(format!("rank {} of {}", l.rank, l.world))
            .advise("this build trains many ranks as threads (--ranks N) only: build with `--features mpi` for processes"),
        Err(e) => line("contradictions".into()).advise(format!("{e:#}")),
    }
}

/// Nodes that the system lists; 0 where it lists none.
fn numa_nodes() -> usize {
    let is_node = |name: &str| name.strip_prefix("node").is_some_and(|n| n.parse::<u32>().is_ok());
    let entries = fs::read_dir("/sys/devices/system/node").into_iter().flatten().flatten();
    entries.filter(|e| e.file_name().to_str().is_some_and(is_node)).count()
}

/// A limit of this process; None = none.
fn limit(resource: libc::__rlimit_resource_t) -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is a place for the answer; where the call fails it stays as it is.
    let status = unsafe { libc::getrlimit(resource, &mut limit) };
    (status == 0 && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}
