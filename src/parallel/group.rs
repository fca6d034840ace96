//! A group of ranks, as one of them sees it: its collectives.
//!
//! Every collective has a flat form, in which each member talks to each other one, and a two-stage form, in which it talks to the
//! members of its own node and, across nodes, only to those with its own place in their node (its rail). Sums are taken in the
//! order of [`tree`], so both forms give the same bits where the number of members in a node is a power of two.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use bytemuck::Pod;

use super::transport::{Channel, Incoming, Op, Outgoing, Place, Transport};
use super::tree::{self, Number};
use crate::failpoint;
use crate::tensor::trace;

/// How collectives travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stages {
    Flat,
    /// Nodes hold this many ranks, in order.
    Two {
        ranks_per_node: usize,
    },
}

/// One rank's communication: its end of the engine, and where it is.
pub struct Comm {
    pub transport: Arc<dyn Transport>,
    pub stages: Stages,
    place: Mutex<Place>,
    /// Spent in operations of the main channel.
    spent: Mutex<Duration>,
}

impl Comm {
    pub fn new(transport: Arc<dyn Transport>, stages: Stages) -> Arc<Self> {
        Arc::new(Self { transport, stages, place: Mutex::default(), spent: Mutex::default() })
    }

    /// Says where the rank is from now on, for messages.
    pub fn at(&self, change: impl FnOnce(&mut Place)) {
        change(&mut self.place.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Time spent in operations of the main channel since this was asked last: standing still for others, and moving data.
    pub fn take_spent(&self) -> Duration {
        std::mem::take(&mut self.spent.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub fn place(&self) -> Place {
        *self.place.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub struct Group {
    comm: Arc<Comm>,
    channel: Channel,
    name: &'static str,
    /// Global ranks, rising.
    members: Vec<usize>,
    /// Own place among them.
    index: usize,
    /// Two-stage form: members of one node; they lie next to each other, and every node has as many.
    per_node: Option<usize>,
    sequence: AtomicU64,
}

impl Group {
    /// `members`: global ranks, rising, the own one among them.
    pub fn new(comm: &Arc<Comm>, channel: Channel, name: &'static str, members: Vec<usize>) -> Self {
        let own = comm.transport.rank();
        let index = members.iter().position(|m| *m == own).expect("a rank makes only groups that it is in");
        let per_node = match comm.stages {
            Stages::Flat => None,
            Stages::Two { ranks_per_node } => members_per_node(&members, ranks_per_node),
        };
        Self { comm: comm.clone(), channel, name, members, index, per_node, sequence: AtomicU64::new(0) }
    }

    pub fn size(&self) -> usize {
        self.members.len()
    }

    /// Own place in the group.
    pub fn index(&self) -> usize {
        self.index
    }

    pub fn members(&self) -> &[usize] {
        &self.members
    }

    pub fn is_two_stage(&self) -> bool {
        self.per_node.is_some()
    }

    pub fn comm(&self) -> &Arc<Comm> {
        &self.comm
    }

    fn op(&self, name: &'static str) -> Result<Op> {
        failpoint::hit("comm")?;
        let sequence = self.sequence.fetch_add(1, Ordering::Relaxed) + 1;
        Ok(Op { channel: self.channel, group: self.name, sequence, name, place: self.comm.place() })
    }

    /// Messages between members, each to or from a member's place in the group. Empty ones do not travel.
    fn exchange<T: Pod>(
        &self,
        op: &Op,
        outgoing: &[(usize, &[T])],
        incoming: &[(usize, usize)],
        consume: impl FnOnce(&[&[T]]),
    ) -> Result<()> {
        let sends: Vec<Outgoing> = (outgoing.iter().filter(|(_, data)| !data.is_empty()))
            .map(|(to, data)| Outgoing { to: self.members[*to], data: bytemuck::cast_slice(data) })
            .collect();
        let receives: Vec<Incoming> = (incoming.iter().filter(|(_, len)| *len > 0))
            .map(|(from, len)| Incoming { from: self.members[*from], bytes: len * size_of::<T>() })
            .collect();
        let is_main = op.channel == Channel::Main;
        let moved: usize = sends.iter().map(|m| m.data.len()).chain(receives.iter().map(|m| m.bytes)).sum();
        let _span = is_main.then(|| trace::verb(op.name, 0.0, moved as f64));
        let begun = Instant::now();
        let mut consume = Some(consume);
        let outcome = self.comm.transport.exchange(op, &sends, &receives, &mut |data| {
            let mut come = data.iter();
            let all = incoming.iter().map(|(_, len)| match len {
                0 => &[][..],
                _ => bytemuck::cast_slice(come.next().expect("one a message")),
            });
            let all: Vec<&[T]> = all.collect();
            if let Some(consume) = consume.take() {
                consume(&all);
            }
        });
        if is_main {
            *self.comm.spent.lock().unwrap_or_else(PoisonError::into_inner) += begun.elapsed();
        }
        outcome
    }

    /// Members other than the own one.
    fn others(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.size()).filter(|m| *m != self.index)
    }

    /// Places of the own node's members, in order, and of the own rail's.
    fn node_and_rail(&self, per_node: usize) -> (Vec<usize>, Vec<usize>) {
        let (node, local) = (self.index / per_node, self.index % per_node);
        let nodes = self.size() / per_node;
        ((0..per_node).map(|l| node * per_node + l).collect(), (0..nodes).map(|n| n * per_node + local).collect())
    }

    /// Two-stage form: the members of the own node, each with the pieces of its whole rail, and those of the own rail, each with its own.
    #[allow(clippy::type_complexity)]
    fn routes(&self, per_node: usize) -> (Vec<(usize, Vec<usize>)>, Vec<(usize, Vec<usize>)>) {
        let (node, rail) = self.node_and_rail(per_node);
        let rail_of = |m: usize| (0..self.size()).filter(|other| other % per_node == m % per_node).collect();
        (node.into_iter().map(|m| (m, rail_of(m))).collect(), rail.into_iter().map(|m| (m, vec![m])).collect())
    }

    /// Sums `data` of all members; piece i, `pieces[i]`, of the sum ends at member i. The rest of `data` is then of no use.
    /// Pieces do not overlap and are the same at every member.
    pub fn reduce_scatter<T: Number>(&self, name: &'static str, data: &mut [T], pieces: &[Range<usize>]) -> Result<()> {
        assert_eq!(pieces.len(), self.size(), "one piece a member");
        if self.size() == 1 {
            return Ok(());
        }
        let Some(per_node) = self.per_node else {
            let to: Vec<(usize, Vec<usize>)> = (0..self.size()).map(|m| (m, vec![m])).collect();
            return self.reduce_to(&self.op(name)?, data, pieces, &to);
        };
        let (inside, across) = self.routes(per_node);
        self.reduce_to(&self.op(name)?, data, pieces, &inside)?;
        self.reduce_to(&self.op(name)?, data, pieces, &across)
    }

    /// Sums pieces among the members that `to` lists, in order; each of them gets the sums of the pieces listed with it.
    fn reduce_to<T: Number>(&self, op: &Op, data: &mut [T], pieces: &[Range<usize>], to: &[(usize, Vec<usize>)]) -> Result<()> {
        let others = || to.iter().filter(|(m, _)| *m != self.index);
        let own = to.iter().find(|(m, _)| *m == self.index).map(|(_, own)| &own[..]).unwrap_or_default();
        // Own pieces are written while the others are being read: two sets of ranges that do not overlap.
        let mut cut = Cut::new(data, own.iter().map(|p| pieces[*p].clone()));
        let (mine, rest) = cut.parts();
        let outgoing: Vec<(usize, &[T])> =
            others().flat_map(|(m, list)| list.iter().map(|p| (*m, rest.get(&pieces[*p])))).collect();
        let incoming: Vec<(usize, usize)> = others().flat_map(|(m, _)| own.iter().map(|p| (*m, pieces[*p].len()))).collect();
        self.exchange(op, &outgoing, &incoming, |come| {
            for (i, mine) in mine.into_iter().enumerate() {
                let parts: Vec<(usize, &[T])> =
                    others().enumerate().map(|(o, (m, _))| (self.members[*m], come[o * own.len() + i])).collect();
                tree::sum_into(self.comm.transport.rank(), mine, &parts);
            }
        })
    }

    /// Sums what members have of a tree over sequences: of each the `nodes` that it has, by start, all of them lists of the same length.
    /// Returns the own piece of the sum. `starts`: those of every member.
    pub fn reduce_tree<T: Number>(
        &self,
        name: &'static str,
        nodes: &[(usize, Vec<T>)],
        starts: &[Vec<usize>],
        pieces: &[Range<usize>],
    ) -> Result<Vec<T>> {
        let own = pieces[self.index].clone();
        let outgoing: Vec<(usize, &[T])> =
            self.others().flat_map(|m| nodes.iter().map(move |(_, node)| (m, &node[pieces[m].clone()]))).collect();
        let len = own.len();
        let incoming: Vec<(usize, usize)> = self.others().flat_map(|m| starts[m].iter().map(move |_| (m, len))).collect();
        let mut sum = vec![T::zeroed(); len];
        self.exchange(&self.op(name)?, &outgoing, &incoming, |come| {
            let of_others = self.others().flat_map(|m| &starts[m]).copied().zip(come.iter().copied());
            let mut parts: Vec<(usize, &[T])> = of_others.chain(nodes.iter().map(|(s, node)| (*s, &node[own.clone()]))).collect();
            parts.sort_by_key(|(start, _)| *start);
            if !parts.is_empty() {
                tree::sum(&parts, &mut sum);
            }
        })?;
        Ok(sum)
    }

    /// Piece i of `data` goes from member i to all.
    pub fn all_gather<T: Pod>(&self, name: &'static str, data: &mut [T], pieces: &[Range<usize>]) -> Result<()> {
        assert_eq!(pieces.len(), self.size(), "one piece a member");
        if self.size() == 1 {
            return Ok(());
        }
        let Some(per_node) = self.per_node else {
            let from: Vec<(usize, Vec<usize>)> = (0..self.size()).map(|m| (m, vec![m])).collect();
            return self.gather_from(&self.op(name)?, data, pieces, &from);
        };
        let (inside, across) = self.routes(per_node);
        self.gather_from(&self.op(name)?, data, pieces, &across)?;
        self.gather_from(&self.op(name)?, data, pieces, &inside)
    }

    /// Among the members that `from` lists, each sends the pieces listed with it to all others.
    fn gather_from<T: Pod>(&self, op: &Op, data: &mut [T], pieces: &[Range<usize>], from: &[(usize, Vec<usize>)]) -> Result<()> {
        let others = || from.iter().filter(|(m, _)| *m != self.index);
        let own = from.iter().find(|(m, _)| *m == self.index).map(|(_, own)| &own[..]).unwrap_or_default();
        let theirs = || others().flat_map(|(m, list)| list.iter().map(|p| (*m, pieces[*p].clone())));
        let mut cut = Cut::new(data, theirs().map(|(_, range)| range));
        let (write, rest) = cut.parts();
        let outgoing: Vec<(usize, &[T])> = others().flat_map(|(m, _)| own.iter().map(|p| (*m, rest.get(&pieces[*p])))).collect();
        let incoming: Vec<(usize, usize)> = theirs().map(|(m, range)| (m, range.len())).collect();
        self.exchange(op, &outgoing, &incoming, |come| {
            write.into_iter().zip(come).for_each(|(write, come)| write.copy_from_slice(come));
        })
    }

    /// Sums `data` of all members, for all of them.
    pub fn all_reduce<T: Number>(&self, name: &'static str, data: &mut [T]) -> Result<()> {
        let pieces = even_pieces(data.len(), self.size());
        self.reduce_scatter(name, data, &pieces)?;
        self.all_gather(name, data, &pieces)
    }

    /// One value of each member, in order, at every one.
    pub fn all_gather_values<T: Pod>(&self, name: &'static str, own: T) -> Result<Vec<T>> {
        self.all_gather_slices(name, &[own])
    }

    /// Lists of the same length of each member, one after the other, at every one.
    pub fn all_gather_slices<T: Pod>(&self, name: &'static str, own: &[T]) -> Result<Vec<T>> {
        let n = own.len();
        let mut all = vec![T::zeroed(); n * self.size()];
        all[self.index * n..][..n].copy_from_slice(own);
        let pieces: Vec<Range<usize>> = (0..self.size()).map(|m| m * n..(m + 1) * n).collect();
        self.all_gather(name, &mut all, &pieces)?;
        Ok(all)
    }

    /// Lists of each member, of any length, at member 0 (nothing at the others). As many messages as members.
    pub fn gather_to_first<T: Pod>(&self, name: &'static str, own: &[T]) -> Result<Vec<Vec<T>>> {
        let (of_sizes, of_lists) = (self.op(name)?, self.op(name)?);
        let len = [own.len() as u64];
        if self.index != 0 {
            self.exchange(&of_sizes, &[(0, &len[..])], &[], |_: &[&[u64]]| {})?;
            self.exchange(&of_lists, &[(0, own)], &[], |_: &[&[T]]| {})?;
            return Ok(Vec::new());
        }
        let mut lens = vec![own.len()];
        let each: Vec<(usize, usize)> = self.others().map(|m| (m, 1)).collect();
        self.exchange(&of_sizes, &[], &each, |come: &[&[u64]]| lens.extend(come.iter().map(|len| len[0] as usize)))?;
        let lists: Vec<(usize, usize)> = lens.iter().copied().enumerate().skip(1).collect();
        let mut all = vec![own.to_vec()];
        self.exchange(&of_lists, &[], &lists, |come| all.extend(come.iter().map(|list| list.to_vec())))?;
        Ok(all)
    }

    /// Returns when all members have come.
    pub fn barrier(&self, name: &'static str) -> Result<()> {
        self.all_gather_values(name, 0u8).map(drop)
    }

    /// `data` of member `root` goes to all.
    pub fn broadcast<T: Pod>(&self, name: &'static str, root: usize, data: &mut [T]) -> Result<()> {
        ensure!(root < self.size(), "{name}: there is no member {root} in a group of {}", self.size());
        let Some(per_node) = self.per_node else {
            return self.spread_from(&self.op(name)?, root, &(0..self.size()).collect::<Vec<_>>(), data);
        };
        let (rail, inside) = (self.op(name)?, self.op(name)?);
        let (node, own_rail) = self.node_and_rail(per_node);
        if self.index % per_node == root % per_node {
            self.spread_from(&rail, root, &own_rail, data)?;
        }
        self.spread_from(&inside, node[root % per_node], &node, data)
    }

    fn spread_from<T: Pod>(&self, op: &Op, root: usize, among: &[usize], data: &mut [T]) -> Result<()> {
        if self.index == root {
            let outgoing: Vec<(usize, &[T])> = among.iter().filter(|m| **m != root).map(|m| (*m, &*data)).collect();
            return self.exchange(op, &outgoing, &[], |_: &[&[T]]| {});
        }
        let len = data.len();
        self.exchange(op, &[], &[(root, len)], |come| data.copy_from_slice(come[0]))
    }

    /// Messages between pairs of members: each `(member, data)` goes out, each `(member, place)` comes in.
    pub fn point_to_point<T: Pod>(
        &self,
        name: &'static str,
        outgoing: &[(usize, &[T])],
        incoming: Vec<(usize, &mut [T])>,
    ) -> Result<()> {
        let lens: Vec<(usize, usize)> = incoming.iter().map(|(from, place)| (*from, place.len())).collect();
        self.exchange(&self.op(name)?, outgoing, &lens, |come| {
            incoming.into_iter().zip(come).for_each(|((_, place), come)| place.copy_from_slice(come));
        })
    }

    /// Uneven all-to-all. `counts[i * size + j]` numbers go from member i to member j, known to all. `send` holds what goes to member
    /// 0, to member 1, ...; `receive` gets what comes from member 0, from member 1, ...
    pub fn all_to_all<T: Pod>(&self, name: &'static str, counts: &[usize], send: &[T], receive: &mut [T]) -> Result<()> {
        let n = self.size();
        let count = |from: usize, to: usize| counts[from * n + to];
        ensure!(counts.len() == n * n, "{name}: {} counts for a group of {n}", counts.len());
        let (out, back): (usize, usize) =
            ((0..n).map(|m| count(self.index, m)).sum(), (0..n).map(|m| count(m, self.index)).sum());
        ensure!(send.len() == out && receive.len() == back, "{name}: the counts do not fit what is sent and received");
        let mut parts = Vec::with_capacity(n);
        let mut rest = send;
        for m in 0..n {
            let (part, after) = rest.split_at(count(self.index, m));
            parts.push(part);
            rest = after;
        }
        // By source: what came for this member.
        let mut places = Vec::with_capacity(n);
        let mut rest = receive;
        for m in 0..n {
            let (place, after) = rest.split_at_mut(count(m, self.index));
            places.push(place);
            rest = after;
        }
        let Some(per_node) = self.per_node else {
            let outgoing: Vec<(usize, &[T])> = self.others().map(|m| (m, parts[m])).collect();
            let incoming: Vec<(usize, usize)> = self.others().map(|m| (m, count(m, self.index))).collect();
            places[self.index].copy_from_slice(parts[self.index]);
            let places = places.into_iter().enumerate().filter(|(m, _)| *m != self.index).map(|(_, place)| place);
            return self.exchange(&self.op(name)?, &outgoing, &incoming, |come| {
                places.zip(come).for_each(|(place, come)| place.copy_from_slice(come));
            });
        };
        let (node, rail) = self.node_and_rail(per_node);
        // In the node: to the member of each destination's rail. `hold[source in the node][node of destination]`.
        let rail_of = |m: usize| (0..n).filter(move |other| other % per_node == m % per_node);
        let outgoing: Vec<(usize, &[T])> =
            node.iter().filter(|m| **m != self.index).flat_map(|m| rail_of(*m).map(|to| (*m, parts[to]))).collect();
        let incoming: Vec<(usize, usize)> =
            (node.iter().filter(|m| **m != self.index)).flat_map(|m| rail.iter().map(|to| (*m, count(*m, *to)))).collect();
        let mut hold: Vec<Vec<Vec<T>>> = Vec::with_capacity(per_node);
        self.exchange(&self.op(name)?, &outgoing, &incoming, |come| {
            let mut come = come.iter();
            for m in &node {
                hold.push(match *m == self.index {
                    true => rail.iter().map(|to| parts[*to].to_vec()).collect(),
                    false => rail.iter().map(|_| come.next().expect("one a message").to_vec()).collect(),
                });
            }
        })?;
        // Across nodes: all that the node has for a member of the rail.
        let own_node = self.index / per_node;
        let outgoing: Vec<(usize, &[T])> = (rail.iter().enumerate().filter(|(_, m)| **m != self.index))
            .flat_map(|(at, m)| hold.iter().map(move |from| (*m, &from[at][..])))
            .collect();
        let sources = |m: usize| (0..per_node).map(move |l| m / per_node * per_node + l);
        let incoming: Vec<(usize, usize)> = (rail.iter().filter(|m| **m != self.index))
            .flat_map(|m| sources(*m).map(|from| (*m, count(from, self.index))))
            .collect();
        for (from, held) in node.iter().zip(&hold) {
            places[*from].copy_from_slice(&held[own_node]);
        }
        let places = places.into_iter().enumerate().filter(|(m, _)| m / per_node != own_node).map(|(_, place)| place);
        self.exchange(&self.op(name)?, &outgoing, &incoming, |come| {
            places.zip(come).for_each(|(place, come)| place.copy_from_slice(come));
        })
    }
}

/// `n` numbers in `parts` pieces whose lengths differ by at most one.
pub fn even_pieces(n: usize, parts: usize) -> Vec<Range<usize>> {
    (0..parts).map(|i| i * n / parts..(i + 1) * n / parts).collect()
}

/// Members in each node, when there are several nodes with as many members each, and more than one.
fn members_per_node(members: &[usize], ranks_per_node: usize) -> Option<usize> {
    let node = |m: &usize| m / ranks_per_node;
    let per_node = members.iter().take_while(|m| node(m) == node(&members[0])).count();
    let even = members.chunks(per_node).all(|c| c.len() == per_node && c.iter().all(|m| node(m) == node(&c[0])));
    let distinct = members.chunks(per_node).map(|c| node(&c[0])).is_sorted_by(|a, b| a < b);
    (even && distinct && per_node > 1 && members.len() > per_node).then_some(per_node)
}

/// A slice cut into ranges that are written and the rest, which is read.
struct Cut<'a, T> {
    /// Rising.
    write: Vec<(Range<usize>, &'a mut [T])>,
    read: Vec<(usize, &'a [T])>,
    /// Place of each written range, as they were asked for.
    order: Vec<usize>,
}

/// What is read of a slice.
struct Rest<'a, T>(Vec<(usize, &'a [T])>);

impl<'a, T> Cut<'a, T> {
    fn new(data: &'a mut [T], ranges: impl Iterator<Item = Range<usize>>) -> Self {
        let ranges: Vec<Range<usize>> = ranges.collect();
        let mut sorted: Vec<usize> = (0..ranges.len()).collect();
        sorted.sort_by_key(|i| (ranges[*i].start, ranges[*i].end));
        let (mut write, mut read) = (Vec::with_capacity(ranges.len()), Vec::with_capacity(ranges.len() + 1));
        let (mut rest, mut at) = (data, 0);
        let mut order = vec![0; ranges.len()];
        for (place, i) in sorted.into_iter().enumerate() {
            let range = ranges[i].clone();
            let (before, after) = std::mem::take(&mut rest).split_at_mut(range.start - at);
            let (piece, after) = after.split_at_mut(range.len());
            read.push((at, &*before));
            order[i] = place;
            at = range.end;
            write.push((range, piece));
            rest = after;
        }
        read.push((at, &*rest));
        Self { write, read, order }
    }

    /// The written ranges in the order they were asked for, and the rest.
    fn parts(&mut self) -> (Vec<&mut [T]>, Rest<'a, T>) {
        let mut write: Vec<Option<&mut [T]>> = self.write.iter_mut().map(|(_, piece)| Some(&mut **piece)).collect();
        let write = self.order.iter().map(|place| write[*place].take().expect("each place once")).collect();
        (write, Rest(std::mem::take(&mut self.read)))
    }
}

impl<'a, T> Rest<'a, T> {
    /// A range that nothing written overlaps.
    fn get(&self, range: &Range<usize>) -> &'a [T] {
        if range.is_empty() {
            return &[];
        }
        let i = self.0.partition_point(|(start, _)| *start <= range.start) - 1;
        let (start, part) = self.0[i];
        &part[range.start - start..range.end - start]
    }
}

#[cfg(test)]
#[path = "group_tests.rs"]
mod tests;
