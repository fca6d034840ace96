//! The mixture-of-experts sub-layer of a block: norm, router with depth averaging, top-1 experts, residual merge (spec 1.6).

use anyhow::Result;

use super::config::{ModelConfig, SkipMode};
use super::cx::Cx;
use super::params::MoeIds;
use super::store::ParamStore;
use crate::tensor::backend::{Backend, RouterParams};

pub struct MoeLayer {
    block: usize,
    ids: MoeIds,
    num_experts: usize,
    norm_eps: f64,
    router_norm_eps: f64,
    skip: SkipMode,
}

/// What the backward needs.
pub struct MoeSaved<B: Backend> {
    stream: B::Buf,
    norm: B::NormSaved,
    h: B::Buf,
    prev: Option<B::Buf>,
    routing: B::Routing,
    route: B::RouteSaved,
    experts: B::ExpertSaved,
    branch: B::Buf,
}

impl<B: Backend> MoeSaved<B> {
    pub fn routing(&self) -> &B::Routing {
        &self.routing
    }
}

impl MoeLayer {
    pub fn new(cfg: &ModelConfig, block: usize, ids: MoeIds) -> Self {
        Self {
            block,
            ids,
            num_experts: cfg.num_experts,
            norm_eps: cfg.norm_eps,
            router_norm_eps: cfg.router_norm_eps,
            skip: cfg.skip_mode,
        }
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

    /// stream `[T, D]`, router state of the block before `[T, R]` -> stream, own router state.
    pub fn forward<B: Backend>(&self, cx: &Cx<B>, stream: B::Buf, prev: Option<B::Buf>) -> Result<(B::Buf, B::Buf, MoeSaved<B>)> {
        let (b, p, i) = (cx.backend, cx.params, self.block);
        let (h, norm) = b.rms_norm(&stream, &p[self.ids.norm], self.norm_eps)?;
        cx.see(|| format!("layers.{i}.post_attention_layernorm.out"), &h);
        let (routing, state, route) = b.route(
            cx.rows,
            &h,
            prev.as_ref(),
            self.router_params(p),
            &p[self.ids.balancing_biases],
            self.router_norm_eps,
            cx.pinned.map(|routes| &routes[i]),
        )?;
        if let Some(probe) = cx.probe {
            probe.routing(i, &routing, &route, &state);
        }
        let (branch, experts) = b.expert_ffn(&h, &routing, p.range(self.ids.experts, 2 * self.num_experts), self.skip)?;
        cx.see(|| format!("layers.{i}.moe.out"), &branch);
        let out = self.ids.merge.forward(cx, &branch, &stream)?;
        cx.see(|| format!("layers.{i}.stream_out.out"), &out);
        Ok((out, state, MoeSaved { stream, norm, h, prev, routing, route, experts, branch }))
    }

    /// Gradients of the stream and of the state before.
    pub fn backward<B: Backend>(
        &self,
        cx: &Cx<B>,
        grads: &mut ParamStore<B>,
        saved: MoeSaved<B>,
        dy: B::Buf,
        d_state: Option<B::Buf>,
    ) -> Result<(B::Buf, Option<B::Buf>)> {
        let (b, p) = (cx.backend, cx.params);
        let (d_branch, mut d_stream) = self.ids.merge.backward(cx, grads, &saved.branch, &saved.stream, &dy)?;
        let n = 2 * self.num_experts;
        let (mut dh, d_prob) = b.expert_ffn_backward(
            &saved.h,
            &saved.routing,
            p.range(self.ids.experts, n),
            self.skip,
            &saved.experts,
            &d_branch,
            grads.range_mut(self.ids.experts, n),
        )?;
        let (dh_router, d_prev) = b.route_backward(
            &saved.h,
            saved.prev.as_ref(),
            self.router_params(p),
            &saved.routing,
            &saved.route,
            &d_prob,
            d_state.as_ref(),
            self.router_grads(grads),
        )?;
        b.add_assign(&mut dh, &dh_router)?;
        let d_norm = b.rms_norm_backward(&saved.stream, &p[self.ids.norm], &saved.norm, &dh, &mut grads[self.ids.norm])?;
        b.add_assign(&mut d_stream, &d_norm)?;
        Ok((d_stream, d_prev))
    }
}
