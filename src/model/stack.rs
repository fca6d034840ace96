//! The whole model: embedding, a loop over blocks, final norm, tied head. Forward and backward by hand, no tape.

use anyhow::Result;

use super::attention::{AttentionCache, AttentionLayer, AttentionSaved};
use super::config::ModelConfig;
use super::cx::Cx;
use super::moe::{MoeLayer, MoeSaved};
use super::params::ParamTable;
use super::store::ParamStore;
use crate::tensor::backend::{Backend, Loss};

pub struct Model {
    pub config: ModelConfig,
    pub table: ParamTable,
    blocks: Vec<(AttentionLayer, MoeLayer)>,
}

/// What one forward and backward over a micro-batch tells.
#[derive(Debug, Clone)]
pub struct MicroBatch {
    pub loss: Loss,
    /// Real tokens per router class (experts, then skip), for each block.
    pub expert_counts: Vec<Vec<u64>>,
}

/// Decoding state of a batch of sequences.
pub struct Cache<B: Backend> {
    blocks: Vec<Option<AttentionCache<B>>>,
}

struct BlockSaved<B: Backend> {
    attention: AttentionSaved<B>,
    moe: MoeSaved<B>,
}

struct StackSaved<B: Backend> {
    embedded: B::Buf,
    blocks: Vec<BlockSaved<B>>,
    stream: B::Buf,
    norm: B::NormSaved,
}

impl Model {
    pub fn new(config: ModelConfig) -> Self {
        let table = ParamTable::new(&config);
        let blocks = table
            .blocks
            .iter()
            .enumerate()
            .map(|(i, ids)| (AttentionLayer::new(&config, i, ids.attention), MoeLayer::new(&config, i, ids.moe)))
            .collect();
        Self { config, table, blocks }
    }

    /// The stream that enters block 0, and the embedding before its scale and bias.
    fn enter<B: Backend>(&self, cx: &Cx<B>) -> Result<(B::Buf, B::Buf)> {
        let (b, p) = (cx.backend, cx.params);
        let embedded = b.embed(cx.rows, &p[self.table.embed])?;
        cx.see(|| "embed.out".into(), &embedded);
        let stream = b.affine(&embedded, &p[self.table.input_scale], &p[self.table.input_bias])?;
        cx.see(|| "stream.in".into(), &stream);
        Ok((stream, embedded))
    }

    /// Final hidden states `[T, D]` (after the last norm), with everything the backward needs.
    fn forward<B: Backend>(&self, cx: &Cx<B>) -> Result<(B::Buf, StackSaved<B>)> {
        let (mut stream, embedded) = self.enter(cx)?;
        let mut state = None;
        let mut blocks = Vec::with_capacity(self.blocks.len());
        for (attention, moe) in &self.blocks {
            let (x, saved_attention) = attention.forward(cx, stream)?;
            let (x, next_state, saved_moe) = moe.forward(cx, x, state)?;
            blocks.push(BlockSaved { attention: saved_attention, moe: saved_moe });
            (stream, state) = (x, Some(next_state));
        }
        let (y, norm) = cx.backend.rms_norm(&stream, &cx.params[self.table.final_norm], self.config.norm_eps)?;
        cx.see(|| "final_norm.out".into(), &y);
        Ok((y, StackSaved { embedded, blocks, stream, norm }))
    }

    /// Final hidden states `[T, D]`; nothing is kept.
    pub fn hidden<B: Backend>(&self, cx: &Cx<B>) -> Result<B::Buf> {
        let (mut stream, _) = self.enter(cx)?;
        let mut state = None;
        for (attention, moe) in &self.blocks {
            let (x, _) = attention.forward(cx, stream)?;
            let (x, next_state, _) = moe.forward(cx, x, state)?;
            (stream, state) = (x, Some(next_state));
        }
        let (y, _) = cx.backend.rms_norm(&stream, &cx.params[self.table.final_norm], self.config.norm_eps)?;
        cx.see(|| "final_norm.out".into(), &y);
        Ok(y)
    }

    /// Loss of a micro-batch, without gradients.
    pub fn loss<B: Backend>(&self, cx: &Cx<B>) -> Result<Loss> {
        cx.backend.cross_entropy(cx.rows, &self.hidden(cx)?, &cx.params[self.table.embed])
    }

    /// Logits `[T, V]` of a micro-batch.
    pub fn logits<B: Backend>(&self, cx: &Cx<B>) -> Result<B::Buf> {
        cx.backend.logits(&self.hidden(cx)?, &cx.params[self.table.embed])
    }

    /// Forward and backward: the gradient of `grad_scale * sum of losses` is added to `grads`.
    /// Also returns the final hidden states.
    pub fn forward_backward<B: Backend>(
        &self,
        cx: &Cx<B>,
        grads: &mut ParamStore<B>,
        grad_scale: f32,
    ) -> Result<(MicroBatch, B::Buf)> {
        let (b, p, table) = (cx.backend, cx.params, &self.table);
        let (y, saved) = self.forward(cx)?;
        let (loss, dy) = b.cross_entropy_backward(cx.rows, &y, &p[table.embed], grad_scale, &mut grads[table.embed])?;
        let mut d_stream =
            b.rms_norm_backward(&saved.stream, &p[table.final_norm], &saved.norm, &dy, &mut grads[table.final_norm])?;
        let mut d_state = None;
        let mut expert_counts = Vec::with_capacity(self.blocks.len());
        for ((attention, moe), block) in self.blocks.iter().zip(saved.blocks).rev() {
            expert_counts.push(b.route_counts(block.moe.routing())?);
            let (dx, d_prev) = moe.backward(cx, grads, block.moe, d_stream, d_state)?;
            d_stream = attention.backward(cx, grads, block.attention, dx)?;
            d_state = d_prev;
        }
        expert_counts.reverse();
        let [d_scale, d_bias] = grads.many_mut([table.input_scale, table.input_bias]);
        let d_embedded =
            b.affine_backward(&saved.embedded, &p[table.input_scale], &p[table.input_bias], &d_stream, d_scale, d_bias)?;
        b.embed_backward(cx.rows, &d_embedded, self.config.pad_token_id, &mut grads[table.embed])?;
        Ok((MicroBatch { loss, expert_counts }, y))
    }

    /// An empty decoding state.
    pub fn cache<B: Backend>(&self) -> Cache<B> {
        Cache { blocks: self.blocks.iter().map(|_| None).collect() }
    }

    /// Final hidden states of the next rows of `batch` sequences whose past lies in `cache`, which they extend.
    pub fn decode<B: Backend>(&self, cx: &Cx<B>, batch: usize, cache: &mut Cache<B>) -> Result<B::Buf> {
        let (mut stream, _) = self.enter(cx)?;
        let mut state = None;
        for ((attention, moe), layer_cache) in self.blocks.iter().zip(&mut cache.blocks) {
            let x = attention.decode(cx, batch, stream, layer_cache)?;
            let (x, next_state, _) = moe.forward(cx, x, state)?;
            (stream, state) = (x, Some(next_state));
        }
        Ok(cx.backend.rms_norm(&stream, &cx.params[self.table.final_norm], self.config.norm_eps)?.0)
    }
}
