//! Ranks with a GPU each: what they send each other goes from device to device by RCCL.
//!
//! | file | subject |
//! |---|---|
//! | `link` | a communicator of one group, and its operations on device memory |
//! | `watch` | a thread that sees operations that do not end, and ends them |
//! | `links` | the communicators of a mesh |
//! | `carrier` | buckets of gradients and weights |
//! | `context`, `experts` | keys and values, tokens of experts |
//! | `engine` | `Transport` over RCCL, for ranks that are processes |
//! | `meet` | how processes find each other, and how a failure reaches all of them |
//! | `near` | the processors next to a device |
//!
//! Two planes: small things that the host decides by (counts, losses, agreements) are messages of an engine, [`super::threads`] or
//! [`engine`]; gradients, weights, activations stay in device memory.

mod carrier;
mod context;
mod engine;
mod experts;
mod link;
mod links;
mod meet;
mod near;
mod watch;

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;

use super::context::Cutting;
use super::experts::Leaves;
use super::mesh::Mesh;
use super::together::{Others, Together};
use crate::model::ModelConfig;
use crate::model::peers::ContextPeers;
use crate::tensor::hip::Hip;

pub use carrier::OnDevice;
pub use context::DeviceContext;
pub use engine::RcclRank;
use experts::DeviceExperts;
pub use link::{Link, Parcel};
pub use links::Links;
pub use meet::address;
pub use near::bind_near;

/// A rank of several, with a device that is joined to the others'; all of them call this. One that waits longer than `timeout` for
/// another ends the run.
///
/// # Errors
/// Without RCCL, or when a rank does not come.
pub fn together(
    hip: &Hip,
    mesh: Arc<Mesh>,
    model: &ModelConfig,
    cutting: Cutting,
    bucket_bytes: usize,
    timeout: Duration,
) -> Result<Together<OnDevice>> {
    let links = Links::join(hip, &mesh, timeout)?;
    let layout = mesh.layout;
    let context = || Box::new(DeviceContext::new(links.clone(), cutting)) as Box<dyn ContextPeers<Hip>>;
    let experts = || Box::new(DeviceExperts::new(links.clone(), mesh.clone(), model.num_experts)) as Box<dyn Leaves<Hip>>;
    let others = Others { context: (layout.cp > 1).then(context), experts: (layout.ep > 1).then(experts) };
    Together::over(OnDevice::new(links.clone()), others, mesh.clone(), model, cutting, bucket_bytes)
}
