//! The endless stream of training samples of one dataset.
//!
//! Epoch e of a dataset is all of its documents once, in an order fixed by (seed, e). The epochs laid end to end are one
//! endless stream of tokens, of which window w covers `w * L .. w * L + L + 1`: L inputs, and their labels one further.
//! Windows therefore lose nothing and repeat nothing: every token of every epoch is an input once, also across the
//! border of two epochs, where a window simply runs on. A dataset shorter than a window runs through several epochs
//! within one.
//!
//! Windows are drawn in shuffled order too, epoch by epoch, so that pieces of one long document do not follow each other:
//! the windows that *begin* in epoch e, numbers ceil(e T / L) to ceil((e + 1) T / L) for T tokens a dataset, are
//! permuted among themselves. Sample number s is the s-th window in that order, which is arithmetic on (seed, s):
//! any sample is found in constant time, without a walk from the start.

use std::sync::{Arc, Mutex};

use anyhow::{Result, anyhow};

use super::dataset::Dataset;
use super::order::Permutation;
use crate::error::bad_input;

/// Blocks of neighbouring documents that are shuffled as units; documents are shuffled within a block as well. Up to
/// this many documents a block is one document. Beyond, it bounds the memory (8 MB) and the time (one look into the
/// index a block) that an epoch's order takes, whatever the number of documents.
const MAX_BLOCKS: u64 = 1 << 20;

/// Of very many documents the blocks are fewer, so that an epoch's order is found in a fraction of a second.
const MANY_DOCUMENTS: u64 = 1 << 28;
const MAX_BLOCKS_OF_MANY: u64 = 1 << 18;

/// Orders of recent epochs that stay in memory: a window touches two, unless the dataset is tiny.
const KEPT_EPOCHS: usize = 4;

/// Tells apart the permutations that one seed serves.
#[derive(Clone, Copy)]
pub(super) enum Order {
    Blocks = 1,
    Documents = 2,
    Windows = 3,
    Packing = 4,
}

/// Order of the documents of one epoch.
#[derive(Debug)]
struct EpochOrder {
    blocks: Permutation,
    /// Tokens of the epoch before each block, in the epoch's order; then the total.
    first_token: Vec<u64>,
}

/// One dataset as training reads it.
#[derive(Debug)]
pub struct Source {
    dataset: Dataset,
    seed: u64,
    seq_len: u64,
    vocab_size: usize,
    docs_per_block: u64,
    /// Most recently used last.
    epochs: Mutex<Vec<(u64, Arc<EpochOrder>)>>,
}

/// One training sample.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Sample {
    /// `[seq_len + 1]`
    pub ids: Vec<u32>,
    /// Positions in `ids` where a document begins, ascending; position 0 only if one begins right there.
    pub starts: Vec<u32>,
    /// What is known of each id ([`marks`](crate::text::chat::marks)). Empty = all are learnt.
    pub marks: Vec<u8>,
    /// Ids at the end that stand for nothing.
    pub padding: usize,
}

impl Sample {
    pub fn clear(&mut self) {
        self.ids.clear();
        self.starts.clear();
        self.marks.clear();
        self.padding = 0;
    }

    /// Fills it up to `len` ids.
    pub fn pad(&mut self, len: usize) {
        self.padding = len - self.ids.len();
        self.ids.resize(len, 0);
        if !self.marks.is_empty() {
            self.marks.resize(len, 0);
        }
    }
}

impl Source {
    /// Refuses a dataset without tokens. Ids of `vocab_size` and above are refused when they are met.
    pub fn new(dataset: Dataset, seed: u64, seq_len: usize, vocab_size: usize) -> Result<Self> {
        if dataset.num_tokens() == 0 {
            let first = dataset.shards()[0].bin_path().display().to_string();
            return Err(bad_input(format!("the data source that begins with {first} holds no tokens: nothing to train on")));
        }
        if seq_len == 0 {
            return Err(bad_input("the sequence length is 0"));
        }
        let max_blocks = if dataset.num_documents() > MANY_DOCUMENTS { MAX_BLOCKS_OF_MANY } else { MAX_BLOCKS };
        Ok(Self::with_max_blocks(dataset, seed, seq_len, vocab_size, max_blocks))
    }

