//! Log-likelihoods of continuations.

use anyhow::{Result, ensure};

use super::trie::{Mark, Trie};
use super::walk::{Piece, Walk};
use super::{ModelRunner, Progress, scores};
use crate::error::bad_input;
use crate::eval::harness::encode::Pair;
use crate::model::tree::TreeStep;
use crate::tensor::backend::Backend;

/// What is known of a request so far.
#[derive(Clone)]
struct Sum {
    missing: usize,
    logprob: f64,
    is_greedy: bool,
}

/// All inputs, and the rows that are scored.
fn trie<B: Backend>(runner: &ModelRunner<B>, pairs: &[Pair]) -> Result<Trie> {
    let mut trie = Trie::default();
    let mut ids = Vec::new();
    for (i, pair) in pairs.iter().enumerate() {
        let Some((_, inputs)) = pair.continuation.split_last() else {
            return Err(bad_input(format!("log-likelihood request {i} has an empty continuation")));
        };
        let what = "log-likelihood request";
        runner.check_length(what, i, if pair.context.is_empty() { 0 } else { pair.context.len() + inputs.len() })?;
        ids.clear();
        ids.extend_from_slice(&pair.context);
        ids.extend_from_slice(inputs);
        trie.insert(i as u32, &ids);
    }
    let vocab = runner.model.config.vocab_size;
    if let Some((i, id)) =
        pairs.iter().enumerate().find_map(|(i, p)| p.continuation.iter().find(|id| **id as usize >= vocab).map(|id| (i, id)))
    {
        return Err(bad_input(format!(
            "log-likelihood request {i} asks for token {id}, but the model's vocabulary ends at {}",
            vocab - 1
        )));
    }
    trie.finish();
    trie.mark(|request| &pairs[request as usize].continuation);
    Ok(trie)
}

pub fn run<B: Backend>(
    runner: &mut ModelRunner<B>,
    pairs: &[Pair],
    each: &mut dyn FnMut(usize, (f64, bool)) -> Result<()>,
) -> Result<()> {
    let trie = trie(runner, pairs)?;
    runner.counters.trie_tokens += trie.distinct();
    runner.counters.reused_tokens += trie.asked() - trie.distinct();
    let budget = runner.options.token_budget.max(1);
    let rows = runner.capacity(trie.longest(), (trie.longest() + budget).min(trie.tokens.len()));
    let mut session = runner.session(rows)?;
    let sum = |pair: &Pair| Sum { missing: pair.continuation.len(), logprob: 0.0, is_greedy: true };
    let mut sums: Vec<Sum> = pairs.iter().map(sum).collect();
    let mut walk = Walk::new(&trie);
    let mut progress = Progress { done: 0, planned: trie.distinct() };
    while !walk.is_done() {
        let mut step = TreeStep::default();
        let pieces = walk.fill(budget, 0, &mut session.pool, &mut step);
        ensure!(!pieces.is_empty(), "no memory is left for the next token of {}", trie.distinct());
        walk.keep(&mut session.states, &mut step);
        let y = runner.forward(&mut session, &step)?;
        let (wanted, marks) = scored_rows(&trie, &pieces);
        runner.counters.scored_rows += wanted.len() as u64;
        scores::for_rows(runner.backend, runner.model, runner.params, &y, &wanted, |i, row| {
            for mark in marks[i] {
                let sum = &mut sums[mark.request as usize];
                sum.logprob += row.logprob(mark.target);
                sum.is_greedy &= row.best == mark.target;
                sum.missing -= 1;
                if sum.missing == 0 {
                    each(mark.request as usize, (sum.logprob, sum.is_greedy))?;
                }
            }
            Ok(())
        })?;
        walk.let_go(&mut session.pool, &mut session.states);
        progress.done += step.ids.len() as u64;
        runner.tell(progress);
    }
    Ok(())
}

/// Rows of a batch that have marks, and the marks of each.
fn scored_rows<'t>(trie: &'t Trie, pieces: &[Piece]) -> (Vec<u32>, Vec<&'t [Mark]>) {
    let (mut rows, mut marks) = (Vec::new(), Vec::new());
    for piece in pieces {
        let all = &trie.nodes[piece.node].marks;
        let first = |offset: usize| all.partition_point(|m| (m.offset as usize) < offset);
        for row in all[first(piece.offset)..first(piece.offset + piece.len)].chunk_by(|a, b| a.offset == b.offset) {
            rows.push((piece.row + row[0].offset as usize - piece.offset) as u32);
            marks.push(row);
        }
    }
    (rows, marks)
}
