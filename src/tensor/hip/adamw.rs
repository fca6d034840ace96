//! AdamW (spec 3.3): `kernels/adamw.zk.cpp`, one pass over weight, gradient and both moments.

use std::ops::Range;
use std::ptr::null_mut;

use anyhow::{Result, ensure};

use super::host::copy_rows;
use super::product::{KeptHalf, WORK_ITEMS};
use super::{Buf, Hip, Kind};
use crate::tensor::backend::AdamWStep;

/// Numbers of a workgroup.
const CHUNK: usize = 4 * WORK_ITEMS as usize;
/// Bytes at whose multiples the kernel's numbers begin.
const ALIGNMENT: usize = 16;

/// Updates `rows` of a weight, whose moments are the rows of `m` and `v` from `at` on.
#[allow(clippy::too_many_arguments)]
pub fn update(
    hip: &Hip,
    weight: &mut Buf,
    grad: &Buf,
    rows: Range<usize>,
    m: &mut Buf,
    v: &mut Buf,
    at: usize,
    step: AdamWStep,
) -> Result<()> {
    let cols = weight.cols();
    ensure!(
        [grad.rows(), grad.cols(), m.cols(), v.cols()] == [weight.rows(), cols, cols, cols]
            && rows.end <= weight.rows()
            && at + rows.len() <= m.rows().min(v.rows()),
        "rows {rows:?} of {} x {cols} with a gradient of {} x {} and moments of {} x {}, {} x {} from row {at} on",
        weight.rows(),
        grad.rows(),
        grad.cols(),
        m.rows(),
        m.cols(),
        v.rows(),
        v.cols()
    );
    ensure!([&*weight, grad, m, v].iter().all(|x| x.kind() == Kind::F32), "weights, their gradients and their moments are f32");
    let n = rows.len() * cols;
    if n == 0 {
        return Ok(());
    }
    // A part that changes leaves the rest of the copy as it was, but whoever updates the other rows makes a new one.
    let mut half = (rows.len() == weight.rows()).then(|| KeptHalf::take(weight));
    let half_at = half.as_mut().map_or(null_mut(), KeptHalf::at_mut);
    weight.at_mut();
    let (w, g, m, v) = (weight.row(rows.start).cast_mut(), grad.row(rows.start), m.row(at).cast_mut(), v.row(at).cast_mut());
    if [w.cast_const(), g, m, v].iter().all(|p| (*p as usize).is_multiple_of(ALIGNMENT)) {
        queue(hip, [w, g.cast_mut(), m, v], half_at, n, step)?;
    } else {
        off_alignment(hip, [w, g.cast_mut(), m, v], half_at, n, step)?;
    }
    half.map_or(Ok(()), |half| half.put_back(weight))
}

/// Of rows that do not begin where the kernel wants them to: by way of copies that do.
fn off_alignment(hip: &Hip, places: [*mut f32; 4], half: *mut f32, n: usize, step: AdamWStep) -> Result<()> {
    let copy = |to: *mut f32, from: *const f32| copy_rows(hip, to, from, n * Kind::F32.bytes());
    let mut copies = [hip.f32s(1, n)?, hip.f32s(1, n)?, hip.f32s(1, n)?, hip.f32s(1, n)?];
    let aligned = copies.each_mut().map(Buf::at_mut);
    for (to, from) in aligned.iter().zip(places) {
        copy(*to, from)?;
    }
    queue(hip, aligned, half, n, step)?;
    // All but the gradient.
    for i in [0, 2, 3] {
        copy(places[i], aligned[i])?;
    }
    Ok(())
}

/// `places`: weight, gradient and both moments.
fn queue(hip: &Hip, places: [*mut f32; 4], half: *mut f32, n: usize, s: AdamWStep) -> Result<()> {
    let [w, g, m, v] = places;
    // Powers in f64: 0.999^t loses its digits in f32 long before a run ends.
    let correct = |beta: f32| (1.0 - f64::from(beta).powf(s.t as f64)) as f32;
    let keep = 1.0 - s.lr * s.weight_decay;
    launch!(
        hip, "adamw", [n.div_ceil(CHUNK)], WORK_ITEMS;
        w, g, m, v, half, n as i64, s.lr, s.beta1, s.beta2, s.eps, keep, correct(s.beta1), correct(s.beta2), s.grad_scale,
    )
}
