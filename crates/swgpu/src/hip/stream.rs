//! Streams: queues whose worker threads run operations in order; events: points in them; capture into a graph.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::device::{self, Device};
use super::handles::Handles;
use super::{CAPTURE_INVALIDATED, CAPTURE_UNJOINED, CAPTURE_UNMATCHED, CAPTURE_UNSUPPORTED, Failure, failure};

/// One operation. Called once per launch, so a graph can run it again.
pub type Operation = Arc<dyn Fn(&'static Device) + Send + Sync>;

/// Captured operations in the order of capture, which respects all their dependencies.
#[derive(Clone, Default)]
pub struct Graph {
    pub operations: Vec<Operation>,
}

#[derive(Default)]
struct CaptureState {
    graph: Graph,
    invalid: bool,
    origin: usize,
    /// Streams that took part: number, and whether they have work that the origin does not wait for.
    members: Vec<(usize, bool)>,
}

/// A capture in progress, shared by the streams that take part.
pub struct Capture(Mutex<CaptureState>);

impl Capture {
    fn state(&self) -> MutexGuard<'_, CaptureState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Capture {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Capture of {} operations", self.state().graph.operations.len())
    }
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Operation>,
    enqueued: u64,
    completed: u64,
    closed: bool,
}

/// What a stream shares with its worker and with those who wait for it.
#[derive(Default)]
pub struct Progress {
    queue: Mutex<Queue>,
    changed: Condvar,
}

impl std::fmt::Debug for Progress {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let queue = self.queue();
        write!(formatter, "{} of {} done", queue.completed, queue.enqueued)
    }
}

impl Progress {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the first `ticket` operations are done.
    pub fn wait(&self, ticket: u64) {
        let mut queue = self.queue();
        while queue.completed < ticket {
            queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    pub fn is_done(&self, ticket: u64) -> bool {
        self.queue().completed >= ticket
    }

    fn work(&self, device: &'static Device) {
        loop {
            let mut queue = self.queue();
            let operation = loop {
                match queue.waiting.pop_front() {
                    Some(operation) => break operation,
                    None if queue.closed => return,
                    None => queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner),
                }
            };
            drop(queue);
            operation(device);
            self.queue().completed += 1;
            self.changed.notify_all();
        }
    }
}

#[derive(Debug)]
pub struct Stream {
    pub device: usize,
    number: usize,
    /// Whether it and the null stream wait for each other.
    blocking: bool,
    progress: Arc<Progress>,
    capture: Mutex<Option<Arc<Capture>>>,
}

impl Stream {
    /// A stream with its worker thread.
    pub fn new(device: usize, blocking: bool) -> Arc<Self> {
        use std::sync::atomic::{AtomicUsize, Ordering};
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let progress = Arc::new(Progress::default());
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let shared = progress.clone();
        std::thread::Builder::new()
            .name(format!("swgpu stream {number}"))
            .spawn(move || {
                let device = device::device(device as i32).expect("a stream is made for a device that exists");
                shared.work(device);
            })
            .expect("the system gives a thread for a stream");
        Arc::new(Self { device, number, blocking, progress, capture: Mutex::new(None) })
    }

    fn capture(&self) -> Option<Arc<Capture>> {
        self.capture.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub fn is_capturing(&self) -> bool {
        self.capture().is_some()
    }

    /// Queues an operation, or adds it to the capture.
    pub fn push(&self, operation: Operation) -> Result<(), Failure> {
        if let Some(capture) = self.capture() {
            let mut state = capture.state();
            state.graph.operations.push(operation);
            if let Some(member) = state.members.iter_mut().find(|member| member.0 == self.number) {
                member.1 = true;
            }
            return Ok(());
        }
        let device = device::device(self.device as i32)?;
        device.check()?;
        // The null stream waits for all blocking streams, and they for it.
        let is_default = Arc::as_ptr(device.default_stream()) == std::ptr::from_ref(self);
        let others = match (is_default, self.blocking) {
            (true, _) => device.streams().into_iter().filter(|stream| stream.blocking).collect(),
            (false, true) => vec![device.default_stream().clone()],
            (false, false) => Vec::new(),
        };
        for other in others {
            let (progress, ticket) = other.point();
            if !progress.is_done(ticket) {
                self.enqueue(Arc::new(move |_| progress.wait(ticket)));
            }
        }
        self.enqueue(operation);
        Ok(())
    }

    fn enqueue(&self, operation: Operation) {
        let mut queue = self.progress.queue();
        queue.waiting.push_back(operation);
        queue.enqueued += 1;
        drop(queue);
        self.progress.changed.notify_all();
    }

    /// The point behind everything queued so far.
    pub fn point(&self) -> (Arc<Progress>, u64) {
        (self.progress.clone(), self.progress.queue().enqueued)
    }

    pub fn drain(&self) {
        let (progress, ticket) = self.point();
        progress.wait(ticket);
    }

    /// For calls that may not be made on a capturing stream: the capture becomes invalid.
    pub fn refuse_capture(&self) -> Result<(), Failure> {
        let Some(capture) = self.capture() else { return Ok(()) };
        capture.state().invalid = true;
        failure(CAPTURE_UNSUPPORTED, "waiting for or asking about a stream that is being captured")
    }

    pub fn begin_capture(&self) -> Result<(), Failure> {
        if self.is_capturing() {
            return failure(CAPTURE_UNMATCHED, "the stream is being captured already");
        }
        let state = CaptureState { origin: self.number, ..CaptureState::default() };
        *self.capture.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(Capture(Mutex::new(state))));
        Ok(())
    }

