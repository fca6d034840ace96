//! The optimizer's verbs: AdamW on the embedding, Muon on the matrices of one block.

use anyhow::Result;

use super::super::synthetic::{matrix, weights};
use super::{Lines, Pass};
use crate::model::params::{OptimKind, ParamTable};
use crate::recipe::Recipe;
use crate::tensor::Backend;
use crate::tensor::backend::{AdamWStep, MuonItem, MuonStep};
use crate::tensor::work::{self, Work};

pub(super) fn measure<B: Backend>(b: &B, recipe: &Recipe, lines: &mut Lines) -> Result<()> {
    let (o, m) = (&recipe.optimizer, lines.model);
    let (rows, cols) = (m.vocab_size, m.hidden_size);
    let (mut w, g) = (weights(b, 1, rows, cols)?, matrix(b, 2, rows, cols)?);
    let (mut first, mut second) = (b.zeros(rows, cols)?, b.zeros(rows, cols)?);
    let mut step = AdamWStep {
        lr: recipe.schedule.lr as f32,
        beta1: o.adam_betas[0] as f32,
        beta2: o.adam_betas[1] as f32,
        eps: o.adam_eps as f32,
        weight_decay: o.adam_weight_decay as f32,
        t: 0,
        grad_scale: 1.0,
    };
    lines.verb("sq_norm (embedding)", Pass::Update, 1, work::sq_norm(rows * cols), || b.sq_norm(&g).map(drop))?;
    lines.verb("adamw (embedding)", Pass::Update, 1, work::adamw(rows * cols), || {
        step.t += 1;
        b.adamw(&mut w, &g, &mut first, &mut second, step)
    })?;
    drop((w, g, first, second));

    let table = ParamTable::new(m);
    let matrices = table.specs.iter().filter(|s| s.optim == OptimKind::Muon && s.block == Some(0));
    let mut total = Work::default();
    let mut held = Vec::new();
    for (i, spec) in matrices.enumerate() {
        let [rows, cols] = spec.matrix_shape();
        let blocks = if o.muon_split_gate_up && spec.is_gate_up() { 2 } else { 1 };
        total = total + work::muon(rows, cols, blocks, o.ns_steps);
        let stream = 10 + 2 * i as u64;
        held.push((weights(b, stream, rows, cols)?, matrix(b, stream + 1, rows, cols)?, b.zeros(rows, cols)?, blocks));
    }
    let step = MuonStep {
        lr: recipe.schedule.lr as f32,
        weight_decay: o.muon_weight_decay as f32,
        momentum: o.muon_momentum as f32,
        ns_steps: o.ns_steps,
        grad_scale: 1.0,
    };
    // A step updates all blocks in one call.
    lines.verb("muon (one block)", Pass::Update, m.num_blocks() as u64, total, || {
        let mut items: Vec<_> = held
            .iter_mut()
            .map(|(weight, grad, momentum, row_blocks)| MuonItem { weight, grad, momentum, row_blocks: *row_blocks })
            .collect();
        b.muon(&mut items, step)
    })
}
