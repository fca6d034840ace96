//! Expert parallelism: rows go to the ranks that hold their experts and come back, without capacity and without padding. A rank
//! joins every exchange, with rows or without.
//!
//! Rows of an expert are put in the order of their tokens in the global batch, whatever rank they come from, so that sums over them
//! are taken in one order.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

use anyhow::Result;

use super::group::even_pieces;
use super::mesh::Mesh;
use crate::model::params::ParamId;
use crate::model::peers::{Arrived, Exchanged, ExpertPeers};
use crate::model::{ParamStore, ParamTable};
use crate::tensor::Backend;
use crate::tensor::backend::SkipMode;
use crate::tensor::cpu::router::Routing;
use crate::tensor::cpu::{Buf, Cpu, Rows, experts};

/// Ranks that hold the other experts, of whose gradients the leaves of a tree over sequences can be had.
pub trait Leaves<B: Backend>: ExpertPeers<B> {
    /// From now on gradients of the local experts are kept apart by the member whose rows they come from; `take_leaves` hands them out.
    ///
    /// # Errors
    /// Where that is not possible.
    fn keep_apart(&mut self, backend: &B, table: &ParamTable) -> Result<()>;

    /// Gradients of the micro-batch that is done, by member; None where they are not kept apart.
    fn take_leaves(&self, backend: &B, table: &ParamTable) -> Result<Option<Vec<ParamStore<B>>>>;
}

/// Which experts the members of an expert group hold, and what follows for rows on their way to them.
pub struct Dealt {
    pub mesh: Arc<Mesh>,
    /// Experts of each member.
    pub pieces: Vec<Range<usize>>,
    pub num_experts: usize,
}

/// The expert group of a rank.
pub struct Experts {
    dealt: Dealt,
    /// Gradients of the local experts by the member whose rows they come from, where these are summed apart.
    leaves: Option<RefCell<Vec<ParamStore<Cpu>>>>,
}

impl Dealt {
    pub fn new(mesh: Arc<Mesh>, num_experts: usize) -> Self {
        Self { pieces: even_pieces(num_experts, mesh.layout.ep), mesh, num_experts }
    }

    pub fn place(&self) -> usize {
        self.mesh.experts.index()
    }

    pub fn local(&self) -> Range<usize> {
        self.pieces[self.place()].clone()
    }

    /// Rows that each member sends to each expert, `[size, E]`, given how many this one does.
    pub fn all_counts(&self, own: &[u64]) -> Result<Vec<u64>> {
        self.mesh.experts.all_gather_slices("counts of routed rows", own)
    }

    /// Rows that go from member i to member j, `[size, size]`.
    pub fn between(&self, by_expert: &[u64]) -> Vec<usize> {
        let n = self.pieces.len();
        let to = |from: usize, member: usize| -> usize {
            by_expert[from * self.num_experts..][self.pieces[member].clone()].iter().sum::<u64>() as usize
        };
        (0..n * n).map(|i| to(i / n, i % n)).collect()
    }

    /// Rows that have come from `sources`, each the `token` of its batch: which local expert each is for, and their order by expert,
    /// within one by sequence and position, whichever rank they come from.
    pub fn order(&self, sources: &[usize], by_expert: &[u64], token: impl Fn(usize) -> u32) -> (Vec<u32>, Vec<u32>) {
        let members = self.mesh.experts.members();
        let mut keys = Vec::new();
        for from in sources {
            let replica = self.mesh.layout.replica_of(members[*from]);
            for (local, e) in self.local().enumerate() {
                for _ in 0..by_expert[from * self.num_experts + e] {
                    keys.push((local as u32, replica, token(keys.len())));
                }
            }
        }
        let mut order: Vec<u32> = (0..keys.len() as u32).collect();
        order.sort_unstable_by_key(|i| keys[*i as usize]);
        (keys.into_iter().map(|(local, ..)| local).collect(), order)
    }
}

/// `counts` of the way back.
pub fn turned(counts: &[usize], members: usize) -> Vec<usize> {
    (0..members * members).map(|i| counts[i % members * members + i / members]).collect()
}

impl Experts {
    pub fn new(mesh: Arc<Mesh>, num_experts: usize) -> Self {
        Self { dealt: Dealt::new(mesh, num_experts), leaves: None }
    }

    fn new_leaves(&self, backend: &Cpu, table: &ParamTable) -> Result<Vec<ParamStore<Cpu>>> {
        let local = self.local();
        let is_here = |id: ParamId| table.specs[id].expert.is_some_and(|e| local.contains(&e));
        self.dealt.pieces.iter().map(|_| ParamStore::zeros_of(backend, table, is_here)).collect()
    }

