//! Devices: count, choice, properties, versions, peers.

use std::ffi::{c_char, c_int, c_uint};
use std::sync::PoisonError;

use super::device::{count, current, device, set_current};
use super::properties::{self, DeviceProperties};
use super::{INVALID_DEVICE, INVALID_VALUE, NO_DEVICE, PEER_ALREADY_ENABLED, Status, call, failure, give};
use crate::exec::launch::LDS_BYTES;

/// HIP 7.1.0, as `major * 10_000_000 + minor * 100_000 + patch`.
const VERSION: c_int = 70_100_000;

#[unsafe(no_mangle)]
pub extern "C" fn hipInit(_flags: c_uint) -> Status {
    call("hipInit", || device(0).map(|_| ()))
}

/// # Safety
/// HIP's: `version` points to an int.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipDriverGetVersion(version: *mut c_int) -> Status {
    // SAFETY: the caller's.
    call("hipDriverGetVersion", || unsafe { give(version, VERSION) })
}

/// # Safety
/// HIP's: `version` points to an int.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipRuntimeGetVersion(version: *mut c_int) -> Status {
    // SAFETY: the caller's.
    call("hipRuntimeGetVersion", || unsafe { give(version, VERSION) })
}

/// # Safety
/// HIP's: `number` points to an int.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipGetDeviceCount(number: *mut c_int) -> Status {
    call("hipGetDeviceCount", || {
        // SAFETY: the caller's.
        unsafe { give(number, count() as c_int) }?;
        if count() == 0 { Err(NO_DEVICE.into()) } else { Ok(()) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn hipSetDevice(number: c_int) -> Status {
    call("hipSetDevice", || set_current(number))
}

/// # Safety
/// HIP's: `number` points to an int.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipGetDevice(number: *mut c_int) -> Status {
    // SAFETY: the caller's.
    call("hipGetDevice", || unsafe { give(number, current()?.number as c_int) })
}

/// # Safety
/// HIP's: `result` points to a `hipDeviceProp_tR0600`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipGetDevicePropertiesR0600(result: *mut DeviceProperties, number: c_int) -> Status {
    // SAFETY: the caller's.
    call("hipGetDevicePropertiesR0600", || unsafe { give(result, properties::properties(device(number)?)) })
}

/// # Safety
/// HIP's: `value` points to an int.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipDeviceGetAttribute(value: *mut c_int, attribute: c_int, number: c_int) -> Status {
    call("hipDeviceGetAttribute", || {
        let device = device(number)?;
        let known = match attribute {
            5 => properties::CLOCK_KHZ,
            8 => 1, // concurrent kernels
            9 => 0, // concurrent managed access
            19 => properties::L2_BYTES,
            23 => 9, // compute capability, major
            26..=28 => 1024,
            56 => 1024, // items of a workgroup
            59 => properties::MEMORY_BUS_BITS,
            60 => properties::MEMORY_CLOCK_KHZ,
            61 => 4, // compute capability, minor
            63 => properties::COMPUTE_UNITS,
            67 => properties::pci_bus(device),
            68 | 69 => 0, // PCI device and domain
            74 => LDS_BYTES as c_int,
            78 => 1,            // stream priorities
            87 => 64,           // lanes of a wave
            10011 | 10016 => 1, // large BAR, fine-grained memory
            10017 => 100_000,   // wall clock in kHz
            10018 => 8,         // XCCs
            other => return failure(INVALID_VALUE, format!("attribute {other} is not known to swgpu")),
        };
        // SAFETY: the caller's.
        unsafe { give(value, known) }
    })
}

/// # Safety
/// HIP's: `text` points to `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipDeviceGetPCIBusId(text: *mut c_char, length: c_int, number: c_int) -> Status {
    call("hipDeviceGetPCIBusId", || {
        let address = format!("0000:{:02x}:00.0\0", properties::pci_bus(device(number)?));
        if text.is_null() || (length as usize) < address.len() {
            return failure(INVALID_VALUE, format!("a buffer of {length} bytes; {} are needed", address.len()));
        }
        // SAFETY: the buffer is long enough, as just checked, and the caller's.
        unsafe { std::ptr::copy_nonoverlapping(address.as_ptr().cast(), text, address.len()) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn hipDeviceSynchronize() -> Status {
    call("hipDeviceSynchronize", || {
        let device = current()?;
        for stream in device.streams() {
            stream.refuse_capture()?;
        }
        device.synchronize()
    })
}

/// # Safety
/// HIP's: `can` points to an int.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipDeviceCanAccessPeer(can: *mut c_int, number: c_int, peer: c_int) -> Status {
    call("hipDeviceCanAccessPeer", || {
        let (own, peer) = (device(number)?, device(peer)?);
        // SAFETY: the caller's.
        unsafe { give(can, c_int::from(own.number != peer.number)) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn hipDeviceEnablePeerAccess(peer: c_int, _flags: c_uint) -> Status {
    call("hipDeviceEnablePeerAccess", || {
        let (own, peer) = (current()?, device(peer)?);
        if own.number == peer.number {
            return failure(INVALID_DEVICE, "a device is no peer of itself");
        }
        match own.peers.lock().unwrap_or_else(PoisonError::into_inner).insert(peer.number) {
            true => Ok(()),
            false => Err(PEER_ALREADY_ENABLED.into()),
        }
    })
}

/// # Safety
/// HIP's: `kind` and `hops` point to 32-bit integers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipExtGetLinkTypeAndHopCount(first: c_int, second: c_int, kind: *mut u32, hops: *mut u32) -> Status {
    const XGMI: u32 = 4;
    call("hipExtGetLinkTypeAndHopCount", || {
        if device(first)?.number == device(second)?.number {
            return failure(INVALID_VALUE, "a device has no link to itself");
        }
        // SAFETY: the caller's.
        unsafe {
            give(kind, XGMI)?;
            give(hops, 1)
        }
    })
}
