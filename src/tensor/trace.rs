//! What every thread did, and when: the recorder behind `zaya pretrain --profile`.
//!
//! A backend opens a [`verb`] around each call of `trait Backend` on the thread that was called, and a [`task`] around each
//! piece of it on whatever thread works on the piece. Between [`start`] and [`finish`] both are recorded; at any other time
//! they cost one relaxed load each. Training itself opens a [`phase`] around a step and its parts.
//!
//! There is one recording in a process. Verbs are called one after the other, as training does: with several callers at a
//! time each verb is still recorded, but a task goes by the name of the verb that was opened last. So of several ranks in a process
//! one is recorded, and the threads of the others are [muted](mute).

mod chrome;
mod summary;

use std::cell::{Cell, RefCell};
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

pub use summary::{Summary, VerbTotal};

/// The recorder that the functions of this module stand for.
static GLOBAL: Recorder = Recorder::new();

/// State of one recorder. A thread that gets a piece of a verb got it through the thread pool after the verb was opened,
/// which is what makes relaxed accesses enough.
struct Recorder {
    /// Number of the recording that runs, unlike that of any other; 0 = none.
    recording: AtomicU64,
    /// Index + 1 of the call that is open, 0 = none.
    open: AtomicU32,
    session: Mutex<Option<Session>>,
}

thread_local! {
    static MUTED: Cell<bool> = const { Cell::new(false) };
    static LOG: RefCell<Option<Arc<Log>>> = const { RefCell::new(None) };
}

struct Session {
    recording: u64,
    began: Instant,
    calls: Vec<Call>,
    logs: Vec<Arc<Log>>,
}

/// One thread's spans of one recording.
struct Log {
    recording: u64,
    began: Instant,
    thread: String,
    spans: Mutex<Vec<Span>>,
}

/// A verb or phase that was opened.
#[derive(Debug, Clone, PartialEq)]
pub struct Call {
    pub name: &'static str,
    /// Floating-point operations of the call, and bytes it has to move at least.
    pub flops: f64,
    pub bytes: f64,
    /// Call that was open when this one was opened: index into [`Trace::calls`].
    pub parent: Option<usize>,
    /// A part of the program and no verb: what is left of it beside the verbs inside is nobody's work.
    pub phase: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpanKind {
    /// A whole verb or phase, on the thread that called it.
    Call,
    /// A piece of a verb, on the thread that worked on it.
    Task,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    pub kind: SpanKind,
    /// Index into [`Trace::calls`]; None: a task while no verb was open.
    pub call: Option<usize>,
    /// Since the recording began.
    pub start: Duration,
    pub end: Duration,
}

#[derive(Debug, Clone)]
pub struct ThreadTrace {
    pub name: String,
    /// In the order in which they ended.
    pub spans: Vec<Span>,
}

/// A recording.
#[derive(Debug, Clone, Default)]
pub struct Trace {
    pub calls: Vec<Call>,
    /// Threads in the order in which they first did something.
    pub threads: Vec<ThreadTrace>,
    pub length: Duration,
}

impl Trace {
    /// Seconds of all phases of this name together.
    pub fn phase_seconds(&self, name: &str) -> f64 {
        let spans = self.threads.iter().flat_map(|t| &t.spans).filter(|s| s.kind == SpanKind::Call);
        let named = spans.filter(|s| s.call.is_some_and(|i| self.calls[i].phase && self.calls[i].name == name));
        named.map(|s| (s.end - s.start).as_secs_f64()).sum()
    }
}

/// Begins a recording; one that was running is dropped.
pub fn start() {
    GLOBAL.start();
}

/// Ends the recording and returns it; empty when none was running. Spans that are still open are not in it.
pub fn finish() -> Trace {
    GLOBAL.finish()
}

/// Whether a recording runs.
pub fn is_on() -> bool {
    GLOBAL.recording.load(Relaxed) != 0
}

/// Nothing that this thread does is recorded from now on.
pub fn mute() {
    MUTED.set(true);
}

/// Opens a verb on this thread until the guard is dropped: `flops` operations that work on at least `bytes` bytes of memory.
#[must_use = "the span ends when the guard is dropped"]
pub fn verb(name: &'static str, flops: f64, bytes: f64) -> VerbSpan {
    GLOBAL.call(name, flops, bytes, false)
}

/// Opens a part of the program that is no verb, such as a step.
#[must_use = "the span ends when the guard is dropped"]
pub fn phase(name: &'static str) -> VerbSpan {
    GLOBAL.call(name, 0.0, 0.0, true)
}

/// Marks this thread as busy with a piece of the verb now open, until the guard is dropped.
#[must_use = "the span ends when the guard is dropped"]
pub fn task() -> TaskSpan {
    GLOBAL.task()
}

impl Recorder {
    const fn new() -> Self {
        Self { recording: AtomicU64::new(0), open: AtomicU32::new(0), session: Mutex::new(None) }
    }

