//! Transposing slots, 16 by 16 in vector registers.

use std::arch::x86_64::*;

const SIDE: usize = 16;

/// The first `n` lanes.
pub fn first(n: usize) -> __mmask16 {
    if n >= SIDE { !0 } else { (1 << n) - 1 }
}

/// `out[c * out_stride + r] = from[r * stride + c]` for `rows` rows of `columns` slots.
///
/// # Safety
/// The processor has AVX-512 F; `from` and `out` reach as far as the numbers say.
#[target_feature(enable = "avx512f")]
pub unsafe fn turn(from: *const u32, stride: usize, columns: usize, rows: usize, out: *mut u32, out_stride: usize) {
    for r in (0..rows).step_by(SIDE) {
        for c in (0..columns).step_by(SIDE) {
            let (height, width) = (SIDE.min(rows - r), SIDE.min(columns - c));
            let mut block = [_mm512_setzero_si512(); SIDE];
            for (i, row) in block.iter_mut().enumerate().take(height) {
                // SAFETY: row r + i, columns c to c + width.
                *row = unsafe { _mm512_maskz_loadu_epi32(first(width), from.add((r + i) * stride + c).cast()) };
            }
            block = turn_block(block);
            for (j, column) in block.into_iter().enumerate().take(width) {
                // SAFETY: row c + j, columns r to r + height.
                unsafe { _mm512_mask_storeu_epi32(out.add((c + j) * out_stride + r).cast(), first(height), column) };
            }
        }
    }
}

/// Column i of the rows becomes row i: first within quarters of the rows, then the quarters.
#[inline]
#[target_feature(enable = "avx512f")]
pub fn turn_block(rows: [__m512i; SIDE]) -> [__m512i; SIDE] {
    let mut pairs = rows;
    for i in 0..SIDE / 2 {
        pairs[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
        pairs[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
    }
    // Of rows 4i to 4i + 3: in each quarter q, element e holds column 4q + e of these four.
    let mut fours = pairs;
    for i in 0..SIDE / 4 {
        let [a, b, c, d] = [pairs[4 * i], pairs[4 * i + 1], pairs[4 * i + 2], pairs[4 * i + 3]];
        fours[4 * i] = _mm512_unpacklo_epi64(a, c);
        fours[4 * i + 1] = _mm512_unpackhi_epi64(a, c);
        fours[4 * i + 2] = _mm512_unpacklo_epi64(b, d);
        fours[4 * i + 3] = _mm512_unpackhi_epi64(b, d);
    }
    let mut out = fours;
    for e in 0..4 {
        let [a, b, c, d] = [fours[e], fours[4 + e], fours[8 + e], fours[12 + e]];
        let [low_ab, high_ab] = [_mm512_shuffle_i32x4::<0x88>(a, b), _mm512_shuffle_i32x4::<0xdd>(a, b)];
        let [low_cd, high_cd] = [_mm512_shuffle_i32x4::<0x88>(c, d), _mm512_shuffle_i32x4::<0xdd>(c, d)];
        out[e] = _mm512_shuffle_i32x4::<0x88>(low_ab, low_cd);
        out[4 + e] = _mm512_shuffle_i32x4::<0x88>(high_ab, high_cd);
        out[8 + e] = _mm512_shuffle_i32x4::<0xdd>(low_ab, low_cd);
        out[12 + e] = _mm512_shuffle_i32x4::<0xdd>(high_ab, high_cd);
    }
    out
}
