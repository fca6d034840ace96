//! Threads that read and decompress ahead, and their records in the order of the inputs.
//!
//! The inputs are cut into lanes: one file, or small ones in a row. Each reader takes the next lane that nobody has; each lane
//! has a short queue of blocks, and the queues are emptied one after the other. So some files beyond the present one are read
//! ahead, and what a reader holds is bounded by its queue.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Result, anyhow};

use super::compression::{self, Compression, unpacked};
use super::gate::{Gate, LONG, Turn};
use super::{Block, Content, Input, Layout, Place, Record, Wanted, lines, parquet};
use crate::error::bad_input;

/// A block is handed on when its records reach this many bytes: enough work for a thread to come back for, little enough
/// to be dealt out evenly.
pub(super) const BLOCK_BYTES: usize = 1 << 20;
/// ... or this many records.
const BLOCK_RECORDS: usize = 8192;
/// Blocks of one lane that wait.
const QUEUE: usize = 3;
/// Small files are read in a row until they have so many bytes together, and so many of them.
const LANE_BYTES: u64 = 1 << 20;
const LANE_FILES: usize = 1024;

/// Starts reading `inputs`. Documents keep the order of the inputs. After an error nothing follows.
pub fn read(inputs: Arc<Vec<Input>>, wanted: Wanted) -> Blocks {
    let readers = wanted.readers.clamp(1, 64);
    let (lane_sender, lanes) = sync_channel(readers);
    let gate = Arc::new(Gate::default());
    gate.set_front(wanted.start.input);
    let next = Arc::new(Mutex::new((wanted.start.input, lane_sender)));
    for _ in 0..readers {
        let (inputs, wanted, gate, next) = (inputs.clone(), wanted.clone(), gate.clone(), next.clone());
        std::thread::spawn(move || while take_lane(&inputs, &wanted, &gate, &next) {});
    }
    Blocks { lanes, current: None, gate, failed: false }
}

type Lane = (usize, Receiver<Result<Block>>);

/// Reads one lane; false if there is none, or nobody listens.
fn take_lane(inputs: &[Input], wanted: &Wanted, gate: &Arc<Gate>, next: &Mutex<(usize, SyncSender<Lane>)>) -> bool {
    let (range, sender) = {
        // The lock is held while the lane is queued: lanes must be queued in their order.
        let mut next = next.lock().unwrap_or_else(PoisonError::into_inner);
        let range = lane_from(inputs, next.0);
        if range.is_empty() {
            return false;
        }
        next.0 = range.end;
        let (sender, receiver) = sync_channel(QUEUE);
        if next.1.send((range.start, receiver)).is_err() {
            return false;
        }
        (range, sender)
    };
    let before = inputs[..range.start].iter().map(|i| i.file_bytes).sum();
    let mut out = Batcher { sender, gate, first: range.start, block: Block::default(), before, count: Arc::default() };
    let mut all = || {
        range.clone().try_for_each(|i| {
            read_input(i, &inputs[i], wanted, &mut out)?;
            out.before += inputs[i].file_bytes;
            out.count = Arc::default();
            Ok(())
        })
    };
    match all() {
        // The receiver may be gone: then nobody wants to know.
        Ok(()) => out.send().is_ok(),
        Err(Stop::NobodyListens) => false,
        Err(Stop::Failed(error)) => {
            // What lies before the damage is sent first, so that its own faults are told first.
            if out.send().is_ok() {
                let _ = out.sender.send(Err(error));
            }
            false
        }
    }
}

fn lane_from(inputs: &[Input], first: usize) -> Range<usize> {
    let mut bytes = 0;
    let small = inputs[first.min(inputs.len())..].iter().take(LANE_FILES).take_while(|input| {
        let fits = bytes == 0 || bytes + input.file_bytes <= LANE_BYTES;
        bytes += input.file_bytes.max(1);
        fits
    });
    first..first + small.count()
}

/// The blocks, in order.
pub struct Blocks {
    lanes: Receiver<Lane>,
    current: Option<Lane>,
    gate: Arc<Gate>,
    failed: bool,
}

impl Iterator for Blocks {
    type Item = Result<Block>;

    fn next(&mut self) -> Option<Result<Block>> {
        while !self.failed {
            let Some((_, lane)) = &self.current else {
                let lane = self.lanes.recv().ok()?;
                self.gate.set_front(lane.0);
                self.current = Some(lane);
                continue;
            };
            match lane.recv() {
                Ok(block) => {
                    self.failed = block.is_err();
                    return Some(block);
                }
                Err(_) => self.current = None,
            }
        }
        None
    }
}

