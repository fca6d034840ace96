//! A group of ranks on their devices: operations on device memory, queued in a stream.
//!
//! Pieces of a bucket differ in length, so a reduction of uneven pieces is one reduction to each piece's owner, and a gather one broadcast
//! from each: of RCCL's operations these move the fewest bytes. Even pieces take the operations that are made for them. RCCL sums in an
//! order of its own, the same whenever the same ranks of the same machines meet.

use std::ffi::c_void;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context as _, Result, anyhow};
use hip_sys::{Event, Stream};
use rccl_sys::{Communicator, DataType, Error, Op as Sum, Rccl, UniqueId};

use super::super::group::{Comm, Group};
use super::super::transport::{Channel, Op};
use super::watch::{Line, Watch};
use crate::failpoint;
use crate::tensor::hip::Kind;

pub struct Link {
    comm: Arc<Comm>,
    watch: Arc<Watch>,
    line: Arc<Line>,
    channel: Channel,
    /// Of the group.
    name: &'static str,
    /// Own place in the group.
    index: usize,
    sequence: AtomicU64,
}

/// Bytes on a device on their way to or from a member of the group.
#[derive(Debug, Clone, Copy)]
pub struct Parcel {
    pub member: usize,
    pub at: usize,
    pub bytes: usize,
}

fn data_type(kind: Kind) -> DataType {
    match kind {
        Kind::F32 => DataType::F32,
        Kind::Bf16 => DataType::Bf16,
    }
}

impl Link {
    /// Joins the members of `group` on their devices; all of them call this. None of a group of one.
    ///
    /// # Errors
    /// Without RCCL, or when another member does not come.
    pub fn join(group: &Group, channel: Channel, name: &'static str, watch: &Arc<Watch>) -> Result<Option<Self>> {
        if group.size() == 1 {
            return Ok(None);
        }
        let rccl = Rccl::open().context("opening RCCL, by which several GPUs exchange gradients and weights")?;
        let mut id = [0u8; UniqueId::BYTES];
        if group.index() == 0 {
            id = rccl.unique_id()?.to_bytes();
        }
        group.broadcast("identity of a communicator", 0, &mut id)?;
        let (index, size) = (group.index(), group.size());
        let communicator = Communicator::start(rccl, UniqueId::from_bytes(id), index as i32, size as i32)?;
        let line = Line::new(group.members().to_vec(), communicator);
        watch.add_line(&line);
        let comm = group.comm().clone();
        let link = Self { comm, watch: watch.clone(), line, channel, name, index, sequence: AtomicU64::new(0) };
        watch.until_ready(&link.op("joining of devices"), &link.line)?;
        Ok(Some(link))
    }

    pub fn index(&self) -> usize {
        self.index
    }

    pub fn size(&self) -> usize {
        self.line.members.len()
    }

    fn op(&self, name: &'static str) -> Op {
        let sequence = self.sequence.fetch_add(1, Ordering::Relaxed) + 1;
        Op { channel: self.channel, group: self.name, sequence, name, place: self.comm.place() }
    }

    /// Queues what `work` calls as one operation, and has it watched.
    fn queue(&self, name: &'static str, stream: &Stream, work: impl Fn(&Communicator) -> Result<(), Error>) -> Result<()> {
        failpoint::hit("comm")?;
        self.watch.check()?;
        let op = self.op(name);
        let (ready, done) = (Event::new(stream.hip())?, Event::new(stream.hip())?);
        ready.record(stream)?;
        let queued = self.line.with(|c| c.rccl().group(|| work(c)));
        match queued {
            Some(outcome) => outcome.map_err(|e| self.watch.refused(&op, e))?,
            None => {
                self.watch.check()?;
                return Err(anyhow!("{op}: the group has ended"));
            }
        }
        self.watch.until_ready(&op, &self.line)?;
        done.record(stream)?;
        self.watch.add(op, &self.line, ready, done);
        Ok(())
    }

