//! Operations on devices are queued and happen later, so nobody stands waiting for those that never end. This thread does: it sees
//! what takes too long, what RCCL reports of itself, and what other ranks tell, and then aborts the communicators, upon which all that is
//! queued comes to an end and the rank's own thread finds the failure.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use hip_sys::{Event, Hip as Library};
use rccl_sys::{Communicator, Error, State};

use super::super::transport::{Op, PeerFailed, Transport};
use crate::tensor::hip::Hip;

/// How often operations are looked at.
const TICK: Duration = Duration::from_millis(5);
/// How long a rank that has failed may take to say why.
const REASON_TIME: Duration = Duration::from_millis(300);

/// One rank's communicator of a group, until it is aborted.
pub struct Line {
    pub members: Vec<usize>,
    communicator: Mutex<Option<Communicator>>,
}

impl Line {
    pub fn new(members: Vec<usize>, communicator: Communicator) -> Arc<Self> {
        Arc::new(Self { members, communicator: Mutex::new(Some(communicator)) })
    }

    fn lock(&self) -> MutexGuard<'_, Option<Communicator>> {
        self.communicator.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls `f` with the communicator; None when it was aborted.
    pub fn with<R>(&self, f: impl FnOnce(&Communicator) -> R) -> Option<R> {
        self.lock().as_ref().map(f)
    }

    /// How far its work in the background is; an aborted one is ready, for nothing more is done with it.
    fn state(&self) -> Result<State, Error> {
        self.with(Communicator::state).unwrap_or(Ok(State::Ready))
    }

    fn abort(&self) {
        // Dropped, it is aborted.
        drop(self.lock().take());
    }

    /// Takes it out, to be ended in order.
    pub fn take(&self) -> Option<Communicator> {
        self.lock().take()
    }
}

/// An operation that is queued.
struct Queued {
    op: Op,
    line: Arc<Line>,
    /// What came before it in its stream is done.
    ready: Event,
    done: Event,
    /// When it was seen to be ready.
    since: Option<Instant>,
}

#[derive(Clone)]
struct Failure {
    text: String,
    is_own: bool,
}

#[derive(Default)]
struct Board {
    lines: Vec<Arc<Line>>,
    queued: VecDeque<Queued>,
    failure: Option<Failure>,
    ended: bool,
}

struct Shared {
    library: &'static Library,
    device: i32,
    transport: Arc<dyn Transport>,
    timeout: Duration,
    board: Mutex<Board>,
    changed: Condvar,
}

pub struct Watch {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    /// Watches the operations of a rank's device. One that waits longer than `timeout` for other ranks ends the run.
    pub fn start(hip: &Hip, transport: Arc<dyn Transport>, timeout: Duration) -> Result<Arc<Self>> {
        let (library, device) = (hip.main_stream()?.hip(), hip.device_number()?);
        let (board, changed) = (Mutex::default(), Condvar::new());
        let shared = Arc::new(Shared { library, device, transport, timeout, board, changed });
        let watching = shared.clone();
        let thread = std::thread::Builder::new()
            .name(format!("rank-{}-watch", shared.transport.rank()))
            .spawn(move || watching.watch())
            .context("starting a thread that watches operations on the device")?;
        Ok(Arc::new(Self { shared, thread: Some(thread) }))
    }

    pub fn add_line(&self, line: &Arc<Line>) {
        self.shared.lock().lines.push(line.clone());
    }

    /// Watches an operation that lies between two events of a stream.
    pub fn add(&self, op: Op, line: &Arc<Line>, ready: Event, done: Event) {
        self.shared.transport.queued(&op);
        self.shared.lock().queued.push_back(Queued { op, line: line.clone(), ready, done, since: None });
        self.shared.changed.notify_all();
    }

    /// An error where something has failed already.
    pub fn check(&self) -> Result<()> {
        self.shared.lock().failure.as_ref().map_or(Ok(()), Failure::error)
    }

    /// As `check`, and asks the communicators themselves: what they have done is sound if this says nothing. To be called when that is done,
    /// for an operation that fails ends too.
    pub fn confirm(&self) -> Result<()> {
        self.shared.look_at_lines();
        self.check()
    }

    /// The library has refused to queue an operation: the failure that is behind it, if there is one.
    pub fn refused(&self, op: &Op, e: Error) -> anyhow::Error {
        self.shared.broken(broken(op, &e));
        self.check().err().unwrap_or_else(|| anyhow!(e))
    }

    /// Waits until a communicator has done what it does in the background: nothing can be queued before.
    pub fn until_ready(&self, op: &Op, line: &Arc<Line>) -> Result<()> {
        let begun = Instant::now();
        let mut pause = Duration::from_micros(20);
        loop {
            self.check()?;
            match line.state() {
                Ok(State::Ready) => return self.check(),
                Ok(State::InProgress) if begun.elapsed() < self.shared.timeout => {}
                Ok(State::InProgress) => self.shared.fail(self.shared.late(op, line, begun.elapsed())),
                Err(e) => self.shared.broken(broken(op, &e)),
            }
            if let Some(text) = self.shared.transport.failure() {
                self.shared.give_up(Failure { text, is_own: false });
            }
            std::thread::sleep(pause);
            pause = (2 * pause).min(TICK);
        }
    }

    /// Ends all communicators in order, together with the other ranks. Without this they are aborted.
    pub fn finish(&self) {
        let lines = std::mem::take(&mut self.shared.lock().lines);
        lines.iter().filter_map(|line| line.take()).for_each(|communicator| end_in_order(communicator, self.shared.timeout));
    }
}

impl Watch {
    /// Ends all communicators at once.
    pub fn abort(&self) {
        let lines = std::mem::take(&mut self.shared.lock().lines);
        lines.iter().for_each(|line| line.abort());
    }
}

