//! Collectives over sizes of messages and of groups: between threads, processes under MPI, or GPUs (`rccl`).

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::Serialize;

#[cfg(feature = "mpi")]
use crate::parallel::Transport;
use crate::parallel::bucket;
use crate::parallel::group::even_pieces;
use crate::parallel::threads::Hub;
use crate::parallel::{Channel, Comm, Group, Stages};
use crate::robust::median;

/// Bytes of the messages that are measured; the smallest tells what an operation costs at least.
pub const SIZES: [usize; 8] = [1 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20, 1 << 30];
/// Most bytes of the messages of all threads together: they share one memory, of which each takes several times its message.
const MOST_OF_THREADS: usize = 512 << 20;
const LEAST_ROUNDS: usize = 5;
/// Longer than any of these operations takes.
const TIMEOUT: Duration = Duration::from_secs(120);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Operation {
    AllReduce,
    ReduceScatter,
    AllGather,
    AllToAll,
}

impl Operation {
    pub const ALL: [Self; 4] = [Self::AllReduce, Self::ReduceScatter, Self::AllGather, Self::AllToAll];

    pub fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all-reduce",
            Self::ReduceScatter => "reduce-scatter",
            Self::AllGather => "all-gather",
            Self::AllToAll => "all-to-all",
        }
    }

    /// Bytes that each of `group` ranks must receive of each byte of the message: the factor of the bus bandwidth, as RCCL's tests have it.
    pub fn received(self, group: usize) -> f64 {
        let others = (group as f64 - 1.0) / group as f64;
        if self == Self::AllReduce { 2.0 * others } else { others }
    }
}

#[derive(Debug, Clone, Serialize)]
pub struct CollectiveLine {
    pub name: &'static str,
    /// Ranks of each group; all groups work at once.
    pub group: usize,
    pub bytes: usize,
    pub rounds: usize,
    pub median_s: f64,
    pub best_s: f64,
    /// Algorithm bandwidth: bytes over the median time.
    pub gbytes_per_s: f64,
    /// Bus bandwidth: what each rank must receive over that time, which can be compared with a link's.
    pub bus_gbytes_per_s: f64,
    /// Time in which all ranks, at once, copy as many bytes as each of them must receive; measured round by round beside it. None on GPUs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit_s: Option<f64>,
    /// `limit_s` over `median_s`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fraction: Option<f64>,
}

impl CollectiveLine {
    pub fn new(operation: Operation, group: usize, bytes: usize, times: Vec<f64>, limits: Vec<f64>) -> Self {
        let (rounds, best_s) = (times.len(), times.iter().copied().fold(f64::INFINITY, f64::min));
        let (median_s, limit_s) = (median(times), (!limits.is_empty()).then(|| median(limits)));
        let gbytes_per_s = bytes as f64 / median_s / 1e9;
        Self {
            name: operation.name(),
            group,
            bytes,
            rounds,
            median_s,
            best_s,
            gbytes_per_s,
            bus_gbytes_per_s: gbytes_per_s * operation.received(group),
            limit_s,
            fraction: limit_s.map(|limit| limit / median_s),
        }
    }
}

#[derive(Debug, Clone, Serialize)]
pub struct Collectives {
    /// "threads", "mpi" or "rccl".
    pub engine: &'static str,
    pub ranks: usize,
    /// The ranks' devices are a program that takes the place of GPUs: the times say nothing about any GPU.
    pub software: bool,
    pub lines: Vec<CollectiveLine>,
    /// Time of the smallest all-reduce between all ranks.
    pub latency_s: f64,
    /// Smallest bucket that travels at 0.9 of the best rate: what `parallel.bucket_mib` should be. Measured as runs with "auto" do.
    pub bucket_mib: u64,
}

impl Collectives {
    pub fn new(engine: &'static str, ranks: usize, software: bool, lines: Vec<CollectiveLine>, bucket_mib: u64) -> Self {
        let smallest = lines.iter().filter(|l| l.group == ranks && l.name == Operation::AllReduce.name()).min_by_key(|l| l.bytes);
        let latency_s = smallest.map_or(0.0, |l| l.median_s);
        Self { engine, ranks, software, latency_s, bucket_mib, lines }
    }
}