    /// Sums f32 numbers of all members; piece i of the sum, `pieces[i]`, ends at member i. The rest is then of no use.
    ///
    /// # Safety
    /// `data`: device memory of as many numbers as the pieces reach, which nobody else touches until the stream has passed this.
    pub unsafe fn reduce_scatter(&self, name: &'static str, stream: &Stream, data: usize, pieces: &[Range<usize>]) -> Result<()> {
        let at = |n: usize| (data + n * Kind::F32.bytes()) as *mut c_void;
        if let Some(each) = even(pieces) {
            let own = at(pieces[self.index].start);
            // SAFETY: the caller's memory; in place, as RCCL wants it.
            let work = |c: &Communicator| unsafe { c.reduce_scatter(at(0), own, each, DataType::F32, Sum::Sum, stream) };
            return self.queue(name, stream, work);
        }
        self.queue(name, stream, |c| {
            pieces.iter().enumerate().filter(|(_, piece)| !piece.is_empty()).try_for_each(|(owner, piece)| {
                let place = at(piece.start);
                // SAFETY: as above.
                unsafe { c.reduce(place, place, piece.len(), DataType::F32, Sum::Sum, owner as i32, stream) }
            })
        })
    }

    /// Piece i of `data` goes from member i to all.
    ///
    /// # Safety
    /// As of `reduce_scatter`, of numbers of a kind.
    pub unsafe fn all_gather(
        &self,
        name: &'static str,
        stream: &Stream,
        data: usize,
        kind: Kind,
        pieces: &[Range<usize>],
    ) -> Result<()> {
        let at = |n: usize| (data + n * kind.bytes()) as *mut c_void;
        let numbers = data_type(kind);
        if let Some(each) = even(pieces) {
            let own = at(pieces[self.index].start);
            // SAFETY: the caller's memory; in place, as RCCL wants it.
            return self.queue(name, stream, |c| unsafe { c.all_gather(own, at(0), each, numbers, stream) });
        }
        self.queue(name, stream, |c| {
            pieces.iter().enumerate().filter(|(_, piece)| !piece.is_empty()).try_for_each(|(owner, piece)| {
                let place = at(piece.start);
                // SAFETY: as above.
                unsafe { c.broadcast(place, place, piece.len(), numbers, owner as i32, stream) }
            })
        })
    }

    /// Parcels between members, all at once; several to one member arrive in their order. Empty ones do not travel.
    ///
    /// # Safety
    /// As of `reduce_scatter`, of all parcels; what comes in does not overlap with anything else.
    pub unsafe fn exchange(&self, name: &'static str, stream: &Stream, outgoing: &[Parcel], incoming: &[Parcel]) -> Result<()> {
        let travels = |p: &&Parcel| p.bytes > 0;
        self.queue(name, stream, |c| {
            for p in outgoing.iter().filter(travels) {
                // SAFETY: the caller's memory.
                unsafe { c.send(p.at as *const c_void, p.bytes, DataType::U8, p.member as i32, stream) }?;
            }
            for p in incoming.iter().filter(travels) {
                // SAFETY: as above.
                unsafe { c.receive(p.at as *mut c_void, p.bytes, DataType::U8, p.member as i32, stream) }?;
            }
            Ok(())
        })
    }
}

/// The length of every piece, where all have the same and follow each other from the beginning.
fn even(pieces: &[Range<usize>]) -> Option<usize> {
    let each = pieces.first()?.len();
    let fits = pieces.iter().enumerate().all(|(i, p)| *p == (i * each..(i + 1) * each));
    (fits && each > 0).then_some(each)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn even_pieces_are_told_from_others() {
        assert_eq!(even(&[0..3, 3..6]), Some(3));
        assert_eq!(even(&[0..3, 3..7]), None);
        assert_eq!(even(&[1..3, 3..5]), None);
        assert_eq!(even(&[0..0, 0..0]), None);
    }
}
