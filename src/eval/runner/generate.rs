//! Generated texts: prompts go through the trie, and then all of them are continued together, one token each in every forward. A text
//! that is complete makes room for the next prompt.

use std::collections::VecDeque;
use std::ops::Range;

use anyhow::{Result, ensure};

use super::pool::{Pool, append};
use super::trie::Trie;
use super::walk::{Ended, Held, Tail, Walk, release};
use super::{ModelRunner, Progress, Session, scores};
use crate::data::order::hash;
use crate::error::bad_input;
use crate::eval::generate::Sampling;
use crate::eval::harness::run::Generation;
use crate::model::tree::TreeStep;
use crate::tensor::backend::Backend;
use crate::tensor::tree::Segment;

/// Rows that a text takes from the pool at a time.
const ROWS: usize = 32;

/// A text that is being written.
struct Text {
    request: usize,
    ids: Vec<u32>,
    /// Tokens it may have.
    limit: usize,
    /// The two tokens before the next one.
    state: usize,
    /// Tokens computed.
    length: usize,
    /// Their keys and values.
    keys: Vec<Range<usize>>,
    /// Rows of the prompt's nodes, and its own ones.
    held: Vec<Held>,
    own: Vec<Range<usize>>,
    /// How many own ones there are.
    taken: usize,
    /// Of the own ones, those still empty; the next one in the last range.
    empty: Vec<Range<usize>>,
}

impl Text {
    /// Rows that it may still take from the pool. (Its last token is never computed.)
    fn rows_to_come(&self) -> usize {
        self.limit - 1 - self.taken
    }

    /// An empty row. Rows are taken a few at a time, so that most keys of a text lie side by side.
    fn next_row(&mut self, pool: &mut Pool) -> usize {
        if self.empty.is_empty() {
            let n = ROWS.min(self.rows_to_come());
            self.empty = pool.take(n);
            self.own.extend_from_slice(&self.empty);
            self.taken += n;
            self.empty.reverse();
        }
        let Some(range) = self.empty.last_mut() else { unreachable!("a text takes no more rows than were reserved for it") };
        let row = range.start;
        range.start += 1;
        if range.start == range.end {
            self.empty.pop();
        }
        row
    }

    /// Adds the row of its last token to `step`.
    fn extend(&mut self, pool: &mut Pool, step: &mut TreeStep) {
        let (row, pool_row) = (step.ids.len(), self.next_row(pool));
        append(&mut self.keys, pool_row..pool_row + 1);
        step.ids.push(self.ids[self.ids.len() - 1]);
        step.keys_to.push(pool_row as u32);
        let before = Tail::of_state(self.state);
        let keys = self.keys.clone();
        step.tree.segments.push(Segment { rows: row..row + 1, position: self.length, before: before.0, keys });
        step.keep.extend(before.after(row, 1).keep(self.state));
        self.length += 1;
    }
}

/// How the tokens of one request are chosen.
struct Choice {
    sampling: Sampling,
    limit: usize,
}

impl Choice {
    fn new<B: Backend>(runner: &ModelRunner<B>, g: &Generation) -> Self {
        let ids: Vec<u64> = g.prompt.iter().map(|id| *id as u64).collect();
        // Of the request alone, so that the order of requests does not enter.
        let seed = hash(hash(runner.options.seed, &ids), &[g.repeat as u64]);
        let temperature = if g.do_sample { g.temperature } else { 0.0 };
        let room = runner.options.max_length - g.prompt.len() + 1;
        Self { sampling: Sampling { temperature, top_p: g.top_p, seed }, limit: g.max_tokens.min(room) }
    }

    fn token(&self, row: &scores::Row, index: usize) -> u32 {
        if self.sampling.temperature == 0.0 { row.best } else { self.sampling.choose(row.logits, index as u64) }
    }
}

pub fn run<B: Backend>(
    runner: &mut ModelRunner<B>,
    requests: &[Generation],
    done: &dyn Fn(&Generation, &[u32]) -> bool,
    each: &mut dyn FnMut(usize, Vec<u32>) -> Result<()>,
) -> Result<()> {
    let mut trie = Trie::default();
    for (i, g) in requests.iter().enumerate() {
        runner.check_length("generation request", i, g.prompt.len())?;
        if g.do_sample && !(g.temperature.is_finite() && g.temperature > 0.0 && g.top_p > 0.0) {
            let why =
                format!("temperature {} and top_p {} of generation request {i} are not both above 0", g.temperature, g.top_p);
            return Err(bad_input(why));
        }
        if g.max_tokens > 0 {
            trie.insert(i as u32, &g.prompt);
        } else {
            each(i, Vec::new())?;
        }
    }
    trie.finish();
    let choices: Vec<Choice> = requests.iter().map(|g| Choice::new(runner, g)).collect();
    runner.counters.trie_tokens += trie.distinct();
    runner.counters.reused_tokens += trie.asked() - trie.distinct();
    let room = |i: usize| requests[i].prompt.len() + choices[i].limit;
    let longest = (0..requests.len()).map(room).max().unwrap_or(0);
    let all: usize = trie.tokens.len() + choices.iter().map(|c| c.limit).sum::<usize>();
    let session = runner.session(runner.capacity(longest, all))?;
    let walk = Walk::new(&trie);
    let planned = trie.distinct() + choices.iter().map(|c| c.limit.saturating_sub(1) as u64).sum::<u64>();
    let (waiting, active) = (VecDeque::new(), Vec::new());
    let progress = Progress { done: 0, planned };
    let mut writing =
        Writing { runner, requests, choices, trie: &trie, session, walk, waiting, active, reserved: 0, progress, done, each };
    while !writing.is_done() {
        writing.step()?;
    }
    Ok(())
}

