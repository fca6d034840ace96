//! The whole model: embedding, a loop over blocks, final norm, tied head. Forward and backward by hand, no tape.

use anyhow::Result;
use serde::{Deserialize, Serialize};

use super::attention::{AttentionCache, AttentionLayer, AttentionSaved};
use super::config::ModelConfig;
use super::cx::Cx;
use super::merge::{Entry, Norm, Normed, NormedGrad};
use super::moe::{MoeInput, MoeLayer, MoeSaved};
use super::params::ParamTable;
use super::peers::Stage;
use super::store::ParamStore;
use super::tree::{Moves, TreeCache, TreeStep};
use crate::tensor::backend::{Backend, Batch, Loss};

pub struct Model {
    pub config: ModelConfig,
    pub table: ParamTable,
    blocks: Vec<(AttentionLayer, MoeLayer)>,
    recompute: Recompute,
}

/// Sub-layers whose forward runs again in the backward, from their input, in place of keeping what it computed. The numbers
/// are the same bits either way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Recompute {
    #[default]
    None,
    Attention,
    All,
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

/// What the backward has of a sub-layer: all it needs, or what to compute that from.
enum Kept<S, I> {
    Saved(S),
    Input(I),
}

struct BlockSaved<B: Backend> {
    attention: Kept<AttentionSaved<B>, B::Buf>,
    moe: Kept<MoeSaved<B>, MoeInput<B>>,
}

struct StackSaved<B: Backend> {
    embedded: B::Buf,
    blocks: Vec<BlockSaved<B>>,
    /// What the last block returned.
    last: Entry<B>,
}

impl Model {
    pub fn new(config: ModelConfig) -> Self {
        let table = ParamTable::new(&config);
        let norm = |weight| Norm { weight, eps: config.norm_eps };
        let blocks = (table.blocks.iter().enumerate())
            .map(|(i, ids)| {
                let after = table.blocks.get(i + 1).map_or(table.final_norm, |next| next.attention.norm);
                let attention = AttentionLayer::new(&config, i, ids.attention, norm(ids.moe.norm));
                (attention, MoeLayer::new(&config, i, ids.moe, norm(after)))
            })
            .collect();
        Self { config, table, blocks, recompute: Recompute::None }
    }

    pub fn with_recompute(self, recompute: Recompute) -> Self {
        Self { recompute, ..self }
    }

    fn reach<B: Backend>(&self, cx: &Cx<B>, stage: Stage, grads: Option<&ParamStore<B>>) -> Result<()> {
        cx.peers.stages.map_or(Ok(()), |stages| stages.reach(stage, cx.params, grads))
    }

    /// The norm that reads the stream first.
    fn first_norm(&self) -> Norm {
        let weight = self.table.blocks.first().map_or(self.table.final_norm, |b| b.attention.norm);
        Norm { weight, eps: self.config.norm_eps }
    }

    /// The stream that enters block 0, and the embedding before its scale and bias.
    fn enter<B: Backend>(&self, cx: &Cx<B>) -> Result<(Normed<B>, B::Buf)> {
        let (b, p) = (cx.backend, cx.params);
        self.reach(cx, Stage::Enter, None)?;
        let embedded = b.embed(cx.rows, &p[self.table.embed])?;
        cx.see(|| "embed.out".into(), &embedded);
        let stream = b.affine(&embedded, &p[self.table.input_scale], &p[self.table.input_bias])?;
        cx.see(|| "stream.in".into(), &stream);
        Ok((Normed::new(cx, stream, self.first_norm())?, embedded))
    }