    fn with_max_blocks(dataset: Dataset, seed: u64, seq_len: usize, vocab_size: usize, max_blocks: u64) -> Self {
        let docs_per_block = dataset.num_documents().div_ceil(max_blocks).next_power_of_two();
        Self { dataset, seed, seq_len: seq_len as u64, vocab_size, docs_per_block, epochs: Mutex::default() }
    }

    pub fn dataset(&self) -> &Dataset {
        &self.dataset
    }

    pub fn into_dataset(self) -> Dataset {
        self.dataset
    }

    /// Epoch in which sample `s` begins.
    pub fn epoch_of_sample(&self, s: u64) -> u64 {
        (u128::from(s) * u128::from(self.seq_len) / u128::from(self.dataset.num_tokens())) as u64
    }

    /// First of the windows that begin in epoch `e`.
    pub(super) fn first_window(&self, e: u64) -> u64 {
        (u128::from(e) * u128::from(self.dataset.num_tokens())).div_ceil(u128::from(self.seq_len)) as u64
    }

    /// Window that sample `s` shows.
    fn window_of_sample(&self, s: u64) -> u64 {
        let epoch = self.epoch_of_sample(s);
        let (first, end) = (self.first_window(epoch), self.first_window(epoch + 1));
        first + Permutation::new(end - first, self.seed, &[Order::Windows as u64, epoch]).apply(s - first)
    }

    /// Fills `sample` with sample number `s`.
    pub fn read(&self, s: u64, sample: &mut Sample) -> Result<()> {
        sample.clear();
        let tokens = u128::from(self.dataset.num_tokens());
        let from = u128::from(self.window_of_sample(s)) * u128::from(self.seq_len);
        let (mut epoch, mut at) = ((from / tokens) as u64, (from % tokens) as u64);
        let wanted = self.seq_len as usize + 1;
        while sample.ids.len() < wanted {
            self.read_epoch(epoch, at, wanted, sample)?;
            (epoch, at) = (epoch + 1, 0);
        }
        Ok(())
    }

    /// Appends tokens of `epoch` from its token `at` on, until `sample` holds `wanted` or the epoch ends.
    fn read_epoch(&self, epoch: u64, at: u64, wanted: usize, sample: &mut Sample) -> Result<()> {
        let order = self.epoch_order(epoch)?;
        let mut block = order.first_token.partition_point(|first| *first <= at) as u64 - 1;
        // Tokens still to be passed over in the first block.
        let mut skip = at - order.first_token[block as usize];
        while sample.ids.len() < wanted && block < self.num_blocks() {
            if order.first_token[block as usize] == order.first_token[block as usize + 1] {
                // Nothing but empty documents.
                block += 1;
                continue;
            }
            let (first, end) = self.block(order.blocks.apply(block));
            let within = Permutation::new(end - first, self.seed, &[Order::Documents as u64, epoch, block]);
            for i in 0..end - first {
                let (start, stop) = self.dataset.document(first + within.apply(i))?;
                if stop - start <= skip {
                    skip -= stop - start;
                    continue;
                }
                if skip == 0 {
                    sample.starts.push(sample.ids.len() as u32);
                }
                let from = start + skip;
                skip = 0;
                let to = stop.min(from + (wanted - sample.ids.len()) as u64);
                self.dataset.read_marked(from, to, self.vocab_size, sample)?;
                if sample.ids.len() == wanted {
                    break;
                }
            }
            block += 1;
        }
        Ok(())
    }

    fn num_blocks(&self) -> u64 {
        self.dataset.num_documents().div_ceil(self.docs_per_block)
    }

    /// Documents of block `b`, in file order.
    fn block(&self, b: u64) -> (u64, u64) {
        let first = b * self.docs_per_block;
        (first, (first + self.docs_per_block).min(self.dataset.num_documents()))
    }

