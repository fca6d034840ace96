//! The router with its depth-averaged state, and the experts it chooses from.

use anyhow::Result;
use candle_core::{D, DType, Tensor};

use super::ops::{gelu, linear, rms_norm, softmax};
use crate::error::bad_input;
use crate::model::config::SkipMode;
use crate::tensor::backend::Precision;
use crate::tensor::backend::{PinnedRoutes, RouterParams};

/// What the router made of T tokens. Class E, the last, is the skip class.
pub struct Route {
    /// `[T, R]`: carried on to the next block's router, gradient included.
    pub state: Tensor,
    /// `[T, E + 1]`
    pub logits: Tensor,
    /// Class of each token.
    pub choice: Vec<u32>,
    /// `[T, 1]`: the chosen class's probability, without the balancing bias.
    pub prob: Tensor,
}

/// `h` `[T, D]`, `prev` the state `[T, R]` of the block before. Ties go to the lowest class.
pub fn route(
    h: &Tensor,
    prev: Option<&Tensor>,
    p: RouterParams<&Tensor>,
    balancing_biases: &Tensor,
    norm_eps: f64,
    pinned: Option<&PinnedRoutes>,
    precision: Precision,
) -> Result<Route> {
    let mut state = linear(h, p.down_weight, precision)?.broadcast_add(p.down_bias)?;
    if let (Some(prev), Some(gamma)) = (prev, p.gamma) {
        state = (state + prev.broadcast_mul(gamma)?)?;
    }
    let t = rms_norm(&state, p.norm, norm_eps)?;
    let t = gelu(&linear(&t, p.fc1_weight, precision)?.broadcast_add(p.fc1_bias)?)?;
    let t = gelu(&linear(&t, p.fc2_weight, precision)?.broadcast_add(p.fc2_bias)?)?;
    let logits = linear(&t, p.out, precision)?;
    let probs = softmax(&logits)?; // [T, E + 1]

    let choice = match pinned {
        Some(PinnedRoutes(choice)) => choice.clone(),
        None => first_argmax(&probs.detach().broadcast_add(&balancing_biases.detach())?)?,
    };
    let (tokens, classes) = logits.dims2()?;
    if choice.len() != tokens || choice.iter().any(|c| *c as usize >= classes) {
        return Err(bad_input(format!("pinned routes must be {tokens} classes below {classes}, one a token")));
    }
    let index = Tensor::new(choice.as_slice(), h.device())?.unsqueeze(1)?;
    let prob = probs.gather(&index, 1)?;
    Ok(Route { state, logits, choice, prob })
}

/// The lowest index of each row's maximum.
fn first_argmax(scores: &Tensor) -> Result<Vec<u32>> {
    let rows = scores.to_dtype(DType::F64)?.to_vec2::<f64>()?;
    let best = |row: &Vec<f64>| (1..row.len()).fold(0, |best, c| if row[c] > row[best] { c } else { best }) as u32;
    Ok(rows.iter().map(best).collect())
}

/// `prob * Expert(h)` for each token of `h` `[T, D]`; skipped tokens by `skip`. `experts` = gate_up `[2F, D]` and down
/// `[D, F]` of expert 0, of expert 1, ...
pub fn expert_ffn(h: &Tensor, route: &Route, experts: &[&Tensor], skip: SkipMode, precision: Precision) -> Result<Tensor> {
    let mut out = h.zeros_like()?;
    for class in 0..=experts.len() / 2 {
        let tokens: Vec<u32> = (0..).zip(&route.choice).filter(|(_, c)| **c as usize == class).map(|(t, _)| t).collect();
        if tokens.is_empty() {
            continue;
        }
        let tokens = Tensor::new(tokens, h.device())?;
        let x = h.index_select(&tokens, 0)?;
        let y = match (experts.get(2 * class), experts.get(2 * class + 1)) {
            (Some(gate_up), Some(down)) => expert(&x, gate_up, down, precision)?,
            _ if skip == SkipMode::Identity => x,
            _ => continue,
        };
        let y = y.broadcast_mul(&route.prob.index_select(&tokens, 0)?)?;
        out = out.index_add(&tokens, &y, 0)?;
    }
    Ok(out)
}

/// `down (silu(gate x) * (up x))`; gate is the first half of gate_up's rows.
fn expert(x: &Tensor, gate_up: &Tensor, down: &Tensor, precision: Precision) -> Result<Tensor> {
    let gate_and_up = linear(x, gate_up, precision)?.chunk(2, D::Minus1)?;
    linear(&(gate_and_up[0].silu()? * &gate_and_up[1])?, down, precision)
}
