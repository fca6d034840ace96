//! What a model makes of long context: the loss by position, and whether a pair planted early is found again at the end.

use std::collections::BTreeMap;
use std::ops::Range;

use anyhow::Result;
use serde::Serialize;

use super::engine::Engine;
use super::step::{agree, share_results};
use super::validate::{NamedSet, each_batch};
use crate::data::dataset::Dataset;
use crate::data::order::hash;
use crate::model::ParamStore;
use crate::parallel::Sharing;
use crate::tensor::backend::{Batch, Loss};

/// Equal parts of a sequence that have a mean loss each.
const BUCKETS: usize = 8;
/// Sequences for each distance.
const TRIALS: u64 = 8;
/// Distances, the longest being as far as a sequence reaches.
const DISTANCES: usize = 4;
/// Most tokens of a key, and of a value.
const PAIR_TOKENS: usize = 4;

/// Positions `from..to` of all windows.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Bucket {
    pub from: usize,
    pub to: usize,
    /// Mean cross-entropy of the tokens that these positions predict, nats; null where none is predicted.
    pub loss: Option<f64>,
    pub tokens: u64,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Retrieval {
    /// Tokens from the key to its repetition.
    pub distance: usize,
    pub sequences: u64,
    /// Mean over the value's tokens, nats.
    pub log_probability: f64,
    /// Share of the value's tokens that are the most likely ones; null where the engine does not tell.
    pub top1: Option<f64>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ContextReport {
    pub seq_len: usize,
    /// By held-out set.
    pub loss_by_position: BTreeMap<String, Vec<Bucket>>,
    pub retrieval: Vec<Retrieval>,
}

/// What a report is made with.
pub struct Measure<'a, E: Engine> {
    pub engine: &'a E,
    pub params: &'a ParamStore<E::B>,
    pub sharing: &'a dyn Sharing<E::B>,
    pub micro_batch: usize,
    pub seq_len: usize,
    pub vocab_size: usize,
    pub seed: u64,
    pub interrupted: &'a dyn Fn() -> bool,
}

impl<E: Engine> Measure<'_, E> {
    /// On the first `max_tokens` tokens of each set; pairs are planted into tokens of the first one. None when interrupted.
    pub fn report(&self, sets: &[NamedSet], max_tokens: Option<u64>) -> Result<Option<ContextReport>> {
        let mut loss_by_position = BTreeMap::new();
        for named in sets {
            let windows = max_tokens.map_or(u64::MAX, |t| t / self.seq_len as u64).min(named.set.num_windows());
            let Some(buckets) = self.buckets(named, windows)? else { return Ok(None) };
            loss_by_position.insert(named.name.clone(), buckets);
        }
        let mut retrieval = Vec::new();
        let needle = Needle { seq_len: self.seq_len, vocab_size: self.vocab_size, seed: self.seed };
        for distance in needle.distances() {
            let Some(first) = sets.first() else { break };
            let make = |trials: Range<u64>| needle.batch(first.set.dataset(), trials, distance);
            let Some((loss, hits)) = self.sum(TRIALS, &make)? else { return Ok(None) };
            let tokens = loss.count.max(1) as f64;
            let top1 = hits.map(|n| n as f64 / tokens);
            retrieval.push(Retrieval { distance, sequences: TRIALS, log_probability: -loss.sum / tokens, top1 });
        }
        Ok(Some(ContextReport { seq_len: self.seq_len, loss_by_position, retrieval }))
    }

    /// Loss by position over `windows` windows. Each is read once, however many parts its positions have.
    fn buckets(&self, named: &NamedSet, windows: u64) -> Result<Option<Vec<Bucket>>> {
        let part = |i: usize| i * self.seq_len / BUCKETS..(i + 1) * self.seq_len / BUCKETS;
        let world = self.sharing.mesh().map(|mesh| &mesh.world);
        let (mut losses, mut stopped) = ([Loss::default(); BUCKETS], false);
        let mut one = |_: u64, batch: &Batch| {
            for (i, loss) in losses.iter_mut().enumerate() {
                // A pass over a long sequence takes its time.
                if agree(world, (self.interrupted)())? {
                    stopped = true;
                    return Ok(());
                }
                let batch = only_positions(batch.clone(), &part(i));
                let of_batch = self.engine.loss(self.params, &*self.sharing.cut(&batch)?, self.sharing.peers())?;
                loss.sum += of_batch.sum;
                loss.count += of_batch.count;
            }
            Ok(())
        };
        let make = |windows: Range<u64>| named.set.batch(windows);
        if !each_batch(self.sharing, windows, self.micro_batch, self.interrupted, &make, &mut one)? || stopped {
            return Ok(None);
        }
        let mut buckets = Vec::with_capacity(BUCKETS);
        for (i, mut loss) in losses.into_iter().enumerate() {
            if let Some(world) = world {
                share_results(world, "losses by position", &mut loss, &mut [], &mut [])?;
            }
            let mean = (loss.count > 0).then(|| loss.sum / loss.count as f64);
            buckets.push(Bucket { from: part(i).start, to: part(i).end, loss: mean, tokens: loss.count });
        }
        Ok(Some(buckets))
    }

    /// Loss over all labels of `windows` windows, and how many of them are the most likely tokens, where the engine tells.
    fn sum(&self, windows: u64, make: &dyn Fn(Range<u64>) -> Result<Batch>) -> Result<Option<(Loss, Option<u64>)>> {
        let (mut loss, mut hits) = (Loss::default(), Some(0));
        let mut one = |_: u64, batch: &Batch| {
            let batch = &*self.sharing.cut(batch)?;
            let part = self.engine.loss(self.params, batch, self.sharing.peers())?;
            loss.sum += part.sum;
            loss.count += part.count;
            let found = self.engine.top1(self.params, batch, self.sharing.peers())?;
            hits = hits.zip(found).map(|(a, b)| a + b);
            Ok(())
        };
        if !each_batch(self.sharing, windows, self.micro_batch, self.interrupted, make, &mut one)? {
            return Ok(None);
        }
        if let Some(mesh) = self.sharing.mesh() {
            let mut counts = [vec![hits.unwrap_or(0)]];
            share_results(&mesh.world, "losses and hits of held-out windows", &mut loss, &mut counts, &mut [])?;
            hits = hits.map(|_| counts[0][0]);
        }
        Ok(Some((loss, hits)))
    }
}

