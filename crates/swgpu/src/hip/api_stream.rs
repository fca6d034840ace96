//! Streams and events.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;

use super::device::{current, device};
use super::stream::{EVENTS, Event, STREAMS, Stream, stream};
use super::{INVALID_HANDLE, NOT_READY, Status, call, failure, give};

const NON_BLOCKING: c_uint = 1;

/// # Safety
/// HIP's: `handle` points to a stream handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipStreamCreateWithFlags(handle: *mut *mut c_void, flags: c_uint) -> Status {
    call("hipStreamCreateWithFlags", || {
        let device = current()?;
        let stream = Stream::new(device.number, flags & NON_BLOCKING == 0);
        device.add_stream(&stream);
        // SAFETY: the caller's.
        unsafe { give(handle, STREAMS.add(stream)) }
    })
}

/// # Safety
/// HIP's: `handle` points to a stream handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipStreamCreate(handle: *mut *mut c_void) -> Status {
    // SAFETY: the caller's.
    unsafe { hipStreamCreateWithFlags(handle, 0) }
}

/// # Safety
/// HIP's: `handle` points to a stream handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipStreamCreateWithPriority(handle: *mut *mut c_void, flags: c_uint, _priority: c_int) -> Status {
    // SAFETY: the caller's.
    unsafe { hipStreamCreateWithFlags(handle, flags) }
}

#[unsafe(no_mangle)]
pub extern "C" fn hipStreamDestroy(handle: *mut c_void) -> Status {
    call("hipStreamDestroy", || {
        let stream = STREAMS.remove(handle)?;
        stream.drain();
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn hipStreamSynchronize(handle: *mut c_void) -> Status {
    call("hipStreamSynchronize", || {
        let stream = stream(handle)?;
        stream.refuse_capture()?;
        stream.drain();
        device(stream.device as i32)?.check()
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn hipStreamQuery(handle: *mut c_void) -> Status {
    call("hipStreamQuery", || {
        let stream = stream(handle)?;
        stream.refuse_capture()?;
        device(stream.device as i32)?.check()?;
        let (progress, ticket) = stream.point();
        if progress.is_done(ticket) { Ok(()) } else { Err(NOT_READY.into()) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn hipStreamWaitEvent(handle: *mut c_void, event: *mut c_void, _flags: c_uint) -> Status {
    call("hipStreamWaitEvent", || EVENTS.get(event)?.make_wait(&*stream(handle)?))
}

/// # Safety
/// HIP's: `handle` points to an event handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipEventCreateWithFlags(handle: *mut *mut c_void, _flags: c_uint) -> Status {
    call("hipEventCreateWithFlags", || {
        current()?;
        // SAFETY: the caller's.
        unsafe { give(handle, EVENTS.add(Arc::new(Event::default()))) }
    })
}

/// # Safety
/// HIP's: `handle` points to an event handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipEventCreate(handle: *mut *mut c_void) -> Status {
    // SAFETY: the caller's.
    unsafe { hipEventCreateWithFlags(handle, 0) }
}

#[unsafe(no_mangle)]
pub extern "C" fn hipEventDestroy(handle: *mut c_void) -> Status {
    call("hipEventDestroy", || EVENTS.remove(handle).map(|_| ()))
}

#[unsafe(no_mangle)]
pub extern "C" fn hipEventRecord(event: *mut c_void, handle: *mut c_void) -> Status {
    call("hipEventRecord", || EVENTS.get(event)?.record(&*stream(handle)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn hipEventSynchronize(event: *mut c_void) -> Status {
    call("hipEventSynchronize", || {
        EVENTS.get(event)?.synchronize()?;
        current()?.check()
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn hipEventQuery(event: *mut c_void) -> Status {
    call("hipEventQuery", || {
        current()?.check()?;
        if EVENTS.get(event)?.is_done() { Ok(()) } else { Err(NOT_READY.into()) }
    })
}

/// # Safety
/// HIP's: `milliseconds` points to a float.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipEventElapsedTime(milliseconds: *mut f32, start: *mut c_void, stop: *mut c_void) -> Status {
    call("hipEventElapsedTime", || {
        let (start, stop) = (EVENTS.get(start)?, EVENTS.get(stop)?);
        if !start.is_done() || !stop.is_done() {
            return Err(NOT_READY.into());
        }
        let (Some(start), Some(stop)) = (start.reached(), stop.reached()) else {
            return failure(INVALID_HANDLE, "an event that was never recorded");
        };
        let seconds = match stop.checked_duration_since(start) {
            Some(time) => time.as_secs_f32(),
            None => -start.duration_since(stop).as_secs_f32(),
        };
        // SAFETY: the caller's.
        unsafe { give(milliseconds, seconds * 1e3) }
    })
}
