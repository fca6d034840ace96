//! `trait Backend`: the model's own verbs, each with its backward.
//!
//! The model sees buffers only through this trait and never looks inside one, so a CPU backend may keep slices of an
//! arena, a GPU backend device pointers. Conventions:
//!
//! * A buffer is a row-major matrix `[rows, cols]` of real numbers. A vector of n is `[1, n]`. Activations have one row
//!   per token: row `b * seq + s` is token `s` of sequence `b`. T = batch * seq.
//! * Weights of linear maps are `[out, in]`: `y = x wᵀ`.
//! * Every gradient of a parameter (`d_*: &mut`) is **added to**; every gradient of an activation is returned fresh.
//! * A verb that needs something in its backward returns an opaque `*Saved`; the inputs are handed in again.
//! * Results do not depend on the number of threads.

use std::borrow::Cow;
use std::ops::Range;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::tree::{self, Tree};

/// What a token gets from a MoE sub-layer when the router chooses the skip class (the last one).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SkipMode {
    /// Nothing: the sub-layer's output is 0 (native Hugging Face files).
    Zero,
    /// The normed input times the skip class's probability (Zyphra's November 2025 code).
    Identity,
}

/// Numbers that products work on. `Bf16` rounds both operands of every linear map, expert product, grouped convolution, attention
/// product and Newton-Schulz step to bfloat16 and sums in f32; everything else is f32 (spec 1.7), the head too unless a
/// backend is told otherwise. Weights stay f32 masters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    #[default]
    F32,
    Bf16,
}

/// A micro-batch as the host describes it: `batch` sequences of `seq` tokens each.
#[derive(Debug, Clone, Default)]
pub struct Batch {
    pub batch: usize,
    pub seq: usize,
    /// Tokens before the first row of each sequence that live in caches (decoding), else 0.
    pub past: usize,
    /// `[batch * seq]`.
    pub ids: Vec<u32>,
    /// Token that row t is to predict, already shifted; negative = no loss here. Empty = no labels at all.
    pub labels: Vec<i64>,
    /// `false` = padding: hidden from attention, from convolutions and from expert counts. Empty = all real.
    pub valid: Vec<bool>,
    /// Row's document begins at this row of its sequence within the batch; 0 = here or before, in the cache (document
    /// masking). Of chunks: at this position of the whole sequence. Empty = one document a sequence.
    pub doc_start: Vec<u32>,
    /// None = whole sequences, or their continuation from caches.
    pub chunks: Option<Chunks>,
}

/// Parts of longer sequences whose other parts lie on other ranks (context parallelism). A batch of chunks has `batch` chunks of
/// `seq` rows each; the chunks of one sequence follow each other, in the order of their positions. `past` is 0.
#[derive(Debug, Clone, Default)]
pub struct Chunks {
    /// Position in its sequence of the first row of each chunk. `[batch]`
    pub start: Vec<usize>,
    /// Chunks of one sequence on this rank; divides `batch`.
    pub per_sequence: usize,
    /// Tokens of a whole sequence: rows of keys and values that attention gets for each.
    pub keys: usize,
    /// Which of these are real, `[batch / per_sequence * keys]`; empty = all.
    pub key_valid: Vec<bool>,
}

impl Batch {
    pub fn tokens(&self) -> usize {
        self.batch * self.seq
    }
    /// Rows that carry a label.
    pub fn num_labels(&self) -> u64 {
        self.labels.iter().filter(|l| **l >= 0).count() as u64
    }
}

/// Routes to use in place of the router's own choice, one class per row (tests, parity checks).
#[derive(Debug, Clone)]
pub struct PinnedRoutes(pub Vec<u32>);

/// Numbers that fix the meaning of CCA's buffers.
#[derive(Debug, Clone, Copy)]
pub struct CcaShape {
    pub num_query_heads: usize,
    pub num_kv_heads: usize,
    pub head_dim: usize,
    /// Rotating channels, even.
    pub rotary_dim: usize,
    pub rope_theta: f64,
}

#[derive(Debug, Clone, Copy)]
pub struct AttentionShape {
    pub num_query_heads: usize,
    pub num_kv_heads: usize,
    pub head_dim: usize,
    /// Tokens seen, the current one included; None = all before.
    pub window: Option<usize>,
}

