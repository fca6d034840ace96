//! The C functions of RCCL.

use std::cell::{Cell, RefCell};
use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;
use std::thread::JoinHandle;

use super::communicator::Communicator;
use super::reduce::{check_reduction, element_bytes};
use super::wire::{Kind, Request, read_word};
use super::{Failure, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR, SUCCESS, SYSTEM_ERROR, Status, TIMEOUT, failure, hub};
use crate::counters;
use crate::hip::copy::Place;
use crate::hip::handles::Handles;
use crate::hip::stream::{Stream, stream};
use crate::hip::{LAUNCH_FAILURE, device, give};

static COMMUNICATORS: Handles<Communicator> = Handles::new("communicator");
const MAGIC: &[u8; 8] = b"swgpu id";

/// `ncclUniqueId`: a magic word and the hub's port.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId {
    bytes: [u8; 128],
}

/// One operation of a group: its request (payload filled in when it runs), and where data come from and go to.
struct Pending {
    communicator: Arc<Communicator>,
    stream: Arc<Stream>,
    request: Request,
    source: Option<(Place, usize)>,
    target: Option<(Place, usize)>,
}

thread_local! {
    static DEPTH: Cell<usize> = const { Cell::new(0) };
    static GROUP: RefCell<Vec<Pending>> = const { RefCell::new(Vec::new()) };
    static CONNECTING: RefCell<Vec<JoinHandle<Result<(), Failure>>>> = const { RefCell::new(Vec::new()) };
}

impl From<crate::hip::Failure> for Failure {
    fn from(failure: crate::hip::Failure) -> Self {
        // Of HIP's failures a sticky device error is no fault of the arguments.
        let status = if failure.status == LAUNCH_FAILURE { 1 } else { INVALID_ARGUMENT };
        Self { status, text: failure.text }
    }
}

fn call(name: &str, body: impl FnOnce() -> Result<(), Failure>) -> Status {
    match body() {
        Ok(()) => SUCCESS,
        Err(Failure { status, text }) => {
            eprintln!("swgpu: {name}: {text}");
            status
        }
    }
}

/// # Safety
/// RCCL's: `version` points to an int.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetVersion(version: *mut c_int) -> Status {
    // SAFETY: the caller's.
    call("ncclGetVersion", || Ok(unsafe { give(version, 23004) }?))
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGetErrorString(status: Status) -> *const c_char {
    let text = match status {
        SUCCESS => c"no error",
        1 => c"unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
        SYSTEM_ERROR => c"unhandled system error",
        3 => c"internal error",
        INVALID_ARGUMENT => c"invalid argument",
        INVALID_USAGE => c"invalid usage",
        REMOTE_ERROR => c"remote process exited or there was a network error",
        7 => c"NCCL operation in progress",
        TIMEOUT => c"timeout",
        _ => c"unknown result code",
    };
    text.as_ptr()
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGetLastError(_communicator: *mut c_void) -> *const c_char {
    c"swgpu writes the reason of every failure to stderr".as_ptr()
}

/// # Safety
/// RCCL's: `id` points to an `ncclUniqueId`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetUniqueId(id: *mut UniqueId) -> Status {
    call("ncclGetUniqueId", || {
        let mut bytes = [0; 128];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..10].copy_from_slice(&hub::start()?.to_le_bytes());
        // SAFETY: the caller's.
        Ok(unsafe { give(id, UniqueId { bytes }) }?)
    })
}

/// Makes a communicator: at once, by `ncclGroupEnd` if a group is open, or in the background if the caller is not to wait.
fn join(port: u16, rank: usize, ranks: usize, device: usize, waits: bool) -> Result<*mut c_void, Failure> {
    let communicator = Arc::new(Communicator::new(port, rank, ranks, device));
    if !waits {
        communicator.connect_in_background();
    } else if DEPTH.get() == 0 {
        communicator.connect()?;
    } else {
        let waiting = communicator.clone();
        let thread = std::thread::spawn(move || waiting.connect());
        CONNECTING.with_borrow_mut(|connecting| connecting.push(thread));
    }
    Ok(COMMUNICATORS.add(communicator))
}

/// The part of `ncclConfig_t` that is heeded.
#[repr(C)]
pub struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
}

/// # Safety
/// RCCL's: `communicator` points to a communicator handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRank(communicator: *mut *mut c_void, ranks: c_int, id: UniqueId, rank: c_int) -> Status {
    // SAFETY: the caller's.
    unsafe { ncclCommInitRankConfig(communicator, ranks, id, rank, std::ptr::null()) }
}

