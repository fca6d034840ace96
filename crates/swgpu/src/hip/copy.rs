//! Copies and fills between host and device memory, checked and with the record of what was written kept up to date.

use std::ffi::c_void;
use std::sync::Arc;

use super::stream::Operation;
use super::{Failure, INVALID_COPY_DIRECTION, INVALID_DEVICE_POINTER, INVALID_VALUE, LAUNCH_FAILURE, failure};
use crate::memory::{self, Allocation, DEVICE_BIT, Owner, Segment};
use crate::settings::{Poison, settings};

/// A checked range of memory, kept alive by its allocation if it is a device's or pinned.
#[derive(Clone)]
pub struct Place {
    address: u64,
    segment: Segment,
    allocation: Option<Arc<Allocation>>,
}

// SAFETY: a plain range of memory; whose turn it is to touch it is the program's business, as with any copy.
unsafe impl Send for Place {}
// SAFETY: as above.
unsafe impl Sync for Place {}

impl Place {
    /// The range at `pointer`: live device memory, or host memory, which is taken on trust.
    pub fn new(pointer: *const c_void, bytes: usize) -> Result<Self, Failure> {
        let address = pointer as u64;
        if pointer.is_null() {
            return failure(INVALID_VALUE, "a null pointer");
        }
        if let Some(allocation) = memory::find(address, bytes) {
            return Ok(Self { address, segment: allocation.segment(), allocation: Some(allocation) });
        }
        if address & DEVICE_BIT != 0 {
            return failure(INVALID_DEVICE_POINTER, format!("{address:#x} (+{bytes}) is in no live device allocation"));
        }
        let segment = Segment {
            start: address,
            end: address + bytes as u64,
            data: pointer.cast_mut().cast(),
            written: std::ptr::null_mut(),
        };
        Ok(Self { address, segment, allocation: None })
    }

    pub fn device(pointer: *const c_void, bytes: usize) -> Result<Self, Failure> {
        let place = Self::new(pointer, bytes)?;
        match place.is_host() && place.allocation.is_none() {
            true => failure(INVALID_DEVICE_POINTER, format!("{pointer:?} is ordinary host memory, which no device can access")),
            false => Ok(place),
        }
    }

    fn is_host(&self) -> bool {
        self.allocation.as_ref().is_none_or(|allocation| allocation.owner == Owner::Host)
    }

    /// The place `bytes` further on in the same allocation.
    pub fn at(&self, bytes: usize) -> Self {
        Self { address: self.address + bytes as u64, ..self.clone() }
    }

    pub fn data(&self) -> *mut u8 {
        self.segment.place(self.address)
    }

    pub fn mark_written(&self, bytes: usize) {
        self.segment.mark(self.address, bytes, 1);
    }

    pub fn forget(&self, bytes: usize) {
        self.segment.mark(self.address, bytes, 0);
    }

    /// An error if any of the range was never written and that is to be checked.
    pub fn check_written(&self, bytes: usize, who: &str) -> Result<(), String> {
        if settings().poison == Poison::Off || self.segment.is_written(self.address, bytes) {
            return Ok(());
        }
        let place = self.segment.first_unwritten(self.address, bytes).unwrap_or(self.address);
        Err(format!("{who} reads {bytes} bytes at {:#x}, of which {place:#x} was never written", self.address))
    }
}

/// The operation of a copy; `kind` is `hipMemcpyKind`.
pub fn copy(to: *mut c_void, from: *const c_void, bytes: usize, kind: i32) -> Result<Operation, Failure> {
    if bytes == 0 {
        return Ok(Arc::new(|_| {}));
    }
    let (to, from) = (Place::new(to, bytes)?, Place::new(from, bytes)?);
    let hosts = (from.is_host(), to.is_host());
    // Pinned memory may stand on a device side too: devices can access it.
    let fits = match kind {
        0 => hosts == (true, true),
        1 => from.is_host(),
        2 => to.is_host(),
        3 | 4 => true,
        other => return failure(INVALID_VALUE, format!("{other} is no kind of copy")),
    };
    if !fits {
        return failure(INVALID_COPY_DIRECTION, format!("kind {kind} does not fit (source, target) on the host: {hosts:?}"));
    }
    Ok(Arc::new(move |device| {
        if device.check().is_err() {
            return;
        }
        let _turn = device.running();
        let strict = settings().poison == Poison::All && to.is_host() && !from.is_host();
        if strict && let Err(problem) = from.check_written(bytes, "a copy to the host") {
            return device.fail(LAUNCH_FAILURE, &format!("{problem} (SWGPU_POISON=kernels allows it)"));
        }
        // SAFETY: both ranges are live (device and pinned memory kept so by `Place`, host memory by the caller) and `bytes` long;
        // they may overlap.
        unsafe { std::ptr::copy(from.data(), to.data(), bytes) };
        match (from.segment.written.is_null(), to.segment.written.is_null()) {
            (true, _) => to.mark_written(bytes),
            (false, true) => {}
            (false, false) => {
                let source = from.segment.written.wrapping_add((from.address - from.segment.start) as usize);
                let target = to.segment.written.wrapping_add((to.address - to.segment.start) as usize);
                // SAFETY: the shadows are as long as their segments, which hold the ranges.
                unsafe { std::ptr::copy(source, target, bytes) };
            }
        }
    }))
}

/// The operation that fills memory with a repeated pattern of 1 or 4 bytes.
pub fn fill(to: *mut c_void, pattern: &[u8], count: usize) -> Result<Operation, Failure> {
    let bytes = count * pattern.len();
    if bytes == 0 {
        return Ok(Arc::new(|_| {}));
    }
    let to = Place::device(to, bytes)?;
    let pattern = pattern.to_vec();
    Ok(Arc::new(move |device| {
        if device.check().is_err() {
            return;
        }
        let _turn = device.running();
        // SAFETY: the range is live and `bytes` long.
        let target = unsafe { std::slice::from_raw_parts_mut(to.data(), bytes) };
        target.chunks_exact_mut(pattern.len()).for_each(|chunk| chunk.copy_from_slice(&pattern));
        to.mark_written(bytes);
    }))
}
