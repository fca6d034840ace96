//! Graphs: a stream's work, captured once and launched many times.

use std::ptr::null_mut;

use super::ffi::{hipGraph_t, hipGraphExec_t, hipStreamCaptureMode};
use super::{Hip, Stream};
use crate::Error;

/// Captured work.
#[derive(Debug)]
pub struct Graph {
    hip: &'static Hip,
    raw: hipGraph_t,
}

// SAFETY: it belongs to no thread; HIP wants that one thread at a time uses it, which holds without Sync.
unsafe impl Send for Graph {}

impl Graph {
    /// Captures what `work` queues in `stream` (and in streams that wait for it) instead of running it.
    ///
    /// # Errors
    /// The error of `work`, after capturing was ended; or the library refuses.
    pub fn capture<E: From<Error>>(
        stream: &Stream,
        mode: hipStreamCaptureMode,
        work: impl FnOnce() -> Result<(), E>,
    ) -> Result<Self, E> {
        let hip = stream.hip();
        // SAFETY: the handle is good.
        let status = unsafe { (hip.functions.hipStreamBeginCapture)(stream.raw(), mode) };
        hip.check("hipStreamBeginCapture", status, || "beginning to capture a stream".into())?;
        let outcome = work();
        let mut raw = null_mut();
        // SAFETY: the handle is good, and `raw` is a place for the graph's.
        let status = unsafe { (hip.functions.hipStreamEndCapture)(stream.raw(), &mut raw) };
        let ended = hip.check("hipStreamEndCapture", status, || "ending to capture a stream".into());
        let graph = (!raw.is_null()).then(|| Self { hip, raw });
        outcome?;
        ended?;
        graph.ok_or_else(|| Error::Invalid("capturing a stream gave no graph".into()).into())
    }

    /// Makes it ready to be launched.
    ///
    /// # Errors
    /// The library refuses.
    pub fn instantiate(&self) -> Result<GraphExec, Error> {
        let mut raw = null_mut();
        // SAFETY: the graph is good, `raw` is a place for the handle, and no log is wanted.
        let status = unsafe { (self.hip.functions.hipGraphInstantiate)(&mut raw, self.raw, null_mut(), null_mut(), 0) };
        self.hip.check("hipGraphInstantiate", status, || "making a captured graph ready".into())?;
        Ok(GraphExec { hip: self.hip, raw })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made here, and owned. There is nobody to tell of an error, and nothing depends on it.
        unsafe { (self.hip.functions.hipGraphDestroy)(self.raw) };
    }
}

/// A graph that can be launched.
#[derive(Debug)]
pub struct GraphExec {
    hip: &'static Hip,
    raw: hipGraphExec_t,
}

// SAFETY: it belongs to no thread; HIP wants that one thread at a time uses it, which holds without Sync.
unsafe impl Send for GraphExec {}

impl GraphExec {
    /// Queues all its work in `stream`.
    ///
    /// # Errors
    /// The library refuses, or earlier work has failed.
    ///
    /// # Safety
    /// What held for the captured calls must hold again: the same addresses are read and written.
    pub unsafe fn launch(&self, stream: &Stream) -> Result<(), Error> {
        // SAFETY: both handles are good, and the caller vouches for the memory.
        let status = unsafe { (self.hip.functions.hipGraphLaunch)(self.raw, stream.raw()) };
        self.hip.check("hipGraphLaunch", status, || "launching a captured graph".into())
    }
}

impl Drop for GraphExec {
    fn drop(&mut self) {
        // SAFETY: made here, and owned. There is nobody to tell of an error, and nothing depends on it.
        unsafe { (self.hip.functions.hipGraphExecDestroy)(self.raw) };
    }
}
