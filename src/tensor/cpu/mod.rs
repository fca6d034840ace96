//! The CPU backend: packed products, fused verbs, one arena for all that a step works in, one rayon pool (the one it is
//! called in). Which instructions it uses is decided at run time (`level`).

pub mod arena;
pub mod attention;
pub mod buf;
pub mod cca;
pub mod elementwise;
pub mod experts;
pub mod head;
pub mod level;
pub mod linear;
pub mod math;
pub mod muon;
pub mod optim;
pub mod packed;
pub mod par;
pub mod router;
pub mod rows;
mod scratch;
#[cfg(test)]
mod test_support;

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use rayon::prelude::*;

use super::backend::*;
use super::rope::Tables;
use super::trace::{self, VerbSpan};
use super::tree::Tree;
use super::work::{self, Work};
use arena::{Arena, ArenaUse, Block, Element};
pub use buf::{Buf, Packing};
use buf::{Pack, Side};
use packed::Core;
pub use rows::Rows;

#[derive(Debug, Clone)]
pub struct Cpu {
    /// Products of the model.
    core: Core,
    /// Products of the head.
    head: Core,
    packing: Packing,
    arena: Arc<Arena>,
    rope: Arc<Tables<cca::RopeTable>>,
}

impl Default for Cpu {
    fn default() -> Self {
        Self::new(Precision::F32)
    }
}

impl Cpu {
    /// With an arena that grows as it is used. The head's products are f32.
    pub fn new(precision: Precision) -> Self {
        Self::on(precision, Precision::F32, Arena::growing())
    }

    /// With products of the head in `head`.
    pub fn with_head(precision: Precision, head: Precision) -> Self {
        Self::on(precision, head, Arena::growing())
    }

    /// A backend that computes nothing and has no memory: running a step on it tells what a step needs (`arena_use`).
    pub fn planning(precision: Precision, head: Precision) -> Self {
        Self::on(precision, head, Arena::planning())
    }

    fn on(precision: Precision, head: Precision, arena: Arc<Arena>) -> Self {
        let core = |precision| match precision {
            Precision::F32 => Core::f32(),
            Precision::Bf16 => Core::bf16(),
        };
        Self { core: core(precision), head: core(head), packing: Packing::default(), arena, rope: Arc::default() }
    }

    /// The same backend, whose packed copies of weights live so long.
    pub fn with_packing(self, packing: Packing) -> Self {
        Self { packing, ..self }
    }

    /// Takes working memory for a step from the system at once, as a planning backend found it.
    pub fn reserve(&self, bytes: usize) -> Result<()> {
        self.arena.reserve(bytes).with_context(|| format!("taking {bytes} bytes of working memory for a step"))
    }

    /// Working memory, so far.
    pub fn arena_use(&self) -> ArenaUse {
        self.arena.usage()
    }

    /// Bytes of the packed copies that a `[rows, cols]` weight of linear maps keeps in training.
    pub fn pack_bytes(&self, rows: usize, cols: usize) -> usize {
        Buf::pack_bytes(&self.core, rows, cols)
    }

    /// As `pack_bytes`, of the head.
    pub fn head_pack_bytes(&self, rows: usize, cols: usize) -> usize {
        Buf::pack_bytes(&self.head, rows, cols)
    }

    /// A weight as the right operand of products.
    fn pack(&self, core: &Core, weight: &Buf, side: Side) -> Result<Pack> {
        Ok(match (self.packing, self.is_planning()) {
            (Packing::Kept, false) => weight.packed(core, side),
            (Packing::Kept, true) => Pack::Planned,
            (Packing::EachUse, planning) => {
                let layout = weight.layout(core, side);
                let mut room = self.block(layout.len())?;
                if !planning {
                    weight.pack_into(core, side, &mut room);
                }
                Pack::EachUse(layout, room)
            }
        })
    }

    /// Whether this backend computes nothing and has no memory.
    pub fn is_planning(&self) -> bool {
        self.arena.is_planning()
    }

    /// Working memory with whatever was there before.
    fn block<T: Element>(&self, len: usize) -> Result<Block<T>> {
        self.arena.block(len).with_context(|| format!("taking {} bytes of working memory", len * size_of::<T>()))
    }