/// Lets a communicator come to its end together with the other ranks': what they have not read yet must not go away.
pub fn end_in_order(communicator: Communicator, timeout: Duration) {
    // Nothing is asked of it any more, so what it says is of no interest. Dropped, it is aborted.
    if communicator.finalize().is_ok() && wait_ready(&communicator, timeout) {
        let _ = communicator.destroy();
    }
}

/// Whether a communicator has done what it does in the background, in time.
fn wait_ready(communicator: &Communicator, timeout: Duration) -> bool {
    let begun = Instant::now();
    loop {
        match communicator.state() {
            Ok(State::Ready) => return true,
            Ok(State::InProgress) if begun.elapsed() < timeout => std::thread::sleep(Duration::from_micros(100)),
            _ => return false,
        }
    }
}

fn broken(op: &Op, e: &Error) -> String {
    format!("{op}: {e}")
}

impl Failure {
    fn error(&self) -> Result<()> {
        Err(match self.is_own {
            true => anyhow!("{}", self.text),
            false => PeerFailed(self.text.clone()).into(),
        })
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Board> {
        // Nothing panics while holding the lock.
        self.board.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn watch(&self) {
        if let Err(e) = self.library.set_device(self.device) {
            self.fail(format!("watching operations of device {}: {e}", self.device));
        }
        loop {
            {
                let board = self.lock();
                if board.ended || board.failure.is_some() {
                    return;
                }
                // Nothing on its way: another rank's failure, which is looked for all the same, may wait a moment.
                let pause = if board.queued.is_empty() { 10 * TICK } else { TICK };
                let (board, _) = self.changed.wait_timeout(board, pause).unwrap_or_else(PoisonError::into_inner);
                if board.ended {
                    return;
                }
            }
            std::thread::sleep(TICK);
            if let Some(text) = self.transport.failure() {
                self.give_up(Failure { text, is_own: false });
            }
            self.look_at_lines();
            if let Some(text) = self.look_at_queued() {
                self.fail(text);
            }
        }
    }

    /// Forgets what is done; a sentence about what takes too long.
    fn look_at_queued(&self) -> Option<String> {
        let mut board = self.lock();
        let mut failed = None;
        board.queued.retain_mut(|q| match q.done.is_done() {
            Ok(true) => false,
            Ok(false) => true,
            Err(e) => {
                failed.get_or_insert_with(|| broken(&q.op, &e));
                false
            }
        });
        let mut late = None;
        for q in &mut board.queued {
            if q.since.is_none() && q.ready.is_done().unwrap_or(false) {
                q.since = Some(Instant::now());
            }
            if let Some(waited) = q.since.map(|since| since.elapsed()).filter(|waited| *waited >= self.timeout) {
                late.get_or_insert_with(|| (q.op, q.line.clone(), waited));
            }
        }
        drop(board);
        failed.or_else(|| late.map(|(op, line, waited)| self.late(&op, &line, waited)))
    }

    /// The first error that a communicator tells of itself ends the run.
    fn look_at_lines(&self) {
        let (lines, next) = {
            let board = self.lock();
            let next: Vec<(Arc<Line>, Op)> = board.queued.iter().map(|q| (q.line.clone(), q.op)).collect();
            (board.lines.clone(), next)
        };
        for line in lines {
            if let Err(e) = line.state() {
                let op = next.iter().find(|(l, _)| Arc::ptr_eq(l, &line)).map(|(_, op)| *op);
                self.broken(match op {
                    Some(op) => broken(&op, &e),
                    None => format!("the group of ranks {:?} on GPUs: {e}", line.members),
                });
            }
        }
    }

    fn late(&self, op: &Op, line: &Line, waited: Duration) -> String {
        let (rank, seconds) = (self.transport.rank(), waited.as_secs_f64());
        let others: Vec<usize> = line.members.iter().copied().filter(|m| *m != rank).collect();
        let why = match self.transport.missing_from(op, &others) {
            Some(missing) if missing.is_empty() => "all of them have queued it, and it does not end on the devices".into(),
            Some(missing) => missing.join("; "),
            None => "which of them is missing is not known here".into(),
        };
        format!("rank {rank} waits in {op} for {seconds:.0} s for ranks {}: {why}", list(&others))
    }

    /// RCCL has failed. When a rank ends, the others see that first, and its reason a moment later: that says more.
    fn broken(&self, text: String) {
        let until = Instant::now() + REASON_TIME;
        while Instant::now() < until && self.lock().failure.is_none() {
            if let Some(text) = self.transport.failure() {
                self.give_up(Failure { text, is_own: false });
                return;
            }
            std::thread::sleep(TICK);
        }
        self.fail(text);
    }

    /// This rank's own failure, which the others are told.
    fn fail(&self, text: String) {
        if self.give_up(Failure { text: text.clone(), is_own: true }) {
            self.transport.fail(&text);
        }
    }

    /// Keeps the first failure, and ends what is on its way. Whether it was the first.
    fn give_up(&self, failure: Failure) -> bool {
        let lines = {
            let mut board = self.lock();
            if board.failure.is_some() {
                return false;
            }
            board.failure = Some(failure);
            board.lines.clone()
        };
        lines.iter().for_each(|line| line.abort());
        self.changed.notify_all();
        true
    }
}

fn list(ranks: &[usize]) -> String {
    let names: Vec<String> = ranks.iter().map(usize::to_string).collect();
    names.join(", ")
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.abort();
        self.shared.lock().ended = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // A panic there has been told of by the hook.
            let _ = thread.join();
        }
        // Events must not outlive the device's work; what is left here is of a run that ends.
        self.shared.lock().queued.clear();
    }
}
