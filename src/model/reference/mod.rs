//! The whole ZAYA model, written plainly on candle with autograd.
//!
//! This is the most readable statement of the mathematics, the engine of `--backend candle`, and the judge of every
//! backward that is written by hand elsewhere. It runs in f32 and f64 on any candle device and keeps everything in memory:
//! whole attention matrices, whole logits. Shapes: B sequences, S tokens each, T = B * S, D the stream's width.

pub mod attention;
pub mod cca;
pub mod moe;
pub mod ops;
pub mod sequence;

use anyhow::{Context, Result};
use candle_core::{DType, Device, Tensor, Var};

use self::attention::causal_attention;
use self::cca::{CcaMix, cca_mix};
use self::moe::{Route, expert_ffn, route};

use self::ops::{affine, cross_entropy, embed, linear, residual_scale, rms_norm};
use self::sequence::Sequences;
use super::config::{AttentionKind, ModelConfig, SkipMode};
use super::params::{AttentionIds, MergeIds, MoeIds, ParamId, ParamTable};
use crate::error::bad_input;
pub use crate::tensor::backend::Precision;
use crate::tensor::backend::{AttentionShape, Batch, CcaIn, CcaParams, CcaShape, Loss, Merge, PinnedRoutes, Qkv, RouterParams};

/// Sees every intermediate tensor with its name (`layers.0.cca.q`, ...), in the shapes of Hugging Face's modules.
pub type Probe<'a> = &'a mut dyn FnMut(&str, &Tensor);

/// A model: one candle variable per entry of the parameter table.
pub struct Reference {
    config: ModelConfig,
    table: ParamTable,
    params: Vec<Var>,
    dtype: DType,
    device: Device,
    precision: Precision,
}

/// What one forward pass gives.
pub struct Output {
    /// `[B, S, V]`
    pub logits: Tensor,
    /// Sum of cross-entropies over the labelled rows, a scalar; None when the batch has no labels.
    pub loss_sum: Option<Tensor>,
    /// Labelled rows.
    pub loss_count: u64,
    /// Per block, the class of each row.
    pub choices: Vec<Vec<u32>>,
    /// Per block, real (not padding) rows of each class.
    pub class_counts: Vec<Vec<u64>>,
}

impl Output {
    /// The loss as plain numbers; zeros when nothing was labelled.
    pub fn loss(&self) -> Result<Loss> {
        let sum = self.loss_sum.as_ref().map_or(Ok(0.0), |sum| sum.to_dtype(DType::F64)?.to_scalar::<f64>())?;
        Ok(Loss { sum, count: self.loss_count })
    }
}

/// What one forward and backward pass gives.
pub struct LossAndGrads {
    pub output: Output,
    pub loss: Loss,
    /// Gradient of `grad_scale * loss.sum` for each entry of the table, in its logical shape; zeros where none flows.
    pub grads: Vec<Tensor>,
}

impl Reference {
    /// `values[id]` are the numbers of table entry `id`, row-major. `dtype` is F32 or F64.
    pub fn new(config: ModelConfig, values: &[Vec<f32>], dtype: DType, device: &Device, precision: Precision) -> Result<Self> {
        let table = ParamTable::new(&config);
        if values.len() != table.specs.len() {
            return Err(bad_input(format!("the model has {} parameters, got values for {}", table.specs.len(), values.len())));
        }
        let mut params = Vec::with_capacity(values.len());
        for (spec, values) in table.specs.iter().zip(values) {
            let tensor = Tensor::from_slice(values, spec.shape.as_slice(), device)
                .and_then(|t| Var::from_tensor(&t.to_dtype(dtype)?))
                .with_context(|| format!("setting `{}` of shape {:?} from {} numbers", spec.name, spec.shape, values.len()))?;
            params.push(tensor);
        }
        Ok(Self { config, table, params, dtype, device: device.clone(), precision })
    }

    pub fn config(&self) -> &ModelConfig {
        &self.config
    }
    pub fn table(&self) -> &ParamTable {
        &self.table
    }
    pub fn param(&self, id: ParamId) -> &Tensor {
        self.params[id].as_tensor()
    }

