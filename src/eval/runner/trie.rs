//! A prefix trie (radix tree) over the token ids of many requests: each distinct prefix once.

use std::collections::HashMap;
use std::ops::Range;

use crate::eval::harness::rounds::common;

/// The node above all sequences; it has no tokens.
pub const ROOT: usize = 0;

/// A row of the model whose logits one request wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mark {
    /// Token of the node.
    pub offset: u32,
    pub request: u32,
    /// The token that is to follow.
    pub target: u32,
}

/// Tokens without a branch between them.
#[derive(Debug, Clone, Default)]
pub struct Node {
    /// Place in `Trie::tokens`.
    pub tokens: Range<usize>,
    parent: usize,
    /// Position in the sequence of the first token.
    pub position: usize,
    /// In the order of their first tokens, once the trie is finished.
    pub children: Vec<usize>,
    /// Requests whose input ends with this node.
    pub ends: Vec<u32>,
    /// By offset, and of one offset by request.
    pub marks: Vec<Mark>,
}

/// What it holds depends on the set of sequences alone, not on their order.
#[derive(Debug)]
pub struct Trie {
    pub tokens: Vec<u32>,
    pub nodes: Vec<Node>,
    /// Child of a node by its first token.
    by_token: HashMap<(usize, u32), usize>,
    /// Tokens of all inputs, one by one.
    asked: u64,
    longest: usize,
}

impl Default for Trie {
    fn default() -> Self {
        Self { tokens: Vec::new(), nodes: vec![Node::default()], by_token: HashMap::new(), asked: 0, longest: 0 }
    }
}

impl Trie {
    /// Adds the input of request `request`. `ids` is not empty.
    pub fn insert(&mut self, request: u32, ids: &[u32]) {
        self.asked += ids.len() as u64;
        self.longest = self.longest.max(ids.len());
        let (mut node, mut at) = (ROOT, 0);
        while at < ids.len() {
            let Some(child) = self.by_token.get(&(node, ids[at])).copied() else {
                node = self.add(node, at, &ids[at..]);
                break;
            };
            let own = &self.tokens[self.nodes[child].tokens.clone()];
            let shared = common(own, &ids[at..]);
            node = if shared < own.len() { self.split(child, shared) } else { child };
            at += shared;
        }
        self.nodes[node].ends.push(request);
    }

    fn add(&mut self, parent: usize, position: usize, ids: &[u32]) -> usize {
        let start = self.tokens.len();
        self.tokens.extend_from_slice(ids);
        let id = self.nodes.len();
        self.nodes.push(Node { tokens: start..self.tokens.len(), parent, position, ..Node::default() });
        self.nodes[parent].children.push(id);
        self.by_token.insert((parent, ids[0]), id);
        id
    }

    /// Puts a node of the first `n` tokens of `lower` above it.
    fn split(&mut self, lower: usize, n: usize) -> usize {
        let upper = self.nodes.len();
        let below = &self.nodes[lower];
        let (tokens, parent, position) = (below.tokens.clone(), below.parent, below.position);
        let middle = tokens.start + n;
        self.nodes.push(Node { tokens: tokens.start..middle, parent, position, children: vec![lower], ..Node::default() });
        let below = &mut self.nodes[lower];
        (below.tokens.start, below.parent, below.position) = (middle, upper, position + n);
        self.by_token.insert((parent, self.tokens[tokens.start]), upper);
        self.by_token.insert((upper, self.tokens[middle]), lower);
        let children = &mut self.nodes[parent].children;
        children.iter_mut().filter(|c| **c == lower).for_each(|c| *c = upper);
        upper
    }

    /// Puts everything in an order that does not depend on that of the requests, but for requests of one node.
    pub fn finish(&mut self) {
        let first: Vec<u32> = self.nodes.iter().map(|n| self.tokens.get(n.tokens.start).copied().unwrap_or(0)).collect();
        for node in &mut self.nodes {
            node.children.sort_unstable_by_key(|c| first[*c]);
        }
        self.by_token = HashMap::new();
    }

