//! How ranks that are processes find each other, over TCP: all connect to the first one, which hands out what RCCL needs to know. The
//! connections stay, and say what RCCL does not: that a rank has failed, and why, that one has ended, and where one is.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream, ToSocketAddrs};
use std::num::NonZeroU16;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail, ensure};

use super::super::launch::{Launch, Launcher};
use super::super::transport::PeerFailed;
use crate::error::bad_input;
use crate::print::aloud;

const MAGIC: &[u8; 8] = b"zaya-1\0\0";
/// Longer messages are no messages.
const LONGEST: usize = 1 << 16;
/// How long somebody who connects may take to say who it is.
const HELLO_TIME: Duration = Duration::from_secs(5);
const TICK: Duration = Duration::from_millis(20);
/// Time that ranks have to say where they are, and time between a failure and the end of a process that does not end by itself.
const ANSWER_TIME: Duration = Duration::from_millis(500);
const GRACE: Duration = Duration::from_secs(5);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Hello = 1,
    /// What all ranks need.
    Gift,
    Failed,
    Left,
    /// Where is everybody? Says who asks.
    Ask,
    /// Who asked, and an answer.
    Here,
}

const KINDS: [Kind; 6] = [Kind::Hello, Kind::Gift, Kind::Failed, Kind::Left, Kind::Ask, Kind::Here];

struct Failure {
    text: String,
    is_own: bool,
}

#[derive(Default)]
struct State {
    /// By rank, those that this one talks to: all of the first rank, the first of the others.
    writers: Vec<Option<TcpStream>>,
    failure: Option<Failure>,
    left: Vec<bool>,
    /// Where this rank is, in words.
    place: String,
    /// What others have answered, by rank.
    answers: Vec<Option<String>>,
}

/// One rank's connections.
pub struct Meeting {
    pub rank: usize,
    pub world: usize,
    state: Mutex<State>,
    changed: Condvar,
}

/// Where the ranks of a job meet, from the environment: host and port of the first rank.
///
/// # Errors
/// Where nothing tells it.
pub fn address(variable: impl Fn(&str) -> Option<String>, launch: &Launch) -> Result<String> {
    let set = |name: &str| variable(name).map(|v| v.trim().to_string()).filter(|v| !v.is_empty());
    let one_node = launch.local_world == Some(launch.world);
    let host = set("ZAYA_MASTER_ADDR").or_else(|| set("MASTER_ADDR")).or_else(|| one_node.then(|| "127.0.0.1".to_string()));
    let port = match set("ZAYA_MASTER_PORT") {
        Some(port) => Some(number("ZAYA_MASTER_PORT", &port)?),
        None => match set("MASTER_PORT") {
            // There torchrun itself listens.
            Some(port) if launch.by == Launcher::Torchrun => {
                Some(number("MASTER_PORT", &port)?.checked_add(1).ok_or_else(|| {
                    bad_input(
                        "MASTER_PORT=65535: torchrun listens there, and the ranks meet at the port behind it: take a smaller one",
                    )
                })?)
            }
            Some(port) => Some(number("MASTER_PORT", &port)?),
            None => None,
        },
    };
    match (host, port) {
        (Some(host), Some(port)) => Ok(format!("{host}:{port}")),
        (host, _) => Err(bad_input(format!(
            "{} started {} processes, whose GPUs must find each other at the first one, and nothing says {}: set {} for all of them (torchrun \
             sets both)",
            launch.by,
            launch.world,
            if host.is_none() { "on which machine that is" } else { "at which port" },
            if host.is_none() {
                "MASTER_ADDR to its name and MASTER_PORT to a free port there"
            } else {
                "MASTER_PORT to a free port there"
            }
        ))),
    }
}

fn number(name: &str, text: &str) -> Result<u16> {
    text.parse()
        .map(NonZeroU16::get)
        .map_err(|_| bad_input(format!("{name}={text:?} is no port: a number from 1 to 65535 is expected")))
}