    fn epoch_order(&self, epoch: u64) -> Result<Arc<EpochOrder>> {
        let lock = || self.epochs.lock().map_err(|_| anyhow!("another thread failed while it ordered an epoch's documents"));
        {
            let mut kept = lock()?;
            if let Some(i) = kept.iter().position(|(e, _)| *e == epoch) {
                let entry = kept.remove(i);
                let order = entry.1.clone();
                kept.push(entry);
                return Ok(order);
            }
        }
        let order = Arc::new(self.build_epoch_order(epoch)?);
        let mut kept = lock()?;
        if kept.len() >= KEPT_EPOCHS {
            kept.remove(0);
        }
        kept.push((epoch, order.clone()));
        Ok(order)
    }

    fn build_epoch_order(&self, epoch: u64) -> Result<EpochOrder> {
        let blocks = Permutation::new(self.num_blocks(), self.seed, &[Order::Blocks as u64, epoch]);
        let starts = self.dataset.starts_of_every(self.docs_per_block)?;
        let mut first_token = Vec::with_capacity(self.num_blocks() as usize + 1);
        let mut total = 0;
        first_token.push(0);
        for b in 0..self.num_blocks() {
            let block = blocks.apply(b);
            let (first, end) = self.block(block);
            let (start, stop) = (starts[block as usize], starts[block as usize + 1]);
            total += stop.checked_sub(start).ok_or_else(|| {
                anyhow!("documents {first} to {end} of a data source end before they begin: an index is damaged")
            })?;
            first_token.push(total);
        }
        if total != self.dataset.num_tokens() {
            return Err(anyhow!(
                "the documents of a data source hold {total} tokens, its files {}: an index is damaged (first file: {})",
                self.dataset.num_tokens(),
                self.dataset.shards()[0].bin_path().display()
            ));
        }
        Ok(EpochOrder { blocks, first_token })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::shard::TokenType;
    use crate::data::writer::ShardWriter;
    use std::collections::HashMap;

    /// Documents of the given lengths; the tokens are numbered through, so each says where it comes from.
    fn dataset(dir: &std::path::Path, lengths: &[u32]) -> Dataset {
        let prefix = dir.join("numbered");
        let mut writer = ShardWriter::create(&prefix, TokenType::I32, true).unwrap();
        let mut next = 0;
        for len in lengths {
            writer.push(&(next..next + len).collect::<Vec<_>>()).unwrap();
            next += len;
        }
        writer.publish(|_| Ok(String::from("{}"))).unwrap();
        std::fs::remove_file(prefix.with_extension("json")).unwrap();
        Dataset::open(&[prefix]).unwrap()
    }

    fn sample(source: &Source, s: u64) -> Sample {
        let mut sample = Sample::default();
        source.read(s, &mut sample).unwrap();
        sample
    }

    /// The first `windows` windows in stream order, whatever order the samples come in.
    fn stream(source: &Source, windows: u64) -> Vec<u32> {
        let order: HashMap<u64, u64> = (0..windows * 2 + 8).map(|s| (source.window_of_sample(s), s)).collect();
        (0..windows).flat_map(|w| sample(source, order[&w]).ids[..source.seq_len as usize].to_vec()).collect()
    }

    #[test]
    fn every_epoch_is_every_document_once_whole_and_shuffled() {
        let dir = tempfile::tempdir().unwrap();
        let lengths = [5, 1, 9, 3, 3, 0, 12, 2, 7, 1, 1, 4, 30, 2, 6, 8, 0];
        let total: u32 = lengths.iter().sum();
        for (seq_len, max_blocks) in [(1, 1 << 20), (7, 1 << 20), (8, 4), (94, 1 << 20), (200, 1), (333, 3)] {
            let source = Source::with_max_blocks(dataset(dir.path(), &lengths), 11, seq_len, 1000, max_blocks);
            let epochs = 5;
            let windows = (epochs as u64 * u64::from(total)).div_ceil(seq_len as u64);
            let tokens = stream(&source, windows);
            let mut orders = Vec::new();
            for epoch in tokens.chunks_exact(total as usize).take(epochs) {
                let mut sorted = epoch.to_vec();
                sorted.sort_unstable();
                assert_eq!(sorted, (0..total).collect::<Vec<_>>(), "L = {seq_len}: an epoch is not all tokens once");
                // Inside a document tokens follow each other; count the places where they do not.
                let breaks = epoch.windows(2).filter(|w| w[1] != w[0] + 1).count();
                assert!(breaks < lengths.len(), "L = {seq_len}: documents are torn apart");
                orders.push(epoch.to_vec());
            }
            orders.dedup();
            assert_eq!(orders.len(), epochs, "L = {seq_len}, blocks {max_blocks}: two epochs in a row share their order");
        }
    }

    #[test]
    fn no_sample_repeats_within_an_epoch_and_labels_overlap_by_one() {
        let dir = tempfile::tempdir().unwrap();
        let source = Source::new(dataset(dir.path(), &[40, 25, 61, 3]), 5, 4, 1000).unwrap();
        let mut first_inputs = std::collections::HashSet::new();
        let end = source.first_window(1);
        assert_eq!(end, 129u64.div_ceil(4));
        for s in 0..end {
            assert_eq!(source.epoch_of_sample(s), 0);
            assert!(first_inputs.insert(sample(&source, s).ids[0]), "sample {s} repeats");
        }
        assert_eq!(source.epoch_of_sample(end), 1);
        let order: HashMap<u64, u64> = (0..2 * end + 2).map(|s| (source.window_of_sample(s), s)).collect();
        for w in 0..end {
            let (a, b) = (sample(&source, order[&w]), sample(&source, order[&(w + 1)]));
            assert_eq!(a.ids.len(), 5);
            assert_eq!(a.ids[4], b.ids[0], "the label of a window's last token is the next window's first");
        }
    }

    #[test]
    fn starts_are_where_documents_begin() {
        let dir = tempfile::tempdir().unwrap();
        let lengths = [3u32, 4, 0, 1, 6];
        let begins: Vec<u32> = vec![0, 3, 7, 8];
        let source = Source::new(dataset(dir.path(), &lengths), 9, 5, 1000).unwrap();
        for s in 0..60 {
            let sample = sample(&source, s);
            let expected: Vec<u32> = (0..sample.ids.len() as u32).filter(|p| begins.contains(&sample.ids[*p as usize])).collect();
            assert_eq!(sample.starts, expected, "sample {s}");
        }
    }

    #[test]
    fn one_short_document_wraps_epochs() {
        let dir = tempfile::tempdir().unwrap();
        let source = Source::new(dataset(dir.path(), &[3]), 1, 8, 10).unwrap();
        for s in 0..9 {
            let got = sample(&source, s);
            let first = got.ids[0];
            assert_eq!(got.ids, (0..9).map(|i| (first + i) % 3).collect::<Vec<_>>());
        }
        assert_eq!(stream(&source, 3), (0..24).map(|i| i % 3).collect::<Vec<_>>());
    }

    #[test]
    fn a_token_beyond_the_vocabulary_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let source = Source::new(dataset(dir.path(), &[4, 4]), 1, 8, 7).unwrap();
        let error = format!("{:#}", source.read(0, &mut Sample::default()).unwrap_err());
        assert!(error.contains("numbered.bin, token 7 (document 1 of its source): id 7"), "{error}");
    }

    #[test]
    fn seeds_give_other_orders() {
        let dir = tempfile::tempdir().unwrap();
        let lengths: Vec<u32> = (1..60).collect();
        let of = |seed| {
            let source = Source::new(dataset(dir.path(), &lengths), seed, 16, 5000).unwrap();
            (0..50).map(|s| sample(&source, s)).collect::<Vec<_>>()
        };
        assert_eq!(of(1), of(1));
        assert_ne!(of(1), of(2));
    }
}
