//! Ranks as threads of one process. A message is the sender's own memory, read by the receiver where it lies: nothing is copied
//! on the way, and a sender waits until it has been read.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};

use super::transport::{Channel, Incoming, Op, Outgoing, PeerFailed, Transport};

/// The meeting place of all ranks of a process.
pub struct Hub {
    world: usize,
    timeout: Duration,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// By sender, receiver and channel.
    posts: HashMap<(usize, usize, Channel), VecDeque<Post>>,
    /// Progress of messages that are posted or being read, by number.
    tickets: HashMap<u64, Ticket>,
    next_ticket: u64,
    ranks: Vec<Rank>,
    failure: Option<String>,
}

#[derive(Clone, Copy, PartialEq)]
enum Ticket {
    Posted,
    Reading,
}

/// What a rank is doing, for messages.
#[derive(Clone, Default)]
struct Rank {
    /// The operation it is in, by channel, or was in last.
    last: HashMap<Channel, (Op, bool)>,
    /// By group: the operation that it has queued last on its device.
    queued: HashMap<&'static str, Op>,
    /// Whom it waits for, by channel.
    waits_for: HashMap<Channel, Vec<usize>>,
    left: bool,
}

struct Post {
    op: Op,
    ticket: u64,
    data: Memory,
}

/// The memory of a message. Valid while its ticket exists: the sender waits for that.
#[derive(Clone, Copy)]
struct Memory(*const u8, usize);

// SAFETY: read by one receiver while the sender, which owns it, waits.
unsafe impl Send for Memory {}

/// One rank's end.
pub struct ThreadRank {
    hub: Arc<Hub>,
    rank: usize,
}

impl Hub {
    /// Ends for `world` ranks. A rank that waits longer than `timeout` for another ends the job.
    pub fn ranks(world: usize, timeout: Duration) -> Vec<ThreadRank> {
        let state = State { ranks: vec![Rank::default(); world], ..State::default() };
        let hub = Arc::new(Self { world, timeout, state: Mutex::new(state), changed: Condvar::new() });
        (0..world).map(|rank| ThreadRank { hub: hub.clone(), rank }).collect()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics while holding the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// The first failure is the one that all ranks tell of.
    fn fail(&mut self, text: String) -> String {
        self.failure.get_or_insert(text).clone()
    }

    /// Who is missing when a rank waits for `late`: those it waits for, or those that these wait for in turn, and so on, who wait for
    /// nobody. Where all wait for each other: `late`.
    fn missing(&self, late: &[usize], channel: Channel) -> Vec<usize> {
        let (mut seen, mut next) = (vec![false; self.ranks.len()], late.to_vec());
        let mut guilty = Vec::new();
        while let Some(rank) = next.pop() {
            if std::mem::replace(&mut seen[rank], true) {
                continue;
            }
            match self.ranks[rank].waits_for.get(&channel) {
                Some(others) if !others.is_empty() && !self.ranks[rank].left => next.extend(others),
                _ => guilty.push(rank),
            }
        }
        guilty.sort_unstable();
        if guilty.is_empty() { late.to_vec() } else { guilty }
    }

    /// Where a rank is, in words.
    fn whereabouts(&self, rank: usize, channel: Channel) -> String {
        let state = &self.ranks[rank];
        match state.last.get(&channel) {
            _ if state.left => format!("rank {rank} has ended"),
            None => format!("rank {rank} has not begun any operation"),
            Some((op, true)) => format!("rank {rank} is in {op}"),
            Some((op, false)) => format!("rank {rank} was last in {op} and has not come to another since"),
        }
    }
}

/// Gives tickets back when the receiver is done with the memory, also when it panics.
struct Reading<'a> {
    hub: &'a Hub,
    tickets: Vec<u64>,
}

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        let mut state = self.hub.lock();
        for ticket in &self.tickets {
            state.tickets.remove(ticket);
        }
        drop(state);
        self.hub.changed.notify_all();
    }
}

