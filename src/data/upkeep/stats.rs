//! `zaya tokenize stats`: how many documents and tokens, and how long.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::Result;
use serde::Serialize;

use super::shards_of;
use crate::data::dataset::Dataset;

/// Figures of some shards together.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Stats {
    pub shards: usize,
    pub documents: u64,
    pub tokens: u64,
    /// UTF-8 bytes of all text; none where a shard has no sidecar.
    pub text_bytes: Option<u64>,
    /// Ends of documents among the tokens.
    pub bytes_per_token: Option<f64>,
    /// Bytes of an id.
    pub id_bytes: u64,
    /// In tokens, ends included; none without documents.
    pub lengths: Option<Lengths>,
    /// Documents by length, in powers of two.
    pub histogram: Vec<Bucket>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Lengths {
    pub min: u64,
    pub mean: f64,
    /// The length that so many percent of the documents do not exceed.
    pub p50: u64,
    pub p90: u64,
    pub p99: u64,
    pub max: u64,
}

/// Documents of `from..=to` tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Bucket {
    pub from: u64,
    pub to: u64,
    pub documents: u64,
    pub tokens: u64,
}

/// Walks the indices of the shards or sets that `prefixes` name.
pub fn stats(prefixes: &[PathBuf]) -> Result<Stats> {
    let mut paths = Vec::new();
    for prefix in prefixes {
        paths.extend(shards_of(prefix)?.0);
    }
    let dataset = Dataset::open(&paths)?;
    let mut counts = BTreeMap::<u64, u64>::new();
    for shard in dataset.shards() {
        let mut start = 0;
        for d in 0..shard.num_documents() {
            let end = shard.document_start(d + 1)?;
            *counts.entry(end.saturating_sub(start)).or_default() += 1;
            start = end;
        }
    }
    let (documents, tokens) = (dataset.num_documents(), dataset.num_tokens());
    let text_bytes = dataset.text_bytes();
    Ok(Stats {
        shards: paths.len(),
        documents,
        tokens,
        text_bytes,
        bytes_per_token: text_bytes.filter(|_| tokens > 0).map(|bytes| bytes as f64 / tokens as f64),
        id_bytes: dataset.shards()[0].token_type().bytes(),
        lengths: lengths(&counts, documents, tokens),
        histogram: histogram(&counts),
    })
}

fn lengths(counts: &BTreeMap<u64, u64>, documents: u64, tokens: u64) -> Option<Lengths> {
    let percentile = |percent: u64| {
        let rank = (u128::from(documents) * u128::from(percent)).div_ceil(100) as u64;
        let mut passed = 0;
        counts.iter().find_map(|(length, count)| {
            passed += count;
            (passed >= rank).then_some(*length)
        })
    };
    Some(Lengths {
        min: *counts.first_key_value()?.0,
        mean: tokens as f64 / documents as f64,
        p50: percentile(50)?,
        p90: percentile(90)?,
        p99: percentile(99)?,
        max: *counts.last_key_value()?.0,
    })
}

/// Buckets 0, 1, 2..=3, 4..=7, ... from the first to the last that has documents.
fn histogram(counts: &BTreeMap<u64, u64>) -> Vec<Bucket> {
    let mut buckets: BTreeMap<u32, Bucket> = BTreeMap::new();
    for (length, count) in counts {
        let bits = u64::BITS - length.leading_zeros();
        let (from, to) = if bits == 0 { (0, 0) } else { (1 << (bits - 1), u64::MAX >> (u64::BITS - bits)) };
        let bucket = buckets.entry(bits).or_insert(Bucket { from, to, documents: 0, tokens: 0 });
        bucket.documents += count;
        bucket.tokens += length * count;
    }
    buckets.into_values().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_and_buckets() {
        let counts: BTreeMap<u64, u64> = [(0, 1), (1, 2), (3, 4), (4, 1), (1000, 2)].into();
        let lengths = lengths(&counts, 10, 2018).unwrap();
        assert_eq!((lengths.min, lengths.p50, lengths.p90, lengths.p99, lengths.max), (0, 3, 1000, 1000, 1000));
        assert_eq!(lengths.mean, 201.8);
        let expected = [(0, 0, 1, 0), (1, 1, 2, 2), (2, 3, 4, 12), (4, 7, 1, 4), (512, 1023, 2, 2000)];
        let got: Vec<_> = histogram(&counts).iter().map(|b| (b.from, b.to, b.documents, b.tokens)).collect();
        assert_eq!(got, expected);
        assert_eq!(super::lengths(&BTreeMap::new(), 0, 0), None);
    }
}
