//! Streams, in which work runs in order, and events, by which streams wait for each other.

use std::ptr::null_mut;

use super::Hip;
use super::ffi::{self, hipEvent_t, hipStream_t};
use crate::Error;

/// A queue of work on the device that was current when it was made. It does not wait for the default stream.
///
/// Dropping it does not wait for its work, which still runs to its end: what that work uses must live on until then.
#[derive(Debug)]
pub struct Stream {
    hip: &'static Hip,
    raw: hipStream_t,
}

// SAFETY: HIP lets any thread use any stream, several at once too.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// A stream of ordinary priority.
    ///
    /// # Errors
    /// The library refuses.
    pub fn new(hip: &'static Hip) -> Result<Self, Error> {
        let mut raw = null_mut();
        // SAFETY: `raw` is a place for the handle.
        let status = unsafe { (hip.functions.hipStreamCreateWithFlags)(&mut raw, ffi::hipStreamNonBlocking) };
        hip.check("hipStreamCreateWithFlags", status, || "making a stream".into())?;
        Ok(Self { hip, raw })
    }

    /// A stream of the given priority: smaller goes first, 0 is ordinary. HIP takes a number beyond its range for the nearest within,
    /// and some versions pay no heed to it at all.
    ///
    /// # Errors
    /// The library refuses.
    pub fn with_priority(hip: &'static Hip, priority: i32) -> Result<Self, Error> {
        let mut raw = null_mut();
        // SAFETY: `raw` is a place for the handle.
        let status = unsafe { (hip.functions.hipStreamCreateWithPriority)(&mut raw, ffi::hipStreamNonBlocking, priority) };
        hip.check("hipStreamCreateWithPriority", status, || format!("making a stream of priority {priority}"))?;
        Ok(Self { hip, raw })
    }

    /// The handle, for other libraries.
    pub fn raw(&self) -> hipStream_t {
        self.raw
    }

    pub fn hip(&self) -> &'static Hip {
        self.hip
    }

    /// Waits for all its work.
    ///
    /// # Errors
    /// Some of that work failed.
    pub fn synchronize(&self) -> Result<(), Error> {
        // SAFETY: the handle is good as long as `self`.
        let status = unsafe { (self.hip.functions.hipStreamSynchronize)(self.raw) };
        self.hip.check("hipStreamSynchronize", status, || "waiting for a stream".into())
    }

    /// Whether all its work is done.
    ///
    /// # Errors
    /// Some of that work failed.
    pub fn is_done(&self) -> Result<bool, Error> {
        // SAFETY: the handle is good as long as `self`.
        let status = unsafe { (self.hip.functions.hipStreamQuery)(self.raw) };
        self.hip.check_ready("hipStreamQuery", status, || "asking whether a stream is done".into())
    }

    /// Lets what is queued from now on wait until `event`, as last recorded, has happened.
    ///
    /// # Errors
    /// The library refuses, or earlier work has failed.
    pub fn wait(&self, event: &Event) -> Result<(), Error> {
        // SAFETY: both handles are good; flags must be zero.
        let status = unsafe { (self.hip.functions.hipStreamWaitEvent)(self.raw, event.raw, 0) };
        self.hip.check("hipStreamWaitEvent", status, || "letting a stream wait for an event".into())
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: made here, and owned. An error is that of earlier work, and was reported by who waited for it.
        unsafe { (self.hip.functions.hipStreamDestroy)(self.raw) };
    }
}

/// A point in a stream's work.
#[derive(Debug)]
pub struct Event {
    hip: &'static Hip,
    raw: hipEvent_t,
}

// SAFETY: HIP lets any thread use any event, several at once too.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// An event to wait for.
    ///
    /// # Errors
    /// The library refuses.
    pub fn new(hip: &'static Hip) -> Result<Self, Error> {
        Self::with_flags(hip, ffi::hipEventDisableTiming)
    }

    /// An event that also remembers when it happened, which costs more.
    ///
    /// # Errors
    /// The library refuses.
    pub fn timed(hip: &'static Hip) -> Result<Self, Error> {
        Self::with_flags(hip, ffi::hipEventDefault)
    }

    fn with_flags(hip: &'static Hip, flags: u32) -> Result<Self, Error> {
        let mut raw = null_mut();
        // SAFETY: `raw` is a place for the handle.
        let status = unsafe { (hip.functions.hipEventCreateWithFlags)(&mut raw, flags) };
        hip.check("hipEventCreateWithFlags", status, || "making an event".into())?;
        Ok(Self { hip, raw })
    }

    pub fn raw(&self) -> hipEvent_t {
        self.raw
    }

    /// Marks the point after all that is in `stream` now.
    ///
    /// # Errors
    /// The library refuses, or earlier work has failed.
    pub fn record(&self, stream: &Stream) -> Result<(), Error> {
        // SAFETY: both handles are good.
        let status = unsafe { (self.hip.functions.hipEventRecord)(self.raw, stream.raw) };
        self.hip.check("hipEventRecord", status, || "recording an event".into())
    }

    /// Waits until it has happened.
    ///
    /// # Errors
    /// Work before it failed.
    pub fn synchronize(&self) -> Result<(), Error> {
        // SAFETY: the handle is good as long as `self`.
        let status = unsafe { (self.hip.functions.hipEventSynchronize)(self.raw) };
        self.hip.check("hipEventSynchronize", status, || "waiting for an event".into())
    }

    /// Whether it has happened.
    ///
    /// # Errors
    /// Work before it failed.
    pub fn is_done(&self) -> Result<bool, Error> {
        // SAFETY: the handle is good as long as `self`.
        let status = unsafe { (self.hip.functions.hipEventQuery)(self.raw) };
        self.hip.check_ready("hipEventQuery", status, || "asking whether an event has happened".into())
    }

    /// Milliseconds from `start` to this event; both are [timed](Event::timed) and have happened.
    ///
    /// # Errors
    /// They are not, or have not.
    pub fn milliseconds_since(&self, start: &Event) -> Result<f32, Error> {
        let mut milliseconds = 0.0;
        // SAFETY: both handles are good, and `milliseconds` is a place for the number.
        let status = unsafe { (self.hip.functions.hipEventElapsedTime)(&mut milliseconds, start.raw, self.raw) };
        self.hip.check("hipEventElapsedTime", status, || "taking the time between two events".into())?;
        Ok(milliseconds)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made here, and owned. An error is that of earlier work, and was reported by who waited for it.
        unsafe { (self.hip.functions.hipEventDestroy)(self.raw) };
    }
}
