//! The runner on a small random model, against forwards of one whole sequence at a time.

use super::*;
use crate::model::Cx;
use crate::model::config::{AttentionKind, ModelConfig};
use crate::model::init::initial_values;
use crate::model::presets;
use crate::tensor::backend::{Batch, Precision};
use crate::tensor::cpu::Cpu;
use crate::tensor::cpu::par::pool;

const MAX: usize = 200;

struct Tiny {
    cpu: Cpu,
    model: Model,
    params: ParamStore<Cpu>,
}

/// Large random weights, so that a wrong key or a wrong history shows.
fn tiny(precision: Precision) -> Tiny {
    let config = ModelConfig {
        vocab_size: 37,
        hidden_size: 24,
        num_query_heads: 6,
        num_kv_heads: 2,
        head_dim: 8,
        num_experts: 3,
        expert_width: 16,
        router_width: 8,
        attention: vec![AttentionKind::Full, AttentionKind::Sliding, AttentionKind::Full],
        sliding_window: Some(5),
        max_position_embeddings: MAX,
        initializer_range: 0.4,
        pad_token_id: None,
        ..presets::bench_15m()
    };
    let (cpu, model) = (Cpu::new(precision), Model::new(config));
    let values = |id| Ok(initial_values(&model.table.specs[id], &model.config, 3));
    let params = ParamStore::from_host(&cpu, &model.table, values).unwrap();
    Tiny { cpu, model, params }
}

impl Tiny {
    /// Logits of every row of one sequence, from a forward without caches.
    fn logits(&self, ids: &[u32]) -> Vec<Vec<f64>> {
        let rows = self.cpu.rows(&Batch { batch: 1, seq: ids.len(), ids: ids.to_vec(), ..Batch::default() }).unwrap();
        let logits = self.model.logits(&Cx::new(&self.cpu, &self.params, &rows)).unwrap();
        let logits = self.cpu.download(&logits).unwrap();
        logits.chunks(37).map(|row| row.iter().map(|x| *x as f64).collect()).collect()
    }

    fn plain(&self, pair: &Pair) -> (f64, bool) {
        let ids = [&pair.context[..], &pair.continuation[..pair.continuation.len() - 1]].concat();
        let logits = &self.logits(&ids)[pair.context.len() - 1..];
        let mut answer = (0.0, true);
        for (row, target) in logits.iter().zip(&pair.continuation) {
            answer.0 += row[*target as usize] - row.iter().map(|x| x.exp()).sum::<f64>().ln();
            answer.1 &= best(row) == *target;
        }
        answer
    }

    fn runner(&self, options: Options) -> ModelRunner<'_, Cpu> {
        ModelRunner::new(&self.cpu, &self.model, &self.params, options)
    }

    fn scored(&self, pairs: &[Pair], options: Options, threads: usize) -> (Vec<(f64, bool)>, Counters) {
        let run = || {
            let mut runner = self.runner(options.clone());
            (runner.loglikelihood(pairs).unwrap(), runner.counters().clone())
        };
        on(threads, run)
    }
}

/// Runs `f` with so many threads for the kernels.
fn on<R: Send>(threads: usize, f: impl FnOnce() -> R + Send) -> R {
    pool(Some(threads)).unwrap().install(f)
}

fn best(row: &[f64]) -> u32 {
    let top = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    row.iter().position(|x| *x == top).unwrap() as u32
}

fn ids(n: usize, seed: u64) -> Vec<u32> {
    (0..n as u64).map(|i| (crate::data::order::hash(seed, &[i]) % 37) as u32).collect()
}

fn pair(context: Vec<u32>, continuation: Vec<u32>) -> Pair {
    Pair { context: context.into(), continuation, ..Pair::default() }
}

/// Shared shots, questions and letters; prefixes of one another; duplicates; the shortest and the longest inputs.
fn adversarial(tiny: &Tiny) -> Vec<Pair> {
    let mut pairs = Vec::new();
    let shots = ids(150, 1);
    for question in 0..4 {
        let context = [&shots[..], &ids(5 + 9 * question, 10 + question as u64)].concat();
        pairs.extend((0..4).map(|letter| pair(context.clone(), vec![letter])));
        pairs.extend((0..3).map(|i| pair(context.clone(), ids(1 + 3 * i, 50 + i as u64))));
    }
    // One input inside another, and contexts that differ in the split alone.
    pairs.extend([pair(shots[..40].to_vec(), shots[40..60].to_vec()), pair(shots[..20].to_vec(), shots[20..30].to_vec())]);
    pairs.extend([pair(shots[..25].to_vec(), shots[25..30].to_vec()), pair(shots.clone(), vec![3])]);
    pairs.extend([pair(vec![7], vec![8]), pair(vec![7], ids(20, 2)), pair(vec![7, 8], vec![9]), pair(vec![30], ids(MAX, 4))]);
    pairs.extend([pair(ids(MAX, 5), vec![1]), pair(ids(MAX - 1, 5), ids(2, 6)), pair(ids(MAX, 5), vec![2])]);
    // Branches at every token.
    pairs.extend((1..12).map(|n| pair([&shots[..n], &[36]].concat(), ids(3, n as u64))));
    // What the model would say itself.
    let context = ids(9, 77);
    let own = best(&tiny.logits(&context)[8]);
    pairs.extend([pair(context.clone(), vec![own]), pair(context, vec![own, (own + 1) % 37])]);
    pairs.extend_from_within(3..9);
    pairs
}