/// The batch with labels at these positions of its sequences alone.
fn only_positions(mut batch: Batch, positions: &Range<usize>) -> Batch {
    for (row, label) in batch.labels.iter_mut().enumerate() {
        if !positions.contains(&(row % batch.seq)) {
            *label = -1;
        }
    }
    batch
}

/// Sequences of held-out tokens with a made-up key and value planted in them, and both once more at their end.
struct Needle {
    seq_len: usize,
    vocab_size: usize,
    seed: u64,
}

impl Needle {
    /// Tokens of a key, and of a value.
    fn pair_tokens(&self) -> usize {
        (self.seq_len / 8).clamp(1, PAIR_TOKENS)
    }

    fn distances(&self) -> Vec<usize> {
        let (pair, longest) = (2 * self.pair_tokens(), (self.seq_len + 1).saturating_sub(2 * self.pair_tokens()));
        let mut all: Vec<usize> = (1..=DISTANCES).map(|k| longest * k / DISTANCES).filter(|d| *d >= pair).collect();
        all.dedup();
        all
    }

    /// Only the value's second appearance has labels. Tokens and pairs are those of the trial, at whatever distance.
    fn batch(&self, background: &Dataset, trials: Range<u64>, distance: usize) -> Result<Batch> {
        let (seq, n) = (self.seq_len, self.pair_tokens());
        let mut batch = Batch { batch: (trials.end - trials.start) as usize, seq, ..Batch::default() };
        for trial in trials {
            let mut ids = Vec::with_capacity(seq + 1);
            let mut from = hash(self.seed, &[1, trial]) % background.num_tokens();
            while ids.len() < seq + 1 {
                let to = background.num_tokens().min(from + (seq + 1 - ids.len()) as u64);
                background.read(from, to, self.vocab_size, &mut ids)?;
                from = 0;
            }
            let pair = |i: usize| (hash(self.seed, &[2, trial, i as u64]) % self.vocab_size as u64) as u32;
            let again = seq + 1 - 2 * n;
            for i in 0..2 * n {
                ids[again - distance + i] = pair(i);
                ids[again + i] = pair(i);
            }
            batch.ids.extend(&ids[..seq]);
            batch.labels.extend((1..=seq).map(|i| if i >= again + n { i64::from(ids[i]) } else { -1 }));
        }
        Ok(batch)
    }
}

impl ContextReport {
    /// Lines for the user; `when` is "before" or "after".
    pub fn tell(&self, when: &str) {
        for (name, buckets) in &self.loss_by_position {
            tell!("context {when}: held-out `{name}`, mean loss by position");
            for b in buckets {
                let loss = b.loss.map_or("-".into(), |l| format!("{l:.4}"));
                tell!("  {:>8} to {:<8} {loss:>9}   {} tokens", b.from, b.to, b.tokens);
            }
        }
        if !self.retrieval.is_empty() {
            tell!("context {when}: a pair planted early, its value asked for at the end");
        }
        for r in &self.retrieval {
            let top1 = r.top1.map_or("-".into(), |t| format!("{:.1} %", 100.0 * t));
            tell!("  {:>8} tokens back   log-probability {:.4}   most likely {top1}", r.distance, r.log_probability);
        }
    }
}
