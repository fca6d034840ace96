//! The mixture-of-experts sub-layer of a block: norm, router with depth averaging, top-1 experts, residual merge (spec 1.6).

use anyhow::{Result, bail};

use super::config::{ModelConfig, SkipMode};
use super::cx::Cx;
use super::merge::{Entry, Norm, Normed, NormedGrad};
use super::params::{MoeIds, ParamId};
use super::peers::Exchanged;
use super::store::ParamStore;
use crate::tensor::backend::{Backend, RouterParams};

pub struct MoeLayer {
    block: usize,
    ids: MoeIds,
    norm: Norm,
    /// Of the next block, or of the head.
    next: Norm,
    num_experts: usize,
    router_norm_eps: f64,
    skip: SkipMode,
}

/// What the backward needs.
pub struct MoeSaved<B: Backend> {
    input: Entry<B>,
    prev: Option<B::Buf>,
    routing: B::Routing,
    route: B::RouteSaved,
    experts: ExpertsSaved<B>,
    branch: B::Buf,
}

/// Of experts that are all here, or of rows that went to where they are.
enum ExpertsSaved<B: Backend> {
    Here(B::ExpertSaved),
    Exchanged(Exchanged<B>),
}

/// What a recomputation begins with: the stream, and the router state of the block before.
pub struct MoeInput<B: Backend> {
    pub stream: B::Buf,
    pub prev: Option<B::Buf>,
}

impl<B: Backend> MoeSaved<B> {
    pub fn routing(&self) -> &B::Routing {
        &self.routing
    }

    /// What `forward` got, alone.
    pub fn into_input(self) -> MoeInput<B> {
        MoeInput { stream: self.input.stream, prev: self.prev }
    }
}

impl MoeLayer {
    pub fn new(cfg: &ModelConfig, block: usize, ids: MoeIds, next: Norm) -> Self {
        let norm = Norm { weight: ids.norm, eps: cfg.norm_eps };
        Self { block, ids, norm, next, num_experts: cfg.num_experts, router_norm_eps: cfg.router_norm_eps, skip: cfg.skip_mode }
    }

