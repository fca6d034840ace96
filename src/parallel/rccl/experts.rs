//! Expert parallelism between devices: rows of tokens go to the ranks that hold their experts, and come back, in device memory. How many
//! there are, whose they are and how probable their experts, a few bytes a row, goes by way of the host, which must know the sizes of
//! what travels.

use std::ops::Range;
use std::sync::Arc;

use anyhow::{Context as _, Result};

use super::super::experts::{Dealt, Leaves, turned};
use super::super::mesh::Mesh;
use super::link::{Link, Parcel};
use super::links::Links;
use crate::error::bad_input;
use crate::model::params::ParamId;
use crate::model::peers::{Arrived, Exchanged, ExpertPeers};
use crate::model::{ParamStore, ParamTable};
use crate::tensor::Backend;
use crate::tensor::backend::SkipMode;
use crate::tensor::hip::{Buf, Hip, Kind, Routing, Rows};

/// The expert group of a rank.
pub struct DeviceExperts {
    links: Arc<Links>,
    dealt: Dealt,
}

impl DeviceExperts {
    pub fn new(links: Arc<Links>, mesh: Arc<Mesh>, num_experts: usize) -> Self {
        Self { links, dealt: Dealt::new(mesh, num_experts) }
    }

    fn link(&self) -> Result<&Link> {
        self.links.experts.as_ref().context("there is no expert group")
    }

    /// Rows of `x`, those for member 0 first, then those for member 1, ...: `counts[i * size + j]` go from member i to member j. Returns
    /// what comes, in the order of the members it comes from.
    fn all_to_all(&self, name: &'static str, hip: &Hip, counts: &[usize], x: &Buf) -> Result<Buf> {
        let link = self.link()?;
        let (n, me, row) = (link.size(), link.index(), x.cols() * x.kind().bytes());
        let mut arrived = hip.room((0..n).map(|m| counts[m * n + me]).sum(), x.cols(), x.kind())?;
        let (mut outgoing, mut incoming) = (Vec::new(), Vec::new());
        let (mut from, mut to) = (0, 0);
        for member in 0..n {
            let (out, back) = (counts[me * n + member], counts[member * n + me]);
            if member == me {
                hip.copy_part(&mut arrived, to * x.cols(), x, from * x.cols()..(from + out) * x.cols())?;
            } else {
                outgoing.push(Parcel { member, at: x.address(from * x.cols()), bytes: out * row });
                incoming.push(Parcel { member, at: arrived.address_mut(to * x.cols()), bytes: back * row });
            }
            (from, to) = (from + out, to + back);
        }
        // SAFETY: buffers of this backend, used in its stream alone.
        unsafe { link.exchange(name, hip.main_stream()?, &outgoing, &incoming) }?;
        Ok(arrived)
    }

    fn back(&self, counts: &[usize]) -> Vec<usize> {
        turned(counts, self.dealt.pieces.len())
    }

    /// Own rows that are sent.
    fn sent(&self, counts: &[usize]) -> usize {
        let (n, me) = (self.dealt.pieces.len(), self.dealt.place());
        counts[me * n..(me + 1) * n].iter().sum()
    }
}

impl ExpertPeers<Hip> for DeviceExperts {
    fn local(&self) -> Range<usize> {
        self.dealt.local()
    }

