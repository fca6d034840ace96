//! Which ranks work together on what.
//!
//! Ranks are numbered with the context-parallel place running fastest, so that the ranks of one sequence lie next to each other, and
//! so do those that share the experts: both fit inside a node. Expert parallelism is folded: a rank holds its own tokens whatever
//! `ep` is, and expert groups are cut out of the same ranks.
//!
//! | group | ranks | what they share |
//! |---|---|---|
//! | world | all | the gradients of everything but experts |
//! | context | `cp` in a row | sequences; each holds chunks |
//! | experts | `ep` in a row | the experts of every block; each holds some |
//! | expert-data | every `ep`-th | the gradients of the same experts |

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;

use super::group::{Comm, Group, Stages, even_pieces};
use super::threads::Hub;
use super::transport::Channel;
use crate::error::bad_input;

/// Sizes of the mesh.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    pub world: usize,
    /// Ranks that share a sequence.
    pub cp: usize,
    /// Ranks that share the experts.
    pub ep: usize,
}

impl Layout {
    pub const SINGLE: Layout = Layout { world: 1, cp: 1, ep: 1 };

    /// # Errors
    /// Sizes that do not divide, in a sentence.
    pub fn new(world: usize, cp: usize, ep: usize, num_experts: usize) -> Result<Self> {
        for (name, what, n) in [("cp", "context", cp), ("ep", "expert", ep)] {
            if n == 0 || !world.is_multiple_of(n) {
                return Err(bad_input(format!(
                    "parallel.{name} = {n} does not divide the number of ranks, {world}: {what} groups are equal parts of all ranks. \
                     Choose a divisor of {world}, or another number of ranks"
                )));
            }
        }
        if ep > num_experts {
            return Err(bad_input(format!(
                "parallel.ep = {ep}, but the model has {num_experts} experts: a rank without an expert has nothing to do there. Make \
                 parallel.ep at most {num_experts}"
            )));
        }
        Ok(Self { world, cp, ep })
    }

    /// Data-parallel replicas: parts that the sequences of a global batch are dealt to.
    pub fn replicas(&self) -> usize {
        self.world / self.cp
    }

    /// Ranks that hold the same experts.
    pub fn expert_replicas(&self) -> usize {
        self.world / self.ep
    }

    pub fn replica_of(&self, rank: usize) -> usize {
        rank / self.cp
    }

    /// Place in the context group.
    pub fn context_place(&self, rank: usize) -> usize {
        rank % self.cp
    }

    /// Place in the expert group.
    pub fn expert_place(&self, rank: usize) -> usize {
        rank % self.ep
    }

    /// Sequences of each micro-batch of `rank`, out of `sequences` of a global batch, `micro` at a time. All ranks have as many
    /// micro-batches; the last ones of some may be empty. Of one micro-batch, a replica has sequences before those of the next.
    pub fn micro_batches(&self, rank: usize, sequences: usize, micro: usize) -> Vec<Range<usize>> {
        let shares = even_pieces(sequences, self.replicas());
        let most = shares.iter().map(Range::len).max().unwrap_or(0);
        let own = &shares[self.replica_of(rank)];
        (0..most).step_by(micro).map(|s| (own.start + s).min(own.end)..(own.start + s + micro).min(own.end)).collect()
    }

    fn context_group(&self, rank: usize) -> Vec<usize> {
        let first = rank / self.cp * self.cp;
        (first..first + self.cp).collect()
    }

    pub fn expert_group(&self, rank: usize) -> Vec<usize> {
        let first = rank / self.ep * self.ep;
        (first..first + self.ep).collect()
    }

    /// Ranks that hold the experts that `rank` holds.
    pub fn expert_data_group(&self, rank: usize) -> Vec<usize> {
        (rank % self.ep..self.world).step_by(self.ep).collect()
    }

    /// Experts of each block that `rank` holds.
    pub fn experts_of(&self, rank: usize, num_experts: usize) -> Range<usize> {
        even_pieces(num_experts, self.ep)[self.expert_place(rank)].clone()
    }

