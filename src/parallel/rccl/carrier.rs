//! Buckets in device memory. They travel in a stream of their own, beside the one that computes: each waits for the other's events, and
//! the host for neither.

use std::ops::Range;
use std::sync::Arc;

use anyhow::{Result, ensure};
use hip_sys::Event;

use super::super::carrier::Carrier;
use super::super::forest;
use super::super::zero::Bucket;
use super::link::Parcel;
use super::links::Links;
use crate::tensor::hip::{Buf, Hip, Kind};

pub struct OnDevice {
    links: Arc<Links>,
}

/// A bucket on its way, and when it is there.
pub struct Sent {
    buffer: Buf,
    done: Option<Event>,
}

impl OnDevice {
    pub fn new(links: Arc<Links>) -> Self {
        Self { links }
    }

    fn hip(&self) -> &Hip {
        &self.links.hip
    }

    /// Marks the end of what the stream aside has been given.
    fn sent(&self, buffer: Buf) -> Result<Sent> {
        let done = Event::new(self.links.aside.hip())?;
        done.record(&self.links.aside)?;
        Ok(Sent { buffer, done: Some(done) })
    }
}

impl Carrier for OnDevice {
    type B = Hip;
    type Buffer = Buf;
    type Pending = Sent;
    /// Rows go where they belong as they come.
    type Arriving = ();

    fn buffer(&self, numbers: usize) -> Result<Buf> {
        self.hip().room(1, numbers, Kind::F32)
    }

    fn pack(&self, from: &Buf, numbers: Range<usize>, to: &mut Buf, at: usize) -> Result<()> {
        self.hip().copy_part(to, at, from, numbers)
    }

    fn unpack(&self, from: &Buf, at: Range<usize>, to: &mut Buf, numbers: usize) -> Result<()> {
        self.hip().copy_part(to, numbers, from, at)
    }

    fn open(&self, _: &mut Buf) {}

    fn pack_open(&self, weight: &Buf, (): &(), numbers: Range<usize>, to: &mut Buf, at: usize) -> Result<()> {
        self.pack(weight, numbers, to, at)
    }

    fn arrive(&self, from: &Buf, at: Range<usize>, weight: &Buf, (): &mut (), numbers: usize) -> Result<()> {
        self.hip().copy_arrived(weight, numbers, from, at)
    }

    fn close(&self, _: &Buf, (): ()) {}

    fn reduce(&self, bucket: &Bucket, mut buffer: Buf) -> Result<Sent> {
        let Some(link) = self.links.of(bucket.shared) else { return Ok(Sent { buffer, done: None }) };
        self.links.aside_waits()?;
        let at = buffer.address_mut(0);
        // SAFETY: the buffer is that of all pieces, and nobody has it before `wait`.
        unsafe { link.reduce_scatter("reduce-scatter of gradients", &self.links.aside, at, &bucket.pieces) }?;
        self.sent(buffer)
    }

    fn gather(&self, bucket: &Bucket, mut buffer: Buf) -> Result<Sent> {
        let Some(link) = self.links.of(bucket.shared) else { return Ok(Sent { buffer, done: None }) };
        self.links.aside_waits()?;
        let at = buffer.address_mut(0);
        // SAFETY: as above.
        unsafe { link.all_gather("all-gather of weights", &self.links.aside, at, Kind::F32, &bucket.pieces) }?;
        self.sent(buffer)
    }

    fn wait(&self, Sent { buffer, done }: Sent) -> Result<Buf> {
        if let Some(done) = done {
            self.hip().main_stream()?.wait(&done)?;
        }
        Ok(buffer)
    }

    fn settle(&self) -> Result<()> {
        self.links.settle()
    }

    /// Every piece of every node goes to the piece's owner, who sums them in the order of the tree.
    fn reduce_tree(&self, bucket: &Bucket, nodes: Vec<(usize, Buf)>, starts: &[Vec<usize>]) -> Result<Buf> {
        let hip = self.hip();
        let me = self.links.of(bucket.shared).map_or(0, |link| link.index());
        let own = bucket.pieces[me].clone();
        let mut parts = Vec::new();
        for (start, node) in &nodes {
            let mut part = hip.room(1, own.len(), Kind::F32)?;
            hip.copy_part(&mut part, 0, node, own.clone())?;
            parts.push((*start, part));
        }
        if let Some(link) = self.links.of(bucket.shared) {
            let bytes = |piece: &Range<usize>| piece.len() * Kind::F32.bytes();
            let (mut outgoing, mut incoming) = (Vec::new(), Vec::new());
            for member in (0..link.size()).filter(|m| *m != me) {
                let piece = &bucket.pieces[member];
                outgoing.extend(nodes.iter().map(|(_, node)| Parcel {
                    member,
                    at: node.address(piece.start),
                    bytes: bytes(piece),
                }));
                for start in &starts[member] {
                    let mut part = hip.room(1, own.len(), Kind::F32)?;
                    incoming.push(Parcel { member, at: part.address_mut(0), bytes: bytes(&own) });
                    parts.push((*start, part));
                }
            }
            // SAFETY: buffers of this backend, used in its stream alone.
            unsafe { link.exchange("tree of gradients", hip.main_stream()?, &outgoing, &incoming) }?;
        }
        parts.sort_by_key(|(start, _)| *start);
        ensure!(parts.is_sorted_by(|(a, _), (b, _)| a < b), "parts of a tree are distinct, and in order");
        match forest::sum(parts, |a, b| hip.add_part(a, 0, &b, 0..b.len()))? {
            Some(sum) => Ok(sum),
            None => {
                let mut none = hip.room(1, own.len(), Kind::F32)?;
                crate::tensor::Backend::clear(hip, &mut none)?;
                Ok(none)
            }
        }
    }

    fn finish(&self) {
        self.links.finish();
    }
}
