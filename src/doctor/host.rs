//! Processor, memory, NUMA nodes, limits of the process, and who started it.

use std::fs;
use std::path::Path;

use super::{Finding, Topic, gib};
use crate::checkpoint::free_bytes;
use crate::machine;
use crate::parallel::launch;
use crate::tensor::cpu::level::Level;

/// Files that a run may hold open at a time: shards, checkpoints, libraries.
const FEWEST_FILES: u64 = 1024;
/// Threads that a run may need.
const FEWEST_THREADS: u64 = 2048;

pub fn examine() -> Vec<Finding> {
    let cpu = machine::describe();
    let line = |what: &str, found: String| Finding::new(Topic::Host, what, found);
    let level = Level::detected();
    let mut out = vec![
        line("processor", format!("{}, {} processors for this process", cpu.name, cpu.processors)),
        match line("instructions", level.name().into()) {
            found if Level::preferred() < level => found.advise(
                "AMX, which this processor may have, is not to be used here (a virtual machine can hide it, a kernel before 5.16 does not \
                 know it), and its other bfloat16 instructions are slower than f32: train.precision = \"f32\" is the faster one on this processor",
            ),
            found if level < Level::Avx512Bf16 => found.advise(
                "no bfloat16 instructions (AVX512-BF16, AMX): train.precision = \"f32\" is the faster one on this processor",
            ),
            found => found,
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
    out.push(match limit(libc::RLIMIT_NPROC) {
        Some(n) if n < FEWEST_THREADS => line("threads and processes", n.to_string())
            .advise(format!("every rank has a thread for each processor and a few more: ulimit -u {}", 8 * FEWEST_THREADS)),
        n => line("threads and processes", n.map_or("no limit".into(), |n| n.to_string())),
    });
    out.push(match limit(libc::RLIMIT_AS) {
        Some(bytes) => {
            line("address space", gib(bytes)).advise("memory and libraries of GPUs are mapped far beyond it: ulimit -v unlimited")
        }
        None => line("address space", "no limit".into()),
    });
    out.extend(container_memory(cpu.memory_bytes));
    out.push(huge_pages());
    out.extend(shared_memory());
    out.extend(networks());
    out.push(match limit(libc::RLIMIT_MEMLOCK) {
        None => line("locked memory", "no limit".into()),
        Some(bytes) => line("locked memory", format!("{} KiB", bytes >> 10))
            .advise("GPUs copy from locked memory, and InfiniBand sends from it: ulimit -l unlimited"),
    });
    out
}

/// The limit that a container puts on memory, where it is below the machine's.
fn container_memory(all: Option<u64>) -> Option<Finding> {
    // Of control groups of version 2 and 1.
    let files = ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"];
    let limit: u64 = files.iter().find_map(|file| fs::read_to_string(file).ok()?.trim().parse().ok())?;
    all.is_none_or(|all| limit < all).then(|| {
        Finding::new(Topic::Host, "memory of this container", gib(limit))
            .advise("more than that is not to be had: see train.memory_limit_mib")
    })
}

/// Whether large pages are given to whoever asks: working memory does.
fn huge_pages() -> Finding {
    let line = |found: &str| Finding::new(Topic::Host, "huge pages", found);
    let setting = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    // The value in force stands in brackets.
    match setting.split(['[', ']']).nth(1) {
        Some(word @ ("always" | "madvise")) => line(word),
        Some(word) => line(word)
            .advise("working memory is slower in small pages: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"),
        None => line("the system does not say"),
    }
}

/// Least shared memory that MPI and RCCL find room in for the ranks of a machine.
const LEAST_SHARED_BYTES: u64 = 1 << 30;

fn shared_memory() -> Option<Finding> {
    let free = free_bytes(Path::new("/dev/shm")).ok()?;
    let line = Finding::new(Topic::Host, "shared memory (/dev/shm)", format!("{} free", gib(free)));
    Some(match free < LEAST_SHARED_BYTES {
        true => {
            line.advise("MPI and RCCL pass messages inside a machine through it: in a container, --shm-size=8g or --ipc=host")
        }
        false => line,
    })
}

/// Adapters for messages between machines.
fn networks() -> Vec<Finding> {
    let entries = fs::read_dir("/sys/class/infiniband").into_iter().flatten().flatten();
    let mut found: Vec<Finding> = entries.map(|adapter| of_adapter(&adapter.path())).collect();
    found.sort_by(|a, b| a.what.cmp(&b.what));
    if found.is_empty() {
        found.push(Finding::new(Topic::Host, "InfiniBand and RoCE", "no adapter (needed for many machines only)"));
    }
    found
}

fn of_adapter(folder: &Path) -> Finding {
    let read = |file: &str| fs::read_to_string(folder.join(file)).map(|text| text.trim().to_string()).unwrap_or_default();
    let name = folder.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    let (state, rate, node) = (read("ports/1/state"), read("ports/1/rate"), read("device/numa_node"));
    let line = Finding::new(Topic::Host, format!("network adapter {name}"), format!("{state}; {rate}; NUMA node {node}"));
    if state.contains("ACTIVE") { line } else { line.advise("its first port is down: see `ibstat`") }
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
