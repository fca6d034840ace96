//! The CPU backend: plain f32 vectors, one rayon pool (the one it is called in), products on the `gemm` crate.

pub mod attention;
pub mod cca;
pub mod elementwise;
pub mod experts;
pub mod gemm;
pub mod head;
pub mod linear;
pub mod math;
pub mod optim;
pub mod router;
pub mod rows;

use anyhow::{Result, ensure};

use super::backend::*;
pub use rows::Rows;

/// A row-major matrix.
#[derive(Debug, Clone)]
pub struct Buf {
    pub(crate) data: Vec<f32>,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
}

impl Buf {
    fn new(data: Vec<f32>, cols: usize) -> Self {
        let rows = data.len().checked_div(cols).unwrap_or(0);
        debug_assert_eq!(rows * cols, data.len());
        Self { data, rows, cols }
    }
}

#[derive(Debug, Clone, Copy, Default)]
pub struct Cpu {
    bf16: bool,
}

impl Cpu {
    pub fn new(precision: Precision) -> Self {
        Self { bf16: precision == Precision::Bf16 }
    }
}

type Ref<'a> = &'a [f32];

fn cca_in<'a>(x: CcaIn<&'a Buf>) -> CcaIn<Ref<'a>> {
    CcaIn { q: &x.q.data, k: &x.k.data, v_current: &x.v_current.data, v_delayed: &x.v_delayed.data }
}

fn cca_params<'a>(p: CcaParams<&'a Buf>) -> CcaParams<Ref<'a>> {
    CcaParams {
        conv0_weight: &p.conv0_weight.data,
        conv0_bias: &p.conv0_bias.data,
        conv1_weight: &p.conv1_weight.data,
        conv1_bias: &p.conv1_bias.data,
        temp: &p.temp.data,
    }
}

fn qkv<'a>(x: Qkv<&'a Buf>) -> Qkv<Ref<'a>> {
    Qkv { q: &x.q.data, k: &x.k.data, v: &x.v.data }
}

fn merge<'a>(p: Merge<&'a Buf>) -> Merge<Ref<'a>> {
    Merge {
        branch_scale: &p.branch_scale.data,
        branch_bias: &p.branch_bias.data,
        stream_scale: &p.stream_scale.data,
        stream_bias: &p.stream_bias.data,
    }
}

fn router_params<'a>(p: RouterParams<&'a Buf>) -> RouterParams<Ref<'a>> {
    RouterParams {
        down_weight: &p.down_weight.data,
        down_bias: &p.down_bias.data,
        gamma: p.gamma.map(|g| &g.data[..]),
        norm: &p.norm.data,
        fc1_weight: &p.fc1_weight.data,
        fc1_bias: &p.fc1_bias.data,
        fc2_weight: &p.fc2_weight.data,
        fc2_bias: &p.fc2_bias.data,
        out: &p.out.data,
    }
}

fn router_grads(g: RouterParams<&mut Buf>) -> RouterParams<&mut [f32]> {
    RouterParams {
        down_weight: &mut g.down_weight.data,
        down_bias: &mut g.down_bias.data,
        gamma: g.gamma.map(|g| &mut g.data[..]),
        norm: &mut g.norm.data,
        fc1_weight: &mut g.fc1_weight.data,
        fc1_bias: &mut g.fc1_bias.data,
        fc2_weight: &mut g.fc2_weight.data,
        fc2_bias: &mut g.fc2_bias.data,
        out: &mut g.out.data,
    }
}

impl Backend for Cpu {
    type Buf = Buf;
    type Rows = Rows;
    type Routing = router::Routing;
    /// 1 / RMS of each row.
    type NormSaved = Vec<f32>;
    type CcaSaved = cca::Saved;
    type AttentionSaved = attention::Saved;
    type RouteSaved = router::Saved;
    type ExpertSaved = experts::Saved;

    fn zeros(&self, rows: usize, cols: usize) -> Result<Buf> {
        Ok(Buf { data: vec![0.0; rows * cols], rows, cols })
    }

    fn upload(&self, data: &[f32], rows: usize, cols: usize) -> Result<Buf> {
        ensure!(data.len() == rows * cols, "a buffer of {rows} x {cols} got {} numbers", data.len());
        Ok(Buf { data: data.to_vec(), rows, cols })
    }

    fn download(&self, buf: &Buf) -> Result<Vec<f32>> {
        Ok(buf.data.clone())
    }

    fn shape(&self, buf: &Buf) -> [usize; 2] {
        [buf.rows, buf.cols]
    }

    fn rows(&self, batch: &Batch) -> Result<Rows> {
        Rows::new(batch)
    }

    fn clear(&self, buf: &mut Buf) -> Result<()> {
        buf.data.fill(0.0);
        Ok(())
    }

    fn add_assign(&self, a: &mut Buf, b: &Buf) -> Result<()> {
        elementwise::add_parallel(&mut a.data, &b.data);
        Ok(())
    }

    fn mask_rows(&self, rows: &Rows, mut x: Buf) -> Result<Buf> {
        rows::mask_rows(rows, &mut x.data, x.cols);
        Ok(x)
    }