/// Inputs of `cca_mix`: the four projections of the normed stream.
#[derive(Debug, Clone, Copy)]
pub struct CcaIn<T> {
    /// `[T, q_dim]`
    pub q: T,
    /// `[T, kv_dim]`
    pub k: T,
    /// `[T, kv_dim / 2]`
    pub v_current: T,
    /// `[T, kv_dim / 2]`, not yet delayed
    pub v_delayed: T,
}

impl<T> CcaIn<T> {
    pub fn as_ref(&self) -> CcaIn<&T> {
        CcaIn { q: &self.q, k: &self.k, v_current: &self.v_current, v_delayed: &self.v_delayed }
    }
}

/// Rows just before a sequence's (or a chunk's) first one, needed by CCA's convolutions and value shift. Zeros at a sequence's
/// start. What lies before the document of a chunk's first row is not used, whatever it holds.
#[derive(Debug, Clone, Copy)]
pub struct Halo<T> {
    /// `[batch * 2, q_dim]` and `[batch * 2, kv_dim]`: last two rows of the query and key projections.
    pub q: T,
    pub k: T,
    /// `[batch, kv_dim / 2]`: last row of `v_delayed`.
    pub v_delayed: T,
}

impl<T> Halo<T> {
    pub fn as_ref(&self) -> Halo<&T> {
        Halo { q: &self.q, k: &self.k, v_delayed: &self.v_delayed }
    }
}

/// Parameters of `cca_mix` (T = `&Buf`), or their gradients (T = `&mut Buf`).
#[derive(Debug, Clone, Copy)]
pub struct CcaParams<T> {
    /// `[C, 2]`, C = q_dim + kv_dim; column 0 meets the token before.
    pub conv0_weight: T,
    /// `[1, C]`
    pub conv0_bias: T,
    /// `[C, head_dim * 2]`, of shape [C, head_dim, 2]
    pub conv1_weight: T,
    /// `[1, C]`
    pub conv1_bias: T,
    /// `[1, num_kv_heads]`
    pub temp: T,
}

/// Queries `[T, q_dim]`, keys and values `[T', kv_dim]`, ready for attention.
#[derive(Debug, Clone, Copy)]
pub struct Qkv<T> {
    pub q: T,
    pub k: T,
    pub v: T,
}

impl<T> Qkv<T> {
    pub fn as_ref(&self) -> Qkv<&T> {
        Qkv { q: &self.q, k: &self.k, v: &self.v }
    }
}

/// The four `[1, D]` vectors of a residual merge.
#[derive(Debug, Clone, Copy)]
pub struct Merge<T> {
    pub branch_scale: T,
    pub branch_bias: T,
    pub stream_scale: T,
    pub stream_bias: T,
}

/// What `residual_norm` had, for its backward.
pub struct ResidualNorm<'a, B: Backend> {
    pub branch: &'a B::Buf,
    pub stream: &'a B::Buf,
    pub p: Merge<&'a B::Buf>,
    /// The merged stream.
    pub y: &'a B::Buf,
    pub norm: &'a B::Buf,
    pub saved: &'a B::NormSaved,
}

/// Parameters of `route`, or their gradients. `balancing_biases` never get one.
#[derive(Debug, Clone, Copy)]
pub struct RouterParams<T> {
    /// `[R, D]`, `[1, R]`
    pub down_weight: T,
    pub down_bias: T,
    /// `[1, R]`; None in the first block
    pub gamma: Option<T>,
    /// `[1, R]`
    pub norm: T,
    pub fc1_weight: T,
    pub fc1_bias: T,
    pub fc2_weight: T,
    pub fc2_bias: T,
    /// `[E + 1, R]`
    pub out: T,
}

/// Outcome of the head: sum over the rows that carry a label.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Loss {
    /// Sum of cross-entropies, nats.
    pub sum: f64,
    /// Rows counted.
    pub count: u64,
}