    /// Marks, in a finished trie, the rows after which each token of a continuation comes. `continuation(request)` gives these tokens; the
    /// first one follows the input's last token but `len - 1` ones.
    pub fn mark<'a>(&mut self, continuation: impl Fn(u32) -> &'a [u32]) {
        for end in 0..self.nodes.len() {
            for i in 0..self.nodes[end].ends.len() {
                let request = self.nodes[end].ends[i];
                let mut targets = continuation(request);
                let mut node = end;
                while !targets.is_empty() {
                    let n = &mut self.nodes[node];
                    let here = n.tokens.len().min(targets.len());
                    let (above, own) = targets.split_at(targets.len() - here);
                    let offset = n.tokens.len() - here;
                    n.marks.extend(own.iter().zip(offset..).map(|(t, o)| Mark { offset: o as u32, request, target: *t }));
                    (targets, node) = (above, n.parent);
                }
            }
        }
        for node in &mut self.nodes {
            node.marks.sort_by_key(|m| (m.offset, m.request));
        }
    }

    /// Tokens that must go through the model at least: each distinct prefix once.
    pub fn distinct(&self) -> u64 {
        self.tokens.len() as u64
    }

    /// Tokens of all inputs together.
    pub fn asked(&self) -> u64 {
        self.asked
    }

    /// Tokens of the longest input.
    pub fn longest(&self) -> usize {
        self.longest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(inputs: &[&[u32]]) -> Trie {
        let mut trie = Trie::default();
        inputs.iter().enumerate().for_each(|(i, ids)| trie.insert(i as u32, ids));
        trie.finish();
        trie
    }

    /// Every sequence that leads to an end, with the requests that end there, in the order of a walk.
    fn read(trie: &Trie, node: usize, path: &mut Vec<u32>, out: &mut Vec<(Vec<u32>, Vec<u32>)>) {
        let n = &trie.nodes[node];
        assert_eq!(n.position, path.len());
        path.extend(&trie.tokens[n.tokens.clone()]);
        if !n.ends.is_empty() {
            out.push((path.clone(), n.ends.clone()));
        }
        n.children.iter().for_each(|c| read(trie, *c, path, out));
        path.truncate(n.position);
    }

    #[test]
    fn holds_each_distinct_prefix_once() {
        let inputs: [&[u32]; 6] = [&[1, 2, 3, 4], &[1, 2], &[1, 2, 5], &[7], &[1, 2, 3, 4], &[1, 2, 3]];
        let trie = of(&inputs);
        let mut out = Vec::new();
        read(&trie, ROOT, &mut Vec::new(), &mut out);
        let expected =
            [(vec![1, 2], vec![1]), (vec![1, 2, 3], vec![5]), (vec![1, 2, 3, 4], vec![0, 4]), (vec![1, 2, 5], vec![2])];
        assert_eq!(out[..4], expected);
        assert_eq!(out[4..], [(vec![7], vec![3])]);
        let mut prefixes: Vec<&[u32]> = inputs.iter().flat_map(|ids| (1..=ids.len()).map(|n| &ids[..n])).collect();
        prefixes.sort_unstable();
        prefixes.dedup();
        assert_eq!(trie.distinct(), prefixes.len() as u64);
        assert_eq!((trie.asked(), trie.longest()), (17, 4));
    }

    #[test]
    fn marks_are_the_rows_before_each_target() {
        // Contexts of 2, 1 and 2 tokens; the inputs end one token before the continuations do.
        let mut trie = of(&[&[1, 2, 3], &[1, 2, 9], &[1, 2]]);
        let continuations: [&[u32]; 3] = [&[3, 4], &[2, 9, 8], &[6]];
        trie.mark(|r| continuations[r as usize]);
        let marks = |tokens: &[u32]| {
            let node = trie.nodes.iter().find(|n| trie.tokens[n.tokens.clone()] == *tokens).unwrap();
            node.marks.iter().map(|m| (m.offset, m.request, m.target)).collect::<Vec<_>>()
        };
        assert_eq!(marks(&[1, 2]), [(0, 1, 2), (1, 0, 3), (1, 1, 9), (1, 2, 6)]);
        assert_eq!(marks(&[3]), [(0, 0, 4)]);
        assert_eq!(marks(&[9]), [(0, 1, 8)]);
    }
}
