//! A second backend, for tests: f64, in the simplest loops, its buffers opaque handles into a store it owns, as a GPU's
//! would be. It shares no code with the CPU backend; what runs on both does not look inside a buffer.

mod attention;
mod cca;
mod evaluation;
mod matrix;
mod moe;
mod optim;
mod rows;
mod toy;

use std::cell::RefCell;
use std::rc::Rc;

use std::ops::Range;

use anyhow::{Result, ensure};
use zaya::model::config::SkipMode;
use zaya::tensor::backend::*;

use self::matrix::Mat;

type Store = Rc<RefCell<Vec<Option<Mat>>>>;

/// A number that only its backend can turn into a matrix. Dropping it gives the place back.
pub struct Handle {
    place: usize,
    store: Store,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.store.borrow_mut()[self.place] = None;
    }
}

#[derive(Default)]
pub struct HandleBackend {
    store: Store,
}

impl HandleBackend {
    /// Buffers that exist at this moment.
    pub fn live_buffers(&self) -> usize {
        self.store.borrow().iter().flatten().count()
    }

    /// The numbers of a buffer, unrounded.
    pub fn read(&self, handle: &Handle) -> Vec<f64> {
        self.get(handle).data
    }

    fn put(&self, matrix: Mat) -> Handle {
        let mut store = self.store.borrow_mut();
        let place = store.iter().position(Option::is_none).unwrap_or(store.len());
        if place == store.len() {
            store.push(None);
        }
        store[place] = Some(matrix);
        Handle { place, store: self.store.clone() }
    }

    fn get(&self, handle: &Handle) -> Mat {
        assert!(Rc::ptr_eq(&self.store, &handle.store), "a buffer of another backend");
        self.store.borrow()[handle.place].clone().expect("a live handle has a matrix")
    }

    fn set(&self, handle: &mut Handle, matrix: Mat) {
        self.store.borrow_mut()[handle.place] = Some(matrix);
    }

    /// Adds to a gradient.
    fn add(&self, handle: &mut Handle, matrix: &Mat) {
        let mut sum = self.get(handle);
        sum.add(matrix);
        self.set(handle, sum);
    }

    fn get_cca(&self, p: &CcaParams<&Handle>) -> CcaParams<Mat> {
        CcaParams {
            conv0_weight: self.get(p.conv0_weight),
            conv0_bias: self.get(p.conv0_bias),
            conv1_weight: self.get(p.conv1_weight),
            conv1_bias: self.get(p.conv1_bias),
            temp: self.get(p.temp),
        }
    }

    fn get_router(&self, p: &RouterParams<&Handle>) -> RouterParams<Mat> {
        RouterParams {
            down_weight: self.get(p.down_weight),
            down_bias: self.get(p.down_bias),
            gamma: p.gamma.map(|g| self.get(g)),
            norm: self.get(p.norm),
            fc1_weight: self.get(p.fc1_weight),
            fc1_bias: self.get(p.fc1_bias),
            fc2_weight: self.get(p.fc2_weight),
            fc2_bias: self.get(p.fc2_bias),
            out: self.get(p.out),
        }
    }
}

fn cca_refs(p: &CcaParams<Mat>) -> CcaParams<&Mat> {
    CcaParams {
        conv0_weight: &p.conv0_weight,
        conv0_bias: &p.conv0_bias,
        conv1_weight: &p.conv1_weight,
        conv1_bias: &p.conv1_bias,
        temp: &p.temp,
    }
}

fn router_refs(p: &RouterParams<Mat>) -> RouterParams<&Mat> {
    RouterParams {
        down_weight: &p.down_weight,
        down_bias: &p.down_bias,
        gamma: p.gamma.as_ref(),
        norm: &p.norm,
        fc1_weight: &p.fc1_weight,
        fc1_bias: &p.fc1_bias,
        fc2_weight: &p.fc2_weight,
        fc2_bias: &p.fc2_bias,
        out: &p.out,
    }
}

impl Backend for HandleBackend {
    type Buf = Handle;
    type Rows = rows::Rows;
    type Routing = moe::Routing;
    type NormSaved = Vec<f64>;
    type CcaSaved = cca::CcaSaved;
    /// Attention computes its weights again.
    type AttentionSaved = ();
    type RouteSaved = moe::RouteSaved;
    /// Experts compute their activations again.
    type ExpertSaved = ();

