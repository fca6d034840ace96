//! Whether a launcher started this process as one of several, told from the environment alone: before MPI or anything else starts.

use std::fmt;

use anyhow::Result;

use crate::error::bad_input;

/// A process's place among those that a launcher started together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Launch {
    pub rank: usize,
    /// At least 2: one process alone is no launch.
    pub world: usize,
    /// Place among the processes of the same node.
    pub local_rank: Option<usize>,
    /// Processes of the same node.
    pub local_world: Option<usize>,
    pub by: Launcher,
}

/// Who started the processes. The order is from the inside out: what stands first may have been started by what stands later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Launcher {
    Torchrun,
    OpenMpi,
    Mvapich,
    Mpich,
    Pals,
    Pmix,
    Slurm,
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Launcher::Torchrun => "torchrun",
            Launcher::OpenMpi => "Open MPI",
            Launcher::Mvapich => "MVAPICH",
            Launcher::Mpich => "MPICH or Cray PMI",
            Launcher::Pals => "Cray PALS",
            Launcher::Pmix => "PMIx",
            Launcher::Slurm => "Slurm (srun)",
        })
    }
}

/// A launcher's variables. Where there are several for one thing, the first that is set counts.
struct Variables {
    by: Launcher,
    rank: &'static [&'static str],
    /// Empty: the launcher leaves this to another one's variables.
    world: &'static [&'static str],
    local_rank: &'static [&'static str],
    local_world: &'static [&'static str],
}

const LAUNCHERS: [Variables; 7] = [
    Variables {
        by: Launcher::Torchrun,
        rank: &["RANK"],
        world: &["WORLD_SIZE"],
        local_rank: &["LOCAL_RANK"],
        local_world: &["LOCAL_WORLD_SIZE"],
    },
    Variables {
        by: Launcher::OpenMpi,
        rank: &["OMPI_COMM_WORLD_RANK"],
        world: &["OMPI_COMM_WORLD_SIZE"],
        local_rank: &["OMPI_COMM_WORLD_LOCAL_RANK"],
        local_world: &["OMPI_COMM_WORLD_LOCAL_SIZE"],
    },
    Variables {
        by: Launcher::Mvapich,
        rank: &["MV2_COMM_WORLD_RANK"],
        world: &["MV2_COMM_WORLD_SIZE"],
        local_rank: &["MV2_COMM_WORLD_LOCAL_RANK"],
        local_world: &["MV2_COMM_WORLD_LOCAL_SIZE"],
    },
    Variables {
        by: Launcher::Mpich,
        rank: &["PMI_RANK"],
        world: &["PMI_SIZE"],
        local_rank: &["MPI_LOCALRANKID", "PMI_LOCAL_RANK"],
        local_world: &["MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"],
    },
    Variables {
        by: Launcher::Pals,
        rank: &["PALS_RANKID"],
        world: &[],
        local_rank: &["PALS_LOCAL_RANKID"],
        local_world: &["PALS_LOCAL_SIZE"],
    },
    Variables { by: Launcher::Pmix, rank: &["PMIX_RANK"], world: &[], local_rank: &[], local_world: &[] },
    Variables {
        by: Launcher::Slurm,
        rank: &["SLURM_PROCID"],
        world: &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"],
        local_rank: &["SLURM_LOCALID"],
        local_world: &[],
    },
];

/// Steps of Slurm's own from this number on: the shell of `salloc`, the script of `sbatch`. They are one process.
const SLURM_OWN_STEPS: u64 = 0xffff_fff0;

/// A variable and the number in it.
#[derive(Debug, Clone, Copy)]
struct Found {
    name: &'static str,
    n: usize,
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.name, self.n)
    }
}

/// What one launcher's variables say.
struct Said {
    by: Launcher,
    rank: Option<Found>,
    world: Option<Found>,
    local_rank: Option<Found>,
    local_world: Option<Found>,
}

impl Said {
    /// One process, of which nobody needs to say the rank.
    fn is_alone(&self) -> bool {
        self.rank.is_none() && self.world.is_some_and(|w| w.n == 1)
    }
}

/// All that launchers set and that is looked at here: without these a process is alone.
pub fn variables() -> impl Iterator<Item = &'static str> {
    let of_all = LAUNCHERS.iter().flat_map(|l| [l.rank, l.world, l.local_rank, l.local_world].concat());
    of_all.chain(["SLURM_STEP_ID", "SLURM_STEPID", "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE"])
}

