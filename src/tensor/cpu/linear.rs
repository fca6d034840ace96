//! Linear maps. In bf16 mode both operands are rounded to bfloat16, and sums are taken in f32.

use super::gemm::{Target, View, matmul};
use super::math::round_bf16;

/// Calls `f` with the operands as they enter the product.
fn with_operands<R>(bf16: bool, a: &[f32], b: &[f32], f: impl FnOnce(&[f32], &[f32]) -> R) -> R {
    if bf16 { f(&round_bf16(a), &round_bf16(b)) } else { f(a, b) }
}

/// `x wᵀ`: x `[T, i]`, w `[o, i]`.
pub fn forward(x: &[f32], w: &[f32], i: usize, o: usize, bf16: bool) -> Vec<f32> {
    let tokens = x.len() / i;
    let mut y = vec![0.0; tokens * o];
    with_operands(bf16, x, w, |x, w| {
        matmul(tokens, o, i, View::rows(x, i), View::transposed(w, i), Target::rows(&mut y, o), false);
    });
    y
}

/// `dw += dyᵀ x`
pub fn add_weight_gradient(x: &[f32], dy: &[f32], dw: &mut [f32], i: usize, o: usize, bf16: bool) {
    let tokens = x.len() / i;
    with_operands(bf16, x, dy, |x, dy| {
        matmul(o, i, tokens, View::transposed(dy, o), View::rows(x, i), Target::rows(dw, i), true);
    });
}

/// `dy w`
pub fn input_gradient(w: &[f32], dy: &[f32], i: usize, o: usize, bf16: bool) -> Vec<f32> {
    let tokens = dy.len() / o;
    let mut dx = vec![0.0; tokens * i];
    with_operands(bf16, dy, w, |dy, w| {
        matmul(tokens, i, o, View::rows(dy, o), View::rows(w, i), Target::rows(&mut dx, i), false);
    });
    dx
}