    fn zeros(&self, rows: usize, cols: usize) -> Result<Handle> {
        Ok(self.put(Mat::zeros(rows, cols)))
    }
    fn upload(&self, data: &[f32], rows: usize, cols: usize) -> Result<Handle> {
        ensure!(data.len() == rows * cols, "{} numbers for [{rows}, {cols}]", data.len());
        Ok(self.put(Mat { rows, cols, data: data.iter().map(|x| f64::from(*x)).collect() }))
    }
    fn download(&self, buf: &Handle) -> Result<Vec<f32>> {
        Ok(self.get(buf).data.iter().map(|x| *x as f32).collect())
    }
    fn shape(&self, buf: &Handle) -> [usize; 2] {
        let m = self.get(buf);
        [m.rows, m.cols]
    }
    fn rows(&self, batch: &Batch) -> Result<rows::Rows> {
        ensure!(batch.chunks.is_none(), "this backend takes whole sequences");
        Ok(rows::Rows::new(batch))
    }

    fn clear(&self, buf: &mut Handle) -> Result<()> {
        let m = self.get(buf);
        self.set(buf, Mat::zeros(m.rows, m.cols));
        Ok(())
    }
    fn add_assign(&self, a: &mut Handle, b: &Handle) -> Result<()> {
        self.add(a, &self.get(b));
        Ok(())
    }
    fn mask_rows(&self, rows: &rows::Rows, x: Handle) -> Result<Handle> {
        let m = self.get(&x);
        Ok(self.put(Mat::from_fn(m.rows, m.cols, |r, c| if rows.valid[r] { m[(r, c)] } else { 0.0 })))
    }
    fn concat_rows(&self, batch: usize, a: &Handle, b: &Handle) -> Result<Handle> {
        let (a, b) = (self.get(a), self.get(b));
        let (na, nb) = (a.rows / batch, b.rows / batch);
        let joined = Mat::from_fn(a.rows + b.rows, a.cols, |r, c| {
            let (sequence, s) = (r / (na + nb), r % (na + nb));
            if s < na { a[(sequence * na + s, c)] } else { b[(sequence * nb + s - na, c)] }
        });
        Ok(self.put(joined))
    }
    fn last_rows(&self, batch: usize, x: &Handle, n: usize) -> Result<Handle> {
        let x = self.get(x);
        let seq = x.rows / batch;
        ensure!(n <= seq, "{n} rows of a sequence of {seq}");
        Ok(self.put(Mat::from_fn(batch * n, x.cols, |r, c| x[(r / n * seq + seq - n + r % n, c)])))
    }

    fn embed(&self, rows: &rows::Rows, table: &Handle) -> Result<Handle> {
        let table = self.get(table);
        Ok(self.put(Mat::from_fn(rows.tokens(), table.cols, |r, c| table[(rows.ids[r] as usize, c)])))
    }
    fn embed_backward(&self, rows: &rows::Rows, dy: &Handle, pad: Option<u32>, d_table: &mut Handle) -> Result<()> {
        let (dy, mut grad) = (self.get(dy), self.get(d_table));
        for (r, id) in rows.ids.iter().enumerate().filter(|(_, id)| Some(**id) != pad) {
            (0..dy.cols).for_each(|c| grad[(*id as usize, c)] += dy[(r, c)]);
        }
        self.set(d_table, grad);
        Ok(())
    }
    fn affine(&self, x: &Handle, scale: &Handle, bias: &Handle) -> Result<Handle> {
        let (x, scale, bias) = (self.get(x), self.get(scale), self.get(bias));
        Ok(self.put(Mat::from_fn(x.rows, x.cols, |r, c| (x[(r, c)] + bias[(0, c)]) * scale[(0, c)])))
    }
    fn affine_backward(
        &self,
        x: &Handle,
        scale: &Handle,
        bias: &Handle,
        dy: &Handle,
        d_scale: &mut Handle,
        d_bias: &mut Handle,
    ) -> Result<Handle> {
        let (x, scale, bias, dy) = (self.get(x), self.get(scale), self.get(bias), self.get(dy));
        let dx = Mat::from_fn(x.rows, x.cols, |r, c| dy[(r, c)] * scale[(0, c)]);
        self.add(d_bias, &dx.column_sums());
        self.add(d_scale, &Mat::from_fn(x.rows, x.cols, |r, c| dy[(r, c)] * (x[(r, c)] + bias[(0, c)])).column_sums());
        Ok(self.put(dx))
    }
    fn residual_scale(&self, branch: &Handle, stream: &Handle, p: Merge<&Handle>) -> Result<Handle> {
        let mut sum = self.affine(branch, p.branch_scale, p.branch_bias)?;
        self.add(&mut sum, &self.get(&self.affine(stream, p.stream_scale, p.stream_bias)?));
        Ok(sum)
    }
    fn residual_scale_backward(
        &self,
        branch: &Handle,
        stream: &Handle,
        p: Merge<&Handle>,
        dy: &Handle,
        g: Merge<&mut Handle>,
    ) -> Result<(Handle, Handle)> {
        Ok((
            self.affine_backward(branch, p.branch_scale, p.branch_bias, dy, g.branch_scale, g.branch_bias)?,
            self.affine_backward(stream, p.stream_scale, p.stream_bias, dy, g.stream_scale, g.stream_bias)?,
        ))
    }

