//! Casts, elementwise verbs and sums: `kernels/elementwise.zk.cpp`.

use std::ops::{Deref, Range};
use std::sync::Arc;

use anyhow::{Result, ensure};

use super::host::download_plain;
use super::{Buf, Hip, Kind, Rows, int};

const ITEMS: u32 = 256;
/// Rows that a workgroup of the affine backward sums over, and numbers that one of the sum of squares does.
const ROWS_PER_BLOCK: usize = 64;
const SQUARES_PER_BLOCK: usize = 1 << 14;

/// A buffer in the kind of numbers that was asked for: itself, or a copy.
pub enum As<'a> {
    Same(&'a Buf),
    Cast(Buf),
    Kept(Arc<Buf>),
}

impl Deref for As<'_> {
    type Target = Buf;
    fn deref(&self) -> &Buf {
        match self {
            Self::Same(buf) => buf,
            Self::Cast(buf) => buf,
            Self::Kept(buf) => buf,
        }
    }
}

/// Workgroups of a kernel with a work-item a number.
fn flat(n: usize) -> usize {
    n.div_ceil(ITEMS as usize)
}

/// A count as kernels take it that work on whole buffers.
fn long(n: usize) -> i64 {
    n as i64
}

impl Hip {
    pub(super) fn as_f32<'a>(&self, x: &'a Buf) -> Result<As<'a>> {
        Ok(match x.kind() {
            Kind::F32 => As::Same(x),
            Kind::Bf16 => {
                let mut y = self.f32s(x.rows(), x.cols())?;
                launch!(self, "cast_bf16_f32", [flat(x.len())], ITEMS; x.at(), y.at_mut(), long(x.len()))?;
                As::Cast(y)
            }
        })
    }

    pub(super) fn as_bf16<'a>(&self, x: &'a Buf) -> Result<As<'a>> {
        Ok(match x.kind() {
            Kind::Bf16 => As::Same(x),
            Kind::F32 => As::Cast(self.rounded(x)?),
        })
    }

    /// The bf16 copy of a weight, which the weight keeps until it changes.
    pub(super) fn weight_bf16<'a>(&self, weight: &'a Buf) -> Result<As<'a>> {
        Ok(match weight.kind() {
            Kind::Bf16 => As::Same(weight),
            Kind::F32 => As::Kept(weight.half(|| {
                self.about_to_keep("a weight's bf16 copy")?;
                self.rounded(weight)
            })?),
        })
    }

    pub(super) fn rounded(&self, x: &Buf) -> Result<Buf> {
        let mut y = self.bf16s(x.rows(), x.cols())?;
        launch!(self, "cast_f32_bf16", [flat(x.len())], ITEMS; x.at(), y.at_mut(), long(x.len()))?;
        Ok(y)
    }
}

pub fn add_assign(hip: &Hip, a: &mut Buf, b: &Buf) -> Result<()> {
    ensure!(a.len() == b.len() && a.kind() == Kind::F32, "adding {} numbers to {} of {:?}", b.len(), a.len(), a.kind());
    let name = match b.kind() {
        Kind::F32 => "add_assign",
        Kind::Bf16 => "add_assign_bf16",
    };
    launch!(hip, name, [flat(a.len())], ITEMS; a.at_mut(), b.at(), long(b.len()))
}

/// Rows of padding become 0.
pub fn mask_rows(hip: &Hip, rows: &Rows, mut x: Buf) -> Result<Buf> {
    if let Some(valid) = &rows.valid {
        let name = match x.kind() {
            Kind::F32 => "mask_rows",
            Kind::Bf16 => "mask_rows_bf16",
        };
        let (n, width) = (x.len(), x.cols());
        launch!(hip, name, [flat(n)], ITEMS; x.at_mut(), valid.at(), long(n), int(width))?;
    }
    Ok(x)
}

/// `(x + bias) * scale`, f32.
pub fn affine(hip: &Hip, x: &Buf, scale: &Buf, bias: &Buf) -> Result<Buf> {
    let x = hip.as_f32(x)?;
    let mut y = hip.f32s(x.rows(), x.cols())?;
    launch!(
        hip, "affine_fwd", [flat(x.len())], ITEMS;
        x.at(), scale.at(), bias.at(), y.at_mut(), long(x.len()), int(x.cols()),
    )?;
    Ok(y)
}

pub fn affine_backward(
    hip: &Hip,
    x: &Buf,
    scale: &Buf,
    bias: &Buf,
    dy: &Buf,
    d_scale: &mut Buf,
    d_bias: &mut Buf,
) -> Result<Buf> {
    let (x, dy) = (hip.as_f32(x)?, hip.as_f32(dy)?);
    let (rows, d) = (x.rows(), x.cols());
    let blocks = rows.div_ceil(ROWS_PER_BLOCK);
    let (mut dx, mut partial) = (hip.f32s(rows, d)?, hip.f32s(2 * blocks, d)?);
    launch!(
        hip, "affine_bwd", [flat(d), blocks], ITEMS;
        x.at(), scale.at(), bias.at(), dy.at(), dx.at_mut(), partial.at_mut(), int(rows), int(d), int(ROWS_PER_BLOCK),
    )?;
    launch!(
        hip, "affine_params", [flat(d)], ITEMS;
        partial.at(), scale.at(), d_scale.at_mut(), d_bias.at_mut(), int(blocks), int(d),
    )?;
    Ok(dx)
}

/// Sum of squares of some rows, in f64; waits for the device.
pub fn sum_of_squares(hip: &Hip, x: &Buf, rows: Range<usize>) -> Result<f64> {
    let n = rows.len() * x.cols();
    if n == 0 {
        return Ok(0.0);
    }
    ensure!(x.kind() == Kind::F32 && rows.end <= x.rows(), "squares of rows {rows:?} of {} {:?}", x.rows(), x.kind());
    let blocks = n.div_ceil(SQUARES_PER_BLOCK);
    // Of f64 numbers.
    let (mut partial, mut sum) = (hip.f32s(blocks, 2)?, hip.f32s(1, 2)?);
    launch!(
        hip, "sum_of_squares", [blocks], ITEMS;
        x.row(rows.start), partial.at_mut(), long(n), int(SQUARES_PER_BLOCK),
    )?;
    launch!(hip, "sum_f64", [1], ITEMS; partial.at(), sum.at_mut(), int(blocks))?;
    Ok(download_plain::<f64>(hip, &sum, 1)?[0])
}
