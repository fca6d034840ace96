//! The model runner of evaluation on both backends: here by the verbs that every backend has, in f64.

use zaya::eval::harness::encode::Pair;
use zaya::eval::harness::run::{Generation, Runner};
use zaya::eval::runner::{ModelRunner, Options};
use zaya::model::config::{AttentionKind, ModelConfig};
use zaya::model::init::initial_values;
use zaya::model::{Model, ParamStore, presets};
use zaya::tensor::Backend;
use zaya::tensor::cpu::Cpu;

use super::HandleBackend;

fn config() -> ModelConfig {
    ModelConfig {
        vocab_size: 19,
        hidden_size: 12,
        num_query_heads: 4,
        num_kv_heads: 2,
        head_dim: 4,
        num_experts: 3,
        expert_width: 8,
        router_width: 6,
        attention: vec![AttentionKind::Full, AttentionKind::Sliding],
        sliding_window: Some(4),
        initializer_range: 0.4,
        max_position_embeddings: 32,
        pad_token_id: None,
        ..presets::bench_15m()
    }
}

/// Continuations of one context and of its beginnings, each by another token.
fn pairs() -> Vec<Pair> {
    let context = [3, 7, 7, 1, 12, 18, 5, 2, 9];
    let pair = |n: usize, continuation: &[u32]| Pair {
        context: context[..n].into(),
        continuation: continuation.to_vec(),
        ..Pair::default()
    };
    let mut pairs: Vec<Pair> = (1..=9).map(|n| pair(n, &[n as u32, 4, 18 - n as u32])).collect();
    pairs.extend([pair(9, &[6]), pair(9, &[8]), pair(3, &context[3..]), pair(1, &context[1..5])]);
    pairs
}

fn answers<B: Backend>(backend: B, token_budget: usize) -> (Vec<(f64, bool)>, Vec<Vec<u32>>) {
    let model = Model::new(config());
    let values = |id| Ok(initial_values(&model.table.specs[id], &model.config, 9));
    let params = ParamStore::from_host(&backend, &model.table, values).unwrap();
    let mut runner = ModelRunner::new(&backend, &model, &params, Options { token_budget, ..Options::new(32) });
    let texts = pairs().into_iter().map(|pair| Generation {
        prompt: pair.context.to_vec(),
        max_tokens: 5,
        stops: Vec::new(),
        do_sample: false,
        temperature: 0.0,
        top_p: 1.0,
        repeat: 0,
    });
    let texts: Vec<Generation> = texts.collect();
    (runner.loglikelihood(&pairs()).unwrap(), runner.generate(&texts, &|_, _| false).unwrap())
}

#[test]
fn both_backends_give_the_same_answers() {
    let (exact, texts) = answers(HandleBackend::default(), 16);
    for token_budget in [1, 5, 64] {
        let (ours, our_texts) = answers(Cpu::default(), token_budget);
        for (ours, exact) in ours.iter().zip(&exact) {
            assert!((ours.0 - exact.0).abs() < 1e-5 && ours.1 == exact.1, "{ours:?}, not {exact:?}");
        }
        assert_eq!(our_texts, texts);
    }
}
