//! Whole examples in windows: best-fit packing.
//!
//! Documents are shuffled once, by the seed, and taken 4,096 at a time. The documents of such a group go into windows of L rows,
//! the longest first, each into the fullest window that still has room (best-fit decreasing; of equals the first). No document is
//! cut; what is left of a window is padding. A document longer than L is trimmed if it is a conversation whose answers fit
//! ([`trim`](crate::text::chat::trim)), and else passed over.
//!
//! An epoch is every window once, in an order of its own, and so every document once. Which documents share a window stays: where
//! documents are hidden from each other, it does not matter. Sample s is therefore window `permutation(s mod W)` of epoch `s / W`, W
//! being the number of windows, which one look at all lengths counts when the data is opened.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use anyhow::{Result, anyhow};
use rayon::prelude::*;

use super::dataset::Dataset;
use super::order::Permutation;
use super::source::{Order, Sample};
use crate::error::bad_input;
use crate::text::chat::trim::{Trimmed, trim};

/// Documents that are packed together.
const GROUP: u64 = 4096;
/// Packed groups that stay in memory: those of four million documents, in some 50 MB.
const KEPT_GROUPS: usize = 1024;

/// Documents of each window of a group.
type Windows = Arc<Vec<Vec<u64>>>;

#[derive(Debug)]
pub struct BestFit {
    dataset: Dataset,
    seed: u64,
    seq_len: usize,
    vocab_size: usize,
    documents: Permutation,
    /// Windows before each group, then their number.
    first_window: Vec<u64>,
    too_long: u64,
    /// By the group's number modulo its length.
    kept: Mutex<Vec<Option<(u64, Windows)>>>,
}

/// What a document comes to.
enum Fit {
    Rows(usize),
    Empty,
    TooLong,
}

impl BestFit {
    /// Looks at the lengths of all documents.
    ///
    /// # Errors
    /// When an index is damaged, or no document fits.
    pub fn new(dataset: Dataset, seed: u64, seq_len: usize, vocab_size: usize) -> Result<Self> {
        let documents = Permutation::new(dataset.num_documents(), seed, &[Order::Packing as u64]);
        let mut out = Self {
            dataset,
            seed,
            seq_len,
            vocab_size,
            documents,
            first_window: vec![0],
            too_long: 0,
            kept: Mutex::new(vec![None; KEPT_GROUPS]),
        };
        let groups = out.dataset.num_documents().div_ceil(GROUP);
        let packed: Vec<(u64, u64)> = (0..groups)
            .into_par_iter()
            .map(|g| out.pack(g).map(|(windows, long)| (windows.len() as u64, long)))
            .collect::<Result<_>>()?;
        for (windows, too_long) in packed {
            out.first_window.push(out.num_windows() + windows);
            out.too_long += too_long;
        }
        if out.num_windows() == 0 {
            let first = out.dataset.shards()[0].bin_path().display().to_string();
            return Err(bad_input(format!(
                "the data source that begins with {first} has no document that fits into a sequence of {seq_len} tokens, trimmed or not: \
                 nothing to train on"
            )));
        }
        Ok(out)
    }

    pub fn dataset(&self) -> &Dataset {
        &self.dataset
    }

    /// Windows, and so samples, of an epoch.
    pub fn num_windows(&self) -> u64 {
        self.first_window.last().copied().unwrap_or(0)
    }

    /// Documents that are never shown.
    pub fn too_long(&self) -> u64 {
        self.too_long
    }

    /// Fills `sample` with sample number `s`.
    pub fn read(&self, s: u64, sample: &mut Sample) -> Result<()> {
        sample.clear();
        let windows = self.num_windows();
        let (epoch, at) = (s / windows, s % windows);
        let window = Permutation::new(windows, self.seed, &[Order::Windows as u64, epoch]).apply(at);
        let group = self.first_window.partition_point(|first| *first <= window) as u64 - 1;
        let packed = self.group(group)?;
        let documents = &packed[(window - self.first_window[group as usize]) as usize];
        let order = Permutation::new(documents.len() as u64, self.seed, &[Order::Documents as u64, epoch, window]);
        for i in 0..documents.len() as u64 {
            self.append(documents[order.apply(i) as usize], sample)?;
        }
        sample.pad(self.seq_len + 1);
        Ok(())
    }

    fn append(&self, document: u64, sample: &mut Sample) -> Result<()> {
        let (start, end) = self.dataset.document(document)?;
        sample.starts.push(sample.ids.len() as u32);
        let parts = match self.trimmed(start, end)? {
            Trimmed::Parts(parts) => parts,
            _ => std::iter::once(0..(end - start) as usize).collect(),
        };
        for Range { start: from, end: to } in parts {
            self.dataset.read_marked(start + from as u64, start + to as u64, self.vocab_size, sample)?;
        }
        Ok(())
    }

