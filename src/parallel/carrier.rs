//! How buckets travel: what [`super::exchange`] asks of the memory that they lie in. [`OnHost`] is for the processor's.

use std::ops::Range;
use std::sync::Arc;

use anyhow::Result;

use super::background::{Background, Pending};
use super::group::Group;
use super::mesh::Mesh;
use super::zero::{Bucket, Shared};
use crate::tensor::Backend;
use crate::tensor::cpu::{Buf, Cpu};

pub trait Carrier {
    type B: Backend;
    /// f32 numbers that travel together.
    type Buffer;
    /// A buffer on its way.
    type Pending;
    /// A weight that waits for rows.
    type Arriving;

    fn buffer(&self, numbers: usize) -> Result<Self::Buffer>;

    /// Numbers `at..` of the buffer become `numbers` of `from`.
    fn pack(&self, from: &<Self::B as Backend>::Buf, numbers: Range<usize>, to: &mut Self::Buffer, at: usize) -> Result<()>;

    /// Numbers `numbers..` of `to` become those of the buffer in `at`.
    fn unpack(&self, from: &Self::Buffer, at: Range<usize>, to: &mut <Self::B as Backend>::Buf, numbers: usize) -> Result<()>;

    /// Rows of a weight are about to come while it is shared.
    fn open(&self, weight: &mut <Self::B as Backend>::Buf) -> Self::Arriving;

    /// As `pack`, of a weight that waits for rows.
    fn pack_open(
        &self,
        weight: &<Self::B as Backend>::Buf,
        arriving: &Self::Arriving,
        numbers: Range<usize>,
        to: &mut Self::Buffer,
        at: usize,
    ) -> Result<()>;

    /// As `unpack`, into a weight that waits for rows.
    fn arrive(
        &self,
        from: &Self::Buffer,
        at: Range<usize>,
        weight: &<Self::B as Backend>::Buf,
        arriving: &mut Self::Arriving,
        numbers: usize,
    ) -> Result<()>;

    /// All rows have come.
    fn close(&self, weight: &<Self::B as Backend>::Buf, arriving: Self::Arriving);

    /// Begins to sum a bucket over the ranks that share it; each of them gets its piece.
    fn reduce(&self, bucket: &Bucket, buffer: Self::Buffer) -> Result<Self::Pending>;

    /// Begins to bring every rank's piece to all.
    fn gather(&self, bucket: &Bucket, buffer: Self::Buffer) -> Result<Self::Pending>;

    /// What is done with the buffer from now on, is done when it has arrived.
    fn wait(&self, pending: Self::Pending) -> Result<Self::Buffer>;

    /// Waits until all that has been waited for is really there, and sound.
    fn settle(&self) -> Result<()>;

    /// Own piece of the sum of what the ranks have of a tree over sequences: `nodes` by start, and the starts that every member of the group
    /// has.
    fn reduce_tree(&self, bucket: &Bucket, nodes: Vec<(usize, Self::Buffer)>, starts: &[Vec<usize>]) -> Result<Self::Buffer>;

    /// All work is done: parts from the other ranks in order.
    fn finish(&self) {}
}

/// Buckets in the host's memory; a thread of their own sends them.
pub struct OnHost {
    mesh: Arc<Mesh>,
    background: Background,
}

impl OnHost {
    pub fn new(mesh: Arc<Mesh>) -> Result<Self> {
        Ok(Self { background: Background::start(mesh.rank)?, mesh })
    }

    fn group(&self, bucket: &Bucket) -> Arc<Group> {
        match bucket.shared {
            Shared::World => self.mesh.background_world.clone(),
            Shared::ExpertData => self.mesh.background_expert_data.clone(),
        }
    }
}

impl Carrier for OnHost {
    type B = Cpu;
    type Buffer = Vec<f32>;
    type Pending = Pending<Vec<f32>>;
    /// The weight's own numbers.
    type Arriving = Vec<f32>;

    fn buffer(&self, numbers: usize) -> Result<Vec<f32>> {
        Ok(vec![0.0; numbers])
    }

    fn pack(&self, from: &Buf, numbers: Range<usize>, to: &mut Vec<f32>, at: usize) -> Result<()> {
        to[at..at + numbers.len()].copy_from_slice(&from.data()[numbers]);
        Ok(())
    }

    fn unpack(&self, from: &Vec<f32>, at: Range<usize>, to: &mut Buf, numbers: usize) -> Result<()> {
        to.data_mut()[numbers..numbers + at.len()].copy_from_slice(&from[at]);
        Ok(())
    }

    fn open(&self, weight: &mut Buf) -> Vec<f32> {
        weight.take()
    }

    fn pack_open(&self, _: &Buf, arriving: &Vec<f32>, numbers: Range<usize>, to: &mut Vec<f32>, at: usize) -> Result<()> {
        to[at..at + numbers.len()].copy_from_slice(&arriving[numbers]);
        Ok(())
    }

    fn arrive(&self, from: &Vec<f32>, at: Range<usize>, _: &Buf, arriving: &mut Vec<f32>, numbers: usize) -> Result<()> {
        arriving[numbers..numbers + at.len()].copy_from_slice(&from[at]);
        Ok(())
    }

    fn close(&self, weight: &Buf, arriving: Vec<f32>) {
        weight.put(arriving);
    }

    fn reduce(&self, bucket: &Bucket, mut buffer: Vec<f32>) -> Result<Self::Pending> {
        let (group, pieces) = (self.group(bucket), bucket.pieces.clone());
        Ok(self.background.submit(move || {
            group.reduce_scatter("reduce-scatter of gradients", &mut buffer, &pieces)?;
            Ok(buffer)
        }))
    }

    fn gather(&self, bucket: &Bucket, mut buffer: Vec<f32>) -> Result<Self::Pending> {
        let (group, pieces) = (self.group(bucket), bucket.pieces.clone());
        Ok(self.background.submit(move || {
            group.all_gather("all-gather of weights", &mut buffer, &pieces)?;
            Ok(buffer)
        }))
    }

    fn wait(&self, pending: Self::Pending) -> Result<Vec<f32>> {
        pending.wait()
    }

    fn settle(&self) -> Result<()> {
        Ok(())
    }

    fn reduce_tree(&self, bucket: &Bucket, nodes: Vec<(usize, Vec<f32>)>, starts: &[Vec<usize>]) -> Result<Vec<f32>> {
        self.group(bucket).reduce_tree("tree of gradients", &nodes, starts, &bucket.pieces)
    }
}