    fn start(&self) {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let recording = COUNT.fetch_add(1, Relaxed) + 1;
        let mut session = lock(&self.session);
        *session = Some(Session { recording, began: Instant::now(), calls: Vec::new(), logs: Vec::new() });
        self.open.store(0, Relaxed);
        self.recording.store(recording, Relaxed);
    }

    fn finish(&self) -> Trace {
        let mut session = lock(&self.session);
        self.recording.store(0, Relaxed);
        self.open.store(0, Relaxed);
        let Some(session) = session.take() else { return Trace::default() };
        let thread = |log: Arc<Log>| ThreadTrace { name: log.thread.clone(), spans: std::mem::take(&mut *lock(&log.spans)) };
        Trace { calls: session.calls, length: session.began.elapsed(), threads: session.logs.into_iter().map(thread).collect() }
    }

    fn call(&'static self, name: &'static str, flops: f64, bytes: f64, phase: bool) -> VerbSpan {
        if self.recording.load(Relaxed) == 0 || MUTED.get() {
            return VerbSpan(None);
        }
        let (index, outer, recording) = {
            let mut session = lock(&self.session);
            let Some(session) = session.as_mut() else { return VerbSpan(None) };
            let index = session.calls.len();
            let outer = self.open.swap(index as u32 + 1, Relaxed);
            let parent = (outer > 0).then(|| outer as usize - 1);
            session.calls.push(Call { name, flops, bytes, parent, phase });
            (index, outer, session.recording)
        };
        let span = self.begin(SpanKind::Call, Some(index));
        VerbSpan(span.map(|span| OpenCall { _span: span, recorder: self, recording, outer }))
    }

    fn task(&self) -> TaskSpan {
        if self.recording.load(Relaxed) == 0 || MUTED.get() {
            return TaskSpan(None);
        }
        let open = self.open.load(Relaxed);
        TaskSpan(self.begin(SpanKind::Task, (open > 0).then(|| open as usize - 1)))
    }

    fn begin(&self, kind: SpanKind, call: Option<usize>) -> Option<OpenSpan> {
        let log = self.log()?;
        let start = log.began.elapsed();
        Some(OpenSpan { kind, call, log, start, _here: PhantomData })
    }

    /// This thread's log of the recording that runs.
    fn log(&self) -> Option<Arc<Log>> {
        let recording = self.recording.load(Relaxed);
        LOG.with_borrow_mut(|slot| {
            if let Some(log) = slot.as_ref().filter(|log| log.recording == recording) {
                return Some(log.clone());
            }
            let mut session = lock(&self.session);
            let session = session.as_mut()?;
            let thread = thread_name(session.logs.len());
            let (recording, began) = (session.recording, session.began);
            let log = Arc::new(Log { recording, began, thread, spans: Mutex::new(Vec::new()) });
            session.logs.push(log.clone());
            *slot = Some(log.clone());
            Some(log)
        })
    }
}

/// Guard of [`verb`] and [`phase`].
pub struct VerbSpan(Option<OpenCall>);

/// Guard of [`task`].
pub struct TaskSpan(#[expect(dead_code, reason = "held for its drop")] Option<OpenSpan>);

struct OpenCall {
    _span: OpenSpan,
    recorder: &'static Recorder,
    recording: u64,
    /// What was open before, as `Recorder::open`.
    outer: u32,
}

impl Drop for VerbSpan {
    fn drop(&mut self) {
        if let Some(call) = &self.0
            && call.recorder.recording.load(Relaxed) == call.recording
        {
            call.recorder.open.store(call.outer, Relaxed);
        }
    }
}

/// A span that has begun on this thread.
struct OpenSpan {
    kind: SpanKind,
    call: Option<usize>,
    log: Arc<Log>,
    start: Duration,
    /// A guard stays on its thread.
    _here: PhantomData<*const ()>,
}

impl Drop for OpenSpan {
    fn drop(&mut self) {
        let end = self.log.began.elapsed();
        lock(&self.log.spans).push(Span { kind: self.kind, call: self.call, start: self.start, end });
    }
}

fn thread_name(nth: usize) -> String {
    match (rayon::current_thread_index(), std::thread::current().name()) {
        (_, Some(name)) => name.to_string(),
        (Some(index), None) => format!("worker {index}"),
        (None, None) => format!("thread {nth}"),
    }
}

/// A thread that panicked while it held the lock left whole spans behind.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(trace: &Trace) -> Vec<&str> {
        trace.calls.iter().map(|c| c.name).collect()
    }