impl ThreadRank {
    /// Waits until `ready` gives something. An error when another rank has failed, or nothing comes in time.
    fn wait<'a, T>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        op: &Op,
        mut ready: impl FnMut(&mut State) -> Option<T>,
        missing: impl Fn(&State) -> Vec<usize>,
    ) -> (MutexGuard<'a, State>, Result<T>) {
        let begun = Instant::now();
        let end = |state: &mut State| drop(state.ranks[self.rank].waits_for.remove(&op.channel));
        loop {
            if let Some(failure) = &state.failure {
                let text = failure.clone();
                end(&mut state);
                return (state, Err(PeerFailed(text).into()));
            }
            if let Some(found) = ready(&mut state) {
                end(&mut state);
                return (state, Ok(found));
            }
            let (late, waited) = (missing(&state), begun.elapsed());
            state.ranks[self.rank].waits_for.insert(op.channel, late.clone());
            let gone = late.iter().any(|r| state.ranks[*r].left);
            if gone || waited >= self.hub.timeout {
                let why = match gone {
                    true => "and some of these have ended".into(),
                    false => format!("for {:.0} s", waited.as_secs_f64()),
                };
                let guilty = if gone { late } else { state.missing(&late, op.channel) };
                let places: Vec<String> = guilty.iter().map(|r| state.whereabouts(*r, op.channel)).collect();
                let names: Vec<String> = guilty.iter().map(|r| r.to_string()).collect();
                let text = format!("rank {} waits in {op} for rank {} {why}: {}", self.rank, names.join(", "), places.join("; "));
                end(&mut state);
                let text = state.fail(text);
                self.hub.changed.notify_all();
                return (state, Err(anyhow!(text)));
            }
            let left = self.hub.timeout - waited;
            state = self.hub.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Takes the messages of `incoming` off their queues, once all are there.
    fn take(&self, op: &Op, incoming: &[Incoming]) -> Result<(Vec<Memory>, Reading<'_>)> {
        let queue = |m: &Incoming| (m.from, self.rank, op.channel);
        // How many messages each sender must have posted.
        let mut wanted: HashMap<usize, usize> = HashMap::new();
        incoming.iter().for_each(|m| *wanted.entry(m.from).or_default() += 1);
        let missing = |state: &State| {
            let mut late: Vec<usize> = wanted
                .iter()
                .filter(|(from, n)| state.posts.get(&(**from, self.rank, op.channel)).map_or(0, VecDeque::len) < **n)
                .map(|(from, _)| *from)
                .collect();
            late.sort_unstable();
            late
        };
        let ready = |state: &mut State| missing(state).is_empty().then_some(());
        let (mut state, come) = self.wait(self.hub.lock(), op, ready, missing);
        come?;
        let (mut memory, mut tickets) = (Vec::with_capacity(incoming.len()), Vec::with_capacity(incoming.len()));
        for m in incoming {
            let post = state.posts.get_mut(&queue(m)).and_then(VecDeque::pop_front).expect("it was counted");
            if post.op.key() != op.key() || post.data.1 != m.bytes {
                let text = format!(
                    "ranks disagree: rank {} is in {op} and expects {} bytes from rank {}, which is in {} and sent {} bytes",
                    self.rank, m.bytes, m.from, post.op, post.data.1
                );
                // What was taken off its queue is no longer posted, and its sender need not wait.
                tickets.push(post.ticket);
                for ticket in &tickets {
                    state.tickets.remove(ticket);
                }
                let text = state.fail(text);
                self.hub.changed.notify_all();
                return Err(anyhow!(text));
            }
            state.tickets.insert(post.ticket, Ticket::Reading);
            memory.push(post.data);
            tickets.push(post.ticket);
        }
        Ok((memory, Reading { hub: &self.hub, tickets }))
    }

    /// Waits until nobody needs the memory of these messages any more.
    fn settle(&self, op: &Op, outgoing: &[Outgoing<'_>], tickets: &[u64]) -> Result<()> {
        let open = |state: &State| -> Vec<usize> {
            let open = tickets.iter().zip(outgoing).filter(|(t, _)| state.tickets.contains_key(t));
            open.map(|(_, m)| m.to).collect()
        };
        let (mut state, done) = self.wait(self.hub.lock(), op, |state| open(state).is_empty().then_some(()), open);
        if done.is_err() {
            // Nobody is to read the memory after this returns: what is posted is withdrawn, what is being read is waited for.
            for m in outgoing {
                if let Some(queue) = state.posts.get_mut(&(self.rank, m.to, op.channel)) {
                    queue.retain(|post| !tickets.contains(&post.ticket));
                }
            }
            for t in tickets {
                if state.tickets.get(t) == Some(&Ticket::Posted) {
                    state.tickets.remove(t);
                }
            }
            while tickets.iter().any(|t| state.tickets.contains_key(t)) {
                state = self.hub.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
        done
    }
}

impl Transport for ThreadRank {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.hub.world
    }

    fn exchange(
        &self,
        op: &Op,
        outgoing: &[Outgoing<'_>],
        incoming: &[Incoming],
        consume: &mut dyn FnMut(&[&[u8]]),
    ) -> Result<()> {
        let mut tickets = Vec::with_capacity(outgoing.len());
        {
            let mut state = self.hub.lock();
            state.ranks[self.rank].last.insert(op.channel, (*op, true));
            for m in outgoing {
                let ticket = state.next_ticket;
                state.next_ticket += 1;
                state.tickets.insert(ticket, Ticket::Posted);
                let data = Memory(m.data.as_ptr(), m.data.len());
                state.posts.entry((self.rank, m.to, op.channel)).or_default().push_back(Post { op: *op, ticket, data });
                tickets.push(ticket);
            }
        }
        self.hub.changed.notify_all();
        let received = self.take(op, incoming).map(|(memory, reading)| {
            // SAFETY: the senders wait until `reading` is dropped.
            let data: Vec<&[u8]> = memory.iter().map(|m| unsafe { std::slice::from_raw_parts(m.0, m.1) }).collect();
            consume(&data);
            drop(reading);
        });
        let settled = self.settle(op, outgoing, &tickets);
        if let Some((_, inside)) = self.hub.lock().ranks[self.rank].last.get_mut(&op.channel) {
            *inside = false;
        }
        received.and(settled)
    }

    fn fail(&self, reason: &str) {
        self.hub.lock().fail(format!("rank {} failed: {reason}", self.rank));
        self.hub.changed.notify_all();
    }

    fn leave(&self) {
        self.hub.lock().ranks[self.rank].left = true;
        self.hub.changed.notify_all();
    }

    fn failure(&self) -> Option<String> {
        self.hub.lock().failure.clone()
    }

    fn queued(&self, op: &Op) {
        self.hub.lock().ranks[self.rank].queued.insert(op.group, *op);
    }

    fn missing_from(&self, op: &Op, members: &[usize]) -> Option<Vec<String>> {
        let state = self.hub.lock();
        let is_late = |rank: &usize| state.ranks[*rank].queued.get(op.group).is_none_or(|last| last.sequence < op.sequence);
        let where_is = |rank: usize| match state.ranks[rank].queued.get(op.group) {
            _ if state.ranks[rank].left => format!("rank {rank} has ended"),
            Some(last) => format!("rank {rank} was last in {last}"),
            None => format!("rank {rank} has not begun any operation of that group"),
        };
        Some(members.iter().copied().filter(is_late).map(where_is).collect())
    }
}

impl Drop for ThreadRank {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.fail("it panicked");
        }
        self.leave();
    }
}
