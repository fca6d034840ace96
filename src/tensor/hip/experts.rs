//! Top-1 experts (spec 1.6): `kernels/experts_rows.zk.cpp` sorts rows by expert, `kernels/experts.zk.cpp` multiplies them in groups. The
//! host never learns how many rows an expert has.

use std::ptr::null;
use std::sync::Arc;

use anyhow::{Result, ensure};

use super::product::{Places, TILE, WORK_ITEMS, WORKGROUPS};
use super::router::Routing;
use super::rows::address;
use super::{Buf, Hip, Kind, int};
use crate::tensor::backend::SkipMode;

/// Rows that one workgroup of the sort takes, one a work-item.
const CHUNK: usize = WORK_ITEMS as usize;
/// Classes that the sort has room for.
const MOST_CLASSES: usize = 256;
/// Chiplets among which the tiles of a grouped product are dealt: its workgroups are a multiple.
const CHIPLETS: usize = 8;

/// Rows in the order of their classes; rows of one class keep theirs.
pub struct Sorted {
    /// i32 `[T]`: the rows.
    pub order: Buf,
    /// i32 `[E + 2]`: where each class begins in the order.
    pub offsets: Buf,
    /// i32 `[E + 1]`: tiles of rows before each expert's first, and all of them.
    pub first: Buf,
}

/// Sorts rows by class. `choice`: i32 `[T]`, classes 0..=experts, the skip class last.
pub fn sort(hip: &Hip, choice: &Buf, experts: usize) -> Result<Sorted> {
    let (tokens, classes) = (choice.len(), experts + 1);
    ensure!(classes <= MOST_CLASSES, "the HIP kernels sort rows into at most {MOST_CLASSES} classes, not {classes}");
    let chunks = tokens.div_ceil(CHUNK);
    let (mut counts, mut real) = (hip.f32s(chunks, classes)?, hip.f32s(chunks, classes)?);
    let (mut order, mut offsets, mut first) = (hip.f32s(1, tokens)?, hip.f32s(1, classes + 1)?, hip.f32s(1, classes)?);
    let mut real_counts = hip.f32s(1, classes)?;
    launch!(
        hip, "experts_count", [chunks], WORK_ITEMS;
        choice.at(), address(None), counts.at_mut(), real.at_mut(), int(tokens), int(classes),
    )?;
    launch!(
        hip, "experts_plan", [1], WORK_ITEMS;
        counts.at_mut(), real.at(), offsets.at_mut(), real_counts.at_mut(), first.at_mut(), int(chunks), int(classes), int(TILE),
    )?;
    launch!(hip, "experts_place", [chunks], WORK_ITEMS; choice.at(), counts.at(), order.at_mut(), int(tokens), int(classes))?;
    Ok(Sorted { order, offsets, first })
}

/// Gate and up before the activation, bf16 `[T, 2F]`, rows in the order (those of skipped rows unused).
pub struct Saved {
    gate_up: Buf,
}

/// Sizes that all experts share.
#[derive(Clone, Copy)]
struct Shape {
    tokens: usize,
    experts: usize,
    d: usize,
    f: usize,
}

impl Shape {
    fn of(h: &Buf, routing: &Routing, experts: &[Buf]) -> Result<Self> {
        let shape = Self { tokens: h.rows(), experts: routing.experts, d: h.cols(), f: experts.get(1).map_or(0, Buf::cols) };
        let Self { tokens, experts: num, d, f } = shape;
        ensure!(experts.len() == 2 * num, "{} matrices of {num} experts", experts.len());
        ensure!(routing.prob.len() == tokens, "routes of {} rows for {tokens} rows", routing.prob.len());
        for pair in experts.chunks(2) {
            let sizes: Vec<_> = pair.iter().map(|w| [w.rows(), w.cols()]).collect();
            ensure!(sizes == [[2 * f, d], [d, f]], "an expert of width {f} for rows of {d} numbers has matrices {sizes:?}");
        }
        Ok(shape)
    }

    /// Workgroups for tiles with `columns` along an expert's columns: no more than there can be tiles.
    fn groups(&self, columns: usize) -> usize {
        ((self.tokens.div_ceil(TILE) + self.experts) * columns).next_multiple_of(CHIPLETS).min(WORKGROUPS)
    }
}

/// One of the two matrices of every expert.
#[derive(Clone, Copy)]
enum Matrix {
    GateUp = 0,
    Down = 1,
}

/// Those matrices as a grouped product wants them.
struct Matrices {
    base: *mut f32,
    places: Arc<Buf>,
}

impl Matrices {
    fn new(hip: &Hip, addresses: &[usize], kind: Kind) -> Result<Self> {
        let Places { base, offsets } = Places::of(addresses, kind);
        Ok(Self { base, places: hip.inner.products.tables.get(hip, &offsets)? })
    }