    fn rms_norm(&self, x: &Handle, weight: &Handle, eps: f64) -> Result<(Handle, Vec<f64>)> {
        let x = self.get(x);
        let inverse = matrix::inverse_rms(&x, eps);
        Ok((self.put(matrix::rms_norm(&x, &self.get(weight), &inverse)), inverse))
    }
    fn rms_norm_backward(
        &self,
        x: &Handle,
        weight: &Handle,
        saved: &Vec<f64>,
        dy: &Handle,
        d_weight: &mut Handle,
    ) -> Result<Handle> {
        let (dx, dw) = matrix::rms_norm_backward(&self.get(x), &self.get(weight), saved, &self.get(dy));
        self.add(d_weight, &dw);
        Ok(self.put(dx))
    }
    fn linear(&self, x: &Handle, weight: &Handle) -> Result<Handle> {
        Ok(self.put(self.get(x).times(&self.get(weight).transposed())))
    }
    fn linear_backward(&self, x: &Handle, weight: &Handle, dy: &Handle, d_weight: &mut Handle) -> Result<Handle> {
        let dy = self.get(dy);
        self.add(d_weight, &dy.transposed().times(&self.get(x)));
        Ok(self.put(dy.times(&self.get(weight))))
    }

    fn cca_mix(
        &self,
        rows: &rows::Rows,
        shape: CcaShape,
        x: CcaIn<&Handle>,
        p: CcaParams<&Handle>,
        halo: Option<Halo<&Handle>>,
    ) -> Result<(Qkv<Handle>, cca::CcaSaved)> {
        let (q, k) = (self.get(x.q), self.get(x.k));
        let (current, delayed) = (self.get(x.v_current), self.get(x.v_delayed));
        let halo = halo.map(|h| Halo { q: self.get(h.q), k: self.get(h.k), v_delayed: self.get(h.v_delayed) });
        let halo = halo.as_ref().map(|h| Halo { q: &h.q, k: &h.k, v_delayed: &h.v_delayed });
        let x = CcaIn { q: &q, k: &k, v_current: &current, v_delayed: &delayed };
        let (out, saved) = cca::cca_mix(rows, shape, x, cca_refs(&self.get_cca(&p)), halo);
        Ok((Qkv { q: self.put(out.q), k: self.put(out.k), v: self.put(out.v) }, saved))
    }
    fn cca_mix_backward(
        &self,
        rows: &rows::Rows,
        shape: CcaShape,
        x: CcaIn<&Handle>,
        p: CcaParams<&Handle>,
        halo: Option<Halo<&Handle>>,
        saved: &cca::CcaSaved,
        d: Qkv<&Handle>,
        g: CcaParams<&mut Handle>,
    ) -> Result<(CcaIn<Handle>, Option<Halo<Handle>>)> {
        ensure!(halo.is_none(), "this backend has no gradients of a halo");
        let (q, k) = (self.get(x.q), self.get(x.k));
        let (current, delayed) = (self.get(x.v_current), self.get(x.v_delayed));
        let x = CcaIn { q: &q, k: &k, v_current: &current, v_delayed: &delayed };
        let (dq, dk, dv) = (self.get(d.q), self.get(d.k), self.get(d.v));
        let d = Qkv { q: &dq, k: &dk, v: &dv };
        let (dx, grads) = cca::cca_mix_backward(rows, shape, x, cca_refs(&self.get_cca(&p)), saved, d);
        self.add(g.conv0_weight, &grads.conv0_weight);
        self.add(g.conv0_bias, &grads.conv0_bias);
        self.add(g.conv1_weight, &grads.conv1_weight);
        self.add(g.conv1_bias, &grads.conv1_bias);
        self.add(g.temp, &grads.temp);
        let (v_current, v_delayed) = (self.put(dx.v_current), self.put(dx.v_delayed));
        Ok((CcaIn { q: self.put(dx.q), k: self.put(dx.k), v_current, v_delayed }, None))
    }
    fn causal_attention(&self, rows: &rows::Rows, shape: AttentionShape, x: Qkv<&Handle>) -> Result<(Handle, ())> {
        let (q, k, v) = (self.get(x.q), self.get(x.k), self.get(x.v));
        Ok((self.put(attention::causal_attention(rows, shape, Qkv { q: &q, k: &k, v: &v })), ()))
    }
    fn causal_attention_backward(
        &self,
        rows: &rows::Rows,
        shape: AttentionShape,
        x: Qkv<&Handle>,
        _out: &Handle,
        _saved: &(),
        d_out: &Handle,
    ) -> Result<Qkv<Handle>> {
        let (q, k, v) = (self.get(x.q), self.get(x.k), self.get(x.v));
        let x = Qkv { q: &q, k: &k, v: &v };
        let g = attention::causal_attention_backward(rows, shape, x, &self.get(d_out));
        Ok(Qkv { q: self.put(g.q), k: self.put(g.k), v: self.put(g.v) })
    }

