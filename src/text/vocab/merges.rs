//! Learning merges: of all pairs of neighbours the most frequent becomes one token, again and again.
//!
//! Which pair goes first is what `BpeTrainer` of Hugging Face decides, to the last of its habits, so that the merges are the same:
//! - Of equally frequent pairs, the one of smaller ids goes first.
//! - Merging a pair does not lower its own count; a pair that comes back later starts from there.
//! - Tokens are told apart by their text: a pair whose text is a token already (in runs of one character, `aaaa` + `a` after
//!   `aa` + `aaa`) becomes that token. Its neighbours' pairs, if known before, are then queued a second time, for the words of
//!   that merge alone; and a pair that is merged twice stands in the list where it was merged last.

use std::cmp::Reverse;
use std::collections::binary_heap::{BinaryHeap, PeekMut};
use std::collections::{HashMap, HashSet};

use anyhow::Result;

use super::super::engine::{byte_alphabet, prefetch};
use super::changes::{Changes, Counts, pack, unpack};
use super::count::Words;
use crate::error::bad_input;

/// What was learned: texts of all tokens by id, and merges in their order.
pub struct Learned {
    pub tokens: Vec<String>,
    pub merges: Vec<(u32, u32)>,
}

/// Behind the last symbol of a word.
const END: u32 = u32::MAX;

#[derive(Clone, Copy)]
struct Word {
    /// Of its first symbol.
    start: usize,
    count: u64,
}

/// (count when it was queued, pair, where in `lists` its words stand). The greatest comes first.
type Queued = (u64, Reverse<u64>, Reverse<usize>);

struct Trainer {
    words: Vec<Word>,
    symbols: Vec<u32>,
    counts: Counts,
    queue: BinaryHeap<Queued>,
    /// Lists of words, each after its length.
    lists: Vec<u32>,
}

/// Learns from counted words until there are `size` tokens, of which `special` are the first and the 256 bytes the next, or
/// until no pair is left.
///
/// # Errors
/// More than 2^32 different words.
pub fn learn(size: usize, special: &[String], words: Vec<Words>) -> Result<Learned> {
    let mut tokens = Tokens::default();
    for token in special {
        tokens.id(token.clone());
    }
    let mut alphabet: Vec<(char, u8)> = byte_alphabet().into_iter().collect();
    alphabet.sort_unstable();
    let mut bytes = [0; 256];
    for (c, byte) in alphabet {
        bytes[byte as usize] = tokens.id(c.to_string());
    }
    let mut trainer = Trainer::new(words, &bytes)?;
    let mut merges = Vec::new();
    let mut changes = Changes::default();
    while tokens.texts.len() < size
        && let Some((pair, list)) = trainer.next()
    {
        let (left, right) = unpack(pair);
        let id = tokens.id(format!("{}{}", tokens.texts[left as usize], tokens.texts[right as usize]));
        merges.push((left, right));
        trainer.merge(left, right, id, list, &mut changes);
    }
    let mut later = HashSet::new();
    let mut last: Vec<(u32, u32)> = merges.into_iter().rev().filter(|merge| later.insert(*merge)).collect();
    last.reverse();
    Ok(Learned { tokens: tokens.texts, merges: last })
}

#[derive(Default)]
struct Tokens {
    texts: Vec<String>,
    ids: HashMap<String, u32>,
}

impl Tokens {
    /// Of the token with this text, which is a new one if there is none.
    fn id(&mut self, text: String) -> u32 {
        let next = self.texts.len() as u32;
        *self.ids.entry(text).or_insert_with_key(|text| {
            self.texts.push(text.clone());
            next
        })
    }
}

impl Trainer {
    fn new(maps: Vec<Words>, bytes: &[u32; 256]) -> Result<Self> {
        let words: usize = maps.iter().map(Words::len).sum();
        if u32::try_from(words).is_err() {
            return Err(bad_input(format!("the corpus has {words} different words, more than 2^32: learn from a sample of it")));
        }
        let symbols = maps.iter().map(|map| map.bytes() + map.len()).sum();
        let mut trainer = Self {
            words: Vec::with_capacity(words),
            symbols: Vec::with_capacity(symbols),
            counts: Counts::default(),
            queue: BinaryHeap::new(),
            lists: Vec::new(),
        };
        for map in maps {
            // A word of one byte has nothing to merge.
            for (word, count) in map.iter().filter(|(word, _)| word.len() > 1) {
                trainer.words.push(Word { start: trainer.symbols.len(), count });
                trainer.symbols.extend(word.iter().map(|byte| bytes[*byte as usize]));
                trainer.symbols.push(END);
            }
        }
        trainer.queue_pairs_of_bytes(bytes);
        Ok(trainer)
    }

