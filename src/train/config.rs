//! What a recipe says of training, as the step takes it.

use crate::data::{LoaderConfig, SourceSpec};
use crate::optim::balance::{BalanceConfig, Rule};
use crate::optim::update::OptimizerConfig;
use crate::recipe::{Balance, DataSource, Deterministic, Recipe};

use super::step::StepConfig;

impl StepConfig {
    pub fn of(r: &Recipe) -> Self {
        let by_sequence = (r.train.deterministic == Deterministic::Layout).then(|| r.train.sequences_per_step() as usize);
        Self { optimizer: optimizer_config(r), router_freeze_tokens: r.router.freeze_tokens, by_sequence }
    }
}

pub fn optimizer_config(r: &Recipe) -> OptimizerConfig {
    let o = &r.optimizer;
    OptimizerConfig {
        muon_momentum: o.muon_momentum as f32,
        muon_weight_decay: o.muon_weight_decay as f32,
        ns_steps: o.ns_steps,
        muon_split_gate_up: o.muon_split_gate_up,
        adam_beta1: o.adam_betas[0] as f32,
        adam_beta2: o.adam_betas[1] as f32,
        adam_eps: o.adam_eps as f32,
        adam_weight_decay: o.adam_weight_decay as f32,
        clip: (o.clip > 0.0).then_some(o.clip),
        expert_clip: (o.expert_clip > 0.0).then_some(o.expert_clip),
    }
}

pub fn balance_config(r: &Recipe) -> BalanceConfig {
    let b = &r.router;
    let rule = match b.balance {
        Balance::AdamW => {
            Rule::AdamW { lr: b.balance_lr, beta1: b.balance_betas[0], beta2: b.balance_betas[1], eps: b.balance_eps }
        }
        Balance::Sign => Rule::Sign { step: b.balance_lr },
        Balance::Pid => Rule::Pid { kp: b.pid_proportional, ki: b.pid_integral, kd: b.pid_derivative },
    };
    BalanceConfig { rule, warmup: b.balance_warmup, include_skip: b.balance_skip_class }
}

pub fn loader_config(r: &Recipe) -> LoaderConfig {
    LoaderConfig {
        seed: r.run.seed,
        packing: r.data.packing,
        seq_len: r.train.seq_len,
        batch_sequences: r.train.sequences_per_step() as usize,
        document_mask: r.data.document_mask,
        eod_mask_loss: r.data.eod_mask_loss,
        vocab_size: r.model.vocab_size,
    }
}

/// `earlier_tokens`: what earlier stages have used of each source. A stage goes on as far into the source as they came; of the same
/// sequence length, with the very next sample.
pub fn source_specs(r: &Recipe, earlier_tokens: &[u64]) -> Vec<SourceSpec> {
    let one = |(s, tokens): (&DataSource, &u64)| SourceSpec {
        name: s.name.clone(),
        weight: s.weight,
        paths: s.shards.clone(),
        first_sample: tokens.div_ceil(r.train.seq_len as u64),
        max_epochs: s.max_epochs,
    };
    r.data.sources.iter().zip(earlier_tokens).map(one).collect()
}