    fn router_params<'a, B: Backend>(&self, p: &'a ParamStore<B>) -> RouterParams<&'a B::Buf> {
        RouterParams {
            down_weight: &p[self.ids.router_down_weight],
            down_bias: &p[self.ids.router_down_bias],
            gamma: self.ids.router_gamma.map(|id| &p[id]),
            norm: &p[self.ids.router_norm],
            fc1_weight: &p[self.ids.router_fc1_weight],
            fc1_bias: &p[self.ids.router_fc1_bias],
            fc2_weight: &p[self.ids.router_fc2_weight],
            fc2_bias: &p[self.ids.router_fc2_bias],
            out: &p[self.ids.router_out],
        }
    }

    fn router_grads<'a, B: Backend>(&self, g: &'a mut ParamStore<B>) -> RouterParams<&'a mut B::Buf> {
        let ids = &self.ids;
        // The first block has no gamma; asking for its norm twice would not be disjoint, so the two cases stand apart.
        let common = [
            ids.router_down_weight,
            ids.router_down_bias,
            ids.router_norm,
            ids.router_fc1_weight,
            ids.router_fc1_bias,
            ids.router_fc2_weight,
            ids.router_fc2_bias,
            ids.router_out,
        ];
        let (bufs, gamma) = match ids.router_gamma {
            None => (g.many_mut(common), None),
            Some(gamma) => {
                let [a, b, c, d, e, f, h, i] = common;
                let [a, b, c, d, e, f, h, i, gamma] = g.many_mut([a, b, c, d, e, f, h, i, gamma]);
                ([a, b, c, d, e, f, h, i], Some(gamma))
            }
        };
        let [down_weight, down_bias, norm, fc1_weight, fc1_bias, fc2_weight, fc2_bias, out] = bufs;
        RouterParams { down_weight, down_bias, gamma, norm, fc1_weight, fc1_bias, fc2_weight, fc2_bias, out }
    }

    /// Table entries of the experts that are here: the first, and how many.
    fn experts<B: Backend>(&self, cx: &Cx<B>) -> (ParamId, usize) {
        let local = cx.peers.experts.map_or(0..self.num_experts, |peers| peers.local());
        (self.ids.experts + 2 * local.start, 2 * local.len())
    }

    /// `prev`: router state of the block before, `[T, R]`. Also returns the own one.
    pub fn forward<B: Backend>(
        &self,
        cx: &Cx<B>,
        input: Normed<B>,
        prev: Option<B::Buf>,
    ) -> Result<(Normed<B>, B::Buf, MoeSaved<B>)> {
        let (b, p, i) = (cx.backend, cx.params, self.block);
        cx.see(|| format!("layers.{i}.post_attention_layernorm.out"), &input.h);
        let (routing, state, route) = b.route(
            cx.rows,
            &input.h,
            prev.as_ref(),
            self.router_params(p),
            &p[self.ids.balancing_biases],
            self.router_norm_eps,
            cx.pinned.map(|routes| &routes[i]),
        )?;
        if let Some(probe) = cx.probe {
            probe.routing(i, &routing, &route, &state);
        }
        let (first, count) = self.experts(cx);
        let experts = p.range(first, count);
        let (branch, experts) = match cx.peers.experts {
            None => {
                let (branch, saved) = b.expert_ffn(&input.h, &routing, experts, self.skip)?;
                (branch, ExpertsSaved::Here(saved))
            }
            Some(peers) => {
                let (branch, saved) = peers.forward(b, cx.rows, &input.h, &routing, experts, self.skip)?;
                (branch, ExpertsSaved::Exchanged(saved))
            }
        };
        cx.see(|| format!("layers.{i}.moe.out"), &branch);
        let input = Entry::from(input);
        let out = self.ids.merge.forward(cx, &branch, &input.stream, self.next)?;
        cx.see(|| format!("layers.{i}.stream_out.out"), &out.stream);
        Ok((out, state, MoeSaved { input, prev, routing, route, experts, branch }))
    }

    /// `out`: the stream that `forward` returned, `d` its gradients, `d_state` that of the own router state. Returns the same of
    /// the input.
    #[allow(clippy::type_complexity)]
    pub fn backward<B: Backend>(
        &self,
        cx: &Cx<B>,
        grads: &mut ParamStore<B>,
        saved: MoeSaved<B>,
        out: &Entry<B>,
        d: NormedGrad<B>,
        d_state: Option<B::Buf>,
    ) -> Result<(Entry<B>, NormedGrad<B>, Option<B::Buf>)> {
        let (b, p) = (cx.backend, cx.params);
        let MoeSaved { input, prev, routing, route, experts, branch } = saved;
        let (d_branch, d_stream) = self.ids.merge.backward(cx, grads, &branch, &input.stream, out, self.next, d)?;
        drop(branch);
        let h = input.normed(cx, self.norm)?;
        let (first, n) = self.experts(cx);
        let weights = p.range(first, n);
        let (mut dh, d_prob) = match (&experts, cx.peers.experts) {
            (ExpertsSaved::Exchanged(saved), Some(peers)) => {
                peers.backward(b, &h, &routing, weights, self.skip, saved, &d_branch, first, grads)?
            }
            (ExpertsSaved::Here(saved), _) => {
                let g = grads.range_mut(first, n);
                b.expert_ffn_backward(&h, &routing, weights, self.skip, saved, &d_branch, g)?
            }
            (ExpertsSaved::Exchanged(_), None) => bail!("rows of an exchange without the ranks it was made with"),
        };
        drop((d_branch, experts));
        let d_prev = b.route_backward(
            &h,
            prev.as_ref(),
            self.router_params(p),
            &routing,
            &route,
            &d_prob,
            d_state.as_ref(),
            self.router_grads(grads),
            &mut dh,
        )?;
        Ok((input, NormedGrad { dh, d_stream: Some(d_stream) }, d_prev))
    }
}
