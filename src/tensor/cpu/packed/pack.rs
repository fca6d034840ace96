//! Packing: f32 matrices into slots, as panels (right operands) or rows (left operands).

use super::{Core, Format};
use crate::tensor::cpu::level::{Level, vectorised};

/// A strided view of an f32 matrix: element (i, j) is `data[i * row_stride + j * col_stride]`; one of the strides is 1.
#[derive(Clone, Copy)]
pub struct Source<'a> {
    pub data: &'a [f32],
    pub row_stride: usize,
    pub col_stride: usize,
}

impl<'a> Source<'a> {
    /// A row-major matrix with `cols` columns.
    pub fn rows(data: &'a [f32], cols: usize) -> Self {
        Self { data, row_stride: cols, col_stride: 1 }
    }

    /// The transpose of a row-major matrix with `cols` columns.
    pub fn transposed(data: &'a [f32], cols: usize) -> Self {
        Self { data, row_stride: 1, col_stride: cols }
    }

    /// The view from element (i, j) on.
    pub fn from(self, i: usize, j: usize) -> Self {
        Self { data: &self.data[i * self.row_stride + j * self.col_stride..], ..self }
    }

    pub fn flipped(self) -> Self {
        Self { row_stride: self.col_stride, col_stride: self.row_stride, ..self }
    }
}

/// Bits of `x` rounded to the nearest bfloat16, ties to even; NaN stays NaN.
#[inline(always)]
fn bf16_bits(x: f32) -> u32 {
    let bits = x.to_bits();
    let rounded = (bits.wrapping_add(0x7fff + (bits >> 16 & 1))) >> 16;
    if x.is_nan() { bits >> 16 | 0x40 } else { rounded }
}

/// One slot: `x`, or `x` and `y` that follows it.
#[inline(always)]
fn slot(format: Format, x: f32, y: f32) -> u32 {
    match format {
        Format::F32 => x.to_bits(),
        Format::RoundedF32 => as_multiplied(format, x).to_bits(),
        Format::Bf16 => bf16_bits(x) | bf16_bits(y) << 16,
    }
}

/// Calls `$body` with the format as a constant, so that it is chosen once and not per number.
macro_rules! with_format {
    ($format:expr, $name:ident => $body:expr) => {
        match $format {
            Format::F32 => {
                const $name: Format = Format::F32;
                $body
            }
            Format::RoundedF32 => {
                const $name: Format = Format::RoundedF32;
                $body
            }
            Format::Bf16 => {
                const $name: Format = Format::Bf16;
                $body
            }
        }
    };
}

/// Whether pairs are packed with the processor's own instructions for bfloat16.
#[cfg(target_arch = "x86_64")]
fn packs_pairs(format: Format) -> bool {
    format == Format::Bf16 && Level::detected() >= Level::Avx512Bf16
}

/// Packs `k` rows and `width <= out_width` columns of `source` slot by slot: `out[s * out_width + j]` holds the numbers of column j
/// that share slot s; the rest is zero. This is a panel of a right operand (rows = inner dimension), or, of a left
/// operand's transpose, a panel of its rows.
pub fn panel(format: Format, source: Source, k: usize, width: usize, out: &mut [u32], out_width: usize) {
    #[cfg(target_arch = "x86_64")]
    if packs_pairs(format) {
        // SAFETY: the processor has the instructions.
        return unsafe { super::pairs::panel(source, k, width, out, out_width) };
    }
    with_format!(format, F => vectorised(#[inline(always)] || match (source.col_stride, out_width) {
        // Whole panels of the kernels' widths, as constants.
        (1, 32) if width == 32 => panel_along_rows::<32>(F, source, k, out),
        (1, 16) if width == 16 => panel_along_rows::<16>(F, source, k, out),
        (1, 12) if width == 12 => panel_along_rows::<12>(F, source, k, out),
        (1, 6) if width == 6 => panel_along_rows::<6>(F, source, k, out),
        (1, _) => panel_ragged(F, source, k, width, out, out_width),
        _ => panel_across(F, source, k, width, out, out_width),
    }));
}

#[inline(always)]
fn panel_along_rows<const WIDTH: usize>(format: Format, source: Source, k: usize, out: &mut [u32]) {
    let (out, _) = out.as_chunks_mut::<WIDTH>();
    for (s, out) in out.iter_mut().enumerate().take(k.div_ceil(format.per_slot())) {
        let i = s * format.per_slot();
        let row =
            |i: usize| -> &[f32; WIDTH] { source.data[i * source.row_stride..][..WIDTH].first_chunk().expect("WIDTH numbers") };
        let x = row(i);
        let zero = [0.0; WIDTH];
        let y = if format == Format::Bf16 && i + 1 < k { row(i + 1) } else { &zero };
        for j in 0..WIDTH {
            out[j] = slot(format, x[j], y[j]);
        }
    }
}

#[inline(always)]
fn panel_ragged(format: Format, source: Source, k: usize, width: usize, out: &mut [u32], out_width: usize) {
    for (s, out) in out.chunks_mut(out_width).enumerate().take(k.div_ceil(format.per_slot())) {
        let i = s * format.per_slot();
        let x = &source.data[i * source.row_stride..][..width];
        let y = (format == Format::Bf16 && i + 1 < k).then(|| &source.data[(i + 1) * source.row_stride..][..width]);
        for j in 0..width {
            out[j] = slot(format, x[j], y.map_or(0.0, |y| y[j]));
        }
        out[width..].fill(0);
    }
}

/// Slots turned at a time: eight columns, each read along its own contiguous direction.
const TURN: usize = 8;

