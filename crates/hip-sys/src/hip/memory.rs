//! Memory of devices, pinned memory of the host, and copies between them.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

use super::ffi::{self, hipMemcpyKind};
use super::{Hip, Stream};
use crate::Error;

/// Memory of the device that was current when it was made; freed when dropped. Holds whatever it held before.
#[derive(Debug)]
pub struct DeviceBuffer {
    hip: &'static Hip,
    pointer: *mut c_void,
    bytes: usize,
}

// SAFETY: device memory belongs to no thread, and the functions that take it may be called from any.
unsafe impl Send for DeviceBuffer {}
// SAFETY: as above; through a shared reference it is only read.
unsafe impl Sync for DeviceBuffer {}

impl DeviceBuffer {
    /// Ordinary (coarse-grained) memory.
    ///
    /// # Errors
    /// The device has too little: [`Error::is_out_of_memory`].
    pub fn new(hip: &'static Hip, bytes: usize) -> Result<Self, Error> {
        let mut pointer = null_mut();
        // SAFETY: `pointer` is a place for one.
        let status = unsafe { (hip.functions.hipMalloc)(&mut pointer, bytes) };
        hip.check("hipMalloc", status, || format!("allocating {bytes} bytes on the device"))?;
        Ok(Self { hip, pointer, bytes })
    }

    /// Memory that other devices and the host see change while a kernel runs.
    ///
    /// # Errors
    /// The device has too little, or no such memory.
    pub fn fine_grained(hip: &'static Hip, bytes: usize) -> Result<Self, Error> {
        let mut pointer = null_mut();
        // SAFETY: `pointer` is a place for one.
        let status = unsafe { (hip.functions.hipExtMallocWithFlags)(&mut pointer, bytes, ffi::hipDeviceMallocFinegrained) };
        hip.check("hipExtMallocWithFlags", status, || format!("allocating {bytes} fine-grained bytes on the device"))?;
        Ok(Self { hip, pointer, bytes })
    }

    /// The address on the device.
    pub fn pointer(&self) -> *mut c_void {
        self.pointer
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Copies `source` to `offset` (in bytes) and waits until it is there.
    ///
    /// # Errors
    /// It does not fit, or the copy fails.
    pub fn write(&mut self, offset: usize, source: &[u8]) -> Result<(), Error> {
        let place = self.place(offset, source.len(), "write")?;
        let (functions, bytes) = (&self.hip.functions, source.len());
        // SAFETY: `place` was checked to be followed by that many bytes, as `source` is.
        let status = unsafe { (functions.hipMemcpy)(place, source.as_ptr().cast(), bytes, ffi::hipMemcpyHostToDevice) };
        self.hip.check("hipMemcpy", status, || format!("copying {bytes} bytes to the device"))?;
        self.wait()
    }

    /// Copies from `offset` (in bytes) to `target` and waits until it is there.
    ///
    /// # Errors
    /// There is not so much, or the copy fails, or what ran on the device before has failed.
    pub fn read(&self, offset: usize, target: &mut [u8]) -> Result<(), Error> {
        let place = self.place(offset, target.len(), "read")?;
        let (functions, bytes) = (&self.hip.functions, target.len());
        // SAFETY: `place` was checked to be followed by that many bytes, as `target` is.
        let status = unsafe { (functions.hipMemcpy)(target.as_mut_ptr().cast(), place, bytes, ffi::hipMemcpyDeviceToHost) };
        self.hip.check("hipMemcpy", status, || format!("copying {bytes} bytes from the device"))
    }

    /// Sets every byte, and waits until it is done.
    ///
    /// # Errors
    /// The device fails.
    pub fn fill(&mut self, value: u8) -> Result<(), Error> {
        // SAFETY: the buffer has that many bytes.
        let status = unsafe { (self.hip.functions.hipMemset)(self.pointer, c_int::from(value), self.bytes) };
        self.hip.check("hipMemset", status, || format!("setting {} bytes", self.bytes))?;
        self.wait()
    }

    /// Waits for the default stream. What was called without a stream runs there, may go on after the call has returned, and is not
    /// waited for by a [`Stream`].
    fn wait(&self) -> Result<(), Error> {
        // SAFETY: null is the default stream.
        let status = unsafe { (self.hip.functions.hipStreamSynchronize)(null_mut()) };
        self.hip.check("hipStreamSynchronize", status, || "waiting for the default stream".into())
    }

    fn place(&self, offset: usize, bytes: usize, what: &str) -> Result<*mut c_void, Error> {
        if offset.checked_add(bytes).is_none_or(|end| end > self.bytes) {
            let all = self.bytes;
            return Err(Error::Invalid(format!("cannot {what} {bytes} bytes at {offset} of a device buffer of {all} bytes")));
        }
        Ok(self.pointer.cast::<u8>().wrapping_add(offset).cast())
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        // An error here is that of earlier work, which the call that waited for that work has reported.
        // SAFETY: allocated here, and owned.
        unsafe { (self.hip.functions.hipFree)(self.pointer) };
    }
}

/// Pinned memory of the host, from and to which copies run beside other work; zero at first, freed when dropped.
#[derive(Debug)]
pub struct HostBuffer {
    hip: &'static Hip,
    pointer: *mut u8,
    bytes: usize,
}

// SAFETY: it is memory of the process, owned here.
unsafe impl Send for HostBuffer {}
// SAFETY: as above; through a shared reference it is only read.
unsafe impl Sync for HostBuffer {}

impl HostBuffer {
    /// Memory that every device can copy from and to.
    ///
    /// # Errors
    /// The host has too little that can be pinned.
    pub fn new(hip: &'static Hip, bytes: usize) -> Result<Self, Error> {
        let mut pointer = null_mut();
        // SAFETY: `pointer` is a place for one.
        let status = unsafe { (hip.functions.hipHostMalloc)(&mut pointer, bytes, ffi::hipHostMallocPortable) };
        hip.check("hipHostMalloc", status, || format!("allocating {bytes} bytes of pinned memory"))?;
        let pointer = if bytes == 0 { std::ptr::dangling_mut() } else { pointer.cast::<u8>() };
        // SAFETY: the buffer has that many bytes. They are set because a slice may not show what was never written.
        unsafe { pointer.write_bytes(0, bytes) };
        Ok(Self { hip, pointer, bytes })
    }

    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: written when made, and owned. Who starts a copy vouches that nobody looks before it has ended.
        unsafe { std::slice::from_raw_parts(self.pointer, self.bytes) }
    }

    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.pointer, self.bytes) }
    }

    /// The address, for copies and kernels.
    pub fn pointer(&self) -> *mut c_void {
        self.pointer.cast()
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        if self.bytes > 0 {
            // SAFETY: allocated here, and owned. An error is that of earlier work, and was reported by who waited for it.
            unsafe { (self.hip.functions.hipHostFree)(self.pointer.cast()) };
        }
    }
}

