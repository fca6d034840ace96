//! Our model runner on the oracle's model: its log-probabilities, greedy flags and texts, request by request.

use std::path::Path;

use serde_json::Value;
use zaya::checkpoint::ModelSource;
use zaya::eval::harness::encode::Pair;
use zaya::eval::harness::run::{Generation, Runner};
use zaya::eval::harness::stop;
use zaya::eval::runner::{ModelRunner, Options};
use zaya::model::{Model, ParamStore};
use zaya::tensor::cpu::Cpu;

use super::support::{Tok, ids, records, shared};

struct Oracle {
    cpu: Cpu,
    model: Model,
    params: ParamStore<Cpu>,
    tok: Tok,
}

impl Oracle {
    fn open(folder: &Path) -> Self {
        let source = ModelSource::open(folder).unwrap();
        let (cpu, model) = (Cpu::default(), Model::new(source.config().clone()));
        let params = source.params(&cpu).unwrap();
        Self { cpu, model, params, tok: Tok::load() }
    }

    fn runner(&self, max_length: usize, token_budget: usize) -> ModelRunner<'_, Cpu> {
        let options = Options { token_budget, end_of_text: Some(1), ..Options::new(max_length) };
        ModelRunner::new(&self.cpu, &self.model, &self.params, options)
    }

    /// Texts of generation requests, cut as lm-eval cuts them.
    fn texts(&self, requests: &[Generation], token_budget: usize) -> Vec<String> {
        let done = |g: &Generation, ids: &[u32]| stop::is_done(&self.tok.decode(ids), &g.stops);
        let generated = self.runner(2048, token_budget).generate(requests, &done).unwrap();
        let cut = |(g, ids): (&Generation, &Vec<u32>)| stop::cut(&self.tok.decode(ids), &g.stops).to_string();
        requests.iter().zip(&generated).map(cut).collect()
    }
}

fn pair(record: &Value, max_length: usize) -> Pair {
    let (context, continuation) = (ids(&record["context_enc"]), ids(&record["continuation_enc"]));
    let over = (context.len() + continuation.len()).saturating_sub(max_length + 1);
    Pair { context: context[over..].into(), continuation, ..Pair::default() }
}

fn generation(prompt: Vec<u32>, stops: Vec<String>, max_tokens: usize) -> Generation {
    let prompt = prompt[prompt.len().saturating_sub(2048 - max_tokens)..].to_vec();
    Generation { prompt, max_tokens, stops, do_sample: false, temperature: 0.0, top_p: 1.0, repeat: 0 }
}

fn compare(what: &str, record: &Value, (logprob, is_greedy): (f64, bool)) {
    let theirs = record["logprob"].as_f64().unwrap();
    assert!((logprob - theirs).abs() <= 1e-3 + 1e-5 * theirs.abs(), "{what}: {logprob}, not {theirs}: {record}");
    assert_eq!(Some(is_greedy), record["is_greedy"].as_bool(), "{what}: {record}");
}

/// All log-likelihood requests of a run in one call.
#[test]
fn log_likelihoods_of_the_whole_oracle() {
    let Some(shared) = shared() else { return };
    let oracle = Oracle::open(&shared.join("oracle/eval/zaya_a/model"));
    for (run, max_length) in [("mc0", 2048), ("few", 2048), ("mmlu", 2048), ("lambada", 2048), ("wikitext_bos0", 512)] {
        let asked = records(&shared.join("oracle/eval/zaya_a").join(run).join("requests.jsonl"));
        let pairs: Vec<Pair> = asked.iter().map(|(record, _)| pair(record, max_length)).collect();
        let mut runner = oracle.runner(max_length, 1024);
        let answers = runner.loglikelihood(&pairs).unwrap();
        answers.into_iter().zip(&asked).for_each(|(answer, (record, _))| compare(run, record, answer));
        let counters = runner.counters();
        assert!(counters.forward_tokens as f64 <= 1.05 * counters.trie_tokens as f64, "{run}: {counters:?}");
        assert_eq!(counters.padded_tokens, 0);
        eprintln!("{run}: {} requests agree; {counters:?}", asked.len());
    }
}

#[test]
fn texts_of_the_whole_oracle() {
    let Some(shared) = shared() else { return };
    let oracle = Oracle::open(&shared.join("oracle/eval/zaya_a/model"));
    for (run, token_budget) in [("gsm8k", 512), ("bbh", 2048), ("humaneval", 3)] {
        let asked = records(&shared.join("oracle/eval/zaya_a").join(run).join("requests.jsonl"));
        let options = |record: &Value| record["gen_kwargs"].as_object().unwrap().clone();
        let request = |(record, _): &(Value, String)| {
            let options = options(record);
            generation(ids(&record["context_enc"]), stop::stops(&options, Some("<eos>")), stop::max_gen_toks(&options))
        };
        let requests: Vec<Generation> = asked.iter().map(request).collect();
        for (ours, (record, _)) in oracle.texts(&requests, token_budget).iter().zip(&asked) {
            assert_eq!(Some(ours.as_str()), record["text"].as_str(), "{run}: {}", record["context"]);
        }
    }
}
