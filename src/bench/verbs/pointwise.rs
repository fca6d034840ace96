//! Verbs that memory limits: embedding, affine map, norm, residual merge.

use anyhow::Result;

use super::super::synthetic::{matrix, weights};
use super::{Lines, Pass};
use crate::tensor::Backend;
use crate::tensor::backend::Merge;
use crate::tensor::work;

pub(super) fn embedding<B: Backend>(b: &B, lines: &mut Lines) -> Result<()> {
    let (m, t, calls) = (lines.model, lines.batch.tokens(), lines.micro_batches);
    let d = m.hidden_size;
    let rows = b.rows(&lines.batch)?;
    let (table, mut d_table, dy) = (weights(b, 1, m.vocab_size, d)?, b.zeros(m.vocab_size, d)?, matrix(b, 2, t, d)?);
    lines.verb("embed", Pass::Forward, calls, work::embed(t, d), || b.embed(&rows, &table).map(drop))?;
    lines.verb("embed", Pass::Backward, calls, work::embed_backward(t, d), || {
        b.embed_backward(&rows, &dy, m.pad_token_id, &mut d_table)
    })
}

pub(super) fn scales<B: Backend>(b: &B, lines: &mut Lines) -> Result<()> {
    let (m, t, micro, blocks) = (lines.model, lines.batch.tokens(), lines.micro_batches, lines.model.num_blocks() as u64);
    let d = m.hidden_size;
    let (x, stream, dy) = (matrix(b, 1, t, d)?, matrix(b, 2, t, d)?, matrix(b, 3, t, d)?);
    let p = [matrix(b, 4, 1, d)?, matrix(b, 5, 1, d)?, matrix(b, 6, 1, d)?, matrix(b, 7, 1, d)?];
    let mut g = [b.zeros(1, d)?, b.zeros(1, d)?, b.zeros(1, d)?, b.zeros(1, d)?];

    lines.verb("affine", Pass::Forward, micro, work::affine(t, d), || b.affine(&x, &p[0], &p[1]).map(drop))?;
    lines.verb("affine", Pass::Backward, micro, work::affine_backward(t, d), || {
        let [d_scale, d_bias, ..] = &mut g;
        b.affine_backward(&x, &p[0], &p[1], &dy, d_scale, d_bias).map(drop)
    })?;

    // Two in a block, and the last one before the head.
    let calls = micro * (2 * blocks + 1);
    let (_, saved) = b.rms_norm(&x, &p[0], m.norm_eps)?;
    lines.verb("rms_norm", Pass::Forward, calls, work::rms_norm(t, d), || b.rms_norm(&x, &p[0], m.norm_eps).map(drop))?;
    lines.verb("rms_norm", Pass::Backward, calls, work::rms_norm_backward(t, d), || {
        b.rms_norm_backward(&x, &p[0], &saved, &dy, &mut g[0]).map(drop)
    })?;

    let calls = micro * 2 * blocks;
    let [branch_scale, branch_bias, stream_scale, stream_bias] = &p;
    let merge = Merge { branch_scale, branch_bias, stream_scale, stream_bias };
    lines.verb("residual_scale", Pass::Forward, calls, work::residual_scale(t, d), || {
        b.residual_scale(&x, &stream, merge).map(drop)
    })?;
    lines.verb("residual_scale", Pass::Backward, calls, work::residual_scale_backward(t, d), || {
        let [branch_scale, branch_bias, stream_scale, stream_bias] = &mut g;
        let gradients = Merge { branch_scale, branch_bias, stream_scale, stream_bias };
        b.residual_scale_backward(&x, &stream, merge, &dy, gradients).map(drop)
    })
}
