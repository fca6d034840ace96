//! Several shards read as one row of documents, in the order they were given.

use std::path::PathBuf;

use anyhow::{Result, ensure};

use super::shard::Shard;
use super::source::Sample;
use crate::error::bad_input;
use crate::text::chat::marks;

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
        shards.iter().filter(|s| !s.is_large()).try_for_each(Shard::check_index)?;
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

    /// Where every `every`-th document begins, in tokens, and the end.
    pub fn starts_of_every(&self, every: u64) -> Result<Vec<u64>> {
        let mut out = Vec::with_capacity(self.num_documents().div_ceil(every) as usize + 1);
        for (i, shard) in self.shards.iter().enumerate() {
            let (first, end) = (self.first_document[i], self.first_document[i + 1]);
            let documents = (first.next_multiple_of(every)..end).step_by(every as usize).map(|d| d - first);
            out.extend(shard.document_starts(documents)?.into_iter().map(|start| self.first_token[i] + start));
        }
        out.push(self.num_tokens());
        Ok(out)
    }

    /// Start and end of document `d`, in tokens.
    pub fn document(&self, d: u64) -> Result<(u64, u64)> {
        let shard = self.first_document.partition_point(|first| *first <= d) - 1;
        if self.shards[shard].is_large() {
            self.shards[shard].check_document(d - self.first_document[shard])?;
        }
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

    /// Whether any shard says more of its tokens than that they are learnt.
    pub fn has_marks(&self) -> bool {
        self.shards.iter().any(|s| s.mask().is_some())
    }

    /// Appends the marks of tokens `from..to`; tokens of shards without a mask are learnt.
    pub fn read_marks(&self, from: u64, to: u64, out: &mut Vec<u8>) {
        let mut at = from;
        while at < to {
            let (shard, place) = self.place_of_token(at);
            let count = (to - at).min(shard.num_tokens() - place);
            match shard.mask() {
                Some(mask) => mask.read(place, place + count, out),
                None => out.resize(out.len() + count as usize, marks::LEARN),
            }
            at += count;
        }
    }

    /// Appends tokens `from..to` to a sample, with what is known of them.
    pub fn read_marked(&self, from: u64, to: u64, vocab_size: usize, sample: &mut Sample) -> Result<()> {
        self.read(from, to, vocab_size, &mut sample.ids)?;
        if self.has_marks() {
            self.read_marks(from, to, &mut sample.marks);
        }
        Ok(())
    }

    /// Hash of what training reads from this dataset, whatever the paths: sizes, indices and a sample of the tokens of its
    /// shards, in order.
    pub fn fingerprint(&self) -> String {
        let mut hash = blake3::Hasher::new();
        let (mut tokens, mut known) = (Vec::new(), Vec::new());
        for shard in self.shards.iter().filter(|s| s.num_documents() > 0) {
            hash.update(&shard.num_tokens().to_le_bytes());
            hash.update(&(shard.index_bytes().len() as u64).to_le_bytes());
            match shard.is_large() {
                false => hash.update(shard.index_bytes()),
                true => {
                    let bytes = shard.index_bytes();
                    let pieces = pieces(bytes.len() as u64, INDEX_PIECE).into_iter();
                    pieces.fold(&mut hash, |hash, (from, to)| hash.update(&bytes[from as usize..to as usize]))
                }
            };
            for (from, to) in pieces(shard.num_tokens(), TOKEN_PIECE) {
                tokens.clear();
                shard.read(from, to, &mut tokens);
                for token in &tokens {
                    hash.update(&token.to_le_bytes());
                }
                if let Some(mask) = shard.mask() {
                    known.clear();
                    mask.read(from, to, &mut known);
                    hash.update(&known);
                }
            }
        }
        hash.finalize().to_hex().to_string()
    }
}

const PIECES: u64 = 64;
/// Tokens, and bytes of an index, in a piece.
const TOKEN_PIECE: u64 = 4096;
const INDEX_PIECE: u64 = 1 << 14;

/// Stretches that a fingerprint reads of so many tokens or bytes: all of few; of many 64 pieces from the first to the
/// last, since reading terabytes at every start would cost hours.
fn pieces(all: u64, piece: u64) -> Vec<(u64, u64)> {
    if all <= PIECES * piece {
        return vec![(0, all)];
    }
    let start = |i: u64| (u128::from(all - piece) * u128::from(i) / u128::from(PIECES - 1)) as u64;
    (0..PIECES).map(|i| (start(i), start(i) + piece)).collect()
}
