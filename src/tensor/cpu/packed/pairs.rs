//! Packing pairs of bfloat16 with the instructions of AVX512-BF16. These round as the portable code does (to nearest, ties to
//! even), but for subnormal numbers, which become zero: products of bfloat16 take them for that anyway.

use std::arch::x86_64::*;

use super::pack::Source;
use super::turn::{first, turn_block};

/// Numbers of a vector, and slots.
const LANES: usize = 16;

/// Up to 32 numbers that follow each other, as slots.
///
/// # Safety
/// The processor has AVX512-BF16, and `x` has `n` numbers.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn along(x: *const f32, n: usize) -> __m512i {
    // SAFETY: lanes beyond n are not touched; a pointer to them is only computed.
    unsafe {
        let low = _mm512_maskz_loadu_ps(first(n), x);
        let high = _mm512_maskz_loadu_ps(first(n.saturating_sub(LANES)), x.wrapping_add(LANES));
        std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low))
    }
}

/// Slots of 16 columns: `x` and, `stride` numbers further if it is there, what follows along the inner dimension.
///
/// # Safety
/// The processor has AVX512-BF16 and AVX512-BW; both rows have `n` numbers.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn across(x: *const f32, stride: usize, has_second: bool, n: usize) -> __m512i {
    const TOGETHER: [u16; 32] = {
        let mut order = [0; 32];
        let mut i = 0;
        while i < 32 {
            order[i] = (i / 2 + i % 2 * 16) as u16;
            i += 1;
        }
        order
    };
    let lanes = first(n);
    // SAFETY: as above.
    unsafe {
        let low = _mm512_maskz_loadu_ps(lanes, x);
        let high = _mm512_maskz_loadu_ps(if has_second { lanes } else { 0 }, x.wrapping_add(stride));
        let both = std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low));
        _mm512_permutexvar_epi16(_mm512_loadu_si512(TOGETHER.as_ptr().cast()), both)
    }
}

/// One row of `x.len()` numbers.
///
/// # Safety
/// The processor has AVX512-BF16, and `out` has a slot for every pair.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
pub unsafe fn row(x: &[f32], out: &mut [u32]) {
    assert!(out.len() >= x.len().div_ceil(2), "no room for a packed row");
    for i in (0..x.len()).step_by(2 * LANES) {
        let n = x.len() - i;
        // SAFETY: n numbers are left, and so many pairs.
        unsafe {
            let slots = along(x.as_ptr().add(i), n);
            _mm512_mask_storeu_epi32(out.as_mut_ptr().add(i / 2).cast(), first(n.div_ceil(2)), slots);
        }
    }
}

/// `pack::panel`, for pairs.
///
/// # Safety
/// The processor has AVX512-BF16 and AVX512-BW.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub unsafe fn panel(source: Source, k: usize, width: usize, out: &mut [u32], out_width: usize) {
    check(&source, k, width);
    let slots = k.div_ceil(2);
    assert!(width <= out_width && out.len() >= slots * out_width, "no room for a packed panel");
    let (x, out) = (source.data.as_ptr(), out.as_mut_ptr());
    // SAFETY (of both): `check` and the assertion.
    if source.col_stride == 1 {
        for s in 0..slots {
            for j in (0..out_width).step_by(LANES) {
                unsafe {
                    let at = x.wrapping_add(2 * s * source.row_stride + j);
                    let pairs = across(at, source.row_stride, 2 * s + 1 < k, width.saturating_sub(j));
                    _mm512_mask_storeu_epi32(out.add(s * out_width + j).cast(), first(out_width - j), pairs);
                }
            }
        }
        return;
    }
    for j0 in (0..out_width).step_by(LANES) {
        let columns = LANES.min(width.saturating_sub(j0));
        for s0 in (0..slots).step_by(LANES) {
            let mut block = [_mm512_setzero_si512(); LANES];
            for (j, column) in block.iter_mut().enumerate().take(columns) {
                // SAFETY: column j0 + j from number 2 s0 on.
                *column = unsafe { along(x.add((j0 + j) * source.col_stride + 2 * s0), k - 2 * s0) };
            }
            block = turn_block(block);
            for (s, row) in block.into_iter().enumerate().take(slots - s0) {
                // SAFETY: row s0 + s of the panel.
                unsafe { _mm512_mask_storeu_epi32(out.add((s0 + s) * out_width + j0).cast(), first(out_width - j0), row) };
            }
        }
    }
}

/// Rows of a left operand that is given by columns: `out[j * stride + s]` for `width` columns of `source`, which lie side by side.
///
/// # Safety
/// The processor has AVX512-BF16 and AVX512-BW.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub unsafe fn turned_rows(source: Source, k: usize, width: usize, out: &mut [u32], stride: usize) {
    check(&source, k, width);
    assert!(source.col_stride == 1, "columns do not lie side by side");
    let slots = k.div_ceil(2);
    assert!(width == 0 || slots <= stride && out.len() >= (width - 1) * stride + slots, "no room for packed rows");
    for j0 in (0..width).step_by(LANES) {
        for s0 in (0..slots).step_by(LANES) {
            let (columns, height) = (LANES.min(width - j0), LANES.min(slots - s0));
            let mut block = [_mm512_setzero_si512(); LANES];
            for (i, pairs) in block.iter_mut().enumerate().take(height) {
                let at = 2 * (s0 + i);
                let x = source.data.as_ptr().wrapping_add(at * source.row_stride + j0);
                // SAFETY: `check`.
                *pairs = unsafe { across(x, source.row_stride, at + 1 < k, columns) };
            }
            block = turn_block(block);
            for (j, row) in block.into_iter().enumerate().take(columns) {
                // SAFETY: the assertion above.
                unsafe {
                    _mm512_mask_storeu_epi32(out.as_mut_ptr().add((j0 + j) * stride + s0).cast(), first(height), row);
                }
            }
        }
    }
}

/// That `source` has `k` rows of `width` columns, and is contiguous along one of the two.
fn check(source: &Source, k: usize, width: usize) {
    assert!(source.row_stride == 1 || source.col_stride == 1, "neither rows nor columns are contiguous");
    if k > 0 && width > 0 {
        let last = (k - 1) * source.row_stride + (width - 1) * source.col_stride;
        assert!(last < source.data.len(), "what is to be packed is too short");
    }
}