#[test]
fn equals_whole_forwards_with_the_least_tokens() {
    let tiny = tiny(Precision::F32);
    let pairs = adversarial(&tiny);
    let mut prefixes: Vec<Vec<u32>> = Vec::new();
    for p in &pairs {
        let all = [&p.context[..], &p.continuation[..p.continuation.len() - 1]].concat();
        prefixes.extend((1..=all.len()).map(|n| all[..n].to_vec()));
    }
    let asked = prefixes.len() as u64;
    prefixes.sort_unstable();
    prefixes.dedup();
    let expected: Vec<_> = pairs.iter().map(|p| tiny.plain(p)).collect();
    let (got, counters) = tiny.scored(&pairs, Options::new(MAX), 2);
    let worst = got.iter().zip(&expected).map(|(a, b)| (a.0 - b.0).abs()).fold(0.0, f64::max);
    assert!(worst <= 1e-5, "{worst:e}");
    assert!(got.iter().zip(&expected).all(|(a, b)| a.1 == b.1));
    assert!(got.iter().any(|a| a.1) && got.iter().any(|a| !a.1));
    let least = prefixes.len() as u64;
    assert_eq!((counters.forward_tokens, counters.trie_tokens, counters.padded_tokens), (least, least, 0));
    assert_eq!(counters.reused_tokens, asked - least);
}

#[test]
fn answers_have_the_same_bits_however_they_are_computed() {
    for precision in [Precision::F32, Precision::Bf16] {
        let tiny = tiny(precision);
        let pairs = adversarial(&tiny);
        let (expected, _) = tiny.scored(&pairs, Options::new(MAX), 1);
        let bits = |x: &(f64, bool)| (x.0.to_bits(), x.1);
        for (token_budget, memory_budget_bytes, threads) in
            [(1, 1 << 20, 2), (2, 1 << 20, 1), (7, 0, 2), (64, 1 << 30, 1), (64, 0, 2), (333, 1 << 30, 2), (1 << 20, 1 << 30, 2)]
        {
            let options = Options { token_budget, memory_budget_bytes, ..Options::new(MAX) };
            let mut order: Vec<usize> = (0..pairs.len()).collect();
            order.sort_by_key(|i| crate::data::order::hash(token_budget as u64, &[*i as u64]));
            let shuffled: Vec<Pair> = order.iter().map(|i| pairs[*i].clone()).collect();
            let (got, counters) = tiny.scored(&shuffled, options, threads);
            for (got, i) in got.iter().zip(&order) {
                assert_eq!(bits(got), bits(&expected[*i]), "{precision:?}, {token_budget} tokens, request {i}");
            }
            assert_eq!(counters.forward_tokens, counters.trie_tokens, "{token_budget} tokens");
            let (row, _) = cache_bytes(&tiny.model.config);
            if memory_budget_bytes == 0 {
                // The longest request, and states, of which there is one at most a token of the path.
                assert!(counters.peak_cache_bytes < 4 * (MAX * row) as u64, "{}", counters.peak_cache_bytes);
            }
        }
        // Each request alone.
        for i in [0, 5, 28, 33, 40] {
            let alone = tiny.scored(&pairs[i..i + 1], Options::new(MAX), 1).0;
            assert_eq!(bits(&alone[0]), bits(&expected[i]), "{precision:?}, request {i} alone");
        }
    }
}

#[test]
fn requests_that_cannot_be_are_refused_in_words() {
    let tiny = tiny(Precision::F32);
    let refused = |pairs: &[Pair]| tiny.runner(Options::new(MAX)).loglikelihood(pairs).unwrap_err().to_string();
    assert!(refused(&[pair(vec![1], vec![])]).contains("request 0 has an empty continuation"));
    assert!(refused(&[pair(vec![1], vec![2]), pair(vec![], vec![2])]).contains("request 1 has no context"));
    assert!(refused(&[pair(ids(MAX, 1), vec![2, 3])]).contains("201 tokens, but the model takes 200"));
    assert!(
        format!("{:#}", tiny.runner(Options::new(MAX)).loglikelihood(&[pair(vec![99], vec![2])]).unwrap_err()).contains("99")
    );
    assert!(refused(&[pair(vec![9], vec![37])]).contains("37"));
    let mut runner = tiny.runner(Options::new(MAX));
    assert!(runner.loglikelihood(&[]).unwrap().is_empty());
    assert!(runner.generate(&[], &|_, _| false).unwrap().is_empty());
    assert_eq!(runner.counters().forward_tokens, 0);
}

