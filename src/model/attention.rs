//! The attention sub-layer of a block: norm, compressed convolutional attention (spec 1.4), residual merge.

use anyhow::Result;

use super::config::{AttentionKind, ModelConfig};
use super::cx::Cx;
use super::merge::{Entry, Norm, Normed, NormedGrad};
use super::params::{AttentionIds, ParamId};
use super::store::ParamStore;
use super::tree::{Moves, TreeLayerCache, TreeStep};
use crate::tensor::backend::{AttentionShape, Backend, CcaIn, CcaParams, CcaShape, Halo, Qkv};

pub struct AttentionLayer {
    block: usize,
    ids: AttentionIds,
    norm: Norm,
    /// Of the block's MoE sub-layer.
    next: Norm,
    cca: CcaShape,
    attention: AttentionShape,
}

/// What the backward needs.
pub struct AttentionSaved<B: Backend> {
    input: Entry<B>,
    x: CcaIn<B::Buf>,
    /// From the chunks before, in context parallelism.
    halo: Option<Halo<B::Buf>>,
    cca: B::CcaSaved,
    qkv: Qkv<B::Buf>,
    attention: B::AttentionSaved,
    heads: B::Buf,
    branch: B::Buf,
}

impl<B: Backend> AttentionSaved<B> {
    /// The stream that `forward` got, alone.
    pub fn into_input(self) -> B::Buf {
        self.input.stream
    }
}

/// Decoding state of one layer: CCA's short history, and keys and values after RoPE.
pub struct AttentionCache<B: Backend> {
    halo: Halo<B::Buf>,
    k: B::Buf,
    v: B::Buf,
}

impl AttentionLayer {
    pub fn new(cfg: &ModelConfig, block: usize, ids: AttentionIds, next: Norm) -> Self {
        let kind = cfg.attention[block];
        let (num_query_heads, num_kv_heads, head_dim) = (cfg.num_query_heads, cfg.num_kv_heads, cfg.head_dim);
        let cca = CcaShape {
            num_query_heads,
            num_kv_heads,
            head_dim,
            rotary_dim: cfg.rotary_dim(kind),
            rope_theta: cfg.rope_of(kind).theta,
        };
        let window = if kind == AttentionKind::Sliding { cfg.sliding_window } else { None };
        let attention = AttentionShape { num_query_heads, num_kv_heads, head_dim, window };
        let norm = Norm { weight: ids.norm, eps: cfg.norm_eps };
        Self { block, ids, norm, next, cca, attention }
    }