    /// A sentence for each group that is spread over nodes so that it wastes links: in a node whose GPUs are all linked to each other
    /// (xGMI), a group of some of them uses only the links among these.
    pub fn partial_nodes(&self, ranks_per_node: usize) -> Vec<String> {
        let groups = [("cp", "context", self.cp), ("ep", "expert", self.ep)];
        let wasteful = groups.into_iter().filter(|(_, _, n)| *n > 1 && *n < ranks_per_node.min(self.world));
        let straddling = groups.into_iter().filter(|(_, _, n)| {
            *n > 1 && self.world > ranks_per_node && !ranks_per_node.is_multiple_of(*n) && !n.is_multiple_of(ranks_per_node)
        });
        let part = |(key, what, n): (&str, &str, usize)| {
            format!(
                "parallel.{key} = {n}: a {what} group is a part of a node of {ranks_per_node} ranks and uses {} of a rank's {} links to the \
                 others of its node",
                n - 1,
                ranks_per_node.min(self.world) - 1
            )
        };
        let across = |(key, what, n): (&str, &str, usize)| {
            format!("parallel.{key} = {n}: some {what} groups begin in one node of {ranks_per_node} ranks and end in another")
        };
        let uneven = (self.world > ranks_per_node && !self.world.is_multiple_of(ranks_per_node)).then(|| {
            format!("{} ranks in nodes of {ranks_per_node}: the last node has fewer, and groups fit it differently", self.world)
        });
        wasteful.map(part).chain(straddling.map(across)).chain(uneven).collect()
    }
}

/// A rank's groups.
pub struct Mesh {
    pub layout: Layout,
    pub rank: usize,
    pub comm: Arc<Comm>,
    pub world: Group,
    pub context: Group,
    pub experts: Group,
    /// Of the background channel, for gradients and weights.
    pub background_world: Arc<Group>,
    pub background_expert_data: Arc<Group>,
}

impl Mesh {
    pub fn new(layout: Layout, comm: Arc<Comm>) -> Self {
        let rank = comm.transport.rank();
        let all: Vec<usize> = (0..layout.world).collect();
        let group = |channel, name, members| Group::new(&comm, channel, name, members);
        Self {
            layout,
            rank,
            world: group(Channel::Main, "world", all.clone()),
            context: group(Channel::Main, "context", layout.context_group(rank)),
            experts: group(Channel::Main, "expert", layout.expert_group(rank)),
            background_world: Arc::new(group(Channel::Background, "world", all)),
            background_expert_data: Arc::new(group(Channel::Background, "expert-data", layout.expert_data_group(rank))),
            comm,
        }
    }

    /// The first rank of a mesh that nobody else is in, for plans: it must not communicate.
    pub fn planned(layout: Layout) -> Self {
        let first = Hub::ranks(layout.world, Duration::ZERO).swap_remove(0);
        Self::new(layout, Comm::new(Arc::new(first), Stages::Flat))
    }

    /// The rank that prints, writes metrics and saves.
    pub fn is_first(&self) -> bool {
        self.rank == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_partition_the_ranks() {
        let l = Layout::new(12, 2, 3, 16).unwrap();
        assert_eq!((l.replicas(), l.expert_replicas()), (6, 4));
        assert_eq!(l.context_group(5), [4, 5]);
        assert_eq!(l.expert_group(5), [3, 4, 5]);
        assert_eq!(l.expert_data_group(5), [2, 5, 8, 11]);
        let of = |rank| l.experts_of(rank, 16);
        assert_eq!((of(0), of(1), of(2)), (0..5, 5..10, 10..16));
    }

    #[test]
    fn what_does_not_divide_is_refused() {
        let text = |world, cp, ep| Layout::new(world, cp, ep, 4).unwrap_err().to_string();
        assert!(text(4, 3, 1).contains("parallel.cp = 3 does not divide the number of ranks, 4"));
        assert!(text(6, 1, 4).contains("parallel.ep = 4"));
        assert!(text(8, 1, 8).contains("4 experts"));
    }

    #[test]
    fn groups_that_waste_links_are_told() {
        let layout = |world, cp, ep| Layout { world, cp, ep };
        assert!(layout(16, 8, 8).partial_nodes(8).is_empty());
        assert!(layout(16, 1, 1).partial_nodes(8).is_empty());
        let told = layout(16, 2, 16).partial_nodes(8);
        assert!(told.len() == 1 && told[0].contains("parallel.cp = 2") && told[0].contains("1 of a rank's 7 links"), "{told:?}");
        assert!(layout(24, 12, 1).partial_nodes(8)[0].contains("begin in one node"));
        assert!(layout(4, 1, 1).partial_nodes(3)[0].contains("4 ranks in nodes of 3"));
        // Two ranks in all: the node is not fuller than that.
        assert!(layout(2, 2, 1).partial_nodes(8).is_empty());
    }
}