/// # Safety
/// RCCL's: `communicator` points to a communicator handle, `config` is null or a configuration. Of that only `blocking` is heeded.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRankConfig(
    communicator: *mut *mut c_void,
    ranks: c_int,
    id: UniqueId,
    rank: c_int,
    config: *const Config,
) -> Status {
    call("ncclCommInitRank", || {
        if &id.bytes[..8] != MAGIC {
            return failure(INVALID_ARGUMENT, "the unique id is none that ncclGetUniqueId of swgpu made");
        }
        if ranks < 1 || !(0..ranks).contains(&rank) {
            return failure(INVALID_ARGUMENT, format!("rank {rank} of {ranks}"));
        }
        let port = u16::from_le_bytes([id.bytes[8], id.bytes[9]]);
        // SAFETY: the caller's.
        let waits = unsafe { config.as_ref() }.is_none_or(|config| config.blocking != 0);
        let joined = join(port, rank as usize, ranks as usize, device::current()?.number, waits)?;
        // SAFETY: the caller's.
        Ok(unsafe { give(communicator, joined) }?)
    })
}

/// # Safety
/// RCCL's: `communicators` has room for `count` handles, `devices` is null or has `count` numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitAll(communicators: *mut *mut c_void, count: c_int, devices: *const c_int) -> Status {
    call("ncclCommInitAll", || {
        let port = hub::start()?;
        DEPTH.set(DEPTH.get() + 1);
        let handles = (0..count.max(0)).map(|rank| {
            // SAFETY: the caller's list has `count` entries.
            let number = if devices.is_null() { rank } else { unsafe { *devices.add(rank as usize) } };
            join(port, rank as usize, count as usize, device::device(number)?.number, true)
        });
        let handles: Result<Vec<*mut c_void>, Failure> = handles.collect();
        let ended = end_group();
        for (index, handle) in handles?.into_iter().enumerate() {
            // SAFETY: the caller's, with room for `count` handles.
            unsafe { give(communicators.add(index), handle) }?;
        }
        ended
    })
}

