//! The border to the host, and copies inside a device.

use std::ffi::c_void;
use std::hash::Hash as _;

use anyhow::{Context, Result, ensure};
use half::bf16;
use hip_sys::hip::ffi::{hipMemcpyDeviceToDevice, hipMemcpyDeviceToHost, hipMemcpyHostToDevice, hipMemcpyKind};

use super::graph::Fate;
use super::{Buf, Hip, Kind};

/// A matrix of the host's numbers.
pub fn upload(hip: &Hip, data: &[f32], rows: usize, cols: usize) -> Result<Buf> {
    let mut buf = hip.f32s(rows, cols)?;
    let to = buf.at_mut().cast();
    copy_up(hip, to, bytemuck::cast_slice(data))?;
    Ok(buf)
}

/// Every number of an f32 matrix from the host.
pub fn overwrite(hip: &Hip, buf: &mut Buf, data: &[f32]) -> Result<()> {
    ensure!(buf.len() == data.len() && buf.kind() == Kind::F32, "{} numbers for a buffer of {}", data.len(), buf.len());
    let to = buf.at_mut().cast();
    copy_now(hip, to, data.as_ptr().cast(), size_of_val(data), hipMemcpyHostToDevice)
}

/// Numbers of any plain type as device memory of at least one number.
pub fn upload_plain<T: bytemuck::Pod>(hip: &Hip, data: &[T]) -> Result<Buf> {
    let mut buf = hip.f32s(1, size_of_val(data).div_ceil(4).max(1))?;
    let to = buf.at_mut().cast();
    copy_up(hip, to, bytemuck::cast_slice(data))?;
    Ok(buf)
}

/// All numbers, as f32.
pub fn download(hip: &Hip, buf: &Buf) -> Result<Vec<f32>> {
    Ok(match buf.kind() {
        Kind::F32 => download_plain(hip, buf, buf.len())?,
        Kind::Bf16 => download_plain::<bf16>(hip, buf, buf.len())?.into_iter().map(bf16::to_f32).collect(),
    })
}

/// The first `n` values of a buffer, as another plain type.
pub fn download_plain<T: bytemuck::Pod + Default>(hip: &Hip, buf: &Buf, n: usize) -> Result<Vec<T>> {
    ensure!(n * size_of::<T>() <= buf.len().max(1) * buf.kind().bytes(), "{n} values of a buffer of {} numbers", buf.len());
    let mut out = vec![T::default(); n];
    copy_down(hip, bytemuck::cast_slice_mut(&mut out), buf.at().cast())?;
    Ok(out)
}

/// Sets every number to 0.
pub fn clear(hip: &Hip, buf: &mut Buf) -> Result<()> {
    let bytes = buf.len() * buf.kind().bytes();
    let to: *mut c_void = buf.at_mut().cast();
    let Some(stream) = hip.stream() else { return Ok(()) };
    if hip.fate(|to_hash| ("clear", to as usize, bytes).hash(to_hash)) == Fate::Skip {
        return Ok(());
    }
    // SAFETY: the buffer has that many bytes, and lives in stream order.
    unsafe { stream.fill(to, 0, bytes) }?;
    Ok(())
}

/// Copies to the device; the host's memory is the caller's again.
fn copy_up(hip: &Hip, to: *mut c_void, data: &[u8]) -> Result<()> {
    match hip.stream() {
        Some(stream) if !hip.pass_upload(stream, to, data)? => {
            copy_now(hip, to, data.as_ptr().cast(), data.len(), hipMemcpyHostToDevice)
        }
        _ => Ok(()),
    }
}

/// Copies to the host.
fn copy_down(hip: &Hip, to: &mut [u8], from: *const c_void) -> Result<()> {
    match hip.stream() {
        Some(stream) if !hip.pass_download(stream, to, from)? => {
            copy_now(hip, to.as_mut_ptr().cast(), from, to.len(), hipMemcpyDeviceToHost)
        }
        _ => Ok(()),
    }
}

/// Copies between the host and the device, and waits until it is done.
fn copy_now(hip: &Hip, to: *mut c_void, from: *const c_void, bytes: usize, kind: hipMemcpyKind) -> Result<()> {
    let Some(stream) = hip.stream() else { return Ok(()) };
    if bytes > 0 {
        // SAFETY: both ends have that many bytes, as the callers' types say, and nobody touches them before the stream is waited for.
        unsafe { stream.copy(to, from, bytes, kind) }.context("copying between host and device")?;
    }
    hip.synchronize().context("waiting for the device")
}

/// Queues a copy of `bytes` inside the device, between buffers of this backend that are long enough.
pub(super) fn copy_rows(hip: &Hip, to: *const f32, from: *const f32, bytes: usize) -> Result<()> {
    let Some(stream) = hip.stream().filter(|_| bytes > 0) else { return Ok(()) };
    if hip.fate(|to_hash| ("copy", to as usize, from as usize, bytes).hash(to_hash)) == Fate::Skip {
        return Ok(());
    }
    // SAFETY: rows of buffers of this backend, checked by the callers; they live in stream order.
    unsafe { stream.copy(to.cast_mut().cast(), from.cast(), bytes, hipMemcpyDeviceToDevice) }?;
    Ok(())
}

/// Queues `to = from`, of as many numbers of the same kind.
pub fn copy(hip: &Hip, to: &mut Buf, from: &Buf) -> Result<()> {
    ensure!(to.len() == from.len() && to.kind() == from.kind(), "copying {} numbers over {}", from.len(), to.len());
    copy_rows(hip, to.at_mut(), from.at(), from.len() * from.kind().bytes())
}

/// For each of `batch` sequences: the rows of `a`, then the rows of `b`.
pub fn concat_rows(hip: &Hip, batch: usize, a: &Buf, b: &Buf) -> Result<Buf> {
    ensure!(
        batch > 0
            && a.cols() == b.cols()
            && a.kind() == b.kind()
            && a.rows().is_multiple_of(batch)
            && b.rows().is_multiple_of(batch),
        "{} x {} {:?} and {} x {} {:?} cannot be joined as {batch} sequences",
        a.rows(),
        a.cols(),
        a.kind(),
        b.rows(),
        b.cols(),
        b.kind()
    );
    let (first, second, row) = (a.rows() / batch, b.rows() / batch, a.cols() * a.kind().bytes());
    let out = hip.matrix(a.rows() + b.rows(), a.cols(), a.kind())?;
    for s in 0..batch {
        copy_rows(hip, out.row(s * (first + second)), a.row(s * first), first * row)?;
        copy_rows(hip, out.row(s * (first + second) + first), b.row(s * second), second * row)?;
    }
    Ok(out)
}

/// The last `n` rows of each of `batch` sequences.
pub fn last_rows(hip: &Hip, batch: usize, x: &Buf, n: usize) -> Result<Buf> {
    ensure!(
        batch > 0 && x.rows().is_multiple_of(batch) && x.rows() / batch >= n,
        "{n} rows of each of {batch} sequences of {} rows",
        x.rows()
    );
    let (each, row) = (x.rows() / batch, x.cols() * x.kind().bytes());
    let out = hip.matrix(batch * n, x.cols(), x.kind())?;
    for s in 0..batch {
        copy_rows(hip, out.row(s * n), x.row(s * each + each - n), n * row)?;
    }
    Ok(out)
}
