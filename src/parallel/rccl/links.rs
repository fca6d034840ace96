//! The communicators of a rank's device: one for each group of the mesh that it is in with others.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use hip_sys::{Event, Stream};

use super::super::mesh::Mesh;
use super::super::transport::Channel;
use super::super::zero::Shared;
use super::link::Link;
use super::watch::Watch;
use crate::tensor::hip::Hip;

pub struct Links {
    world: Option<Link>,
    /// Where experts are divided.
    expert_data: Option<Link>,
    pub context: Option<Link>,
    pub experts: Option<Link>,
    /// Of buckets: they travel while the main stream computes.
    pub aside: Stream,
    pub watch: Arc<Watch>,
    /// Last: memory and streams go when nothing uses them any more.
    pub hip: Hip,
}

impl Links {
    /// Joins the devices of all ranks of a mesh; they all call this. One that waits longer than `timeout` for the others ends the run.
    ///
    /// # Errors
    /// Without RCCL, when two ranks share a device, or when a rank does not come.
    pub fn join(hip: &Hip, mesh: &Mesh, timeout: Duration) -> Result<Arc<Self>> {
        mesh.comm.at(|place| place.phase = "joining devices");
        let watch = Watch::start(hip, mesh.comm.transport.clone(), timeout)?;
        let join = |group, channel, name| {
            Link::join(group, channel, name, &watch).with_context(|| format!("joining the {name} group of GPUs"))
        };
        Ok(Arc::new(Self {
            world: join(&mesh.world, Channel::Background, "world")?,
            expert_data: match mesh.layout.ep {
                1 => None,
                _ => join(&mesh.background_expert_data, Channel::Background, "expert-data")?,
            },
            context: join(&mesh.context, Channel::Main, "context")?,
            experts: join(&mesh.experts, Channel::Main, "expert")?,
            aside: Stream::new(hip.main_stream()?.hip())?,
            watch,
            hip: hip.clone(),
        }))
    }

    /// The ranks that share a kind of bucket; None: nobody else does.
    pub fn of(&self, shared: Shared) -> Option<&Link> {
        match shared {
            Shared::World => self.world.as_ref(),
            Shared::ExpertData => self.expert_data.as_ref(),
        }
    }

    /// Lets the stream aside wait for what the main one has been given.
    pub fn aside_waits(&self) -> Result<()> {
        let event = Event::new(self.aside.hip())?;
        event.record(self.hip.main_stream()?)?;
        Ok(self.aside.wait(&event)?)
    }

    /// Waits for all that is queued; what has arrived is sound if this returns.
    ///
    /// # Errors
    /// When an operation has failed, here or at another rank.
    pub fn settle(&self) -> Result<()> {
        let main = self.hip.main_stream()?;
        let waited = self.aside.synchronize().and_then(|()| main.synchronize());
        // Why communicators were aborted says more than that a stream has failed.
        self.watch.confirm()?;
        waited.context("waiting for the device")
    }

    /// Ends the communicators in order, together with the other ranks, when all work is done.
    pub fn finish(&self) {
        self.watch.finish();
    }
}

impl Drop for Links {
    fn drop(&mut self) {
        // Communicators end before the streams that they are used in.
        self.watch.abort();
        let _ = self.aside.synchronize();
    }
}
