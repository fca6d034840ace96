//! Allocation, copies and fills.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::PoisonError;

use super::copy::{Place, copy, fill};
use super::device::{Device, current, device};
use super::stream::stream;
use super::{Failure, INVALID_DEVICE_POINTER, INVALID_VALUE, OUT_OF_MEMORY, Status, call, failure, give};
use crate::counters;
use crate::faults;
use crate::memory::{self, Allocation, Owner};
use crate::settings::{Poison, settings};

/// Makes an allocation on `device` within its budget.
fn allocate(device: &Device, bytes: usize) -> Result<u64, Failure> {
    device.check()?;
    let mut used = device.used.lock().unwrap_or_else(PoisonError::into_inner);
    let limit = settings().memory_bytes;
    if faults::allocation_fails() {
        return failure(OUT_OF_MEMORY, format!("{bytes} bytes: this allocation fails by SWGPU_FAULT"));
    }
    if bytes > limit - *used {
        return failure(
            OUT_OF_MEMORY,
            format!("{bytes} bytes on device {}, of which {} of {limit} are free", device.number, limit - *used),
        );
    }
    let tracked = settings().poison != Poison::Off;
    let Ok(allocation) = Allocation::new(bytes, Owner::Device(device.number), tracked) else {
        return failure(OUT_OF_MEMORY, format!("{bytes} bytes: the host has no memory left"));
    };
    if !tracked {
        // All ones is a NaN in every float format.
        // SAFETY: the allocation is new and `bytes` long.
        unsafe { std::ptr::write_bytes(allocation.segment().data, 0xff, bytes) };
    }
    memory::register(&allocation);
    counters::record_call("hipMalloc");
    *used += bytes;
    Ok(allocation.address)
}

/// # Safety
/// HIP's: `pointer` points to a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipMalloc(pointer: *mut *mut c_void, bytes: usize) -> Status {
    call("hipMalloc", || {
        let address = if bytes == 0 { 0 } else { allocate(current()?, bytes)? };
        // SAFETY: the caller's.
        unsafe { give(pointer, address as *mut c_void) }
    })
}

/// # Safety
/// HIP's: `pointer` points to a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipExtMallocWithFlags(pointer: *mut *mut c_void, bytes: usize, flags: c_uint) -> Status {
    if flags > 3 {
        return call("hipExtMallocWithFlags", || failure(INVALID_VALUE, format!("flags {flags:#x}")));
    }
    // SAFETY: the caller's.
    unsafe { hipMalloc(pointer, bytes) }
}

#[unsafe(no_mangle)]
pub extern "C" fn hipFree(pointer: *mut c_void) -> Status {
    call("hipFree", || {
        if pointer.is_null() {
            return Ok(());
        }
        let owner = memory::find(pointer as u64, 1)
            .filter(|allocation| allocation.address == pointer as u64)
            .map(|allocation| allocation.owner);
        let Some(Owner::Device(number)) = owner else {
            return failure(INVALID_DEVICE_POINTER, format!("{pointer:?} is not the start of a live device allocation"));
        };
        let device = device(number as i32)?;
        // As on a real device: memory is free once nothing uses it any more. A sticky error does not keep memory.
        let _ = device.synchronize();
        if let Some(allocation) = memory::release(pointer as u64) {
            *device.used.lock().unwrap_or_else(PoisonError::into_inner) -= allocation.bytes;
        }
        Ok(())
    })
}

/// # Safety
/// HIP's: `pointer` points to a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipHostMalloc(pointer: *mut *mut c_void, bytes: usize, _flags: c_uint) -> Status {
    call("hipHostMalloc", || {
        current()?;
        let Ok(allocation) = Allocation::new(bytes, Owner::Host, false) else {
            return failure(OUT_OF_MEMORY, format!("{bytes} bytes of pinned host memory"));
        };
        memory::register(&allocation);
        // SAFETY: the caller's.
        unsafe { give(pointer, allocation.address as *mut c_void) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn hipHostFree(pointer: *mut c_void) -> Status {
    call("hipHostFree", || {
        if pointer.is_null() {
            return Ok(());
        }
        let owner = memory::find(pointer as u64, 1).map(|allocation| (allocation.address, allocation.owner));
        if owner != Some((pointer as u64, Owner::Host)) {
            return failure(INVALID_VALUE, format!("{pointer:?} is not the start of live pinned memory"));
        }
        let _ = current()?.synchronize();
        memory::release(pointer as u64);
        Ok(())
    })
}

/// # Safety
/// HIP's: both point to sizes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipMemGetInfo(free: *mut usize, total: *mut usize) -> Status {
    call("hipMemGetInfo", || {
        let used = *current()?.used.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the caller's.
        unsafe {
            give(free, settings().memory_bytes - used)?;
            give(total, settings().memory_bytes)
        }
    })
}

/// # Safety
/// HIP's: host memory is as long as `bytes` says and stays so until the copy is done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipMemcpyAsync(
    to: *mut c_void,
    from: *const c_void,
    bytes: usize,
    kind: c_int,
    handle: *mut c_void,
) -> Status {
    call("hipMemcpyAsync", || stream(handle)?.push(copy(to, from, bytes, kind)?))
}

/// # Safety
/// HIP's: host memory is as long as `bytes` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipMemcpy(to: *mut c_void, from: *const c_void, bytes: usize, kind: c_int) -> Status {
    call("hipMemcpy", || {
        let stream = stream(std::ptr::null_mut())?;
        stream.push(copy(to, from, bytes, kind)?)?;
        stream.drain();
        current()?.check()
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn hipMemsetAsync(to: *mut c_void, value: c_int, bytes: usize, handle: *mut c_void) -> Status {
    call("hipMemsetAsync", || stream(handle)?.push(fill(to, &[value as u8], bytes)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn hipMemset(to: *mut c_void, value: c_int, bytes: usize) -> Status {
    call("hipMemset", || {
        let stream = stream(std::ptr::null_mut())?;
        stream.push(fill(to, &[value as u8], bytes)?)?;
        stream.drain();
        current()?.check()
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn hipMemsetD32Async(to: *mut c_void, value: c_int, count: usize, handle: *mut c_void) -> Status {
    call("hipMemsetD32Async", || stream(handle)?.push(fill(to, &value.to_le_bytes(), count)?))
}

/// Not of HIP: what an allocator calls when it hands out old memory anew, so that reads before writes are caught there too.
#[unsafe(no_mangle)]
pub extern "C" fn swgpuForget(pointer: *mut c_void, bytes: usize, handle: *mut c_void) -> Status {
    call("swgpuForget", || {
        let place = Place::device(pointer, bytes)?;
        stream(handle)?.push(std::sync::Arc::new(move |device| {
            let _turn = device.running();
            place.forget(bytes);
        }))
    })
}
