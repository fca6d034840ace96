//! The HIP backend: every verb as launches of our kernels (`kernels/`) and hipBLASLt's products in one stream of a device.
//!
//! Nothing waits for the device but what brings numbers to the host. Products work on bf16 operands with f32 sums; what spec 1.7 keeps in
//! f32 is f32 here. A buffer says how its numbers are stored ([`Kind`]); a verb that gets another kind than its kernel reads casts first.

// First, for its macro is known only behind it.
#[macro_use]
mod launch;

mod adamw;
mod arena;
mod attention;
mod buf;
mod cca;
mod elementwise;
mod embedding;
mod experts;
mod graph;
mod head;
mod host;
mod kernels;
mod measured;
mod muon;
mod norm;
mod product;
mod router;
mod rows;
mod share;

use std::ops::Range;
use std::sync::Arc;

use anyhow::{Context as _, Result, bail, ensure};
use hip_sys::{Hip as Library, Stream};

use super::backend::*;
use super::rope::Tables;
use arena::Arena;
pub use arena::ArenaUse;
pub use buf::{Buf, Kind};
use graph::Graphs;
use kernels::Kernels;
pub use kernels::architectures;
pub use measured::{DeviceFacts, Operands, Pattern, Streams};
use product::Products;
pub use router::Routing;
pub use rows::Rows;
pub use share::{Routes, place_of};

/// A device of this machine, ready to train. Clones are the same device and stream.
#[derive(Clone)]
pub struct Hip {
    inner: Arc<Inner>,
}

struct Inner {
    /// None = a backend that only plans: nothing is queued, and what comes to the host is 0.
    device: Option<Device>,
    products: Products,
    rope: Tables<Buf>,
    /// Declared before the arena, for graphs name addresses in it.
    graphs: Graphs,
    arena: Arc<Arena>,
}

struct Device {
    /// Which of the machine's devices it is.
    number: i32,
    stream: Stream,
    kernels: Kernels,
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Memory goes back to the device after this: nothing may still be at work in it. An error was told by whoever waited before.
        if let Some(device) = &self.device {
            let _ = device.stream.synchronize();
        }
    }
}

/// Opens HIP, and counts its devices.
///
/// # Errors
/// When there is no HIP, or no device.
fn library() -> Result<(&'static Library, i32)> {
    let library = Library::open().context("opening HIP for --backend hip")?;
    let count = library.device_count().context("looking for GPUs")?;
    ensure!(count > 0, "HIP ({}) finds no GPU: --backend cpu trains on the processor", library.file().display());
    Ok((library, count))
}

/// Devices of this machine that `--backend hip` could use.
///
/// # Errors
/// When there is no HIP, or no device.
pub fn devices() -> Result<usize> {
    library().map(|(_, count)| count as usize)
}

impl Hip {
    /// The device that a rank of this machine works on: ranks are dealt to the devices in turn. Makes it the calling thread's.
    ///
    /// # Errors
    /// When there is no HIP, no device, or none that this executable has kernels for.
    pub fn open(local_rank: usize) -> Result<Self> {
        let (library, count) = library()?;
        let device = (local_rank % count as usize) as i32;
        library.set_device(device)?;
        let arch = library.device_properties(device)?.arch();
        let kernels = Kernels::load(library, &arch).with_context(|| format!("using GPU {device}"))?;
        let stream = Stream::new(library)?;
        let arena = Arena::new(library);
        let (products, rope) = (Products::open()?, Default::default());
        Ok(Self {
            inner: Arc::new(Inner {
                device: Some(Device { number: device, stream, kernels }),
                products,
                rope,
                graphs: Graphs::default(),
                arena,
            }),
        })
    }

    /// A backend without a device: a step on it tells, by [`Self::arena_use`], how much memory one needs. Products are those of our own
    /// kernels, whose parts of long sums hipBLASLt's workspace takes the place of.
    pub fn planning() -> Self {
        let (products, rope, arena) = (Products::own(), Default::default(), Arena::planning());
        Self { inner: Arc::new(Inner { device: None, products, rope, graphs: Graphs::default(), arena }) }
    }

