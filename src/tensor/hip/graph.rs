//! The launches of a piece of work that comes again and again, queued as one graph: the host then spends one call on thousands of them.
//!
//! What a graph may repeat is not asked of the caller but looked at. The work is first run as a rehearsal: nothing is queued, and what
//! would have been - kernels with all their arguments, copies, products, in order - goes into a fingerprint, addresses included (blocks of
//! the arena are given out alike each time, where the same is asked for in the same order). A fingerprint that was seen before is captured,
//! and from then on launched: the same calls in the same order, so the same bits. Numbers that come from the host change from time to
//! time and are no part of it: a graph copies them from pinned memory, where they are put before it is launched, and brings its results to
//! pinned memory.
//!
//! Work that keeps something on the device for later (a weight's bf16 copy, a table) cannot be rehearsed, and is run as it is; the next
//! time there is nothing left to keep.

use std::collections::hash_map::DefaultHasher;
use std::ffi::c_void;
use std::hash::{Hash, Hasher};
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result, bail};
use hip_sys::hip::ffi::{hipMemcpyDeviceToHost, hipMemcpyHostToDevice, hipStreamCaptureModeThreadLocal};
use hip_sys::{Graph, GraphExec, HostBuffer, Stream};

use super::Hip;

/// Graphs kept: those of the first and of later micro-batches of a step, and of a validation.
const MOST_GRAPHS: usize = 4;
/// Fingerprints remembered that were seen once.
const MOST_SEEN: usize = 16;
/// After so many rehearsals in a row that had nothing to repeat, rehearsing is given up.
const PATIENCE: u32 = 32;
/// Numbers from and to the host begin at multiples of this in pinned memory.
const LINE: usize = 64;

/// What a queued call would have done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Fingerprint(u64);

/// A run of the work in which calls are not simply queued.
enum Pass {
    /// Nothing is queued; fingerprint and the host's numbers are taken.
    Rehearsal { fingerprint: DefaultHasher, from_host: Vec<Vec<u8>>, to_host: Vec<usize> },
    /// Calls go into a graph; the host's numbers come from pinned memory.
    Capture { pinned: Pinned },
    /// The graph is at work: nothing is queued, and numbers for the host are those that it brings.
    Reading { results: Vec<Vec<u8>> },
}

/// Pinned memory of a graph, and where in it the next numbers lie.
struct Pinned {
    memory: HostBuffer,
    inputs: Vec<usize>,
    outputs: Vec<usize>,
    next: [usize; 2],
}

/// What is known of work that comes again.
#[derive(Default)]
pub struct Graphs {
    state: Mutex<State>,
    pass: Mutex<Option<Pass>>,
}

#[derive(Default)]
struct State {
    graphs: Vec<(Fingerprint, Repeated)>,
    seen: Vec<Fingerprint>,
    in_vain: u32,
    /// Why there is nothing to repeat any more.
    off: bool,
}

/// A captured graph.
struct Repeated {
    exec: GraphExec,
    memory: HostBuffer,
    inputs: Vec<usize>,
    outputs: Vec<(usize, usize)>,
}