    /// A matrix of working memory, to be written; it holds whatever was there before.
    pub fn matrix(&self, rows: usize, cols: usize) -> Result<Buf> {
        Ok(Buf::in_arena(self.block(rows * cols)?, rows, cols))
    }
}

/// Records a verb that costs at least `w`.
fn verb(name: &'static str, w: Work) -> VerbSpan {
    trace::verb(name, w.flops, w.bytes)
}

fn attended(rows: &Rows, shape: &AttentionShape) -> work::Attended {
    match &rows.chunks {
        None => work::Attended::sequences(rows.batch, rows.seq, shape.window),
        Some(c) => work::Attended::chunks(&c.start, rows.seq, rows.sequences() * c.keys, shape.window),
    }
}

fn len(b: &Buf) -> usize {
    b.rows * b.cols
}

fn merge(p: Merge<&Buf>) -> Merge<&[f32]> {
    Merge {
        branch_scale: p.branch_scale.data(),
        branch_bias: p.branch_bias.data(),
        stream_scale: p.stream_scale.data(),
        stream_bias: p.stream_bias.data(),
    }
}

fn qkv(x: Qkv<&Buf>) -> Qkv<&[f32]> {
    Qkv { q: x.q.data(), k: x.k.data(), v: x.v.data() }
}

impl Backend for Cpu {
    type Buf = Buf;
    type Rows = Rows;
    type Routing = router::Routing;
    /// 1 / RMS of each row.
    type NormSaved = Block<f32>;
    type CcaSaved = cca::Saved;
    /// Log-sum-exp of each row and head.
    type AttentionSaved = Block<f32>;
    type RouteSaved = router::Saved;
    type ExpertSaved = experts::Saved;

    fn zeros(&self, rows: usize, cols: usize) -> Result<Buf> {
        Ok(if self.is_planning() { Buf::planned(rows, cols) } else { Buf::own(vec![0.0; rows * cols], rows, cols) })
    }

    fn upload(&self, data: &[f32], rows: usize, cols: usize) -> Result<Buf> {
        ensure!(data.len() == rows * cols, "a buffer of {rows} x {cols} got {} numbers", data.len());
        Ok(if self.is_planning() { Buf::planned(rows, cols) } else { Buf::own(data.to_vec(), rows, cols) })
    }

    fn download(&self, buf: &Buf) -> Result<Vec<f32>> {
        Ok(if self.is_planning() { vec![0.0; len(buf)] } else { buf.data().to_vec() })
    }

    fn overwrite(&self, bufs: Vec<&mut Buf>, fill: &Fill) -> Result<()> {
        if self.is_planning() {
            return Ok(());
        }
        // Each thread has buffers that follow one another, so that it reads a file in one go if it fills them from one.
        let share = bufs.len().div_ceil(rayon::current_num_threads()).max(1);
        let each = bufs.into_par_iter().with_min_len(share).enumerate();
        each.map(|(i, buf)| fill(i, buf.data_mut())).collect::<Vec<_>>().into_iter().collect()
    }

