//! `Transport` over RCCL, for ranks that are processes: messages of the host by way of a little device memory.
//!
//! As under MPI, each pair of ranks that have something for each other first exchange heads, of one size, which say what each is about
//! to do; short messages ride along. Data follows only where both agree.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow};
use hip_sys::hip::ffi::{hipMemcpyDeviceToHost, hipMemcpyHostToDevice};
use hip_sys::{DeviceBuffer, Hip as Library, HostBuffer, Stream};
use rccl_sys::{Communicator, DataType, Error, Rccl, State, UniqueId};

use super::super::head::{self, ROOM, SHORT, Sizes};
use super::super::launch::Launch;
use super::super::transport::{Channel, Incoming, Op, Outgoing, Transport};
use super::meet::Meeting;
use super::watch::end_in_order;
use crate::print::aloud;

/// A message begins at a multiple of this in memory: any numbers may be in it.
type Unit = u128;
const UNIT: usize = size_of::<Unit>();

/// One rank's end.
pub struct RcclRank {
    meeting: Arc<Meeting>,
    library: &'static Library,
    device: i32,
    timeout: Duration,
    /// By channel.
    lanes: Vec<Mutex<Lane>>,
}

/// A channel's communicator, and memory that is kept from one exchange to the next.
struct Lane {
    /// First: it ends before its stream. None: it was aborted.
    communicator: Option<Communicator>,
    stream: Stream,
    /// As much of both.
    room: Option<(DeviceBuffer, HostBuffer)>,
    /// What came, each message at a multiple of a unit.
    data: Vec<Unit>,
}

/// A rank to exchange something with.
struct Peer {
    rank: usize,
    /// Places in the lists of messages.
    outgoing: Vec<usize>,
    incoming: Vec<usize>,
    sends: Sizes,
    expects: Sizes,
}

/// Bytes in the room that go to or come from a rank.
#[derive(Clone, Copy)]
struct Part {
    rank: usize,
    at: usize,
    bytes: usize,
}

impl RcclRank {
    /// Meets the other processes at `address` and joins their devices, of which `device` is this one's.
    ///
    /// # Errors
    /// A sentence that names who did not come within `timeout`.
    pub fn start(launch: &Launch, library: &'static Library, device: i32, address: &str, timeout: Duration) -> Result<Self> {
        let rccl = Rccl::open().context("opening RCCL, by which GPUs of several processes talk")?;
        library.set_device(device)?;
        let ids = || Ok(Channel::ALL.iter().map(|_| Ok(rccl.unique_id()?.to_bytes())).collect::<Result<Vec<_>>>()?.concat());
        let (meeting, ids) = Meeting::open(launch, address, timeout, ids).context("meeting the other ranks")?;
        let mut lanes = Vec::new();
        for id in ids.chunks_exact(UniqueId::BYTES) {
            let id = UniqueId::from_bytes(id.try_into().context("an identity of a communicator")?);
            let stream = Stream::new(library)?;
            let communicator = Communicator::start(rccl, id, launch.rank as i32, launch.world as i32)?;
            lanes.push(Mutex::new(Lane { communicator: Some(communicator), stream, room: None, data: Vec::new() }));
        }
        let rank = Self { meeting, library, device, timeout, lanes };
        for lane in &rank.lanes {
            let mut lane = lane.lock().unwrap_or_else(PoisonError::into_inner);
            let all: Vec<usize> = (0..launch.world).filter(|r| *r != launch.rank).collect();
            rank.until_ready(&mut lane, "the joining of devices", &all)?;
        }
        Ok(rank)
    }

