//! Reading a corpus: plain text, JSON lines and Parquet, also compressed, as records in the order given, in bounded memory.
//!
//! [`Input::find`] looks at a file, [`find::expand`] turns folders and patterns into files, [`read`] starts threads that hand out
//! the records in blocks.

mod compression;
mod find;
mod gate;
mod lines;
mod parquet;
mod read;

use std::io::{self, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

pub use compression::unpacked;
pub use find::{Found, expand};
pub use read::{Blocks, read};

use super::filter::{Condition, Value};
use crate::error::bad_input;

/// How a file is cut into records.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Layout {
    /// One JSON object a line; lines end at 0x0A and nowhere else. Blank lines are passed over.
    JsonLines,
    /// The whole file is one record.
    Text,
    /// One row is one record, a column is the text.
    Parquet,
}

/// One input file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Input {
    pub path: PathBuf,
    pub layout: Layout,
    /// Size as it lies on disk.
    pub file_bytes: u64,
}

/// Where a record begins. Ordered as records are read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Place {
    /// Index of the input.
    pub input: usize,
    /// 1-based line, or row; 0 for a whole file.
    pub line: u64,
    /// Bytes of the file, decompressed, that lie before; 0 in Parquet.
    pub byte: u64,
}

impl Place {
    /// Records of this input lie before.
    pub fn is_inside(&self) -> bool {
        self.line > 1
    }
}

/// What a record is made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Content {
    /// A line without its newline, a file, a value of a column: these bytes of the block. A byte order mark at the file's start
    /// is gone.
    Bytes(Range<usize>),
    /// A column that says "no value".
    Null,
    /// More bytes than a record may have; they were passed over.
    TooLong(u64),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    pub place: Place,
    pub content: Content,
}

/// Some consecutive records.
#[derive(Debug, Default)]
pub struct Block {
    bytes: Vec<u8>,
    pub records: Vec<Record>,
    /// Of a table: the values that the conditions ask for, as many a record as there are conditions.
    pub fields: Vec<Value>,
    /// Bytes of input files, as they lie on disk, read up to here.
    pub bytes_read: u64,
    /// Held while a very long record exists, so that there is one at a time.
    turn: Option<gate::Turn>,
}

impl Block {
    /// One record of these bytes.
    pub fn of_one(bytes: &[u8]) -> Self {
        let record = Record { place: Place::default(), content: Content::Bytes(0..bytes.len()) };
        Self { bytes: bytes.to_vec(), records: vec![record], ..Self::default() }
    }

    /// Bytes of all records together.
    pub fn bytes_in_all(&self) -> usize {
        self.bytes.len()
    }

    /// Gives the memory of the records' bytes back.
    pub fn forget_text(&mut self) {
        self.bytes = Vec::new();
        self.records.iter_mut().for_each(|r| r.content = Content::Null);
    }

    /// Bytes of a record; none where it has no usable content.
    pub fn bytes(&self, record: &Record) -> &[u8] {
        match &record.content {
            Content::Bytes(range) => &self.bytes[range.clone()],
            Content::Null | Content::TooLong(_) => &[],
        }
    }
}

/// What is read of the inputs.
#[derive(Debug, Clone)]
pub struct Wanted {
    /// Field or column that holds the text.
    pub field: String,
    /// Conditions whose fields a table's rows must bring along.
    pub keep: Arc<Vec<Condition>>,
    /// Longest record in bytes.
    pub max_record_bytes: u64,
    /// Files, or groups of small files, that are read at the same time.
    pub readers: usize,
    /// First record wanted.
    pub start: Place,
}

/// Longest record unless another bound is asked for: memory must have a bound, and a book has some megabytes.
pub const MAX_RECORD_BYTES: u64 = 1 << 30;

impl Wanted {
    /// Everything of the inputs.
    pub fn all(field: &str) -> Self {
        Self {
            field: field.into(),
            keep: Arc::default(),
            max_record_bytes: MAX_RECORD_BYTES,
            readers: 2,
            start: Place::default(),
        }
    }
}

/// `.jsonl`, `.ndjson` and `.json` are JSON lines, `.parquet` is Parquet, everything else is text; `.gz` and `.zst` are looked through.
pub fn layout_of(path: &Path) -> Layout {
    match compression::inner_extension(path).as_deref() {
        Some("jsonl" | "ndjson" | "json") => Layout::JsonLines,
        Some("parquet") => Layout::Parquet,
        _ => Layout::Text,
    }
}

impl Input {
    /// Looks at a file before anything starts. `layout` None: by its name.
    ///
    /// # Errors
    /// What cannot be read, folders, and compressed Parquet, which must be read from its end.
    pub fn find(path: &Path, layout: Option<Layout>) -> Result<Self> {
        let shown = path.display();
        let metadata = std::fs::metadata(path).map_err(|e| bad_input(format!("input {shown} cannot be read: {e}")))?;
        if metadata.is_dir() {
            return Err(bad_input(format!("input {shown} is a directory, where a file is needed")));
        }
        let layout = layout.unwrap_or_else(|| layout_of(path));
        if layout == Layout::Parquet && compression::of(path) != compression::Compression::None {
            let text = "is compressed as a whole, but Parquet is read from its end: unpack it (its pages are compressed already)";
            return Err(bad_input(format!("input {shown} {text}")));
        }
        Ok(Self { path: path.to_path_buf(), layout, file_bytes: metadata.len() })
    }

    /// Refuses a table without the columns that are asked for, or with columns of other types. Nothing for other layouts.
    pub fn check_columns(&self, field: &str, keep: &[Condition]) -> Result<()> {
        if self.layout == Layout::Parquet { parquet::check(self, field, keep) } else { Ok(()) }
    }

    /// "FILE" or "FILE line N".
    pub fn place(&self, line: u64) -> String {
        match (line, self.layout) {
            (0, _) => self.path.display().to_string(),
            (row, Layout::Parquet) => format!("{} row {row}", self.path.display()),
            (line, _) => format!("{} line {line}", self.path.display()),
        }
    }
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
