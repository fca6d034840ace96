//! CCA's mixer (spec 1.4, steps 2 to 9): a depthwise and a head-grouped causal convolution over queries and keys, q-k-mean,
//! delayed values, norms with temperature, RoPE. Both directions go block of rows by block of rows, all steps of a block
//! together in the cache.
//!
//! Names: X_t = [q | k] of token t, u = first convolution, y = second. "Previous" means the token before in the same
//! document; where there is none, X is 0 and u is the first convolution's bias (its inputs are zeros, its bias is not). Before
//! the first row of a sequence (or of a chunk of one), a halo holds the two tokens that may be needed; u of the newer one is
//! computed where it is used, from both.
//! The second convolution is one product per head: row t of its left operand is [u_{t-1} | u_t].

mod backward;
mod forward;
mod rope;
#[cfg(test)]
mod tests;

pub use backward::backward;
pub use forward::forward;
pub use rope::RopeTable;

use super::arena::Block;
use super::buf::Buf;
use super::level::vectorised;
use super::math::lane_sum;
use super::packed::{Core, Layout, Panels, Source, pack_all};
use super::rows::Rows;
use crate::tensor::backend::{CcaIn, CcaShape, Halo};
use crate::tensor::tree::Before;

/// Guard of the query and key norms: 1 / sqrt(|x|^2 + this).
const NORM_GUARD: f32 = 1e-12;

/// Queries and keys before their norm.
pub struct Saved {
    q: Block<f32>,
    k: Block<f32>,
}

/// Widths derived from the shape.
#[derive(Clone, Copy)]
struct Dims {
    q: usize,
    k: usize,
    c: usize,
    head: usize,
    query_heads: usize,
    heads: usize,
    group: usize,
    half: usize,
}

impl Dims {
    fn of(s: &CcaShape) -> Self {
        let (q, k) = (s.num_query_heads * s.head_dim, s.num_kv_heads * s.head_dim);
        let (heads, group) = (s.num_query_heads + s.num_kv_heads, s.num_query_heads / s.num_kv_heads);
        Self { q, k, c: q + k, head: s.head_dim, query_heads: s.num_query_heads, heads, group, half: k / 2 }
    }
}

#[inline(always)]
fn inv_norm(x: &[f32]) -> f32 {
    1.0 / (lane_sum(x.len(), |i| x[i] * x[i]) + NORM_GUARD).sqrt()
}

/// The first convolution of a micro-batch.
struct FirstConvolution<'a> {
    rows: &'a Rows,
    n: Dims,
    q: &'a [f32],
    k: &'a [f32],
    halo: Option<Halo<&'a [f32]>>,
    /// Weights of the previous and of the present token, `[C]` each.
    before: &'a [f32],
    now: &'a [f32],
    bias: &'a [f32],
}

impl<'a> FirstConvolution<'a> {
    fn new(rows: &'a Rows, n: Dims, x: CcaIn<&'a Buf>, halo: Option<Halo<&'a Buf>>, taps: &'a [f32], bias: &'a Buf) -> Self {
        let (before, now) = taps.split_at(n.c);
        let halo = halo.map(|h| Halo { q: h.q.data(), k: h.k.data(), v_delayed: h.v_delayed.data() });
        Self { rows, n, q: x.q.data(), k: x.k.data(), halo, before, now, bias: bias.data() }
    }

    /// Splits the weight `[C, 2]` into the two taps, one after the other.
    fn taps(weight: &[f32], out: &mut [f32]) {
        let (before, now) = out.split_at_mut(weight.len() / 2);
        for (i, pair) in weight.chunks_exact(2).enumerate() {
            (before[i], now[i]) = (pair[0], pair[1]);
        }
    }

    /// X_t in its two parts.
    #[inline(always)]
    fn x(&self, t: usize) -> [&'a [f32]; 2] {
        [&self.q[t * self.n.q..][..self.n.q], &self.k[t * self.n.k..][..self.n.k]]
    }

    /// X of the rows elsewhere that are the history of row t: of the nearer one, and of the further one where that counts too.
    #[inline(always)]
    #[allow(clippy::type_complexity)]
    fn halo_x(&self, t: usize) -> Option<([&'a [f32]; 2], Option<[&'a [f32]; 2]>)> {
        let h = self.halo?;
        let x = |place| match place {
            Before::Row(t) => self.x(t),
            Before::Halo(at) => [&h.q[at * self.n.q..][..self.n.q], &h.k[at * self.n.k..][..self.n.k]],
        };
        let [nearer, further] = self.rows.history(t);
        Some((x(nearer?), further.map(x)))
    }