    fn concat_rows(&self, batch: usize, a: &Buf, b: &Buf) -> Result<Buf> {
        Ok(Buf::new(rows::concat_rows(batch, &a.data, &b.data), b.cols))
    }

    fn last_rows(&self, batch: usize, x: &Buf, n: usize) -> Result<Buf> {
        ensure!(n * batch <= x.rows, "the last {n} rows of {batch} sequences were asked of {} rows", x.rows);
        Ok(Buf::new(rows::last_rows(batch, &x.data, n, x.cols), x.cols))
    }

    fn embed(&self, rows: &Rows, table: &Buf) -> Result<Buf> {
        rows::check_ids(&rows.ids, table.rows)?;
        Ok(Buf::new(rows::embed(rows, &table.data, table.cols), table.cols))
    }

    fn embed_backward(&self, rows: &Rows, dy: &Buf, pad: Option<u32>, d_table: &mut Buf) -> Result<()> {
        rows::embed_backward(rows, &dy.data, pad, &mut d_table.data, dy.cols);
        Ok(())
    }

    fn affine(&self, x: &Buf, scale: &Buf, bias: &Buf) -> Result<Buf> {
        let mut y = vec![0.0; x.data.len()];
        elementwise::affine(&x.data, &scale.data, &bias.data, &mut y);
        Ok(Buf::new(y, x.cols))
    }

    fn affine_backward(&self, x: &Buf, scale: &Buf, bias: &Buf, dy: &Buf, d_scale: &mut Buf, d_bias: &mut Buf) -> Result<Buf> {
        let dx = elementwise::affine_backward(&x.data, &scale.data, &bias.data, &dy.data, &mut d_scale.data, &mut d_bias.data);
        Ok(Buf::new(dx, x.cols))
    }

