//! Verbs of the layers: CCA's mixing, attention, router, experts, head.

use anyhow::Result;

use super::super::synthetic::{even_routes, matrix, weights};
use super::{Lines, Pass};
use crate::model::config::AttentionKind;
use crate::tensor::Backend;
use crate::tensor::backend::{AttentionShape, CcaIn, CcaParams, CcaShape, Qkv, RouterParams};
use crate::tensor::work;

pub(super) fn attention<B: Backend>(b: &B, lines: &mut Lines) -> Result<()> {
    let (m, t) = (lines.model, lines.batch.tokens());
    let (q, kv, c, d) = (m.q_dim(), m.kv_dim(), m.conv_dim(), m.head_dim);
    let rows = b.rows(&lines.batch)?;
    let x = CcaIn {
        q: matrix(b, 1, t, q)?,
        k: matrix(b, 2, t, kv)?,
        v_current: matrix(b, 3, t, kv / 2)?,
        v_delayed: matrix(b, 4, t, kv / 2)?,
    };
    let params = CcaParams {
        conv0_weight: weights(b, 5, c, 2)?,
        conv0_bias: weights(b, 6, 1, c)?,
        conv1_weight: weights(b, 7, c, d * 2)?,
        conv1_bias: weights(b, 8, 1, c)?,
        temp: weights(b, 9, 1, m.num_kv_heads)?,
    };
    let p = CcaParams {
        conv0_weight: &params.conv0_weight,
        conv0_bias: &params.conv0_bias,
        conv1_weight: &params.conv1_weight,
        conv1_bias: &params.conv1_bias,
        temp: &params.temp,
    };
    let mut g = CcaParams {
        conv0_weight: b.zeros(c, 2)?,
        conv0_bias: b.zeros(1, c)?,
        conv1_weight: b.zeros(c, d * 2)?,
        conv1_bias: b.zeros(1, c)?,
        temp: b.zeros(1, m.num_kv_heads)?,
    };
    let d_qkv = Qkv { q: matrix(b, 10, t, q)?, k: matrix(b, 11, t, kv)?, v: matrix(b, 12, t, kv)? };
    let d_heads = matrix(b, 13, t, q)?;

    for (kind, name) in [(AttentionKind::Full, "full"), (AttentionKind::Sliding, "sliding")] {
        let blocks = m.attention.iter().filter(|k| **k == kind).count() as u64;
        if blocks == 0 {
            continue;
        }
        let calls = lines.micro_batches * blocks;
        let (num_query_heads, num_kv_heads, head_dim) = (m.num_query_heads, m.num_kv_heads, m.head_dim);
        let rope = m.rope_of(kind);
        let shape = CcaShape { num_query_heads, num_kv_heads, head_dim, rotary_dim: m.rotary_dim(kind), rope_theta: rope.theta };
        let (qkv, saved) = b.cca_mix(&rows, shape, x.as_ref(), p, None)?;
        let cca = format!("cca_mix ({name})");
        lines.verb(&cca, Pass::Forward, calls, work::cca_mix(t, &shape), || {
            b.cca_mix(&rows, shape, x.as_ref(), p, None).map(drop)
        })?;
        lines.verb(&cca, Pass::Backward, calls, work::cca_mix_backward(t, &shape), || {
            let g = CcaParams {
                conv0_weight: &mut g.conv0_weight,
                conv0_bias: &mut g.conv0_bias,
                conv1_weight: &mut g.conv1_weight,
                conv1_bias: &mut g.conv1_bias,
                temp: &mut g.temp,
            };
            b.cca_mix_backward(&rows, shape, x.as_ref(), p, None, &saved, d_qkv.as_ref(), g).map(drop)
        })?;

        let window = if kind == AttentionKind::Sliding { m.sliding_window } else { None };
        let shape = AttentionShape { num_query_heads, num_kv_heads, head_dim, window };
        let (batch, seq) = (lines.batch.batch, lines.batch.seq);
        let (out, saved) = b.causal_attention(&rows, shape, qkv.as_ref())?;
        let name = format!("causal_attention ({name})");
        lines.verb(&name, Pass::Forward, calls, work::causal_attention(batch, seq, &shape), || {
            b.causal_attention(&rows, shape, qkv.as_ref()).map(drop)
        })?;
        lines.verb(&name, Pass::Backward, calls, work::causal_attention_backward(batch, seq, &shape), || {
            b.causal_attention_backward(&rows, shape, qkv.as_ref(), &out, &saved, &d_heads).map(drop)
        })?;
    }
    Ok(())
}