    /// The delayed values of the row elsewhere that is the history of row t. `v_delayed`: those of the batch.
    #[inline(always)]
    fn halo_v(&self, t: usize, v_delayed: &'a [f32]) -> Option<&'a [f32]> {
        let halo = self.halo?;
        let (values, row) = match self.rows.history(t)[0]? {
            Before::Row(t) => (v_delayed, t),
            Before::Halo(at) => (halo.v_delayed, at / 2),
        };
        Some(&values[row * self.n.half..][..self.n.half])
    }

    /// X of the token before t; None = zeros.
    #[inline(always)]
    fn x_before(&self, t: usize) -> Option<[&'a [f32]; 2]> {
        if self.rows.has_previous(t) {
            return Some(self.x(t - 1));
        }
        self.halo_x(t).map(|(newer, _)| newer)
    }

    #[inline(always)]
    fn apply(&self, x_before: Option<[&[f32]; 2]>, x: [&[f32]; 2], out: &mut [f32]) {
        let (q, k) = out[..self.n.c].split_at_mut(self.n.q);
        for (part, (out, at)) in [(q, 0), (k, self.n.q)].into_iter().enumerate() {
            let len = out.len();
            let (w0, w1, bias, x) = (&self.before[at..][..len], &self.now[at..][..len], &self.bias[at..][..len], &x[part][..len]);
            match x_before {
                Some(before) => {
                    let before = &before[part][..len];
                    for i in 0..len {
                        out[i] = w0[i] * before[i] + w1[i] * x[i] + bias[i];
                    }
                }
                None => {
                    for i in 0..len {
                        out[i] = w1[i] * x[i] + bias[i];
                    }
                }
            }
        }
    }

    /// u_t
    #[inline(always)]
    fn u(&self, t: usize, out: &mut [f32]) {
        self.apply(self.x_before(t), self.x(t), out);
    }

    /// u of rows `t0 - 1 .. t0 + n` into `out` (`(n + 1) * C`); the first is unused where t0 = 0.
    fn block(&self, t0: usize, n: usize, out: &mut [f32]) {
        vectorised(
            #[inline(always)]
            || {
                for (i, out) in out.chunks_exact_mut(self.n.c).enumerate().take(n + 1) {
                    if t0 + i > 0 {
                        self.u(t0 + i - 1, out);
                    }
                }
            },
        );
    }

    /// [u_{t-1} | u_t] of one head for rows `t0 .. t0 + n`, `[n, 2 head]`. `u`: from `block`.
    fn head_rows(&self, t0: usize, n: usize, head: usize, u: &[f32], out: &mut [f32]) {
        let (c, width) = (self.n.c, self.n.head);
        let at = head * width;
        for (i, out) in out.chunks_exact_mut(2 * width).enumerate().take(n) {
            let t = t0 + i;
            let (before, now) = out.split_at_mut(width);
            now.copy_from_slice(&u[(i + 1) * c + at..][..width]);
            if self.rows.has_previous(t) {
                before.copy_from_slice(&u[i * c + at..][..width]);
            } else if let Some((newer, older)) = self.halo_x(t) {
                // u of the row before the first.
                let channel = |x: [&[f32]; 2], j: usize| if j < self.n.q { x[0][j] } else { x[1][j - self.n.q] };
                for (j, before) in before.iter_mut().enumerate() {
                    let j = at + j;
                    let older = older.map_or(0.0, |x| channel(x, j));
                    *before = self.before[j] * older + self.now[j] * channel(newer, j) + self.bias[j];
                }
            } else {
                before.copy_from_slice(&self.bias[at..][..width]);
            }
        }
    }
}

/// The second convolution's weight `[C, head, 2]`, head by head as a packed right operand.
struct HeadWeights<'a> {
    layout: Layout,
    data: &'a [u32],
}

/// Which product a head's weight is packed for.
#[derive(Clone, Copy, PartialEq)]
enum Direction {
    /// `[u_{t-1} | u_t]` to y: `[2 head, head]`.
    Forward,
    /// dy to the gradients of both: `[head, 2 head]`.
    Backward,
}

impl<'a> HeadWeights<'a> {
    fn layout(core: &Core, n: Dims, direction: Direction) -> Layout {
        match direction {
            Direction::Forward => Layout::new(core, 2 * n.head, n.head),
            Direction::Backward => Layout::new(core, n.head, 2 * n.head),
        }
    }

    /// Slots for all heads, and f32 numbers for the weight with its taps set apart.
    fn lens(core: &Core, n: Dims, direction: Direction) -> (usize, usize) {
        (n.heads * Self::layout(core, n, direction).len(), n.c * 2 * n.head)
    }

    fn pack(core: &Core, n: Dims, direction: Direction, weight: &[f32], apart: &mut [f32], out: &'a mut [u32]) -> Self {
        // Per output channel: all inputs of the previous token, then all of the present one.
        for (apart, weight) in apart.chunks_exact_mut(2 * n.head).zip(weight.chunks_exact(2 * n.head)) {
            FirstConvolution::taps(weight, apart);
        }
        let layout = Self::layout(core, n, direction);
        for (head, out) in out.chunks_exact_mut(layout.len()).enumerate().take(n.heads) {
            let weight = &apart[head * n.head * 2 * n.head..][..n.head * 2 * n.head];
            let source = match direction {
                Direction::Forward => Source::transposed(weight, 2 * n.head),
                Direction::Backward => Source::rows(weight, 2 * n.head),
            };
            pack_all(core, layout, source, out);
        }
        Self { layout, data: out }
    }

    fn head(&self, head: usize) -> Panels<'a> {
        Panels::new(self.layout, &self.data[head * self.layout.len()..][..self.layout.len()])
    }
}
