//! One optimizer step over the whole table: global-norm clipping, Muon for the matrices, AdamW for the rest.

use std::collections::BTreeMap;

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
    /// Largest norm of the gradient of one expert's weights; None = no such clipping. It comes before the global one.
    pub expert_clip: Option<f64>,
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
            expert_clip: None,
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

/// Sums of squares of the gradient, in f64: of every block of every parameter that is about to be updated, 0 for those that this rank
/// does not own. The blocks are the same in every layout; summed over the ranks they are those of one process.
pub fn grad_squares<B: Backend>(
    backend: &B,
    table: &ParamTable,
    grads: &ParamStore<B>,
    ownership: &Ownership,
    router_frozen: bool,
) -> Result<Vec<f64>> {
    let mut sums = Vec::new();
    for (id, spec) in table.specs.iter().enumerate().filter(|(_, spec)| is_updated(spec, router_frozen)) {
        for rows in zero::blocks_of(spec) {
            sums.push(if ownership.owns(id, &rows) { backend.sq_norm_rows(&grads[id], rows)? } else { 0.0 });
        }
    }
    Ok(sums)
}

/// How long the gradient is, and what clipping makes of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Clipping {
    /// Norm over every parameter that is about to be updated, each counted once, before any clipping.
    pub norm: f64,
    /// Factor on the gradient of each parameter, by id.
    pub scales: Vec<f64>,
    /// Experts whose gradient was longer than `expert_clip`.
    pub clipped_experts: usize,
}

impl Clipping {
    /// Of the [`grad_squares`] of all ranks, added up.
    pub fn of(table: &ParamTable, squares: &[f64], router_frozen: bool, cfg: &OptimizerConfig) -> Self {
        let (mut rest, mut of_params) = (squares, vec![0.0; table.specs.len()]);
        let mut experts: BTreeMap<(usize, usize), f64> = BTreeMap::new();
        for (id, spec) in table.specs.iter().enumerate().filter(|(_, spec)| is_updated(spec, router_frozen)) {
            let (own, after) = rest.split_at(zero::blocks_of(spec).count());
            rest = after;
            of_params[id] = own.iter().sum();
            if let (Some(block), Some(expert)) = (spec.block, spec.expert) {
                *experts.entry((block, expert)).or_default() += of_params[id];
            }
        }
        // In the order of the blocks, whatever the parameters.
        let norm = squares.iter().sum::<f64>().sqrt();
        let mut scales = vec![1.0; table.specs.len()];
        let (mut clipped_experts, mut clipped_norm) = (0, norm);
        if cfg.expert_clip.is_some() {
            experts.values_mut().for_each(|sum| *sum = clip_factor(sum.sqrt(), cfg.expert_clip));
            clipped_experts = experts.values().filter(|factor| **factor < 1.0).count();
            for (scale, spec) in scales.iter_mut().zip(&table.specs) {
                let factor = spec.block.zip(spec.expert).and_then(|place| experts.get(&place));
                *scale = factor.copied().unwrap_or(1.0);
            }
            if clipped_experts > 0 {
                clipped_norm = of_params.iter().zip(&scales).map(|(sum, scale)| sum * scale * scale).sum::<f64>().sqrt();
            }
        }
        let global = clip_factor(clipped_norm, cfg.clip);
        scales.iter_mut().for_each(|scale| *scale *= global);
        Self { norm, scales, clipped_experts }
    }
}

fn is_updated(spec: &ParamSpec, router_frozen: bool) -> bool {
    spec.optim != OptimKind::Balance && !(router_frozen && spec.group == ParamGroup::Router)
}

/// Factor on the gradients that keeps their norm at `clip`; the guard is PyTorch's.
fn clip_factor(norm: f64, clip: Option<f64>) -> f64 {
    clip.map_or(1.0, |clip| (clip / (norm + 1e-6)).min(1.0))
}

impl<B: Backend> OptimizerState<B> {
    /// Of what `ownership` says is updated here.
    pub fn zeros(backend: &B, table: &ParamTable, ownership: &Ownership) -> Result<Self> {
        let zeros = |(id, s): (ParamId, &ParamSpec)| Moments::zeros(backend, s, ownership.num_rows(id));
        let moments = table.specs.iter().enumerate().map(zeros).collect::<Result<_>>()?;
        Ok(Self { moments, updates: 0, router_updates: 0 })
    }

