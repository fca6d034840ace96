//! The products of a recipe's model, through `Backend::linear` and `linear_backward`, in both precisions.

use anyhow::Result;

use super::report::{GemmLine, Pass};
use super::synthetic::{matrix, weights};
use super::timing;
use crate::machine::Peaks;
use crate::model::ModelConfig;
use crate::recipe::Recipe;
use crate::tensor::Backend;
use crate::tensor::backend::Precision;
use crate::tensor::cpu::Cpu;
use crate::tensor::work;

/// `[m, k]` times `[n, k]` transposed, under the name of its weight.
pub(super) struct Product {
    pub name: &'static str,
    pub m: usize,
    pub n: usize,
    pub k: usize,
}

/// Numbers of an output that may exist at a time: the logits of a whole micro-batch of a large vocabulary would fill the memory.
const MOST_OUTPUT: usize = 1 << 24;

/// Of one micro-batch of `tokens` rows.
pub(super) fn products(m: &ModelConfig, tokens: usize) -> Vec<Product> {
    let (d, f, r) = (m.hidden_size, m.expert_width, m.router_width);
    // The mean; a router that is balanced gives about as many to each.
    let per_expert = tokens.div_ceil(m.num_experts);
    let head_rows = tokens.min((MOST_OUTPUT / m.vocab_size).max(256));
    let list = [
        ("attn.q", tokens, m.q_dim(), d),
        ("attn.k", tokens, m.kv_dim(), d),
        ("attn.v", tokens, m.kv_dim() / 2, d),
        ("attn.o", tokens, d, m.q_dim()),
        ("router.down", tokens, r, d),
        ("router.fc", tokens, r, r),
        ("router.out", tokens, m.num_classes(), r),
        ("expert.gate_up", per_expert, 2 * f, d),
        ("expert.down", per_expert, d, f),
        ("head", head_rows, m.vocab_size, d),
    ];
    list.into_iter().map(|(name, m, n, k)| Product { name, m, n, k }).collect()
}

pub fn measure(recipe: &Recipe, peaks: &Peaks, seconds: f64, progress: &dyn Fn(&str)) -> Result<Vec<GemmLine>> {
    let tokens = recipe.train.sequences_at_once() * recipe.train.seq_len;
    let mut lines = Vec::new();
    for p in products(&recipe.model, tokens) {
        progress(&format!("product {} ({} x {} x {})", p.name, p.m, p.n, p.k));
        for precision in [Precision::F32, Precision::Bf16] {
            let limit_gflops = peaks.gflops(precision).all_threads;
            for (pass, times, work) in one(&Cpu::with_head(precision, precision), &p, seconds)? {
                let gflops = work.flops / times.median_s / 1e9;
                lines.push(GemmLine {
                    name: p.name.into(),
                    pass,
                    precision,
                    m: p.m,
                    n: p.n,
                    k: p.k,
                    times,
                    flops: work.flops,
                    gflops,
                    limit_gflops,
                    fraction: gflops / limit_gflops,
                });
            }
        }
    }
    Ok(lines)
}

fn one<B: Backend>(b: &B, p: &Product, seconds: f64) -> Result<[(Pass, timing::Times, work::Work); 2]> {
    let (x, w) = (matrix(b, 1, p.m, p.k)?, weights(b, 2, p.n, p.k)?);
    let (dy, mut dw) = (matrix(b, 3, p.m, p.n)?, b.zeros(p.n, p.k)?);
    let forward = timing::measure(seconds, || b.linear(&x, &w).map(drop))?;
    let backward = timing::measure(seconds, || b.linear_backward(&x, &w, &dy, &mut dw).map(drop))?;
    Ok([(Pass::Forward, forward, work::linear(p.m, p.k, p.n)), (Pass::Backward, backward, work::linear_backward(p.m, p.k, p.n))])
}
