//! muon and adamw against the formulas written with candle in f64, and Muon against a run that torch recorded.

use candle_core::{Device, Tensor, safetensors};
use zaya::tensor::backend::{AdamWStep, MuonItem, MuonStep};

use super::harness::{Exact, Input, Rng, assert_buf, assert_close, host, on_every_backend};

on_every_backend!(muon, muon_without_a_gradient, muon_as_torch_has_it, adamw);

fn blend(a: &Tensor, weight: f32, b: &Tensor) -> Tensor {
    let w = f64::from(weight);
    ((a * w).unwrap() + (b * (1.0 - w)).unwrap()).unwrap()
}

/// Five Newton-Schulz steps on a matrix that is at most as tall as wide.
fn newton_schulz(u: &Tensor, steps: usize) -> Tensor {
    let (rows, cols) = u.dims2().unwrap();
    if rows > cols {
        return newton_schulz(&u.t().unwrap().contiguous().unwrap(), steps).t().unwrap();
    }
    let norm = u.sqr().unwrap().sum_all().unwrap().to_scalar::<f64>().unwrap().sqrt();
    let mut x = (u / norm.max(1e-7)).unwrap();
    for _ in 0..steps {
        let a = x.matmul(&x.t().unwrap()).unwrap();
        let b = ((&a * -4.7750).unwrap() + (a.matmul(&a).unwrap() * 2.0315).unwrap()).unwrap();
        x = ((&x * 3.4445).unwrap() + b.matmul(&x).unwrap()).unwrap();
    }
    x
}

/// One step in f64: the new weight and the new momentum.
fn muon_formula(w: &Tensor, g: &Tensor, m: &Tensor, s: MuonStep) -> (Tensor, Tensor) {
    let g = (g * f64::from(s.grad_scale)).unwrap();
    let m = blend(m, s.momentum, &g);
    let update = newton_schulz(&blend(&m, s.momentum, &g), s.ns_steps);
    let (rows, cols) = w.dims2().unwrap();
    let lr = f64::from(s.lr);
    let size = lr * 0.2 * (rows.max(cols) as f64).sqrt();
    let decayed = (w * (1.0 - lr * f64::from(s.weight_decay))).unwrap();
    ((decayed - (update * size).unwrap()).unwrap(), m)
}

const STEP: MuonStep = MuonStep { lr: 0.02, weight_decay: 0.1, momentum: 0.95, ns_steps: 5, grad_scale: 0.5 };

/// Many matrices of many shapes in one call, two steps in a row.
fn muon<B: Exact>(b: &B, tolerance: f64) {
    let rng = &mut Rng::new(30_000);
    let shapes = [(1, 1), (1, 9), (8, 1), (4, 4), (3, 11), (17, 5), (24, 64), (96, 32), (33, 33)];
    let inputs = shapes.map(|(r, c)| [0.3, 1.0, 0.1, 2.0].map(|spread| Input::random(rng, r, c, 0.0, spread)));
    let mut weights: Vec<B::Buf> = inputs.iter().map(|i| i[0].upload(b)).collect();
    let mut momenta: Vec<B::Buf> = inputs.iter().map(|i| i[2].upload(b)).collect();
    let mut want: Vec<(Tensor, Tensor)> = inputs.iter().map(|i| (i[0].var.detach(), i[2].var.detach())).collect();
    for step in [1, 3] {
        let grads: Vec<B::Buf> = inputs.iter().map(|i| i[step].upload(b)).collect();
        let mut items: Vec<MuonItem<'_, B::Buf>> = Vec::new();
        for ((weight, momentum), grad) in weights.iter_mut().zip(&mut momenta).zip(&grads) {
            items.push(MuonItem { weight, grad, momentum, row_blocks: 1 });
        }
        b.muon(&mut items, STEP).unwrap();
        for (i, (w, m)) in want.iter_mut().enumerate() {
            (*w, *m) = muon_formula(w, &inputs[i][step].var.detach(), m, STEP);
            assert_buf(&format!("momentum {:?}", shapes[i]), b, &momenta[i], m, tolerance);
            assert_buf(&format!("weight {:?}", shapes[i]), b, &weights[i], w, tolerance);
        }
    }
}

