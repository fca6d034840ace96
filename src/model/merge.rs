//! Residual merge with learned scales and biases (spec 1.5): `(branch + b) * s + (stream + b') * s'`, always followed by the norm
//! of the sub-layer that comes next. What passes from sub-layer to sub-layer is the stream with that norm.

use anyhow::Result;

use super::cx::Cx;
use super::params::MergeIds;
use super::params::ParamId;
use super::store::ParamStore;
use crate::tensor::backend::{Backend, Merge, ResidualNorm};

/// An RMSNorm: its weight and epsilon.
#[derive(Debug, Clone, Copy)]
pub struct Norm {
    pub weight: ParamId,
    pub eps: f64,
}

/// The residual stream `[T, D]`, and its norm for the sub-layer that reads it.
pub struct Normed<B: Backend> {
    pub stream: B::Buf,
    pub h: B::Buf,
    pub norm: B::NormSaved,
}

impl<B: Backend> Normed<B> {
    /// Of a stream that no merge made.
    pub fn new(cx: &Cx<B>, stream: B::Buf, norm: Norm) -> Result<Self> {
        let (h, saved) = cx.backend.rms_norm(&stream, &cx.params[norm.weight], norm.eps)?;
        Ok(Self { stream, h, norm: saved })
    }
}

/// What is kept of a `Normed` for the backward: the norm's output is cheaper made again than kept.
pub struct Entry<B: Backend> {
    pub stream: B::Buf,
    pub norm: B::NormSaved,
}

impl<B: Backend> Entry<B> {
    /// The norm's output once more, the same bits.
    pub fn normed(&self, cx: &Cx<B>, norm: Norm) -> Result<B::Buf> {
        Ok(cx.backend.rms_norm(&self.stream, &cx.params[norm.weight], norm.eps)?.0)
    }
}

impl<B: Backend> From<Normed<B>> for Entry<B> {
    fn from(x: Normed<B>) -> Self {
        Self { stream: x.stream, norm: x.norm }
    }
}

/// Gradients of a `Normed`: of the norm's output, and of the stream beside it (None = nobody else read it).
pub struct NormedGrad<B: Backend> {
    pub dh: B::Buf,
    pub d_stream: Option<B::Buf>,
}

impl MergeIds {
    fn of<'a, B: Backend>(&self, p: &'a ParamStore<B>) -> Merge<&'a B::Buf> {
        Merge {
            branch_scale: &p[self.branch_scale],
            branch_bias: &p[self.branch_bias],
            stream_scale: &p[self.stream_scale],
            stream_bias: &p[self.stream_bias],
        }
    }

    /// branch, stream `[T, D]` -> the merged stream with its norm by `next`.
    pub fn forward<B: Backend>(&self, cx: &Cx<B>, branch: &B::Buf, stream: &B::Buf, next: Norm) -> Result<Normed<B>> {
        let p = self.of(cx.params);
        let (stream, h, norm) = cx.backend.residual_norm(branch, stream, p, &cx.params[next.weight], next.eps)?;
        Ok(Normed { stream, h, norm })
    }

    /// Gradients of branch and stream. `merged`: what `forward` returned.
    #[allow(clippy::too_many_arguments)]
    pub fn backward<B: Backend>(
        &self,
        cx: &Cx<B>,
        grads: &mut ParamStore<B>,
        branch: &B::Buf,
        stream: &B::Buf,
        merged: &Entry<B>,
        next: Norm,
        d: NormedGrad<B>,
    ) -> Result<(B::Buf, B::Buf)> {
        let [branch_scale, branch_bias, stream_scale, stream_bias, d_norm] =
            grads.many_mut([self.branch_scale, self.branch_bias, self.stream_scale, self.stream_bias, next.weight]);
        let g = Merge { branch_scale, branch_bias, stream_scale, stream_bias };
        let norm = &cx.params[next.weight];
        let x = ResidualNorm { branch, stream, p: self.of(cx.params), y: &merged.stream, norm, saved: &merged.norm };
        cx.backend.residual_norm_backward(x, &d.dh, d.d_stream.as_ref(), g, d_norm)
    }
}
