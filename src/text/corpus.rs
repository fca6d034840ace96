//! Reading a corpus: plain text and JSON lines, also compressed, as records in the order given, in bounded memory.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use anyhow::{Context, Result, anyhow};

use crate::error::bad_input;

/// How a file is cut into records.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Layout {
    /// One JSON object a line; lines end at 0x0A and nowhere else. Blank lines are passed over.
    JsonLines,
    /// The whole file is one record.
    Text,
}

/// One input file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Input {
    pub path: PathBuf,
    pub layout: Layout,
    /// Size as it lies on disk.
    pub file_bytes: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Compression {
    None,
    Gzip,
    Zstd,
}

/// A record as it stands in the file: a line without its newline, or a file. A byte order mark at the file's start is gone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Index of the input.
    pub input: usize,
    /// 1-based line; 0 for a whole file.
    pub line: u64,
    pub bytes: Vec<u8>,
}

/// Some consecutive records.
#[derive(Debug, Default)]
pub struct Batch {
    pub records: Vec<Record>,
    /// Bytes of input files, as they lie on disk, read up to here.
    pub bytes_read: u64,
}

/// A batch is handed on when its records reach this many bytes.
const BATCH_BYTES: usize = 4 << 20;
/// ... or this many records.
const BATCH_RECORDS: usize = 8192;
/// Bytes read, and decompressed, at a time.
const BUFFER_BYTES: usize = 1 << 18;

/// The name without `.gz` or `.zst`, and what was there.
fn split_compression(path: &Path) -> (PathBuf, Compression) {
    let extension = path.extension().map(|e| e.to_string_lossy().to_ascii_lowercase());
    match extension.as_deref() {
        Some("gz" | "gzip") => (path.with_extension(""), Compression::Gzip),
        Some("zst" | "zstd") => (path.with_extension(""), Compression::Zstd),
        _ => (path.to_path_buf(), Compression::None),
    }
}

/// `.jsonl`, `.ndjson` and `.json` are JSON lines, everything else is text; `.gz` and `.zst` are looked through.
pub fn layout_of(path: &Path) -> Layout {
    let (name, _) = split_compression(path);
    let extension = name.extension().map(|e| e.to_string_lossy().to_ascii_lowercase());
    match extension.as_deref() {
        Some("jsonl" | "ndjson" | "json") => Layout::JsonLines,
        _ => Layout::Text,
    }
}

impl Input {
    /// Looks at a file before anything starts. `layout` None: by its name.
    pub fn find(path: &Path, layout: Option<Layout>) -> Result<Self> {
        let shown = path.display();
        let metadata = std::fs::metadata(path).map_err(|e| bad_input(format!("input {shown} cannot be read: {e}")))?;
        if metadata.is_dir() {
            let text = "is a directory: name its files (shell: DIR/*.jsonl), or list them in a file for --input-list";
            return Err(bad_input(format!("input {shown} {text}")));
        }
        let layout = layout.unwrap_or_else(|| layout_of(path));
        Ok(Self { path: path.to_path_buf(), layout, file_bytes: metadata.len() })
    }

    /// "FILE" or "FILE line N".
    pub fn place(&self, line: u64) -> String {
        match line {
            0 => self.path.display().to_string(),
            line => format!("{} line {line}", self.path.display()),
        }
    }
}

/// Starts reading `inputs` on a thread of its own. After an error nothing follows. Two batches at most wait in memory.
pub fn read(inputs: Arc<Vec<Input>>) -> Receiver<Result<Batch>> {
    let (sender, receiver) = sync_channel(2);
    std::thread::spawn(move || {
        let mut out = Batcher { sender, batch: Batch::default(), bytes: 0, bytes_read: Arc::default() };
        let mut all = || inputs.iter().enumerate().try_for_each(|(i, input)| read_input(i, input, &mut out));
        match all() {
            // The receiver may be gone: then nobody wants to know.
            Ok(()) => drop(out.send()),
            Err(Stop::NobodyListens) => {}
            Err(Stop::Failed(error)) => {
                // What lies before the damage is sent first, so that its own faults are told first.
                if out.send().is_ok() {
                    let _ = out.sender.send(Err(error));
                }
            }
        }
    });
    receiver
}

enum Stop {
    NobodyListens,
    Failed(anyhow::Error),
}

struct Batcher {
    sender: SyncSender<Result<Batch>>,
    batch: Batch,
    bytes: usize,
    bytes_read: Arc<AtomicU64>,
}

