//! How large buckets of gradients should be: the smallest that travel at nearly the best rate, measured where they are to travel.
//! `zaya bench collectives` recommends what this finds, and runs with `parallel.bucket_mib = "auto"` use it.

use std::time::{Duration, Instant};

use anyhow::Result;
use serde::Serialize;

use super::group::{Group, even_pieces};
use crate::robust::median;

/// MiB that are tried.
pub const SIZES_MIB: [u64; 4] = [1, 4, 16, 64];
/// What is used where there is nothing to measure.
pub const DEFAULT_MIB: u64 = 16;
/// A bucket is large enough when it travels at this part of the best rate.
const ENOUGH: f64 = 0.9;
/// Time for all sizes together. It is looked at between rounds, so that a slow network costs a few rounds more, or a size that is not tried.
const BUDGET: Duration = Duration::from_secs(1);
const LEAST_ROUNDS: usize = 2;
const MOST_ROUNDS: usize = 50;

/// One size, and how fast it travels.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Rate {
    pub mib: u64,
    /// Bytes of the bucket over the median time of a reduce-scatter, in units of 1e9 a second.
    pub gbytes_per_s: f64,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Found {
    pub bucket_mib: u64,
    /// Of the first rank, sizes rising; other ranks have their own.
    pub rates: Vec<Rate>,
}

impl Found {
    /// For the user, who may want to write the size into the recipe.
    pub fn sentence(&self, ranks: usize) -> String {
        let rates: Vec<String> = self.rates.iter().map(|r| format!("{} MiB at {:.3} GB/s", r.mib, r.gbytes_per_s)).collect();
        format!(
            "parallel.bucket_mib = \"auto\": buckets of {} MiB; a reduce-scatter between {ranks} ranks moves {}",
            self.bucket_mib,
            rates.join(", ")
        )
    }
}

/// The smallest size at nearly the best rate; sizes rise.
pub fn smallest_enough(rates: &[Rate]) -> u64 {
    let best = rates.iter().map(|r| r.gbytes_per_s).fold(0.0, f64::max);
    rates.iter().find(|r| r.gbytes_per_s >= ENOUGH * best).map_or(DEFAULT_MIB, |r| r.mib)
}

/// Measures reduce-scatters of the group's members, who all call this. The first one decides, and all get the same answer.
///
/// # Errors
/// When another rank does not come, or has failed.
pub fn measure(group: &Group) -> Result<Found> {
    let began = Instant::now();
    let mut rates = Vec::new();
    for (i, mib) in SIZES_MIB.into_iter().enumerate() {
        let until = BUDGET * (i as u32 + 1) / SIZES_MIB.len() as u32;
        let bytes = (mib << 20) as usize;
        let mut data = vec![1.0f32; bytes / size_of::<f32>()];
        let pieces = even_pieces(data.len(), group.size());
        let mut times = Vec::new();
        let mut warm = false;
        loop {
            // Sums would grow out of all bounds.
            data.fill(1.0);
            group.barrier("begin of a measured bucket")?;
            let started = Instant::now();
            group.reduce_scatter("measured reduce-scatter", &mut data, &pieces)?;
            group.barrier("end of a measured bucket")?;
            let time = started.elapsed().as_secs_f64();
            // The first round only warms up.
            if std::mem::replace(&mut warm, true) {
                times.push(time);
            }
            let go_on = times.len() < LEAST_ROUNDS || began.elapsed() < until && times.len() < MOST_ROUNDS;
            if !agreed(group, go_on)? {
                break;
            }
        }
        rates.push(Rate { mib, gbytes_per_s: bytes as f64 / median(times) / 1e9 });
        if !agreed(group, began.elapsed() < BUDGET)? {
            break;
        }
    }
    let mut decided = [smallest_enough(&rates)];
    group.broadcast("bucket size", 0, &mut decided)?;
    Ok(Found { bucket_mib: decided[0], rates })
}

/// What the first member says.
fn agreed(group: &Group, own: bool) -> Result<bool> {
    let mut said = [u8::from(own)];
    group.broadcast("whether to measure on", 0, &mut said)?;
    Ok(said[0] != 0)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::parallel::threads::Hub;
    use crate::parallel::{Channel, Comm, Stages};

    #[test]
    fn the_smallest_of_the_fast_ones() {
        let rates = |of: &[(u64, f64)]| of.iter().map(|(mib, r)| Rate { mib: *mib, gbytes_per_s: *r }).collect::<Vec<_>>();
        assert_eq!(smallest_enough(&rates(&[(1, 0.5), (4, 0.89), (16, 0.91), (64, 1.0)])), 16);
        assert_eq!(smallest_enough(&rates(&[(1, 2.0), (4, 1.0)])), 1);
        assert_eq!(smallest_enough(&rates(&[(1, 0.1), (4, 1.0), (16, 0.8), (64, 0.7)])), 4);
        assert_eq!(smallest_enough(&[]), DEFAULT_MIB);
    }

    #[test]
    fn all_ranks_agree_on_a_size_that_was_tried() {
        let ranks = 3;
        let found: Vec<Found> = std::thread::scope(|threads| {
            let each: Vec<_> = (Hub::ranks(ranks, Duration::from_secs(60)).into_iter())
                .map(|transport| {
                    threads.spawn(move || {
                        let comm = Comm::new(Arc::new(transport), Stages::Flat);
                        let group = Group::new(&comm, Channel::Background, "world", (0..ranks).collect());
                        measure(&group).unwrap()
                    })
                })
                .collect();
            each.into_iter().map(|t| t.join().unwrap()).collect()
        });
        assert!(found.iter().all(|f| f.bucket_mib == found[0].bucket_mib));
        assert_eq!(found[0].bucket_mib, smallest_enough(&found[0].rates));
        let sizes: Vec<u64> = found[0].rates.iter().map(|r| r.mib).collect();
        assert!(!sizes.is_empty() && SIZES_MIB.starts_with(&sizes), "{sizes:?}");
        assert!(found[0].rates.iter().all(|r| r.gbytes_per_s > 0.0));
    }
}
