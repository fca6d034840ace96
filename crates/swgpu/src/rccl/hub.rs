//! The meeting point of a communicator's ranks.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io::{BufReader, BufWriter};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use super::reduce::reduce;
use super::wire::{Kind, Reply, Request, read_batch, read_word, write_reply, write_words};
use super::{Failure, INVALID_USAGE, REMOTE_ERROR, TIMEOUT};
use crate::settings::settings;

/// Starts a hub in this process; gives the port that ranks connect to. How many ranks there are the first one tells.
pub fn start() -> std::io::Result<u16> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let port = listener.local_addr()?.port();
    std::thread::Builder::new().name("swgpu hub".into()).spawn(move || serve(&listener))?;
    Ok(port)
}

enum Message {
    Batch(usize, Vec<Request>),
    /// The rank has closed its connection.
    Left(usize),
}

/// Where a request came from: rank, and index in its batch.
type Origin = (usize, usize);

struct Hub {
    writers: Vec<BufWriter<TcpStream>>,
    /// Ranks whose connection is open.
    present: Vec<bool>,
    /// Results so far of the batch that each rank waits for.
    batches: Vec<Option<Vec<Option<Vec<u8>>>>>,
    /// Collectives that wait for ranks, by their number; and how many each rank has begun.
    collectives: BTreeMap<u64, Vec<Option<(Origin, Request)>>>,
    begun: Vec<u64>,
    /// Sends and receives that wait for their peer, by (from, to).
    sends: HashMap<(usize, usize), VecDeque<(Origin, Request)>>,
    receives: HashMap<(usize, usize), VecDeque<(Origin, Request)>>,
}

/// Accepts all ranks, then serves until the last has left.
fn serve(listener: &TcpListener) {
    let deadline = Duration::from_secs(settings().timeout_s);
    let mut connections: BTreeMap<usize, TcpStream> = BTreeMap::new();
    let mut ranks = usize::MAX;
    // Ranks that never come are noticed by those that wait for this: their own time runs out.
    while connections.len() < ranks {
        let Ok((mut stream, _)) = listener.accept() else { return };
        let (Ok(rank), Ok(all)) = (read_word(&mut stream), read_word(&mut stream)) else { continue };
        // A failure here means that the rank has gone again; it will be missed below.
        let _ = stream.set_nodelay(true);
        ranks = all as usize;
        if rank as usize >= ranks || connections.insert(rank as usize, stream).is_some() {
            eprintln!("swgpu: two ranks say that they are rank {rank} of {ranks}");
            return;
        }
    }
    let (sender, receiver) = channel();
    let mut writers = Vec::new();
    for (rank, mut stream) in connections {
        let Ok(reader) = stream.try_clone() else { return };
        if write_words(&mut stream, &[ranks as u64]).is_err() {
            eprintln!("swgpu: rank {rank} has gone before the communicator was complete");
        }
        writers.push(BufWriter::new(stream));
        let sender = sender.clone();
        std::thread::spawn(move || listen(rank, reader, &sender));
    }
    drop(sender);
    let hub = Hub {
        present: vec![true; ranks],
        batches: vec![None; ranks],
        begun: vec![0; ranks],
        writers,
        collectives: BTreeMap::new(),
        sends: HashMap::new(),
        receives: HashMap::new(),
    };
    hub.run(&receiver, deadline);
}

fn listen(rank: usize, stream: TcpStream, sender: &Sender<Message>) {
    let mut reader = BufReader::new(stream);
    while let Ok(batch) = read_batch(&mut reader) {
        if sender.send(Message::Batch(rank, batch)).is_err() {
            return;
        }
    }
    // The hub may have ended already.
    let _ = sender.send(Message::Left(rank));
}