    fn view<'a>(&self, buf: &'a Buf) -> Result<Cow<'a, [f32]>> {
        if self.is_planning() { self.download(buf).map(Cow::Owned) } else { Ok(Cow::Borrowed(buf.data())) }
    }

    fn shape(&self, buf: &Buf) -> [usize; 2] {
        [buf.rows, buf.cols]
    }

    fn rows(&self, batch: &Batch) -> Result<Rows> {
        Rows::new(batch)
    }

    fn clear(&self, buf: &mut Buf) -> Result<()> {
        if !self.is_planning() {
            elementwise::clear(buf.data_mut());
        }
        Ok(())
    }

    fn add_assign(&self, a: &mut Buf, b: &Buf) -> Result<()> {
        let _span = verb("add_assign", work::moved(3 * len(a)));
        if !self.is_planning() {
            elementwise::add_parallel(a.data_mut(), b.data());
        }
        Ok(())
    }

    fn mask_rows(&self, rows: &Rows, mut x: Buf) -> Result<Buf> {
        if !self.is_planning() && !rows.valid.is_empty() {
            let cols = x.cols;
            rows::mask_rows(rows, x.data_mut(), cols);
        }
        Ok(x)
    }

    fn concat_rows(&self, batch: usize, a: &Buf, b: &Buf) -> Result<Buf> {
        let mut out = self.matrix(a.rows + b.rows, b.cols)?;
        if !self.is_planning() {
            rows::concat_rows(batch, a.data(), b.data(), out.data_mut());
        }
        Ok(out)
    }

    fn last_rows(&self, batch: usize, x: &Buf, n: usize) -> Result<Buf> {
        ensure!(n * batch <= x.rows, "the last {n} rows of {batch} sequences were asked of {} rows", x.rows);
        let mut out = self.matrix(n * batch, x.cols)?;
        if !self.is_planning() {
            rows::last_rows(batch, x.data(), n, x.cols, out.data_mut());
        }
        Ok(out)
    }

    fn gather_rows(&self, x: &Buf, index: &[u32]) -> Result<Buf> {
        check_rows(index, x)?;
        let mut out = self.matrix(index.len(), x.cols)?;
        if !self.is_planning() {
            experts::gather(x.data(), index, x.cols, out.data_mut());
        }
        Ok(out)
    }

    fn scatter_rows(&self, x: &Buf, index: &[u32], into: &mut Buf) -> Result<()> {
        check_rows(index, into)?;
        ensure!(x.rows == index.len() && x.cols == into.cols, "{} x {} numbers for {} rows", x.rows, x.cols, index.len());
        if !self.is_planning() {
            experts::scatter(x.data(), index, x.cols, into.data_mut());
        }
        Ok(())
    }

    fn embed(&self, rows: &Rows, table: &Buf) -> Result<Buf> {
        rows::check_ids(&rows.ids, table.rows)?;
        let mut y = self.matrix(rows.tokens(), table.cols)?;
        let _span = verb("embed", work::embed(y.rows, y.cols));
        if !self.is_planning() {
            rows::embed(rows, table.data(), table.cols, y.data_mut());
        }
        Ok(y)
    }

    fn embed_backward(&self, rows: &Rows, dy: &Buf, pad: Option<u32>, d_table: &mut Buf) -> Result<()> {
        let mut order = self.block::<u32>(rows.tokens())?;
        let _span = verb("embed_backward", work::embed_backward(dy.rows, dy.cols));
        if !self.is_planning() {
            rows::embed_backward(rows, dy.data(), pad, d_table.data_mut(), dy.cols, &mut order);
        }
        Ok(())
    }

    fn affine(&self, x: &Buf, scale: &Buf, bias: &Buf) -> Result<Buf> {
        let mut y = self.matrix(x.rows, x.cols)?;
        let _span = verb("affine", work::affine(x.rows, x.cols));
        if !self.is_planning() {
            elementwise::affine(x.data(), scale.data(), bias.data(), y.data_mut());
        }
        Ok(y)
    }

    fn affine_backward(&self, x: &Buf, scale: &Buf, bias: &Buf, dy: &Buf, d_scale: &mut Buf, d_bias: &mut Buf) -> Result<Buf> {
        let mut dx = self.matrix(x.rows, x.cols)?;
        let mut partials = self.block(elementwise::sums_len(x.rows, 2 * x.cols))?;
        let _span = verb("affine_backward", work::affine_backward(x.rows, x.cols));
        if !self.is_planning() {
            let (d_scale, d_bias) = (d_scale.data_mut(), d_bias.data_mut());
            elementwise::affine_backward(
                x.data(),
                scale.data(),
                bias.data(),
                dy.data(),
                dx.data_mut(),
                d_scale,
                d_bias,
                &mut partials,
            );
        }
        Ok(dx)
    }

    fn residual_scale(&self, branch: &Buf, stream: &Buf, p: Merge<&Buf>) -> Result<Buf> {
        let mut y = self.matrix(stream.rows, stream.cols)?;
        let _span = verb("residual_scale", work::residual_scale(stream.rows, stream.cols));
        if !self.is_planning() {
            elementwise::residual_scale(branch.data(), stream.data(), merge(p), y.data_mut());
        }
        Ok(y)
    }

    fn residual_scale_backward(
        &self,
        branch: &Buf,
        stream: &Buf,
        p: Merge<&Buf>,
        dy: &Buf,
        g: Merge<&mut Buf>,
    ) -> Result<(Buf, Buf)> {
        let d_branch = self.affine_backward(branch, p.branch_scale, p.branch_bias, dy, g.branch_scale, g.branch_bias)?;
        let d_stream = self.affine_backward(stream, p.stream_scale, p.stream_bias, dy, g.stream_scale, g.stream_bias)?;
        Ok((d_branch, d_stream))
    }

    fn rms_norm(&self, x: &Buf, weight: &Buf, eps: f64) -> Result<(Buf, Block<f32>)> {
        let (mut y, mut inv) = (self.matrix(x.rows, x.cols)?, self.block(x.rows)?);
        let _span = verb("rms_norm", work::rms_norm(x.rows, x.cols));
        if !self.is_planning() {
            elementwise::rms_norm(x.data(), weight.data(), eps, y.data_mut(), &mut inv);
        }
        Ok((y, inv))
    }

    fn rms_norm_backward(&self, x: &Buf, weight: &Buf, saved: &Block<f32>, dy: &Buf, d_weight: &mut Buf) -> Result<Buf> {
        let mut dx = self.matrix(x.rows, x.cols)?;
        let mut partials = self.block(elementwise::sums_len(x.rows, x.cols))?;
        let _span = verb("rms_norm_backward", work::rms_norm_backward(x.rows, x.cols));
        if !self.is_planning() {
            let d_weight = d_weight.data_mut();
            elementwise::rms_norm_backward(x.data(), weight.data(), saved, dy.data(), dx.data_mut(), d_weight, &mut partials);
        }
        Ok(dx)
    }

    fn residual_norm(&self, branch: &Buf, stream: &Buf, p: Merge<&Buf>, norm: &Buf, eps: f64) -> Result<(Buf, Buf, Block<f32>)> {
        let (rows, cols) = (stream.rows, stream.cols);
        let (mut y, mut h, mut inv) = (self.matrix(rows, cols)?, self.matrix(rows, cols)?, self.block(rows)?);
        let _span = verb("residual_norm", work::residual_norm(stream.rows, stream.cols));
        if !self.is_planning() {
            let (branch, stream) = (branch.data(), stream.data());
            elementwise::residual_norm(branch, stream, merge(p), norm.data(), eps, y.data_mut(), h.data_mut(), &mut inv);
        }
        Ok((y, h, inv))
    }

    fn residual_norm_backward(
        &self,
        x: ResidualNorm<'_, Self>,
        dh: &Buf,
        dy: Option<&Buf>,
        g: Merge<&mut Buf>,
        d_norm: &mut Buf,
    ) -> Result<(Buf, Buf)> {
        let (rows, cols) = (x.stream.rows, x.stream.cols);
        let (mut d_branch, mut d_stream) = (self.matrix(rows, cols)?, self.matrix(rows, cols)?);
        let mut partials = self.block(elementwise::sums_len(rows, 5 * cols))?;
        let _span = verb("residual_norm_backward", work::residual_norm_backward(rows, cols));
        if !self.is_planning() {
            let x = elementwise::ResidualNorm {
                branch: x.branch.data(),
                stream: x.stream.data(),
                p: merge(x.p),
                y: x.y.data(),
                w: x.norm.data(),
                inv: x.saved,
                dh: dh.data(),
                dy: dy.map(Buf::data),
            };
            let g = Merge {
                branch_scale: g.branch_scale.data_mut(),
                branch_bias: g.branch_bias.data_mut(),
                stream_scale: g.stream_scale.data_mut(),
                stream_bias: g.stream_bias.data_mut(),
            };
            elementwise::residual_norm_backward(x, d_branch.data_mut(), d_stream.data_mut(), g, d_norm.data_mut(), &mut partials);
        }
        Ok((d_branch, d_stream))
    }

    fn linear(&self, x: &Buf, w: &Buf) -> Result<Buf> {
        Ok(self.project(x, [w])?.into_iter().next().expect("one map"))
    }

    fn linear_backward(&self, x: &Buf, w: &Buf, dy: &Buf, d_weight: &mut Buf) -> Result<Buf> {
        self.project_backward(x, [w], [dy], [d_weight])
    }

    fn project<const N: usize>(&self, x: &Buf, weights: [&Buf; N]) -> Result<[Buf; N]> {
        let mut y = all(weights.map(|w| self.matrix(x.rows, w.rows)))?;
        let mut scratch = self.block(linear::scratch_len())?;
        let _span = verb("project", work::linear(x.rows, x.cols, weights.iter().map(|w| w.rows).sum()));
        let packs = all(weights.map(|w| self.pack(&self.core, w, Side::Forward)))?;
        if !self.is_planning() {
            let mut maps = y.iter_mut().zip(&packs).map(|(y, pack)| linear::Map { weight: pack.panels(), y: y.data_mut() });
            let mut maps: [linear::Map; N] = std::array::from_fn(|_| maps.next().expect("one a weight"));
            linear::forward(&self.core, x.data(), x.cols, &mut maps, &mut scratch);
        }
        Ok(y)
    }

    fn project_backward<const N: usize>(
        &self,
        x: &Buf,
        weights: [&Buf; N],
        dy: [&Buf; N],
        d_weights: [&mut Buf; N],
    ) -> Result<Buf> {
        let mut dx = self.matrix(x.rows, x.cols)?;
        let of_weight = weights.iter().map(|w| linear::weight_gradient_scratch(&self.core, x.rows, w.rows, w.cols));
        let mut scratch = self.block(of_weight.max().unwrap_or(0).max(linear::scratch_len()))?;
        let _span = verb("project_backward", work::linear_backward(x.rows, x.cols, weights.iter().map(|w| w.rows).sum()));
        let packs = all(weights.map(|w| self.pack(&self.core, w, Side::Backward)))?;
        if !self.is_planning() {
            let parts: [linear::Back; N] = std::array::from_fn(|i| linear::Back { dy: dy[i].data(), weight: packs[i].panels() });
            linear::input_gradient(&self.core, &parts, x.cols, dx.data_mut(), &mut scratch);
            for (dy, dw) in dy.into_iter().zip(d_weights) {
                let (rows, cols) = (dw.rows, dw.cols);
                linear::weight_gradient(&self.core, x.data(), dy.data(), rows, cols, dw.data_mut(), &mut scratch);
            }
        }
        Ok(dx)
    }

    fn cca_mix(
        &self,
        rows: &Rows,
        shape: CcaShape,
        x: CcaIn<&Buf>,
        p: CcaParams<&Buf>,
        halo: Option<Halo<&Buf>>,
    ) -> Result<(Qkv<Buf>, cca::Saved)> {
        check_halo(rows, &x, &halo)?;
        let _span = verb("cca_mix", work::cca_mix(rows.tokens(), &shape));
        cca::forward(self, rows, shape, x, p, halo)
    }

    fn cca_mix_backward(
        &self,
        rows: &Rows,
        shape: CcaShape,
        x: CcaIn<&Buf>,
        p: CcaParams<&Buf>,
        halo: Option<Halo<&Buf>>,
        saved: &cca::Saved,
        d: Qkv<&Buf>,
        g: CcaParams<&mut Buf>,
    ) -> Result<(CcaIn<Buf>, Option<Halo<Buf>>)> {
        check_halo(rows, &x, &halo)?;
        let _span = verb("cca_mix_backward", work::cca_mix_backward(rows.tokens(), &shape));
        cca::backward(self, rows, shape, x, p, halo, saved, d, g)
    }

    fn causal_attention(&self, rows: &Rows, shape: AttentionShape, x: Qkv<&Buf>) -> Result<(Buf, Block<f32>)> {
        check_keys(rows, &x)?;
        let mut out = self.matrix(x.q.rows, x.q.cols)?;
        let mut lse = self.block(x.q.rows * shape.num_query_heads)?;
        let mut scratch = self.block(attention::forward_scratch(&self.core, rows, shape))?;
        let _span = verb("causal_attention", work::attention(attended(rows, &shape), &shape));
        if !self.is_planning() {
            attention::forward(&self.core, rows, shape, qkv(x), out.data_mut(), &mut lse, &mut scratch);
        }
        Ok((out, lse))
    }

    fn causal_attention_backward(
        &self,
        rows: &Rows,
        shape: AttentionShape,
        x: Qkv<&Buf>,
        out: &Buf,
        saved: &Block<f32>,
        d_out: &Buf,
    ) -> Result<Qkv<Buf>> {
        ensure!(rows.past == 0, "attention has a backward only without a cache");
        check_keys(rows, &x)?;
        let (q_dim, kv_dim) = (x.q.cols, x.k.cols);
        let mut d =
            Qkv { q: self.matrix(x.q.rows, q_dim)?, k: self.matrix(x.k.rows, kv_dim)?, v: self.matrix(x.v.rows, kv_dim)? };
        let mut scratch = self.block(attention::backward_scratch(&self.core, rows, shape))?;
        let _span = verb("causal_attention_backward", work::attention_backward(attended(rows, &shape), &shape));
        if !self.is_planning() {
            let grads = Qkv { q: d.q.data_mut(), k: d.k.data_mut(), v: d.v.data_mut() };
            attention::backward(&self.core, rows, shape, qkv(x), out.data(), saved, d_out.data(), grads, &mut scratch);
        }
        Ok(d)
    }

    fn cca_mix_tree(
        &self,
        tree: &Tree,
        shape: CcaShape,
        x: CcaIn<&Buf>,
        p: CcaParams<&Buf>,
        halo: Halo<&Buf>,
    ) -> Result<Qkv<Buf>> {
        ensure!(tree.tokens() == x.q.rows, "a tree of {} rows got {}", tree.tokens(), x.q.rows);
        ensure!(
            halo.q.rows == halo.k.rows && halo.q.rows == 2 * halo.v_delayed.rows,
            "a halo of {}, {} and {} rows",
            halo.q.rows,
            halo.k.rows,
            halo.v_delayed.rows
        );
        let _span = verb("cca_mix", work::cca_mix(tree.tokens(), &shape));
        Ok(cca::forward(self, &Rows::of_tree(tree), shape, x, p, Some(halo))?.0)
    }

    fn tree_attention(&self, tree: &Tree, shape: AttentionShape, x: Qkv<&Buf>) -> Result<Buf> {
        ensure!(tree.tokens() == x.q.rows && x.k.rows == x.v.rows, "a tree of {} rows got {}", tree.tokens(), x.q.rows);
        tree.check(usize::MAX, x.k.rows)?;
        let mut out = self.matrix(x.q.rows, x.q.cols)?;
        let mut scratch = self.block(attention::tree_scratch(&self.core, shape))?;
        let keys = tree.segments.iter().map(|s| s.position + s.rows.len()).sum();
        let _span = verb("causal_attention", work::attention(work::Attended::tree(tree.tokens(), keys, tree.pairs()), &shape));
        if !self.is_planning() {
            attention::tree(&self.core, tree, shape, qkv(x), out.data_mut(), &mut scratch);
        }
        Ok(out)
    }

    fn route(
        &self,
        rows: &Rows,
        h: &Buf,
        prev: Option<&Buf>,
        p: RouterParams<&Buf>,
        balancing_biases: &Buf,
        norm_eps: f64,
        pinned: Option<&PinnedRoutes>,
    ) -> Result<(router::Routing, Buf, router::Saved)> {
        if let Some(PinnedRoutes(routes)) = pinned {
            let classes = balancing_biases.cols;
            ensure!(routes.len() == rows.tokens(), "{} pinned routes for {} tokens", routes.len(), rows.tokens());
            ensure!(routes.iter().all(|c| (*c as usize) < classes), "a pinned route is not below {classes}");
        }
        let _span = verb("route", work::route(rows.tokens(), h.cols, p.norm.cols, balancing_biases.cols));
        router::forward(self, rows, h, prev, p, balancing_biases, norm_eps, pinned)
    }

    fn route_backward(
        &self,
        h: &Buf,
        prev: Option<&Buf>,
        p: RouterParams<&Buf>,
        routing: &router::Routing,
        saved: &router::Saved,
        d_prob: &Buf,
        d_state: Option<&Buf>,
        g: RouterParams<&mut Buf>,
        dh: &mut Buf,
    ) -> Result<Option<Buf>> {
        let _span = verb("route_backward", work::route_backward(h.rows, h.cols, p.norm.cols, p.out.rows));
        router::backward(self, h, prev, p, routing, saved, d_prob, d_state, g, dh)
    }

    fn route_logits(&self, routing: &router::Routing, saved: &router::Saved) -> Result<Buf> {
        self.upload(&saved.logits, saved.logits.len() / routing.counts.len(), routing.counts.len())
    }

    fn route_choices(&self, routing: &router::Routing) -> Result<Vec<u32>> {
        Ok(routing.choice.to_vec())
    }

    fn route_probs(&self, routing: &router::Routing) -> Result<Vec<f32>> {
        Ok(routing.prob.to_vec())
    }

    fn route_counts(&self, routing: &router::Routing) -> Result<Vec<u64>> {
        Ok(routing.counts.clone())
    }

    fn expert_ffn(&self, h: &Buf, routing: &router::Routing, experts: &[Buf], skip: SkipMode) -> Result<(Buf, experts::Saved)> {
        let width = experts.get(1).map_or(0, |down| down.cols);
        let _span = verb("expert_ffn", work::expert_ffn(h.rows, h.cols, width, experts.len() / 2));
        experts::forward(self, h, routing, experts, skip)
    }

    fn expert_ffn_backward(
        &self,
        h: &Buf,
        routing: &router::Routing,
        experts: &[Buf],
        skip: SkipMode,
        saved: &experts::Saved,
        dy: &Buf,
        g: &mut [Buf],
    ) -> Result<(Buf, Buf)> {
        let width = experts.get(1).map_or(0, |down| down.cols);
        let _span = verb("expert_ffn_backward", work::expert_ffn_backward(h.rows, h.cols, width, experts.len() / 2));
        experts::backward(self, h, routing, experts, skip, saved, dy, g)
    }

    fn logits(&self, y: &Buf, head: &Buf) -> Result<Buf> {
        let mut out = self.matrix(y.rows, head.rows)?;
        let mut scratch = self.block(linear::scratch_len())?;
        let _span = verb("logits", work::linear(y.rows, y.cols, head.rows));
        let core = Core::f32();
        let pack = self.pack(&core, head, Side::Forward)?;
        if !self.is_planning() {
            let mut map = [linear::Map { weight: pack.panels(), y: out.data_mut() }];
            linear::forward(&core, y.data(), y.cols, &mut map, &mut scratch);
        }
        Ok(out)
    }

    fn cross_entropy(&self, rows: &Rows, y: &Buf, head: &Buf) -> Result<Loss> {
        check_labels(rows, head)?;
        let labelled = rows.labels.iter().filter(|l| **l >= 0).count();
        let mut scratch = self.block(head::scratch_len(&self.head, y.rows, y.cols, head.rows, false))?;
        let _span = verb("cross_entropy", work::cross_entropy(labelled, y.cols, head.rows));
        let forward = self.pack(&self.head, head, Side::Forward)?;
        if self.is_planning() || labelled == 0 {
            return Ok(Loss::default());
        }
        Ok(head::cross_entropy(&self.head, &rows.labels, y.data(), head.data(), forward.panels(), y.cols, None, &mut scratch))
    }

    fn cross_entropy_backward(&self, rows: &Rows, y: &Buf, head: &Buf, grad_scale: f32, d_head: &mut Buf) -> Result<(Loss, Buf)> {
        check_labels(rows, head)?;
        let mut dy = self.matrix(y.rows, y.cols)?;
        let labelled = rows.labels.iter().filter(|l| **l >= 0).count();
        let mut scratch = self.block(head::scratch_len(&self.head, y.rows, y.cols, head.rows, true))?;
        let _span = verb("cross_entropy_backward", work::cross_entropy_backward(labelled, y.cols, head.rows));
        let [forward, backward] = all([Side::Forward, Side::Backward].map(|side| self.pack(&self.head, head, side)))?;
        if self.is_planning() || labelled == 0 {
            if !self.is_planning() {
                elementwise::clear(dy.data_mut());
            }
            return Ok((Loss::default(), dy));
        }
        let gradient =
            head::Gradient { scale: grad_scale, d_head: d_head.data_mut(), dy: dy.data_mut(), backward: backward.panels() };
        let (labels, y, weights, d) = (&rows.labels, y.data(), head.data(), y.cols);
        let loss = head::cross_entropy(&self.head, labels, y, weights, forward.panels(), d, Some(gradient), &mut scratch);
        Ok((loss, dy))
    }

    fn sq_norm_rows(&self, x: &Buf, rows: Range<usize>) -> Result<f64> {
        Ok(if self.is_planning() { 0.0 } else { optim::sq_norm(&x.data()[rows.start * x.cols..rows.end * x.cols]) })
    }

    fn muon(&self, items: &mut [MuonItem<'_, Buf>], step: MuonStep) -> Result<()> {
        // Rounded f32 products gain nothing over f32 ones.
        let core = if self.core.format == packed::Format::Bf16 { self.core } else { Core::f32() };
        let shapes = || items.iter().map(|i| (i.weight.rows / i.row_blocks, i.weight.cols));
        let mut scratch = self.block(muon::scratch_len(&core, shapes()))?;
        let cost = |i: &MuonItem<Buf>| work::muon(i.weight.rows, i.weight.cols, i.row_blocks, step.ns_steps);
        let _span = verb("muon", items.iter().map(cost).fold(Work::default(), |sum, one| sum + one));
        if self.is_planning() {
            return Ok(());
        }
        let mut items: Vec<muon::Item> = items
            .iter_mut()
            .map(|item| muon::Item {
                rows: item.weight.rows,
                cols: item.weight.cols,
                row_blocks: item.row_blocks,
                weight: item.weight.data_mut(),
                grad: item.grad.data(),
                momentum: item.momentum.data_mut(),
            })
            .collect();
        muon::muon(&core, &mut items, step, &mut scratch);
        Ok(())
    }

    fn adamw_rows(
        &self,
        weight: &mut Buf,
        grad: &Buf,
        rows: Range<usize>,
        m: &mut Buf,
        v: &mut Buf,
        at: usize,
        step: AdamWStep,
    ) -> Result<()> {
        let cols = weight.cols;
        let _span = verb("adamw", work::adamw(rows.len() * cols));
        if !self.is_planning() {
            let (moments, rows) = (at * cols..(at + rows.len()) * cols, rows.start * cols..rows.end * cols);
            let (weight, grad) = (&mut weight.data_mut()[rows.clone()], &grad.data()[rows]);
            optim::adamw(weight, grad, &mut m.data_mut()[moments.clone()], &mut v.data_mut()[moments], step);
        }
        Ok(())
    }
}

