//! Micro-kernels: a small tile of C held in registers while the whole inner dimension runs past it.
//!
//! `C[m, n] (+)= A B` with `m <= MR`, `n <= NR`. Operands are slots of 32 bits: one f32, or two bfloat16 that follow each
//! other along the inner dimension (the first in the low half). Element (r, s) of A is at `a[r * row_stride + s * slot_stride]`;
//! B is a panel: `NR` slots for each s. Each element of C is one sum in the order of s, whatever its place in a tile: how a
//! product is cut into tiles does not enter the result.

/// Arguments of a micro-kernel.
#[derive(Clone, Copy)]
pub struct Tile {
    pub slots: usize,
    pub a: *const u32,
    pub a_row_stride: usize,
    pub a_slot_stride: usize,
    /// `slots * NR` slots.
    pub b: *const u32,
    pub c: *mut f32,
    pub c_row_stride: usize,
    pub m: usize,
    pub n: usize,
    /// C keeps what it had.
    pub accumulate: bool,
}

pub type MicroKernel = unsafe fn(Tile);

/// Plain Rust: multiplies and adds apart. One row at a time, a panel of 16 columns.
pub mod portable {
    use super::Tile;

    pub const MR: usize = 4;
    pub const NR: usize = 16;

    /// # Safety
    /// The pointers of `t` reach as far as its numbers say.
    pub unsafe fn f32(t: Tile) {
        let mut acc = [[0f32; NR]; MR];
        for s in 0..t.slots {
            // SAFETY: a panel has NR slots for every s.
            let b: &[f32; NR] = unsafe { &*t.b.add(s * NR).cast() };
            for (r, acc) in acc.iter_mut().enumerate().take(t.m) {
                // SAFETY: r < m, s < slots.
                let x = f32::from_bits(unsafe { *t.a.add(r * t.a_row_stride + s * t.a_slot_stride) });
                for n in 0..NR {
                    acc[n] += x * b[n];
                }
            }
        }
        for (r, acc) in acc.iter().enumerate().take(t.m) {
            // SAFETY: r < m, and C has n columns.
            let c = unsafe { std::slice::from_raw_parts_mut(t.c.add(r * t.c_row_stride), t.n) };
            for (c, acc) in c.iter_mut().zip(acc) {
                *c = if t.accumulate { *c + acc } else { *acc };
            }
        }
    }
}