fn generation(prompt: Vec<u32>, max_tokens: usize) -> Generation {
    Generation { prompt, max_tokens, stops: Vec::new(), do_sample: false, temperature: 0.0, top_p: 1.0, repeat: 0 }
}

fn prompts() -> Vec<Generation> {
    let shots = ids(60, 8);
    let mut all: Vec<Generation> =
        (0..7).map(|i| generation([&shots[..], &ids(1 + 4 * i, i as u64)].concat(), 3 + 9 * i)).collect();
    all.extend([
        generation(vec![5], 40),
        generation(shots[..30].to_vec(), 12),
        generation(shots.clone(), 1),
        generation(shots, 0),
    ]);
    all.push(all[3].clone());
    // The context is full before the text is long enough.
    all.push(generation(ids(MAX - 4, 9), 30));
    all
}

/// Stands for a stop string; 4 is the end of text.
fn stops(id: u32) -> bool {
    id % 7 == 3
}

fn ends(_: &Generation, ids: &[u32]) -> bool {
    ids.last().is_some_and(|id| stops(*id))
}

#[test]
fn greedy_texts_equal_whole_forwards() {
    let tiny = tiny(Precision::F32);
    let requests = prompts();
    let expected: Vec<Vec<u32>> = requests
        .iter()
        .map(|g| {
            let mut all = g.prompt.clone();
            while all.len() < g.prompt.len() + g.max_tokens && all.len() <= MAX {
                let next = best(&tiny.logits(&all)[all.len() - 1]);
                if next == 4 {
                    break;
                }
                all.push(next);
                if stops(next) {
                    break;
                }
            }
            all.split_off(g.prompt.len())
        })
        .collect();
    let ended = |text: &&Vec<u32>| text.last().is_some_and(|id| stops(*id));
    assert!(expected.iter().any(|text| ended(&text)) && !expected.iter().all(|text| ended(&text)), "{expected:?}");
    assert!(expected[12].len() <= 5, "a full context ends a text");
    let mut used = Vec::new();
    for (token_budget, memory_budget_bytes, threads) in
        [(1, 0, 1), (2, 1 << 30, 2), (7, 0, 2), (50, 150_000, 1), (4096, 1 << 30, 2)]
    {
        let options = Options { token_budget, memory_budget_bytes, end_of_text: Some(4), ..Options::new(MAX) };
        let run = || {
            let mut runner = tiny.runner(options);
            (runner.generate(&requests, &ends).unwrap(), runner.counters().clone())
        };
        let (got, counters) = on(threads, run);
        assert_eq!(got, expected, "{token_budget} tokens, {memory_budget_bytes} bytes");
        assert_eq!(counters.forward_tokens - counters.generated_tokens, counters.trie_tokens);
        let (row, _) = cache_bytes(&tiny.model.config);
        if memory_budget_bytes == 0 {
            // The longest request; states of the path and of the texts.
            assert!(counters.peak_cache_bytes < 4 * (MAX * row) as u64, "{}", counters.peak_cache_bytes);
        }
        used.push(counters.batches);
    }
    assert!(used[4] < used[0] / 4, "texts are continued together: {used:?}");
}

#[test]
fn samples_depend_on_the_request_alone() {
    let tiny = tiny(Precision::F32);
    let mut requests = prompts();
    for (i, g) in requests.iter_mut().enumerate() {
        (g.do_sample, g.temperature, g.top_p, g.repeat) = (true, 1.3, 0.95, i % 3);
    }
    let run = |requests: &[Generation], token_budget, seed| {
        let options = Options { token_budget, seed, ..Options::new(MAX) };
        tiny.runner(options).generate(requests, &ends).unwrap()
    };
    let expected = run(&requests, 512, 1);
    let mut backwards = requests.clone();
    backwards.reverse();
    let mut got = run(&backwards, 5, 1);
    got.reverse();
    assert_eq!(got, expected);
    assert_ne!(run(&requests, 512, 2), expected);
    let repeated: Vec<Generation> = (0..3).map(|repeat| Generation { repeat, ..requests[7].clone() }).collect();
    let texts = run(&repeated, 512, 1);
    assert!(texts[0] != texts[1] && texts[1] != texts[2], "{texts:?}");
}

#[test]
fn answers_and_progress_come_while_it_runs() {
    let tiny = tiny(Precision::F32);
    let pairs = adversarial(&tiny);
    let told = std::cell::RefCell::new(Vec::new());
    let mut runner = tiny.runner(Options { token_budget: 50, ..Options::new(MAX) });
    runner.on_progress(|p| told.borrow_mut().push(p));
    let (mut answered, mut early) = (vec![0; pairs.len()], 0);
    runner
        .loglikelihood_each(&pairs, &mut |i, _| {
            answered[i] += 1;
            early += usize::from(told.borrow().len() < 3);
            Ok(())
        })
        .unwrap();
    drop(runner);
    assert!(answered.iter().all(|n| *n == 1) && early > 0);
    let told = told.into_inner();
    assert!(told.is_sorted_by_key(|p| p.done));
    assert_eq!(told.last().map(|p| p.done), told.last().map(|p| p.planned));
}
