//! How a rank's end reaches the others, and how all of them end when one fails: none may be left waiting.
//!
//! The first failure is told to all by a small message, which they look for while they wait. Whoever knows of a failure ends the
//! job after a short grace, in which the others can still say what they have to.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Result;

use super::super::transport::PeerFailed;
use super::raw::{Comm, Requests};
use crate::error::panic_text;
use crate::print::aloud;

/// Time between a failure and the end of all ranks: enough for processes that share cores to be heard.
const GRACE: Duration = Duration::from_secs(2);
/// How often messages are helped along meanwhile.
const TICK: Duration = Duration::from_millis(2);
/// Reasons are cut here: short messages are on their way at once.
const LONGEST: usize = 2000;

const FAILED: i32 = 1;
const LEFT: i32 = 2;

pub struct Alarm {
    pub rank: usize,
    pub world: usize,
    comm: Comm,
    failure: OnceLock<Failure>,
    /// By rank.
    left: Vec<AtomicBool>,
    /// Held while messages are looked for: what one thread finds, another must not take.
    listening: Mutex<()>,
    /// This process has printed why.
    said: AtomicBool,
}

struct Failure {
    text: String,
    is_own: bool,
}

impl Alarm {
    pub fn new(comm: Comm) -> Result<Arc<Self>> {
        let (rank, world) = comm.rank_and_size()?;
        let left = (0..world).map(|_| AtomicBool::new(false)).collect();
        let (failure, listening, said) = (OnceLock::new(), Mutex::new(()), AtomicBool::new(false));
        Ok(Arc::new(Self { rank, world, comm, failure, left, listening, said }))
    }

    /// The failure that is known, as an error.
    pub fn failure(&self) -> Option<anyhow::Error> {
        self.failure.get().map(|f| PeerFailed(f.text.clone()).into())
    }

    pub fn has_left(&self, rank: usize) -> bool {
        self.left[rank].load(Ordering::Relaxed)
    }