    /// What of a document is shown.
    fn trimmed(&self, start: u64, end: u64) -> Result<Trimmed> {
        match () {
            () if end - start <= self.seq_len as u64 => Ok(Trimmed::Whole),
            () if !self.dataset.has_marks() => Ok(Trimmed::TooLong),
            () => {
                let mut marks = Vec::new();
                self.dataset.read_marks(start, end, &mut marks);
                Ok(trim(&marks, self.seq_len))
            }
        }
    }

    fn fit(&self, document: u64) -> Result<Fit> {
        let (start, end) = self.dataset.document(document)?;
        Ok(match self.trimmed(start, end)? {
            _ if start == end => Fit::Empty,
            Trimmed::Whole => Fit::Rows((end - start) as usize),
            Trimmed::Parts(parts) => Fit::Rows(parts.iter().map(Range::len).sum()),
            Trimmed::TooLong => Fit::TooLong,
        })
    }

    fn group(&self, group: u64) -> Result<Windows> {
        let lock = || self.kept.lock().map_err(|_| anyhow!("another thread failed while it packed documents"));
        let place = group as usize % KEPT_GROUPS;
        if let Some((number, windows)) = &lock()?[place]
            && *number == group
        {
            return Ok(windows.clone());
        }
        let windows = Arc::new(self.pack(group)?.0);
        lock()?[place] = Some((group, windows.clone()));
        Ok(windows)
    }

    /// The windows of a group, and how many of its documents are too long.
    fn pack(&self, group: u64) -> Result<(Vec<Vec<u64>>, u64)> {
        let places = group * GROUP..((group + 1) * GROUP).min(self.dataset.num_documents());
        let mut fitting = Vec::with_capacity(places.clone().count());
        let mut too_long = 0;
        for place in places {
            let document = self.documents.apply(place);
            match self.fit(document)? {
                Fit::Rows(rows) => fitting.push((rows, document)),
                Fit::Empty => {}
                Fit::TooLong => too_long += 1,
            }
        }
        // A stable sort: of equal lengths the one that was shuffled to the front.
        fitting.sort_by_key(|(rows, _)| std::cmp::Reverse(*rows));
        Ok((best_fit(&fitting, self.seq_len), too_long))
    }
}

/// Puts items of (size, item), none larger than `capacity`, into bins: each into the fullest with room for it, of equals the first.
fn best_fit(items: &[(usize, u64)], capacity: usize) -> Vec<Vec<u64>> {
    let mut bins: Vec<Vec<u64>> = Vec::new();
    let mut room = BTreeSet::new();
    for (size, item) in items {
        let (left, bin) = match room.range((*size, 0)..).next().copied() {
            Some(found) => {
                room.remove(&found);
                found
            }
            None => {
                bins.push(Vec::new());
                (capacity, bins.len() - 1)
            }
        };
        bins[bin].push(*item);
        room.insert((left - size, bin));
    }
    bins
}

#[cfg(test)]
mod tests {
    use super::super::order::hash;
    use super::*;

    /// The same rule, looking at every bin for every item.
    fn slow(items: &[(usize, u64)], capacity: usize) -> Vec<Vec<u64>> {
        let mut bins: Vec<(usize, Vec<u64>)> = Vec::new();
        for (size, item) in items {
            let best = (0..bins.len()).filter(|b| bins[*b].0 >= *size).min_by_key(|b| (bins[*b].0, *b));
            let bin = best.unwrap_or_else(|| {
                bins.push((capacity, Vec::new()));
                bins.len() - 1
            });
            bins[bin].0 -= size;
            bins[bin].1.push(*item);
        }
        bins.into_iter().map(|(_, bin)| bin).collect()
    }

    #[test]
    fn packing_is_best_fit_decreasing() {
        for case in 0..200u64 {
            let capacity = 1 + (hash(case, &[1]) % 60) as usize;
            let mut items: Vec<(usize, u64)> =
                (0..hash(case, &[2]) % 80).map(|i| (1 + (hash(case, &[3, i]) % capacity as u64) as usize, i)).collect();
            items.sort_by_key(|(size, _)| std::cmp::Reverse(*size));
            assert_eq!(best_fit(&items, capacity), slow(&items, capacity), "case {case}");
        }
        assert_eq!(best_fit(&[(7, 0), (5, 1), (4, 2), (3, 3), (1, 4)], 10), [vec![0, 3], vec![1, 2, 4]]);
        assert!(best_fit(&[], 5).is_empty());
    }
}