fn check_rows(index: &[u32], of: &Buf) -> Result<()> {
    match index.iter().find(|i| **i as usize >= of.rows) {
        None => Ok(()),
        Some(i) => anyhow::bail!("row {i} of a matrix of {} rows", of.rows),
    }
}

fn check_keys(rows: &Rows, x: &Qkv<&Buf>) -> Result<()> {
    let keys = rows.sequences() * rows.keys();
    ensure!(x.k.rows == keys && x.v.rows == keys, "attention over {keys} keys got {} keys, {} values", x.k.rows, x.v.rows);
    Ok(())
}

fn check_halo(rows: &Rows, x: &CcaIn<&Buf>, halo: &Option<Halo<&Buf>>) -> Result<()> {
    if let Some(h) = halo {
        let want = [[rows.batch * 2, x.q.cols], [rows.batch * 2, x.k.cols], [rows.batch, x.v_delayed.cols]];
        let got = [h.q, h.k, h.v_delayed].map(|b| [b.rows, b.cols]);
        ensure!(got == want, "a halo of {got:?}, not of {want:?}");
    }
    Ok(())
}

fn check_labels(rows: &Rows, head: &Buf) -> Result<()> {
    match rows.labels.iter().find(|l| **l >= head.rows as i64) {
        None => Ok(()),
        Some(l) => anyhow::bail!("a label is {l}, but the model's vocabulary ends at {}", head.rows - 1),
    }
}
