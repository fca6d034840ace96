//! The one plan of a run: its distinct requests in rounds, each of which is one call of the runner.
//!
//! Requests are sorted by their ids, so that those with a common beginning stand together, whichever task they are of; a round ends
//! where little is shared. The plan follows from the requests alone. So a run that was interrupted goes on with the rounds that are
//! missing, and each of them gives the bits that it would have given.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::sync::Arc;

use rayon::prelude::*;

use super::encode::Pair;
use super::run::Generation;

/// Requests that are worked on together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Round {
    /// Indices of requests.
    pub items: Vec<usize>,
    /// Tokens to compute, what is shared counted once.
    pub tokens: u64,
}

/// All rounds of requests of one kind.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Rounds {
    pub each: Vec<Round>,
    /// Tokens that there would be to compute were all requests worked on together: those of one trie.
    pub trie: u64,
}

/// A run is cut into about this many rounds, unless they become too small to be worked on efficiently, or too large to lose.
const ROUNDS: u64 = 64;
const PAIR_TOKENS: (u64, u64) = (1 << 13, 1 << 18);
/// Generation goes token by token, so a round needs many texts.
const GENERATION_TOKENS: (u64, u64) = (1 << 16, 1 << 19);

/// Identifies a request among those of a run.
pub type Key = [u8; 16];

fn key(kind: &str, parts: &[&[u32]], more: &[u8]) -> Key {
    let mut hasher = blake3::Hasher::new();
    hasher.update(kind.as_bytes());
    for part in parts {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(bytemuck::cast_slice(part));
    }
    hasher.update(more);
    let mut out = [0; 16];
    out.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
    out
}

/// Context, continuation and where they part, of each pair. A context that neighbours share is hashed once.
pub fn pair_keys(pairs: &[Pair]) -> Vec<Key> {
    let sharing: Vec<&[Pair]> = pairs.chunk_by(|a, b| Arc::ptr_eq(&a.context, &b.context)).collect();
    let keys = |sharing: &&[Pair]| -> Vec<Key> {
        let context = key("context", &[&sharing[0].context], &[]);
        sharing.iter().map(|pair| key("pair", &[&pair.continuation], &context)).collect()
    };
    sharing.par_iter().flat_map_iter(keys).collect()
}

/// Prompt and all parameters.
pub fn generation_key(g: &Generation) -> Key {
    let numbers = [g.max_tokens as u64, g.do_sample.into(), g.temperature.to_bits(), g.top_p.to_bits(), g.repeat as u64];
    let mut more: Vec<u8> = bytemuck::cast_slice(&numbers).to_vec();
    for stop in &g.stops {
        more.extend((stop.len() as u64).to_le_bytes());
        more.extend(stop.as_bytes());
    }
    key("generation", &[&g.prompt], &more)
}

/// For each request the first one that equals it.
pub fn firsts(keys: &[Key]) -> Vec<usize> {
    let mut seen = HashMap::new();
    keys.iter().enumerate().map(|(i, k)| *seen.entry(k).or_insert(i)).collect()
}

/// The rounds of the pairs of `items`.
pub fn of_pairs(pairs: &[Pair], items: Vec<usize>) -> Rounds {
    let ranks = context_ranks(pairs, &items);
    let order =
        |a: &usize, b: &usize| ranks[*a].cmp(&ranks[*b]).then_with(|| pairs[*a].continuation.cmp(&pairs[*b].continuation));
    let shared = |a: usize, b: usize| {
        let same = ranks[a] == ranks[b];
        let (a, b) = (&pairs[a], &pairs[b]);
        if same { a.context.len() + common(&a.continuation, &b.continuation) } else { common(&a.context, &b.context) }
    };
    // The last token is no input.
    cut(items, order, shared, |i| pairs[i].context.len() + pairs[i].continuation.len() - 1, 0, PAIR_TOKENS)
}

/// The rounds of the generations of `items`.
pub fn of_generations(generations: &[Generation], items: Vec<usize>) -> Rounds {
    let order = |a: &usize, b: &usize| {
        let (a, b) = (&generations[*a], &generations[*b]);
        in_order(&a.prompt, &b.prompt).then(a.repeat.cmp(&b.repeat))
    };
    let longest = items.iter().map(|i| generations[*i].max_tokens).max().unwrap_or(0);
    let shared = |a: usize, b: usize| common(&generations[a].prompt, &generations[b].prompt);
    cut(items, order, shared, |i| generations[i].prompt.len(), longest, GENERATION_TOKENS)
}

/// For each pair of `items` the place of its context among all contexts; equal ones have one place. The choices of a document share
/// theirs, which is compared once.
fn context_ranks(pairs: &[Pair], items: &[usize]) -> Vec<u32> {
    let mut sharing: Vec<&[usize]> = items.chunk_by(|a, b| Arc::ptr_eq(&pairs[*a].context, &pairs[*b].context)).collect();
    let compare = |a: &&[usize], b: &&[usize]| in_order(&pairs[a[0]].context, &pairs[b[0]].context);
    sharing.par_sort_by(compare);
    let mut ranks = vec![0; pairs.len()];
    let mut rank = 0;
    for (at, group) in sharing.iter().enumerate() {
        rank += u32::from(at > 0 && compare(&sharing[at - 1], group).is_ne());
        group.iter().for_each(|item| ranks[*item] = rank);
    }
    ranks
}

