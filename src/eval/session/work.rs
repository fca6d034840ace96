//! Working through a run's requests: round by round, what the log knows is not asked again.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use rayon::prelude::*;

use super::log::{Answer, RequestLog};
use crate::eval::harness::rounds::{self, Key, Round, Rounds};
use crate::eval::harness::run::{Answers, Decode, Generation, Runner, Usage, Work};
use crate::eval::harness::stop;

/// Who follows a run.
pub trait Watch {
    /// The run has this much to do: tokens, what is shared counted once.
    fn begin(&mut self, tokens: u64);
    /// Answer to a pair of the run's `Work`.
    fn scored(&mut self, index: usize, answer: (f64, bool));
    /// Text of a generation of the run's `Work`.
    fn text(&mut self, index: usize, text: &str);
    /// So many tokens more are done; `known` if by an earlier process.
    fn round(&mut self, tokens: u64, known: bool);
}

/// Nobody.
pub struct Unwatched;

impl Watch for Unwatched {
    fn begin(&mut self, _: u64) {}
    fn scored(&mut self, _: usize, _: (f64, bool)) {}
    fn text(&mut self, _: usize, _: &str) {}
    fn round(&mut self, _: u64, _: bool) {}
}

/// Requests of one kind: the rounds of the distinct ones, and who else asked the same.
struct Queue {
    keys: Vec<Key>,
    rounds: Rounds,
    /// By index of the first that asks it.
    same: BTreeMap<usize, Vec<usize>>,
}

impl Queue {
    fn new(keys: Vec<Key>, plan: impl FnOnce(Vec<usize>) -> Rounds) -> Self {
        let mut same: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (i, first) in rounds::firsts(&keys).into_iter().enumerate() {
            same.entry(first).or_default().push(i);
        }
        let rounds = plan(same.keys().copied().collect());
        Self { keys, rounds, same }
    }

    fn tokens(&self) -> u64 {
        self.rounds.each.iter().map(|r| r.tokens).sum()
    }
}

/// What a run took, rounds that the log knew included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Spent {
    pub usage: Usage,
    /// Tokens of one trie over all requests, without those generated: less cannot do.
    pub trie: u64,
}

/// All answers, and what they took.
pub fn answer(
    runner: &mut dyn Runner,
    work: &Work,
    decoder: &dyn Decode,
    log: &mut RequestLog,
    watch: &mut dyn Watch,
) -> Result<(Answers, Spent)> {
    let pairs = Queue::new(rounds::pair_keys(&work.pairs), |items| rounds::of_pairs(&work.pairs, items));
    let keys = work.generations.par_iter().map(rounds::generation_key).collect();
    let texts = Queue::new(keys, |items| rounds::of_generations(&work.generations, items));
    watch.begin(pairs.tokens() + texts.tokens());
    let mut out =
        Answers { scored: vec![(f64::NAN, false); work.pairs.len()], texts: vec![String::new(); work.generations.len()] };
    let mut usage = Usage::default();
    for round in &pairs.rounds.each {
        let ask = |runner: &mut dyn Runner| {
            let batch: Vec<_> = round.items.iter().map(|i| work.pairs[*i].clone()).collect();
            Ok(runner.loglikelihood(&batch)?.into_iter().map(|(lp, greedy)| Answer::Scored(lp, greedy)).collect())
        };
        for (item, answer) in round.items.iter().zip(one_round(runner, &pairs, round, log, watch, &mut usage, ask)?) {
            let Answer::Scored(logprob, is_greedy) = answer else { continue };
            for i in &pairs.same[item] {
                out.scored[*i] = (logprob, is_greedy);
                watch.scored(*i, (logprob, is_greedy));
            }
        }
    }
    let done = |g: &Generation, ids: &[u32]| is_done(g, ids, decoder);
    for round in &texts.rounds.each {
        let ask = |runner: &mut dyn Runner| {
            let batch: Vec<_> = round.items.iter().map(|i| work.generations[*i].clone()).collect();
            Ok(runner.generate(&batch, &done)?.into_iter().map(Answer::Ids).collect())
        };
        for (item, answer) in round.items.iter().zip(one_round(runner, &texts, round, log, watch, &mut usage, ask)?) {
            let Answer::Ids(ids) = answer else { continue };
            let text = stop::cut(&decoder.decode(&ids)?, &work.generations[*item].stops).to_string();
            for i in &texts.same[item] {
                watch.text(*i, &text);
                out.texts[*i] = text.clone();
            }
        }
    }
    Ok((out, Spent { usage, trie: pairs.rounds.trie + texts.rounds.trie }))
}

fn one_round(
    runner: &mut dyn Runner,
    queue: &Queue,
    round: &Round,
    log: &mut RequestLog,
    watch: &mut dyn Watch,
    usage: &mut Usage,
    ask: impl FnOnce(&mut dyn Runner) -> Result<Vec<Answer>>,
) -> Result<Vec<Answer>> {
    let keys: Vec<Key> = round.items.iter().map(|i| queue.keys[*i]).collect();
    if let Some((answers, took)) = log.round(&keys) {
        *usage += took;
        watch.round(round.tokens, true);
        return Ok(answers);
    }
    let before = runner.usage();
    let answers = ask(runner)?;
    ensure!(answers.len() == keys.len(), "the model answered {} of {} requests", answers.len(), keys.len());
    let took = runner.usage() - before;
    log.append(&keys, &answers, took)?;
    *usage += took;
    watch.round(round.tokens, false);
    Ok(answers)
}

/// Whether a stop string has come. The last tokens are looked at first: decoding all of them for each new one would take longer and
/// longer.
fn is_done(g: &Generation, ids: &[u32], decoder: &dyn Decode) -> bool {
    // Every token but special ones holds at least a byte; a few more for those.
    const MORE: usize = 8;
    let longest = g.stops.iter().map(String::len).max().unwrap_or(0);
    let last = &ids[ids.len().saturating_sub(longest + MORE)..];
    let stops = |ids: &[u32]| decoder.decode(ids).is_ok_and(|text| stop::is_done(&text, &g.stops));
    stops(last) && stops(ids)
}
