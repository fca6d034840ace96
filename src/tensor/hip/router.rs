//! The router (spec 1.6): `kernels/router.zk.cpp`, with the products of h and of the weights' gradients beside it.

use anyhow::{Result, ensure};

use super::experts::{Sorted, sort};
use super::host::{download_plain, upload_plain};
use super::product::{Form, Gemm, Numbers};
use super::rows::address;
use super::{Buf, Hip, Rows, int};
use crate::tensor::backend::{PinnedRoutes, RouterParams};

const ITEMS: u32 = 256;
/// Rows of a workgroup's tile.
const TILE_ROWS: usize = 64;
/// Classes that the kernels can hold.
const MOST_CLASSES: usize = 64;

/// Where each row goes.
pub struct Routing {
    /// u32 `[T]`: class of each row, the skip class being the last.
    pub choice: Buf,
    /// f32 `[T, 1]`: its probability.
    pub prob: Buf,
    /// i32: rows by class `[T]`, where each class begins `[classes + 1]`, tiles before each expert `[classes]`.
    pub order: Buf,
    pub offsets: Buf,
    pub first: Buf,
    pub experts: usize,
    /// Real rows of each class, i32 `[classes]`.
    pub(super) counts: Buf,
}

/// What the backward needs.
pub struct Saved {
    state: Buf,
    inv_rms: Buf,
    /// Both hidden layers before GELU, one behind the other: `[2 T, R]`.
    hidden: Buf,
    logits: Buf,
    probs: Buf,
}

