//! A rank of several: all of a mesh's parts put together.

use std::borrow::Cow;
use std::cell::RefCell;
use std::sync::Arc;

use anyhow::Result;

use super::carrier::{Carrier, OnHost};
use super::context::{Context, Cutting};
use super::exchange::{Exchange, Waits};
use super::experts::{Experts, Leaves};
use super::forest::{self, Forest};
use super::group::even_pieces;
use super::mesh::{Layout, Mesh};
use super::sharing::Sharing;
use super::zero::{self, Ownership, Shared};
use crate::error::bad_input;
use crate::model::peers::{ContextPeers, ExpertPeers, Peers};
use crate::model::{ModelConfig, ParamStore, ParamTable};
use crate::tensor::Backend;
use crate::tensor::backend::Batch;
use crate::tensor::cpu::Cpu;

/// On the host's memory unless the carrier of buckets is another one.
pub struct Together<C: Carrier = OnHost> {
    mesh: Arc<Mesh>,
    cutting: Cutting,
    context: Option<Box<dyn ContextPeers<C::B>>>,
    experts: Option<Box<dyn Leaves<C::B>>>,
    ownership: Ownership,
    exchange: Exchange<C>,
    table: ParamTable,
    by_sequence: Option<BySequence<C::B>>,
}

/// The ranks that hold the other chunks, and the other experts, where there are such.
pub struct Others<B: Backend> {
    pub context: Option<Box<dyn ContextPeers<B>>>,
    pub experts: Option<Box<dyn Leaves<B>>>,
}

/// Sums over sequences: what this rank has of the tree, of what all ranks share and of its experts' gradients.
struct BySequence<B: Backend> {
    /// Of a global batch.
    sequences: usize,
    world: RefCell<Forest<ParamStore<B>>>,
    experts: RefCell<Forest<ParamStore<B>>>,
}

impl Together {
    pub fn new(mesh: Arc<Mesh>, model: &ModelConfig, cutting: Cutting, bucket_bytes: usize) -> Result<Self> {
        let layout = mesh.layout;
        let others = Others {
            context: (layout.cp > 1).then(|| Box::new(Context::new(mesh.clone(), cutting)) as Box<dyn ContextPeers<Cpu>>),
            experts: (layout.ep > 1).then(|| Box::new(Experts::new(mesh.clone(), model.num_experts)) as Box<dyn Leaves<Cpu>>),
        };
        Self::over(OnHost::new(mesh.clone())?, others, mesh, model, cutting, bucket_bytes)
    }
}

impl<C: Carrier> Together<C> {
    /// With buckets that `carrier` moves.
    pub fn over(
        carrier: C,
        Others { context, experts }: Others<C::B>,
        mesh: Arc<Mesh>,
        model: &ModelConfig,
        cutting: Cutting,
        bucket_bytes: usize,
    ) -> Result<Self> {
        let table = ParamTable::new(model);
        let (buckets, ownership) = zero::plan(&table, mesh.layout, model.num_experts, mesh.rank, bucket_bytes);
        let exchange = Exchange::new(carrier, mesh.clone(), &table, buckets)?;
        Ok(Self { context, experts, exchange, ownership, cutting, table, by_sequence: None, mesh })
    }

    /// Sums gradients over a tree whose leaves are the `sequences` of a global batch: the same bits in every layout.
    ///
    /// # Errors
    /// With context parallelism, which sums inside of sequences.
    pub fn by_sequence(mut self, backend: &C::B, sequences: usize) -> Result<Self> {
        refuse_cut_sequences(self.mesh.layout)?;
        if let Some(experts) = &mut self.experts {
            experts.keep_apart(backend, &self.table)?;
        }
        self.by_sequence = Some(BySequence { sequences, world: RefCell::default(), experts: RefCell::default() });
        Ok(self)
    }

    /// All work is done: parts from the other ranks in order.
    pub fn finish(&self) {
        self.exchange.carrier().finish();
    }

    /// Sequences that a rank brings to the sums of its kind of bucket.
    fn sequences_of(&self, rank: usize, sequences: usize, shared: Shared) -> Vec<usize> {
        let layout = self.mesh.layout;
        let shares = even_pieces(sequences, layout.replicas());
        match shared {
            Shared::World => shares[layout.replica_of(rank)].clone().collect(),
            Shared::ExpertData => {
                layout.expert_group(rank).into_iter().flat_map(|r| shares[layout.replica_of(r)].clone()).collect()
            }
        }
    }