/// An expert without a token has a zero gradient. With no momentum either, its weights only decay; with momentum, that
/// still moves them.
fn muon_without_a_gradient<B: Exact>(b: &B, tolerance: f64) {
    let rng = &mut Rng::new(31_000);
    let w = Input::random(rng, 6, 9, 0.0, 0.3);
    let (zero, old) = (Input::new(6, 9, vec![0.0; 54]), Input::random(rng, 6, 9, 0.0, 1.0));
    for start in [&zero, &old] {
        let (mut weight, mut momentum) = (w.upload(b), start.upload(b));
        let grad = zero.upload(b);
        b.muon(&mut [MuonItem { weight: &mut weight, grad: &grad, momentum: &mut momentum, row_blocks: 1 }], STEP).unwrap();
        let (want_w, want_m) = muon_formula(&w.var.detach(), &zero.var.detach(), &start.var.detach(), STEP);
        assert_buf("weight", b, &weight, &want_w, tolerance);
        assert_buf("momentum", b, &momentum, &want_m, tolerance);
    }
    let decayed: Vec<f64> =
        w.values.iter().map(|v| f64::from(*v) * (1.0 - f64::from(STEP.lr) * f64::from(STEP.weight_decay))).collect();
    let (mut weight, mut momentum, grad) = (w.upload(b), zero.upload(b), zero.upload(b));
    b.muon(&mut [MuonItem { weight: &mut weight, grad: &grad, momentum: &mut momentum, row_blocks: 1 }], STEP).unwrap();
    assert_close("decay alone", &b.read(&weight), &decayed, tolerance);
}

/// Three steps recorded with torch in f32.
fn muon_as_torch_has_it<B: Exact>(b: &B, _tolerance: f64) {
    let path = std::path::PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny/muon/muon.safetensors");
    let file = safetensors::load(path, &Device::Cpu).unwrap();
    let step = MuonStep { lr: 6e-4, weight_decay: 0.1, momentum: 0.95, ns_steps: 5, grad_scale: 1.0 };
    for shape in ["wide", "tall", "square"] {
        let upload = |name: &str| {
            let t = &file[&format!("{shape}.{name}")];
            let (rows, cols) = t.dims2().unwrap();
            (b.upload(&t.flatten_all().unwrap().to_vec1::<f32>().unwrap(), rows, cols).unwrap(), rows, cols)
        };
        let (mut weight, rows, cols) = upload("w0");
        let mut momentum = b.zeros(rows, cols).unwrap();
        for i in 0..3 {
            let (grad, ..) = upload(&format!("g{i}"));
            b.muon(&mut [MuonItem { weight: &mut weight, grad: &grad, momentum: &mut momentum, row_blocks: 1 }], step).unwrap();
            let want = host(&file[&format!("{shape}.w{}_fp32", i + 1)]);
            assert_close(&format!("{shape} after step {i}"), &b.read(&weight), &want, 1e-5);
        }
    }
}

fn adamw<B: Exact>(b: &B, tolerance: f64) {
    let rng = &mut Rng::new(32_000);
    for (rows, cols) in [(1, 1), (1, 19), (7, 5), (3, 130)] {
        let [w, m, g1, g2] = [0.3, 0.1, 1.0, 2.0].map(|spread| Input::random(rng, rows, cols, 0.0, spread));
        let mut v = Input::random(rng, rows, cols, 0.0, 0.1);
        v = Input::new(rows, cols, v.values.iter().map(|x| x.abs()).collect());
        let (mut wb, mut mb, mut vb) = (w.upload(b), m.upload(b), v.upload(b));
        let (mut w, mut m, mut v) = (w.var.detach(), m.var.detach(), v.var.detach());
        for (t, g) in [(1, &g1), (2, &g2), (1000, &g1)] {
            let s = AdamWStep { lr: 0.01, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, t, grad_scale: 0.25 };
            b.adamw(&mut wb, &g.upload(b), &mut mb, &mut vb, s).unwrap();

            let g = (g.var.detach() * f64::from(s.grad_scale)).unwrap();
            m = blend(&m, s.beta1, &g);
            v = blend(&v, s.beta2, &g.sqr().unwrap());
            let corrected = |x: &Tensor, beta: f32| (x / (1.0 - f64::from(beta).powf(t as f64))).unwrap();
            let lr = f64::from(s.lr);
            let root = (corrected(&v, s.beta2).sqrt().unwrap() + f64::from(s.eps)).unwrap();
            let update = (corrected(&m, s.beta1) / root).unwrap();
            w = ((w * (1.0 - lr * f64::from(s.weight_decay))).unwrap() - (update * lr).unwrap()).unwrap();
            assert_buf("first moment", b, &mb, &m, tolerance);
            assert_buf("second moment", b, &vb, &v, tolerance);
            assert_buf("weight", b, &wb, &w, tolerance);
        }
    }
}