    /// Calls `ask` until it says yes. Ends the run when it takes too long, or when something has failed meanwhile.
    fn until(&self, lane: &mut Lane, what: &str, others: &[usize], ask: impl Fn(&Lane) -> Result<bool, Error>) -> Result<()> {
        let begun = Instant::now();
        let mut pause = Duration::from_micros(10);
        loop {
            let failure = match (self.meeting.failure(), ask(lane)) {
                (Some(_), _) => None,
                (None, Ok(true)) => return Ok(()),
                (None, Ok(false)) if begun.elapsed() < self.timeout => {
                    std::thread::sleep(pause);
                    pause = (2 * pause).min(Duration::from_millis(2));
                    continue;
                }
                (None, Ok(false)) => {
                    let names: Vec<String> = others.iter().map(usize::to_string).collect();
                    let places = self.meeting.whereabouts(others).join("; ");
                    let (rank, waited) = (self.rank(), begun.elapsed().as_secs_f64());
                    Some(format!("rank {rank} waits in {what} for {waited:.0} s for ranks {}: {places}", names.join(", ")))
                }
                (None, Err(e)) => {
                    // Another rank's end may be what is behind it, and is told in a moment.
                    std::thread::sleep(Duration::from_millis(100));
                    Some(format!("rank {}: {what}: {e}", self.rank()))
                }
            };
            if let Some(text) = failure {
                self.meeting.fail(text);
            }
            // Dropped, it is aborted, and what is queued ends.
            drop(lane.communicator.take());
            let _ = lane.stream.synchronize();
            self.meeting.check()?;
        }
    }

    fn until_ready(&self, lane: &mut Lane, what: &str, others: &[usize]) -> Result<()> {
        self.until(lane, what, others, |lane| match &lane.communicator {
            Some(c) => Ok(c.state()? == State::Ready),
            None => Ok(true),
        })
    }

    /// Sends and receives parts of the room, and waits until all is there.
    fn travel(&self, lane: &mut Lane, op: &Op, others: &[usize], out: &[Part], back: &[Part]) -> Result<()> {
        let Lane { communicator: Some(communicator), stream, room: Some((device, host)), .. } = &*lane else {
            self.meeting.check()?;
            return Err(anyhow!("{op}: the group has ended"));
        };
        let on_device = |p: &Part| device.pointer().cast::<u8>().wrapping_add(p.at).cast::<c_void>();
        let on_host = |p: &Part| host.pointer().cast::<u8>().wrapping_add(p.at).cast::<c_void>();
        for p in out {
            // SAFETY: parts of the room, which nobody touches before the stream is waited for.
            unsafe { stream.copy(on_device(p), on_host(p), p.bytes, hipMemcpyHostToDevice) }?;
        }
        let queued = communicator.rccl().group(|| -> Result<(), Error> {
            for p in out {
                // SAFETY: as above.
                unsafe { communicator.send(on_device(p), p.bytes, DataType::U8, p.rank as i32, stream) }?;
            }
            for p in back {
                // SAFETY: as above.
                unsafe { communicator.receive(on_device(p), p.bytes, DataType::U8, p.rank as i32, stream) }?;
            }
            Ok(())
        });
        queued.with_context(|| format!("queuing {op}"))?;
        let what = op.to_string();
        self.until_ready(lane, &what, others)?;
        {
            let Lane { stream, room: Some((device, host)), .. } = &*lane else { return Err(anyhow!("{op}: no room")) };
            for p in back {
                let from = device.pointer().cast::<u8>().wrapping_add(p.at).cast::<c_void>();
                let to = host.pointer().cast::<u8>().wrapping_add(p.at).cast::<c_void>();
                // SAFETY: as above.
                unsafe { stream.copy(to, from, p.bytes, hipMemcpyDeviceToHost) }?;
            }
        }
        self.until(lane, &what, others, |lane| {
            // What has failed is done, too.
            let sound = lane.communicator.as_ref().map_or(Ok(State::Ready), Communicator::state);
            let done = lane.stream.is_done();
            sound.and(done)
        })?;
        self.until_ready(lane, &what, others)
    }

    /// Makes room for so many bytes. Nothing is on its way in what was there before.
    fn make_room(&self, lane: &mut Lane, bytes: usize) -> Result<()> {
        if lane.room.as_ref().is_none_or(|(device, _)| device.bytes() < bytes) {
            // Any thread may be the first that needs it.
            self.library.set_device(self.device)?;
            lane.room = None;
            let bytes = bytes.next_power_of_two().max(1 << 16);
            lane.room = Some((DeviceBuffer::new(self.library, bytes)?, HostBuffer::new(self.library, bytes)?));
        }
        Ok(())
    }