/// Sizes of groups that `ranks` ranks fall into evenly: all together, then each smaller divisor, at least two.
pub fn group_sizes(ranks: usize) -> Vec<usize> {
    (2..=ranks).rev().filter(|size| ranks.is_multiple_of(*size)).collect()
}

/// Between `ranks` threads.
pub fn between_threads(ranks: usize, seconds: f64, progress: &dyn Fn(&str)) -> Result<Collectives> {
    let mut lines = Vec::new();
    for (operation, group, bytes) in measurements(ranks, MOST_OF_THREADS / ranks) {
        progress(&format!("{} of {} KiB in groups of {group} ranks", operation.name(), bytes >> 10));
        let (times, limits) = on_threads(ranks, move |comm| one(comm, operation, group, bytes, seconds))?;
        lines.push(CollectiveLine::new(operation, group, bytes, times, limits));
    }
    progress(&format!("size of buckets between {ranks} ranks"));
    let bucket = on_threads(ranks, move |comm| bucket::measure(&world(comm)))?;
    Ok(Collectives::new("threads", ranks, false, lines, bucket.bucket_mib))
}

/// Between the processes of a launcher; every one of them calls this, and all get the first one's figures.
#[cfg(feature = "mpi")]
pub fn between_processes(transport: Arc<dyn Transport>, seconds: f64, progress: &dyn Fn(&str)) -> Result<Collectives> {
    let comm = Comm::new(transport, Stages::Flat);
    let ranks = comm.transport.world();
    let mut lines = Vec::new();
    for (operation, group, bytes) in measurements(ranks, usize::MAX) {
        progress(&format!("{} of {} KiB in groups of {group} ranks", operation.name(), bytes >> 10));
        let (times, limits) = one(&comm, operation, group, bytes, seconds)?;
        lines.push(CollectiveLine::new(operation, group, bytes, times, limits));
    }
    progress(&format!("size of buckets between {ranks} ranks"));
    let bucket = bucket::measure(&world(&comm))?;
    Ok(Collectives::new("mpi", ranks, false, lines, bucket.bucket_mib))
}

/// What is measured, in order.
pub fn measurements(ranks: usize, largest: usize) -> Vec<(Operation, usize, usize)> {
    let sizes = || SIZES.into_iter().filter(move |bytes| *bytes <= largest);
    let of = |group| Operation::ALL.into_iter().flat_map(move |operation| sizes().map(move |bytes| (operation, group, bytes)));
    group_sizes(ranks).into_iter().flat_map(of).collect()
}

fn world(comm: &Arc<Comm>) -> Group {
    Group::new(comm, Channel::Main, "world", (0..comm.transport.world()).collect())
}

/// Does the same on all of so many ranks; what the first one found.
pub fn on_threads<T: Send + 'static>(ranks: usize, body: impl Fn(&Arc<Comm>) -> Result<T> + Clone + Send + 'static) -> Result<T> {
    let threads: Vec<_> = (Hub::ranks(ranks, TIMEOUT).into_iter())
        .map(|transport| {
            let body = body.clone();
            let body = move || body(&Comm::new(Arc::new(transport), Stages::Flat));
            std::thread::Builder::new().spawn(body).context("starting a rank")
        })
        .collect::<Result<_>>()?;
    let mut of_first = None;
    for thread in threads {
        let found = thread.join().map_err(|_| anyhow::anyhow!("a rank of the measurement panicked"))??;
        of_first.get_or_insert(found);
    }
    of_first.context("there is a first rank")
}