    #[test]
    fn spans_know_their_thread_their_verb_and_what_was_open_around_them() {
        static RECORDER: Recorder = Recorder::new();
        drop(RECORDER.call("before", 1.0, 1.0, false));
        RECORDER.start();
        {
            let _step = RECORDER.call("step", 0.0, 0.0, true);
            {
                let _verb = RECORDER.call("first", 2e9, 4e6, false);
                std::thread::scope(|scope| {
                    let work = || drop(RECORDER.task());
                    std::thread::Builder::new().name("helper".into()).spawn_scoped(scope, work).unwrap();
                    work();
                });
            }
            drop(RECORDER.call("second", 0.0, 0.0, false));
            drop(RECORDER.task());
        }
        let trace = RECORDER.finish();
        drop(RECORDER.call("after", 1.0, 1.0, false));

        assert_eq!(names(&trace), ["step", "first", "second"]);
        assert_eq!(trace.calls.iter().map(|c| c.parent).collect::<Vec<_>>(), [None, Some(0), Some(0)]);
        assert_eq!(trace.calls[1], Call { name: "first", flops: 2e9, bytes: 4e6, parent: Some(0), phase: false });
        assert_eq!(trace.threads.len(), 2);
        let helper = trace.threads.iter().find(|t| t.name == "helper").unwrap();
        assert_eq!(helper.spans.iter().map(|s| (s.kind, s.call)).collect::<Vec<_>>(), [(SpanKind::Task, Some(1))]);
        let main = trace.threads.iter().find(|t| t.name != "helper").unwrap();
        // In the order in which they ended.
        use SpanKind::{Call as C, Task as T};
        let expected = [(T, Some(1)), (C, Some(1)), (C, Some(2)), (T, Some(0)), (C, Some(0))];
        assert_eq!(main.spans.iter().map(|s| (s.kind, s.call)).collect::<Vec<_>>(), expected);
        assert!(main.spans.iter().all(|s| s.start <= s.end && s.end <= trace.length));
        assert!(helper.spans[0].start >= main.spans[1].start && helper.spans[0].end <= main.spans[1].end);
    }

    #[test]
    fn a_guard_that_outlives_its_recording_leaves_the_next_one_alone() {
        static RECORDER: Recorder = Recorder::new();
        assert!(RECORDER.finish().calls.is_empty());
        RECORDER.start();
        let old = RECORDER.call("old", 0.0, 0.0, false);
        assert!(RECORDER.finish().threads.iter().all(|t| t.spans.is_empty()));
        RECORDER.start();
        {
            let _new = RECORDER.call("new", 0.0, 0.0, false);
            drop(old);
            drop(RECORDER.task());
        }
        let trace = RECORDER.finish();
        assert_eq!(names(&trace), ["new"]);
        let spans: Vec<_> = trace.threads.iter().flat_map(|t| &t.spans).map(|s| (s.kind, s.call)).collect();
        assert_eq!(spans, [(SpanKind::Task, Some(0)), (SpanKind::Call, Some(0))]);
    }
}
