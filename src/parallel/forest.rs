//! Sums over sequences in one fixed order, whatever rank computed which (`train.deterministic = "layout"`).
//!
//! The order is a balanced binary tree whose leaves are the sequences of the global batch. A rank adds up the subtrees that it has all
//! leaves of; what is left, some aligned runs of sequences, is added up where it meets the others' ([`super::tree`]).

use std::collections::BTreeMap;

use anyhow::Result;

/// Complete subtrees: sum of sequences `start .. start + span`, by start. `span` is a power of two and divides `start`.
#[derive(Debug)]
pub struct Forest<T> {
    nodes: BTreeMap<usize, (usize, T)>,
}

impl<T> Default for Forest<T> {
    fn default() -> Self {
        Self { nodes: BTreeMap::new() }
    }
}

impl<T> Forest<T> {
    /// Adds the leaf of a sequence. `add(left, right)` makes `left` the sum of both.
    pub fn push(&mut self, sequence: usize, leaf: T, mut add: impl FnMut(&mut T, T) -> Result<()>) -> Result<()> {
        let (mut start, mut span, mut sum) = (sequence, 1, leaf);
        loop {
            let other = start ^ span;
            if self.nodes.get(&other).is_none_or(|(other_span, _)| *other_span != span) {
                self.nodes.insert(start, (span, sum));
                return Ok(());
            }
            let (_, found) = self.nodes.remove(&other).expect("it was just seen");
            let (mut left, right) = if other < start { (found, sum) } else { (sum, found) };
            add(&mut left, right)?;
            (start, span, sum) = (start.min(other), 2 * span, left);
        }
    }

    /// Starts and sums of the subtrees, in order.
    pub fn nodes(&self) -> impl Iterator<Item = (usize, &T)> {
        self.nodes.iter().map(|(start, (_, sum))| (*start, sum))
    }

    /// The sum of all; None of nothing.
    pub fn into_sum(self, add: impl FnMut(&mut T, T) -> Result<()>) -> Result<Option<T>> {
        sum(self.into_nodes().collect(), add)
    }

    pub fn into_nodes(self) -> impl Iterator<Item = (usize, T)> {
        self.nodes.into_iter().map(|(start, (_, sum))| (start, sum))
    }
}

/// Sum of nodes, each with its start, rising, in the order of [`super::tree`]; None of nothing.
pub fn sum<T>(nodes: Vec<(usize, T)>, mut add: impl FnMut(&mut T, T) -> Result<()>) -> Result<Option<T>> {
    let span = nodes.last().map_or(1, |(start, _)| (start + 1).next_power_of_two());
    sum_of(nodes, 0, span, &mut add)
}

fn sum_of<T>(
    mut nodes: Vec<(usize, T)>,
    first: usize,
    span: usize,
    add: &mut impl FnMut(&mut T, T) -> Result<()>,
) -> Result<Option<T>> {
    if nodes.len() <= 1 {
        return Ok(nodes.pop().map(|(_, sum)| sum));
    }
    let middle = first + span / 2;
    let right = nodes.split_off(nodes.partition_point(|(start, _)| *start < middle));
    let (left, right) = (sum_of(nodes, first, span / 2, add)?, sum_of(right, middle, span / 2, add)?);
    match (left, right) {
        (Some(mut left), Some(right)) => {
            add(&mut left, right)?;
            Ok(Some(left))
        }
        (left, right) => Ok(left.or(right)),
    }
}

/// Starts of the subtrees that remain of these sequences.
pub fn starts(sequences: impl Iterator<Item = usize>) -> Vec<usize> {
    let mut forest = Forest::default();
    for s in sequences {
        // Nothing is added that could fail.
        let _ = forest.push(s, (), |_, _| Ok(()));
    }
    forest.nodes().map(|(start, _)| start).collect()
}

#[cfg(test)]
mod tests {
    use super::super::tree;
    use super::*;

    #[test]
    fn however_sequences_are_dealt_the_sum_is_the_same() {
        let leaf = |s: usize| 1.0f32 / (3.0 + s as f32).powi(3) * if s.is_multiple_of(3) { -1000.0 } else { 1.0 };
        for n in 1..14usize {
            let whole: Vec<(usize, Vec<f32>)> = (0..n).map(|s| (s, vec![leaf(s)])).collect();
            let parts: Vec<(usize, &[f32])> = whole.iter().map(|(s, x)| (*s, &x[..])).collect();
            let mut expected = [0.0];
            tree::sum(&parts, &mut expected);
            for ranks in 1..=n {
                let mut nodes = Vec::new();
                for rank in 0..ranks {
                    let own: Vec<usize> = (rank * n / ranks..(rank + 1) * n / ranks).collect();
                    let mut forest = Forest::default();
                    // Also from the back.
                    let order: Vec<usize> = if rank % 2 == 0 { own.clone() } else { own.iter().rev().copied().collect() };
                    for s in order {
                        let add = |a: &mut f32, b: f32| {
                            *a += b;
                            Ok(())
                        };
                        forest.push(s, leaf(s), add).unwrap();
                    }
                    assert_eq!(forest.nodes().map(|(start, _)| start).collect::<Vec<_>>(), starts(own.into_iter()));
                    nodes.extend(forest.into_nodes().map(|(start, sum)| (start, vec![sum])));
                }
                let parts: Vec<(usize, &[f32])> = nodes.iter().map(|(s, x)| (*s, &x[..])).collect();
                let mut got = [0.0];
                tree::sum(&parts, &mut got);
                let mut all = Forest::default();
                for (s, x) in &whole {
                    let add = |a: &mut f32, b: f32| {
                        *a += b;
                        Ok(())
                    };
                    all.push(*s, x[0], add).unwrap();
                }
                let add = |a: &mut f32, b: f32| {
                    *a += b;
                    Ok(())
                };
                assert_eq!(all.into_sum(add).unwrap(), Some(expected[0]));
                assert_eq!(got[0].to_bits(), expected[0].to_bits(), "{n} sequences on {ranks} ranks");
            }
        }
    }
}
