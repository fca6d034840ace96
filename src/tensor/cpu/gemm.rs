//! Matrix products on the `gemm` crate, cut into tiles whose shape depends on the problem alone: the same bits come out
//! whatever the number of threads.

use rayon::prelude::*;

/// A strided view of a matrix operand: element (i, j) is `data[i * row_stride + j * col_stride]`.
#[derive(Clone, Copy)]
pub struct View<'a> {
    pub data: &'a [f32],
    pub row_stride: usize,
    pub col_stride: usize,
}

impl<'a> View<'a> {
    /// A row-major matrix with `cols` columns.
    pub fn rows(data: &'a [f32], cols: usize) -> Self {
        Self { data, row_stride: cols, col_stride: 1 }
    }

    /// The transpose of a row-major matrix with `cols` columns.
    pub fn transposed(data: &'a [f32], cols: usize) -> Self {
        Self { data, row_stride: 1, col_stride: cols }
    }

    fn check(&self, m: usize, n: usize) {
        let last = (m - 1) * self.row_stride + (n - 1) * self.col_stride;
        assert!(last < self.data.len(), "operand of a product is too short: needs element {last}, has {}", self.data.len());
    }
}

/// The matrix that is written: `rows x n` with rows `row_stride` apart.
pub struct Target<'a> {
    pub data: &'a mut [f32],
    pub row_stride: usize,
}

impl<'a> Target<'a> {
    pub fn rows(data: &'a mut [f32], cols: usize) -> Self {
        Self { data, row_stride: cols }
    }
}

#[derive(Clone, Copy)]
struct TargetPtr(*mut f32);
// SAFETY: tiles of one target never overlap, and the target is borrowed mutably for the whole product.
unsafe impl Send for TargetPtr {}
unsafe impl Sync for TargetPtr {}

impl TargetPtr {
    /// Address of element `offset`.
    ///
    /// # Safety
    /// The element lies inside the target.
    unsafe fn at(&self, offset: usize) -> *mut f32 {
        unsafe { self.0.add(offset) }
    }
}

/// Below this many multiply-adds a product is one tile: a task costs more than it saves.
const ONE_TILE: usize = 1 << 18;
/// Tiles of a large product. More than the threads of one machine that this backend is meant for would want.
const TILES: usize = 16;

/// Rows and columns of a tile: a function of the problem only.
fn tile_shape(m: usize, n: usize, k: usize) -> (usize, usize) {
    if m * n * k <= ONE_TILE {
        return (m, n);
    }
    let round = |x: usize, to: usize| x.div_ceil(to) * to;
    if m >= n {
        let rows = round(m.div_ceil(TILES), 48).max(96);
        let row_tiles = m.div_ceil(rows);
        (rows, round(n.div_ceil((TILES / row_tiles).max(1)), 64).max(64))
    } else {
        let cols = round(n.div_ceil(TILES), 64).max(128);
        let col_tiles = n.div_ceil(cols);
        (round(m.div_ceil((TILES / col_tiles).max(1)), 48).max(48), cols)
    }
}

/// `c = a b` or, with `accumulate`, `c += a b`: a `[m, k]`, b `[k, n]`, c `[m, n]`.
pub fn matmul(m: usize, n: usize, k: usize, a: View, b: View, c: Target, accumulate: bool) {
    if m == 0 || n == 0 {
        return;
    }
    if k == 0 {
        if !accumulate {
            c.data.chunks_mut(c.row_stride).take(m).for_each(|row| row[..n].fill(0.0));
        }
        return;
    }
    a.check(m, k);
    b.check(k, n);
    assert!(c.row_stride >= n && (m - 1) * c.row_stride + n <= c.data.len(), "target of a product is too short");
    let (tile_m, tile_n) = tile_shape(m, n, k);
    let (tiles_m, tiles_n) = (m.div_ceil(tile_m), n.div_ceil(tile_n));
    let row_stride = c.row_stride;
    let out = TargetPtr(c.data.as_mut_ptr());
    let one = |tile: usize| {
        let (i0, j0) = (tile / tiles_n * tile_m, tile % tiles_n * tile_n);
        let (mm, nn) = (tile_m.min(m - i0), tile_n.min(n - j0));
        // SAFETY: `check` and the assertion above hold every element touched inside its slice; tiles are disjoint.
        unsafe {
            gemm::gemm(
                mm,
                nn,
                k,
                out.at(i0 * row_stride + j0),
                1,
                row_stride as isize,
                accumulate,
                a.data.as_ptr().add(i0 * a.row_stride),
                a.col_stride as isize,
                a.row_stride as isize,
                b.data.as_ptr().add(j0 * b.col_stride),
                b.col_stride as isize,
                b.row_stride as isize,
                1.0,
                1.0,
                false,
                false,
                false,
                gemm::Parallelism::None,
            );
        }
    };
    if tiles_m * tiles_n == 1 {
        one(0);
    } else {
        (0..tiles_m * tiles_n).into_par_iter().with_max_len(1).for_each(one);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(n: usize, step: f32) -> Vec<f32> {
        (0..n).map(|i| ((i as f32 * step).sin() * 3.0).fract()).collect()
    }

    #[test]
    fn equals_the_plain_sum_for_all_layouts() {
        for (m, n, k) in [(1, 1, 1), (3, 5, 7), (130, 70, 33), (64, 300, 40), (1, 257, 19), (300, 1, 65)] {
            let (a, b) = (series(m * k, 0.7), series(k * n, 0.3));
            let at: Vec<f32> = (0..k * m).map(|x| a[x % m * k + x / m]).collect();
            let bt: Vec<f32> = (0..k * n).map(|x| b[x % k * n + x / k]).collect();
            let plain: Vec<f64> =
                (0..m * n).map(|x| (0..k).map(|l| a[x / n * k + l] as f64 * b[l * n + x % n] as f64).sum::<f64>()).collect();
            for (va, vb) in [
                (View::rows(&a, k), View::rows(&b, n)),
                (View::transposed(&at, m), View::rows(&b, n)),
                (View::rows(&a, k), View::transposed(&bt, k)),
                (View::transposed(&at, m), View::transposed(&bt, k)),
            ] {
                let mut c = vec![1.0; m * n];
                matmul(m, n, k, va, vb, Target::rows(&mut c, n), true);
                for (x, y) in c.iter().zip(&plain) {
                    assert!((*x as f64 - 1.0 - y).abs() < 1e-4 * (1.0 + y.abs()), "{m} {n} {k}: {x} {y}");
                }
            }
        }
    }

    #[test]
    fn thread_count_does_not_change_a_bit() {
        let (m, n, k) = (517, 203, 129);
        let (a, b) = (series(m * k, 0.71), series(k * n, 0.37));
        let run = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let mut c = vec![0.0; m * n];
            pool.install(|| matmul(m, n, k, View::rows(&a, k), View::rows(&b, n), Target::rows(&mut c, n), false));
            c.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
        };
        let one = run(1);
        assert!([2, 3, 5].into_iter().all(|threads| run(threads) == one));
    }
}