/// Work on raw addresses. It is queued: it happens in the stream's order, later.
impl Stream {
    /// Queues a copy of `bytes` bytes.
    ///
    /// # Errors
    /// The library refuses, or earlier work has failed.
    ///
    /// # Safety
    /// Until the stream has passed the copy, both ranges must stay allocated; nobody else may write the source, nor touch the
    /// target. `kind` must say where they are.
    pub unsafe fn copy(&self, to: *mut c_void, from: *const c_void, bytes: usize, kind: hipMemcpyKind) -> Result<(), Error> {
        // SAFETY: the caller vouches for both ranges.
        let status = unsafe { (self.hip().functions.hipMemcpyAsync)(to, from, bytes, kind, self.raw()) };
        self.hip().check("hipMemcpyAsync", status, || format!("queuing a copy of {bytes} bytes ({kind:?})"))
    }

    /// Queues setting `bytes` bytes on the device.
    ///
    /// # Errors
    /// The library refuses, or earlier work has failed.
    ///
    /// # Safety
    /// Until the stream has passed it, the range must stay allocated and nobody else may touch it.
    pub unsafe fn fill(&self, to: *mut c_void, value: u8, bytes: usize) -> Result<(), Error> {
        // SAFETY: the caller vouches for the range.
        let status = unsafe { (self.hip().functions.hipMemsetAsync)(to, c_int::from(value), bytes, self.raw()) };
        self.hip().check("hipMemsetAsync", status, || format!("queuing the setting of {bytes} bytes"))
    }

    /// Queues setting `count` words of 32 bits on the device.
    ///
    /// # Errors
    /// The library refuses, or earlier work has failed.
    ///
    /// # Safety
    /// As of [`Stream::fill`], of `4 * count` bytes; `to` must be a multiple of 4.
    pub unsafe fn fill_u32(&self, to: *mut c_void, value: u32, count: usize) -> Result<(), Error> {
        // SAFETY: the caller vouches for the range.
        let status = unsafe { (self.hip().functions.hipMemsetD32Async)(to, value.cast_signed(), count, self.raw()) };
        self.hip().check("hipMemsetD32Async", status, || format!("queuing the setting of {count} words"))
    }
}
