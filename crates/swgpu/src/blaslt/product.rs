//! The product itself: `D = alpha * op(A) * op(B) + beta * C + bias`, sums in f32 by ascending `k`.

use half::bf16;
use multiversion::multiversion;

use super::Element;
use super::descriptors::Layout;
use crate::hip::copy::Place;

/// Everything of one call.
pub struct Call {
    pub transpose_a: bool,
    pub transpose_b: bool,
    pub a: (Place, Layout),
    pub b: (Place, Layout),
    /// Not read if beta is 0.
    pub c: Option<(Place, Layout)>,
    pub d: (Place, Layout),
    pub bias: Option<(Place, Element)>,
    pub alpha: f32,
    pub beta: f32,
}

/// Element `index` of a matrix at `data`.
///
/// # Safety
/// The element lies in live memory.
unsafe fn read(data: *const u8, element: Element, index: usize) -> f32 {
    // SAFETY: this function's contract.
    unsafe {
        match element {
            Element::F32 => data.cast::<f32>().add(index).read_unaligned(),
            Element::Bf16 => bf16::from_bits(data.cast::<u16>().add(index).read_unaligned()).to_f32(),
        }
    }
}

/// One matrix of a batch as f32, `columns` columns of `rows`, transposed if asked.
fn gather(place: &Place, layout: &Layout, batch: usize, transpose: bool) -> Vec<f32> {
    let (rows, columns) = (layout.rows as usize, layout.columns as usize);
    let start = batch * layout.stride as usize;
    let at = |row: usize, column: usize| start + column * layout.leading as usize + row;
    let data = place.data();
    // SAFETY: the call has checked that the whole extent of the layout is live.
    let value = |row: usize, column: usize| unsafe { read(data, layout.element, at(row, column)) };
    match transpose {
        false => (0..columns).flat_map(|column| (0..rows).map(move |row| value(row, column))).collect(),
        true => (0..rows).flat_map(|row| (0..columns).map(move |column| value(row, column))).collect(),
    }
}

/// `sums` (column-major, m x n) of a (m x k) times b (k x n).
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+avx2+fma", "x86_64+avx2+fma"))]
fn multiply(a: &[f32], b: &[f32], sums: &mut [f32], m: usize, k: usize) {
    for (b, sums) in b.chunks_exact(k).zip(sums.chunks_exact_mut(m)) {
        for (a, &factor) in a.chunks_exact(m).zip(b) {
            for (sum, &value) in sums.iter_mut().zip(a) {
                *sum = value.mul_add(factor, *sum);
            }
        }
    }
}

/// Checks the columns, not what lies between them.
fn check_written((place, layout): &(Place, Layout), name: &str) -> Result<(), String> {
    let bytes = layout.element.bytes();
    for batch in 0..layout.batches as usize {
        for column in 0..layout.columns as usize {
            let first = batch * layout.stride as usize + column * layout.leading as usize;
            place.at(first * bytes).check_written(layout.rows as usize * bytes, name)?;
        }
    }
    Ok(())
}

impl Call {
    /// Rows, columns and depth of the product.
    pub fn sizes(&self) -> (usize, usize, usize) {
        let (rows_a, columns_a) = (self.a.1.rows as usize, self.a.1.columns as usize);
        let (m, k) = if self.transpose_a { (columns_a, rows_a) } else { (rows_a, columns_a) };
        (m, self.d.1.columns as usize, k)
    }

    pub fn run(&self) -> Result<(), String> {
        let (m, n, k) = self.sizes();
        check_written(&self.a, "matrix A of a product")?;
        check_written(&self.b, "matrix B of a product")?;
        if let Some(c) = &self.c {
            check_written(c, "matrix C of a product")?;
        }
        for batch in 0..self.d.1.batches as usize {
            let a = gather(&self.a.0, &self.a.1, batch, self.transpose_a);
            let b = gather(&self.b.0, &self.b.1, batch, self.transpose_b);
            let mut sums = vec![0f32; m * n];
            multiply(&a, &b, &mut sums, m, k);
            if self.alpha != 1.0 {
                sums.iter_mut().for_each(|sum| *sum *= self.alpha);
            }
            if let Some((place, layout)) = &self.c {
                let c = gather(place, layout, batch, false);
                sums.iter_mut().zip(c).for_each(|(sum, c)| *sum = self.beta.mul_add(c, *sum));
            }
            if let Some((place, element)) = &self.bias {
                place.check_written(m * element.bytes(), "the bias of a product")?;
                for column in sums.chunks_exact_mut(m) {
                    for (row, sum) in column.iter_mut().enumerate() {
                        // SAFETY: the call has checked that `m` elements are live.
                        *sum += unsafe { read(place.data(), *element, row) };
                    }
                }
            }
            self.scatter(&sums, batch, m);
        }
        Ok(())
    }

    fn scatter(&self, sums: &[f32], batch: usize, m: usize) {
        let (place, layout) = &self.d;
        let start = batch * layout.stride as usize;
        for (column, values) in sums.chunks_exact(m).enumerate() {
            let first = start + column * layout.leading as usize;
            for (row, &value) in values.iter().enumerate() {
                // SAFETY: the call has checked that the whole extent of the layout is live.
                unsafe {
                    match layout.element {
                        Element::F32 => place.data().cast::<f32>().add(first + row).write_unaligned(value),
                        Element::Bf16 => {
                            place.data().cast::<u16>().add(first + row).write_unaligned(bf16::from_f32(value).to_bits())
                        }
                    }
                }
            }
            place.at(first * layout.element.bytes()).mark_written(m * layout.element.bytes());
        }
    }
}
