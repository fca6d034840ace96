//! Residual merge with learned scales and biases (spec 1.5): `(branch + b) * s + (stream + b') * s'`.

use anyhow::Result;

use super::cx::Cx;
use super::params::MergeIds;
use super::store::ParamStore;
use crate::tensor::backend::{Backend, Merge};

impl MergeIds {
    fn of<'a, B: Backend>(&self, p: &'a ParamStore<B>) -> Merge<&'a B::Buf> {
        Merge {
            branch_scale: &p[self.branch_scale],
            branch_bias: &p[self.branch_bias],
            stream_scale: &p[self.stream_scale],
            stream_bias: &p[self.stream_bias],
        }
    }

    /// branch, stream `[T, D]` -> stream `[T, D]`
    pub fn forward<B: Backend>(&self, cx: &Cx<B>, branch: &B::Buf, stream: &B::Buf) -> Result<B::Buf> {
        cx.backend.residual_scale(branch, stream, self.of(cx.params))
    }

    /// Gradients of branch and stream.
    pub fn backward<B: Backend>(
        &self,
        cx: &Cx<B>,
        grads: &mut ParamStore<B>,
        branch: &B::Buf,
        stream: &B::Buf,
        dy: &B::Buf,
    ) -> Result<(B::Buf, B::Buf)> {
        let [branch_scale, branch_bias, stream_scale, stream_bias] =
            grads.many_mut([self.branch_scale, self.branch_bias, self.stream_scale, self.stream_bias]);
        let g = Merge { branch_scale, branch_bias, stream_scale, stream_bias };
        cx.backend.residual_scale_backward(branch, stream, self.of(cx.params), dy, g)
    }
}
