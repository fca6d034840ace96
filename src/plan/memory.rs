//! Estimate of the memory that training takes, part by part.

use crate::model::params::{OptimKind, ParamTable};
use crate::recipe::{Precision, Recipe};

#[derive(Debug, Clone, PartialEq)]
pub struct MemoryPart {
    pub name: &'static str,
    pub bytes: u64,
}

/// Rows of logits that exist at a time, as the estimate sees it.
pub const LOGITS_ROWS: u64 = 256;
const F32: u64 = 4;

/// Parts of the peak on one process. Weights, gradients and optimizer state are exact; activations are those that forward
/// keeps for backward without recomputation, and like the working buffers they are an estimate.
pub fn estimate(recipe: &Recipe, table: &ParamTable) -> Vec<MemoryPart> {
    let of_kind = |kind: OptimKind| -> u64 { table.specs.iter().filter(|s| s.optim == kind).map(|s| s.numel() as u64).sum() };
    let (muon, adamw, balance) = (of_kind(OptimKind::Muon), of_kind(OptimKind::AdamW), of_kind(OptimKind::Balance));
    let total = muon + adamw;
    let bf16 = recipe.train.precision == Precision::Bf16;
    let number = if bf16 { 2 } else { F32 };
    let m = &recipe.model;
    let tokens = recipe.train.micro_batch as u64 * recipe.train.seq_len as u64;
    let u = |n: usize| n as u64;
    let (d, q, kv, conv) = (u(m.hidden_size), u(m.q_dim()), u(m.kv_dim()), u(m.conv_dim()));
    let (f, r, classes, heads) = (u(m.expert_width), u(m.router_width), u(m.num_classes()), u(m.num_query_heads));

    // What backward needs of one token in one block: the stream before each merge in f32, and in the compute type both
    // normed inputs and both branch outputs, the projections before and after mixing, both convolutions, attention's
    // output, the router's layers, and an expert's gate, up and product.
    let block_f32 = 2 * d + heads + 2 * classes;
    let block = 4 * d + 2 * (q + 2 * kv) + 2 * conv + q + 6 * r + 3 * f;
    let activations = tokens * (u(m.num_blocks()) * (block_f32 * F32 + block * number) + 2 * d * F32);
    let working = tokens * F32 * (3 * d + (3 * f).max(2 * (q + 2 * kv)));
    let newton_schulz = table
        .specs
        .iter()
        .filter(|s| s.optim == OptimKind::Muon)
        .map(|s| {
            let [rows, cols] = s.matrix_shape();
            let small = u(rows.min(cols));
            (2 * u(rows) * u(cols) + 2 * small * small) * F32
        })
        .max()
        .unwrap_or(0);

    let mut out = vec![MemoryPart { name: "weights (f32)", bytes: (total + balance) * F32 }];
    if bf16 {
        out.push(MemoryPart { name: "weights (bf16 copy)", bytes: total * 2 });
    }
    out.extend([
        MemoryPart { name: "gradients (f32)", bytes: total * F32 },
        MemoryPart { name: "optimizer state (f32)", bytes: (muon + 2 * adamw + 2 * balance) * F32 },
        MemoryPart { name: "activations of a micro-batch", bytes: activations },
        MemoryPart { name: "working buffers of backward", bytes: working },
        MemoryPart { name: "logits, one chunk of rows", bytes: tokens.min(LOGITS_ROWS) * u(m.vocab_size) * F32 },
        MemoryPart { name: "Newton-Schulz, largest matrix", bytes: newton_schulz },
    ]);
    out
}
