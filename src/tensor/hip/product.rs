//! Matrix products: hipBLASLt's where it is installed, else our own kernels (`kernels/gemm.zk.cpp`); and the linear maps made of them.
//!
//! Sums are f32. Operands are bf16, or f32 for the few products that the spec wants exact: those are always our own kernels', which are
//! as exact as f32 and cut long sums.

mod half;
mod library;
mod tables;

use anyhow::{Result, ensure};

use super::{Buf, Hip, Kind, int};
pub use half::KeptHalf;
use library::Library;
pub use tables::{Places, Tables};

/// Work-items of a workgroup of all kernels that multiply, and of those that stand by them.
pub const WORK_ITEMS: u32 = 256;
/// Rows and columns of a workgroup's tile of bf16 operands, and of f32 ones.
pub const TILE: usize = 128;
pub const F32_TILE: usize = 64;
/// Workgroups that keep a whole MI300X at work: two for each of its 304 compute units. A multiple of its eight chiplets.
pub const WORKGROUPS: usize = 608;

/// Fewest numbers of a sum that is worth a workgroup of its own.
const SHORTEST_SUM: usize = 512;
/// Most numbers of one sum of exact products: beside a large partial sum small numbers lose digits.
const LONGEST_SUM: usize = 1 << 13;

/// What products need besides their operands.
pub struct Products {
    library: Option<Library>,
    pub tables: Tables,
}

impl Products {
    /// On the calling thread's device.
    ///
    /// # Errors
    /// When hipBLASLt is there and does not work.
    pub fn open() -> Result<Self> {
        Ok(Self { library: Library::open()?, tables: Tables::default() })
    }

    /// Of our own kernels alone.
    pub fn own() -> Self {
        Self { library: None, tables: Tables::default() }
    }
}

/// How the operands lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Form {
    /// `a bᵀ`: a `[m, k]`, b `[n, k]`.
    Nt,
    /// `a b`: a `[m, k]`, b `[k, n]`.
    Nn,
    /// `aᵀ b`: a `[k, m]`, b `[k, n]`.
    Tn,
}

/// Kinds of the operands; the result is f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Numbers {
    Bf16ToF32,
    F32ToF32,
}

/// A product `c = a b`, or `c += a b`, in one of its forms; c is `[m, n]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Gemm {
    pub form: Form,
    pub numbers: Numbers,
    pub m: usize,
    pub n: usize,
    pub k: usize,
    /// Numbers from row to row of a, b and c.
    pub strides: [usize; 3],
    pub accumulate: bool,
}

impl Gemm {
    /// Of matrices whose rows follow each other; c is overwritten.
    pub fn new(form: Form, numbers: Numbers, m: usize, n: usize, k: usize) -> Self {
        let strides = match form {
            Form::Nt => [k, k, n],
            Form::Nn => [k, n, n],
            Form::Tn => [m, n, n],
        };
        Self { form, numbers, m, n, k, strides, accumulate: false }
    }

    /// Queues the product of device memory that holds the matrices as they are described. (Addresses are typed as those of f32,
    /// whatever is there.)
    pub fn queue(self, hip: &Hip, a: *const f32, b: *const f32, c: *mut f32) -> Result<()> {
        if self.m == 0 || self.n == 0 {
            return Ok(());
        }
        let exact = self.numbers == Numbers::F32ToF32;
        let library = hip.inner.products.library.as_ref().filter(|_| self.k > 0 && !exact);
        let done = match library {
            Some(library) => library.queue(hip, self, a, b, c)?,
            None => false,
        };
        if done { Ok(()) } else { self.queue_own(hip, a, b, c) }
    }

    /// With our own kernels.
    fn queue_own(self, hip: &Hip, a: *const f32, b: *const f32, c: *mut f32) -> Result<()> {
        let Self { m, n, k, strides: [lda, ldb, ldc], .. } = self;
        let splits = self.splits();
        let mut parts = (splits > 1).then(|| hip.f32s(splits * m, n)).transpose()?;
        let parts = parts.as_mut().map_or(std::ptr::null_mut(), Buf::at_mut);
        let accumulate = i32::from(self.accumulate);
        launch!(
            hip, self.kernel(), [self.tiles(), splits], WORK_ITEMS;
            a, b, c, parts, int(m), int(n), int(k), int(lda), int(ldb), int(ldc), int(splits), accumulate,
        )?;
        if splits == 1 {
            return Ok(());
        }
        let quads = m * n.div_ceil(4);
        launch!(hip, "gemm_reduce_f32", [quads.div_ceil(256)], WORK_ITEMS; parts, c, int(m), int(n), int(ldc), int(splits), accumulate)
    }

