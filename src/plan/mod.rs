//! Will it fit, how long will it take: sizes, FLOPs and memory before anything runs.

pub mod flops;
pub mod memory;
mod report;
pub mod sources;

use std::path::PathBuf;

use crate::model::params::{ParamGroup, ParamTable};
use crate::recipe::Recipe;

pub use flops::Flops;
pub use memory::MemoryPart;
pub use report::report;
pub use sources::SourcePlan;

/// What a recipe of one stage comes to. Several stages have one plan each, of [`Recipe::stage`].
#[derive(Debug, Clone)]
pub struct Plan {
    pub steps: u64,
    pub tokens_per_step: u64,
    pub total_tokens: u64,
    pub sequences_per_step: u64,
    pub micro_batches_per_step: u64,
    pub tokens_per_micro_batch: u64,
    /// Parameters of each group.
    pub groups: Vec<(ParamGroup, u64)>,
    pub parameters: u64,
    /// Parameters that work on one token, the embedding (and so the head) not counted.
    pub active_without_embedding: u64,
    /// The same with the tied head's matrix counted once.
    pub active_with_head: u64,
    pub flops: Flops,
    pub sources: Vec<SourcePlan>,
    /// Tokens that the sources cannot give, having been gone through as often as they may.
    pub missing_tokens: f64,
    pub validation: Vec<SourcePlan>,
}

impl Plan {
    /// Reads the headers of the data files that exist; nothing else of the machine.
    pub fn of(recipe: &Recipe) -> Self {
        Self::after(recipe, &[])
    }

    /// The same of a stage before which so many tokens of each source were used.
    pub fn after(recipe: &Recipe, earlier_tokens: &[f64]) -> Self {
        let table = ParamTable::new(&recipe.model);
        let (train, total_tokens) = (&recipe.train, recipe.train.total_tokens());
        let weights: f64 = recipe.data.sources.iter().map(|s| s.weight).sum();
        let mut sources: Vec<SourcePlan> =
            recipe.data.sources.iter().map(|s| SourcePlan::of(s, Some(s.weight / weights))).collect();
        let earlier = |i: usize| earlier_tokens.get(i).copied().unwrap_or(0.0);
        let limit = |(i, plan): (usize, &SourcePlan)| {
            let limit = recipe.data.sources[i].max_epochs? * plan.tokens_available? as f64;
            Some((limit - earlier(i)).max(0.0))
        };
        let limits: Vec<Option<f64>> = sources.iter().enumerate().map(limit).collect();
        let shares: Vec<f64> = sources.iter().filter_map(|s| s.share).collect();
        let used = sources::mixed(total_tokens as f64, &shares, &limits);
        let missing_tokens = total_tokens as f64 - used.iter().sum::<f64>();
        for (source, used) in sources.iter_mut().zip(used) {
            source.tokens_used = Some(used);
            source.share = Some(used / total_tokens as f64);
        }
        let active_without_embedding = table.active_without_embedding();
        Self {
            steps: train.steps,
            tokens_per_step: train.global_batch_tokens,
            total_tokens,
            sequences_per_step: train.sequences_per_step(),
            micro_batches_per_step: train.micro_batches_per_step(),
            tokens_per_micro_batch: train.sequences_at_once() as u64 * train.seq_len as u64,
            groups: ParamGroup::ALL.iter().map(|g| (*g, table.in_group(*g))).collect(),
            parameters: table.total(),
            active_without_embedding,
            active_with_head: active_without_embedding + table.in_group(ParamGroup::Embedding),
            flops: Flops::of(recipe, &table),
            sources,
            // Sums of shares round.
            missing_tokens: if missing_tokens < 1.0 { 0.0 } else { missing_tokens },
            validation: recipe.data.validation.iter().map(|s| SourcePlan::of(s, None)).collect(),
        }
    }
}

/// Files that a run of this recipe reads and that are not there: token shards (`.bin` and `.idx`) and the tokenizer.
pub fn missing_files(recipe: &Recipe) -> Vec<PathBuf> {
    let shards = recipe.data.sources.iter().chain(&recipe.data.validation).flat_map(|s| &s.shards);
    let files = shards.flat_map(|prefix| sources::shard_files(prefix)).chain(recipe.tokenizer.clone());
    let mut out: Vec<PathBuf> = files.filter(|f| !f.is_file()).collect();
    out.sort();
    out.dedup();
    out
}