    /// All blocks; `keep` gets what each one needs in its backward. Returns the normed final hidden states.
    fn run<B: Backend>(&self, cx: &Cx<B>, mut x: Normed<B>, mut keep: impl FnMut(BlockSaved<B>)) -> Result<Normed<B>> {
        let mut state = None;
        for (i, (attention, moe)) in self.blocks.iter().enumerate() {
            self.reach(cx, Stage::Forward(i), None)?;
            let (after, saved) = attention.forward(cx, x)?;
            let attention = match self.recompute {
                Recompute::None => Kept::Saved(saved),
                Recompute::Attention | Recompute::All => Kept::Input(saved.into_input()),
            };
            let (out, next_state, saved) = moe.forward(cx, after, state)?;
            let moe = match self.recompute {
                Recompute::None | Recompute::Attention => Kept::Saved(saved),
                Recompute::All => Kept::Input(saved.into_input()),
            };
            keep(BlockSaved { attention, moe });
            (x, state) = (out, Some(next_state));
        }
        self.reach(cx, Stage::Head, None)?;
        cx.see(|| "final_norm.out".into(), &x.h);
        Ok(x)
    }

    /// Final hidden states `[T, D]` (after the last norm), with everything the backward needs.
    fn forward<B: Backend>(&self, cx: &Cx<B>) -> Result<(B::Buf, StackSaved<B>)> {
        let (x, embedded) = self.enter(cx)?;
        let mut blocks = Vec::with_capacity(self.blocks.len());
        let x = self.run(cx, x, |block| blocks.push(block))?;
        Ok((x.h, StackSaved { embedded, blocks, last: Entry { stream: x.stream, norm: x.norm } }))
    }

    /// Final hidden states `[T, D]`; nothing is kept.
    pub fn hidden<B: Backend>(&self, cx: &Cx<B>) -> Result<B::Buf> {
        let (x, embedded) = self.enter(cx)?;
        drop(embedded);
        Ok(self.run(cx, x, drop)?.h)
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
        let (mut out, mut d) = (saved.last, NormedGrad { dh: dy, d_stream: None });
        let mut d_state = None;
        let mut expert_counts = Vec::with_capacity(self.blocks.len());
        for ((i, (attention, moe)), block) in self.blocks.iter().enumerate().zip(saved.blocks).rev() {
            let ids = &table.blocks[i];
            let normed = |stream, weight| Normed::new(cx, stream, Norm { weight, eps: self.config.norm_eps });
            let moe_saved = match block.moe {
                Kept::Saved(saved) => saved,
                Kept::Input(MoeInput { stream, prev }) => moe.forward(cx, normed(stream, ids.moe.norm)?, prev)?.2,
            };
            expert_counts.push(b.route_counts(moe_saved.routing())?);
            (out, d, d_state) = moe.backward(cx, grads, moe_saved, &out, d, d_state)?;
            let attention_saved = match block.attention {
                Kept::Saved(saved) => saved,
                Kept::Input(stream) => attention.forward(cx, normed(stream, ids.attention.norm)?)?.1,
            };
            (out, d) = attention.backward(cx, grads, attention_saved, &out, d)?;
            self.reach(cx, Stage::Backward(i), Some(grads))?;
        }
        let norm = self.first_norm().weight;
        let mut d_stream = b.rms_norm_backward(&out.stream, &p[norm], &out.norm, &d.dh, &mut grads[norm])?;
        if let Some(beside) = &d.d_stream {
            b.add_assign(&mut d_stream, beside)?;
        }
        drop((out, d));
        expert_counts.reverse();
        let [d_scale, d_bias] = grads.many_mut([table.input_scale, table.input_bias]);
        let d_embedded =
            b.affine_backward(&saved.embedded, &p[table.input_scale], &p[table.input_bias], &d_stream, d_scale, d_bias)?;
        b.embed_backward(cx.rows, &d_embedded, self.config.pad_token_id, &mut grads[table.embed])?;
        self.reach(cx, Stage::Complete, Some(grads))?;
        Ok((MicroBatch { loss, expert_counts }, y))
    }

    /// An empty decoding state.
    pub fn cache<B: Backend>(&self) -> Cache<B> {
        Cache { blocks: self.blocks.iter().map(|_| None).collect() }
    }