    fn forward(
        &self,
        hip: &Hip,
        rows: &Rows,
        h: &Buf,
        routing: &Routing,
        experts: &[Buf],
        skip: SkipMode,
    ) -> Result<(Buf, Exchanged<Hip>)> {
        let routes = routing.routes(hip)?;
        let own: Vec<u64> = routes.offsets.windows(2).take(self.dealt.num_experts).map(|w| u64::from(w[1] - w[0])).collect();
        let by_expert = self.dealt.all_counts(&own)?;
        let counts = self.dealt.between(&by_expert);
        let sent = self.sent(&counts);
        // Which token of the batch each row is, and how probable its expert.
        let note = |t: &u32| [rows.token(*t as usize), routes.prob[*t as usize].to_bits()];
        let notes: Vec<[u32; 2]> = routes.order[..sent].iter().map(note).collect();
        let (n, me) = (self.dealt.pieces.len(), self.dealt.place());
        let mut come = vec![[0u32; 2]; (0..n).map(|m| counts[m * n + me]).sum()];
        self.dealt.mesh.experts.all_to_all("all-to-all of token numbers", &counts, &notes, &mut come)?;

        // The experts read bf16, whoever rounds.
        let parcel = hip.take_rows(h, routing.order(), sent, Kind::Bf16)?;
        let here = self.all_to_all("all-to-all of tokens", hip, &counts, &parcel)?;
        drop(parcel);
        let sources: Vec<usize> = (0..n).collect();
        let (choice, order) = self.dealt.order(&sources, &by_expert, |i| come[i][0]);
        let prob: Vec<f32> = come.iter().map(|[_, prob]| f32::from_bits(*prob)).collect();
        let of_here = Routing::given(hip, &choice, &prob, &order, self.local().len())?;
        let (out_here, saved) = hip.expert_ffn(&here, &of_here, experts, SkipMode::Zero)?;
        let back = self.all_to_all("all-to-all of experts' outputs", hip, &self.back(&counts), &out_here)?;
        drop(out_here);
        let mut out = hip.room(h.rows(), h.cols(), Kind::F32)?;
        hip.put_rows(&back, routing.order(), &mut out)?;
        hip.skip_forward(h, routing, skip, &mut out)?;
        Ok((out, Exchanged { parts: vec![Arrived { h: here, routing: of_here, saved }], counts }))
    }

    fn backward(
        &self,
        hip: &Hip,
        h: &Buf,
        routing: &Routing,
        experts: &[Buf],
        skip: SkipMode,
        saved: &Exchanged<Hip>,
        dy: &Buf,
        first: ParamId,
        grads: &mut ParamStore<Hip>,
    ) -> Result<(Buf, Buf)> {
        let (counts, part) = (&saved.counts, saved.parts.first().context("an exchange without rows")?);
        let parcel = hip.take_rows(dy, routing.order(), self.sent(counts), dy.kind())?;
        let dy_here = self.all_to_all("all-to-all of output gradients", hip, counts, &parcel)?;
        drop(parcel);
        let g = grads.range_mut(first, experts.len());
        let (dh_here, d_prob_here) =
            hip.expert_ffn_backward(&part.h, &part.routing, experts, SkipMode::Zero, &part.saved, &dy_here, g)?;
        let back = self.back(counts);
        let dh_back = self.all_to_all("all-to-all of token gradients", hip, &back, &dh_here)?;
        let d_prob_back = self.all_to_all("all-to-all of probability gradients", hip, &back, &d_prob_here)?;
        let (mut dh, mut d_prob) = (hip.room(h.rows(), h.cols(), Kind::F32)?, hip.room(h.rows(), 1, Kind::F32)?);
        hip.put_rows(&dh_back, routing.order(), &mut dh)?;
        hip.put_rows(&d_prob_back, routing.order(), &mut d_prob)?;
        hip.skip_backward(h, routing, skip, dy, &mut dh, &mut d_prob)?;
        Ok((dh, d_prob))
    }
}

impl Leaves<Hip> for DeviceExperts {
    fn keep_apart(&mut self, _: &Hip, _: &ParamTable) -> Result<()> {
        Err(bad_input(
            "train.deterministic = \"layout\" with parallel.ep > 1 is not there for --backend hip: set parallel.ep = 1, or \
             train.deterministic = \"run\"",
        ))
    }

    fn take_leaves(&self, _: &Hip, _: &ParamTable) -> Result<Option<Vec<ParamStore<Hip>>>> {
        Ok(None)
    }
}