    /// Of the experts' weights, in bf16.
    fn weights(hip: &Hip, experts: &[Buf], which: Matrix) -> Result<Self> {
        // The weights keep these copies.
        let halves = experts.iter().skip(which as usize).step_by(2).map(|w| Ok(hip.weight_bf16(w)?.at() as usize));
        Self::new(hip, &halves.collect::<Result<Vec<_>>>()?, Kind::Bf16)
    }

    fn gradients(hip: &Hip, g: &mut [Buf], which: Matrix) -> Result<Self> {
        let places: Vec<_> = g.iter_mut().skip(which as usize).step_by(2).map(|g| g.at_mut() as usize).collect();
        Self::new(hip, &places, Kind::F32)
    }
}

/// Rows of `x` in the order as bf16, times their probabilities where `prob` is given.
fn permuted(hip: &Hip, x: &Buf, routing: &Routing, prob: Option<&Buf>) -> Result<Buf> {
    take(hip, x, &routing.order, x.rows(), Kind::Bf16, prob)
}

/// Row i of the outcome is row `order[i]` of `x`, for the first `n` of `order` (i32), times its probability where `prob` is given. bf16 stays
/// bf16.
pub(super) fn take(hip: &Hip, x: &Buf, order: &Buf, n: usize, kind: Kind, prob: Option<&Buf>) -> Result<Buf> {
    let (name, kind) = match (x.kind(), kind) {
        (Kind::F32, Kind::F32) => ("experts_permute_f32_f32", Kind::F32),
        (Kind::F32, Kind::Bf16) => ("experts_permute_f32_bf16", Kind::Bf16),
        (Kind::Bf16, _) => ("experts_permute_bf16_bf16", Kind::Bf16),
    };
    let mut out = hip.matrix(n, x.cols(), kind)?;
    launch!(hip, name, [n], WORK_ITEMS; x.at(), order.at(), address(prob), out.at_mut(), int(x.cols()))?;
    Ok(out)
}

/// `p_e Expert_e(h)` of each row, f32.
pub fn forward(hip: &Hip, h: &Buf, routing: &Routing, experts: &[Buf], skip: SkipMode) -> Result<(Buf, Saved)> {
    let shape = Shape::of(h, routing, experts)?;
    let Shape { tokens, experts: num, d, f } = shape;
    let (mut gate_up, mut act) = (hip.bf16s(tokens, 2 * f)?, hip.bf16s(tokens, f)?);
    let mut out = hip.f32s(tokens, d)?;
    if num > 0 {
        let x = permuted(hip, h, routing, None)?;
        let w = Matrices::weights(hip, experts, Matrix::GateUp)?;
        // Half of a tile's columns are gates, half are ups.
        let groups = shape.groups(f.div_ceil(TILE / 2));
        launch!(
            hip, "experts_gate_up_bf16", [groups], WORK_ITEMS;
            x.at(), w.base, w.places.at(), routing.offsets.at(), routing.first.at(), gate_up.at_mut(), act.at_mut(),
            int(num), int(d), int(f), int(groups),
        )?;
        let w = Matrices::weights(hip, experts, Matrix::Down)?;
        let groups = shape.groups(d.div_ceil(TILE));
        launch!(
            hip, "experts_down_bf16", [groups], WORK_ITEMS;
            act.at(), w.base, w.places.at(), routing.offsets.at(), routing.first.at(), routing.order.at(), routing.prob.at(),
            out.at_mut(), int(num), int(d), int(f), int(groups),
        )?;
    }
    skip_forward(hip, h, routing, skip, &mut out)?;
    Ok((out, Saved { gate_up }))
}

/// Outputs of rows of the skip class: 0, or the row times its probability.
pub fn skip_forward(hip: &Hip, h: &Buf, routing: &Routing, skip: SkipMode, out: &mut Buf) -> Result<()> {
    let identity = skip == SkipMode::Identity;
    let h = identity.then(|| hip.as_f32(h)).transpose()?;
    let (tokens, d) = (out.rows(), out.cols());
    launch!(
        hip, "experts_skip_forward", [tokens], WORK_ITEMS;
        h.as_ref().map_or(null(), |h| h.at()), routing.order.at(), routing.offsets.at(), routing.prob.at(), out.at_mut(),
        int(routing.experts), int(d), i32::from(identity),
    )
}

