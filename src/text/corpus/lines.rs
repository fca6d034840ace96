//! Cutting a stream into records: lines, or the whole.

use std::io::{self, BufRead};

use super::read::{Batcher, Stop};
use super::{Content, Place};

const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

type Cut<'a> = &'a dyn Fn(io::Error, u64) -> Stop;

/// Lines of a file from `start` on. Blank ones are no records. `cut` explains an error after so many records.
pub(super) fn read_lines(reader: &mut dyn BufRead, start: Place, most: u64, out: &mut Batcher, cut: Cut) -> Result<(), Stop> {
    let mut line = Line { place: Place { line: start.line.max(1), ..start }, start: out.len(), length: 0, most };
    let mut records = 0;
    loop {
        let chunk = reader.fill_buf().map_err(|e| cut(e, records))?;
        if chunk.is_empty() {
            break;
        }
        let (size, mut rest) = (chunk.len(), chunk);
        while let Some(at) = memchr::memchr(b'\n', rest) {
            line.append(&rest[..at], out)?;
            records += u64::from(line.finish(out)?);
            rest = &rest[at + 1..];
        }
        line.append(rest, out)?;
        reader.consume(size);
    }
    if line.length > 0 {
        line.finish(out)?;
    }
    Ok(())
}

/// The whole file as one record.
pub(super) fn read_whole(reader: &mut dyn BufRead, input: usize, most: u64, out: &mut Batcher, cut: Cut) -> Result<(), Stop> {
    let mut text = Line { place: Place { input, line: 0, byte: 0 }, start: out.len(), length: 0, most };
    loop {
        let chunk = reader.fill_buf().map_err(|e| cut(e, 0))?;
        if chunk.is_empty() {
            break;
        }
        text.append(chunk, out)?;
        let size = chunk.len();
        reader.consume(size);
    }
    let content = text.content(out);
    out.push(text.place, content)
}

/// The record that is being read.
struct Line {
    place: Place,
    /// Where it begins in the block.
    start: usize,
    /// Bytes of it so far, those that were thrown away included.
    length: u64,
    /// Bytes that are kept at most.
    most: u64,
}

impl Line {
    fn append(&mut self, bytes: &[u8], out: &mut Batcher) -> Result<(), Stop> {
        self.length += bytes.len() as u64;
        if self.length <= self.most {
            return out.append(self.start, bytes);
        }
        out.take_back(self.start);
        Ok(())
    }

    fn content(&self, out: &mut Batcher) -> Content {
        if self.length > self.most {
            return Content::TooLong(self.length);
        }
        if self.place.byte == 0 && out.bytes_from(self.start).starts_with(BYTE_ORDER_MARK) {
            out.cut_front(self.start, BYTE_ORDER_MARK.len());
        }
        Content::Bytes(self.start..out.len())
    }

    /// The line is complete; true if it is a record.
    fn finish(&mut self, out: &mut Batcher) -> Result<bool, Stop> {
        let content = self.content(out);
        let blank =
            matches!(&content, Content::Bytes(_)) && out.bytes_from(self.start).iter().all(|b| matches!(b, b' ' | b'\t' | b'\r'));
        if blank {
            out.take_back(self.start);
        } else {
            out.push(self.place, content)?;
        }
        self.place.line += 1;
        self.place.byte += self.length + 1;
        (self.start, self.length) = (out.len(), 0);
        Ok(!blank)
    }
}