/// The launch that the environment tells of; none for a single process.
///
/// # Errors
/// Variables that contradict each other, that are no numbers, or of which a part is missing.
pub fn detect(variable: impl Fn(&str) -> Option<String>) -> Result<Option<Launch>> {
    let mut said = Vec::new();
    for launcher in &LAUNCHERS {
        if let Some(found) = read(launcher, &variable)? {
            said.push(found);
        }
    }
    let Some(inner) = said.iter().find(|s| s.rank.is_some() && s.world.is_some()) else {
        return match said.iter().find(|s| !s.is_alone()) {
            None => Ok(None),
            Some(s) => Err(missing_part(s)),
        };
    };
    let (Some(rank), Some(world)) = (inner.rank, inner.world) else { return Ok(None) };
    if rank.n >= world.n {
        return Err(contradiction(inner.by, &rank, &world, "ranks count from 0 and are less than the number of processes"));
    }
    for other in said.iter().filter(|s| s.by != inner.by) {
        agree(inner, other)?;
    }
    if world.n == 1 {
        return Ok(None);
    }
    // Another launcher's word on the node is as good, if it means the same processes.
    let peers = || said.iter().filter(|s| s.rank.is_some_and(|r| r.n == rank.n) && s.world.is_none_or(|w| w.n == world.n));
    let local_rank = inner.local_rank.or_else(|| peers().find_map(|s| s.local_rank));
    let local_world = inner.local_world.or_else(|| peers().find_map(|s| s.local_world));
    if let (Some(r), Some(w)) = (local_rank, local_world)
        && r.n >= w.n
    {
        return Err(contradiction(inner.by, &r, &w, "ranks in a node count from 0 and are less than its number of processes"));
    }
    if let Some(w) = local_world.filter(|w| w.n > world.n) {
        return Err(contradiction(inner.by, &w, &world, "a node has at most all processes"));
    }
    let n = |found: Option<Found>| found.map(|f| f.n);
    Ok(Some(Launch { rank: rank.n, world: world.n, local_rank: n(local_rank), local_world: n(local_world), by: inner.by }))
}

/// Processes of the same node, where the launcher tells.
pub fn ranks_per_node(launch: &Launch) -> Option<usize> {
    launch.local_world
}

/// What can only be done by one process.
#[derive(Debug, Clone, Copy)]
pub enum Alone {
    /// Training, in a build without the feature `mpi`.
    Build,
    /// A command, in any build.
    Command(&'static str),
}

/// Refuses to start as one of several processes: they would be so many separate runs.
///
/// # Errors
/// A sentence that says who started how many, and what to do.
pub fn refuse_many_ranks(variable: impl Fn(&str) -> Option<String>, what: Alone) -> Result<()> {
    let Some(Launch { rank, world, by, .. }) = detect(variable)? else { return Ok(()) };
    let name = LAUNCHERS.iter().find(|l| l.by == by).and_then(|l| l.world.first()).unwrap_or(&"");
    Err(bad_input(match what {
        Alone::Build => format!(
            "{by} started this as rank {rank} of {world} processes ({name}={world}), but this build of zaya trains in one process: it \
             would become {world} separate runs that overwrite each other. Build zaya with `--features mpi`, or start one process \
             with `--ranks {world}`, whose ranks are threads (not both)"
        ),
        Alone::Command(command) => format!(
            "{by} started this as rank {rank} of {world} processes ({name}={world}), but {command} is the work of one process: {world} \
             would each do all of it. Start one process, or unset {name} and what else {by} has set"
        ),
    }))
}

/// A launcher's variables, if any of rank and number of processes is set.
fn read(launcher: &Variables, variable: &impl Fn(&str) -> Option<String>) -> Result<Option<Said>> {
    let set = |name: &str| variable(name).map(|v| v.trim().to_string()).filter(|v| !v.is_empty());
    let is_slurm = launcher.by == Launcher::Slurm;
    if is_slurm {
        // Inside an allocation, and in a batch script, every process has Slurm's variables; only a step has tasks.
        let step = set("SLURM_STEP_ID").or_else(|| set("SLURM_STEPID"));
        let own = step.as_ref().is_some_and(|s| s.parse::<u64>().is_ok_and(|n| n >= SLURM_OWN_STEPS));
        if own || (step.is_none() && set("SLURM_STEP_NUM_TASKS").is_none()) {
            return Ok(None);
        }
    }
    let number = |names: &'static [&'static str]| -> Result<Option<Found>> {
        let Some((name, value)) = names.iter().find_map(|name| Some((*name, set(name)?))) else { return Ok(None) };
        match value.parse() {
            Ok(n) => Ok(Some(Found { name, n })),
            Err(_) => Err(bad_input(format!(
                "the environment has {name}={value:?}, which {} sets to a whole number. Unset it to start one process, or see what \
                 sets it",
                launcher.by
            ))),
        }
    };
    let (rank, world) = (number(launcher.rank)?, number(launcher.world)?);
    if rank.is_none() && world.is_none() {
        return Ok(None);
    }
    if let Some(world) = world.filter(|w| w.n == 0) {
        return Err(bad_input(format!(
            "the environment has {world}, which {} sets to the number of processes: at least 1. Unset it",
            launcher.by
        )));
    }
    let mut local_world = number(launcher.local_world)?;
    if is_slurm {
        let node = set("SLURM_NODEID").and_then(|n| n.parse().ok());
        let tasks = set("SLURM_STEP_TASKS_PER_NODE").and_then(|list| tasks_of_node(&list, node));
        local_world = tasks.map(|n| Found { name: "SLURM_STEP_TASKS_PER_NODE", n });
    }
    Ok(Some(Said { by: launcher.by, rank, world, local_rank: number(launcher.local_rank)?, local_world }))
}

