//! Several shards read as one row of documents, in the order they were given.

use std::path::PathBuf;

use anyhow::{Result, ensure};

use super::shard::Shard;
use crate::error::bad_input;

/// Shards in a row. Documents and tokens are numbered through; shards without documents are allowed among others.
#[derive(Debug)]
pub struct Dataset {
    shards: Vec<Shard>,
    /// Documents before each shard, then the total.
    first_document: Vec<u64>,
    /// Tokens before each shard, then the total.
    first_token: Vec<u64>,
}

impl Dataset {
    /// Each path is a shard's prefix, its `.bin` or its `.idx`. Refuses shards that different tokenizers wrote.
    pub fn open(paths: &[PathBuf]) -> Result<Self> {
        if paths.is_empty() {
            return Err(bad_input("a data source lists no token shards: give at least one path"));
        }
        let shards: Vec<Shard> = paths.iter().map(|p| Shard::open(p)).collect::<Result<_>>()?;
        shards.iter().try_for_each(Shard::check_index)?;
        let mut known = shards.iter().filter_map(|s| Some((s.bin_path(), &s.sidecar()?.tokenizer)));
        if let Some((first, tokenizer)) = known.next()
            && let Some((other, _)) = known.find(|(_, t)| t.sha256 != tokenizer.sha256)
        {
            return Err(bad_input(format!(
                "the shards {} and {} were written with different tokenizers: one source needs one tokenizer",
                first.display(),
                other.display()
            )));
        }
        let sums = |count: fn(&Shard) -> u64| {
            let mut total = 0;
            let before = shards.iter().map(|s| {
                total += count(s);
                total
            });
            std::iter::once(0).chain(before).collect::<Vec<u64>>()
        };
        let (first_document, first_token) = (sums(Shard::num_documents), sums(Shard::num_tokens));
        Ok(Self { shards, first_document, first_token })
    }

    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }
    pub fn num_documents(&self) -> u64 {
        self.first_document[self.shards.len()]
    }
    pub fn num_tokens(&self) -> u64 {
        self.first_token[self.shards.len()]
    }

    /// SHA-256 of the tokenizer file, where a sidecar says it.
    pub fn tokenizer_sha256(&self) -> Option<&str> {
        self.shards.iter().find_map(|s| Some(s.sidecar()?.tokenizer.sha256.as_str()))
    }

    /// UTF-8 bytes of all documents' text, where every shard with documents has a sidecar that says it.
    pub fn text_bytes(&self) -> Option<u64> {
        self.shards.iter().filter(|s| s.num_documents() > 0).map(|s| Some(s.sidecar()?.text_bytes)).sum()
    }

    /// Where document `d` begins, in tokens; `d = num_documents` gives the end.
    pub fn document_start(&self, d: u64) -> Result<u64> {
        if d == self.num_documents() {
            return Ok(self.num_tokens());
        }
        let shard = self.first_document.partition_point(|first| *first <= d) - 1;
        Ok(self.first_token[shard] + self.shards[shard].document_start(d - self.first_document[shard])?)
    }

    /// Start and end of document `d`, in tokens.
    pub fn document(&self, d: u64) -> Result<(u64, u64)> {
        let (start, end) = (self.document_start(d)?, self.document_start(d + 1)?);
        let damaged = "the index of a token shard is damaged: a document ends before it begins";
        ensure!(start <= end, "{damaged} (document {d} of the source, {})", self.place_of_token(start).0.bin_path().display());
        Ok((start, end))
    }

    /// The document that holds token `t`.
    pub fn document_of_token(&self, t: u64) -> Result<u64> {
        // The last document that begins at or before t: earlier ones with the same start are empty.
        let (mut low, mut high) = (0, self.num_documents());
        while low < high {
            let middle = low + (high - low) / 2;
            if self.document_start(middle)? <= t { low = middle + 1 } else { high = middle }
        }
        ensure!(low > 0, "token {t} lies before the first document: the index of a token shard is damaged");
        Ok(low - 1)
    }

    /// The shard that holds token `t`, and the token's place in it.
    pub fn place_of_token(&self, t: u64) -> (&Shard, u64) {
        let shard = self.first_token.partition_point(|first| *first <= t).min(self.shards.len()) - 1;
        (&self.shards[shard], t - self.first_token[shard])
    }

    /// Appends tokens `from..to` to `out`. An id of `vocab_size` or above is refused, naming file and place.
    pub fn read(&self, from: u64, to: u64, vocab_size: usize, out: &mut Vec<u32>) -> Result<()> {
        let mut at = from;
        while at < to {
            let (shard, place) = self.place_of_token(at);
            let count = (to - at).min(shard.num_tokens() - place);
            let filled = out.len();
            shard.read(place, place + count, out);
            if let Some(i) = out[filled..].iter().position(|id| *id as usize >= vocab_size) {
                let (id, token) = (out[filled + i] as i32, at + i as u64);
                return Err(bad_input(format!(
                    "{}, token {} (document {} of its source): id {id} is beyond the model's vocabulary of {vocab_size}; was the \
                     shard written with another tokenizer?",
                    shard.bin_path().display(),
                    place + i as u64,
                    self.document_of_token(token)?
                )));
            }
            at += count;
        }
        Ok(())
    }

    /// Hash of what training reads from this dataset, whatever the paths: sizes, indices and a sample of the tokens of its
    /// shards, in order.
    pub fn fingerprint(&self) -> String {
        let mut hash = blake3::Hasher::new();
        let mut tokens = Vec::new();
        for shard in self.shards.iter().filter(|s| s.num_documents() > 0) {
            hash.update(&shard.num_tokens().to_le_bytes());
            hash.update(&(shard.index_bytes().len() as u64).to_le_bytes());
            hash.update(shard.index_bytes());
            for (from, to) in sampled(shard.num_tokens()) {
                tokens.clear();
                shard.read(from, to, &mut tokens);
                for token in &tokens {
                    hash.update(&token.to_le_bytes());
                }
            }
        }
        hash.finalize().to_hex().to_string()
    }
}

/// Stretches of a shard that its fingerprint reads: all of a small one; of a large one 64 pieces from the first token to the
/// last, since reading terabytes at every start would cost hours.
fn sampled(tokens: u64) -> Vec<(u64, u64)> {
    const PIECES: u64 = 64;
    const PIECE: u64 = 4096;
    if tokens <= PIECES * PIECE {
        return vec![(0, tokens)];
    }
    let start = |i: u64| (u128::from(tokens - PIECE) * u128::from(i) / u128::from(PIECES - 1)) as u64;
    (0..PIECES).map(|i| (start(i), start(i) + PIECE)).collect()
}