/// The work keeps something for later, which a rehearsal cannot.
#[derive(Debug, thiserror::Error)]
#[error("{0} is made and kept: this cannot be rehearsed")]
struct Keeps(&'static str);

/// What becomes of a call that was to be queued.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Fate {
    Queue,
    /// It is not to be queued.
    Skip,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Whoever panicked inside left a pass that the next one replaces.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Hip {
    /// Asked before each call is queued. `note` hashes all that the call depends on.
    pub(super) fn fate(&self, note: impl FnOnce(&mut DefaultHasher)) -> Fate {
        match &mut *locked(&self.inner.graphs.pass) {
            None | Some(Pass::Capture { .. }) => Fate::Queue,
            Some(Pass::Rehearsal { fingerprint, .. }) => {
                note(fingerprint);
                Fate::Skip
            }
            Some(Pass::Reading { .. }) => Fate::Skip,
        }
    }

    /// Asked before something is made that outlives the work.
    pub(super) fn about_to_keep(&self, what: &'static str) -> Result<()> {
        match &*locked(&self.inner.graphs.pass) {
            None => Ok(()),
            Some(_) => Err(Keeps(what).into()),
        }
    }

    /// A copy of the host's numbers to the device, where a pass takes it over; `false` = it is to be made as usual.
    pub(super) fn pass_upload(&self, stream: &Stream, to: *mut c_void, data: &[u8]) -> Result<bool> {
        match &mut *locked(&self.inner.graphs.pass) {
            None => return Ok(false),
            Some(Pass::Rehearsal { fingerprint, from_host, .. }) => {
                ("upload", to as usize, data.len()).hash(fingerprint);
                from_host.push(data.to_vec());
            }
            Some(Pass::Capture { pinned }) => {
                let from = pinned.next_place(0).context("more numbers from the host than in the rehearsal")?;
                // SAFETY: the block has that many bytes, and so has its place in pinned memory, which lives as long as the graph.
                unsafe { stream.copy(to, from, data.len(), hipMemcpyHostToDevice) }?;
            }
            Some(Pass::Reading { .. }) => {}
        }
        Ok(true)
    }

    /// The same of numbers for the host.
    pub(super) fn pass_download(&self, stream: &Stream, to: &mut [u8], from: *const c_void) -> Result<bool> {
        match &mut *locked(&self.inner.graphs.pass) {
            None => return Ok(false),
            Some(Pass::Rehearsal { fingerprint, to_host, .. }) => {
                ("download", from as usize, to.len()).hash(fingerprint);
                to_host.push(to.len());
            }
            Some(Pass::Capture { pinned }) => {
                let place = pinned.next_place(1).context("more numbers for the host than in the rehearsal")?;
                // SAFETY: as above.
                unsafe { stream.copy(place, from, to.len(), hipMemcpyDeviceToHost) }?;
            }
            Some(Pass::Reading { results }) => {
                let result = if results.is_empty() {
                    bail!("fewer numbers for the host than in the rehearsal")
                } else {
                    results.remove(0)
                };
                to.copy_from_slice(&result);
            }
        }
        Ok(true)
    }

    /// Runs `work`, as a graph where it was run in the same way before. It may be called several times, of which one has an effect, and must
    /// depend on nothing that it changes on the host.
    ///
    /// # Errors
    /// Of `work`, or of the device.
    pub fn repeat<T>(&self, mut work: impl FnMut() -> Result<T>) -> Result<T> {
        let Some(device) = self.device().filter(|_| !locked(&self.inner.graphs.state).off) else { return work() };
        let rehearsal = Pass::Rehearsal { fingerprint: DefaultHasher::new(), from_host: Vec::new(), to_host: Vec::new() };
        let (outcome, pass) = self.under(rehearsal, &mut work);
        let (fingerprint, from_host, to_host) = match (outcome, pass) {
            (Ok(_), Some(Pass::Rehearsal { fingerprint, from_host, to_host })) => {
                (Fingerprint(fingerprint.finish()), from_host, to_host)
            }
            (Err(e), _) if !e.is::<Keeps>() => return Err(e),
            _ => return work(),
        };
        let mut state = locked(&self.inner.graphs.state);
        let known = state.graphs.iter().position(|(of, _)| *of == fingerprint);
        if known.is_none() && !state.remember(fingerprint) {
            drop(state);
            return work();
        }
        let at = match known {
            Some(at) => at,
            None => match self.capture(&device.stream, &from_host, &to_host, &mut work) {
                Ok(graph) => state.keep(fingerprint, graph),
                Err(e) => {
                    state.off = true;
                    drop(state);
                    tell!("note: launches go to the GPU one by one, as they could not be captured as a graph: {e:#}");
                    return work();
                }
            },
        };
        let results = state.graphs[at].1.run(&device.stream, &from_host)?;
        state.in_vain = 0;
        drop(state);
        self.under(Pass::Reading { results }, &mut work).0
    }

    /// Runs `work` in a pass; and the pass, as it is then.
    fn under<T>(&self, pass: Pass, work: &mut impl FnMut() -> Result<T>) -> (Result<T>, Option<Pass>) {
        *locked(&self.inner.graphs.pass) = Some(pass);
        let outcome = work();
        (outcome, locked(&self.inner.graphs.pass).take())
    }

    fn capture<T>(
        &self,
        stream: &Stream,
        from_host: &[Vec<u8>],
        to_host: &[usize],
        work: &mut impl FnMut() -> Result<T>,
    ) -> Result<Repeated> {
        let mut end = 0;
        let mut place = |bytes: usize| {
            let begin = end;
            end += bytes.next_multiple_of(LINE);
            begin
        };
        let inputs: Vec<usize> = from_host.iter().map(|data| place(data.len())).collect();
        let outputs: Vec<usize> = to_host.iter().map(|bytes| place(*bytes)).collect();
        let memory = HostBuffer::new(stream.hip(), end)?;
        let pinned = Pinned { memory, inputs: inputs.clone(), outputs: outputs.clone(), next: [0, 0] };
        let mut pass = None;
        let graph = Graph::capture(stream, hipStreamCaptureModeThreadLocal, || {
            let (outcome, after) = self.under(Pass::Capture { pinned }, work);
            pass = after;
            outcome.map(drop)
        })?;
        let Some(Pass::Capture { pinned }) = pass else { bail!("the pass that captured is gone") };
        let exec = graph.instantiate()?;
        Ok(Repeated { exec, memory: pinned.memory, inputs, outputs: outputs.into_iter().zip(to_host.iter().copied()).collect() })
    }
}

impl State {
    /// Where the graph is kept.
    fn keep(&mut self, fingerprint: Fingerprint, graph: Repeated) -> usize {
        if self.graphs.len() == MOST_GRAPHS {
            self.graphs.remove(0);
        }
        self.graphs.push((fingerprint, graph));
        self.graphs.len() - 1
    }

    /// Whether this was seen before; if not, it is remembered.
    fn remember(&mut self, fingerprint: Fingerprint) -> bool {
        if let Some(at) = self.seen.iter().position(|seen| *seen == fingerprint) {
            self.seen.remove(at);
            return true;
        }
        if self.seen.len() == MOST_SEEN {
            self.seen.remove(0);
        }
        self.seen.push(fingerprint);
        self.in_vain += 1;
        if self.in_vain == PATIENCE {
            self.off = true;
            tell!(
                "note: launches go to the GPU one by one: {PATIENCE} micro-batches differed in what they launch (as those with documents, \
                 padding or few labels do), so there is no graph to repeat"
            );
        }
        false
    }
}

impl Pinned {
    /// Where the next numbers from (0) or for (1) the host lie.
    fn next_place(&mut self, which: usize) -> Option<*mut c_void> {
        let places = if which == 0 { &self.inputs } else { &self.outputs };
        let at = *places.get(self.next[which])?;
        self.next[which] += 1;
        Some(self.memory.pointer().wrapping_byte_add(at))
    }
}

impl Repeated {
    /// Launches it with these numbers of the host, and waits for its results.
    fn run(&mut self, stream: &Stream, from_host: &[Vec<u8>]) -> Result<Vec<Vec<u8>>> {
        let memory = self.memory.as_mut_slice();
        for (at, data) in self.inputs.iter().zip(from_host) {
            memory[*at..at + data.len()].copy_from_slice(data);
        }
        // SAFETY: the rehearsal that has just been made asked for the same calls on the same addresses, which belong to live buffers or to
        // blocks of the arena, which only work that is queued later in this stream uses. Nobody touches the pinned memory until the
        // stream was waited for.
        unsafe { self.exec.launch(stream) }.context("launching a micro-batch as a graph")?;
        stream.synchronize().context("waiting for a micro-batch that was launched as a graph")?;
        let memory = self.memory.as_slice();
        Ok(self.outputs.iter().map(|(at, bytes)| memory[*at..at + bytes].to_vec()).collect())
    }
}
