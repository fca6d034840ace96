//! Collectives between ranks that are threads, against what these threads can copy.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::Serialize;

use crate::parallel::bucket;
use crate::parallel::group::even_pieces;
use crate::parallel::threads::Hub;
use crate::parallel::{Channel, Comm, Group, Stages};
use crate::robust::median;

/// Bytes of the messages that are measured.
const SIZES: [usize; 6] = [64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20];
const LEAST_ROUNDS: usize = 5;
/// Longer than any of these operations takes.
const TIMEOUT: Duration = Duration::from_secs(120);

#[derive(Debug, Clone, Serialize)]
pub struct CollectiveLine {
    pub name: &'static str,
    pub bytes: usize,
    pub rounds: usize,
    pub median_s: f64,
    pub best_s: f64,
    /// Bytes over the median time.
    pub gbytes_per_s: f64,
    /// Time in which all ranks, at once, copy as many bytes as each of them must receive; measured round by round beside it.
    pub limit_s: f64,
    /// `limit_s` over `median_s`.
    pub fraction: f64,
}

#[derive(Debug, Clone, Serialize)]
pub struct Collectives {
    pub ranks: usize,
    pub lines: Vec<CollectiveLine>,
    /// Smallest bucket that travels at 0.9 of the best rate: what `parallel.bucket_mib` should be. Measured as runs with "auto" do.
    pub bucket_mib: u64,
}

/// Operations that are measured, and how often each rank receives the part of the bytes that is the others'.
const OPERATIONS: [(&str, f64); 3] = [("all-reduce", 2.0), ("reduce-scatter", 1.0), ("all-gather", 1.0)];

pub fn measure(ranks: usize, seconds: f64, progress: &dyn Fn(&str)) -> Result<Collectives> {
    let mut lines = Vec::new();
    let others = (ranks as f64 - 1.0) / ranks as f64;
    for (name, times) in OPERATIONS {
        for bytes in SIZES {
            progress(&format!("{name} of {} KiB between {ranks} ranks", bytes >> 10));
            lines.push(one(name, times * others, bytes, ranks, seconds)?);
        }
    }
    progress(&format!("size of buckets between {ranks} ranks"));
    Ok(Collectives { ranks, bucket_mib: on_ranks(ranks, bucket::measure)?.bucket_mib, lines })
}

/// Does the same on all of so many ranks; what the first one found.
fn on_ranks<T: Send + 'static>(ranks: usize, body: impl Fn(&Group) -> Result<T> + Clone + Send + 'static) -> Result<T> {
    let threads: Vec<_> = (Hub::ranks(ranks, TIMEOUT).into_iter())
        .map(|transport| {
            let body = body.clone();
            let body = move || {
                let comm = Comm::new(Arc::new(transport), Stages::Flat);
                body(&Group::new(&comm, Channel::Main, "world", (0..ranks).collect()))
            };
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

fn one(name: &'static str, share: f64, bytes: usize, ranks: usize, seconds: f64) -> Result<CollectiveLine> {
    let received = (bytes as f64 * share) as usize / size_of::<f32>();
    let (times, limits) = on_ranks(ranks, move |group| rounds(group, name, bytes, received, seconds))?;
    let (median_s, limit_s) = (median(times.clone()), median(limits));
    Ok(CollectiveLine {
        name,
        bytes,
        rounds: times.len(),
        median_s,
        best_s: times.into_iter().fold(f64::INFINITY, f64::min),
        gbytes_per_s: bytes as f64 / median_s / 1e9,
        limit_s,
        fraction: limit_s / median_s,
    })
}

/// Times of the operation and of as large a copy, round by round, from start to the end of the last rank.
fn rounds(group: &Group, name: &'static str, bytes: usize, received: usize, seconds: f64) -> Result<(Vec<f64>, Vec<f64>)> {
    let numbers = bytes / size_of::<f32>();
    let mut data = vec![1.0f32; numbers];
    let (from, mut to) = (vec![1.0f32; received], vec![0.0f32; received]);
    let pieces = even_pieces(numbers, group.size());
    let (mut times, mut limits) = (Vec::new(), Vec::new());
    let began = Instant::now();
    loop {
        group.barrier("round")?;
        let started = Instant::now();
        match name {
            "all-reduce" => group.all_reduce(name, &mut data)?,
            "reduce-scatter" => group.reduce_scatter(name, &mut data, &pieces)?,
            _ => group.all_gather(name, &mut data, &pieces)?,
        }
        group.barrier("end of the operation")?;
        let time = started.elapsed().as_secs_f64();
        let started = Instant::now();
        to.copy_from_slice(std::hint::black_box(&from));
        group.barrier("end of the copy")?;
        let limit = started.elapsed().as_secs_f64();
        // Sums would grow out of all bounds.
        data.fill(1.0);
        // The first round only warms up; the first rank says when it is enough.
        if times.is_empty() && limits.is_empty() {
            (times, limits) = (vec![time], vec![limit]);
            continue;
        }
        times.push(time);
        limits.push(limit);
        let mut go_on = [u8::from(times.len() <= LEAST_ROUNDS || began.elapsed().as_secs_f64() < seconds)];
        group.broadcast("whether to go on", 0, &mut go_on)?;
        if go_on[0] == 0 {
            break;
        }
    }
    std::hint::black_box(&to);
    Ok((times.split_off(1), limits.split_off(1)))
}
