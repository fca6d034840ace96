//! One exchange. Each pair of ranks that have something for each other first exchange a head. Data follows only where both heads
//! agree, and into places that wait for it. So nothing is ever on its way to a rank that does not want it, and a rank that gives
//! up knows whose memory is still being read.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};

use super::super::head::{self, ROOM, SHORT, Sizes};
use super::super::transport::{Incoming, Op, Outgoing, PeerFailed};
use super::alarm::Alarm;
use super::raw::{Comm, Requests};

const HEAD: i32 = 1;
const DATA: i32 = 2;

/// A rank has ended, and its last message has not come for this long: it may have overtaken that.
const GONE: Duration = Duration::from_millis(500);

/// A received message begins at a multiple of this in memory: any numbers may be in it.
type Unit = u128;

/// A channel's communicator, and memory that is kept from one exchange to the next.
pub struct Lane {
    comm: Comm,
    data: Vec<Unit>,
    heads_out: Vec<u8>,
    heads_in: Vec<u8>,
    /// By rank: the operation in which it was last heard of, in words. Empty: in none.
    heard: Vec<Vec<u8>>,
}

impl Lane {
    pub fn new(comm: Comm, world: usize) -> Self {
        Self { comm, data: Vec::new(), heads_out: Vec::new(), heads_in: Vec::new(), heard: vec![Vec::new(); world] }
    }

    fn last_of(&self, rank: usize) -> String {
        match &self.heard[rank][..] {
            [] => format!("rank {rank} has not been heard of"),
            text => format!("rank {rank} was last in {} as far as it was heard of", String::from_utf8_lossy(text)),
        }
    }
}

/// A rank to exchange something with.
struct Peer {
    rank: usize,
    /// Places in the lists of messages.
    outgoing: Vec<usize>,
    incoming: Vec<usize>,
    sends: Sizes,
    expects: Sizes,
    has_head: bool,
    /// Receives that are not done.
    open: usize,
}

/// What a request is for; the peer by its place.
#[derive(Clone, Copy)]
enum What {
    HeadOut,
    HeadIn(usize),
    DataIn(usize),
    DataOut,
}

pub struct Trip<'a, 'm> {
    alarm: &'a Arc<Alarm>,
    lane: &'a mut Lane,
    op: &'a Op,
    outgoing: &'a [Outgoing<'m>],
    incoming: &'a [Incoming],
    longest_part: usize,
    peers: Vec<Peer>,
    /// Where each incoming message begins, in units.
    places: Vec<usize>,
    requests: Requests,
    what: Vec<What>,
    /// Sends from the caller's memory that are not done.
    lent: usize,
}