/// # Safety
/// RCCL's: `new` points to a communicator handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommSplit(
    communicator: *mut c_void,
    color: c_int,
    key: c_int,
    new: *mut *mut c_void,
    _config: *mut c_void,
) -> Status {
    call("ncclCommSplit", || {
        if DEPTH.get() > 0 {
            return failure(INVALID_USAGE, "swgpu does not split inside a group");
        }
        let communicator = COMMUNICATORS.get(communicator)?;
        communicator.check()?;
        let color = i64::from(color) as u64;
        let request = Request { kind: Kind::Split, element: 0, reduction: 0, root: key, count: color, payload: Vec::new() };
        let ticket = communicator.ticket();
        let Some(results) = communicator.run(ticket, &[request]) else { return communicator.check() };
        let mut answer = results.first().map_or(&[][..], Vec::as_slice);
        let mut handle = std::ptr::null_mut();
        if !answer.is_empty() {
            let (port, rank, ranks) = (read_word(&mut answer)?, read_word(&mut answer)?, read_word(&mut answer)?);
            handle = join(port as u16, rank as usize, ranks as usize, communicator.device, true)?;
        }
        // SAFETY: the caller's.
        Ok(unsafe { give(new, handle) }?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommFinalize(communicator: *mut c_void) -> Status {
    call("ncclCommFinalize", || COMMUNICATORS.get(communicator)?.check())
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommDestroy(communicator: *mut c_void) -> Status {
    call("ncclCommDestroy", || {
        let communicator = COMMUNICATORS.remove(communicator)?;
        // Operations still queued end first; a sticky device error does not keep the communicator.
        let _ = device::device(communicator.device as i32)?.synchronize();
        communicator.close(false);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommAbort(communicator: *mut c_void) -> Status {
    call("ncclCommAbort", || {
        COMMUNICATORS.remove(communicator)?.close(true);
        Ok(())
    })
}

/// # Safety
/// RCCL's: `status` points to an int.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommGetAsyncError(communicator: *mut c_void, status: *mut Status) -> Status {
    // SAFETY: the caller's.
    call("ncclCommGetAsyncError", || Ok(unsafe { give(status, COMMUNICATORS.get(communicator)?.async_error()) }?))
}

/// # Safety
/// RCCL's: `count` points to an int.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommCount(communicator: *mut c_void, count: *mut c_int) -> Status {
    // SAFETY: the caller's.
    call("ncclCommCount", || Ok(unsafe { give(count, COMMUNICATORS.get(communicator)?.ranks as c_int) }?))
}

/// # Safety
/// RCCL's: `device` points to an int.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommCuDevice(communicator: *mut c_void, device: *mut c_int) -> Status {
    // SAFETY: the caller's.
    call("ncclCommCuDevice", || Ok(unsafe { give(device, COMMUNICATORS.get(communicator)?.device as c_int) }?))
}

/// # Safety
/// RCCL's: `rank` points to an int.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommUserRank(communicator: *mut c_void, rank: *mut c_int) -> Status {
    // SAFETY: the caller's.
    call("ncclCommUserRank", || Ok(unsafe { give(rank, COMMUNICATORS.get(communicator)?.rank as c_int) }?))
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupStart() -> Status {
    DEPTH.set(DEPTH.get() + 1);
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupEnd() -> Status {
    call("ncclGroupEnd", end_group)
}

fn end_group() -> Result<(), Failure> {
    match DEPTH.get() {
        0 => return failure(INVALID_USAGE, "no group is open"),
        depth => DEPTH.set(depth - 1),
    }
    if DEPTH.get() > 0 {
        return Ok(());
    }
    for thread in CONNECTING.take() {
        thread.join().unwrap_or_else(|_| failure(SYSTEM_ERROR, "a thread that connects a rank has died"))?;
    }
    // One batch for each communicator, in the order of their first operations.
    let mut batches: Vec<Vec<Pending>> = Vec::new();
    for pending in GROUP.take() {
        match batches.iter_mut().find(|batch| Arc::ptr_eq(&batch[0].communicator, &pending.communicator)) {
            Some(batch) if Arc::ptr_eq(&batch[0].stream, &pending.stream) => batch.push(pending),
            Some(_) => return failure(INVALID_USAGE, "one communicator on two streams in one group"),
            None => batches.push(vec![pending]),
        }
    }
    batches.into_iter().try_for_each(enqueue)
}

/// Queues a batch on its stream.
fn enqueue(batch: Vec<Pending>) -> Result<(), Failure> {
    let (communicator, stream) = (batch[0].communicator.clone(), batch[0].stream.clone());
    let ticket = communicator.ticket();
    stream.push(Arc::new(move |device| {
        if device.check().is_err() {
            // The others must not wait for a rank whose device is lost.
            communicator.close(false);
            return;
        }
        let mut requests = Vec::new();
        for pending in &batch {
            let mut request = pending.request.clone();
            if let Some((place, bytes)) = &pending.source {
                let name = format!("{:?} of rank {}", request.kind, communicator.rank);
                if let Err(problem) = place.check_written(*bytes, &name) {
                    device.fail(LAUNCH_FAILURE, &problem);
                    communicator.close(false);
                    return;
                }
                // SAFETY: `Place` keeps the range alive, and it was checked to be `bytes` long.
                request.payload = unsafe { std::slice::from_raw_parts(place.data(), *bytes) }.to_vec();
            }
            requests.push(request);
        }
        let Some(results) = communicator.run(ticket, &requests) else { return };
        for request in &requests {
            counters::record_call(&format!("nccl{:?}", request.kind));
        }
        for (pending, result) in batch.iter().zip(results) {
            let Some((place, bytes)) = &pending.target else { continue };
            if result.len() != *bytes {
                device.fail(
                    LAUNCH_FAILURE,
                    &format!("{:?}: {} bytes came, {bytes} were expected", pending.request.kind, result.len()),
                );
                return;
            }
            // SAFETY: as above.
            unsafe { std::ptr::copy_nonoverlapping(result.as_ptr(), place.data(), *bytes) };
            place.mark_written(*bytes);
        }
    }))?;
    Ok(())
}

/// What distinguishes the collectives: how many times `count` elements go in and come out.
struct Shape {
    kind: Kind,
    element: c_int,
    reduction: c_int,
    root: c_int,
    count: usize,
    source: usize,
    target: usize,
}

fn operation(
    name: &str,
    source: *const c_void,
    target: *mut c_void,
    communicator: *mut c_void,
    queue: *mut c_void,
    shape: Shape,
) -> Status {
    call(name, || {
        let communicator = COMMUNICATORS.get(communicator)?;
        communicator.check()?;
        check_reduction(shape.reduction)?;
        let stream = stream(queue)?;
        if stream.device != communicator.device {
            let text = format!("a communicator of device {} on a stream of device {}", communicator.device, stream.device);
            return failure(INVALID_USAGE, text);
        }
        if !(0..communicator.ranks as c_int).contains(&shape.root) {
            return failure(INVALID_ARGUMENT, format!("rank {} of {}", shape.root, communicator.ranks));
        }
        let bytes = shape.count * element_bytes(shape.element)?;
        let place = |pointer: *const c_void, times: usize| -> Result<Option<(Place, usize)>, Failure> {
            // `usize::MAX` stands for once per rank.
            let times = if times == usize::MAX { communicator.ranks } else { times };
            if times * bytes == 0 { Ok(None) } else { Ok(Some((Place::device(pointer, times * bytes)?, times * bytes))) }
        };
        // Only the root's source counts in a broadcast, and only its target in a reduction.
        let is_root = communicator.rank == shape.root as usize;
        let reads = is_root || shape.kind != Kind::Broadcast;
        let writes = is_root || shape.kind != Kind::Reduce;
        let pending = Pending {
            source: if reads { place(source, shape.source)? } else { None },
            target: if writes { place(target.cast_const(), shape.target)? } else { None },
            request: Request {
                kind: shape.kind,
                element: shape.element,
                reduction: shape.reduction,
                root: shape.root,
                count: shape.count as u64,
                payload: Vec::new(),
            },
            communicator: communicator.clone(),
            stream,
        };
        if DEPTH.get() == 0 {
            return enqueue(vec![pending]);
        }
        GROUP.with_borrow_mut(|group| group.push(pending));
        Ok(())
    })
}

const PER_RANK: usize = usize::MAX;

/// # Safety
/// RCCL's: both buffers are device memory of `count` elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclAllReduce(
    source: *const c_void,
    target: *mut c_void,
    count: usize,
    element: c_int,
    reduction: c_int,
    communicator: *mut c_void,
    queue: *mut c_void,
) -> Status {
    let shape = Shape { kind: Kind::AllReduce, element, reduction, root: 0, count, source: 1, target: 1 };
    operation("ncclAllReduce", source, target, communicator, queue, shape)
}

/// # Safety
/// RCCL's: the source, and on the root the target, have `count` elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclReduce(
    source: *const c_void,
    target: *mut c_void,
    count: usize,
    element: c_int,
    reduction: c_int,
    root: c_int,
    communicator: *mut c_void,
    queue: *mut c_void,
) -> Status {
    let shape = Shape { kind: Kind::Reduce, element, reduction, root, count, source: 1, target: 1 };
    operation("ncclReduce", source, target, communicator, queue, shape)
}

/// # Safety
/// RCCL's: the source has `count` elements for each rank, the target `count`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclReduceScatter(
    source: *const c_void,
    target: *mut c_void,
    count: usize,
    element: c_int,
    reduction: c_int,
    communicator: *mut c_void,
    queue: *mut c_void,
) -> Status {
    let shape = Shape { kind: Kind::ReduceScatter, element, reduction, root: 0, count, source: PER_RANK, target: 1 };
    operation("ncclReduceScatter", source, target, communicator, queue, shape)
}

/// # Safety
/// RCCL's: the source has `count` elements, the target `count` for each rank.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclAllGather(
    source: *const c_void,
    target: *mut c_void,
    count: usize,
    element: c_int,
    communicator: *mut c_void,
    queue: *mut c_void,
) -> Status {
    let shape = Shape { kind: Kind::AllGather, element, reduction: 0, root: 0, count, source: 1, target: PER_RANK };
    operation("ncclAllGather", source, target, communicator, queue, shape)
}

/// # Safety
/// RCCL's: the target, and on the root the source, have `count` elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclBroadcast(
    source: *const c_void,
    target: *mut c_void,
    count: usize,
    element: c_int,
    root: c_int,
    communicator: *mut c_void,
    queue: *mut c_void,
) -> Status {
    let shape = Shape { kind: Kind::Broadcast, element, reduction: 0, root, count, source: 1, target: 1 };
    operation("ncclBroadcast", source, target, communicator, queue, shape)
}

/// # Safety
/// RCCL's: both buffers have `count` elements for each rank.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclAllToAll(
    source: *const c_void,
    target: *mut c_void,
    count: usize,
    element: c_int,
    communicator: *mut c_void,
    queue: *mut c_void,
) -> Status {
    let shape = Shape { kind: Kind::AllToAll, element, reduction: 0, root: 0, count, source: PER_RANK, target: PER_RANK };
    operation("ncclAllToAll", source, target, communicator, queue, shape)
}

/// # Safety
/// RCCL's: the buffer has `count` elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclSend(
    source: *const c_void,
    count: usize,
    element: c_int,
    peer: c_int,
    communicator: *mut c_void,
    queue: *mut c_void,
) -> Status {
    let shape = Shape { kind: Kind::Send, element, reduction: 0, root: peer, count, source: 1, target: 0 };
    operation("ncclSend", source, std::ptr::null_mut(), communicator, queue, shape)
}

/// # Safety
/// RCCL's: the buffer has `count` elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclRecv(
    target: *mut c_void,
    count: usize,
    element: c_int,
    peer: c_int,
    communicator: *mut c_void,
    queue: *mut c_void,
) -> Status {
    let shape = Shape { kind: Kind::Receive, element, reduction: 0, root: peer, count, source: 0, target: 1 };
    operation("ncclRecv", std::ptr::null(), target, communicator, queue, shape)
}
