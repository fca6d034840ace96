//! The tied head with its loss, in f32 (spec 1.7): `kernels/cross_entropy.zk.cpp`, whose head comment lists the launches, in chunks of
//! labelled rows. The logits of a whole micro-batch never exist.

use std::ptr::null_mut;

use anyhow::{Context, Result, ensure};

use super::host::{download_plain, upload_plain};
use super::product::{F32_TILE, Form, Gemm, Numbers, WORK_ITEMS};
use super::{Buf, Hip, Kind, Rows, int};
use crate::tensor::backend::{Backend, Loss};

/// Most logits of a chunk: 1 GiB.
const CHUNK_LOGITS: usize = 1 << 28;
/// A chunk reads the head three times and adds to its gradient, 20 bytes for `6 * rows` FLOP: this many rows make the arithmetic longer.
const LEAST_ROWS: usize = 128;
const MOST_ROWS: usize = 4096;

/// `y headᵀ`, `[T, V]`.
pub fn logits(hip: &Hip, y: &Buf, head: &Buf) -> Result<Buf> {
    check_head(y, head)?;
    let y = hip.as_f32(y)?;
    let mut out = hip.f32s(y.rows(), head.rows())?;
    Gemm::new(Form::Nt, Numbers::F32ToF32, y.rows(), head.rows(), y.cols()).queue(hip, y.at(), head.at(), out.at_mut())?;
    Ok(out)
}

/// Sum of the losses of rows with a label.
pub fn loss(hip: &Hip, rows: &Rows, y: &Buf, head: &Buf) -> Result<Loss> {
    run(hip, rows, y, head, None)
}

/// The same, and the gradient of `scale` times the sum: added to `d_head`, returned for `y` (f32; 0 in rows without a label).
pub fn loss_and_gradient(hip: &Hip, rows: &Rows, y: &Buf, head: &Buf, scale: f32, d_head: &mut Buf) -> Result<(Loss, Buf)> {
    ensure!(
        (d_head.rows(), d_head.cols(), d_head.kind()) == (head.rows(), head.cols(), Kind::F32),
        "the gradient of a head of {} x {} numbers is {} x {} {:?}",
        head.rows(),
        head.cols(),
        d_head.rows(),
        d_head.cols(),
        d_head.kind()
    );
    let mut dy = hip.zeros(y.rows(), y.cols())?;
    let loss = run(hip, rows, y, head, Some(Gradient { scale, d_head, dy: &mut dy }))?;
    Ok((loss, dy))
}

fn check_head(y: &Buf, head: &Buf) -> Result<()> {
    ensure!(
        y.cols() == head.cols() && head.kind() == Kind::F32,
        "rows of {} numbers meet a head of {} x {} {:?}",
        y.cols(),
        head.rows(),
        head.cols(),
        head.kind()
    );
    Ok(())
}

struct Gradient<'a> {
    scale: f32,
    d_head: &'a mut Buf,
    dy: &'a mut Buf,
}

/// Rows of the chunks that `labelled` rows are cut into: as equal as can be, whole tiles where there are several.
fn chunk_rows(labelled: usize, vocab: usize) -> usize {
    let most = (CHUNK_LOGITS / vocab / F32_TILE * F32_TILE).clamp(LEAST_ROWS, MOST_ROWS);
    let chunks = labelled.div_ceil(most);
    if chunks <= 1 { labelled.max(1) } else { labelled.div_ceil(chunks).next_multiple_of(F32_TILE) }
}