    /// Takes `bytes` of the device's memory now, in one piece.
    ///
    /// # Errors
    /// When the device has not so much.
    pub fn reserve(&self, bytes: usize) -> Result<()> {
        self.inner.arena.reserve(bytes)
    }

    /// Bytes of the device's memory that nobody has taken.
    ///
    /// # Errors
    /// When the library does not say.
    pub fn free_bytes(&self) -> Result<usize> {
        Ok(Library::open()?.memory_info()?.free_bytes)
    }

    /// What this backend took of the device's memory.
    pub fn arena_use(&self) -> ArenaUse {
        self.inner.arena.usage()
    }

    /// How often each kernel was launched, by name.
    pub fn launches(&self) -> Vec<(&'static str, u64)> {
        self.device().map_or_else(Vec::new, |device| device.kernels.launches())
    }

    /// Waits for all work.
    ///
    /// # Errors
    /// When some of it failed.
    pub fn synchronize(&self) -> Result<()> {
        Ok(self.device().map_or(Ok(()), |device| device.stream.synchronize())?)
    }

    /// None where this backend only plans.
    fn device(&self) -> Option<&Device> {
        self.inner.device.as_ref()
    }

    /// The stream that everything is queued in. None where this backend only plans.
    fn stream(&self) -> Option<&Stream> {
        self.device().map(|device| &device.stream)
    }

    /// A matrix to be written; it holds whatever was there before.
    fn matrix(&self, rows: usize, cols: usize, kind: Kind) -> Result<Buf> {
        let bytes = rows * cols * kind.bytes();
        let block =
            self.inner.arena.block(bytes).with_context(|| format!("taking {bytes} bytes for a matrix of {rows} x {cols}"))?;
        Ok(Buf::new(block, rows, cols, kind))
    }

    fn f32s(&self, rows: usize, cols: usize) -> Result<Buf> {
        self.matrix(rows, cols, Kind::F32)
    }

    fn bf16s(&self, rows: usize, cols: usize) -> Result<Buf> {
        self.matrix(rows, cols, Kind::Bf16)
    }
}

/// A size as kernels take it.
fn int(n: usize) -> i32 {
    i32::try_from(n).expect("sizes of a micro-batch lie below 2^31")
}

impl Backend for Hip {
    type Buf = Buf;
    type Rows = Rows;
    type Routing = router::Routing;
    /// 1 / RMS of each row, `[T, 1]`.
    type NormSaved = Buf;
    type CcaSaved = cca::Saved;
    type AttentionSaved = attention::Saved;
    type RouteSaved = router::Saved;
    type ExpertSaved = experts::Saved;

    fn zeros(&self, rows: usize, cols: usize) -> Result<Buf> {
        let mut buf = self.f32s(rows, cols)?;
        self.clear(&mut buf)?;
        Ok(buf)
    }

    fn upload(&self, data: &[f32], rows: usize, cols: usize) -> Result<Buf> {
        ensure!(data.len() == rows * cols, "a buffer of {rows} x {cols} got {} numbers", data.len());
        host::upload(self, data, rows, cols)
    }

    fn download(&self, buf: &Buf) -> Result<Vec<f32>> {
        host::download(self, buf)
    }

    fn shape(&self, buf: &Buf) -> [usize; 2] {
        [buf.rows(), buf.cols()]
    }

    fn rows(&self, batch: &Batch) -> Result<Rows> {
        Rows::new(self, batch)
    }

    fn clear(&self, buf: &mut Buf) -> Result<()> {
        host::clear(self, buf)
    }

    fn add_assign(&self, a: &mut Buf, b: &Buf) -> Result<()> {
        elementwise::add_assign(self, a, b)
    }

    fn mask_rows(&self, rows: &Rows, x: Buf) -> Result<Buf> {
        elementwise::mask_rows(self, rows, x)
    }

    fn concat_rows(&self, batch: usize, a: &Buf, b: &Buf) -> Result<Buf> {
        host::concat_rows(self, batch, a, b)
    }

    fn last_rows(&self, batch: usize, x: &Buf, n: usize) -> Result<Buf> {
        host::last_rows(self, batch, x, n)
    }

