//! What ranks that share work do with a device's buffers: where they are, and copies, sums and gathers of parts of them. All of it is
//! queued in the backend's stream.

use std::ops::Range;

use anyhow::{Context, Result, ensure};
use hip_sys::{Hip as Library, Stream};

use super::host::{copy_rows, download_plain, upload_plain};
use super::product::WORK_ITEMS;
use super::router::Routing;
use super::{Buf, Hip, Kind, Rows, int};
use crate::tensor::backend::SkipMode;

const ITEMS: u32 = 256;
const PLANNING: &str = "a backend that only plans has no device to share work with";

impl Buf {
    /// Where number `at` is on the device, to be read by what is queued.
    pub fn address(&self, at: usize) -> usize {
        self.at() as usize + at * self.kind().bytes()
    }

    /// As `address`, to be changed by what is queued.
    pub fn address_mut(&mut self, at: usize) -> usize {
        self.at_mut() as usize + at * self.kind().bytes()
    }
}

/// The library, and where the device of a rank of this machine is on its buses, if that is told.
///
/// # Errors
/// When there is no HIP, or no device.
pub fn place_of(local_rank: usize) -> Result<(&'static Library, i32, Option<String>)> {
    let (library, count) = super::library()?;
    let device = (local_rank % count as usize) as i32;
    Ok((library, device, library.pci_bus_id(device).ok()))
}

impl Hip {
    /// Which of the machine's devices it is.
    ///
    /// # Errors
    /// Of a backend that only plans.
    pub fn device_number(&self) -> Result<i32> {
        Ok(self.device().context(PLANNING)?.number)
    }

    /// The stream that all verbs are queued in.
    ///
    /// # Errors
    /// Of a backend that only plans.
    pub fn main_stream(&self) -> Result<&Stream> {
        self.stream().context(PLANNING)
    }

    /// A matrix to be written by others: it holds whatever was there before.
    pub fn room(&self, rows: usize, cols: usize, kind: Kind) -> Result<Buf> {
        self.matrix(rows, cols, kind)
    }

    /// Numbers `at..` of `to` become those of `from` in `range`.
    pub fn copy_part(&self, to: &mut Buf, at: usize, from: &Buf, range: Range<usize>) -> Result<()> {
        check(to, at, from, &range)?;
        let address = to.address_mut(at);
        self.copy_numbers(address, from, range)
    }

    /// As `copy_part`, into a weight that others may hold a reference to: rows that come from other ranks. What was queued before reads
    /// what was there before.
    pub fn copy_arrived(&self, to: &Buf, at: usize, from: &Buf, range: Range<usize>) -> Result<()> {
        check(to, at, from, &range)?;
        to.forget_half();
        self.copy_numbers(to.address(at), from, range)
    }

    fn copy_numbers(&self, to: usize, from: &Buf, range: Range<usize>) -> Result<()> {
        copy_rows(self, to as *const f32, from.address(range.start) as *const f32, range.len() * from.kind().bytes())
    }

    /// Adds the f32 numbers of `from` in `range` to numbers `at..` of `to`, which may be bf16.
    pub fn add_part(&self, to: &mut Buf, at: usize, from: &Buf, range: Range<usize>) -> Result<()> {
        let n = range.len();
        ensure!(
            at + n <= to.len() && range.end <= from.len() && from.kind() == Kind::F32,
            "adding numbers {range:?} of {} to {at}.. of {}",
            from.len(),
            to.len()
        );
        let groups = n.div_ceil(ITEMS as usize);
        let from = from.address(range.start) as *const f32;
        if to.kind() == Kind::F32 {
            let to = to.address_mut(at) as *mut f32;
            return launch!(self, "add_assign", [groups], ITEMS; to, from, n as i64);
        }
        let mut sum = self.f32s(1, n)?;
        let to = to.address_mut(at) as *mut f32;
        launch!(self, "cast_bf16_f32", [groups], ITEMS; to.cast_const(), sum.at_mut(), n as i64)?;
        launch!(self, "add_assign", [groups], ITEMS; sum.at_mut(), from, n as i64)?;
        launch!(self, "cast_f32_bf16", [groups], ITEMS; sum.at(), to, n as i64)
    }

    /// Row i of the outcome is row `order[i]` of `x`, for the first `n` of `order` (i32). bf16 stays bf16.
    pub fn take_rows(&self, x: &Buf, order: &Buf, n: usize, kind: Kind) -> Result<Buf> {
        ensure!(n <= order.len(), "{n} rows of an order of {}", order.len());
        super::experts::take(self, x, order, n, kind, None)
    }