/// As slices compare, sooner for those that begin alike.
fn in_order(a: &[u32], b: &[u32]) -> Ordering {
    let start = common(a, b);
    a[start..].cmp(&b[start..])
}

/// How many ids both begin with.
pub fn common(a: &[u32], b: &[u32]) -> usize {
    const CHUNK: usize = 32;
    let equal = a.as_chunks::<CHUNK>().0.iter().zip(b.as_chunks::<CHUNK>().0).take_while(|(a, b)| a == b).count() * CHUNK;
    equal + a[equal..].iter().zip(&b[equal..]).take_while(|(a, b)| a == b).count()
}

fn cut(
    mut items: Vec<usize>,
    order: impl Fn(&usize, &usize) -> Ordering + Sync,
    shared: impl Fn(usize, usize) -> usize,
    length: impl Fn(usize) -> usize,
    extra: usize,
    (least, most): (u64, u64),
) -> Rounds {
    // Of equal ones the first comes first: the sort is stable.
    items.par_sort_by(order);
    let shares: Vec<usize> =
        items.iter().enumerate().map(|(at, i)| if at == 0 { 0 } else { shared(items[at - 1], *i) }).collect();
    let own = |at: usize, shared: usize| (length(items[at]).saturating_sub(shared) + extra) as u64;
    let total: u64 = (0..items.len()).map(|at| own(at, shares[at])).sum();
    let size = (total / ROUNDS).clamp(least, most);
    let mut rounds: Vec<Round> = Vec::new();
    for (at, item) in items.iter().enumerate() {
        let ends = |r: &Round| r.tokens >= 2 * size || (r.tokens >= size && shares[at] as u64 <= size / 32);
        match rounds.last_mut().filter(|r| !ends(r)) {
            Some(round) => {
                round.items.push(*item);
                round.tokens += own(at, shares[at]);
            }
            None => rounds.push(Round { items: vec![*item], tokens: own(at, 0) }),
        }
    }
    let trie = total - (extra * items.len()) as u64;
    Rounds { each: rounds, trie }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(context: Vec<u32>, continuation: Vec<u32>) -> Pair {
        Pair { context: context.into(), continuation, ..Pair::default() }
    }

    #[test]
    fn what_is_shared_counts_once_and_stands_together() {
        // Two subjects of 1,000 tokens each, 40 questions of 100 tokens, four letters.
        let mut pairs = Vec::new();
        for question in 0..40u32 {
            for subject in 0..2u32 {
                for letter in 0..4 {
                    let context = (0..1000).map(|i| subject * 7000 + i).chain((0..100).map(|i| 20_000 + question * 100 + i));
                    pairs.push(pair(context.collect(), vec![letter]));
                }
            }
        }
        let Rounds { each: rounds, trie } = of_pairs(&pairs, (0..pairs.len()).collect());
        let tokens: u64 = rounds.iter().map(|r| r.tokens).sum();
        assert_eq!((tokens, trie), (2 * (1000 + 40 * 100), tokens));
        let mut all: Vec<usize> = rounds.iter().flat_map(|r| r.items.clone()).collect();
        all.sort_unstable();
        assert_eq!(all, (0..pairs.len()).collect::<Vec<_>>());
        // Nor does it matter whether choices share one context or have copies of it.
        let mut sharing = pairs.clone();
        for i in 1..sharing.len() {
            if sharing[i - 1].context == sharing[i].context {
                sharing[i].context = sharing[i - 1].context.clone();
            }
        }
        assert_eq!(of_pairs(&sharing, (0..pairs.len()).collect()).each, rounds);
        // The order of the requests does not change who works together.
        let turned: Vec<Pair> = pairs.iter().rev().cloned().collect();
        let again = of_pairs(&turned, (0..turned.len()).collect()).each;
        let sets = |rounds: &[Round], pairs: &[Pair]| -> Vec<Vec<Pair>> {
            rounds.iter().map(|r| r.items.iter().map(|i| pairs[*i].clone()).collect()).collect()
        };
        assert_eq!(sets(&rounds, &pairs), sets(&again, &turned));
    }

    #[test]
    fn rounds_end_where_little_is_shared() {
        let pairs: Vec<Pair> = (0..40u32).map(|i| pair((0..2000).map(|t| i * 2000 + t).collect(), vec![1])).collect();
        let rounds = of_pairs(&pairs, (0..40).collect()).each;
        assert_eq!(rounds.iter().map(|r| r.items.len()).collect::<Vec<_>>(), [5; 8]);
        assert!(rounds.iter().all(|r| r.tokens == 10_000));
    }

    #[test]
    fn keys_tell_requests_apart() {
        let (a, b) = (pair(vec![1, 2], vec![3]), pair(vec![1], vec![2, 3]));
        // The last two share their context.
        let keys = pair_keys(&[a.clone(), b.clone(), pair(vec![1, 2], vec![3]), b.clone(), Pair { continuation: vec![4], ..b }]);
        assert_eq!(firsts(&keys), [0, 1, 0, 1, 4]);
        let g = Generation {
            prompt: vec![1],
            max_tokens: 4,
            stops: vec!["a".into()],
            do_sample: false,
            temperature: 0.0,
            top_p: 1.0,
            repeat: 0,
        };
        for other in [
            Generation { repeat: 1, ..g.clone() },
            Generation { stops: vec!["b".into()], ..g.clone() },
            Generation { max_tokens: 5, ..g.clone() },
        ] {
            assert_ne!(generation_key(&g), generation_key(&other));
        }
    }
}