    fn cca_params<'a, B: Backend>(&self, p: &'a ParamStore<B>) -> CcaParams<&'a B::Buf> {
        CcaParams {
            conv0_weight: &p[self.ids.conv0_weight],
            conv0_bias: &p[self.ids.conv0_bias],
            conv1_weight: &p[self.ids.conv1_weight],
            conv1_bias: &p[self.ids.conv1_bias],
            temp: &p[self.ids.temp],
        }
    }

    /// The four projections of the normed stream, whose padding rows become 0.
    fn project<B: Backend>(&self, cx: &Cx<B>, mut input: Normed<B>) -> Result<(Normed<B>, CcaIn<B::Buf>)> {
        let (b, p) = (cx.backend, cx.params);
        cx.see(|| format!("layers.{}.input_layernorm.out", self.block), &input.h);
        input.h = b.mask_rows(cx.rows, input.h)?;
        let [q, k, v_current, v_delayed] = b.project(&input.h, self.projections().map(|id| &p[id]))?;
        Ok((input, CcaIn { q, k, v_current, v_delayed }))
    }

    fn projections(&self) -> [ParamId; 4] {
        [self.ids.q, self.ids.k, self.ids.v_current, self.ids.v_delayed]
    }

    /// Output projection and merge: the new stream, and the branch that went into it.
    fn finish<B: Backend>(&self, cx: &Cx<B>, heads: &B::Buf, stream: &B::Buf) -> Result<(Normed<B>, B::Buf)> {
        let branch = cx.backend.linear(heads, &cx.params[self.ids.o])?;
        cx.see(|| format!("layers.{}.attn.out", self.block), &branch);
        let out = self.ids.merge.forward(cx, &branch, stream, self.next)?;
        cx.see(|| format!("layers.{}.stream_after_attn.out", self.block), &out.stream);
        Ok((out, branch))
    }

    pub fn forward<B: Backend>(&self, cx: &Cx<B>, input: Normed<B>) -> Result<(Normed<B>, AttentionSaved<B>)> {
        let b = cx.backend;
        let (input, x) = self.project(cx, input)?;
        if let Some(probe) = cx.probe {
            probe.cca_inputs(self.block, &x);
        }
        let halo = cx.peers.context.map(|peers| peers.halo(b, cx.rows, x.as_ref())).transpose()?;
        let around = halo.as_ref().map(Halo::as_ref);
        let (mut qkv, cca) = b.cca_mix(cx.rows, self.cca, x.as_ref(), self.cca_params(cx.params), around)?;
        if let Some(peers) = cx.peers.context {
            (qkv.k, qkv.v) = peers.gather(b, cx.rows, &qkv.k, &qkv.v)?;
        }
        let (heads, attention) = b.causal_attention(cx.rows, self.attention, qkv.as_ref())?;
        let input = Entry::from(input);
        let (out, branch) = self.finish(cx, &heads, &input.stream)?;
        Ok((out, AttentionSaved { input, x, halo, cca, qkv, attention, heads, branch }))
    }

    /// `out`: the stream that `forward` returned, `d` its gradients. Returns the same of the input.
    pub fn backward<B: Backend>(
        &self,
        cx: &Cx<B>,
        grads: &mut ParamStore<B>,
        saved: AttentionSaved<B>,
        out: &Entry<B>,
        d: NormedGrad<B>,
    ) -> Result<(Entry<B>, NormedGrad<B>)> {
        let (b, p) = (cx.backend, cx.params);
        let AttentionSaved { input, x, halo, cca, qkv, attention, heads, branch } = saved;
        let (d_branch, d_stream) = self.ids.merge.backward(cx, grads, &branch, &input.stream, out, self.next, d)?;
        drop(branch);
        let d_heads = b.linear_backward(&heads, &p[self.ids.o], &d_branch, &mut grads[self.ids.o])?;
        drop(d_branch);
        let mut d_qkv = b.causal_attention_backward(cx.rows, self.attention, qkv.as_ref(), &heads, &attention, &d_heads)?;
        drop((heads, attention, qkv, d_heads));
        if let Some(peers) = cx.peers.context {
            (d_qkv.k, d_qkv.v) = peers.scatter(b, cx.rows, d_qkv.k, d_qkv.v)?;
        }
        let [conv0_weight, conv0_bias, conv1_weight, conv1_bias, temp] = grads.many_mut([
            self.ids.conv0_weight,
            self.ids.conv0_bias,
            self.ids.conv1_weight,
            self.ids.conv1_bias,
            self.ids.temp,
        ]);
        let g = CcaParams { conv0_weight, conv0_bias, conv1_weight, conv1_bias, temp };
        let around = halo.as_ref().map(Halo::as_ref);
        let (mut dx, d_halo) =
            b.cca_mix_backward(cx.rows, self.cca, x.as_ref(), self.cca_params(p), around, &cca, d_qkv.as_ref(), g)?;
        drop((x, halo, cca, d_qkv));
        if let (Some(peers), Some(d_halo)) = (cx.peers.context, d_halo) {
            peers.return_halo(b, cx.rows, d_halo, &mut dx)?;
        }
        let dy = [&dx.q, &dx.k, &dx.v_current, &dx.v_delayed];
        let weights = self.projections();
        let h = b.mask_rows(cx.rows, input.normed(cx, self.norm)?)?;
        let dh = b.project_backward(&h, weights.map(|id| &p[id]), dy, grads.many_mut(weights))?;
        let dh = b.mask_rows(cx.rows, dh)?;
        Ok((input, NormedGrad { dh, d_stream: Some(d_stream) }))
    }

    /// As `forward`, continuing `cache` and extending it by the new rows. `batch` sequences.
    pub fn decode<B: Backend>(
        &self,
        cx: &Cx<B>,
        batch: usize,
        input: Normed<B>,
        cache: &mut Option<AttentionCache<B>>,
    ) -> Result<Normed<B>> {
        let b = cx.backend;
        let (input, x) = self.project(cx, input)?;
        let old = match cache.take() {
            Some(old) => old,
            None => self.empty_cache(b, batch)?,
        };
        let (new, _) = b.cca_mix(cx.rows, self.cca, x.as_ref(), self.cca_params(cx.params), Some(old.halo.as_ref()))?;
        let k = b.concat_rows(batch, &old.k, &new.k)?;
        let v = b.concat_rows(batch, &old.v, &new.v)?;
        let (heads, _) = b.causal_attention(cx.rows, self.attention, Qkv { q: &new.q, k: &k, v: &v })?;
        let tail = |before: &B::Buf, x: &B::Buf, n| b.last_rows(batch, &b.concat_rows(batch, before, x)?, n);
        let halo = Halo {
            q: tail(&old.halo.q, &x.q, 2)?,
            k: tail(&old.halo.k, &x.k, 2)?,
            v_delayed: tail(&old.halo.v_delayed, &x.v_delayed, 1)?,
        };
        *cache = Some(AttentionCache { halo, k, v });
        Ok(self.finish(cx, &heads, &input.stream)?.0)
    }

    /// As `decode`, of sequences that share beginnings; their past lies in the pools of `cache`.
    pub(super) fn decode_tree<B: Backend>(
        &self,
        cx: &Cx<B>,
        step: &TreeStep,
        moves: &Moves,
        input: Normed<B>,
        cache: &mut TreeLayerCache<B>,
    ) -> Result<Normed<B>> {
        let b = cx.backend;
        let (input, x) = self.project(cx, input)?;
        let params = self.cca_params(cx.params);
        let new = b.cca_mix_tree(&step.tree, self.cca, x.as_ref(), params, cache.states.as_ref())?;
        moves.two(b, &x.q, &mut cache.states.q)?;
        moves.two(b, &x.k, &mut cache.states.k)?;
        moves.one(b, &x.v_delayed, &mut cache.states.v_delayed)?;
        b.scatter_rows(&new.k, &step.keys_to, &mut cache.k)?;
        b.scatter_rows(&new.v, &step.keys_to, &mut cache.v)?;
        let heads = b.tree_attention(&step.tree, self.attention, Qkv { q: &new.q, k: &cache.k, v: &cache.v })?;
        Ok(self.finish(cx, &heads, &input.stream)?.0)
    }

    fn empty_cache<B: Backend>(&self, b: &B, batch: usize) -> Result<AttentionCache<B>> {
        let (q_dim, kv_dim) = (self.cca.num_query_heads * self.cca.head_dim, self.cca.num_kv_heads * self.cca.head_dim);
        let halo = Halo { q: b.zeros(batch * 2, q_dim)?, k: b.zeros(batch * 2, kv_dim)?, v_delayed: b.zeros(batch, kv_dim / 2)? };
        Ok(AttentionCache { halo, k: b.zeros(0, kv_dim)?, v: b.zeros(0, kv_dim)? })
    }
}