    fn gather_rows(&self, x: &Buf, index: &[u32]) -> Result<Buf> {
        share::check_rows(index, x)?;
        self.take_rows(&*self.as_f32(x)?, &host::upload_plain(self, index)?, index.len(), Kind::F32)
    }

    fn scatter_rows(&self, x: &Buf, index: &[u32], into: &mut Buf) -> Result<()> {
        share::check_rows(index, into)?;
        ensure!(x.rows() == index.len(), "{} rows for {} places", x.rows(), index.len());
        self.put_rows(&*self.as_f32(x)?, &host::upload_plain(self, index)?, into)
    }

    fn embed(&self, rows: &Rows, table: &Buf) -> Result<Buf> {
        embedding::forward(self, rows, table)
    }

    fn embed_backward(&self, rows: &Rows, dy: &Buf, pad: Option<u32>, d_table: &mut Buf) -> Result<()> {
        embedding::backward(self, rows, dy, pad, d_table)
    }

    fn affine(&self, x: &Buf, scale: &Buf, bias: &Buf) -> Result<Buf> {
        elementwise::affine(self, x, scale, bias)
    }

    fn affine_backward(&self, x: &Buf, scale: &Buf, bias: &Buf, dy: &Buf, d_scale: &mut Buf, d_bias: &mut Buf) -> Result<Buf> {
        elementwise::affine_backward(self, x, scale, bias, dy, d_scale, d_bias)
    }

    fn residual_scale(&self, _: &Buf, _: &Buf, _: Merge<&Buf>) -> Result<Buf> {
        bail!("a residual merge without its norm is no verb of the HIP backend: the model merges and norms at once")
    }

    fn residual_scale_backward(&self, _: &Buf, _: &Buf, _: Merge<&Buf>, _: &Buf, _: Merge<&mut Buf>) -> Result<(Buf, Buf)> {
        bail!("a residual merge without its norm is no verb of the HIP backend: the model merges and norms at once")
    }

    fn rms_norm(&self, x: &Buf, weight: &Buf, eps: f64) -> Result<(Buf, Buf)> {
        norm::forward(self, x, weight, eps)
    }

    fn rms_norm_backward(&self, x: &Buf, weight: &Buf, saved: &Buf, dy: &Buf, d_weight: &mut Buf) -> Result<Buf> {
        norm::backward(self, x, weight, saved, dy, d_weight)
    }

    fn residual_norm(&self, branch: &Buf, stream: &Buf, p: Merge<&Buf>, norm: &Buf, eps: f64) -> Result<(Buf, Buf, Buf)> {
        norm::merge_forward(self, branch, stream, p, norm, eps)
    }

    fn residual_norm_backward(
        &self,
        x: ResidualNorm<'_, Self>,
        dh: &Buf,
        dy: Option<&Buf>,
        g: Merge<&mut Buf>,
        d_norm: &mut Buf,
    ) -> Result<(Buf, Buf)> {
        norm::merge_backward(self, x, dh, dy, g, d_norm)
    }

    fn linear(&self, x: &Buf, weight: &Buf) -> Result<Buf> {
        product::linear(self, x, weight)
    }

    fn linear_backward(&self, x: &Buf, weight: &Buf, dy: &Buf, d_weight: &mut Buf) -> Result<Buf> {
        product::linear_backward(self, x, &[weight], &[dy], &mut [d_weight])
    }

    fn project_backward<const N: usize>(&self, x: &Buf, weights: [&Buf; N], dy: [&Buf; N], mut d: [&mut Buf; N]) -> Result<Buf> {
        product::linear_backward(self, x, &weights, &dy, &mut d)
    }

    fn cca_mix(
        &self,
        rows: &Rows,
        shape: CcaShape,
        x: CcaIn<&Buf>,
        p: CcaParams<&Buf>,
        halo: Option<Halo<&Buf>>,
    ) -> Result<(Qkv<Buf>, cca::Saved)> {
        cca::forward(self, rows, shape, x, p, halo)
    }

