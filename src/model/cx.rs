//! What every layer needs besides its own numbers: the backend, the weights, the micro-batch.

use super::peers::Peers;
use super::store::ParamStore;
use crate::tensor::backend::{Backend, PinnedRoutes};

/// Sees intermediate results as the model produces them (`zaya debug forward`). Training runs without one.
pub trait Probe<B: Backend> {
    /// A buffer under the name that `zaya debug forward` writes, e.g. `layers.0.attn.out`.
    fn buf(&self, name: &str, value: &B::Buf);
    /// What went into `cca_mix` of one block.
    fn cca_inputs(&self, block: usize, x: &crate::tensor::backend::CcaIn<B::Buf>);
    /// What the router of one block decided.
    fn routing(&self, block: usize, routing: &B::Routing, saved: &B::RouteSaved, state: &B::Buf);
}

pub struct Cx<'a, B: Backend> {
    pub backend: &'a B,
    pub params: &'a ParamStore<B>,
    pub rows: &'a B::Rows,
    pub probe: Option<&'a dyn Probe<B>>,
    /// One entry per block: routes that replace the routers' choices.
    pub pinned: Option<&'a [PinnedRoutes]>,
    pub peers: Peers<'a, B>,
}

impl<'a, B: Backend> Cx<'a, B> {
    /// For training and plain evaluation on one rank.
    pub fn new(backend: &'a B, params: &'a ParamStore<B>, rows: &'a B::Rows) -> Self {
        Self { backend, params, rows, probe: None, pinned: None, peers: Peers::none() }
    }

    /// Shows a buffer to the probe, if there is one.
    pub fn see(&self, name: impl FnOnce() -> String, value: &B::Buf) {
        if let Some(probe) = self.probe {
            probe.buf(&name(), value);
        }
    }
}