impl Batcher {
    fn push(&mut self, record: Record) -> Result<(), Stop> {
        self.bytes += record.bytes.len();
        self.batch.records.push(record);
        if self.bytes >= BATCH_BYTES || self.batch.records.len() >= BATCH_RECORDS { self.send() } else { Ok(()) }
    }

    fn send(&mut self) -> Result<(), Stop> {
        let mut batch = std::mem::take(&mut self.batch);
        self.bytes = 0;
        batch.bytes_read = self.bytes_read.load(Ordering::Relaxed);
        self.sender.send(Ok(batch)).map_err(|_| Stop::NobodyListens)
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

fn open(input: &Input, count: Arc<AtomicU64>) -> Result<Box<dyn BufRead>> {
    let file = File::open(&input.path).map_err(|e| bad_input(format!("input {} cannot be read: {e}", input.path.display())))?;
    Ok(unpacked(&input.path, Counted { inner: file, count })?)
}

/// What a file holds, decompressed on the way if its name says so.
///
/// # Errors
/// When the decompressor cannot be set up. What is damaged or cut off is found while reading.
pub fn unpacked(path: &Path, file: impl Read + 'static) -> io::Result<Box<dyn BufRead>> {
    let file = BufReader::with_capacity(BUFFER_BYTES, file);
    Ok(match split_compression(path).1 {
        Compression::None => Box::new(file),
        Compression::Gzip => Box::new(BufReader::with_capacity(BUFFER_BYTES, flate2::bufread::MultiGzDecoder::new(file))),
        Compression::Zstd => {
            let mut decoder = zstd::stream::read::Decoder::with_buffer(file)?;
            // `zstd --long=31` is the largest window there is.
            decoder.window_log_max(31)?;
            Box::new(BufReader::with_capacity(BUFFER_BYTES, decoder))
        }
    })
}

fn read_input(index: usize, input: &Input, out: &mut Batcher) -> Result<(), Stop> {
    let mut before = 0;
    let compression = split_compression(&input.path).1;
    let cut = |error: io::Error, documents: u64| Stop::Failed(explain(error, input, compression, documents));
    let mut reader = open(input, out.bytes_read.clone()).map_err(Stop::Failed)?;
    if compression != Compression::None && input.file_bytes == 0 {
        return Err(cut(io::ErrorKind::UnexpectedEof.into(), 0));
    }
    match input.layout {
        Layout::Text => {
            let mut bytes = Vec::new();
            reader.read_to_end(&mut bytes).map_err(|e| cut(e, 0))?;
            strip_byte_order_mark(&mut bytes);
            out.push(Record { input: index, line: 0, bytes })
        }
        Layout::JsonLines => {
            for line in 1.. {
                let mut bytes = Vec::new();
                if reader.read_until(b'\n', &mut bytes).map_err(|e| cut(e, before))? == 0 {
                    break;
                }
                if line == 1 {
                    strip_byte_order_mark(&mut bytes);
                }
                if bytes.last() == Some(&b'\n') {
                    bytes.pop();
                }
                if bytes.iter().all(|b| matches!(b, b' ' | b'\t' | b'\r')) {
                    continue;
                }
                before += 1;
                out.push(Record { input: index, line, bytes })?;
            }
            Ok(())
        }
    }
}

fn strip_byte_order_mark(bytes: &mut Vec<u8>) {
    if bytes.starts_with(b"\xef\xbb\xbf") {
        bytes.drain(..3);
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

/// Paths listed in a file, one a line, in order; blank lines are passed over. `-` is standard input. Relative paths start
/// at the working directory, as they would on the command line.
pub fn read_list(list: &Path) -> Result<Vec<PathBuf>> {
    use std::os::unix::ffi::OsStringExt;
    let mut bytes = Vec::new();
    if list == Path::new("-") {
        io::stdin().read_to_end(&mut bytes).context("reading the list of inputs from standard input")?;
    } else {
        bytes = std::fs::read(list).map_err(|e| bad_input(format!("--input-list {}: {e}", list.display())))?;
    }
    let lines = bytes.split(|b| *b == b'\n').map(|line| line.strip_suffix(b"\r").unwrap_or(line));
    Ok(lines.filter(|l| !l.trim_ascii().is_empty()).map(|l| PathBuf::from(std::ffi::OsString::from_vec(l.to_vec()))).collect())
}