/// Tasks of a node in Slurm's list, as in `4(x2),3`; without the node's number, if all have as many.
fn tasks_of_node(list: &str, node: Option<usize>) -> Option<usize> {
    let mut all = Vec::new();
    for part in list.split(',') {
        let (n, times) = match part.split_once("(x") {
            None => (part.parse().ok()?, 1),
            Some((n, times)) => (n.parse().ok()?, times.strip_suffix(')')?.parse().ok()?),
        };
        all.push((n, times));
    }
    let Some(mut node) = node else {
        let (first, _): (usize, usize) = *all.first()?;
        return all.iter().all(|(n, _)| *n == first).then_some(first);
    };
    for (n, times) in all {
        if node < times {
            return Some(n);
        }
        node -= times;
    }
    None
}

/// An error unless `other` means the same processes as `inner`, or those that started these.
fn agree(inner: &Said, other: &Said) -> Result<()> {
    let (Some(rank), Some(world)) = (&inner.rank, &inner.world) else { return Ok(()) };
    if let Some(w) = other.world.filter(|w| world.n == 1 && w.n > 1) {
        return Err(contradiction(inner.by, world, &w, "each process would be a separate run, and they overwrite each other"));
    }
    // Slurm often starts the launcher itself, once a node: its tasks are then other processes than these.
    if other.by == Launcher::Slurm {
        return Ok(());
    }
    // So may the other be: each of its processes has started a node's worth of these.
    let per_node = inner.local_world.map_or(1, |l| l.n);
    if per_node > 1 && other.world.is_none_or(|w| w.n.checked_mul(per_node) == Some(world.n)) {
        return Ok(());
    }
    if let Some(w) = other.world.filter(|w| w.n != world.n) {
        return Err(contradiction(inner.by, world, &w, "they disagree on the number of processes"));
    }
    if let Some(r) = other.rank.filter(|r| r.n != rank.n) {
        return Err(contradiction(inner.by, rank, &r, "they disagree on this process's rank"));
    }
    Ok(())
}

fn contradiction(by: Launcher, one: &Found, other: &Found, why: &str) -> anyhow::Error {
    bad_input(format!(
        "the environment has {one} and {other}, which do not fit each other: {why}. This process seems to be started by {by}; unset the \
         variable that is left over from elsewhere, or both to start one process"
    ))
}

/// Half of what a launcher sets.
fn missing_part(said: &Said) -> anyhow::Error {
    let launcher = LAUNCHERS.iter().find(|l| l.by == said.by);
    let by = said.by;
    let (found, missing, names) = match (&said.rank, &said.world) {
        (Some(rank), _) => (rank, "the number of processes", launcher.map(|l| l.world)),
        (None, Some(world)) => (world, "this process's rank", launcher.map(|l| l.rank)),
        (None, None) => return bad_input(format!("{by} has set neither a rank nor a number of processes")),
    };
    let name = names.and_then(|n| n.first()).map_or("no other variable says it".into(), |n| format!("{n} is not set"));
    bad_input(format!(
        "the environment has {found}, as {by} sets it, but not {missing}: {name}. Set both to start as one of several processes, or \
         unset {} to start one",
        found.name
    ))
}

#[cfg(test)]
#[path = "launch_tests.rs"]
mod tests;
