//! A probe that keeps what it sees, in the shapes of Hugging Face's modules, and recomputes what fused verbs hide.

use std::cell::RefCell;

use anyhow::Result;
use candle_core::{Device, Tensor};

use super::{Request, Tensors};
use crate::model::config::AttentionKind;
use crate::model::reference::attention::causal_attention;
use crate::model::reference::cca::cca_mix;
use crate::model::reference::sequence::Sequences;
use crate::model::{ModelConfig, ParamTable, Probe};
use crate::tensor::backend::{AttentionShape, Backend, CcaIn, CcaParams, CcaShape, Qkv};

pub struct Recorder<'a, B: Backend> {
    backend: &'a B,
    request: &'a Request<'a>,
    table: ParamTable,
    sequences: Sequences,
    seen: RefCell<Tensors>,
    /// The first thing that went wrong; a probe cannot stop the pass.
    error: RefCell<Option<anyhow::Error>>,
}

impl<'a, B: Backend> Recorder<'a, B> {
    pub fn new(backend: &'a B, request: &'a Request<'a>) -> Result<Self> {
        Ok(Self {
            backend,
            request,
            table: ParamTable::new(request.config),
            sequences: Sequences::new(request.batch, candle_core::DType::F32, &Device::Cpu)?,
            seen: RefCell::default(),
            error: RefCell::default(),
        })
    }

    pub fn finish(self) -> Result<Tensors> {
        match self.error.into_inner() {
            Some(error) => Err(error),
            None => Ok(self.seen.into_inner()),
        }
    }

    fn put(&self, name: String, tensor: Tensor) {
        self.seen.borrow_mut().insert(name, tensor);
    }

    fn note<T>(&self, result: Result<T>) {
        if let Err(e) = result {
            self.error.borrow_mut().get_or_insert(e);
        }
    }

    /// `[T, n]` as `[B, S, n]`.
    fn per_token(&self, buf: &B::Buf) -> Result<Tensor> {
        let shape = (self.request.batch.batch, self.request.batch.seq, self.backend.shape(buf)[1]);
        Ok(Tensor::from_vec(self.backend.download(buf)?, shape, &Device::Cpu)?)
    }

    fn param(&self, id: usize) -> Result<Tensor> {
        Ok(Tensor::from_slice(&self.request.values[id], self.table.specs[id].shape.as_slice(), &Device::Cpu)?)
    }

    /// CCA's inner tensors and the attention weights, by the reference.
    fn recompute(&self, block: usize, x: &CcaIn<B::Buf>) -> Result<()> {
        let cfg: &ModelConfig = self.request.config;
        let ids = &self.table.blocks[block].attention;
        let kind = cfg.attention[block];
        let (num_query_heads, num_kv_heads, head_dim) = (cfg.num_query_heads, cfg.num_kv_heads, cfg.head_dim);
        let shape = CcaShape {
            num_query_heads,
            num_kv_heads,
            head_dim,
            rotary_dim: cfg.rotary_dim(kind),
            rope_theta: cfg.rope_of(kind).theta,
        };
        let x = CcaIn {
            q: self.per_token(&x.q)?,
            k: self.per_token(&x.k)?,
            v_current: self.per_token(&x.v_current)?,
            v_delayed: self.per_token(&x.v_delayed)?,
        };
        let p = [ids.conv0_weight, ids.conv0_bias, ids.conv1_weight, ids.conv1_bias, ids.temp].map(|id| self.param(id));
        let [conv0_weight, conv0_bias, conv1_weight, conv1_bias, temp] = p;
        let (conv0_weight, conv0_bias, conv1_weight) = (conv0_weight?, conv0_bias?, conv1_weight?);
        let (conv1_bias, temp) = (conv1_bias?, temp?);
        let p = CcaParams {
            conv0_weight: &conv0_weight,
            conv0_bias: &conv0_bias,
            conv1_weight: &conv1_weight,
            conv1_bias: &conv1_bias,
            temp: &temp,
        };
        let mix = cca_mix(&self.sequences, shape, x.as_ref(), p, self.request.precision)?;
        let window = if kind == AttentionKind::Sliding { cfg.sliding_window } else { None };
        let attention = AttentionShape { num_query_heads, num_kv_heads, head_dim, window };
        let qkv = Qkv { q: &mix.q_rotated, k: &mix.k_rotated, v: &mix.v };
        let (_, weights) = causal_attention(&self.sequences, attention, qkv)?;
        for (name, tensor) in [
            ("cca.conv0.out", mix.conv0.transpose(1, 2)?.contiguous()?),
            ("cca.conv1.out", mix.conv1.transpose(1, 2)?.contiguous()?),
            ("cca.q", mix.q),
            ("cca.k", mix.k),
            ("cca.v", mix.v),
            ("qk_norm.q", mix.q_norm),
            ("qk_norm.k", mix.k_norm),
            ("attn.weights", weights),
        ] {
            self.put(format!("layers.{block}.{name}"), tensor);
        }
        Ok(())
    }

    fn record_routing(&self, block: usize, routing: &B::Routing, saved: &B::RouteSaved, state: &B::Buf) -> Result<()> {
        let (batch, seq) = (self.request.batch.batch, self.request.batch.seq);
        let skip = self.request.config.num_experts as u32;
        let name = |part: &str| format!("layers.{block}.router.{part}");
        let logits = self.backend.route_logits(routing, saved)?;
        let [tokens, classes] = self.backend.shape(&logits);
        self.put(name("logits"), Tensor::from_vec(self.backend.download(&logits)?, (tokens, classes), &Device::Cpu)?);
        self.put(name("state"), self.per_token(state)?);
        let choices = self.backend.route_choices(routing)?;
        let probs = self.backend.route_probs(routing)?;
        // Hugging Face's router folds the skip class away: probability 0, expert 0.
        let is_skip = |c: &u32| *c == skip;
        let prob: Vec<f32> = choices.iter().zip(&probs).map(|(c, p)| if is_skip(c) { 0.0 } else { *p }).collect();
        let index: Vec<i64> = choices.iter().map(|c| if is_skip(c) { 0 } else { i64::from(*c) }).collect();
        let choice: Vec<i64> = choices.iter().map(|c| i64::from(*c)).collect();
        self.put(name("prob"), Tensor::from_vec(prob, (tokens, 1), &Device::Cpu)?);
        self.put(name("index"), Tensor::from_vec(index, (tokens, 1), &Device::Cpu)?);
        self.put(name("choice"), Tensor::from_vec(choice, (batch, seq), &Device::Cpu)?);
        Ok(())
    }
}

impl<B: Backend> Probe<B> for Recorder<'_, B> {
    fn buf(&self, name: &str, value: &B::Buf) {
        self.note(self.per_token(value).map(|t| self.put(name.to_string(), t)));
    }

    fn cca_inputs(&self, block: usize, x: &CcaIn<B::Buf>) {
        self.note(self.recompute(block, x));
    }

    fn routing(&self, block: usize, routing: &B::Routing, saved: &B::RouteSaved, state: &B::Buf) {
        self.note(self.record_routing(block, routing, saved, state));
    }
}