    /// Updates the rows of `params` that `ownership` names by the gradients of each parameter times its `scales`. A matrix whose
    /// gradient is zero only decays (its Newton-Schulz is zero).
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
        scales: &[f64],
        router_frozen: bool,
    ) -> Result<()> {
        self.updates += 1;
        self.router_updates += u64::from(!router_frozen);
        let lr = lr as f32;
        // Those of one factor are updated together: all of them, unless experts are clipped.
        let mut matrices: BTreeMap<u32, Vec<MuonItem<'_, B::Buf>>> = BTreeMap::new();
        let adamw = trace::phase(ADAMW);
        for (id, (weight, moments)) in params.iter_mut().zip(&mut self.moments).enumerate() {
            let spec = &table.specs[id];
            if !is_updated(spec, router_frozen) || ownership.num_rows(id) == 0 {
                continue;
            }
            let (grad, grad_scale) = (&grads[id], scales[id] as f32);
            match moments {
                Moments::Muon { momentum } => {
                    let row_blocks = if cfg.muon_split_gate_up && spec.is_gate_up() { 2 } else { 1 };
                    matrices.entry(grad_scale.to_bits()).or_default().push(MuonItem { weight, grad, momentum, row_blocks });
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
        let (weight_decay, momentum, ns_steps) = (cfg.muon_weight_decay, cfg.muon_momentum, cfg.ns_steps);
        for (bits, mut items) in matrices {
            backend.muon(&mut items, MuonStep { lr, weight_decay, momentum, ns_steps, grad_scale: f32::from_bits(bits) })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::presets;

    /// Expert 1 of block 0 has a gradient of norm 5 (3 in gate_up, 4 in down), all other parameters of norm 0.1.
    fn squares(table: &ParamTable) -> Vec<f64> {
        let mut out = Vec::new();
        for spec in table.specs.iter().filter(|spec| is_updated(spec, false)) {
            let norm: f64 = match (spec.block, spec.expert, spec.is_gate_up()) {
                (Some(0), Some(1), true) => 3.0,
                (Some(0), Some(1), false) => 4.0,
                _ => 0.1,
            };
            // All in the first of its blocks.
            out.push(norm * norm);
            out.extend(vec![0.0; zero::blocks_of(spec).count() - 1]);
        }
        out
    }

    #[test]
    fn one_expert_is_clipped_before_the_whole() {
        let table = ParamTable::new(&presets::demo_6m());
        let squares = squares(&table);
        let others = table.specs.iter().filter(|s| s.optim != OptimKind::Balance).count() - 2;
        let norm = (25.0 + 0.01 * others as f64).sqrt();
        let scale_of = |clipping: &Clipping, expert: usize| {
            let of = |(spec, scale): (&ParamSpec, &f64)| (spec.block == Some(0) && spec.expert == Some(expert)).then_some(*scale);
            let scales: Vec<f64> = table.specs.iter().zip(&clipping.scales).filter_map(of).collect();
            assert!(scales.len() == 2 && scales[0] == scales[1], "{scales:?}");
            scales[0]
        };
        let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-6 * b, "{a} {b}");

        let plain = Clipping::of(&table, &squares, false, &OptimizerConfig { clip: Some(1.0), ..Default::default() });
        near(plain.norm, norm);
        assert!(plain.clipped_experts == 0 && plain.scales.iter().all(|s| *s == plain.scales[0]));
        near(plain.scales[0], 1.0 / norm);

        let cfg = OptimizerConfig { clip: None, expert_clip: Some(2.0), ..Default::default() };
        let experts = Clipping::of(&table, &squares, false, &cfg);
        near(experts.norm, norm);
        assert_eq!(experts.clipped_experts, 1);
        near(scale_of(&experts, 1), 2.0 / 5.0);
        assert_eq!(scale_of(&experts, 0), 1.0);

        // The global norm is that of what the experts were clipped to.
        let both = Clipping::of(&table, &squares, false, &OptimizerConfig { clip: Some(1.0), ..cfg });
        let rest = (4.0 + 0.01 * others as f64).sqrt();
        near(scale_of(&both, 0), 1.0 / rest);
        near(scale_of(&both, 1), 0.4 / rest);

        // An expert without a gradient stays what it is.
        let none = Clipping::of(&table, &vec![0.0; squares.len()], false, &cfg);
        assert!(none.norm == 0.0 && none.scales.iter().all(|s| *s == 1.0));
    }
}
