//! Random inputs, and the comparison of a backend's numbers with candle's.

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use zaya::tensor::backend::{Backend, Batch};
use zaya::tensor::cpu::Cpu;

use crate::handle_backend::HandleBackend;

/// A backend whose buffers can be read without loss.
pub trait Exact: Backend {
    fn read(&self, buf: &Self::Buf) -> Vec<f64>;
}

impl Exact for HandleBackend {
    fn read(&self, buf: &Self::Buf) -> Vec<f64> {
        HandleBackend::read(self, buf)
    }
}

impl Exact for Cpu {
    fn read(&self, buf: &Self::Buf) -> Vec<f64> {
        self.download(buf).unwrap().iter().map(|v| f64::from(*v)).collect()
    }
}

/// A seeded generator (splitmix64).
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15))
    }
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
    /// A whole number in `low..=high`.
    pub fn pick(&mut self, low: usize, high: usize) -> usize {
        low + (self.next() % (high - low + 1) as u64) as usize
    }
    pub fn chance(&mut self, percent: usize) -> bool {
        self.pick(1, 100) <= percent
    }
    /// Standard normal, by Box and Muller.
    fn normal(&mut self) -> f64 {
        let unit = |x: u64| ((x >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
        let (a, b) = (unit(self.next()), unit(self.next()));
        (-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos()
    }
}

/// One random matrix, as a host list, a candle variable in f64, and whatever buffer a backend makes of it.
/// Its numbers are f32 numbers, so that all three are equal.
pub struct Input {
    pub rows: usize,
    pub cols: usize,
    pub values: Vec<f32>,
    pub var: Var,
}

impl Input {
    pub fn new(rows: usize, cols: usize, values: Vec<f32>) -> Self {
        let tensor = Tensor::from_slice(&values, (rows, cols), &Device::Cpu).unwrap().to_dtype(DType::F64).unwrap();
        Self { rows, cols, values, var: Var::from_tensor(&tensor).unwrap() }
    }
    pub fn random(rng: &mut Rng, rows: usize, cols: usize, mean: f64, spread: f64) -> Self {
        Self::new(rows, cols, (0..rows * cols).map(|_| (mean + spread * rng.normal()) as f32).collect())
    }
    pub fn upload<B: Backend>(&self, backend: &B) -> B::Buf {
        backend.upload(&self.values, self.rows, self.cols).unwrap()
    }
    /// The variable in another shape, still the same variable to autograd.
    pub fn shaped(&self, shape: impl Into<candle_core::Shape>) -> Tensor {
        self.var.as_tensor().reshape(shape.into()).unwrap()
    }
    /// The variable as `[cols]`.
    pub fn vector(&self) -> Tensor {
        self.shaped(self.cols)
    }
}

pub fn host(t: &Tensor) -> Vec<f64> {
    t.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// Asserts ||got - want|| <= tolerance * ||want||. Where nothing is wanted, nothing may be got.
pub fn assert_close(what: &str, got: &[f64], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len(), "{what}: number of elements");
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
    let size = norm(&mut want.iter().copied());
    let off = norm(&mut got.iter().zip(want).map(|(g, w)| g - w));
    // A gradient may vanish by symmetry (one class, one key): then rounding of what cancelled is all there is.
    let floor = 1e-2 * (want.len() as f64).sqrt();
    assert!(off <= tolerance * size.max(floor), "{what}: off by {off:.3e}, size {size:.3e}, relative {:.3e}", off / size);
}

/// Asserts that a buffer holds what candle computed.
pub fn assert_buf<B: Exact>(what: &str, backend: &B, got: &B::Buf, want: &Tensor, tolerance: f64) {
    assert_eq!(backend.shape(got).iter().product::<usize>(), want.elem_count(), "{what}: shape");
    assert_close(what, &backend.read(got), &host(want), tolerance);
}

/// A gradient buffer that is not zero to begin with: a backward pass must add to it.
pub struct Grad<B: Backend> {
    start: Vec<f32>,
    pub buf: B::Buf,
}

impl<B: Exact> Grad<B> {
    pub fn of(backend: &B, input: &Input, rng: &mut Rng) -> Self {
        let start = Input::random(rng, input.rows, input.cols, 0.0, 0.5);
        Self { buf: start.upload(backend), start: start.values }
    }
    /// The start and the buffer apart, for verbs that take a slice of buffers.
    pub fn split(self) -> (Vec<f32>, B::Buf) {
        (self.start, self.buf)
    }
    pub fn join(start: Vec<f32>, buf: B::Buf) -> Self {
        Self { start, buf }
    }
    /// Asserts that exactly the gradient of `input` was added.
    pub fn assert(&self, what: &str, backend: &B, store: &GradStore, input: &Input, tolerance: f64) {
        let got: Vec<f64> = backend.read(&self.buf).iter().zip(&self.start).map(|(g, s)| g - f64::from(*s)).collect();
        assert_close(&format!("gradient of {what}"), &got, &gradient(store, input), tolerance);
    }
}

/// candle's gradient of an input; zeros where none arrives.
pub fn gradient(store: &GradStore, input: &Input) -> Vec<f64> {
    store.get(input.var.as_tensor()).map_or(vec![0.0; input.values.len()], host)
}

/// Asserts the gradient that a backward pass returned.
pub fn assert_gradient<B: Exact>(what: &str, b: &B, got: &B::Buf, store: &GradStore, input: &Input, tolerance: f64) {
    assert_eq!(b.shape(got), [input.rows, input.cols], "shape of the gradient of {what}");
    assert_close(&format!("gradient of {what}"), &b.read(got), &gradient(store, input), tolerance);
}

/// candle's gradients of the sum of `outputs`, each weighed by what a later layer would send back.
pub fn pull_back(outputs: &[(&Tensor, &Input)]) -> GradStore {
    let mut total = Tensor::zeros((), DType::F64, &Device::Cpu).unwrap();
    for (output, weight) in outputs {
        let weighed = (output.flatten_all().unwrap() * weight.shaped(weight.values.len()).detach()).unwrap();
        total = (total + weighed.sum_all().unwrap()).unwrap();
    }
    total.backward().unwrap()
}

/// What a random batch may contain.
#[derive(Clone, Copy, PartialEq)]
pub enum Rows {
    Plain,
    /// Several documents in a row, padding on either side, or both.
    Ragged,
}

/// A batch of `batch` x `seq` tokens with random ids; about one label in four is missing.
pub fn random_batch(rng: &mut Rng, batch: usize, seq: usize, vocab: usize, kind: Rows) -> Batch {
    let tokens = batch * seq;
    let mut out = Batch {
        batch,
        seq,
        ids: (0..tokens).map(|_| rng.pick(0, vocab - 1) as u32).collect(),
        labels: (0..tokens).map(|_| if rng.chance(25) { -100 } else { rng.pick(0, vocab - 1) as i64 }).collect(),
        ..Batch::default()
    };
    if kind == Rows::Plain {
        return out;
    }
    if rng.chance(70) {
        for _ in 0..batch {
            let mut start = 0;
            for position in 0..seq as u32 {
                if rng.chance(30) {
                    start = position;
                }
                out.doc_start.push(start);
            }
        }
    }
    if rng.chance(70) {
        for _ in 0..batch {
            let (left, right) = if rng.chance(50) { (rng.pick(0, seq), 0) } else { (0, rng.pick(0, seq)) };
            out.valid.extend((0..seq).map(|position| position >= left && position < seq - right));
        }
    }
    out
}

/// Runs each generic check on every backend there is.
macro_rules! on_every_backend {
    ($($check:ident),+ $(,)?) => {
        mod handles {
            $(#[test]
            fn $check() {
                super::$check(&crate::handle_backend::HandleBackend::default(), crate::layers_vs_autograd::harness::F64_TOLERANCE);
            })+
        }
        mod cpu {
            $(#[test]
            fn $check() {
                super::$check(&zaya::tensor::cpu::Cpu::default(), crate::layers_vs_autograd::harness::F32_TOLERANCE);
            })+
        }
    };
}
pub(crate) use on_every_backend;

/// Relative errors allowed to backends that compute in f64 and in f32.
pub const F64_TOLERANCE: f64 = 1e-10;
pub const F32_TOLERANCE: f64 = 2e-5;