impl Hub {
    fn run(mut self, receiver: &Receiver<Message>, deadline: Duration) {
        let mut progress = Instant::now();
        loop {
            match receiver.recv_timeout(Duration::from_millis(50)) {
                Ok(Message::Batch(rank, batch)) => {
                    progress = Instant::now();
                    if let Err(failure) = self.begin(rank, batch) {
                        self.fail(&failure);
                    }
                }
                Ok(Message::Left(rank)) => self.present[rank] = false,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            if self.batches.iter().all(Option::is_none) {
                progress = Instant::now();
                continue;
            }
            if let Some(gone) = self.missing().into_iter().find(|&rank| !self.present[rank]) {
                let text = format!("rank {gone} has left, and others wait for it: {}", self.waiting());
                self.fail(&Failure { status: REMOTE_ERROR, text });
            } else if progress.elapsed() > deadline {
                let text = format!("no progress for {} s (SWGPU_TIMEOUT_S): {}", deadline.as_secs(), self.waiting());
                self.fail(&Failure { status: TIMEOUT, text });
            }
        }
    }

    /// Ranks that others wait for.
    fn missing(&self) -> Vec<usize> {
        let collectives = self
            .collectives
            .values()
            .flat_map(|parts| parts.iter().enumerate().filter(|(_, part)| part.is_none()).map(|(rank, _)| rank));
        let receivers = self.sends.iter().filter(|(_, waiting)| !waiting.is_empty()).map(|(&(_, to), _)| to);
        let senders = self.receives.iter().filter(|(_, waiting)| !waiting.is_empty()).map(|(&(from, _), _)| from);
        collectives.chain(receivers).chain(senders).collect()
    }

    fn waiting(&self) -> String {
        let mut texts: Vec<String> = Vec::new();
        for parts in self.collectives.values() {
            let (here, absent): (Vec<usize>, Vec<usize>) = (0..parts.len()).partition(|&rank| parts[rank].is_some());
            let signature = parts.iter().flatten().next().map_or(String::new(), |(_, request)| request.signature());
            texts.push(format!("ranks {here:?} are in {signature}, ranks {absent:?} are not"));
        }
        let lonely = |map: &HashMap<(usize, usize), VecDeque<(Origin, Request)>>, what: &str| -> Vec<String> {
            map.iter()
                .filter(|(_, queue)| !queue.is_empty())
                .map(|((from, to), _)| format!("a {what} from rank {from} to rank {to}"))
                .collect()
        };
        texts.extend(lonely(&self.sends, "send"));
        texts.extend(lonely(&self.receives, "receive"));
        texts.join("; ")
    }

    /// Answers everyone who waits with a failure and forgets all pending operations.
    fn fail(&mut self, failure: &Failure) {
        eprintln!("swgpu: collective: {}", failure.text);
        self.collectives.clear();
        self.sends.clear();
        self.receives.clear();
        // In step again, should a program go on after the failure.
        let furthest = self.begun.iter().copied().max().unwrap_or(0);
        self.begun.fill(furthest);
        for rank in (0..self.writers.len()).rev() {
            if self.batches[rank].take().is_some() {
                self.answer(rank, &Err(failure.clone()));
            }
        }
    }

    fn answer(&mut self, rank: usize, reply: &Reply) {
        if write_reply(&mut self.writers[rank], reply).is_err() {
            self.present[rank] = false;
        }
    }

    fn begin(&mut self, rank: usize, batch: Vec<Request>) -> Result<(), Failure> {
        self.batches[rank] = Some(vec![None; batch.len()]);
        for (index, request) in batch.into_iter().enumerate() {
            let origin = (rank, index);
            match request.kind {
                Kind::Send => {
                    let pair = (rank, request.root as usize);
                    self.sends.entry(pair).or_default().push_back((origin, request));
                    self.match_pair(pair)?;
                }
                Kind::Receive => {
                    let pair = (request.root as usize, rank);
                    self.receives.entry(pair).or_default().push_back((origin, request));
                    self.match_pair(pair)?;
                }
                _ => {
                    let number = self.begun[rank];
                    self.begun[rank] += 1;
                    let ranks = self.writers.len();
                    let parts = self.collectives.entry(number).or_insert_with(|| vec![None; ranks]);
                    parts[rank] = Some((origin, request));
                    if parts.iter().all(Option::is_some) {
                        let parts = self.collectives.remove(&number).into_iter().flatten().flatten().collect();
                        self.finish_collective(parts)?;
                    }
                }
            }
        }
        Ok(())
    }

    fn match_pair(&mut self, pair: (usize, usize)) -> Result<(), Failure> {
        let (sends, receives) = (self.sends.entry(pair).or_default(), self.receives.entry(pair).or_default());
        if sends.is_empty() || receives.is_empty() {
            return Ok(());
        }
        let (Some((sender, sent)), Some((receiver, received))) = (sends.pop_front(), receives.pop_front()) else { return Ok(()) };
        if (sent.count, sent.element) != (received.count, received.element) {
            let text = format!("rank {} has {}, rank {} has {}", pair.0, sent.signature(), pair.1, received.signature());
            return Err(Failure { status: INVALID_USAGE, text });
        }
        self.done(sender, Vec::new());
        self.done(receiver, sent.payload);
        Ok(())
    }

    /// Puts a result into its rank's batch, and answers if that was the last.
    fn done(&mut self, (rank, index): Origin, result: Vec<u8>) {
        let Some(batch) = &mut self.batches[rank] else { return };
        batch[index] = Some(result);
        if batch.iter().all(Option::is_some) {
            let results = self.batches[rank].take().into_iter().flatten().flatten().collect();
            self.answer(rank, &Ok(results));
        }
    }

    fn finish_collective(&mut self, parts: Vec<(Origin, Request)>) -> Result<(), Failure> {
        let first = &parts[0].1;
        if let Some((origin, other)) = parts.iter().find(|(_, request)| request.signature() != first.signature()) {
            let text =
                format!("ranks disagree: rank 0 calls {}, rank {} calls {}", first.signature(), origin.0, other.signature());
            return Err(Failure { status: INVALID_USAGE, text });
        }
        let results = combine(&parts.iter().map(|(_, request)| request).collect::<Vec<_>>())?;
        // Rank 0, in whose process the hub usually lives, is answered last: it may end its process then.
        for ((origin, _), result) in parts.iter().zip(results).rev() {
            self.done(*origin, result);
        }
        Ok(())
    }
}

/// The result of each rank, from the equal requests of all ranks.
fn combine(requests: &[&Request]) -> Result<Vec<Vec<u8>>, Failure> {
    let ranks = requests.len();
    let first = requests[0];
    let payloads: Vec<&[u8]> = requests.iter().map(|request| request.payload.as_slice()).collect();
    let chunk = |payload: &'_ [u8], index: usize| -> std::ops::Range<usize> {
        let bytes = payload.len() / ranks;
        index * bytes..(index + 1) * bytes
    };
    Ok(match first.kind {
        Kind::AllReduce => vec![reduce(first.element, first.reduction, &payloads); ranks],
        Kind::Reduce => {
            let mut results = vec![Vec::new(); ranks];
            results[first.root as usize] = reduce(first.element, first.reduction, &payloads);
            results
        }
        Kind::ReduceScatter => {
            let whole = reduce(first.element, first.reduction, &payloads);
            (0..ranks).map(|rank| whole[chunk(&whole, rank)].to_vec()).collect()
        }
        Kind::AllGather => vec![payloads.concat(); ranks],
        Kind::Broadcast => vec![payloads[first.root as usize].to_vec(); ranks],
        Kind::AllToAll => (0..ranks)
            .map(|to| payloads.iter().flat_map(|payload| payload[chunk(payload, to)].iter().copied()).collect())
            .collect(),
        Kind::Split => split(requests)?,
        Kind::Send | Kind::Receive => Vec::new(),
    })
}

/// A hub for each colour; each rank learns its port, new rank and number of ranks. No colour (-1): nothing.
fn split(requests: &[&Request]) -> Result<Vec<Vec<u8>>, Failure> {
    let mut results = vec![Vec::new(); requests.len()];
    let mut colours: BTreeMap<i64, Vec<(i32, usize)>> = BTreeMap::new();
    for (rank, request) in requests.iter().enumerate() {
        if request.count as i64 >= 0 {
            colours.entry(request.count as i64).or_default().push((request.root, rank));
        }
    }
    for members in colours.values_mut() {
        members.sort_unstable();
        let port = start()?;
        for (new_rank, &(_, rank)) in members.iter().enumerate() {
            write_words(&mut results[rank], &[u64::from(port), new_rank as u64, members.len() as u64])?;
        }
    }
    Ok(results)
}