    /// Own rows that go to some expert, in the order they are sent in: by expert, hence by member.
    fn sent<'a>(&self, routing: &'a Routing) -> &'a [u32] {
        &routing.order[..routing.offsets[self.dealt.num_experts]]
    }

    /// Rows of `x` to the experts' ranks; `width` numbers each.
    fn send(&self, name: &'static str, backend: &Cpu, counts: &[usize], order: &[u32], x: &Buf) -> Result<Buf> {
        let width = backend.shape(x)[1];
        let mut out = backend.matrix(order.len(), width)?;
        experts::gather(x.data(), order, width, out.data_mut());
        self.exchange(name, backend, counts, out.data(), width)
    }

    fn exchange(&self, name: &'static str, backend: &Cpu, counts: &[usize], rows: &[f32], width: usize) -> Result<Buf> {
        let n = self.dealt.pieces.len();
        let come: usize = (0..n).map(|m| counts[m * n + self.dealt.place()]).sum();
        let mut arrived = backend.matrix(come, width)?;
        let numbers: Vec<usize> = counts.iter().map(|c| c * width).collect();
        self.dealt.mesh.experts.all_to_all(name, &numbers, rows, arrived.data_mut())?;
        Ok(arrived)
    }

    /// The way back: rows in the order of `sent`.
    fn send_back(&self, name: &'static str, backend: &Cpu, counts: &[usize], rows: &Buf) -> Result<Buf> {
        let back = turned(counts, self.dealt.pieces.len());
        self.exchange(name, backend, &back, rows.data(), backend.shape(rows)[1])
    }
}

impl Leaves<Cpu> for Experts {
    fn keep_apart(&mut self, backend: &Cpu, table: &ParamTable) -> Result<()> {
        self.leaves = Some(RefCell::new(self.new_leaves(backend, table)?));
        Ok(())
    }

    fn take_leaves(&self, backend: &Cpu, table: &ParamTable) -> Result<Option<Vec<ParamStore<Cpu>>>> {
        match &self.leaves {
            Some(leaves) => Ok(Some(std::mem::replace(&mut leaves.borrow_mut(), self.new_leaves(backend, table)?))),
            None => Ok(None),
        }
    }
}

impl ExpertPeers<Cpu> for Experts {
    fn local(&self) -> Range<usize> {
        self.dealt.local()
    }

    fn forward(
        &self,
        backend: &Cpu,
        rows: &Rows,
        h: &Buf,
        routing: &Routing,
        experts: &[Buf],
        skip: SkipMode,
    ) -> Result<(Buf, Exchanged<Cpu>)> {
        let [tokens, width] = backend.shape(h);
        let n = self.dealt.pieces.len();
        if backend.is_planning() {
            return self.plan(backend, tokens, width, experts);
        }
        let own: Vec<u64> = (0..self.dealt.num_experts).map(|e| (routing.offsets[e + 1] - routing.offsets[e]) as u64).collect();
        let by_expert = self.dealt.all_counts(&own)?;
        let counts = self.dealt.between(&by_expert);
        let order = self.sent(routing);
        let arrived = self.send("all-to-all of tokens", backend, &counts, order, h)?;

        // Which token of the batch each row is, and how probable its expert.
        let notes: Vec<[u32; 2]> = order.iter().map(|t| [rows.token(*t as usize), routing.prob[*t as usize].to_bits()]).collect();
        let mut come = vec![[0; 2]; backend.shape(&arrived)[0]];
        self.dealt.mesh.experts.all_to_all("all-to-all of token numbers", &counts, &notes, &mut come)?;

        let sources: Vec<usize> = (0..n).collect();
        let apart = sources.chunks(if self.leaves.is_some() { 1 } else { n });
        let lens: Vec<usize> =
            apart.clone().map(|from| from.iter().map(|from| counts[from * n + self.dealt.place()]).sum()).collect();
        let (mut parts, mut outs) = (Vec::with_capacity(lens.len()), Vec::with_capacity(lens.len()));
        let mut rest = &come[..];
        for (sources, h) in apart.zip(cut_rows(backend, arrived, &lens)?) {
            let (notes, after) = rest.split_at(backend.shape(&h)[0]);
            rest = after;
            let (choice, order) = self.dealt.order(sources, &by_expert, |i| notes[i][0]);
            let prob = notes.iter().map(|[_, prob]| f32::from_bits(*prob));
            let routing = Routing::given(backend, &choice, prob, &order, self.local().len())?;
            let (out, saved) = backend.expert_ffn(&h, &routing, experts, SkipMode::Zero)?;
            outs.push(out);
            parts.push(Arrived { h, routing, saved });
        }
        let out_here = join_rows(backend, outs, width)?;
        let back = self.send_back("all-to-all of experts' outputs", backend, &counts, &out_here)?;
        drop(out_here);
        let mut out = backend.matrix(tokens, width)?;
        experts::scatter(back.data(), self.sent(routing), width, out.data_mut());
        experts::skip_forward(h, routing, self.dealt.num_experts, skip, &mut out);
        Ok((out, Exchanged { parts, counts }))
    }

