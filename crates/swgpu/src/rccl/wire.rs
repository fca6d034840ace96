//! What ranks and hub send each other: little-endian 64-bit words, then bytes.

use std::io::{self, Read, Write};

/// What an operation does. Collectives need all ranks; sends and receives need their peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    AllReduce,
    Reduce,
    ReduceScatter,
    AllGather,
    Broadcast,
    AllToAll,
    Send,
    Receive,
    /// Colour in `count`, key in `root`.
    Split,
}

const KINDS: [Kind; 9] = [
    Kind::AllReduce,
    Kind::Reduce,
    Kind::ReduceScatter,
    Kind::AllGather,
    Kind::Broadcast,
    Kind::AllToAll,
    Kind::Send,
    Kind::Receive,
    Kind::Split,
];

/// One rank's part of an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    pub kind: Kind,
    /// `ncclDataType_t`.
    pub element: i32,
    /// `ncclRedOp_t` of reductions.
    pub reduction: i32,
    /// Root of a broadcast or reduction, peer of a send or receive, key of a split.
    pub root: i32,
    /// As the caller passed it; colour of a split.
    pub count: u64,
    pub payload: Vec<u8>,
}

impl Request {
    /// What all ranks must agree on.
    pub fn signature(&self) -> String {
        match self.kind {
            Kind::Split => "a split".into(),
            Kind::AllReduce | Kind::ReduceScatter => {
                format!("{:?} of {} elements of type {} by reduction {}", self.kind, self.count, self.element, self.reduction)
            }
            Kind::Reduce => format!(
                "{:?} of {} elements of type {} by reduction {} for rank {}",
                self.kind, self.count, self.element, self.reduction, self.root
            ),
            Kind::Broadcast => {
                format!("{:?} of {} elements of type {} from rank {}", self.kind, self.count, self.element, self.root)
            }
            _ => format!("{:?} of {} elements of type {}", self.kind, self.count, self.element),
        }
    }
}

pub fn write_words(stream: &mut impl Write, words: &[u64]) -> io::Result<()> {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    stream.write_all(&bytes)
}

pub fn read_word(stream: &mut impl Read) -> io::Result<u64> {
    let mut bytes = [0; 8];
    stream.read_exact(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

fn read_bytes(stream: &mut impl Read) -> io::Result<Vec<u8>> {
    let length = read_word(stream)?;
    let mut bytes = Vec::new();
    stream.take(length).read_to_end(&mut bytes)?;
    match bytes.len() as u64 == length {
        true => Ok(bytes),
        false => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

/// A group of operations, which run together.
pub fn write_batch(stream: &mut impl Write, batch: &[Request]) -> io::Result<()> {
    write_words(stream, &[batch.len() as u64])?;
    for request in batch {
        let kind = KINDS.iter().position(|&kind| kind == request.kind).unwrap_or(0) as u64;
        let signed = |value: i32| i64::from(value) as u64;
        let fields = [
            kind,
            signed(request.element),
            signed(request.reduction),
            signed(request.root),
            request.count,
            request.payload.len() as u64,
        ];
        write_words(stream, &fields)?;
        stream.write_all(&request.payload)?;
    }
    stream.flush()
}

pub fn read_batch(stream: &mut impl Read) -> io::Result<Vec<Request>> {
    let count = read_word(stream)?;
    (0..count)
        .map(|_| {
            let kind = KINDS.get(read_word(stream)? as usize).copied().ok_or(io::ErrorKind::InvalidData)?;
            let (element, reduction, root) = (read_word(stream)? as i32, read_word(stream)? as i32, read_word(stream)? as i32);
            Ok(Request { kind, element, reduction, root, count: read_word(stream)?, payload: read_bytes(stream)? })
        })
        .collect()
}

/// The hub's answer to a batch: a result per operation, or a status with a sentence.
pub type Reply = Result<Vec<Vec<u8>>, super::Failure>;

pub fn write_reply(stream: &mut impl Write, reply: &Reply) -> io::Result<()> {
    match reply {
        Ok(results) => {
            write_words(stream, &[0, results.len() as u64])?;
            for result in results {
                write_words(stream, &[result.len() as u64])?;
                stream.write_all(result)?;
            }
        }
        Err(failure) => {
            write_words(stream, &[failure.status as u64, failure.text.len() as u64])?;
            stream.write_all(failure.text.as_bytes())?;
        }
    }
    stream.flush()
}

pub fn read_reply(stream: &mut impl Read) -> io::Result<Reply> {
    let status = read_word(stream)?;
    if status == 0 {
        let count = read_word(stream)?;
        return Ok(Ok((0..count).map(|_| read_bytes(stream)).collect::<io::Result<_>>()?));
    }
    let text = String::from_utf8_lossy(&read_bytes(stream)?).into_owned();
    Ok(super::failure(status as i32, text))
}