    /// The reverse: row `order[i]` of `out` becomes row i of `x`, both f32.
    pub fn put_rows(&self, x: &Buf, order: &Buf, out: &mut Buf) -> Result<()> {
        ensure!(
            x.rows() <= order.len() && x.cols() == out.cols() && x.kind() == Kind::F32 && out.kind() == Kind::F32,
            "scattering {} x {} {:?} into {} x {} {:?}",
            x.rows(),
            x.cols(),
            x.kind(),
            out.rows(),
            out.cols(),
            out.kind()
        );
        launch!(self, "experts_unpermute_f32", [x.rows()], WORK_ITEMS; x.at(), order.at(), out.at_mut(), int(x.cols()))
    }

    /// Outputs of rows of the skip class, into their rows of `out` (f32).
    pub fn skip_forward(&self, h: &Buf, routing: &Routing, skip: SkipMode, out: &mut Buf) -> Result<()> {
        super::experts::skip_forward(self, h, routing, skip, out)
    }

    /// Gradients of these rows, into their rows of `dh` and `d_prob` (f32).
    pub fn skip_backward(
        &self,
        h: &Buf,
        routing: &Routing,
        skip: SkipMode,
        dy: &Buf,
        dh: &mut Buf,
        d_prob: &mut Buf,
    ) -> Result<()> {
        super::experts::skip_backward(self, h, routing, skip, dy, dh, d_prob)
    }
}

/// That there are such rows.
pub(super) fn check_rows(index: &[u32], of: &Buf) -> Result<()> {
    ensure!(index.iter().all(|i| (*i as usize) < of.rows()), "rows {index:?} of a matrix of {}", of.rows());
    Ok(())
}

fn check(to: &Buf, at: usize, from: &Buf, range: &Range<usize>) -> Result<()> {
    ensure!(
        to.kind() == from.kind() && at + range.len() <= to.len() && range.end <= from.len(),
        "copying numbers {range:?} of {} {:?} to {at}.. of {} {:?}",
        from.len(),
        from.kind(),
        to.len(),
        to.kind()
    );
    Ok(())
}

/// Where rows go, on the host.
pub struct Routes {
    /// Rows by class, and where each class begins, `[classes + 1]`.
    pub order: Vec<u32>,
    pub offsets: Vec<u32>,
    pub prob: Vec<f32>,
}

impl Routing {
    /// i32 `[T]`: rows by class, those of the skip class last.
    pub fn order(&self) -> &Buf {
        &self.order
    }

    /// Brings what other ranks must be told to the host.
    pub fn routes(&self, hip: &Hip) -> Result<Routes> {
        let rows = self.prob.rows();
        Ok(Routes {
            order: download_plain(hip, &self.order, rows)?,
            offsets: download_plain(hip, &self.offsets, self.experts + 2)?,
            prob: download_plain(hip, &self.prob, rows)?,
        })
    }

    /// Of rows that came from elsewhere: `choice` and `prob` of each, and the `order` of them by choice.
    pub fn given(hip: &Hip, choice: &[u32], prob: &[f32], order: &[u32], experts: usize) -> Result<Self> {
        let mut count = vec![0u32; experts + 1];
        choice.iter().for_each(|c| count[*c as usize] += 1);
        let (mut offsets, mut first) = (vec![0u32], vec![0u32]);
        for n in &count {
            offsets.push(offsets[offsets.len() - 1] + n);
            first.push(first[first.len() - 1] + n.div_ceil(super::product::TILE as u32));
        }
        // The skip class has no tiles, so that its entry is the number of all.
        first.truncate(experts + 1);
        let mut of_rows = hip.f32s(prob.len(), 1)?;
        super::host::overwrite(hip, &mut of_rows, prob)?;
        Ok(Self {
            choice: upload_plain(hip, choice)?,
            prob: of_rows,
            order: upload_plain(hip, order)?,
            offsets: upload_plain(hip, &offsets)?,
            first: upload_plain(hip, &first)?,
            experts,
            counts: upload_plain(hip, &count)?,
        })
    }
}

impl Rows {
    /// Number of row `t`'s token among those of all sequences of this batch, chunks that are elsewhere included.
    pub fn token(&self, t: usize) -> u32 {
        let (chunk, within) = (t / self.seq, t % self.seq);
        let (per_sequence, start) = match &self.chunks {
            Some(chunks) => (chunks.plan.per_sequence, chunks.plan.start[chunk]),
            None => (1, self.past),
        };
        (chunk / per_sequence * self.keys() + start + within) as u32
    }
}