impl<'a, 'm> Trip<'a, 'm> {
    pub fn new(
        alarm: &'a Arc<Alarm>,
        lane: &'a mut Lane,
        op: &'a Op,
        outgoing: &'a [Outgoing<'m>],
        incoming: &'a [Incoming],
        longest_part: usize,
    ) -> Self {
        let mut lists: BTreeMap<usize, (Vec<usize>, Vec<usize>)> = BTreeMap::new();
        outgoing.iter().enumerate().for_each(|(i, m)| lists.entry(m.to).or_default().0.push(i));
        incoming.iter().enumerate().for_each(|(i, m)| lists.entry(m.from).or_default().1.push(i));
        let peer = |(rank, (out, come)): (usize, (Vec<usize>, Vec<usize>))| Peer {
            rank,
            sends: Sizes::of(out.iter().map(|i| outgoing[*i].data.len())),
            expects: Sizes::of(come.iter().map(|i| incoming[*i].bytes)),
            outgoing: out,
            incoming: come,
            has_head: false,
            open: 0,
        };
        let peers: Vec<Peer> = lists.into_iter().map(peer).collect();
        let mut units = 0;
        let place = |m: &Incoming| {
            units += m.bytes.div_ceil(size_of::<Unit>());
            units - m.bytes.div_ceil(size_of::<Unit>())
        };
        let places = incoming.iter().map(place).collect();
        if lane.data.len() < units {
            // The old one goes first.
            lane.data = Vec::new();
            lane.data = vec![0; units];
        }
        if lane.heads_in.len() < peers.len() * ROOM {
            lane.heads_in = vec![0; peers.len() * ROOM];
            lane.heads_out = vec![0; peers.len() * ROOM];
        }
        let (requests, what) = (Requests::default(), Vec::new());
        Self { alarm, lane, op, outgoing, incoming, longest_part, peers, places, requests, what, lent: 0 }
    }

    pub fn run(mut self, timeout: Duration, consume: &mut dyn FnMut(&[&[u8]])) -> Result<()> {
        let come = self.begin().and_then(|()| self.wait(timeout));
        if let Err(e) = come {
            return Err(self.give_up(e));
        }
        let bytes: &[u8] = bytemuck::cast_slice(&self.lane.data);
        let message = |(m, at): (&Incoming, &usize)| &bytes[at * size_of::<Unit>()..][..m.bytes];
        consume(&self.incoming.iter().zip(&self.places).map(message).collect::<Vec<_>>());
        Ok(())
    }

    /// Makes room for what comes, then says that there is.
    fn begin(&mut self) -> Result<()> {
        let (key, text) = (head::key(self.op), self.op.to_string());
        // All access to the lane's memory goes through these until the requests are done.
        let (data, heads_in) = (self.lane.data.as_mut_ptr(), self.lane.heads_in.as_mut_ptr());
        for (p, peer) in self.peers.iter_mut().enumerate() {
            debug_assert_ne!(peer.rank, self.alarm.rank, "a rank sends nothing to itself");
            // SAFETY (here and below): the lane's memory outlives the requests. They are done when `wait` succeeds, and where it
            // does not, `give_up` gives the memory away for good. Each request has a part of its own.
            unsafe {
                self.lane.comm.receive(heads_in.add(p * ROOM), ROOM, peer.rank, HEAD, &mut self.requests)?;
            }
            self.what.push(What::HeadIn(p));
            if peer.expects.bytes <= SHORT as u64 {
                continue;
            }
            for i in &peer.incoming {
                for (start, len) in parts(self.incoming[*i].bytes, self.longest_part) {
                    // SAFETY: as above; the place is inside `data`, which holds all messages.
                    unsafe {
                        let place = data.add(self.places[*i]).cast::<u8>().add(start);
                        self.lane.comm.receive(place, len, peer.rank, DATA, &mut self.requests)?;
                    }
                    self.what.push(What::DataIn(p));
                    peer.open += 1;
                }
            }
        }
        for (room, peer) in self.lane.heads_out.chunks_exact_mut(ROOM).zip(&self.peers) {
            head::write(room, key, peer.sends, peer.expects, &text);
            let mut len = head::len(&text);
            if peer.sends.bytes <= SHORT as u64 {
                for i in &peer.outgoing {
                    let message = self.outgoing[*i].data;
                    room[len..len + message.len()].copy_from_slice(message);
                    len += message.len();
                }
            }
        }
        let heads_out = self.lane.heads_out.as_ptr();
        for (p, peer) in self.peers.iter().enumerate() {
            // What was written: no more than what the numbers, the text and the short messages take.
            let short = if peer.sends.bytes <= SHORT as u64 { peer.sends.bytes as usize } else { 0 };
            let len = head::len(&text) + short;
            // SAFETY: as above.
            unsafe { self.lane.comm.send(heads_out.add(p * ROOM), len, peer.rank, HEAD, &mut self.requests)? };
            self.what.push(What::HeadOut);
        }
        Ok(())
    }

    /// Waits until all is done. An error when another rank has failed, is elsewhere, has ended or does not come in time.
    fn wait(&mut self, timeout: Duration) -> Result<()> {
        let mut moved = Instant::now();
        let mut pause = Pause::new(moved);
        let mut gone: Option<Instant> = None;
        loop {
            let done = self.requests.done()?;
            for (request, bytes) in &done {
                match self.what[*request] {
                    What::HeadOut => {}
                    What::HeadIn(peer) => self.meet(peer, *bytes)?,
                    What::DataIn(peer) => self.peers[peer].open -= 1,
                    What::DataOut => self.lent -= 1,
                }
            }
            if self.requests.open() == 0 {
                return Ok(());
            }
            if !done.is_empty() {
                moved = Instant::now();
                pause = Pause::new(moved);
                continue;
            }
            if let Some(failure) = self.alarm.listen() {
                return Err(failure);
            }
            let has_left = self.peers.iter().any(|p| !p.has_head && self.alarm.has_left(p.rank));
            gone = if has_left { gone.or(Some(Instant::now())) } else { None };
            if gone.is_some_and(|since| since.elapsed() >= GONE) {
                return Err(anyhow!(self.late("and some of these have ended")));
            }
            if moved.elapsed() >= timeout {
                return Err(anyhow!(self.late(&format!("for {:.0} s", moved.elapsed().as_secs_f64()))));
            }
            // Data moves on only while MPI is called.
            let is_moving = self.lent > 0 || self.peers.iter().any(|p| p.has_head && p.open > 0);
            pause.take(if is_moving { Duration::from_micros(50) } else { Duration::from_millis(1) });
        }
    }

    /// A head has come: takes what rides along, and sends the data if both mean the same.
    fn meet(&mut self, at: usize, bytes: usize) -> Result<()> {
        let (rank, op, peer) = (self.alarm.rank, self.op, &mut self.peers[at]);
        // SAFETY: the request is done, and this part of the memory was its alone.
        let message = unsafe { std::slice::from_raw_parts(self.lane.heads_in.as_ptr().add(at * ROOM), bytes) };
        let Some(theirs) = head::read(message) else {
            return Err(anyhow!("rank {rank} is in {op}, and what rank {} sent is not the start of a message", peer.rank));
        };
        let there = String::from_utf8_lossy(theirs.text);
        let (key, other) = (head::key(op), peer.rank);
        if theirs.key != key || theirs.sends != peer.expects {
            return Err(anyhow!(
                "ranks disagree: rank {rank} is in {op} and expects {} from rank {other}, which is in {there} and sent {}",
                peer.expects.words(),
                theirs.sends.words()
            ));
        }
        if theirs.expects != peer.sends {
            return Err(anyhow!(
                "ranks disagree: rank {rank} is in {op} and sends {} to rank {other}, which is in {there} and expects {}",
                peer.sends.words(),
                theirs.expects.words()
            ));
        }
        let heard = &mut self.lane.heard[other];
        heard.clear();
        heard.extend_from_slice(theirs.text);
        peer.has_head = true;
        if peer.expects.bytes <= SHORT as u64 {
            let (data, mut rest) = (self.lane.data.as_mut_ptr(), theirs.short);
            for i in &peer.incoming {
                let Some((message, after)) = rest.split_at_checked(self.incoming[*i].bytes) else {
                    return Err(anyhow!("rank {rank} is in {op}, and a message of rank {other} is cut"));
                };
                rest = after;
                // SAFETY: the place is inside `data`, and no request was made for it.
                unsafe {
                    let place = data.add(self.places[*i]).cast::<u8>();
                    place.copy_from_nonoverlapping(message.as_ptr(), message.len());
                }
            }
        }
        if peer.sends.bytes > SHORT as u64 {
            for i in &peer.outgoing {
                let data = self.outgoing[*i].data;
                for (start, len) in parts(data.len(), self.longest_part) {
                    // SAFETY: the caller's memory stays until `run` returns, and that waits for this.
                    unsafe { self.lane.comm.send(data[start..].as_ptr(), len, other, DATA, &mut self.requests)? };
                    self.what.push(What::DataOut);
                    self.lent += 1;
                }
            }
        }
        Ok(())
    }

    /// Who is waited for, and where each of them is.
    fn late(&self, why: &str) -> String {
        let late = || self.peers.iter().filter(|p| !p.has_head || p.open > 0);
        let places: Vec<String> = late()
            .map(|p| match (p.has_head, self.alarm.has_left(p.rank)) {
                (true, _) => format!("rank {} is there, and its data does not come", p.rank),
                (false, true) => format!("rank {} has ended", p.rank),
                (false, false) => self.lane.last_of(p.rank),
            })
            .collect();
        let names: Vec<String> = late().map(|p| p.rank.to_string()).collect();
        let (rank, op) = (self.alarm.rank, self.op);
        if names.is_empty() {
            return format!("rank {rank} waits in {op} {why}: what it sends is not received");
        }
        format!("rank {rank} waits in {op} for rank {} {why}: {}", names.join(", "), places.join("; "))
    }

    /// Tells all ranks of an error that is not theirs, and lets go of the caller's memory.
    fn give_up(mut self, error: anyhow::Error) -> anyhow::Error {
        let error = match self.alarm.failure() {
            Some(failure) => failure,
            None => {
                let text = format!("{error:#}");
                let first = self.alarm.fail(text.clone());
                if first == text { anyhow!(text) } else { PeerFailed(first).into() }
            }
        };
        // Data is on its way only to ranks that have made room for it. Should one of them be gone, the alarm ends this process.
        while self.lent > 0 {
            match self.requests.done() {
                Ok(done) => {
                    self.lent -= done.iter().filter(|(request, _)| matches!(self.what[*request], What::DataOut)).count();
                }
                // What has become of the memory is not known any more.
                Err(_) => self.alarm.wait_for_the_end(),
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        // Other requests are open for good: MPI may still write there.
        let lane = &mut *self.lane;
        for heads in [&mut lane.heads_in, &mut lane.heads_out] {
            std::mem::take(heads).leak();
        }
        std::mem::take(&mut lane.data).leak();
        error
    }
}

/// Start and length of each part of a message.
fn parts(len: usize, longest: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..len).step_by(longest).map(move |start| (start, longest.min(len - start)))
}

/// Longer and longer pauses, so that waiting leaves the processor to whoever is waited for.
struct Pause {
    since: Instant,
    next: Duration,
}

impl Pause {
    /// So long the processor is only offered to others: most answers come within, and sleeping takes 50 microseconds at least.
    const OFFER: Duration = Duration::from_micros(200);

    fn new(since: Instant) -> Self {
        Self { since, next: Duration::from_micros(10) }
    }

    fn take(&mut self, longest: Duration) {
        if self.since.elapsed() < Self::OFFER {
            std::thread::yield_now();
        } else {
            std::thread::sleep(self.next.min(longest));
            self.next = (self.next * 2).min(longest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_a_message() {
        let of = |len, longest| parts(len, longest).collect::<Vec<_>>();
        assert_eq!(of(0, 4), []);
        assert_eq!(of(4, 4), [(0, 4)]);
        assert_eq!(of(9, 4), [(0, 4), (4, 4), (8, 1)]);
    }
}