/// One matrix of a Muon step.
pub struct MuonItem<'a, T> {
    pub weight: &'a mut T,
    pub grad: &'a T,
    pub momentum: &'a mut T,
    /// Equal blocks of rows that are orthogonalised apart (2 = gate and up of a fused matrix), usually 1.
    pub row_blocks: usize,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MuonStep {
    pub lr: f32,
    pub weight_decay: f32,
    pub momentum: f32,
    pub ns_steps: usize,
    /// Factor on every gradient (global-norm clipping).
    pub grad_scale: f32,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWStep {
    pub lr: f32,
    pub beta1: f32,
    pub beta2: f32,
    pub eps: f32,
    pub weight_decay: f32,
    /// 1-based number of this update, for bias correction.
    pub t: u64,
    pub grad_scale: f32,
}

/// Writes the numbers of one of many buffers.
pub type Fill<'a> = dyn Fn(usize, &mut [f32]) -> Result<()> + Sync + 'a;

/// An array of results as the result of an array.
pub fn all<T, const N: usize>(results: [Result<T>; N]) -> Result<[T; N]> {
    let values: Vec<T> = results.into_iter().collect::<Result<_>>()?;
    values.try_into().map_err(|_| anyhow::anyhow!("{N} results were expected"))
}

pub trait Backend: Sized {
    /// A matrix of numbers, wherever and however the backend keeps it.
    type Buf;
    /// A micro-batch made ready: ids, labels, document starts, padding.
    type Rows;
    /// What the router decided for each row, and the grouping of rows by expert.
    type Routing;
    type NormSaved;
    type CcaSaved;
    type AttentionSaved;
    type RouteSaved;
    type ExpertSaved;

    // Buffers, and the border to the host.
    fn zeros(&self, rows: usize, cols: usize) -> Result<Self::Buf>;
    fn upload(&self, data: &[f32], rows: usize, cols: usize) -> Result<Self::Buf>;
    fn download(&self, buf: &Self::Buf) -> Result<Vec<f32>>;
    /// The numbers where they lie, if the host can read them there; else as `download`.
    fn view<'a>(&self, buf: &'a Self::Buf) -> Result<Cow<'a, [f32]>> {
        self.download(buf).map(Cow::Owned)
    }
    /// Has all numbers of many buffers written anew, where they lie if the host can write there: those of `bufs[i]` by `fill(i)`, which
    /// may be called on many threads at a time.
    ///
    /// # Errors
    /// Those of `fill`; then the buffers hold anything.
    fn overwrite(&self, bufs: Vec<&mut Self::Buf>, fill: &Fill) -> Result<()> {
        for (i, buf) in bufs.into_iter().enumerate() {
            let [rows, cols] = self.shape(buf);
            let mut numbers = vec![0.0; rows * cols];
            fill(i, &mut numbers)?;
            *buf = self.upload(&numbers, rows, cols)?;
        }
        Ok(())
    }
    fn shape(&self, buf: &Self::Buf) -> [usize; 2];
    fn rows(&self, batch: &Batch) -> Result<Self::Rows>;

    // Plain movement.
    /// Sets every element to 0.
    fn clear(&self, buf: &mut Self::Buf) -> Result<()>;
    /// `a += b`
    fn add_assign(&self, a: &mut Self::Buf, b: &Self::Buf) -> Result<()>;
    /// Rows of padding tokens become 0. (Its own backward.)
    fn mask_rows(&self, rows: &Self::Rows, x: Self::Buf) -> Result<Self::Buf>;
    /// For each of `batch` sequences: the rows of `a`, then the rows of `b`.
    fn concat_rows(&self, batch: usize, a: &Self::Buf, b: &Self::Buf) -> Result<Self::Buf>;
    /// The last `n` rows of each of `batch` sequences.
    fn last_rows(&self, batch: usize, x: &Self::Buf, n: usize) -> Result<Self::Buf>;
    /// Rows `index` of `x`, in that order.
    fn gather_rows(&self, x: &Self::Buf, index: &[u32]) -> Result<Self::Buf> {
        tree::gather_rows(self, x, index)
    }
    /// Row i of `x` over row `index[i]` of `into`. No row stands in `index` twice.
    fn scatter_rows(&self, x: &Self::Buf, index: &[u32], into: &mut Self::Buf) -> Result<()> {
        tree::scatter_rows(self, x, index, into)
    }

    // Embedding and elementwise.
    /// `table[ids]`, `[T, D]`.
    fn embed(&self, rows: &Self::Rows, table: &Self::Buf) -> Result<Self::Buf>;
    /// Rows of token `pad` get no gradient.
    fn embed_backward(&self, rows: &Self::Rows, dy: &Self::Buf, pad: Option<u32>, d_table: &mut Self::Buf) -> Result<()>;
    /// `(x + bias) * scale`, per channel.
    fn affine(&self, x: &Self::Buf, scale: &Self::Buf, bias: &Self::Buf) -> Result<Self::Buf>;
    fn affine_backward(
        &self,
        x: &Self::Buf,
        scale: &Self::Buf,
        bias: &Self::Buf,
        dy: &Self::Buf,
        d_scale: &mut Self::Buf,
        d_bias: &mut Self::Buf,
    ) -> Result<Self::Buf>;
    /// `(branch + branch_bias) * branch_scale + (stream + stream_bias) * stream_scale`.
    fn residual_scale(&self, branch: &Self::Buf, stream: &Self::Buf, p: Merge<&Self::Buf>) -> Result<Self::Buf>;
    /// Returns the gradients of `branch` and `stream`.
    fn residual_scale_backward(
        &self,
        branch: &Self::Buf,
        stream: &Self::Buf,
        p: Merge<&Self::Buf>,
        dy: &Self::Buf,
        g: Merge<&mut Self::Buf>,
    ) -> Result<(Self::Buf, Self::Buf)>;

    // Norm and linear maps.
    /// `w * x / sqrt(mean(x^2) + eps)`, per row.
    fn rms_norm(&self, x: &Self::Buf, weight: &Self::Buf, eps: f64) -> Result<(Self::Buf, Self::NormSaved)>;
    fn rms_norm_backward(
        &self,
        x: &Self::Buf,
        weight: &Self::Buf,
        saved: &Self::NormSaved,
        dy: &Self::Buf,
        d_weight: &mut Self::Buf,
    ) -> Result<Self::Buf>;
    /// `x wᵀ`: x `[T, in]`, w `[out, in]`.
    fn linear(&self, x: &Self::Buf, weight: &Self::Buf) -> Result<Self::Buf>;
    /// Adds `dyᵀ x` to `d_weight`, returns `dy w`.
    fn linear_backward(&self, x: &Self::Buf, weight: &Self::Buf, dy: &Self::Buf, d_weight: &mut Self::Buf) -> Result<Self::Buf>;
    /// Several maps of one input: `x wᵀ` for each of `weights`.
    fn project<const N: usize>(&self, x: &Self::Buf, weights: [&Self::Buf; N]) -> Result<[Self::Buf; N]> {
        all(weights.map(|w| self.linear(x, w)))
    }
    /// Backward of `project`: adds to every `d_weights`, returns the sum of `dy w`. `N` is at least 1.
    fn project_backward<const N: usize>(
        &self,
        x: &Self::Buf,
        weights: [&Self::Buf; N],
        dy: [&Self::Buf; N],
        d_weights: [&mut Self::Buf; N],
    ) -> Result<Self::Buf> {
        let mut dx: Option<Self::Buf> = None;
        for ((w, dy), dw) in weights.into_iter().zip(dy).zip(d_weights) {
            let part = self.linear_backward(x, w, dy, dw)?;
            match &mut dx {
                None => dx = Some(part),
                Some(dx) => self.add_assign(dx, &part)?,
            }
        }
        dx.context("a projection without weights")
    }
    /// A merge and the norm that follows it: `y = residual_scale(branch, stream)`, `h = rms_norm(y)`. Returns y, h.
    #[allow(clippy::type_complexity)]
    fn residual_norm(
        &self,
        branch: &Self::Buf,
        stream: &Self::Buf,
        p: Merge<&Self::Buf>,
        norm: &Self::Buf,
        eps: f64,
    ) -> Result<(Self::Buf, Self::Buf, Self::NormSaved)> {
        let y = self.residual_scale(branch, stream, p)?;
        let (h, saved) = self.rms_norm(&y, norm, eps)?;
        Ok((y, h, saved))
    }
    /// Gradients of `branch` and `stream`, from that of the norm (`dh`) and what else the merged stream got (`dy`).
    fn residual_norm_backward(
        &self,
        x: ResidualNorm<'_, Self>,
        dh: &Self::Buf,
        dy: Option<&Self::Buf>,
        g: Merge<&mut Self::Buf>,
        d_norm: &mut Self::Buf,
    ) -> Result<(Self::Buf, Self::Buf)> {
        let mut d = self.rms_norm_backward(x.y, x.norm, x.saved, dh, d_norm)?;
        if let Some(dy) = dy {
            self.add_assign(&mut d, dy)?;
        }
        self.residual_scale_backward(x.branch, x.stream, x.p, &d, g)
    }

    // CCA.
    /// Both convolutions, q-k-mean, value shift, norms with temperature, RoPE (positions count from `past`, or from a chunk's
    /// start). History ends at a sequence's start (or continues in `halo`) and at a document's start.
    fn cca_mix(
        &self,
        rows: &Self::Rows,
        shape: CcaShape,
        x: CcaIn<&Self::Buf>,
        p: CcaParams<&Self::Buf>,
        halo: Option<Halo<&Self::Buf>>,
    ) -> Result<(Qkv<Self::Buf>, Self::CcaSaved)>;
    /// With the halo that the forward got. Returns the gradients of the inputs, and those of the halo where there is one (zeros
    /// in rows that are not used). Gradients of parameters contain what flows through the halo.
    #[allow(clippy::too_many_arguments, clippy::type_complexity)]
    fn cca_mix_backward(
        &self,
        rows: &Self::Rows,
        shape: CcaShape,
        x: CcaIn<&Self::Buf>,
        p: CcaParams<&Self::Buf>,
        halo: Option<Halo<&Self::Buf>>,
        saved: &Self::CcaSaved,
        d: Qkv<&Self::Buf>,
        g: CcaParams<&mut Self::Buf>,
    ) -> Result<(CcaIn<Self::Buf>, Option<Halo<Self::Buf>>)>;
    /// Causal softmax attention with scale 1/sqrt(head_dim) and grouped heads. Keys and values have `past + seq` rows a
    /// sequence, queries the last `seq`. A row with no visible key (padding) sees all keys of its sequence alike.
    /// Of chunks: keys and values are those of whole sequences, `Chunks::keys` rows each.
    fn causal_attention(
        &self,
        rows: &Self::Rows,
        shape: AttentionShape,
        x: Qkv<&Self::Buf>,
    ) -> Result<(Self::Buf, Self::AttentionSaved)>;
    /// For `past` = 0. Of chunks: gradients of all keys and values, summed over the queries that are here.
    fn causal_attention_backward(
        &self,
        rows: &Self::Rows,
        shape: AttentionShape,
        x: Qkv<&Self::Buf>,
        out: &Self::Buf,
        saved: &Self::AttentionSaved,
        d_out: &Self::Buf,
    ) -> Result<Qkv<Self::Buf>>;

    // Both, of sequences that share beginnings; each row gets the same numbers whatever else is in the batch.
    /// As `cca_mix` of rows that `tree` gives histories and positions. `halo` holds rows of earlier batches, two for each row of
    /// `halo.v_delayed`, the older first.
    fn cca_mix_tree(
        &self,
        tree: &Tree,
        shape: CcaShape,
        x: CcaIn<&Self::Buf>,
        p: CcaParams<&Self::Buf>,
        halo: Halo<&Self::Buf>,
    ) -> Result<Qkv<Self::Buf>> {
        tree::cca_mix(self, tree, shape, x, p, halo)
    }
    /// As `causal_attention` of queries `[T, q_dim]` over those rows of the pools `x.k` and `x.v` that `tree` gives each segment.
    fn tree_attention(&self, tree: &Tree, shape: AttentionShape, x: Qkv<&Self::Buf>) -> Result<Self::Buf> {
        tree::attention(self, tree, shape, x)
    }

    // Router and experts.
    /// Spec 1.6. Returns the routing and the router state `[T, R]` that the next block takes as `prev`.
    #[allow(clippy::too_many_arguments)]
    fn route(
        &self,
        rows: &Self::Rows,
        h: &Self::Buf,
        prev: Option<&Self::Buf>,
        p: RouterParams<&Self::Buf>,
        balancing_biases: &Self::Buf,
        norm_eps: f64,
        pinned: Option<&PinnedRoutes>,
    ) -> Result<(Self::Routing, Self::Buf, Self::RouteSaved)>;
    /// `d_prob` `[T, 1]`: gradient of the chosen class's probability; `d_state`: gradient of the returned state.
    /// Adds the gradient of `h` to `dh`, returns that of `prev`.
    #[allow(clippy::too_many_arguments)]
    fn route_backward(
        &self,
        h: &Self::Buf,
        prev: Option<&Self::Buf>,
        p: RouterParams<&Self::Buf>,
        routing: &Self::Routing,
        saved: &Self::RouteSaved,
        d_prob: &Self::Buf,
        d_state: Option<&Self::Buf>,
        g: RouterParams<&mut Self::Buf>,
        dh: &mut Self::Buf,
    ) -> Result<Option<Self::Buf>>;
    /// Router logits `[T, E + 1]`, for inspection.
    fn route_logits(&self, routing: &Self::Routing, saved: &Self::RouteSaved) -> Result<Self::Buf>;
    /// Chosen class of each row.
    fn route_choices(&self, routing: &Self::Routing) -> Result<Vec<u32>>;
    /// Probability of each row's chosen class.
    fn route_probs(&self, routing: &Self::Routing) -> Result<Vec<f32>>;
    /// Real (not padding) rows per class.
    fn route_counts(&self, routing: &Self::Routing) -> Result<Vec<u64>>;
    /// `p_e * Expert_e(h)` for each row, Expert(h) = down (silu(gate h) * (up h)); skipped rows by `skip`.
    /// `experts` = gate_up `[2F, D]` (gate rows first) and down `[D, F]` of expert 0, of expert 1, ...
    fn expert_ffn(
        &self,
        h: &Self::Buf,
        routing: &Self::Routing,
        experts: &[Self::Buf],
        skip: SkipMode,
    ) -> Result<(Self::Buf, Self::ExpertSaved)>;
    /// Returns the gradients of `h` and of the chosen probabilities `[T, 1]`.
    #[allow(clippy::too_many_arguments)]
    fn expert_ffn_backward(
        &self,
        h: &Self::Buf,
        routing: &Self::Routing,
        experts: &[Self::Buf],
        skip: SkipMode,
        saved: &Self::ExpertSaved,
        dy: &Self::Buf,
        g: &mut [Self::Buf],
    ) -> Result<(Self::Buf, Self::Buf)>;

    // Head.
    /// `y headᵀ` in full f32, `[T, V]`.
    fn logits(&self, y: &Self::Buf, head: &Self::Buf) -> Result<Self::Buf>;
    /// Cross-entropy with the tied head, in chunks of rows; the logits of a whole batch never exist.
    fn cross_entropy(&self, rows: &Self::Rows, y: &Self::Buf, head: &Self::Buf) -> Result<Loss>;
    /// As `cross_entropy`, with the gradient of `grad_scale * loss.sum`: added to `d_head`, returned for `y`.
    fn cross_entropy_backward(
        &self,
        rows: &Self::Rows,
        y: &Self::Buf,
        head: &Self::Buf,
        grad_scale: f32,
        d_head: &mut Self::Buf,
    ) -> Result<(Loss, Self::Buf)>;

    // Optimizer.
    /// Sum of squares, in f64.
    fn sq_norm(&self, x: &Self::Buf) -> Result<f64> {
        self.sq_norm_rows(x, 0..self.shape(x)[0])
    }
    /// Sum of squares of some rows, in f64.
    fn sq_norm_rows(&self, x: &Self::Buf, rows: Range<usize>) -> Result<f64>;
    /// One Muon update of many matrices (spec 3.3).
    fn muon(&self, items: &mut [MuonItem<'_, Self::Buf>], step: MuonStep) -> Result<()>;
    /// One AdamW update.
    fn adamw(
        &self,
        weight: &mut Self::Buf,
        grad: &Self::Buf,
        m: &mut Self::Buf,
        v: &mut Self::Buf,
        step: AdamWStep,
    ) -> Result<()> {
        let rows = 0..self.shape(weight)[0];
        self.adamw_rows(weight, grad, rows, m, v, 0, step)
    }
    /// One AdamW update of some rows, whose moments are the rows of `m` and `v` from `at` on.
    #[allow(clippy::too_many_arguments)]
    fn adamw_rows(
        &self,
        weight: &mut Self::Buf,
        grad: &Self::Buf,
        rows: Range<usize>,
        m: &mut Self::Buf,
        v: &mut Self::Buf,
        at: usize,
        step: AdamWStep,
    ) -> Result<()>;
}
