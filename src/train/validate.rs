//! Loss and bits per byte on held-out shards.

use std::ops::Range;

use anyhow::Result;

use super::engine::Engine;
use super::step::{agree, share_results};
use crate::data::ValidationSet;
use crate::failpoint;
use crate::model::ParamStore;
use crate::parallel::Sharing;
use crate::tensor::Backend;
use crate::tensor::backend::{Batch, Loss};

/// Outcome of one pass over a held-out set.
#[derive(Debug, Clone, PartialEq)]
pub struct Score {
    pub name: String,
    pub loss: Loss,
    /// UTF-8 bytes per token of the set; None when its shards do not say.
    pub bytes_per_token: Option<f64>,
}

impl Score {
    /// Mean cross-entropy per predicted token, nats.
    pub fn mean_loss(&self) -> f64 {
        if self.loss.count == 0 { 0.0 } else { self.loss.sum / self.loss.count as f64 }
    }

    pub fn bits_per_byte(&self) -> Option<f64> {
        self.bytes_per_token.map(|ratio| self.mean_loss() / std::f64::consts::LN_2 / ratio)
    }
}

/// A held-out set with the name it has in the recipe.
pub struct NamedSet {
    pub name: String,
    pub set: ValidationSet,
}

/// Loss over the first `max_tokens` tokens (rounded down to whole windows) of a set, `micro_batch` windows at a time. None when
/// `interrupted` says so between two batches.
#[allow(clippy::too_many_arguments)]
pub fn score<E: Engine>(
    engine: &E,
    params: &ParamStore<E::B>,
    sharing: &dyn Sharing<E::B>,
    named: &NamedSet,
    max_tokens: Option<u64>,
    micro_batch: usize,
    seq_len: usize,
    interrupted: &dyn Fn() -> bool,
) -> Result<Option<Score>> {
    let set = &named.set;
    let windows = max_tokens.map_or(u64::MAX, |t| t / seq_len as u64).min(set.num_windows());
    let mut loss = Loss::default();
    // By the first window of each batch: added up in the order of the windows, whoever scored them.
    let mut sums = vec![0.0; windows as usize];
    let mut one = |first: u64, batch: &Batch| {
        let part = engine.loss(params, &*sharing.cut(batch)?, sharing.peers())?;
        if let Some(sum) = sums.get_mut(first as usize) {
            *sum += part.sum;
        }
        loss.count += part.count;
        Ok(())
    };
    if !each_batch(sharing, windows, micro_batch, interrupted, &|windows| set.batch(windows), &mut one)? {
        return Ok(None);
    }
    if let Some(mesh) = sharing.mesh() {
        share_results(&mesh.world, "losses of held-out windows", &mut loss, &mut [], &mut [&mut sums])?;
    }
    loss.sum = sums.iter().sum();
    Ok(Some(Score { name: named.name.clone(), loss, bytes_per_token: set.bytes_per_token() }))
}

/// Calls `one` with the windows, whole, of this rank's replica out of `0..windows`, `micro_batch` at a time, and the number of the first. False when
/// `interrupted` says so between two batches.
pub fn each_batch<B: Backend>(
    sharing: &dyn Sharing<B>,
    windows: u64,
    micro_batch: usize,
    interrupted: &dyn Fn() -> bool,
    make: &dyn Fn(Range<u64>) -> Result<Batch>,
    one: &mut dyn FnMut(u64, &Batch) -> Result<()>,
) -> Result<bool> {
    let mesh = sharing.mesh();
    let (layout, rank) = sharing.place();
    let (world, replicas, replica) = (mesh.map(|m| &m.world), layout.replicas() as u64, layout.replica_of(rank) as u64);
    // All ranks take part in every round, the last ones of the last round without windows.
    for round in (0..windows).step_by(micro_batch * replicas as usize) {
        mesh.iter().for_each(|mesh| mesh.comm.at(|place| (place.layer, place.phase) = (None, "validation")));
        if agree(world, interrupted())? {
            return Ok(false);
        }
        failpoint::hit("eval")?;
        let first = (round + replica * micro_batch as u64).min(windows);
        let whole = make(first..(first + micro_batch as u64).min(windows))?;
        one(first, &whole)?;
    }
    Ok(true)
}