#[inline(always)]
fn panel_across(format: Format, source: Source, k: usize, width: usize, out: &mut [u32], out_width: usize) {
    let (slots, per) = (k.div_ceil(format.per_slot()), format.per_slot());
    let out = &mut out[..slots * out_width];
    for j0 in (0..out_width).step_by(TURN) {
        let columns = TURN.min(out_width - j0);
        for s0 in (0..slots).step_by(TURN) {
            let rows = TURN.min(slots - s0);
            let mut block = [[0u32; TURN]; TURN];
            for (j, block) in block.iter_mut().enumerate().take(columns.min(width.saturating_sub(j0))) {
                let numbers = TURN.min(slots - s0) * per;
                let column = &source.data[(j0 + j) * source.col_stride + s0 * per * source.row_stride..];
                let column = &column[..numbers.min(k - s0 * per)];
                if column.len() == TURN * per {
                    for (s, block) in block.iter_mut().enumerate() {
                        *block = slot(format, column[s * per], if per == 2 { column[s * per + 1] } else { 0.0 });
                    }
                } else {
                    for (s, pair) in column.chunks(per).enumerate() {
                        block[s] = slot(format, pair[0], pair.get(1).copied().unwrap_or(0.0));
                    }
                }
            }
            if rows == TURN && columns == TURN {
                for s in 0..TURN {
                    let turned: [u32; TURN] = std::array::from_fn(|j| block[j][s]);
                    out[(s0 + s) * out_width + j0..][..TURN].copy_from_slice(&turned);
                }
            } else {
                for s in 0..rows {
                    for j in 0..columns {
                        out[(s0 + s) * out_width + j0 + j] = block[j][s];
                    }
                }
            }
        }
    }
}

/// Packs `m` contiguous-inner rows of `k` numbers: `out[r * slots + s]`. `row(r)` gives the numbers of row r, or more.
pub fn rows<'a>(format: Format, m: usize, k: usize, row: impl Fn(usize) -> &'a [f32], out: &mut [u32]) {
    rows_at(format, m, k, row, out, k.div_ceil(format.per_slot()));
}

/// As `rows`, with `stride` slots from one row to the next; what lies between is left as it is.
pub fn rows_at<'a>(format: Format, m: usize, k: usize, row: impl Fn(usize) -> &'a [f32], out: &mut [u32], stride: usize) {
    #[cfg(target_arch = "x86_64")]
    if packs_pairs(format) {
        for (r, out) in out.chunks_mut(stride).enumerate().take(m) {
            // SAFETY: the processor has the instructions.
            unsafe { super::pairs::row(&row(r)[..k], out) };
        }
        return;
    }
    with_format!(format, F => vectorised(#[inline(always)] || {
        for (r, out) in out.chunks_mut(stride).enumerate().take(m) {
            pack_row(F, &row(r)[..k], out);
        }
    }));
}

#[inline(always)]
fn pack_row(format: Format, x: &[f32], out: &mut [u32]) {
    match format {
        Format::F32 | Format::RoundedF32 => {
            for (out, x) in out.iter_mut().zip(x) {
                *out = slot(format, *x, 0.0);
            }
        }
        Format::Bf16 => {
            let (pairs, rest) = x.as_chunks::<2>();
            for (out, [x, y]) in out.iter_mut().zip(pairs) {
                *out = slot(format, *x, *y);
            }
            if let [x] = rest {
                out[pairs.len()] = slot(format, *x, 0.0);
            }
        }
    }
}

/// Packs `source` `[k, n]` into panels of `width` columns, one after the other: panel p holds `out[(p * slots + s) * width + j]`.
pub fn panels(format: Format, source: Source, k: usize, n: usize, width: usize, out: &mut [u32]) {
    let slots = k.div_ceil(format.per_slot());
    for (p, out) in out.chunks_mut(slots * width).enumerate().take(n.div_ceil(width)) {
        panel(format, source.from(0, p * width), k, width.min(n - p * width), out, width);
    }
}

/// Packs `k` rows and `width <= rows` columns of `source` as a panel of a left operand, from slot `from` on: the columns are the
/// panel's rows, and each has room for `slots` slots. `Left::panel` reads it.
#[allow(clippy::too_many_arguments)]
pub fn left_panel(core: &Core, source: Source, k: usize, width: usize, out: &mut [u32], rows: usize, slots: usize, from: usize) {
    let format = core.format;
    #[cfg(target_arch = "x86_64")]
    if core.left_lies_in_rows() {
        let out = &mut out[from..];
        if source.col_stride == 1 {
            // SAFETY: a core that wants rows is of a processor with more than these instructions.
            return unsafe { super::pairs::turned_rows(source, k, width, out, slots) };
        }
        return rows_at(format, width, k, |j| &source.data[j * source.col_stride..], out, slots);
    }
    panel(format, source, k, width, &mut out[from * rows..][..k.div_ceil(format.per_slot()) * rows], rows);
}

/// Packs `source` `[k, n]` as a left operand, of which the columns are the rows: tiles of `core.mr` rows, one after the other.
pub fn left_panels(core: &Core, source: Source, k: usize, n: usize, out: &mut [u32]) {
    let slots = core.slots(k);
    for (p, out) in out.chunks_mut(slots * core.mr).enumerate().take(n.div_ceil(core.mr)) {
        left_panel(core, source.from(0, p * core.mr), k, core.mr.min(n - p * core.mr), out, core.mr, slots, 0);
    }
}

/// What a product takes of a number: it rounds to bfloat16, unless products are of f32.
#[inline(always)]
pub fn as_multiplied(format: Format, x: f32) -> f32 {
    match format {
        Format::F32 => x,
        Format::RoundedF32 | Format::Bf16 => f32::from_bits(bf16_bits(x) << 16),
    }
}