    fn disagreement(&self, op: &Op, peer: &Peer, theirs: &head::Head<'_>) -> anyhow::Error {
        let text = format!(
            "ranks disagree: rank {} is in {op}, sends {} to rank {} and expects {} from it, which is in {}, sends {} and expects {}",
            self.rank(),
            peer.sends.words(),
            peer.rank,
            peer.expects.words(),
            String::from_utf8_lossy(theirs.text),
            theirs.sends.words(),
            theirs.expects.words()
        );
        self.meeting.fail(text.clone());
        anyhow!(text)
    }
}

/// Who there is something for, or from.
fn peers(outgoing: &[Outgoing<'_>], incoming: &[Incoming]) -> Vec<Peer> {
    let mut by_rank: BTreeMap<usize, (Vec<usize>, Vec<usize>)> = BTreeMap::new();
    outgoing.iter().enumerate().for_each(|(i, m)| by_rank.entry(m.to).or_default().0.push(i));
    incoming.iter().enumerate().for_each(|(i, m)| by_rank.entry(m.from).or_default().1.push(i));
    let peer = |(rank, (out, back)): (usize, (Vec<usize>, Vec<usize>))| {
        let sends = Sizes::of(out.iter().map(|i| outgoing[*i].data.len()));
        let expects = Sizes::of(back.iter().map(|i| incoming[*i].bytes));
        Peer { rank, outgoing: out, incoming: back, sends, expects }
    };
    by_rank.into_iter().map(peer).collect()
}

impl Transport for RcclRank {
    fn rank(&self) -> usize {
        self.meeting.rank
    }

    fn world(&self) -> usize {
        self.meeting.world
    }

    fn exchange(
        &self,
        op: &Op,
        outgoing: &[Outgoing<'_>],
        incoming: &[Incoming],
        consume: &mut dyn FnMut(&[&[u8]]),
    ) -> Result<()> {
        self.meeting.check()?;
        let peers = peers(outgoing, incoming);
        if peers.is_empty() {
            consume(&[]);
            return Ok(());
        }
        let at = Channel::ALL.iter().position(|c| *c == op.channel).expect("all channels stand there");
        let mut lane = self.lanes[at].lock().unwrap_or_else(PoisonError::into_inner);
        let lane = &mut *lane;
        let text = op.to_string();
        self.meeting.at(format!("is in {text}"));
        let others: Vec<usize> = peers.iter().map(|p| p.rank).collect();

        // Heads: those that go out first, then those that come.
        let n = peers.len();
        self.make_room(lane, 2 * n * ROOM)?;
        let host = lane.room.as_mut().map(|(_, host)| host.as_mut_slice()).context("room for heads")?;
        let key = head::key(op);
        for (peer, room) in peers.iter().zip(host.chunks_exact_mut(ROOM)) {
            head::write(room, key, peer.sends, peer.expects, &text);
            let mut at = head::len(&text);
            if peer.sends.bytes as usize <= SHORT {
                for m in peer.outgoing.iter().map(|i| outgoing[*i].data) {
                    room[at..at + m.len()].copy_from_slice(m);
                    at += m.len();
                }
            }
        }
        let heads = |from: usize| -> Vec<Part> {
            peers.iter().enumerate().map(|(i, p)| Part { rank: p.rank, at: (from + i) * ROOM, bytes: ROOM }).collect()
        };
        self.travel(lane, op, &others, &heads(0), &heads(n))?;

        // Where each message that comes is to lie.
        let mut starts = Vec::with_capacity(incoming.len());
        let mut units = 0;
        for m in incoming {
            starts.push(units * UNIT);
            units += m.bytes.div_ceil(UNIT);
        }
        lane.data.resize(lane.data.len().max(units), 0);
        let Lane { room: Some((_, host)), data, .. } = &mut *lane else { return Err(anyhow!("{op}: no room")) };
        let data: &mut [u8] = bytemuck::cast_slice_mut(data);
        let take = |data: &mut [u8], peer: &Peer, mut from: &[u8]| {
            for i in &peer.incoming {
                let (message, rest) = from.split_at(incoming[*i].bytes);
                data[starts[*i]..starts[*i] + message.len()].copy_from_slice(message);
                from = rest;
            }
        };
        for (i, peer) in peers.iter().enumerate() {
            let theirs = head::read(&host.as_slice()[(n + i) * ROOM..(n + i + 1) * ROOM]).context("a rank sent no head")?;
            if theirs.key != key || theirs.sends != peer.expects || theirs.expects != peer.sends {
                return Err(self.disagreement(op, peer, &theirs));
            }
            if peer.expects.bytes as usize <= SHORT {
                take(data, peer, theirs.short);
            }
        }

        // Longer messages, one behind the other.
        let mut end = 0;
        let mut part = |rank: usize, bytes: u64| {
            let at = end;
            end += (bytes as usize).next_multiple_of(UNIT);
            Part { rank, at, bytes: bytes as usize }
        };
        let is_long = |bytes: u64| bytes as usize > SHORT;
        let out: Vec<Part> = peers.iter().filter(|p| is_long(p.sends.bytes)).map(|p| part(p.rank, p.sends.bytes)).collect();
        let back: Vec<Part> = peers.iter().filter(|p| is_long(p.expects.bytes)).map(|p| part(p.rank, p.expects.bytes)).collect();
        if !out.is_empty() || !back.is_empty() {
            self.make_room(lane, end)?;
            let host = lane.room.as_mut().map(|(_, host)| host.as_mut_slice()).context("room for messages")?;
            for (p, part) in peers.iter().filter(|p| is_long(p.sends.bytes)).zip(&out) {
                let mut at = part.at;
                for m in p.outgoing.iter().map(|i| outgoing[*i].data) {
                    host[at..at + m.len()].copy_from_slice(m);
                    at += m.len();
                }
            }
            self.travel(lane, op, &others, &out, &back)?;
            let Lane { room: Some((_, host)), data, .. } = &mut *lane else { return Err(anyhow!("{op}: no room")) };
            let data: &mut [u8] = bytemuck::cast_slice_mut(data);
            for (p, part) in peers.iter().filter(|p| is_long(p.expects.bytes)).zip(&back) {
                take(data, p, &host.as_slice()[part.at..part.at + part.bytes]);
            }
        }
        let data: &[u8] = bytemuck::cast_slice(&lane.data);
        let come: Vec<&[u8]> = incoming.iter().zip(&starts).map(|(m, start)| &data[*start..*start + m.bytes]).collect();
        consume(&come);
        self.meeting.at(format!("was last in {text}"));
        Ok(())
    }

    fn fail(&self, reason: &str) {
        let text = format!("rank {} failed: {reason}", self.rank());
        let is_first = self.meeting.failure().is_none();
        self.meeting.fail(text.clone());
        if is_first && self.rank() > 0 {
            // Otherwise only the first rank speaks.
            aloud(&format!("error: {text}"));
        }
    }

    fn leave(&self) {
        self.meeting.leave();
    }

    fn failure(&self) -> Option<String> {
        self.meeting.failure()
    }

    fn queued(&self, op: &Op) {
        self.meeting.at(format!("has queued {op} on its device"));
    }

    fn missing_from(&self, _: &Op, members: &[usize]) -> Option<Vec<String>> {
        Some(self.meeting.whereabouts(members))
    }
}

impl Drop for RcclRank {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.fail("it panicked");
        }
        self.leave();
        if self.meeting.failure().is_none() {
            for lane in &mut self.lanes {
                let lane = lane.get_mut().unwrap_or_else(PoisonError::into_inner);
                lane.communicator.take().into_iter().for_each(|communicator| end_in_order(communicator, self.timeout));
            }
        }
    }
}