/// Kernels for routers of at most so many channels.
struct Variant {
    width: usize,
    forward: &'static str,
    /// Through the hidden layers, and through norm and averaging.
    backward: [&'static str; 2],
}

fn variant(width: usize, classes: usize) -> Result<Variant> {
    ensure!(classes <= MOST_CLASSES, "the HIP kernels route to at most {MOST_CLASSES} classes, not {classes}");
    ensure!(width.is_multiple_of(4), "the HIP kernels want a router width that is a multiple of 4, not {width}");
    match width {
        0..=64 => Ok(Variant { width: 64, forward: "router_fwd_64", backward: ["router_bwd_mlp_64", "router_bwd_state_64"] }),
        65..=256 => {
            Ok(Variant { width: 256, forward: "router_fwd_256", backward: ["router_bwd_mlp_256", "router_bwd_state_256"] })
        }
        _ => anyhow::bail!("the HIP kernels have routers of at most 256 channels, not {width}"),
    }
}

/// fc1, fc2 and out in bf16, in the order in which the kernels read them; `turned` for products with their transposes. Hidden channels are
/// padded to the kernel's width, classes to whole tiles.
fn packed(hip: &Hip, p: &RouterParams<&Buf>, turned: bool, width: usize) -> Result<[Buf; 3]> {
    let one = |weight: &Buf, outputs: usize| -> Result<Buf> {
        let (outputs, width) = (outputs / 16, width / 16);
        let (tiles, steps) = if turned { (width, outputs) } else { (outputs, width) };
        let n = tiles * steps * 256;
        let mut packed = hip.bf16s(1, n)?;
        launch!(
            hip, "router_pack", [n.div_ceil(256)], ITEMS;
            weight.at(), packed.at_mut(), int(weight.rows()), int(weight.cols()), i32::from(turned), int(tiles), int(steps),
        )?;
        Ok(packed)
    };
    Ok([one(p.fc1_weight, width)?, one(p.fc2_weight, width)?, one(p.out, p.out.rows().next_multiple_of(16))?])
}

#[allow(clippy::too_many_arguments)]
pub fn forward(
    hip: &Hip,
    rows: &Rows,
    h: &Buf,
    prev: Option<&Buf>,
    p: RouterParams<&Buf>,
    balancing_biases: &Buf,
    norm_eps: f64,
    pinned: Option<&PinnedRoutes>,
) -> Result<(Routing, Buf, Saved)> {
    let (tokens, r, classes) = (h.rows(), p.down_weight.rows(), p.out.rows());
    let v = variant(r, classes)?;
    let h = hip.as_bf16(h)?;
    let mut projected = hip.f32s(tokens, r)?;
    let down = hip.weight_bf16(p.down_weight)?;
    Gemm::new(Form::Nt, Numbers::Bf16ToF32, tokens, r, h.cols()).queue(hip, h.at(), down.at(), projected.at_mut())?;
    let pinned = match pinned {
        None => None,
        Some(PinnedRoutes(routes)) => {
            ensure!(routes.len() == tokens, "{} pinned routes of {tokens} rows", routes.len());
            ensure!(routes.iter().all(|c| (*c as usize) < classes), "a pinned route beyond the {classes} classes");
            Some(upload_plain(hip, routes)?)
        }
    };
    let [fc1, fc2, out] = packed(hip, &p, false, v.width)?;
    // The last block's state goes on to the next, and is needed again in the backward.
    let (mut state, mut inv_rms) = (hip.f32s(tokens, r)?, hip.f32s(tokens, 1)?);
    let mut hidden = hip.f32s(2 * tokens, r)?;
    let (mut logits, mut probs) = (hip.f32s(tokens, classes)?, hip.f32s(tokens, classes)?);
    let (mut choice, mut prob) = (hip.f32s(tokens, 1)?, hip.f32s(tokens, 1)?);
    // Without a gamma there is no averaging, whatever came before.
    let prev = prev.filter(|_| p.gamma.is_some());
    launch!(
        hip, v.forward, [tokens.div_ceil(TILE_ROWS)], ITEMS;
        projected.at(), p.down_bias.at(), address(prev), address(p.gamma), p.norm.at(), fc1.at(), p.fc1_bias.at(), fc2.at(),
        p.fc2_bias.at(), out.at(), balancing_biases.at(), address(pinned.as_ref()), state.at_mut(), inv_rms.at_mut(), hidden.at_mut(),
        logits.at_mut(), probs.at_mut(), choice.at_mut(), prob.at_mut(), int(tokens), int(r), int(classes),
        norm_eps as f32,
    )?;
    let mut counts = hip.f32s(1, classes)?;
    launch!(
        hip, "router_counts", [classes], ITEMS;
        choice.at(), address(rows.valid.as_ref()), counts.at_mut(), int(tokens),
    )?;
    let experts = classes - 1;
    let Sorted { order, offsets, first, .. } = sort(hip, &choice, experts)?;
    let mut passed_on = hip.f32s(tokens, r)?;
    super::host::copy(hip, &mut passed_on, &state)?;
    let saved = Saved { state, inv_rms, hidden, logits, probs };
    Ok((Routing { choice, prob, order, offsets, first, experts, counts }, passed_on, saved))
}

#[allow(clippy::too_many_arguments)]
pub fn backward(
    hip: &Hip,
    h: &Buf,
    prev: Option<&Buf>,
    p: RouterParams<&Buf>,
    routing: &Routing,
    saved: &Saved,
    d_prob: &Buf,
    d_state: Option<&Buf>,
    g: RouterParams<&mut Buf>,
    dh: &mut Buf,
) -> Result<Option<Buf>> {
    let (tokens, d, r, classes) = (h.rows(), h.cols(), p.down_weight.rows(), p.out.rows());
    let v = variant(r, classes)?;
    let [fc1, fc2, out] = packed(hip, &p, true, v.width)?;
    let prev = prev.filter(|_| p.gamma.is_some());
    let mut d_prev = prev.map(|_| hip.f32s(tokens, r)).transpose()?;
    let mut d_logits = hip.bf16s(tokens, classes)?;
    // Operands of the weights' gradients, one behind the other: activation and gradient of the second hidden layer, of the first, the
    // norm's output, the gradient of the projection.
    let mut work = hip.bf16s(6 * tokens, r)?;
    let blocks = tokens.div_ceil(TILE_ROWS);
    let mut partial = hip.f32s(5 * blocks, r)?;
    let to_prev = d_prev.as_mut().map_or(std::ptr::null_mut(), Buf::at_mut);
    let [of_layers, of_state] = v.backward;
    launch!(
        hip, of_layers, [blocks], ITEMS;
        routing.choice.at(), routing.prob.at(), saved.probs.at(), d_prob.at(), saved.hidden.at(), fc2.at(), out.at(),
        d_logits.at_mut(), work.at_mut(), partial.at_mut(), int(tokens), int(r), int(classes),
    )?;
    launch!(
        hip, of_state, [blocks], ITEMS;
        address(d_state), saved.state.at(), saved.inv_rms.at(), address(prev), address(p.gamma), p.norm.at(), fc1.at(), work.at_mut(),
        to_prev, partial.at_mut(), int(tokens), int(r),
    )?;
    // Only where there is something to average is gamma's gradient something.
    let of_gamma = g.gamma.filter(|_| prev.is_some()).map_or(std::ptr::null_mut(), Buf::at_mut);
    launch!(
        hip, "router_params", [(5 * r).div_ceil(256)], ITEMS;
        partial.at(), g.fc2_bias.at_mut(), g.fc1_bias.at_mut(), g.down_bias.at_mut(), g.norm.at_mut(), of_gamma, int(blocks), int(r),
    )?;
    let h = hip.as_bf16(h)?;
    let [act2, d2, act1, d1, normed, dr] = std::array::from_fn(|i| work.row(i * tokens));
    let of_weights = [(g.out, classes, d_logits.at(), act2), (g.fc2_weight, r, d2, act1), (g.fc1_weight, r, d1, normed)];
    for (d_weight, outputs, dy, x) in of_weights {
        let gemm = Gemm::new(Form::Tn, Numbers::Bf16ToF32, outputs, r, tokens);
        Gemm { accumulate: true, ..gemm }.queue(hip, dy, x, d_weight.at_mut())?;
    }
    let of_down = Gemm::new(Form::Tn, Numbers::Bf16ToF32, r, d, tokens);
    Gemm { accumulate: true, ..of_down }.queue(hip, dr, h.at(), g.down_weight.at_mut())?;
    let down = hip.weight_bf16(p.down_weight)?;
    let of_h = Gemm::new(Form::Nn, Numbers::Bf16ToF32, tokens, d, r);
    Gemm { accumulate: true, ..of_h }.queue(hip, dr, down.at(), dh.at_mut())?;
    Ok(d_prev)
}

/// Router logits `[T, classes]`.
pub fn logits(hip: &Hip, _: &Routing, saved: &Saved) -> Result<Buf> {
    let mut out = hip.f32s(saved.logits.rows(), saved.logits.cols())?;
    super::host::copy(hip, &mut out, &saved.logits)?;
    Ok(out)
}

pub fn choices(hip: &Hip, routing: &Routing) -> Result<Vec<u32>> {
    download_plain(hip, &routing.choice, routing.choice.rows())
}

pub fn probs(hip: &Hip, routing: &Routing) -> Result<Vec<f32>> {
    download_plain(hip, &routing.prob, routing.prob.rows())
}

pub fn counts(hip: &Hip, routing: &Routing) -> Result<Vec<u64>> {
    Ok(download_plain::<u32>(hip, &routing.counts, routing.counts.cols())?.into_iter().map(u64::from).collect())
}