    fn residual_scale(&self, branch: &Buf, stream: &Buf, p: Merge<&Buf>) -> Result<Buf> {
        let mut y = vec![0.0; stream.data.len()];
        elementwise::residual_scale(&branch.data, &stream.data, merge(p), &mut y);
        Ok(Buf::new(y, stream.cols))
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

    fn rms_norm(&self, x: &Buf, weight: &Buf, eps: f64) -> Result<(Buf, Vec<f32>)> {
        let (y, inv) = elementwise::rms_norm(&x.data, &weight.data, eps);
        Ok((Buf::new(y, x.cols), inv))
    }

    fn rms_norm_backward(&self, x: &Buf, weight: &Buf, saved: &Vec<f32>, dy: &Buf, d_weight: &mut Buf) -> Result<Buf> {
        let dx = elementwise::rms_norm_backward(&x.data, &weight.data, saved, &dy.data, &mut d_weight.data);
        Ok(Buf::new(dx, x.cols))
    }

    fn linear(&self, x: &Buf, w: &Buf) -> Result<Buf> {
        Ok(Buf::new(linear::forward(&x.data, &w.data, w.cols, w.rows, self.bf16), w.rows))
    }

    fn linear_backward(&self, x: &Buf, w: &Buf, dy: &Buf, d_weight: &mut Buf) -> Result<Buf> {
        linear::add_weight_gradient(&x.data, &dy.data, &mut d_weight.data, w.cols, w.rows, self.bf16);
        Ok(Buf::new(linear::input_gradient(&w.data, &dy.data, w.cols, w.rows, self.bf16), w.cols))
    }

    fn cca_mix(
        &self,
        rows: &Rows,
        shape: CcaShape,
        x: CcaIn<&Buf>,
        p: CcaParams<&Buf>,
        halo: Option<Halo<&Buf>>,
    ) -> Result<(Qkv<Buf>, cca::Saved)> {
        let (q_dim, kv_dim) = (x.q.cols, x.k.cols);
        let halo = halo.map(|h| Halo { q: &h.q.data[..], k: &h.k.data[..], v_delayed: &h.v_delayed.data[..] });
        let (out, saved) = cca::forward(rows, shape, cca_in(x), cca_params(p), halo, self.bf16);
        Ok((Qkv { q: Buf::new(out.q, q_dim), k: Buf::new(out.k, kv_dim), v: Buf::new(out.v, kv_dim) }, saved))
    }

    fn cca_mix_backward(
        &self,
        rows: &Rows,
        shape: CcaShape,
        x: CcaIn<&Buf>,
        p: CcaParams<&Buf>,
        saved: &cca::Saved,
        d: Qkv<&Buf>,
        g: CcaParams<&mut Buf>,
    ) -> Result<CcaIn<Buf>> {
        let (q_dim, kv_dim) = (x.q.cols, x.k.cols);
        let g = CcaParams {
            conv0_weight: &mut g.conv0_weight.data[..],
            conv0_bias: &mut g.conv0_bias.data[..],
            conv1_weight: &mut g.conv1_weight.data[..],
            conv1_bias: &mut g.conv1_bias.data[..],
            temp: &mut g.temp.data[..],
        };
        let dx = cca::backward(rows, shape, cca_in(x), cca_params(p), saved, qkv(d), g, self.bf16);
        Ok(CcaIn {
            q: Buf::new(dx.q, q_dim),
            k: Buf::new(dx.k, kv_dim),
            v_current: Buf::new(dx.v_current, kv_dim / 2),
            v_delayed: Buf::new(dx.v_delayed, kv_dim / 2),
        })
    }

    fn causal_attention(&self, rows: &Rows, shape: AttentionShape, x: Qkv<&Buf>) -> Result<(Buf, attention::Saved)> {
        let cols = x.q.cols;
        let (out, saved) = attention::forward(rows, shape, qkv(x));
        Ok((Buf::new(out, cols), saved))
    }

    fn causal_attention_backward(
        &self,
        rows: &Rows,
        shape: AttentionShape,
        x: Qkv<&Buf>,
        _out: &Buf,
        saved: &attention::Saved,
        d_out: &Buf,
    ) -> Result<Qkv<Buf>> {
        ensure!(rows.past == 0, "attention has a backward only without a cache");
        let (q_dim, kv_dim) = (x.q.cols, x.k.cols);
        let d = attention::backward(rows, shape, qkv(x), saved, &d_out.data);
        Ok(Qkv { q: Buf::new(d.q, q_dim), k: Buf::new(d.k, kv_dim), v: Buf::new(d.v, kv_dim) })
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
        let width = p.norm.cols;
        let prev = prev.map(|b| &b.data[..]);
        let (routing, state, saved) =
            router::forward(rows, &h.data, prev, router_params(p), &balancing_biases.data, norm_eps, pinned, self.bf16);
        Ok((routing, Buf::new(state, width), saved))
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
    ) -> Result<(Buf, Option<Buf>)> {
        let width = p.norm.cols;
        let (prev, d_state) = (prev.map(|b| &b.data[..]), d_state.map(|b| &b.data[..]));
        let (dh, d_prev) =
            router::backward(&h.data, prev, router_params(p), routing, saved, &d_prob.data, d_state, router_grads(g), self.bf16);
        Ok((Buf::new(dh, h.cols), d_prev.map(|d| Buf::new(d, width))))
    }

    fn route_logits(&self, routing: &router::Routing, saved: &router::Saved) -> Result<Buf> {
        Ok(Buf::new(saved.logits.clone(), routing.counts.len()))
    }

    fn route_choices(&self, routing: &router::Routing) -> Result<Vec<u32>> {
        Ok(routing.choice.clone())
    }

    fn route_probs(&self, routing: &router::Routing) -> Result<Vec<f32>> {
        Ok(routing.prob.clone())
    }

    fn route_counts(&self, routing: &router::Routing) -> Result<Vec<u64>> {
        Ok(routing.counts.clone())
    }

    fn expert_ffn(&self, h: &Buf, routing: &router::Routing, experts: &[Buf], skip: SkipMode) -> Result<(Buf, experts::Saved)> {
        let (y, saved) = experts::forward(&h.data, h.cols, routing, experts, skip, self.bf16);
        Ok((Buf::new(y, h.cols), saved))
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
        let (dh, d_prob) = experts::backward(&h.data, h.cols, routing, experts, skip, saved, &dy.data, g, self.bf16);
        Ok((Buf::new(dh, h.cols), Buf::new(d_prob, 1)))
    }

    fn logits(&self, y: &Buf, head: &Buf) -> Result<Buf> {
        let mut out = vec![0.0; y.rows * head.rows];
        head::logits(&y.data, &head.data, y.cols, &mut out);
        Ok(Buf::new(out, head.rows))
    }

    fn cross_entropy(&self, rows: &Rows, y: &Buf, head: &Buf) -> Result<Loss> {
        check_labels(rows, head)?;
        Ok(head::cross_entropy(rows, &y.data, &head.data, y.cols, None))
    }

    fn cross_entropy_backward(&self, rows: &Rows, y: &Buf, head: &Buf, grad_scale: f32, d_head: &mut Buf) -> Result<(Loss, Buf)> {
        check_labels(rows, head)?;
        let mut dy = vec![0.0; y.data.len()];
        let gradient = head::Gradient { scale: grad_scale, d_head: &mut d_head.data, dy: &mut dy };
        let loss = head::cross_entropy(rows, &y.data, &head.data, y.cols, Some(gradient));
        Ok((loss, Buf::new(dy, y.cols)))
    }

    fn sq_norm(&self, x: &Buf) -> Result<f64> {
        Ok(optim::sq_norm(&x.data))
    }

    fn muon(&self, items: &mut [MuonItem<'_, Buf>], step: MuonStep) -> Result<()> {
        optim::muon(items, step);
        Ok(())
    }

    fn adamw(&self, weight: &mut Buf, grad: &Buf, m: &mut Buf, v: &mut Buf, step: AdamWStep) -> Result<()> {
        optim::adamw(&mut weight.data, &grad.data, &mut m.data, &mut v.data, step);
        Ok(())
    }
}

fn check_labels(rows: &Rows, head: &Buf) -> Result<()> {
    match rows.labels.iter().find(|l| **l >= head.rows as i64) {
        None => Ok(()),
        Some(l) => anyhow::bail!("a label is {l}, but the model's vocabulary ends at {}", head.rows - 1),
    }
}
