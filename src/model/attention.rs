//! The attention sub-layer of a block: norm, compressed convolutional attention (spec 1.4), residual merge.

use anyhow::Result;

use super::config::{AttentionKind, ModelConfig};
use super::cx::Cx;
use super::params::AttentionIds;
use super::store::ParamStore;
use crate::tensor::backend::{AttentionShape, Backend, CcaIn, CcaParams, CcaShape, Halo, Qkv};

pub struct AttentionLayer {
    block: usize,
    ids: AttentionIds,
    norm_eps: f64,
    cca: CcaShape,
    attention: AttentionShape,
}

/// What the backward needs.
pub struct AttentionSaved<B: Backend> {
    stream: B::Buf,
    norm: B::NormSaved,
    h: B::Buf,
    x: CcaIn<B::Buf>,
    cca: B::CcaSaved,
    qkv: Qkv<B::Buf>,
    attention: B::AttentionSaved,
    heads: B::Buf,
    branch: B::Buf,
}

/// Decoding state of one layer: CCA's short history, and keys and values after RoPE.
pub struct AttentionCache<B: Backend> {
    halo: Halo<B::Buf>,
    k: B::Buf,
    v: B::Buf,
}

impl AttentionLayer {
    pub fn new(cfg: &ModelConfig, block: usize, ids: AttentionIds) -> Self {
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
        Self { block, ids, norm_eps: cfg.norm_eps, cca, attention }
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

    /// The normed stream and its four projections.
    #[allow(clippy::type_complexity)]
    fn project<B: Backend>(&self, cx: &Cx<B>, stream: &B::Buf) -> Result<(B::Buf, B::NormSaved, CcaIn<B::Buf>)> {
        let (b, p) = (cx.backend, cx.params);
        let (h, norm) = b.rms_norm(stream, &p[self.ids.norm], self.norm_eps)?;
        cx.see(|| format!("layers.{}.input_layernorm.out", self.block), &h);
        let h = b.mask_rows(cx.rows, h)?;
        let x = CcaIn {
            q: b.linear(&h, &p[self.ids.q])?,
            k: b.linear(&h, &p[self.ids.k])?,
            v_current: b.linear(&h, &p[self.ids.v_current])?,
            v_delayed: b.linear(&h, &p[self.ids.v_delayed])?,
        };
        Ok((h, norm, x))
    }

    /// Output projection and merge: the new stream and the branch that went into it.
    fn finish<B: Backend>(&self, cx: &Cx<B>, heads: &B::Buf, stream: &B::Buf) -> Result<(B::Buf, B::Buf)> {
        let branch = cx.backend.linear(heads, &cx.params[self.ids.o])?;
        cx.see(|| format!("layers.{}.attn.out", self.block), &branch);
        let out = self.ids.merge.forward(cx, &branch, stream)?;
        cx.see(|| format!("layers.{}.stream_after_attn.out", self.block), &out);
        Ok((out, branch))
    }

    /// stream `[T, D]` -> stream `[T, D]`
    pub fn forward<B: Backend>(&self, cx: &Cx<B>, stream: B::Buf) -> Result<(B::Buf, AttentionSaved<B>)> {
        let b = cx.backend;
        let (h, norm, x) = self.project(cx, &stream)?;
        if let Some(probe) = cx.probe {
            probe.cca_inputs(self.block, &x);
        }
        let (qkv, cca) = b.cca_mix(cx.rows, self.cca, x.as_ref(), self.cca_params(cx.params), None)?;
        let (heads, attention) = b.causal_attention(cx.rows, self.attention, qkv.as_ref())?;
        let (out, branch) = self.finish(cx, &heads, &stream)?;
        Ok((out, AttentionSaved { stream, norm, h, x, cca, qkv, attention, heads, branch }))
    }

    pub fn backward<B: Backend>(
        &self,
        cx: &Cx<B>,
        grads: &mut ParamStore<B>,
        saved: AttentionSaved<B>,
        dy: B::Buf,
    ) -> Result<B::Buf> {
        let (b, p) = (cx.backend, cx.params);
        let (d_branch, mut d_stream) = self.ids.merge.backward(cx, grads, &saved.branch, &saved.stream, &dy)?;
        let d_heads = b.linear_backward(&saved.heads, &p[self.ids.o], &d_branch, &mut grads[self.ids.o])?;
        let d_qkv =
            b.causal_attention_backward(cx.rows, self.attention, saved.qkv.as_ref(), &saved.heads, &saved.attention, &d_heads)?;
        let [conv0_weight, conv0_bias, conv1_weight, conv1_bias, temp] = grads.many_mut([
            self.ids.conv0_weight,
            self.ids.conv0_bias,
            self.ids.conv1_weight,
            self.ids.conv1_bias,
            self.ids.temp,
        ]);
        let g = CcaParams { conv0_weight, conv0_bias, conv1_weight, conv1_bias, temp };
        let dx = b.cca_mix_backward(cx.rows, self.cca, saved.x.as_ref(), self.cca_params(p), &saved.cca, d_qkv.as_ref(), g)?;
        let mut dh = b.linear_backward(&saved.h, &p[self.ids.q], &dx.q, &mut grads[self.ids.q])?;
        for (id, d) in [(self.ids.k, &dx.k), (self.ids.v_current, &dx.v_current), (self.ids.v_delayed, &dx.v_delayed)] {
            b.add_assign(&mut dh, &b.linear_backward(&saved.h, &p[id], d, &mut grads[id])?)?;
        }
        let dh = b.mask_rows(cx.rows, dh)?;
        let d_norm = b.rms_norm_backward(&saved.stream, &p[self.ids.norm], &saved.norm, &dh, &mut grads[self.ids.norm])?;
        b.add_assign(&mut d_stream, &d_norm)?;
        Ok(d_stream)
    }

    /// As `forward`, continuing `cache` and extending it by the new rows. `batch` sequences.
    pub fn decode<B: Backend>(
        &self,
        cx: &Cx<B>,
        batch: usize,
        stream: B::Buf,
        cache: &mut Option<AttentionCache<B>>,
    ) -> Result<B::Buf> {
        let b = cx.backend;
        let (_, _, x) = self.project(cx, &stream)?;
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
        Ok(self.finish(cx, &heads, &stream)?.0)
    }

    fn empty_cache<B: Backend>(&self, b: &B, batch: usize) -> Result<AttentionCache<B>> {
        let (q_dim, kv_dim) = (self.cca.num_query_heads * self.cca.head_dim, self.cca.num_kv_heads * self.cca.head_dim);
        let halo = Halo { q: b.zeros(batch * 2, q_dim)?, k: b.zeros(batch * 2, kv_dim)?, v_delayed: b.zeros(batch, kv_dim / 2)? };
        Ok(AttentionCache { halo, k: b.zeros(0, kv_dim)?, v: b.zeros(0, kv_dim)? })
    }
}