impl Drop for Blocks {
    fn drop(&mut self) {
        self.gate.close();
    }
}

pub(super) enum Stop {
    NobodyListens,
    Failed(anyhow::Error),
}

/// Fills blocks and sends them.
pub(super) struct Batcher<'a> {
    sender: SyncSender<Result<Block>>,
    gate: &'a Arc<Gate>,
    /// First input of the lane.
    first: usize,
    pub block: Block,
    /// Bytes of the inputs before the present one.
    before: u64,
    /// Bytes read of the present one.
    pub count: Arc<AtomicU64>,
}

impl Batcher<'_> {
    /// Bytes of the block in work.
    pub fn len(&self) -> usize {
        self.block.bytes.len()
    }

    /// Appends bytes of a record that began at `start` of the block.
    pub fn append(&mut self, start: usize, bytes: &[u8]) -> Result<(), Stop> {
        if self.block.turn.is_none() && self.len() - start + bytes.len() > LONG {
            self.block.turn = Some(self.turn()?);
        }
        self.block.bytes.extend_from_slice(bytes);
        Ok(())
    }

    fn turn(&self) -> Result<Turn, Stop> {
        self.gate.wait(self.first).ok_or(Stop::NobodyListens)
    }

    /// Forgets what was appended from `start` on.
    pub fn take_back(&mut self, start: usize) {
        self.block.bytes.truncate(start);
    }

    /// Removes the first `count` bytes of a record that begins at `start` of the block.
    pub fn cut_front(&mut self, start: usize, count: usize) {
        self.block.bytes.drain(start..start + count);
    }

    pub fn bytes_from(&self, start: usize) -> &[u8] {
        &self.block.bytes[start..]
    }

    /// The record is complete; hands the block on if it is large enough.
    pub fn push(&mut self, place: Place, content: Content) -> Result<(), Stop> {
        self.block.records.push(Record { place, content });
        if self.len() >= BLOCK_BYTES || self.block.records.len() >= BLOCK_RECORDS || self.block.turn.is_some() {
            self.send()
        } else {
            Ok(())
        }
    }

    fn send(&mut self) -> Result<(), Stop> {
        let mut block = std::mem::take(&mut self.block);
        self.block.bytes.reserve(BLOCK_BYTES + BLOCK_BYTES / 4);
        block.bytes_read = self.before + self.count.load(Ordering::Relaxed);
        self.sender.send(Ok(block)).map_err(|_| Stop::NobodyListens)
    }
}

/// Counts what passes.
struct Counted<R> {
    inner: R,
    count: Arc<AtomicU64>,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buf)?;
        self.count.fetch_add(n as u64, Ordering::Relaxed);
        Ok(n)
    }
}

fn read_input(index: usize, input: &Input, wanted: &Wanted, out: &mut Batcher) -> Result<(), Stop> {
    let start = if wanted.start.input == index { wanted.start } else { Place { input: index, ..Place::default() } };
    if input.layout == Layout::Parquet {
        return parquet::read_rows(input, start, wanted, out);
    }
    let packed = compression::of(&input.path);
    let cut = |error: io::Error, documents: u64| Stop::Failed(explain(error, input, packed, documents));
    let unreadable = |e: io::Error| Stop::Failed(bad_input(format!("input {} cannot be read: {e}", input.path.display())));
    let mut file = File::open(&input.path).map_err(unreadable)?;
    if packed != Compression::None && input.file_bytes == 0 {
        return Err(cut(io::ErrorKind::UnexpectedEof.into(), 0));
    }
    if packed == Compression::None && start.byte > 0 {
        file.seek(SeekFrom::Start(start.byte)).map_err(|e| cut(e, 0))?;
        out.count.store(start.byte, Ordering::Relaxed);
    }
    let counted = Counted { inner: file, count: out.count.clone() };
    let mut reader = unpacked(&input.path, counted).map_err(|e| cut(e, 0))?;
    if packed != Compression::None && start.byte > 0 {
        let skipped = io::copy(&mut (&mut reader).take(start.byte), &mut io::sink()).map_err(|e| cut(e, 0))?;
        if skipped < start.byte {
            return Err(cut(io::ErrorKind::UnexpectedEof.into(), 0));
        }
    }
    match input.layout {
        Layout::Text => lines::read_whole(&mut reader, index, wanted.max_record_bytes, out, &cut),
        Layout::JsonLines | Layout::Parquet => lines::read_lines(&mut reader, start, wanted.max_record_bytes, out, &cut),
    }
}