    fn backward(
        &self,
        backend: &Cpu,
        h: &Buf,
        routing: &Routing,
        experts: &[Buf],
        skip: SkipMode,
        saved: &Exchanged<Cpu>,
        dy: &Buf,
        first: ParamId,
        grads: &mut ParamStore<Cpu>,
    ) -> Result<(Buf, Buf)> {
        let [tokens, width] = backend.shape(h);
        if backend.is_planning() {
            let g = grads.range_mut(first, experts.len());
            for p in &saved.parts {
                backend.expert_ffn_backward(&p.h, &p.routing, experts, SkipMode::Zero, &p.saved, &p.h, g)?;
            }
            return Ok((backend.matrix(tokens, width)?, backend.matrix(tokens, 1)?));
        }
        let order = self.sent(routing);
        let arrived = self.send("all-to-all of output gradients", backend, &saved.counts, order, dy)?;
        let lens: Vec<usize> = saved.parts.iter().map(|p| backend.shape(&p.h)[0]).collect();
        let (mut dh_here, mut d_prob_here) = (Vec::with_capacity(lens.len()), Vec::with_capacity(lens.len()));
        let mut leaves = self.leaves.as_ref().map(|leaves| leaves.borrow_mut());
        for (source, (p, dy)) in saved.parts.iter().zip(cut_rows(backend, arrived, &lens)?).enumerate() {
            let g = match &mut leaves {
                Some(leaves) => leaves[source].range_mut(first, experts.len()),
                None => grads.range_mut(first, experts.len()),
            };
            let (dh, d_prob) = backend.expert_ffn_backward(&p.h, &p.routing, experts, SkipMode::Zero, &p.saved, &dy, g)?;
            dh_here.push(dh);
            d_prob_here.push(d_prob);
        }
        let (dh_here, d_prob_here) = (join_rows(backend, dh_here, width)?, join_rows(backend, d_prob_here, 1)?);
        let dh_back = self.send_back("all-to-all of token gradients", backend, &saved.counts, &dh_here)?;
        let d_prob_back = self.send_back("all-to-all of probability gradients", backend, &saved.counts, &d_prob_here)?;
        let (mut dh, mut d_prob) = (backend.matrix(tokens, width)?, backend.matrix(tokens, 1)?);
        experts::scatter(dh_back.data(), order, width, dh.data_mut());
        experts::scatter(d_prob_back.data(), order, 1, d_prob.data_mut());
        experts::skip_backward(h, routing, self.dealt.num_experts, skip, dy, &mut dh, &mut d_prob);
        Ok((dh, d_prob))
    }
}

impl Experts {
    /// Memory of `forward` when all ranks' experts are chosen equally often.
    fn plan(&self, backend: &Cpu, tokens: usize, width: usize, experts: &[Buf]) -> Result<(Buf, Exchanged<Cpu>)> {
        let sent = backend.matrix(tokens, width)?;
        let h = backend.matrix(tokens, width)?;
        let routing = Routing::given(backend, &[], std::iter::empty(), &[], self.local().len())?;
        drop(sent);
        let (out, saved) = backend.expert_ffn(&h, &routing, experts, SkipMode::Zero)?;
        let back = backend.matrix(tokens, width)?;
        drop(out);
        let out = backend.matrix(tokens, width)?;
        drop(back);
        let n = self.dealt.pieces.len();
        Ok((out, Exchanged { parts: vec![Arrived { h, routing, saved }], counts: vec![0; n * n] }))
    }
}

/// Rows of a matrix in parts of these lengths; a single part is the matrix itself.
fn cut_rows(backend: &Cpu, x: Buf, lens: &[usize]) -> Result<Vec<Buf>> {
    if lens.len() == 1 {
        return Ok(vec![x]);
    }
    let width = backend.shape(&x)[1];
    let mut rest = x.data();
    let mut cut = |len: usize| {
        let mut out = backend.matrix(len, width)?;
        let (part, after) = rest.split_at(len * width);
        rest = after;
        out.data_mut().copy_from_slice(part);
        Ok(out)
    };
    lens.iter().map(|len| cut(*len)).collect()
}

/// The reverse of `cut_rows`.
fn join_rows(backend: &Cpu, mut parts: Vec<Buf>, width: usize) -> Result<Buf> {
    if parts.len() == 1 {
        return Ok(parts.remove(0));
    }
    let mut out = backend.matrix(parts.iter().map(|p| backend.shape(p)[0]).sum(), width)?;
    let mut rest = out.data_mut();
    for part in &parts {
        let (place, after) = rest.split_at_mut(part.data().len());
        place.copy_from_slice(part.data());
        rest = after;
    }
    Ok(out)
}