    fn cca_mix_backward(
        &self,
        rows: &Rows,
        shape: CcaShape,
        x: CcaIn<&Buf>,
        p: CcaParams<&Buf>,
        halo: Option<Halo<&Buf>>,
        saved: &cca::Saved,
        d: Qkv<&Buf>,
        g: CcaParams<&mut Buf>,
    ) -> Result<(CcaIn<Buf>, Option<Halo<Buf>>)> {
        cca::backward(self, rows, shape, x, p, halo, saved, d, g)
    }

    fn causal_attention(&self, rows: &Rows, shape: AttentionShape, x: Qkv<&Buf>) -> Result<(Buf, attention::Saved)> {
        attention::forward(self, rows, shape, x)
    }

    fn causal_attention_backward(
        &self,
        rows: &Rows,
        shape: AttentionShape,
        x: Qkv<&Buf>,
        out: &Buf,
        saved: &attention::Saved,
        d_out: &Buf,
    ) -> Result<Qkv<Buf>> {
        attention::backward(self, rows, shape, x, out, saved, d_out)
    }

    fn route(
        &self,
        rows: &Rows,
        h: &Buf,
        prev: Option<&Buf>,
        p: RouterParams<&Buf>,
        balancing_biases: &Buf,
        norm_eps: f64,
        pinned: Option<&PinnedRoutes>,
    ) -> Result<(router::Routing, Buf, router::Saved)> {
        router::forward(self, rows, h, prev, p, balancing_biases, norm_eps, pinned)
    }

    fn route_backward(
        &self,
        h: &Buf,
        prev: Option<&Buf>,
        p: RouterParams<&Buf>,
        routing: &router::Routing,
        saved: &router::Saved,
        d_prob: &Buf,
        d_state: Option<&Buf>,
        g: RouterParams<&mut Buf>,
        dh: &mut Buf,
    ) -> Result<Option<Buf>> {
        router::backward(self, h, prev, p, routing, saved, d_prob, d_state, g, dh)
    }

    fn route_logits(&self, routing: &router::Routing, saved: &router::Saved) -> Result<Buf> {
        router::logits(self, routing, saved)
    }

    fn route_choices(&self, routing: &router::Routing) -> Result<Vec<u32>> {
        router::choices(self, routing)
    }

    fn route_probs(&self, routing: &router::Routing) -> Result<Vec<f32>> {
        router::probs(self, routing)
    }

    fn route_counts(&self, routing: &router::Routing) -> Result<Vec<u64>> {
        router::counts(self, routing)
    }

    fn expert_ffn(&self, h: &Buf, routing: &router::Routing, experts: &[Buf], skip: SkipMode) -> Result<(Buf, experts::Saved)> {
        experts::forward(self, h, routing, experts, skip)
    }

    fn expert_ffn_backward(
        &self,
        h: &Buf,
        routing: &router::Routing,
        experts: &[Buf],
        skip: SkipMode,
        saved: &experts::Saved,
        dy: &Buf,
        g: &mut [Buf],
    ) -> Result<(Buf, Buf)> {
        experts::backward(self, h, routing, experts, skip, saved, dy, g)
    }

    fn logits(&self, y: &Buf, head: &Buf) -> Result<Buf> {
        head::logits(self, y, head)
    }

    fn cross_entropy(&self, rows: &Rows, y: &Buf, head: &Buf) -> Result<Loss> {
        head::loss(self, rows, y, head)
    }

    fn cross_entropy_backward(&self, rows: &Rows, y: &Buf, head: &Buf, grad_scale: f32, d_head: &mut Buf) -> Result<(Loss, Buf)> {
        head::loss_and_gradient(self, rows, y, head, grad_scale, d_head)
    }

    fn sq_norm_rows(&self, x: &Buf, rows: Range<usize>) -> Result<f64> {
        elementwise::sum_of_squares(self, x, rows)
    }

    fn muon(&self, items: &mut [MuonItem<'_, Buf>], step: MuonStep) -> Result<()> {
        muon::update(self, items, step)
    }

    fn adamw_rows(
        &self,
        weight: &mut Buf,
        grad: &Buf,
        rows: Range<usize>,
        m: &mut Buf,
        v: &mut Buf,
        at: usize,
        step: AdamWStep,
    ) -> Result<()> {
        adamw::update(self, weight, grad, rows, m, v, at, step)
    }
}