    /// Final hidden states of the next rows of `batch` sequences whose past lies in `cache`, which they extend.
    pub fn decode<B: Backend>(&self, cx: &Cx<B>, batch: usize, cache: &mut Cache<B>) -> Result<B::Buf> {
        let (mut x, _) = self.enter(cx)?;
        let mut state = None;
        for ((attention, moe), layer_cache) in self.blocks.iter().zip(&mut cache.blocks) {
            let after = attention.decode(cx, batch, x, layer_cache)?;
            let (out, next_state, _) = moe.forward(cx, after, state)?;
            (x, state) = (out, Some(next_state));
        }
        Ok(x.h)
    }

    /// Final hidden states of the rows of `step`, sequences that share beginnings. What `step` says is kept in `cache`.
    ///
    /// # Errors
    /// A step that does not fit the cache, a token beyond the vocabulary, and those of the backend.
    pub fn decode_tree<B: Backend>(
        &self,
        backend: &B,
        params: &ParamStore<B>,
        step: &TreeStep,
        cache: &mut TreeCache<B>,
    ) -> Result<B::Buf> {
        step.tree.check(2 * cache.states(), cache.rows())?;
        let rows = backend.rows(&Batch { batch: 1, seq: step.ids.len(), ids: step.ids.clone(), ..Batch::default() })?;
        let (cx, moves) = (Cx::new(backend, params, &rows), Moves::new(&step.keep));
        let (mut x, _) = self.enter(&cx)?;
        let mut state = None;
        for ((attention, moe), layer) in self.blocks.iter().zip(&mut cache.layers) {
            let after = attention.decode_tree(&cx, step, &moves, x, layer)?;
            let (out, next_state, _) = moe.forward(&cx, after, state)?;
            (x, state) = (out, Some(next_state));
        }
        Ok(x.h)
    }
}

#[cfg(test)]
mod tests {
    use super::super::config::AttentionKind;
    use super::super::init::initial_values;
    use super::super::presets;
    use super::*;
    use crate::tensor::backend::Precision;
    use crate::tensor::cpu::Cpu;

    fn config() -> ModelConfig {
        ModelConfig {
            vocab_size: 11,
            hidden_size: 12,
            num_query_heads: 2,
            num_kv_heads: 1,
            head_dim: 4,
            num_experts: 3,
            expert_width: 8,
            router_width: 6,
            attention: vec![AttentionKind::Full, AttentionKind::Sliding],
            sliding_window: Some(4),
            max_position_embeddings: 16,
            ..presets::bench_15m()
        }
    }

    /// A rank whose share of a step is empty takes part in it all the same.
    #[test]
    fn a_batch_without_tokens_has_no_loss_and_no_gradients() {
        for precision in [Precision::F32, Precision::Bf16] {
            for recompute in [Recompute::None, Recompute::All] {
                let b = Cpu::with_head(precision, precision);
                let model = Model::new(config()).with_recompute(recompute);
                let initial = |id| Ok(initial_values(&model.table.specs[id], &model.config, 1));
                let params = ParamStore::from_host(&b, &model.table, initial).unwrap();
                let mut grads = ParamStore::zeros(&b, &model.table).unwrap();
                let rows = b.rows(&Batch { batch: 0, seq: 8, ..Batch::default() }).unwrap();
                let cx = Cx::new(&b, &params, &rows);
                let (out, y) = model.forward_backward(&cx, &mut grads, 1.0).unwrap();
                assert_eq!(out.loss, Loss::default());
                assert!(out.expert_counts.len() == 2 && out.expert_counts.iter().flatten().all(|n| *n == 0));
                assert_eq!(b.shape(&y), [0, 12]);
                assert!(grads.iter_mut().all(|g| b.sq_norm(g).unwrap() == 0.0));
                assert_eq!(model.loss(&cx).unwrap(), Loss::default());
                assert_eq!(b.shape(&model.logits(&cx).unwrap()), [0, 11]);
                assert_eq!(b.shape(&model.decode(&cx, 0, &mut model.cache()).unwrap()), [0, 12]);
            }
        }
    }
}