    fn kernel(&self) -> &'static str {
        match (self.form, self.numbers) {
            (Form::Nt, Numbers::Bf16ToF32) => "gemm_nt_bf16_f32",
            (Form::Nn, Numbers::Bf16ToF32) => "gemm_nn_bf16_f32",
            (Form::Tn, Numbers::Bf16ToF32) => "gemm_tn_bf16_f32",
            (Form::Nt, Numbers::F32ToF32) => "gemm_nt_f32_f32",
            (Form::Nn, Numbers::F32ToF32) => "gemm_nn_f32_f32",
            (Form::Tn, Numbers::F32ToF32) => "gemm_tn_f32_f32",
        }
    }

    fn tiles(&self) -> usize {
        let tile = if self.numbers == Numbers::F32ToF32 { F32_TILE } else { TILE };
        self.m.div_ceil(tile) * self.n.div_ceil(tile)
    }

    /// Parts that the summed index is cut into: as many as keep the device at work, or keep digits. Of the shape alone, so that the
    /// same product always has the same bits.
    fn splits(&self) -> usize {
        let for_work = (WORKGROUPS / self.tiles()).min(self.k / SHORTEST_SUM).max(1);
        let for_digits = if self.numbers == Numbers::F32ToF32 { self.k.div_ceil(LONGEST_SUM) } else { 1 };
        for_work.max(for_digits)
    }
}

/// `x wᵀ` as f32: x `[T, in]`, w `[out, in]`.
pub fn linear(hip: &Hip, x: &Buf, weight: &Buf) -> Result<Buf> {
    ensure!(x.cols() == weight.cols(), "rows of {} numbers meet a weight of {} x {}", x.cols(), weight.rows(), weight.cols());
    let (x, weight) = (hip.as_bf16(x)?, hip.weight_bf16(weight)?);
    let mut y = hip.f32s(x.rows(), weight.rows())?;
    Gemm::new(Form::Nt, Numbers::Bf16ToF32, x.rows(), weight.rows(), x.cols()).queue(hip, x.at(), weight.at(), y.at_mut())?;
    Ok(y)
}

/// Backward of several maps of one input: adds `dyᵀ x` to each `d_weight`, returns the sum of all `dy w`, f32.
///
/// # Errors
/// When there is no weight, or shapes do not fit.
pub fn linear_backward(hip: &Hip, x: &Buf, weights: &[&Buf], dy: &[&Buf], d_weights: &mut [&mut Buf]) -> Result<Buf> {
    ensure!(
        !weights.is_empty() && weights.len() == dy.len() && weights.len() == d_weights.len(),
        "{} weights, {} gradients of outputs, {} of weights",
        weights.len(),
        dy.len(),
        d_weights.len()
    );
    let x = hip.as_bf16(x)?;
    let (tokens, width) = (x.rows(), x.cols());
    let mut dx = hip.f32s(tokens, width)?;
    for (i, ((weight, dy), d_weight)) in weights.iter().zip(dy).zip(d_weights).enumerate() {
        let (out, of) = (weight.rows(), [weight.cols(), dy.rows(), dy.cols(), d_weight.rows(), d_weight.cols()]);
        ensure!(
            of == [width, tokens, out, out, width],
            "gradients of {tokens} x {width} numbers through a weight of {out}: {of:?}"
        );
        ensure!(d_weight.kind() == Kind::F32, "gradients of weights are f32");
        let (weight, dy) = (hip.weight_bf16(weight)?, hip.as_bf16(dy)?);
        let of_weight = Gemm::new(Form::Tn, Numbers::Bf16ToF32, out, width, tokens);
        Gemm { accumulate: true, ..of_weight }.queue(hip, dy.at(), x.at(), d_weight.at_mut())?;
        let of_input = Gemm::new(Form::Nn, Numbers::Bf16ToF32, tokens, width, out);
        Gemm { accumulate: i > 0, ..of_input }.queue(hip, dy.at(), weight.at(), dx.at_mut())?;
    }
    Ok(dx)
}
