//! Capture of streams into graphs, and their launch.

use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;

use super::device::device;
use super::stream::{GRAPH_EXECS, GRAPHS, stream};
use super::{CAPTURE_UNSUPPORTED, Status, call, failure, give};
use crate::counters;

#[unsafe(no_mangle)]
pub extern "C" fn hipStreamBeginCapture(handle: *mut c_void, _mode: c_int) -> Status {
    call("hipStreamBeginCapture", || {
        if handle.is_null() {
            return failure(CAPTURE_UNSUPPORTED, "the null stream cannot be captured");
        }
        stream(handle)?.begin_capture()
    })
}

/// # Safety
/// HIP's: `graph` points to a graph handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipStreamEndCapture(handle: *mut c_void, graph: *mut *mut c_void) -> Status {
    call("hipStreamEndCapture", || {
        // SAFETY: the caller's.
        unsafe { give(graph, std::ptr::null_mut()) }?;
        let stream = stream(handle)?;
        let captured = stream.end_capture(&device(stream.device as i32)?.streams())?;
        // SAFETY: the caller's.
        unsafe { give(graph, GRAPHS.add(Arc::new(captured))) }
    })
}

/// # Safety
/// HIP's: `status` points to an int.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipStreamIsCapturing(handle: *mut c_void, status: *mut c_int) -> Status {
    // SAFETY: the caller's.
    call("hipStreamIsCapturing", || unsafe { give(status, c_int::from(stream(handle)?.is_capturing())) })
}

/// # Safety
/// HIP's: `exec` points to a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipGraphInstantiate(
    exec: *mut *mut c_void,
    graph: *mut c_void,
    _error_node: *mut c_void,
    _log: *mut c_char,
    _log_bytes: usize,
) -> Status {
    // SAFETY: the caller's.
    call("hipGraphInstantiate", || unsafe { give(exec, GRAPH_EXECS.add(Arc::new((*GRAPHS.get(graph)?).clone()))) })
}

#[unsafe(no_mangle)]
pub extern "C" fn hipGraphLaunch(exec: *mut c_void, handle: *mut c_void) -> Status {
    call("hipGraphLaunch", || {
        let (graph, stream) = (GRAPH_EXECS.get(exec)?, stream(handle)?);
        if stream.is_capturing() {
            return failure(CAPTURE_UNSUPPORTED, "a graph cannot be launched into a stream that is being captured");
        }
        counters::record_call("hipGraphLaunch");
        graph.operations.iter().try_for_each(|operation| stream.push(operation.clone()))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn hipGraphExecDestroy(exec: *mut c_void) -> Status {
    call("hipGraphExecDestroy", || GRAPH_EXECS.remove(exec).map(|_| ()))
}

#[unsafe(no_mangle)]
pub extern "C" fn hipGraphDestroy(graph: *mut c_void) -> Status {
    call("hipGraphDestroy", || GRAPHS.remove(graph).map(|_| ()))
}
