//! Buffers in and out, and the verbs that only move numbers.

use zaya::tensor::backend::Batch;

use super::harness::{Exact, Input, Rng, on_every_backend};

on_every_backend!(in_and_out, clear_and_add, padding_rows_become_zero, rows_of_sequences, sums_of_squares);

/// A buffer from small whole numbers, row-major.
fn buf<B: Exact>(b: &B, rows: usize, cols: usize, first: f32) -> B::Buf {
    let values: Vec<f32> = (0..rows * cols).map(|i| first + i as f32).collect();
    b.upload(&values, rows, cols).unwrap()
}

fn in_and_out<B: Exact>(b: &B, _tolerance: f64) {
    let values = [1.5, -0.0, f32::MAX, f32::MIN_POSITIVE, -3.25, 1e-20];
    let x = b.upload(&values, 2, 3).unwrap();
    assert_eq!(b.shape(&x), [2, 3]);
    assert_eq!(b.download(&x).unwrap(), values);
    let zeros = b.zeros(3, 5).unwrap();
    assert_eq!((b.shape(&zeros), b.download(&zeros).unwrap()), ([3, 5], vec![0.0; 15]));
}

fn clear_and_add<B: Exact>(b: &B, _tolerance: f64) {
    let mut x = buf(b, 3, 7, 1.0);
    let y = buf(b, 3, 7, 100.0);
    b.add_assign(&mut x, &y).unwrap();
    assert_eq!(b.read(&x), (0..21).map(|i| f64::from(101 + 2 * i)).collect::<Vec<_>>());
    b.clear(&mut x).unwrap();
    assert_eq!(b.read(&x), [0.0; 21]);
    b.add_assign(&mut x, &y).unwrap();
    assert_eq!(b.read(&x), b.read(&y));
}

fn padding_rows_become_zero<B: Exact>(b: &B, _tolerance: f64) {
    let mut batch = Batch { batch: 2, seq: 2, ids: vec![0; 4], ..Batch::default() };
    let all = b.mask_rows(&b.rows(&batch).unwrap(), buf(b, 4, 2, 1.0)).unwrap();
    assert_eq!(b.read(&all), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]);
    batch.valid = vec![false, true, true, false];
    let some = b.mask_rows(&b.rows(&batch).unwrap(), buf(b, 4, 2, 1.0)).unwrap();
    assert_eq!(b.read(&some), [0.0, 0.0, 3.0, 4.0, 5.0, 6.0, 0.0, 0.0]);
}

fn rows_of_sequences<B: Exact>(b: &B, _tolerance: f64) {
    let x = buf(b, 4, 1, 1.0); // sequences [1 2] [3 4]
    let y = buf(b, 2, 1, 10.0); // sequences [10] [11]
    let joined = b.concat_rows(2, &x, &y).unwrap();
    assert_eq!((b.shape(&joined), b.read(&joined)), ([6, 1], vec![1.0, 2.0, 10.0, 3.0, 4.0, 11.0]));
    assert_eq!(b.read(&b.concat_rows(1, &x, &y).unwrap()), [1.0, 2.0, 3.0, 4.0, 10.0, 11.0]);
    assert_eq!(b.read(&b.last_rows(2, &joined, 2).unwrap()), [2.0, 10.0, 4.0, 11.0]);
    assert_eq!(b.read(&b.last_rows(2, &joined, 3).unwrap()), b.read(&joined));
    assert_eq!(b.read(&b.last_rows(1, &buf(b, 3, 2, 1.0), 1).unwrap()), [5.0, 6.0]);
}

fn sums_of_squares<B: Exact>(b: &B, _tolerance: f64) {
    assert_eq!(b.sq_norm(&buf(b, 1, 3, 1.0)).unwrap(), 14.0);
    assert_eq!(b.sq_norm(&b.zeros(5, 5).unwrap()).unwrap(), 0.0);
    // In f64: squares that overflow f32, and many small ones that would vanish beside a large one.
    assert_eq!(b.sq_norm(&b.upload(&[1e30, 0.0], 1, 2).unwrap()).unwrap(), f64::from(1e30f32).powi(2));
    let x = Input::random(&mut Rng::new(1), 37, 53, 0.0, 1.0);
    let want: f64 = x.values.iter().map(|v| f64::from(*v).powi(2)).sum();
    assert!((b.sq_norm(&x.upload(b)).unwrap() / want - 1.0).abs() < 1e-12);
}