/// All that a step looks at.
struct Writing<'r, 'a, B: Backend> {
    runner: &'r mut ModelRunner<'a, B>,
    requests: &'r [Generation],
    choices: Vec<Choice>,
    trie: &'r Trie,
    session: Session<B>,
    walk: Walk<'r>,
    /// Prompts that are computed, for whose texts there was no memory yet.
    waiting: VecDeque<Text>,
    active: Vec<Text>,
    /// Rows that the active texts may still take.
    reserved: usize,
    progress: Progress,
    done: &'r dyn Fn(&Generation, &[u32]) -> bool,
    each: &'r mut dyn FnMut(usize, Vec<u32>) -> Result<()>,
}

impl<B: Backend> Writing<'_, '_, B> {
    fn is_done(&self) -> bool {
        self.walk.is_done() && self.waiting.is_empty() && self.active.is_empty()
    }

    /// One forward.
    fn step(&mut self) -> Result<()> {
        let budget = self.runner.options.token_budget.max(1);
        while let Some(text) = self.waiting.front()
            && self.active.len() < budget
            && self.session.pool.free() >= self.reserved + text.rows_to_come()
        {
            self.reserved += text.rows_to_come();
            self.active.extend(self.waiting.pop_front());
        }
        let mut step = TreeStep::default();
        for text in &mut self.active {
            let before = text.rows_to_come();
            text.extend(&mut self.session.pool, &mut step);
            self.reserved -= before - text.rows_to_come();
        }
        let continued = step.ids.len();
        self.runner.counters.generated_tokens += continued as u64;
        let mut ended = Vec::new();
        if self.waiting.is_empty() {
            let (trie, choices) = (self.trie, &self.choices);
            self.walk.fill_with_ends(budget - continued, self.reserved, &mut self.session.pool, &mut step, &mut |end| {
                let rows = |request: &u32| choices[*request as usize].limit - 1;
                let needed = trie.nodes[end.node].ends.iter().map(rows).sum();
                ended.push(end);
                needed
            });
        }
        ensure!(!step.ids.is_empty(), "no memory is left for any of the texts");
        let first = self.begin(&ended, &mut step);
        self.walk.keep(&mut self.session.states, &mut step);
        let y = self.runner.forward(&mut self.session, &step)?;
        let last_rows: Vec<u32> = ended.iter().map(|e| e.row as u32).collect();
        // Texts alone hold the rows of prompts from here on, so that they are given back.
        drop(ended);
        self.choose(&y, &last_rows, first)?;
        self.walk.let_go(&mut self.session.pool, &mut self.session.states);
        self.progress.done += step.ids.len() as u64;
        self.runner.tell(self.progress);
        Ok(())
    }

    /// Texts of the prompts that end in this batch, for each of `ended`.
    fn begin(&mut self, ended: &[Ended], step: &mut TreeStep) -> Vec<Vec<Text>> {
        let mut all = Vec::with_capacity(ended.len());
        for end in ended {
            let node = &self.trie.nodes[end.node];
            let text = |request: &u32| {
                let state = self.session.states.take();
                step.keep.extend(end.tail.keep(state));
                Text {
                    request: *request as usize,
                    ids: Vec::new(),
                    limit: self.choices[*request as usize].limit,
                    state,
                    length: node.position + node.tokens.len(),
                    keys: end.keys.clone(),
                    held: end.held.clone(),
                    own: Vec::new(),
                    taken: 0,
                    empty: Vec::new(),
                }
            };
            all.push(node.ends.iter().map(text).collect());
        }
        all
    }

    /// The next token of every text. `last_rows`: those of the prompts that the texts of `first` go on from.
    fn choose(&mut self, y: &B::Buf, last_rows: &[u32], first: Vec<Vec<Text>>) -> Result<()> {
        let old = std::mem::take(&mut self.active);
        let mut rows: Vec<u32> = (0..old.len() as u32).collect();
        rows.extend_from_slice(last_rows);
        self.runner.counters.scored_rows += rows.len() as u64;
        let mut texts: VecDeque<Vec<Text>> = old.into_iter().map(|text| vec![text]).chain(first).collect();
        let continued = texts.len() - last_rows.len();
        let (requests, choices, done) = (self.requests, &self.choices, self.done);
        let (session, reserved, active, waiting) = (&mut self.session, &mut self.reserved, &mut self.active, &mut self.waiting);
        let (runner, each, progress) = (&*self.runner, &mut *self.each, &mut self.progress);
        let end_of_text = runner.options.end_of_text;
        scores::for_rows(runner.backend, runner.model, runner.params, y, &rows, |i, row| {
            for mut text in texts.pop_front().into_iter().flatten() {
                let token = choices[text.request].token(&row, text.ids.len());
                let ends = Some(token) == end_of_text;
                if !ends {
                    text.ids.push(token);
                }
                if ends || text.ids.len() >= text.limit || done(&requests[text.request], &text.ids) {
                    if i < continued {
                        *reserved -= text.rows_to_come();
                    }
                    let computed = text.length - requests[text.request].prompt.len();
                    progress.planned -= (text.limit - 1 - computed) as u64;
                    session.states.give_back(text.state);
                    session.pool.give_back(&text.own);
                    text.held.drain(..).for_each(|held| release(held, &mut session.pool));
                    each(text.request, text.ids)?;
                } else if i < continued {
                    active.push(text);
                } else {
                    waiting.push_back(text);
                }
            }
            Ok(())
        })
    }
}