/// Every expert gets the same number of tokens.
pub(super) fn moe<B: Backend>(b: &B, lines: &mut Lines) -> Result<()> {
    let (m, t, calls) = (lines.model, lines.batch.tokens(), lines.micro_batches * lines.model.num_blocks() as u64);
    let (d, f, r, e, classes) = (m.hidden_size, m.expert_width, m.router_width, m.num_experts, m.num_classes());
    let rows = b.rows(&lines.batch)?;
    let (h, prev, dy, d_prob) = (matrix(b, 1, t, d)?, matrix(b, 2, t, r)?, matrix(b, 3, t, d)?, matrix(b, 4, t, 1)?);
    let d_state = matrix(b, 5, t, r)?;
    let pinned = even_routes(6, t, e);
    // Weights and their gradients: down, fc1, fc2, out; biases and vectors of R: down, gamma, norm, fc1, fc2.
    let w = [weights(b, 7, r, d)?, weights(b, 8, r, r)?, weights(b, 9, r, r)?, weights(b, 10, classes, r)?];
    let v = [matrix(b, 11, 1, r)?, matrix(b, 12, 1, r)?, matrix(b, 13, 1, r)?, matrix(b, 14, 1, r)?, matrix(b, 15, 1, r)?];
    let mut gw = [b.zeros(r, d)?, b.zeros(r, r)?, b.zeros(r, r)?, b.zeros(classes, r)?];
    let mut gv = [b.zeros(1, r)?, b.zeros(1, r)?, b.zeros(1, r)?, b.zeros(1, r)?, b.zeros(1, r)?];
    let biases = b.zeros(1, classes)?;
    let p = RouterParams {
        down_weight: &w[0],
        down_bias: &v[0],
        gamma: Some(&v[1]),
        norm: &v[2],
        fc1_weight: &w[1],
        fc1_bias: &v[3],
        fc2_weight: &w[2],
        fc2_bias: &v[4],
        out: &w[3],
    };
    let route = || b.route(&rows, &h, Some(&prev), p, &biases, m.router_norm_eps, Some(&pinned));
    let (routing, _, saved) = route()?;
    lines.verb("route", Pass::Forward, calls, work::route(t, d, r, classes), || route().map(drop))?;
    let mut dh = b.zeros(t, d)?;
    lines.verb("route", Pass::Backward, calls, work::route_backward(t, d, r, classes), || {
        let ([down_weight, fc1_weight, fc2_weight, out], [down_bias, gamma, norm, fc1_bias, fc2_bias]) = (&mut gw, &mut gv);
        let gamma = Some(gamma);
        let g = RouterParams { down_weight, down_bias, gamma, norm, fc1_weight, fc1_bias, fc2_weight, fc2_bias, out };
        b.route_backward(&h, Some(&prev), p, &routing, &saved, &d_prob, Some(&d_state), g, &mut dh).map(drop)
    })?;

    let shapes = || (0..e).flat_map(|_| [(2 * f, d), (d, f)]);
    let experts = shapes().enumerate().map(|(i, (o, n))| weights(b, 100 + i as u64, o, n)).collect::<Result<Vec<_>>>()?;
    let mut g = shapes().map(|(o, n)| b.zeros(o, n)).collect::<Result<Vec<_>>>()?;
    let (_, saved) = b.expert_ffn(&h, &routing, &experts, m.skip_mode)?;
    lines.verb("expert_ffn", Pass::Forward, calls, work::expert_ffn(t, d, f, e), || {
        b.expert_ffn(&h, &routing, &experts, m.skip_mode).map(drop)
    })?;
    lines.verb("expert_ffn", Pass::Backward, calls, work::expert_ffn_backward(t, d, f, e), || {
        b.expert_ffn_backward(&h, &routing, &experts, m.skip_mode, &saved, &dy, &mut g).map(drop)
    })
}

pub(super) fn head<B: Backend>(b: &B, lines: &mut Lines) -> Result<()> {
    let (m, t, calls) = (lines.model, lines.batch.tokens(), lines.micro_batches);
    let (d, vocab) = (m.hidden_size, m.vocab_size);
    let rows = b.rows(&lines.batch)?;
    let (y, head, mut d_head) = (matrix(b, 1, t, d)?, weights(b, 2, vocab, d)?, b.zeros(vocab, d)?);
    let scale = 1.0 / t as f32;
    // Training calls the second one only; the first is for held-out data.
    lines.verb("cross_entropy", Pass::Forward, 0, work::cross_entropy(t, d, vocab), || {
        b.cross_entropy(&rows, &y, &head).map(drop)
    })?;
    lines.verb("cross_entropy", Pass::ForwardBackward, calls, work::cross_entropy_backward(t, d, vocab), || {
        b.cross_entropy_backward(&rows, &y, &head, scale, &mut d_head).map(drop)
    })
}
