//! One optimizer step over the whole table: global-norm clipping, Muon for the matrices, AdamW for the rest.

use anyhow::Result;

use crate::model::params::{OptimKind, ParamGroup, ParamId, ParamSpec, ParamTable};
use crate::model::store::ParamStore;
use crate::parallel::zero::{self, Ownership};
use crate::tensor::backend::{AdamWStep, Backend, MuonItem, MuonStep};
use crate::tensor::trace;

/// Names of the two parts of an update, in a recording.
pub const ADAMW: &str = "AdamW update";
pub const MUON: &str = "Muon update";

/// What a recipe says of the optimizers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OptimizerConfig {
    pub muon_momentum: f32,
    pub muon_weight_decay: f32,
    pub ns_steps: usize,
    /// Orthogonalise gate and up of an expert as two matrices.
    pub muon_split_gate_up: bool,
    pub adam_beta1: f32,
    pub adam_beta2: f32,
    pub adam_eps: f32,
    pub adam_weight_decay: f32,
    /// Largest global gradient norm; None = no clipping.
    pub clip: Option<f64>,
}

impl Default for OptimizerConfig {
    fn default() -> Self {
        Self {
            muon_momentum: 0.95,
            muon_weight_decay: 0.1,
            ns_steps: 5,
            muon_split_gate_up: false,
            adam_beta1: 0.9,
            adam_beta2: 0.95,
            adam_eps: 1e-8,
            adam_weight_decay: 0.0,
            clip: Some(1.0),
        }
    }
}

/// Optimizer state of one parameter.
pub enum Moments<B: Backend> {
    Muon {
        momentum: B::Buf,
    },
    AdamW {
        m: B::Buf,
        v: B::Buf,
    },
    /// Balancing biases: their state belongs to the balancing controller.
    None,
}

impl<B: Backend> Moments<B> {
    /// Of `rows` rows, those that are updated here.
    fn zeros(backend: &B, spec: &ParamSpec, rows: usize) -> Result<Self> {
        let cols = spec.matrix_shape()[1];
        Ok(match spec.optim {
            OptimKind::Muon => Self::Muon { momentum: backend.zeros(rows, cols)? },
            OptimKind::AdamW => Self::AdamW { m: backend.zeros(rows, cols)?, v: backend.zeros(rows, cols)? },
            OptimKind::Balance => Self::None,
        })
    }

    /// The state's buffers with their names in a checkpoint.
    pub fn named_mut(&mut self) -> Vec<(&'static str, &mut B::Buf)> {
        match self {
            Self::Muon { momentum } => vec![("mom", momentum)],
            Self::AdamW { m, v } => vec![("m", m), ("v", v)],
            Self::None => Vec::new(),
        }
    }

    pub fn named(&self) -> Vec<(&'static str, &B::Buf)> {
        match self {
            Self::Muon { momentum } => vec![("mom", momentum)],
            Self::AdamW { m, v } => vec![("m", m), ("v", v)],
            Self::None => Vec::new(),
        }
    }
}

/// Optimizer state of a whole model, in table order.
pub struct OptimizerState<B: Backend> {
    pub moments: Vec<Moments<B>>,
    /// Updates made so far, for AdamW's bias correction; routers count apart, since they may be frozen.
    pub updates: u64,
    pub router_updates: u64,
}

/// Norm of the gradient over every parameter that is about to be updated, each counted once, in f64. Each rank brings the sums of
/// the blocks it owns, and `share` adds up what all of them bring: the blocks are the same in every layout, and so is the order
/// in which their sums are added.
pub fn grad_norm<B: Backend>(
    backend: &B,
    table: &ParamTable,
    grads: &ParamStore<B>,
    ownership: &Ownership,
    router_frozen: bool,
    share: impl FnOnce(&mut [f64]) -> Result<()>,
) -> Result<f64> {
    let mut sums = Vec::new();
    for (id, spec) in table.specs.iter().enumerate().filter(|(_, spec)| is_updated(spec, router_frozen)) {
        for rows in zero::blocks_of(spec) {
            sums.push(if ownership.owns(id, &rows) { backend.sq_norm_rows(&grads[id], rows)? } else { 0.0 });
        }
    }
    share(&mut sums)?;
    Ok(sums.iter().sum::<f64>().sqrt())
}

fn is_updated(spec: &ParamSpec, router_frozen: bool) -> bool {
    spec.optim != OptimKind::Balance && !(router_frozen && spec.group == ParamGroup::Router)
}

/// Factor on the gradients that keeps their norm at `clip`; the guard is PyTorch's.
pub fn clip_factor(norm: f64, clip: Option<f64>) -> f64 {
    clip.map_or(1.0, |clip| (clip / (norm + 1e-6)).min(1.0))
}

impl<B: Backend> OptimizerState<B> {
    /// Of what `ownership` says is updated here.
    pub fn zeros(backend: &B, table: &ParamTable, ownership: &Ownership) -> Result<Self> {
        let zeros = |(id, s): (ParamId, &ParamSpec)| Moments::zeros(backend, s, ownership.num_rows(id));
        let moments = table.specs.iter().enumerate().map(zeros).collect::<Result<_>>()?;
        Ok(Self { moments, updates: 0, router_updates: 0 })
    }

    /// Updates the rows of `params` that `ownership` names by `grads * grad_scale`. A matrix whose gradient is zero only decays
    /// (its Newton-Schulz is zero).
    #[allow(clippy::too_many_arguments)]
    pub fn update(
        &mut self,
        backend: &B,
        table: &ParamTable,
        params: &mut ParamStore<B>,
        grads: &ParamStore<B>,
        ownership: &Ownership,
        cfg: &OptimizerConfig,
        lr: f64,
        grad_scale: f64,
        router_frozen: bool,
    ) -> Result<()> {
        self.updates += 1;
        self.router_updates += u64::from(!router_frozen);
        let (lr, grad_scale) = (lr as f32, grad_scale as f32);
        let mut matrices = Vec::new();
        let adamw = trace::phase(ADAMW);
        for (id, (weight, moments)) in params.iter_mut().zip(&mut self.moments).enumerate() {
            let spec = &table.specs[id];
            if !is_updated(spec, router_frozen) || ownership.num_rows(id) == 0 {
                continue;
            }
            let grad = &grads[id];
            match moments {
                Moments::Muon { momentum } => {
                    let row_blocks = if cfg.muon_split_gate_up && spec.is_gate_up() { 2 } else { 1 };
                    matrices.push(MuonItem { weight, grad, momentum, row_blocks });
                }
                Moments::AdamW { m, v } => {
                    let step = AdamWStep {
                        lr,
                        beta1: cfg.adam_beta1,
                        beta2: cfg.adam_beta2,
                        eps: cfg.adam_eps,
                        weight_decay: cfg.adam_weight_decay,
                        t: if spec.group == ParamGroup::Router { self.router_updates } else { self.updates },
                        grad_scale,
                    };
                    let mut at = 0;
                    for rows in ownership.rows(id) {
                        backend.adamw_rows(weight, grad, rows.clone(), m, v, at, step)?;
                        at += rows.len();
                    }
                }
                Moments::None => {}
            }
        }
        drop(adamw);
        let _muon = trace::phase(MUON);
        let step =
            MuonStep { lr, weight_decay: cfg.muon_weight_decay, momentum: cfg.muon_momentum, ns_steps: cfg.ns_steps, grad_scale };
        backend.muon(&mut matrices, step)
    }
}