/// Gradients of h, f32, and of the chosen probabilities `[T, 1]`.
#[allow(clippy::too_many_arguments)]
pub fn backward(
    hip: &Hip,
    h: &Buf,
    routing: &Routing,
    experts: &[Buf],
    skip: SkipMode,
    saved: &Saved,
    dy: &Buf,
    g: &mut [Buf],
) -> Result<(Buf, Buf)> {
    let shape = Shape::of(h, routing, experts)?;
    let Shape { tokens, experts: num, d, .. } = shape;
    ensure!([dy.rows(), dy.cols()] == [tokens, d], "a gradient of {} x {} for {tokens} x {d} numbers", dy.rows(), dy.cols());
    ensure!(
        g.len() == experts.len()
            && g.iter().zip(experts).all(|(g, w)| (g.rows(), g.cols(), g.kind()) == (w.rows(), w.cols(), Kind::F32)),
        "gradients of {num} experts differ from their weights in shape, or are not f32"
    );
    let (mut dh, mut d_prob) = (hip.f32s(tokens, d)?, hip.f32s(tokens, 1)?);
    if num > 0 {
        rows_of_experts(hip, shape, h, routing, experts, saved, dy, g, &mut dh, &mut d_prob)?;
    }
    skip_backward(hip, h, routing, skip, dy, &mut dh, &mut d_prob)?;
    Ok((dh, d_prob))
}

/// Gradients of rows of the skip class.
pub fn skip_backward(
    hip: &Hip,
    h: &Buf,
    routing: &Routing,
    skip: SkipMode,
    dy: &Buf,
    dh: &mut Buf,
    d_prob: &mut Buf,
) -> Result<()> {
    let identity = skip == SkipMode::Identity;
    let read = |x| identity.then(|| hip.as_f32(x)).transpose();
    let (h, dy) = (read(h)?, read(dy)?);
    let (tokens, d) = (dh.rows(), dh.cols());
    launch!(
        hip, "experts_skip_backward", [tokens], WORK_ITEMS;
        h.as_ref().map_or(null(), |h| h.at()), routing.order.at(), routing.offsets.at(), routing.prob.at(),
        dy.as_ref().map_or(null(), |dy| dy.at()), dh.at_mut(), d_prob.at_mut(), int(routing.experts), int(d), i32::from(identity),
    )
}

/// Backward of the rows that have an expert.
#[allow(clippy::too_many_arguments)]
fn rows_of_experts(
    hip: &Hip,
    shape: Shape,
    h: &Buf,
    routing: &Routing,
    experts: &[Buf],
    saved: &Saved,
    dy: &Buf,
    g: &mut [Buf],
    dh: &mut Buf,
    d_prob: &mut Buf,
) -> Result<()> {
    let Shape { tokens, experts: num, d, f } = shape;
    let (offsets, first, order, prob) = (routing.offsets.at(), routing.first.at(), routing.order.at(), routing.prob.at());
    let (mut d_gate_up, mut act) = (hip.bf16s(tokens, 2 * f)?, hip.bf16s(tokens, f)?);
    // Of each row, sums over half tiles.
    let columns = 2 * f.div_ceil(TILE);
    let mut prob_parts = hip.f32s(tokens, columns)?;
    let down = Matrices::weights(hip, experts, Matrix::Down)?;
    {
        // Without its probability: the product with the activation is the probability's own gradient.
        let rows_dy = permuted(hip, dy, routing, None)?;
        let groups = shape.groups(f.div_ceil(TILE));
        launch!(
            hip, "experts_d_act_bf16", [groups], WORK_ITEMS;
            rows_dy.at(), down.base, down.places.at(), offsets, first, order, prob, saved.gate_up.at(), d_gate_up.at_mut(),
            act.at_mut(), prob_parts.at_mut(), int(num), int(d), int(f), int(groups),
        )?;
    }
    launch!(
        hip, "experts_d_prob", [tokens.div_ceil(WORK_ITEMS as usize)], WORK_ITEMS;
        prob_parts.at(), order, offsets, d_prob.at_mut(), int(num), int(columns),
    )?;
    let gate_up = Matrices::weights(hip, experts, Matrix::GateUp)?;
    let groups = shape.groups(d.div_ceil(TILE));
    launch!(
        hip, "experts_d_input_bf16", [groups], WORK_ITEMS;
        d_gate_up.at(), gate_up.base, gate_up.places.at(), offsets, first, order, dh.at_mut(), int(num), int(d), int(f), int(groups),
    )?;
    let rows_h = permuted(hip, h, routing, None)?;
    weight_gradient(hip, num, &d_gate_up, &rows_h, Matrices::gradients(hip, g, Matrix::GateUp)?, routing)?;
    let rows_dy = permuted(hip, dy, routing, Some(&routing.prob))?;
    weight_gradient(hip, num, &rows_dy, &act, Matrices::gradients(hip, g, Matrix::Down)?, routing)
}

/// `+= dyᵀ x` over each expert's rows, both in the order.
fn weight_gradient(hip: &Hip, experts: usize, dy: &Buf, x: &Buf, to: Matrices, routing: &Routing) -> Result<()> {
    let (m, n) = (dy.cols(), x.cols());
    launch!(
        hip, "experts_weight_gradient_bf16", [m.div_ceil(TILE) * n.div_ceil(TILE), experts], WORK_ITEMS;
        dy.at(), x.at(), to.base, to.places.at(), routing.offsets.at(), int(m), int(n),
    )
}