/// Rounds of one operation: its times and those of as large a copy, from start to the end of the last rank of all groups.
fn one(comm: &Arc<Comm>, operation: Operation, size: usize, bytes: usize, seconds: f64) -> Result<(Vec<f64>, Vec<f64>)> {
    let world = world(comm);
    let first = comm.transport.rank() / size * size;
    let group = Group::new(comm, Channel::Main, "measured", (first..first + size).collect());
    let numbers = bytes / size_of::<f32>() / size * size;
    // Sums of zeros stay zeros, however often they are taken; written once, so that there is memory behind them.
    let mut data = vec![1.0f32; numbers];
    data.fill(0.0);
    let mut received = vec![0.0f32; if operation == Operation::AllToAll { numbers } else { 0 }];
    let copied = (bytes as f64 * operation.received(size)) as usize / size_of::<f32>();
    let (from, mut to) = (vec![1.0f32; copied], vec![0.0f32; copied]);
    let (pieces, name) = (even_pieces(numbers, size), operation.name());
    // The same number of numbers goes from each member to each.
    let counts = vec![numbers / size; size * size];
    let mut operate = || {
        match operation {
            Operation::AllReduce => group.all_reduce(name, &mut data)?,
            Operation::ReduceScatter => group.reduce_scatter(name, &mut data, &pieces)?,
            Operation::AllGather => group.all_gather(name, &mut data, &pieces)?,
            Operation::AllToAll => group.all_to_all(name, &counts, &data, &mut received)?,
        }
        anyhow::Ok(())
    };
    let mut copy = || to.copy_from_slice(std::hint::black_box(&from));
    let found = rounds(&world, seconds, &mut operate, Some(&mut copy))?;
    std::hint::black_box((&to, &received));
    Ok(found)
}

/// Times of `operate` and of `copy`, which all ranks of `world` do at once, until the first rank has had enough.
pub fn rounds(
    world: &Group,
    seconds: f64,
    operate: &mut dyn FnMut() -> Result<()>,
    mut copy: Option<&mut dyn FnMut()>,
) -> Result<(Vec<f64>, Vec<f64>)> {
    let (mut times, mut limits) = (Vec::new(), Vec::new());
    let (began, mut warm) = (Instant::now(), false);
    loop {
        world.barrier("round")?;
        let started = Instant::now();
        operate()?;
        world.barrier("end of the operation")?;
        let time = started.elapsed().as_secs_f64();
        let limit = match &mut copy {
            None => None,
            Some(copy) => {
                let started = Instant::now();
                copy();
                world.barrier("end of the copy")?;
                Some(started.elapsed().as_secs_f64())
            }
        };
        // The first round only warms up.
        if std::mem::replace(&mut warm, true) {
            times.push(time);
            limits.extend(limit);
        }
        let mut go_on = [u8::from(times.len() < LEAST_ROUNDS || began.elapsed().as_secs_f64() < seconds)];
        world.broadcast("whether to go on", 0, &mut go_on)?;
        if go_on[0] == 0 {
            return Ok((times, limits));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_the_divisors() {
        assert_eq!(group_sizes(2), [2]);
        assert_eq!(group_sizes(6), [6, 3, 2]);
        assert_eq!(group_sizes(8), [8, 4, 2]);
        assert_eq!(group_sizes(7), [7]);
    }

    #[test]
    fn bus_bandwidth_is_what_a_rank_must_receive() {
        let line = CollectiveLine::new(Operation::AllReduce, 4, 8_000_000, vec![2e-3, 1e-3, 3e-3], vec![1e-3]);
        assert_eq!((line.median_s, line.best_s, line.rounds), (2e-3, 1e-3, 3));
        assert!((line.gbytes_per_s - 4.0).abs() < 1e-12 && (line.bus_gbytes_per_s - 6.0).abs() < 1e-12);
        assert_eq!(line.fraction, Some(0.5));
        assert_eq!(Operation::AllGather.received(4), 0.75);
    }

    #[test]
    fn every_operation_runs_in_every_group() {
        for (operation, group) in Operation::ALL.into_iter().zip([2, 4, 2, 4]) {
            let (times, limits) = on_threads(4, move |comm| one(comm, operation, group, 1 << 10, 0.0)).unwrap();
            assert!(times.len() == LEAST_ROUNDS && limits.len() == LEAST_ROUNDS && times.iter().all(|t| *t > 0.0));
        }
    }
}