    fn others(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.world).filter(|r| *r != self.rank)
    }

    /// Takes in what others have told; the failure that is known then.
    pub fn listen(self: &Arc<Self>) -> Option<anyhow::Error> {
        if self.failure.get().is_none()
            && let Ok(guard) = self.listening.try_lock()
        {
            let found = self.take_all();
            drop(guard);
            match found {
                Ok(None) => {}
                Ok(Some(text)) => self.set(text, false),
                Err(e) => self.set(format!("rank {} failed: {e:#}", self.rank), true),
            }
        }
        self.failure()
    }

    /// Reads until a failure is told or nothing is left.
    fn take_all(&self) -> Result<Option<String>> {
        while let Some(notice) = self.comm.probe()? {
            let text = self.comm.take(&notice)?;
            match notice.tag {
                LEFT => self.left[notice.from].store(true, Ordering::Relaxed),
                _ => return Ok(Some(String::from_utf8_lossy(&text).into_owned())),
            }
        }
        Ok(None)
    }

    /// Makes `text` the failure, unless there is one; the failure then.
    pub fn fail(self: &Arc<Self>, text: String) -> String {
        self.set(text.clone(), true);
        self.failure.get().map_or(text, |f| f.text.clone())
    }

    /// As `fail`, and prints `reason` once, unless another rank has failed first: that one has printed its own.
    pub fn fail_aloud(self: &Arc<Self>, reason: &str) {
        let text = format!("rank {} failed: {reason}", self.rank);
        self.set(text.clone(), true);
        if self.failure.get().is_some_and(|f| f.is_own) && !self.said.swap(true, Ordering::Relaxed) {
            aloud(&format!("error: {text}"));
        }
    }

    /// What a panic does on any thread: it has been printed, and ends all ranks.
    pub fn panicked(self: &Arc<Self>, what: &str) -> ! {
        self.fail_aloud(&format!("it panicked{what}"));
        self.wait_for_the_end()
    }

    fn set(self: &Arc<Self>, text: String, is_own: bool) {
        let mut is_first = false;
        self.failure.get_or_init(|| {
            is_first = true;
            Failure { text, is_own }
        });
        if is_first {
            self.end_soon(is_own);
        }
    }

    /// Tells the others if the failure is this rank's own, and ends all ranks after the grace.
    fn end_soon(self: &Arc<Self>, is_own: bool) {
        let mut requests = Requests::default();
        if is_own && let Some(failure) = self.failure.get() {
            // Never freed: the process ends while it may still be read.
            let text: &'static [u8] = failure.text.as_bytes()[..failure.text.len().min(LONGEST)].to_vec().leak();
            for to in self.others() {
                // SAFETY: static, and never written. Who cannot be told is ended with the others.
                let _ = unsafe { self.comm.send(text.as_ptr(), text.len(), to, FAILED, &mut requests) };
            }
        }
        // Whoever has failed ends the job; the others do, should it be unable to.
        let until = Instant::now() + if is_own { GRACE } else { 2 * GRACE };
        let alarm = self.clone();
        let end = move || {
            while Instant::now() < until {
                // Calls of MPI move messages on: those of this list, and what other ranks still send here before they give up.
                let _ = requests.done();
                let _ = alarm.comm.probe();
                std::thread::sleep(TICK);
            }
            alarm.abort()
        };
        if std::thread::Builder::new().name("end of all ranks".into()).spawn(end).is_err() {
            self.abort();
        }
    }

    fn abort(&self) -> ! {
        if !self.said.swap(true, Ordering::Relaxed)
            && let Some(failure) = self.failure.get()
        {
            aloud(&format!("error: {}", failure.text));
        }
        aloud(&format!("rank {} ends all {} ranks", self.rank, self.world));
        self.comm.abort()
    }

    /// After a failure: the process ends while this waits.
    pub fn wait_for_the_end(&self) -> ! {
        std::thread::sleep(3 * GRACE);
        self.abort()
    }

    /// Tells all others that this rank has nothing more to say, once.
    pub fn leave(self: &Arc<Self>) {
        if self.left[self.rank].swap(true, Ordering::Relaxed) || self.failure.get().is_some() {
            return;
        }
        let mut requests = Requests::default();
        for to in self.others() {
            // SAFETY: nothing is sent but the tag.
            if let Err(e) = unsafe { self.comm.send([0u8; 0].as_ptr(), 0, to, LEFT, &mut requests) } {
                self.fail(format!("rank {} failed: {e:#}", self.rank));
                return;
            }
        }
        // Without data, they are on their way once MPI has them; `wait_for_all` drives it on.
        while requests.open() > 0 && self.failure.get().is_none() {
            if let Err(e) = requests.done() {
                self.fail(format!("rank {} failed: {e:#}", self.rank));
            }
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// Waits until all ranks have left; false if there is a failure instead.
    pub fn wait_for_all(self: &Arc<Self>, timeout: Duration) -> bool {
        let begun = Instant::now();
        let mut pause = Duration::from_micros(50);
        loop {
            if self.listen().is_some() {
                return false;
            }
            let late: Vec<String> = self.others().filter(|r| !self.has_left(*r)).map(|r| r.to_string()).collect();
            if late.is_empty() {
                return true;
            }
            if begun.elapsed() >= timeout {
                let seconds = begun.elapsed().as_secs_f64();
                let text = format!("rank {} has ended and waits for rank {} for {seconds:.0} s", self.rank, late.join(", "));
                self.fail(text);
                return false;
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(5));
        }
    }

    /// The alarm that a panic on any thread sounds, while there is one.
    pub fn set_current(alarm: Option<Arc<Self>>) {
        static HOOK: OnceLock<()> = OnceLock::new();
        let has_alarm = alarm.is_some();
        *CURRENT.lock().unwrap_or_else(PoisonError::into_inner) = alarm;
        if has_alarm {
            HOOK.get_or_init(|| {
                let before = std::panic::take_hook();
                std::panic::set_hook(Box::new(move |info| {
                    before(info);
                    let current = CURRENT.lock().unwrap_or_else(PoisonError::into_inner).clone();
                    if let Some(alarm) = current {
                        let text = panic_text(info.payload());
                        alarm.panicked(&if text.is_empty() { String::new() } else { format!(": {text}") });
                    }
                }));
            });
        }
    }
}

static CURRENT: Mutex<Option<Arc<Alarm>>> = Mutex::new(None);