    /// Ends a capture that began on this stream; `all` are the streams that may have joined it.
    pub fn end_capture(&self, all: &[Arc<Stream>]) -> Result<Graph, Failure> {
        let Some(capture) = self.capture() else { return failure(CAPTURE_UNMATCHED, "no capture began on this stream") };
        if capture.state().origin != self.number {
            return failure(CAPTURE_UNMATCHED, "the capture began on another stream");
        }
        let leave = |stream: &Stream| {
            let mut own = stream.capture.lock().unwrap_or_else(PoisonError::into_inner);
            own.take_if(|own| Arc::ptr_eq(own, &capture));
        };
        all.iter().for_each(|stream| leave(stream));
        leave(self);
        let mut state = capture.state();
        if state.invalid {
            return failure(CAPTURE_INVALIDATED, "a call that is not permitted was made during the capture");
        }
        if state.members.iter().any(|&(_, unjoined)| unjoined) {
            return failure(
                CAPTURE_UNJOINED,
                "a stream that joined the capture has work that its first stream does not wait for",
            );
        }
        Ok(std::mem::take(&mut state.graph))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.progress.queue().closed = true;
        self.progress.changed.notify_all();
    }
}

/// Where an event was last recorded.
#[derive(Clone, Debug, Default)]
enum Recorded {
    #[default]
    Never,
    Queued(Arc<Progress>, u64),
    Captured(Arc<Capture>, usize),
}

#[derive(Debug, Default)]
pub struct Event {
    recorded: Mutex<Recorded>,
    reached: Arc<Mutex<Option<Instant>>>,
}

impl Event {
    fn recorded(&self) -> Recorded {
        self.recorded.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub fn record(&self, stream: &Stream) -> Result<(), Failure> {
        if let Some(capture) = stream.capture() {
            *self.recorded.lock().unwrap_or_else(PoisonError::into_inner) = Recorded::Captured(capture, stream.number);
            return Ok(());
        }
        let reached = self.reached.clone();
        stream.push(Arc::new(move |_| *reached.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now())))?;
        let (progress, ticket) = stream.point();
        *self.recorded.lock().unwrap_or_else(PoisonError::into_inner) = Recorded::Queued(progress, ticket);
        Ok(())
    }

    /// Makes later work of `stream` wait for the event; a captured event makes `stream` join its capture.
    pub fn make_wait(&self, stream: &Stream) -> Result<(), Failure> {
        match self.recorded() {
            Recorded::Never => Ok(()),
            Recorded::Queued(progress, ticket) if stream.is_capturing() => {
                // Work outside the capture is over before the graph can be launched by a correct program; checked here.
                match progress.is_done(ticket) {
                    true => Ok(()),
                    false => failure(CAPTURE_UNSUPPORTED, "a captured stream waits for an event outside its capture"),
                }
            }
            Recorded::Queued(progress, ticket) => stream.push(Arc::new(move |_| progress.wait(ticket))),
            Recorded::Captured(capture, recorder) => {
                let mut own = stream.capture.lock().unwrap_or_else(PoisonError::into_inner);
                if own.as_ref().is_some_and(|own| !Arc::ptr_eq(own, &capture)) {
                    return failure(CAPTURE_UNMATCHED, "the event belongs to another capture");
                }
                let mut state = capture.state();
                if let Some(member) = state.members.iter_mut().find(|member| member.0 == recorder) {
                    member.1 = false;
                }
                if stream.number != state.origin {
                    let number = stream.number;
                    state.members.retain(|member| member.0 != number);
                    state.members.push((number, true));
                }
                drop(state);
                *own = Some(capture);
                Ok(())
            }
        }
    }

    pub fn synchronize(&self) -> Result<(), Failure> {
        match self.recorded() {
            Recorded::Never => Ok(()),
            Recorded::Queued(progress, ticket) => {
                progress.wait(ticket);
                Ok(())
            }
            Recorded::Captured(..) => failure(CAPTURE_UNSUPPORTED, "waiting for an event that was captured"),
        }
    }

    pub fn is_done(&self) -> bool {
        match self.recorded() {
            Recorded::Never => true,
            Recorded::Queued(progress, ticket) => progress.is_done(ticket),
            Recorded::Captured(..) => false,
        }
    }

    pub fn reached(&self) -> Option<Instant> {
        *self.reached.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub static STREAMS: Handles<Stream> = Handles::new("stream");
pub static EVENTS: Handles<Event> = Handles::new("event");
pub static GRAPHS: Handles<Graph> = Handles::new("graph");
pub static GRAPH_EXECS: Handles<Graph> = Handles::new("executable graph");

/// The stream of a handle; null is the current device's own.
pub fn stream(handle: *mut std::ffi::c_void) -> Result<Arc<Stream>, Failure> {
    if handle.is_null() { Ok(device::current()?.default_stream().clone()) } else { STREAMS.get(handle) }
}
