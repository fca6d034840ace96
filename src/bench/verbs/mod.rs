//! Every fused verb of `trait Backend`, forward and backward, at a recipe's micro-batch.

mod layers;
mod optimizer;
mod pointwise;

use anyhow::Result;

use super::report::{Pass, VerbLine};
use super::{synthetic, timing};
use crate::machine::Peaks;
use crate::model::ModelConfig;
use crate::recipe::Recipe;
use crate::tensor::Backend;
use crate::tensor::backend::Batch;
use crate::tensor::cpu::Cpu;
use crate::tensor::work::{Limits, Work};

pub fn measure(recipe: &Recipe, peaks: &Peaks, seconds: f64, progress: &dyn Fn(&str)) -> Result<Vec<VerbLine>> {
    let train = &recipe.train;
    let mut lines = Lines {
        model: &recipe.model,
        batch: synthetic::batch(1, recipe.model.vocab_size, train.micro_batch, train.seq_len),
        micro_batches: train.micro_batches_per_step(),
        seconds,
        limits: peaks.limits(train.precision),
        progress,
        done: Vec::new(),
    };
    all(&Cpu::with_head(train.precision, train.head_precision), recipe, &mut lines)?;
    Ok(lines.done)
}

fn all<B: Backend>(b: &B, recipe: &Recipe, lines: &mut Lines) -> Result<()> {
    pointwise::embedding(b, lines)?;
    pointwise::scales(b, lines)?;
    layers::attention(b, lines)?;
    layers::moe(b, lines)?;
    layers::head(b, lines)?;
    optimizer::measure(b, recipe, lines)
}

/// The lines measured so far, and what every one of them needs.
struct Lines<'a> {
    model: &'a ModelConfig,
    /// Tokens of one micro-batch.
    batch: Batch,
    /// A step's.
    micro_batches: u64,
    seconds: f64,
    limits: Limits,
    progress: &'a dyn Fn(&str),
    done: Vec<VerbLine>,
}

impl Lines<'_> {
    /// Times a verb, of which a step makes `calls`.
    fn verb(&mut self, name: &str, pass: Pass, calls: u64, work: Work, f: impl FnMut() -> Result<()>) -> Result<()> {
        (self.progress)(&format!("verb {name}, {}", pass.name()));
        let times = timing::measure(self.seconds, f)?;
        self.done.push(VerbLine::new(name.into(), pass, calls, times, work, self.limits));
        Ok(())
    }
}