impl Meeting {
    /// Meets the other ranks at `address`; all get what the first one's `gift` makes.
    ///
    /// # Errors
    /// A sentence that names who did not come within `timeout`, or what was in the way.
    pub fn open(
        launch: &Launch,
        address: &str,
        timeout: Duration,
        gift: impl FnOnce() -> Result<Vec<u8>>,
    ) -> Result<(Arc<Self>, Vec<u8>)> {
        let Launch { rank, world, .. } = *launch;
        let (gift, streams) = match rank {
            0 => {
                let gift = gift()?;
                let streams = receive_all(world, address, timeout)?;
                for stream in streams.iter().flatten() {
                    say(&mut &*stream, Kind::Gift, &gift).context("answering a rank")?;
                }
                (gift, streams)
            }
            _ => {
                let (gift, stream) = connect(rank, world, address, timeout)?;
                (gift, vec![Some(stream)])
            }
        };
        let mut readers = Vec::new();
        for (peer, stream) in streams.iter().enumerate() {
            if let Some(stream) = stream {
                readers.push((peer, stream.try_clone().context("keeping a connection between ranks")?));
            }
        }
        let state = State {
            writers: streams,
            left: vec![false; world],
            answers: vec![None; world],
            place: "has not begun any operation".into(),
            failure: None,
        };
        let meeting = Arc::new(Self { rank, world, state: Mutex::new(state), changed: Condvar::new() });
        for (peer, stream) in readers {
            let meeting = meeting.clone();
            let listen = move || meeting.listen(peer, stream);
            std::thread::Builder::new().name(format!("from rank {peer}")).spawn(listen).context("starting a thread")?;
        }
        Ok((meeting, gift))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics while holding the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The failure that is known.
    pub fn failure(&self) -> Option<String> {
        self.lock().failure.as_ref().map(|f| f.text.clone())
    }

    /// The failure that is known, as an error.
    pub fn check(&self) -> Result<()> {
        match &self.lock().failure {
            None => Ok(()),
            Some(Failure { text, is_own: true }) => Err(anyhow!("{text}")),
            Some(Failure { text, .. }) => Err(PeerFailed(text.clone()).into()),
        }
    }

    /// Makes `text` the failure of this rank, of which all are told, unless there is one.
    pub fn fail(self: &Arc<Self>, text: String) {
        self.set(Failure { text: text.clone(), is_own: true }, None);
    }

    /// Says where this rank is.
    pub fn at(&self, place: String) {
        self.lock().place = place;
    }

    /// This rank has nothing more to say.
    pub fn leave(&self) {
        let mut state = self.lock();
        if std::mem::replace(&mut state.left[self.rank], true) || state.failure.is_some() {
            return;
        }
        // Who is gone need not be told.
        state.writers.iter().flatten().for_each(|to| drop(say(&mut &*to, Kind::Left, &[])));
    }

    /// Where ranks are, in words, as they say themselves within a moment.
    pub fn whereabouts(&self, ranks: &[usize]) -> Vec<String> {
        let mut state = self.lock();
        state.answers.fill(None);
        let asker = (self.rank as u64).to_le_bytes();
        state.writers.iter().flatten().for_each(|to| drop(say(&mut &*to, Kind::Ask, &asker)));
        let until = Instant::now() + ANSWER_TIME;
        while ranks.iter().any(|r| state.answers[*r].is_none() && !state.left[*r]) {
            let Some(left) = until.checked_duration_since(Instant::now()) else { break };
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        let word = |r: &usize| match &state.answers[*r] {
            _ if state.left[*r] => format!("rank {r} has ended"),
            Some(place) => format!("rank {r} {place}"),
            None => format!("rank {r} does not answer"),
        };
        ranks.iter().map(word).collect()
    }

    /// Keeps the first failure, and tells all but `from`, who told it.
    fn set(self: &Arc<Self>, failure: Failure, from: Option<usize>) {
        let mut state = self.lock();
        if state.failure.is_some() {
            return;
        }
        let text = failure.text.clone();
        state.failure = Some(failure);
        for (to, stream) in state.writers.iter().enumerate().filter(|(to, _)| Some(*to) != from) {
            let Some(stream) = stream else { continue };
            let cut = &text.as_bytes()[..text.len().min(LONGEST)];
            if say(&mut &*stream, Kind::Failed, cut).is_err() {
                // It has its own end of the connection to notice.
                let _ = (to, stream.shutdown(Shutdown::Both));
            }
        }
        drop(state);
        self.changed.notify_all();
        let rank = self.rank;
        // Without this, a process whose device or disk hangs would stay.
        let end = move || {
            std::thread::sleep(GRACE);
            aloud(&format!("error: {text}\nrank {rank} ends without waiting any longer for its own work"));
            std::process::exit(i32::from(crate::error::exit_code::FAILURE));
        };
        drop(std::thread::Builder::new().name("end of a failed rank".into()).spawn(end));
    }

    /// Reads what one rank says until its connection ends.
    fn listen(self: &Arc<Self>, peer: usize, mut stream: TcpStream) {
        while let Ok((kind, bytes)) = hear(&mut stream) {
            match kind {
                Kind::Failed => {
                    let text = String::from_utf8_lossy(&bytes).into_owned();
                    self.set(Failure { text, is_own: false }, Some(peer));
                }
                Kind::Left => {
                    self.lock().left[peer] = true;
                    self.changed.notify_all();
                }
                Kind::Ask => self.asked(peer, &bytes),
                Kind::Here => self.answered(&bytes),
                Kind::Hello | Kind::Gift => {}
            }
        }
        let has_left = {
            let state = self.lock();
            state.left[peer] || state.left[self.rank]
        };
        if !has_left {
            let text = format!("rank {peer} has ended without a word: its process was killed, or its machine or network is gone");
            self.set(Failure { text, is_own: false }, Some(peer));
        }
    }

    /// Answers who asks, and passes the question on.
    fn asked(&self, peer: usize, asker: &[u8]) {
        let state = self.lock();
        let mut answer = asker.to_vec();
        answer.extend((self.rank as u64).to_le_bytes());
        answer.extend(state.place.as_bytes());
        let tell = |to: usize, kind, bytes: &[u8]| {
            if let Some(stream) = &state.writers[to] {
                // Who does not hear it says nothing.
                let _ = say(&mut &*stream, kind, bytes);
            }
        };
        tell(peer, Kind::Here, &answer);
        (0..state.writers.len()).filter(|to| *to != peer).for_each(|to| tell(to, Kind::Ask, asker));
    }

    /// Keeps an answer that is for this rank, and passes on what is not.
    fn answered(&self, bytes: &[u8]) {
        let number = |at: usize| {
            bytes.get(at..at + 8).and_then(|n| n.try_into().ok()).map_or(usize::MAX, |n| u64::from_le_bytes(n) as usize)
        };
        let (asker, from) = (number(0), number(8));
        let mut state = self.lock();
        if asker == self.rank {
            if let (Some(place), Some(text)) = (state.answers.get_mut(from), bytes.get(16..)) {
                *place = Some(String::from_utf8_lossy(text).into_owned());
            }
            drop(state);
            self.changed.notify_all();
        } else if let Some(Some(stream)) = state.writers.get(asker) {
            let _ = say(&mut &*stream, Kind::Here, bytes);
        }
    }
}

/// Waits for the other ranks; by rank, none of this one's own.
fn receive_all(world: usize, address: &str, timeout: Duration) -> Result<Vec<Option<TcpStream>>> {
    let port = address.rsplit_once(':').map_or(address, |(_, port)| port);
    let listener = TcpListener::bind(format!("0.0.0.0:{port}")).map_err(|e| {
        bad_input(format!(
            "rank 0 cannot listen at port {port}, where the other ranks are to find it: {e}. Set MASTER_PORT to a free one"
        ))
    })?;
    listener.set_nonblocking(true).context("listening for ranks")?;
    let mut streams: Vec<Option<TcpStream>> = (0..world).map(|_| None).collect();
    let begun = Instant::now();
    while streams[1..].iter().any(Option::is_none) {
        match listener.accept() {
            Ok((stream, _)) => {
                // Who is no rank of this job is turned away.
                if let Ok(rank) = greet(&stream, world)
                    && streams[rank].is_none()
                {
                    streams[rank] = Some(stream);
                }
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock => std::thread::sleep(TICK),
            Err(e) => return Err(e).context("listening for ranks"),
        }
        if begun.elapsed() >= timeout {
            let late: Vec<String> = (1..world).filter(|r| streams[*r].is_none()).map(|r| r.to_string()).collect();
            bail!("rank 0 has waited {:.0} s at port {port} for rank {}", begun.elapsed().as_secs_f64(), late.join(", "));
        }
    }
    Ok(streams)
}

/// The rank of who has connected.
fn greet(stream: &TcpStream, world: usize) -> Result<usize> {
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(HELLO_TIME))?;
    let (kind, bytes) = hear(&mut &*stream)?;
    ensure!(kind == Kind::Hello && bytes.len() == 24 && bytes[..8] == MAGIC[..], "somebody else has connected");
    let number = |at: usize| bytes[at..at + 8].try_into().map_or(u64::MAX, u64::from_le_bytes) as usize;
    let (rank, theirs) = (number(8), number(16));
    ensure!(theirs == world && (1..world).contains(&rank), "a rank of another job has connected");
    stream.set_read_timeout(None)?;
    Ok(rank)
}

/// Connects to the first rank, which may start later than this one.
fn connect(rank: usize, world: usize, address: &str, timeout: Duration) -> Result<(Vec<u8>, TcpStream)> {
    let begun = Instant::now();
    let mut last = String::from("it did not answer");
    while begun.elapsed() < timeout {
        let left = timeout.saturating_sub(begun.elapsed()).max(TICK);
        match try_connect(rank, world, address, left) {
            Ok(found) => return Ok(found),
            Err(e) => last = format!("{e:#}"),
        }
        std::thread::sleep(TICK);
    }
    bail!("rank {rank} has tried for {:.0} s to reach rank 0 at {address}: {last}", begun.elapsed().as_secs_f64())
}

fn try_connect(rank: usize, world: usize, address: &str, left: Duration) -> Result<(Vec<u8>, TcpStream)> {
    let place = address.to_socket_addrs()?.next().context("the name means no address")?;
    let mut stream = TcpStream::connect_timeout(&place, left)?;
    stream.set_nodelay(true)?;
    let mut hello = MAGIC.to_vec();
    hello.extend((rank as u64).to_le_bytes());
    hello.extend((world as u64).to_le_bytes());
    say(&mut stream, Kind::Hello, &hello)?;
    // It waits for all others first.
    stream.set_read_timeout(Some(left))?;
    let (kind, gift) = hear(&mut stream)?;
    ensure!(kind == Kind::Gift, "what listens there is not rank 0 of this job");
    stream.set_read_timeout(None)?;
    Ok((gift, stream))
}

fn say(stream: &mut impl Write, kind: Kind, bytes: &[u8]) -> std::io::Result<()> {
    let mut message = vec![kind as u8];
    message.extend((bytes.len() as u32).to_le_bytes());
    message.extend(bytes);
    stream.write_all(&message)
}

fn hear(stream: &mut impl Read) -> Result<(Kind, Vec<u8>)> {
    let mut head = [0u8; 5];
    stream.read_exact(&mut head)?;
    let kind = KINDS.into_iter().find(|k| *k as u8 == head[0]).context("an unknown message")?;
    let len = u32::from_le_bytes([head[1], head[2], head[3], head[4]]) as usize;
    ensure!(len <= LONGEST, "a message of {len} bytes");
    let mut bytes = vec![0; len];
    stream.read_exact(&mut bytes)?;
    Ok((kind, bytes))
}

#[cfg(test)]
#[path = "meet_tests.rs"]
mod tests;