/// A micro-kernel on vectors: `$vectors` of them in a row of the tile, up to `$mr` rows. Rows and vectors are constants of an inner
/// function, so that the tile stays in registers; tails of C go through a buffer of one row.
#[cfg(target_arch = "x86_64")]
macro_rules! micro_kernel {
    (
        $module:ident, $features:literal, mr: $mr:literal, vectors: $vectors:literal, lanes: $lanes:literal, rows: [$($row:literal)*],
        zero: $zero:expr, load: $load:expr, splat: $splat:expr, multiply_add: $multiply_add:expr,
        load_c: $load_c:expr, add: $add:expr, store: $store:expr
    ) => {
        pub mod $module {
            use std::arch::x86_64::*;

            use super::Tile;

            pub const MR: usize = $mr;
            pub const NR: usize = $vectors * $lanes;

            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn tile<const R: usize, const V: usize>(t: Tile) {
                // SAFETY (of all below): r < m, s < slots, and a panel has NR slots for every s.
                unsafe {
                    let mut acc = [[$zero; V]; R];
                    let (mut a, mut b) = (t.a, t.b);
                    // C is used after the whole inner dimension; it is on its way meanwhile.
                    for r in 0..R {
                        for v in 0..V {
                            _mm_prefetch::<_MM_HINT_T0>(t.c.wrapping_add(r * t.c_row_stride + v * $lanes).cast());
                        }
                    }
                    for _ in 0..t.slots {
                        let mut column = [$zero; V];
                        for v in 0..V {
                            column[v] = $load(b.add(v * $lanes));
                        }
                        for r in 0..R {
                            let x = $splat(*a.add(r * t.a_row_stride));
                            for v in 0..V {
                                acc[r][v] = $multiply_add(x, column[v], acc[r][v]);
                            }
                        }
                        a = a.wrapping_add(t.a_slot_stride);
                        b = b.add(NR);
                    }
                    for r in 0..R {
                        let row = t.c.add(r * t.c_row_stride);
                        for v in 0..V {
                            let (c, n) = (row.add(v * $lanes), t.n - v * $lanes);
                            let sum = acc[r][v];
                            if n >= $lanes {
                                $store(c, if t.accumulate { $add($load_c(c), sum) } else { sum });
                            } else {
                                let mut tail = [0f32; $lanes];
                                if t.accumulate {
                                    std::ptr::copy_nonoverlapping(c, tail.as_mut_ptr(), n);
                                    $store(tail.as_mut_ptr(), $add($load_c(tail.as_ptr()), sum));
                                } else {
                                    $store(tail.as_mut_ptr(), sum);
                                }
                                std::ptr::copy_nonoverlapping(tail.as_ptr(), c, n);
                            }
                        }
                    }
                }
            }

            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn rows<const V: usize>(t: Tile) {
                // SAFETY: passed on.
                unsafe {
                    match t.m {
                        $($row => tile::<$row, V>(t),)*
                        _ => unreachable!("a tile of {} rows", t.m),
                    }
                }
            }

            /// # Safety
            /// The CPU has the module's instructions; the pointers of `t` reach as far as its numbers say; `1 <= m <= MR`,
            /// `1 <= n <= NR`.
            #[target_feature(enable = $features)]
            pub unsafe fn kernel(t: Tile) {
                const { assert!($vectors == 2) };
                // SAFETY: passed on.
                unsafe { if t.n <= $lanes { rows::<1>(t) } else { rows::<2>(t) } }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
micro_kernel!(
    avx2, "avx2,fma", mr: 6, vectors: 2, lanes: 8, rows: [1 2 3 4 5 6],
    zero: _mm256_setzero_ps(),
    load: |p: *const u32| _mm256_loadu_ps(p.cast()),
    splat: |x: u32| _mm256_set1_ps(f32::from_bits(x)),
    multiply_add: |x, b, acc| _mm256_fmadd_ps(x, b, acc),
    load_c: |p: *const f32| _mm256_loadu_ps(p),
    add: |a, b| _mm256_add_ps(a, b),
    store: |p: *mut f32, x| _mm256_storeu_ps(p, x)
);

#[cfg(target_arch = "x86_64")]
micro_kernel!(
    avx512, "avx512f", mr: 12, vectors: 2, lanes: 16, rows: [1 2 3 4 5 6 7 8 9 10 11 12],
    zero: _mm512_setzero_ps(),
    load: |p: *const u32| _mm512_loadu_ps(p.cast()),
    splat: |x: u32| _mm512_set1_ps(f32::from_bits(x)),
    multiply_add: |x, b, acc| _mm512_fmadd_ps(x, b, acc),
    load_c: |p: *const f32| _mm512_loadu_ps(p),
    add: |a, b| _mm512_add_ps(a, b),
    store: |p: *mut f32, x| _mm512_storeu_ps(p, x)
);

// A pair of bfloat16 per slot; the bits of the operands travel as f32 vectors and are only renamed (no instruction).
#[cfg(target_arch = "x86_64")]
micro_kernel!(
    avx512bf16, "avx512f,avx512bf16", mr: 12, vectors: 2, lanes: 16, rows: [1 2 3 4 5 6 7 8 9 10 11 12],
    zero: _mm512_setzero_ps(),
    load: |p: *const u32| _mm512_loadu_ps(p.cast()),
    splat: |x: u32| _mm512_castsi512_ps(_mm512_set1_epi32(x as i32)),
    multiply_add: |x: __m512, b: __m512, acc| {
        _mm512_dpbf16_ps(acc, std::mem::transmute::<__m512, __m512bh>(x), std::mem::transmute::<__m512, __m512bh>(b))
    },
    load_c: |p: *const f32| _mm512_loadu_ps(p),
    add: |a, b| _mm512_add_ps(a, b),
    store: |p: *mut f32, x| _mm512_storeu_ps(p, x)
);
