//! The one order in which contributions of ranks are summed: a balanced binary tree over global ranks.
//!
//! A node of the tree covers ranks `[k 2^i, (k + 1) 2^i)`; ranks that do not take part are left out. Ranks of one node of a
//! cluster, if their number is a power of two, are a subtree, so summing inside each node first gives the same bits.

use std::cmp::Ordering;

use bytemuck::Pod;

/// Numbers summed at a time: the intermediate sums stay in the first-level cache.
const BLOCK: usize = 1024;

/// Numbers that can be summed.
pub trait Number: Pod + Send + Sync + std::ops::AddAssign {}
impl Number for f32 {}
impl Number for f64 {}
impl Number for u64 {}

/// Sums `parts`, each with the global rank it comes from (rising, at least one, of equal lengths), into `out`.
pub fn sum<T: Number>(parts: &[(usize, &[T])], out: &mut [T]) {
    let ranks: Vec<usize> = parts.iter().map(|(rank, _)| *rank).collect();
    for (i, out) in out.chunks_mut(BLOCK).enumerate() {
        let len = out.len();
        whole(&ranks, &|part| &parts[part].1[i * BLOCK..][..len], out);
    }
}

/// As `sum`, of `parts` and what `own`, the contribution of rank `rank`, holds; the outcome takes its place.
pub fn sum_into<T: Number>(rank: usize, own: &mut [T], parts: &[(usize, &[T])]) {
    let at = parts.partition_point(|(other, _)| *other < rank);
    let mut ranks: Vec<usize> = parts.iter().map(|(rank, _)| *rank).collect();
    ranks.insert(at, rank);
    let mut copy = [T::zeroed(); BLOCK];
    for (i, out) in own.chunks_mut(BLOCK).enumerate() {
        let copy = &mut copy[..out.len()];
        copy.copy_from_slice(out);
        let (copy, len) = (&*copy, out.len());
        let other = |part: usize| &parts[part].1[i * BLOCK..][..len];
        let get = |part: usize| match part.cmp(&at) {
            Ordering::Less => other(part),
            Ordering::Equal => copy,
            Ordering::Greater => other(part - 1),
        };
        whole(&ranks, &get, out);
    }
}

fn whole<'a, T: Number>(ranks: &[usize], get: &impl Fn(usize) -> &'a [T], out: &mut [T]) {
    let span = ranks.last().map_or(1, |rank| (rank + 1).next_power_of_two());
    node(ranks, 0, get, 0, span, out);
}

/// Sum of those `ranks` (parts `part`, `part + 1`, ...) that lie in `[first, first + span)`: all of them.
fn node<'a, T: Number>(ranks: &[usize], part: usize, get: &impl Fn(usize) -> &'a [T], first: usize, span: usize, out: &mut [T]) {
    if ranks.len() == 1 {
        out.copy_from_slice(get(part));
        return;
    }
    let middle = first + span / 2;
    let left = ranks.partition_point(|rank| *rank < middle);
    if left > 0 {
        node(&ranks[..left], part, get, first, span / 2, out);
    }
    match ranks.len() - left {
        0 => {}
        _ if left == 0 => node(ranks, part, get, middle, span / 2, out),
        1 => add(out, get(part + left)),
        _ => {
            let mut sum = [T::zeroed(); BLOCK];
            let sum = &mut sum[..out.len()];
            node(&ranks[left..], part + left, get, middle, span / 2, sum);
            add(out, sum);
        }
    }
}

fn add<T: Number>(out: &mut [T], other: &[T]) {
    out.iter_mut().zip(other).for_each(|(out, x)| *out += *x);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// ((0 + 1) + (2 + 3)) + ((4 + 5) + 6), ranks left out where they do not take part.
    #[test]
    fn the_tree_is_that_of_aligned_powers_of_two() {
        let x: Vec<Vec<f32>> = (0..7).map(|r| (0..2500).map(|i| (0.1 + r as f32).powi(3) / (1.0 + i as f32)).collect()).collect();
        let all: Vec<(usize, &[f32])> = x.iter().enumerate().map(|(r, x)| (r, &x[..])).collect();
        let mut out = vec![0.0; 2500];
        sum(&all, &mut out);
        for i in 0..2500 {
            let v = |r: usize| x[r][i];
            let expected = ((v(0) + v(1)) + (v(2) + v(3))) + ((v(4) + v(5)) + v(6));
            assert_eq!(out[i].to_bits(), expected.to_bits());
        }
        let some = [(1, &x[1][..]), (4, &x[4][..]), (5, &x[5][..])];
        sum(&some, &mut out);
        assert!((0..2500).all(|i| out[i] == x[1][i] + (x[4][i] + x[5][i])));
    }

    #[test]
    fn a_sum_in_place_is_the_same() {
        let x: Vec<Vec<f32>> =
            (0..6).map(|r| (0..1500).map(|i| ((r * 7919 + i * 104_729) % 1000) as f32 / 7.0).collect()).collect();
        let all: Vec<(usize, &[f32])> = x.iter().enumerate().map(|(r, x)| (2 * r, &x[..])).collect();
        let mut expected = vec![0.0; 1500];
        sum(&all, &mut expected);
        for (own, contribution) in x.iter().enumerate() {
            let others: Vec<(usize, &[f32])> = all.iter().filter(|(r, _)| *r != 2 * own).copied().collect();
            let mut out = contribution.clone();
            sum_into(2 * own, &mut out, &others);
            assert_eq!(out, expected);
        }
    }
}