    fn route(
        &self,
        rows: &rows::Rows,
        h: &Handle,
        prev: Option<&Handle>,
        p: RouterParams<&Handle>,
        balancing_biases: &Handle,
        norm_eps: f64,
        pinned: Option<&PinnedRoutes>,
    ) -> Result<(moe::Routing, Handle, moe::RouteSaved)> {
        let (h, prev, biases) = (self.get(h), prev.map(|x| self.get(x)), self.get(balancing_biases));
        let p = self.get_router(&p);
        let (routing, state, saved) = moe::route(rows, &h, prev.as_ref(), router_refs(&p), &biases, norm_eps, pinned);
        Ok((routing, self.put(state), saved))
    }
    fn route_backward(
        &self,
        h: &Handle,
        prev: Option<&Handle>,
        p: RouterParams<&Handle>,
        routing: &moe::Routing,
        saved: &moe::RouteSaved,
        d_prob: &Handle,
        d_state: Option<&Handle>,
        g: RouterParams<&mut Handle>,
        into: &mut Handle,
    ) -> Result<Option<Handle>> {
        let (h, prev, d_prob) = (self.get(h), prev.map(|x| self.get(x)), self.get(d_prob));
        let (p, d_state) = (self.get_router(&p), d_state.map(|x| self.get(x)));
        let (dh, d_prev, grads) =
            moe::route_backward(&h, prev.as_ref(), router_refs(&p), routing, saved, &d_prob, d_state.as_ref());
        self.add(g.down_weight, &grads.down_weight);
        self.add(g.down_bias, &grads.down_bias);
        if let (Some(into), Some(grad)) = (g.gamma, &grads.gamma) {
            self.add(into, grad);
        }
        self.add(g.norm, &grads.norm);
        self.add(g.fc1_weight, &grads.fc1_weight);
        self.add(g.fc1_bias, &grads.fc1_bias);
        self.add(g.fc2_weight, &grads.fc2_weight);
        self.add(g.fc2_bias, &grads.fc2_bias);
        self.add(g.out, &grads.out);
        self.add(into, &dh);
        Ok(d_prev.map(|d| self.put(d)))
    }
    fn route_logits(&self, _routing: &moe::Routing, saved: &moe::RouteSaved) -> Result<Handle> {
        Ok(self.put(saved.logits.clone()))
    }
    fn route_choices(&self, routing: &moe::Routing) -> Result<Vec<u32>> {
        Ok(routing.choice.clone())
    }
    fn route_probs(&self, routing: &moe::Routing) -> Result<Vec<f32>> {
        Ok(routing.prob.iter().map(|p| *p as f32).collect())
    }
    fn route_counts(&self, routing: &moe::Routing) -> Result<Vec<u64>> {
        Ok(routing.counts.clone())
    }
    fn expert_ffn(&self, h: &Handle, routing: &moe::Routing, experts: &[Handle], skip: SkipMode) -> Result<(Handle, ())> {
        let experts: Vec<Mat> = experts.iter().map(|e| self.get(e)).collect();
        Ok((self.put(moe::expert_ffn(&self.get(h), routing, &experts, skip)), ()))
    }
    fn expert_ffn_backward(
        &self,
        h: &Handle,
        routing: &moe::Routing,
        experts: &[Handle],
        skip: SkipMode,
        _saved: &(),
        dy: &Handle,
        g: &mut [Handle],
    ) -> Result<(Handle, Handle)> {
        let experts: Vec<Mat> = experts.iter().map(|e| self.get(e)).collect();
        let (dh, d_prob, grads) = moe::expert_ffn_backward(&self.get(h), routing, &experts, skip, &self.get(dy));
        g.iter_mut().zip(&grads).for_each(|(into, grad)| self.add(into, grad));
        Ok((self.put(dh), self.put(d_prob)))
    }

