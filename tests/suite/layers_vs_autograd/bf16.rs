//! The CPU backend in bf16: it rounds what the reference rounds, and nothing else.

use candle_core::{DType, Device, Tensor};
use zaya::model::config::SkipMode;
use zaya::model::reference::{cca, moe, ops, sequence::Sequences};
use zaya::tensor::Backend;
use zaya::tensor::backend::{CcaShape, PinnedRoutes, Precision};
use zaya::tensor::cpu::Cpu;

use super::cca::{Case, cca_in, cca_params};
use super::harness::{Exact, Input, Rng, Rows, assert_buf, assert_close, host, random_batch};

/// Operands are rounded exactly alike; sums are f32 here and f64 there.
const SAME_OPERANDS: f64 = 1e-6;
/// One operand rounded the other way changes its row by about this much at most.
const ONE_OTHER_OPERAND: f64 = 2e-2;

fn cpu() -> Cpu {
    Cpu::new(Precision::Bf16)
}

/// Where operands are themselves computed, one in thousands falls on the other side of a rounding boundary: all rows but
/// two must have had the same operands, and those two nearly.
fn assert_rows(what: &str, b: &Cpu, got: &<Cpu as Backend>::Buf, want: &Tensor) {
    let cols = b.shape(got)[1];
    let (got, want) = (b.read(got), host(want));
    let mut errors: Vec<f64> = got.chunks(cols).zip(want.chunks(cols)).map(|(got, want)| distance(got, want)).collect();
    errors.sort_by(f64::total_cmp);
    let flipped = errors.len().min(2);
    let (same, others) = errors.split_at(errors.len() - flipped);
    assert!(same.iter().all(|e| *e < 10.0 * SAME_OPERANDS), "{what}: {errors:?}");
    assert!(others.iter().all(|e| *e < ONE_OTHER_OPERAND), "{what}: {errors:?}");
}

fn distance(got: &[f64], want: &[f64]) -> f64 {
    let size = want.iter().map(|w| w * w).sum::<f64>().sqrt();
    got.iter().zip(want).map(|(g, w)| (g - w).powi(2)).sum::<f64>().sqrt() / size
}

fn rounded(x: &Input) -> Input {
    Input::new(x.rows, x.cols, x.values.iter().map(|v| half::bf16::from_f32(*v).to_f32()).collect())
}

/// Forward, and both products of the backward, of rounded operands.
#[test]
fn linear() {
    let (b, rng) = (cpu(), &mut Rng::new(50_000));
    let [x, w, dy] = [(33, 65), (19, 65), (33, 19)].map(|(rows, cols)| Input::random(rng, rows, cols, 0.0, 1.0));
    let [rx, rw, rdy] = [&x, &w, &dy].map(|i| rounded(i).var);
    let want = ops::linear(&x.var, &w.var, Precision::Bf16).unwrap();
    let plain = ops::linear(&x.var, &w.var, Precision::F32).unwrap();
    assert_close("the reference", &host(&want), &host(&rx.matmul(&rw.t().unwrap()).unwrap()), 1e-12);
    let (xb, wb) = (x.upload(&b), w.upload(&b));
    let y = b.linear(&xb, &wb).unwrap();
    assert_buf("y", &b, &y, &want, SAME_OPERANDS);
    let change: f64 = b.read(&y).iter().zip(host(&plain)).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    assert!(change > 1e-3, "bf16 must round");
    let mut dw = b.zeros(w.rows, w.cols).unwrap();
    let dx = b.linear_backward(&xb, &wb, &dy.upload(&b), &mut dw).unwrap();
    assert_buf("dx", &b, &dx, &rdy.matmul(&rw).unwrap(), SAME_OPERANDS);
    assert_buf("dw", &b, &dw, &rdy.t().unwrap().matmul(&rx).unwrap(), SAME_OPERANDS);
}

#[test]
fn cca_mix() {
    let (b, rng) = (cpu(), &mut Rng::new(51_000));
    let shape = CcaShape { num_query_heads: 4, num_kv_heads: 2, head_dim: 8, rotary_dim: 4, rope_theta: 10_000.0 };
    let batch = random_batch(rng, 2, 11, 5, Rows::Ragged);
    let case = Case::new(rng, shape, batch);
    let x = [0, 1, 2, 3].map(|i: usize| case.x[i].shaped((2, 11, case.x[i].cols)));
    let channels = case.p[1].cols;
    let p = [
        case.p[0].shaped((channels, 2)),
        case.p[1].vector(),
        case.p[2].shaped((channels, 8, 2)),
        case.p[3].vector(),
        case.p[4].vector(),
    ];
    let sequences = Sequences::new(&case.batch, DType::F64, &Device::Cpu).unwrap();
    let want = cca::cca_mix(&sequences, shape, cca_in(&x), cca_params(&p), Precision::Bf16).unwrap();
    let rows = b.rows(&case.batch).unwrap();
    let (x, p) = ([0, 1, 2, 3].map(|i: usize| case.x[i].upload(&b)), [0, 1, 2, 3, 4].map(|i: usize| case.p[i].upload(&b)));
    let (got, _) = b.cca_mix(&rows, shape, cca_in(&x), cca_params(&p), None).unwrap();
    assert_rows("q", &b, &got.q, &want.q_rotated);
    assert_rows("k", &b, &got.k, &want.k_rotated);
    assert_buf("v", &b, &got.v, &want.v, SAME_OPERANDS);
}

#[test]
fn router_and_experts() {
    let (b, rng) = (cpu(), &mut Rng::new(52_000));
    let (tokens, d, r, experts, width) = (40, 24, 12, 3, 16);
    let case = super::moe::Case::new(rng, tokens, [d, r, experts, width], true, SkipMode::Identity);
    let routes = PinnedRoutes((0..tokens as u32).map(|t| t % 4).collect());
    let (want, out) = case.reference(Some(&routes), Precision::Bf16);
    let rows = b.rows(&random_batch(rng, 1, tokens, 5, Rows::Plain)).unwrap();
    let (h, biases) = (case.h.upload(&b), case.biases.upload(&b));
    let p = case.upload_params(&b);
    let (routing, state, saved) =
        b.route(&rows, &h, None, super::moe::params(&p, true), &biases, case.eps, Some(&routes)).unwrap();
    assert_buf("state", &b, &state, &want.state, SAME_OPERANDS);
    assert_rows("logits", &b, &b.route_logits(&routing, &saved).unwrap(), &want.logits);
    let matrices: Vec<_> = case.experts.iter().map(|e| e.upload(&b)).collect();
    let (got, _) = b.expert_ffn(&h, &routing, &matrices, case.skip).unwrap();
    assert_rows("experts", &b, &got, &out);
    let plain: moe::Route = case.reference(Some(&routes), Precision::F32).0;
    assert_ne!(host(&plain.logits), host(&want.logits));
}