    /// Overwrites one parameter (an optimizer's step).
    pub fn set(&self, id: ParamId, values: &[f32]) -> Result<()> {
        let spec = &self.table.specs[id];
        let tensor = Tensor::from_slice(values, spec.shape.as_slice(), &self.device)
            .with_context(|| format!("setting `{}` of shape {:?} from {} numbers", spec.name, spec.shape, values.len()))?;
        Ok(self.params[id].set(&tensor.to_dtype(self.dtype)?)?)
    }

    /// Without keeping what a backward pass would need. `pinned`: routes of each block in place of the router's choices.
    pub fn forward(&self, batch: &Batch, pinned: Option<&[PinnedRoutes]>, probe: Probe<'_>) -> Result<Output> {
        let params: Vec<Tensor> = self.params.iter().map(|p| p.as_tensor().detach()).collect();
        self.pass(&params, batch, pinned, probe)
    }

    /// Loss, and the gradients of `grad_scale * loss.sum`.
    pub fn loss_and_grads(
        &self,
        batch: &Batch,
        pinned: Option<&[PinnedRoutes]>,
        grad_scale: f64,
        probe: Probe<'_>,
    ) -> Result<LossAndGrads> {
        let params: Vec<Tensor> = self.params.iter().map(|p| p.as_tensor().clone()).collect();
        let output = self.pass(&params, batch, pinned, probe)?;
        let mut store = match &output.loss_sum {
            Some(sum) => Some((sum * grad_scale)?.backward()?),
            None => None,
        };
        let mut grads = Vec::with_capacity(params.len());
        for param in &params {
            let grad = store.as_mut().and_then(|store| store.remove(param));
            grads.push(grad.map_or_else(|| param.zeros_like(), Ok)?);
        }
        Ok(LossAndGrads { loss: output.loss()?, output, grads })
    }

    fn pass(&self, params: &[Tensor], batch: &Batch, pinned: Option<&[PinnedRoutes]>, probe: Probe<'_>) -> Result<Output> {
        self.check(batch, pinned)?;
        let cfg = &self.config;
        let sequences = Sequences::new(batch, self.dtype, &self.device)?;
        let (b, s, d) = (batch.batch, batch.seq, cfg.hidden_size);
        let mut run = Run { cfg, params, sequences: &sequences, precision: self.precision, probe };

        let embedding = &params[self.table.embed];
        let e = embed(embedding, &batch.ids, cfg.pad_token_id)?.reshape((b, s, d))?;
        (run.probe)("embed.out", &e);
        let mut x = affine(&e, &params[self.table.input_scale], &params[self.table.input_bias])?;
        (run.probe)("stream.in", &x);

        let mut state = None; // [T, R], handed from router to router
        let mut choices = Vec::new();
        let mut class_counts = Vec::new();
        for (i, ids) in self.table.blocks.iter().enumerate() {
            let name = format!("layers.{i}");
            let a = run.attention(&name, cfg.attention[i], &ids.attention, &x)?;
            x = run.merge(&a, &x, &ids.attention.merge)?;
            (run.probe)(&format!("{name}.stream_after_attn.out"), &x);
            let (m, r) = run.moe(&name, &ids.moe, &x, state.as_ref(), pinned.map(|p| &p[i]))?;
            x = run.merge(&m, &x, &ids.moe.merge)?;
            (run.probe)(&format!("{name}.stream_out.out"), &x);
            class_counts.push(count_classes(&r.choice, &sequences.valid, cfg.num_classes()));
            choices.push(r.choice);
            state = Some(r.state);
        }

        let y = rms_norm(&x, &params[self.table.final_norm], cfg.norm_eps)?;
        (run.probe)("final_norm.out", &y);
        let logits = linear(&y, embedding, Precision::F32)?; // the tied head is never rounded
        (run.probe)("logits", &logits);

        let loss_count = batch.num_labels();
        let mut loss_sum = None;
        if !batch.labels.is_empty() {
            let sum = cross_entropy(&logits.reshape((b * s, cfg.vocab_size))?, &batch.labels)?;
            if loss_count > 0 {
                (run.probe)("loss", &(&sum / loss_count as f64)?.reshape(1)?);
            }
            loss_sum = Some(sum);
        }
        Ok(Output { logits, loss_sum, loss_count, choices, class_counts })
    }