    fn logits(&self, y: &Handle, head: &Handle) -> Result<Handle> {
        self.linear(y, head)
    }
    fn cross_entropy(&self, rows: &rows::Rows, y: &Handle, head: &Handle) -> Result<Loss> {
        let probs = matrix::softmax(&self.get(&self.logits(y, head)?));
        let labelled = || rows.labels.iter().enumerate().filter(|(_, l)| **l >= 0);
        let sum = labelled().map(|(r, l)| -probs[(r, *l as usize)].ln()).sum();
        Ok(Loss { sum, count: labelled().count() as u64 })
    }
    fn cross_entropy_backward(
        &self,
        rows: &rows::Rows,
        y: &Handle,
        head: &Handle,
        grad_scale: f32,
        d_head: &mut Handle,
    ) -> Result<(Loss, Handle)> {
        let loss = self.cross_entropy(rows, y, head)?;
        let probs = matrix::softmax(&self.get(&self.logits(y, head)?));
        let d_logits = Mat::from_fn(probs.rows, probs.cols, |r, c| {
            let counted = if rows.labels[r] >= 0 { f64::from(grad_scale) } else { 0.0 };
            counted * (probs[(r, c)] - if rows.labels[r] == c as i64 { 1.0 } else { 0.0 })
        });
        self.add(d_head, &d_logits.transposed().times(&self.get(y)));
        Ok((loss, self.put(d_logits.times(&self.get(head)))))
    }

    fn sq_norm_rows(&self, x: &Handle, rows: Range<usize>) -> Result<f64> {
        let x = self.get(x);
        Ok(x.data[rows.start * x.cols..rows.end * x.cols].iter().map(|v| v * v).sum())
    }
    fn muon(&self, items: &mut [MuonItem<'_, Handle>], step: MuonStep) -> Result<()> {
        for item in items {
            let (mut weight, mut momentum) = (self.get(item.weight), self.get(item.momentum));
            optim::muon(&mut weight, &self.get(item.grad), &mut momentum, item.row_blocks, step);
            self.set(item.weight, weight);
            self.set(item.momentum, momentum);
        }
        Ok(())
    }
    fn adamw_rows(
        &self,
        weight: &mut Handle,
        grad: &Handle,
        rows: Range<usize>,
        m: &mut Handle,
        v: &mut Handle,
        at: usize,
        step: AdamWStep,
    ) -> Result<()> {
        let (mut w, mut first, mut second) = (self.get(weight), self.get(m), self.get(v));
        optim::adamw_rows(&mut w, &self.get(grad), rows, &mut first, &mut second, at, step);
        self.set(weight, w);
        self.set(m, first);
        self.set(v, second);
        Ok(())
    }
}