fn run(hip: &Hip, rows: &Rows, y: &Buf, head: &Buf, mut gradient: Option<Gradient>) -> Result<Loss> {
    check_head(y, head)?;
    let (tokens, vocab) = (rows.tokens(), head.rows());
    ensure!(y.rows() == tokens, "{} rows for a batch of {tokens}", y.rows());
    let (index, labels): (Vec<i32>, Vec<i32>) = (0..).zip(&rows.labels).filter(|(_, label)| **label >= 0).unzip();
    if labels.is_empty() {
        return Ok(Loss::default());
    }
    if let Some(i) = labels.iter().position(|label| *label as usize >= vocab) {
        anyhow::bail!("row {} has label {}, but the vocabulary ends at {}", index[i], labels[i], vocab - 1);
    }
    let y = hip.as_f32(y)?;
    // One f64.
    let mut sum = hip.f32s(1, 2)?;
    let each = chunk_rows(index.len(), vocab);
    for (i, (index, labels)) in index.chunks(each).zip(labels.chunks(each)).enumerate() {
        let chunk = Chunk { n: index.len(), index: upload_plain(hip, index)?, labels: upload_plain(hip, labels)? };
        chunk.run(hip, &y, head, gradient.as_mut(), &mut sum, i > 0)?;
    }
    let sum = download_plain(hip, &sum, 1)?.first().copied().context("reading the loss")?;
    Ok(Loss { sum, count: index.len() as u64 })
}

/// Some labelled rows.
struct Chunk {
    n: usize,
    /// i32 `[n]`: their places in the batch.
    index: Buf,
    /// i32 `[n]`.
    labels: Buf,
}

impl Chunk {
    /// Adds the chunk's losses to `sum`, or begins it with them.
    fn run(&self, hip: &Hip, y: &Buf, head: &Buf, gradient: Option<&mut Gradient>, sum: &mut Buf, add: bool) -> Result<()> {
        let (n, vocab, d) = (self.n, head.rows(), head.cols());
        let tiles = vocab.div_ceil(F32_TILE);
        // Rows of logits begin at 16 bytes.
        let stride = vocab.next_multiple_of(4);
        let mut x = hip.f32s(n, d)?;
        let (mut top, mut sums) = (hip.f32s(n, tiles)?, hip.f32s(n, tiles)?);
        let (mut target, mut losses) = (hip.f32s(n, 1)?, hip.f32s(n, 1)?);
        // Exponentials, then gradients, of the logits.
        let mut exps = gradient.is_some().then(|| hip.f32s(n, stride)).transpose()?;
        let scale = gradient.as_ref().map_or(0.0, |g| g.scale);
        launch!(hip, "head_gather", [n], WORK_ITEMS; y.at(), self.index.at(), x.at_mut(), int(d))?;
        let exps_at = exps.as_mut().map_or(null_mut(), Buf::at_mut);
        launch!(
            hip, "head_logits", [n.div_ceil(F32_TILE) * tiles], WORK_ITEMS;
            x.at(), head.at(), self.labels.at(), exps_at, top.at_mut(), sums.at_mut(), target.at_mut(),
            int(n), int(vocab), int(d), int(stride), 0i32, int(vocab),
        )?;
        launch!(
            hip, "head_normalise", [n], WORK_ITEMS;
            top.at_mut(), sums.at(), target.at(), losses.at_mut(), int(tiles), scale,
        )?;
        launch!(hip, "head_loss", [1], WORK_ITEMS; losses.at(), sum.at_mut(), int(n), i32::from(add))?;
        let (Some(gradient), Some(mut exps)) = (gradient, exps) else { return Ok(()) };
        launch!(
            hip, "head_scale", [vocab.div_ceil(4 * WORK_ITEMS as usize), n], WORK_ITEMS;
            exps.at_mut(), top.at(), self.labels.at(), int(vocab), int(stride), 0i32, int(vocab), scale,
        )?;
        let of_head = Gemm::new(Form::Tn, Numbers::F32ToF32, vocab, d, n);
        let of_head = Gemm { strides: [stride, d, d], accumulate: true, ..of_head };
        of_head.queue(hip, exps.at(), x.at(), gradient.d_head.at_mut())?;
        let mut dx = hip.f32s(n, d)?;
        let of_rows = Gemm::new(Form::Nn, Numbers::F32ToF32, n, d, vocab);
        Gemm { strides: [stride, d, d], ..of_rows }.queue(hip, exps.at(), head.at(), dx.at_mut())?;
        launch!(hip, "head_scatter", [n], WORK_ITEMS; dx.at(), self.index.at(), gradient.dy.at_mut(), int(d))
    }
}