    /// Counts and queues the pairs that words have before anything is merged.
    fn queue_pairs_of_bytes(&mut self, bytes: &[u32; 256]) {
        #[derive(Clone, Copy, Default)]
        struct Pair {
            count: u64,
            words: u32,
            /// The last word it was seen in, + 1.
            last: u64,
            /// Where its next word goes in `lists`.
            next: usize,
        }
        let mut byte_of = vec![0u8; bytes.iter().max().map_or(0, |id| *id as usize + 1)];
        for (byte, id) in bytes.iter().enumerate() {
            byte_of[*id as usize] = byte as u8;
        }
        let mut pairs = vec![Pair::default(); 1 << 16];
        // Calls `each` with every pair of bytes of every word.
        let every = |each: &mut dyn FnMut(u32, u64, usize)| {
            for (i, word) in self.words.iter().enumerate() {
                for two in self.symbols[word.start..].windows(2).take_while(|two| two[1] != END) {
                    let [left, right] = [two[0], two[1]].map(|id| byte_of[id as usize] as usize);
                    each(i as u32, word.count, left << 8 | right);
                }
            }
        };
        every(&mut |word, count, pair| {
            let pair = &mut pairs[pair];
            pair.count += count;
            pair.words += u32::from(pair.last != word as u64 + 1);
            pair.last = word as u64 + 1;
        });
        let mut end = 0;
        for (i, pair) in pairs.iter_mut().enumerate().filter(|(_, pair)| pair.words > 0) {
            let ids = pack(bytes[i >> 8], bytes[i & 255]);
            self.counts.add(ids, pair.count as i64);
            self.queue.push((pair.count, Reverse(ids), Reverse(end)));
            (pair.next, pair.last) = (end + 1, 0);
            end += 1 + pair.words as usize;
        }
        let mut lists = vec![0; end];
        for pair in pairs.iter().filter(|pair| pair.words > 0) {
            lists[pair.next - 1] = pair.words;
        }
        every(&mut |word, _, pair| {
            let pair = &mut pairs[pair];
            if pair.last != word as u64 + 1 {
                pair.last = word as u64 + 1;
                lists[pair.next] = word;
                pair.next += 1;
            }
        });
        self.lists = lists;
    }

    /// Takes the most frequent pair from the queue, and where its list of words is.
    fn next(&mut self) -> Option<(u64, usize)> {
        loop {
            let mut top = self.queue.peek_mut()?;
            let (queued, Reverse(pair), Reverse(list)) = *top;
            // Counts of waiting pairs fall without the queue being told.
            let count = self.counts.get(pair);
            if count == 0 {
                PeekMut::pop(top);
            } else if count != queued {
                top.0 = count;
            } else {
                PeekMut::pop(top);
                return Some((pair, list));
            }
        }
    }

    /// Makes `left` and `right` the token `id` in the words of a list, and queues the pairs that appear there.
    fn merge(&mut self, left: u32, right: u32, id: u32, list: usize, changes: &mut Changes) {
        /// Words lie all over the memory: they are asked for in time.
        const AHEAD: usize = 8;
        let length = self.lists[list] as usize;
        let list = &self.lists[list + 1..][..length];
        for (at, word) in list.iter().copied().enumerate() {
            if let Some(later) = list.get(at + 2 * AHEAD) {
                prefetch(self.words.as_ptr().wrapping_add(*later as usize));
            }
            if let Some(later) = list.get(at + AHEAD) {
                prefetch(self.symbols.as_ptr().wrapping_add(self.words[*later as usize].start));
            }
            let Word { start, count } = self.words[word as usize];
            merge_word(&mut self.symbols[start..], (left, right, id), count, word, changes);
        }
        let (counts, queue) = (&mut self.counts, &mut self.queue);
        changes.settle(counts, &mut self.lists, |pair, count, list| queue.push((count, Reverse(pair), Reverse(list))));
    }
}

/// Merges a pair from left to right in the word at the start of `symbols`, and notes which pairs that takes and gives.
fn merge_word(symbols: &mut [u32], (left, right, id): (u32, u32, u32), count: u64, word: u32, changes: &mut Changes) {
    let (mut from, mut to) = (0, 0);
    let mut before = END;
    while symbols[from] != END {
        let symbol = symbols[from];
        if symbol == left && symbols[from + 1] == right {
            if before != END {
                changes.fewer(pack(before, left), count);
                changes.more(pack(before, id), count, word);
            }
            let after = symbols[from + 2];
            if after != END {
                changes.fewer(pack(right, after), count);
                changes.more(pack(id, after), count, word);
            }
            before = id;
            from += 2;
        } else {
            before = symbol;
            from += 1;
        }
        symbols[to] = before;
        to += 1;
    }
    symbols[to] = END;
}