    fn check(&self, batch: &Batch, pinned: Option<&[PinnedRoutes]>) -> Result<()> {
        if batch.tokens() == 0 {
            return Err(bad_input("a forward pass needs at least one token, the batch has none"));
        }
        if let Some(id) = batch.ids.iter().find(|id| **id as usize >= self.config.vocab_size) {
            return Err(bad_input(format!(
                "token id {id} does not exist in a vocabulary of {}; was the text tokenized for another model?",
                self.config.vocab_size
            )));
        }
        if pinned.is_some_and(|p| p.len() != self.config.num_blocks()) {
            return Err(bad_input(format!("pinned routes are needed for all {} blocks or none", self.config.num_blocks())));
        }
        Ok(())
    }
}

/// Real rows of each class.
fn count_classes(choice: &[u32], valid: &[bool], classes: usize) -> Vec<u64> {
    let mut counts = vec![0; classes];
    for (class, valid) in choice.iter().zip(valid) {
        counts[*class as usize] += u64::from(*valid);
    }
    counts
}

/// One pass through the blocks.
struct Run<'a> {
    cfg: &'a ModelConfig,
    params: &'a [Tensor],
    sequences: &'a Sequences,
    precision: Precision,
    probe: Probe<'a>,
}

impl Run<'_> {
    fn merge(&self, branch: &Tensor, stream: &Tensor, ids: &MergeIds) -> Result<Tensor> {
        let p = Merge {
            branch_scale: &self.params[ids.branch_scale],
            branch_bias: &self.params[ids.branch_bias],
            stream_scale: &self.params[ids.stream_scale],
            stream_bias: &self.params[ids.stream_bias],
        };
        residual_scale(branch, stream, p)
    }

    /// The attention branch of one block: `x` `[B, S, D]` in, the same shape out.
    fn attention(&mut self, name: &str, kind: AttentionKind, ids: &AttentionIds, x: &Tensor) -> Result<Tensor> {
        let (cfg, p, precision) = (self.cfg, self.params, self.precision);
        let h = rms_norm(x, &p[ids.norm], cfg.norm_eps)?;
        (self.probe)(&format!("{name}.input_layernorm.out"), &h);
        let h = self.sequences.mask_rows(&h)?;
        let (q, k) = (linear(&h, &p[ids.q], precision)?, linear(&h, &p[ids.k], precision)?);
        let v_current = linear(&h, &p[ids.v_current], precision)?;
        let v_delayed = linear(&h, &p[ids.v_delayed], precision)?;

        let (heads, kv_heads, d) = (cfg.num_query_heads, cfg.num_kv_heads, cfg.head_dim);
        let mix = cca_mix(
            self.sequences,
            CcaShape {
                num_query_heads: heads,
                num_kv_heads: kv_heads,
                head_dim: d,
                rotary_dim: cfg.rotary_dim(kind),
                rope_theta: cfg.rope_of(kind).theta,
            },
            CcaIn { q: &q, k: &k, v_current: &v_current, v_delayed: &v_delayed },
            CcaParams {
                conv0_weight: &p[ids.conv0_weight],
                conv0_bias: &p[ids.conv0_bias],
                conv1_weight: &p[ids.conv1_weight],
                conv1_bias: &p[ids.conv1_bias],
                temp: &p[ids.temp],
            },
            precision,
        )?;
        self.show_mix(name, &mix)?;
        let window = if kind == AttentionKind::Sliding { cfg.sliding_window } else { None };
        let (out, weights) = causal_attention(
            self.sequences,
            AttentionShape { num_query_heads: heads, num_kv_heads: kv_heads, head_dim: d, window },
            Qkv { q: &mix.q_rotated, k: &mix.k_rotated, v: &mix.v },
        )?;
        (self.probe)(&format!("{name}.attn.weights"), &weights);
        let out = linear(&out, &p[ids.o], precision)?;
        (self.probe)(&format!("{name}.attn.out"), &out);
        Ok(out)
    }

    fn show_mix(&mut self, name: &str, mix: &CcaMix) -> Result<()> {
        (self.probe)(&format!("{name}.cca.conv0.out"), &mix.conv0.transpose(1, 2)?.contiguous()?);
        (self.probe)(&format!("{name}.cca.conv1.out"), &mix.conv1.transpose(1, 2)?.contiguous()?);
        let stages =
            [("cca.q", &mix.q), ("cca.k", &mix.k), ("cca.v", &mix.v), ("qk_norm.q", &mix.q_norm), ("qk_norm.k", &mix.k_norm)];
        for (stage, tensor) in stages {
            (self.probe)(&format!("{name}.{stage}"), tensor);
        }
        Ok(())
    }

    /// The MoE branch of one block: `x` `[B, S, D]` in, the same shape and the routing out.
    fn moe(
        &mut self,
        name: &str,
        ids: &MoeIds,
        x: &Tensor,
        prev: Option<&Tensor>,
        pinned: Option<&PinnedRoutes>,
    ) -> Result<(Tensor, Route)> {
        let (cfg, p) = (self.cfg, self.params);
        let h = rms_norm(x, &p[ids.norm], cfg.norm_eps)?;
        (self.probe)(&format!("{name}.post_attention_layernorm.out"), &h);
        let flat = h.reshape(((), cfg.hidden_size))?; // [T, D]
        let router = RouterParams {
            down_weight: &p[ids.router_down_weight],
            down_bias: &p[ids.router_down_bias],
            gamma: ids.router_gamma.map(|id| &p[id]),
            norm: &p[ids.router_norm],
            fc1_weight: &p[ids.router_fc1_weight],
            fc1_bias: &p[ids.router_fc1_bias],
            fc2_weight: &p[ids.router_fc2_weight],
            fc2_bias: &p[ids.router_fc2_bias],
            out: &p[ids.router_out],
        };
        let r = route(&flat, prev, router, &p[ids.balancing_biases], cfg.router_norm_eps, pinned, self.precision)?;
        self.show_route(name, &r)?;
        let experts: Vec<&Tensor> = p[ids.experts..ids.experts + 2 * cfg.num_experts].iter().collect();
        let out = expert_ffn(&flat, &r, &experts, cfg.skip_mode, self.precision)?.reshape(x.shape())?;
        (self.probe)(&format!("{name}.moe.out"), &out);
        Ok((out, r))
    }

    /// Hugging Face's native router reports a skipped token as class 0 with probability 0; `choice` is the true class.
    fn show_route(&mut self, name: &str, r: &Route) -> Result<()> {
        let (b, s) = (self.sequences.batch, self.sequences.seq);
        let skipped = |c: u32| self.cfg.skip_mode == SkipMode::Zero && c as usize == self.cfg.num_experts;
        let kept: Vec<f32> = r.choice.iter().map(|c| f32::from(!skipped(*c))).collect();
        let index: Vec<i64> = r.choice.iter().map(|c| if skipped(*c) { 0 } else { i64::from(*c) }).collect();
        let choice: Vec<i64> = r.choice.iter().map(|c| i64::from(*c)).collect();
        let device = r.prob.device();
        let kept = Tensor::from_vec(kept, (b * s, 1), device)?.to_dtype(r.prob.dtype())?;
        let width = r.state.dim(1)?;
        (self.probe)(&format!("{name}.router.logits"), &r.logits);
        (self.probe)(&format!("{name}.router.prob"), &(&r.prob * kept)?);
        (self.probe)(&format!("{name}.router.index"), &Tensor::from_vec(index, (b * s, 1), device)?);
        (self.probe)(&format!("{name}.router.choice"), &Tensor::from_vec(choice, (b, s), device)?);
        (self.probe)(&format!("{name}.router.state"), &r.state.reshape((b, s, width))?);
        Ok(())
    }
}