fn explain(error: io::Error, input: &Input, compression: Compression, documents: u64) -> anyhow::Error {
    let name = match compression {
        Compression::None => "",
        Compression::Gzip => "gzip ",
        Compression::Zstd => "zstd ",
    };
    let shown = input.path.display();
    let what = match error.kind() {
        io::ErrorKind::UnexpectedEof => format!("input {shown} is truncated: its {name}stream breaks off"),
        _ if compression != Compression::None => {
            format!("input {shown} is damaged: its {name}stream cannot be decoded ({error})")
        }
        _ => return anyhow!(error).context(format!("reading input {shown}")),
    };
    anyhow!("{what}; {documents} complete documents of this file lie before that point. Fetch it again, or leave it out")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::path::PathBuf;

    fn lines_of(blocks: Blocks) -> Vec<(Place, Vec<u8>)> {
        let mut all = Vec::new();
        for block in blocks {
            let block = block.unwrap();
            all.extend(block.records.iter().map(|r| (r.place, block.bytes(r).to_vec())));
        }
        all
    }

    fn inputs(paths: &[PathBuf]) -> Arc<Vec<Input>> {
        Arc::new(paths.iter().map(|p| Input::find(p, None).unwrap()).collect())
    }

    /// Files of very different sizes: the places say where each line is, and reading may begin at any of them.
    #[test]
    fn any_number_of_readers_gives_the_same_records_from_any_place() {
        let dir = tempfile::tempdir().unwrap();
        let mut paths = Vec::new();
        for f in 0..30usize {
            let lines: String =
                (0..[1, 40, 20_000, 3][f % 4]).map(|i| format!("file {f} line {i} {}\n", "x".repeat(i % 300))).collect();
            let name = if f % 3 == 0 { format!("{f}.jsonl.zst") } else { format!("{f}.jsonl") };
            let bytes = if f % 3 == 0 { zstd::encode_all(lines.as_bytes(), 1).unwrap() } else { lines.into_bytes() };
            paths.push(dir.path().join(name));
            std::fs::write(&paths[f], bytes).unwrap();
        }
        let inputs = inputs(&paths);
        let with =
            |readers: usize, start: Place| lines_of(read(inputs.clone(), Wanted { readers, start, ..Wanted::all("text") }));
        let all = with(1, Place::default());
        assert_eq!(all.len(), 8 + 8 * 40 + 7 * 20_000 + 7 * 3);
        for readers in [2, 3, 9] {
            assert!(with(readers, Place::default()) == all, "{readers} readers");
        }
        for at in [0, 1, 7, 50, 25_000, all.len() - 1] {
            assert!(with(2, all[at].0) == all[at..], "from record {at}, {:?}", all[at].0);
        }
    }

    #[test]
    fn long_records_come_one_at_a_time_and_too_long_ones_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let paths: Vec<PathBuf> = (0..4).map(|i| dir.path().join(format!("{i}.jsonl"))).collect();
        for path in &paths {
            let mut file = std::fs::File::create(path).unwrap();
            for length in [10, LONG + 5, 20, LONG + 7, 2 * LONG, 3] {
                file.write_all(&vec![b'a'; length]).unwrap();
                file.write_all(b"\n").unwrap();
            }
        }
        let max = LONG as u64 + 6;
        let blocks = read(inputs(&paths), Wanted { readers: 4, max_record_bytes: max, ..Wanted::all("text") });
        let mut found = Vec::new();
        for block in blocks {
            let block = block.unwrap();
            for r in &block.records {
                found.push(match &r.content {
                    Content::TooLong(n) => (r.place.input, r.place.byte, 0, *n as usize),
                    _ => (r.place.input, r.place.byte, block.bytes(r).len(), 0),
                });
            }
        }
        let long = LONG as u64;
        let one = |i| {
            [
                (i, 0, 10, 0),
                (i, 11, LONG + 5, 0),
                (i, long + 17, 20, 0),
                (i, long + 38, 0, LONG + 7),
                (i, 2 * long + 46, 0, 2 * LONG),
                (i, 4 * long + 47, 3, 0),
            ]
        };
        assert_eq!(found, (0..4).flat_map(one).collect::<Vec<_>>());
        // Stopping in the middle leaves no reader waiting for its turn: they end, and the sender with them.
        let mut blocks = read(inputs(&paths), Wanted { readers: 4, ..Wanted::all("text") });
        assert!(blocks.next().unwrap().is_ok());
    }
}