    /// Sums of the trees that the ranks have parts of.
    fn reduce_trees(&self, by: &BySequence<C::B>, grads: &mut ParamStore<C::B>) -> Result<()> {
        let (world, experts) = (by.world.take(), by.experts.take());
        for bucket in self.exchange.buckets() {
            let group = self.exchange.group(bucket);
            let forest = match bucket.shared {
                Shared::World => &world,
                Shared::ExpertData => &experts,
            };
            let of_member = |m: &usize| forest::starts(self.sequences_of(*m, by.sequences, bucket.shared).into_iter());
            let starts: Vec<Vec<usize>> = group.members().iter().map(of_member).collect();
            let nodes = forest.nodes().map(|(s, g)| Ok((s, self.exchange.pack(bucket, g)?))).collect::<Result<_>>()?;
            let sum = self.exchange.carrier().reduce_tree(bucket, nodes, &starts)?;
            self.exchange.unpack_own(bucket, &sum, 0, grads)?;
        }
        self.exchange.carrier().settle()
    }
}

/// Refuses sums over sequences where ranks hold parts of sequences.
pub fn refuse_cut_sequences(layout: Layout) -> Result<()> {
    if layout.cp > 1 {
        return Err(bad_input(
            "train.deterministic = \"layout\" sums gradients sequence by sequence, but parallel.cp cuts sequences: set parallel.cp = 1, or \
             train.deterministic = \"run\"",
        ));
    }
    Ok(())
}

impl<B: Backend, C: Carrier<B = B>> Sharing<B> for Together<C> {
    fn mesh(&self) -> Option<&Mesh> {
        Some(&self.mesh)
    }

    fn ownership(&self) -> &Ownership {
        &self.ownership
    }

    fn cut<'b>(&self, batch: &'b Batch) -> Result<Cow<'b, Batch>> {
        match &self.context {
            Some(_) => self.cutting.cut(batch, self.mesh.context.index()).map(Cow::Owned),
            None => Ok(Cow::Borrowed(batch)),
        }
    }

    fn peers(&self) -> Peers<'_, B> {
        self.exchange.set_reducing(false);
        Peers {
            context: self.context.as_deref(),
            experts: self.experts.as_deref().map(|e| e as &dyn ExpertPeers<B>),
            stages: Some(&self.exchange),
        }
    }

    fn last_peers(&self) -> Peers<'_, B> {
        let peers = self.peers();
        self.exchange.set_reducing(self.by_sequence.is_none());
        peers
    }

    fn leaf(&self, backend: &B, nth: usize, sequence: Option<usize>, grads: &mut ParamStore<B>) -> Result<()> {
        let Some(by) = &self.by_sequence else { return Ok(()) };
        let add = |a: &mut ParamStore<B>, b: ParamStore<B>| a.add_assign(backend, &b);
        if let Some(sequence) = sequence {
            let leaf = std::mem::replace(grads, grads.zeros_like(backend)?);
            by.world.borrow_mut().push(sequence, leaf, add)?;
        }
        let Some(leaves) = self.experts.as_ref().map(|e| e.take_leaves(backend, &self.table)).transpose()?.flatten() else {
            return Ok(());
        };
        for (member, leaf) in self.mesh.experts.members().iter().zip(leaves) {
            // A member that has run out of sequences sent nothing.
            if let Some(sequence) = self.sequences_of(*member, by.sequences, Shared::World).get(nth) {
                by.experts.borrow_mut().push(*sequence, leaf, add)?;
            }
        }
        Ok(())
    }

    fn reduced(&self, _: &B, grads: &mut ParamStore<B>) -> Result<()> {
        match &self.by_sequence {
            Some(by) => self.reduce_trees(by, grads),
            None => self.exchange.reduced(grads),
        }
    }

    fn updated(&self, params: &mut ParamStore<B>) -> Result<()> {
        self.exchange.updated(params)
    }

    fn take_waits(&self) -> Option<Waits> {
        Some(self.exchange.take_waits())
    }

    fn settle(&self, params: &ParamStore<B>) -> Result<()> {
        self.exchange.settle(params)
    }
}
