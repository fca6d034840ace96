//! `zaya eval` on the small model of the fixtures: log-probabilities against the candle reference, kills and resumes, other commands on
//! what a run has written.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::{Value, json};
use zaya::checkpoint::ModelSource;
use zaya::eval::generate::{Continue, Whole};
use zaya::tensor::backend::Precision;

use super::support::{ids, records};
use crate::program;

fn model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny/fp32")
}

/// A folder with data of three tasks and a tokenizer of bytes: each byte is a token, but for 0 to 2, which are special.
struct Bench {
    folder: tempfile::TempDir,
}

const CODE: &str = "from typing import List\n\n\ndef double(x: int) -> int:\n    \"\"\" Twice x. \"\"\"\n";

impl Bench {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, lines: Vec<Value>| {
            let text: String = lines.iter().map(|l| format!("{l}\n")).collect();
            std::fs::write(folder.path().join(name), text).unwrap();
        };
        let question = |i: usize| {
            json!({"id": i, "question": format!("How many legs have {i} cats?"), "answerKey": (["A", "B", "C"][i % 3]),
                "choices": {"text": [format!("{}", 4 * i), "none".to_string(), "a few".to_string()], "label": ["A", "B", "C"]}})
        };
        write("arc_easy_test.jsonl", (0..60).map(question).collect());
        write("arc_easy_train.jsonl", (60..90).map(question).collect());
        write(
            "lambada_openai_test.jsonl",
            (0..24).map(|i| json!({"text": format!("one two three number {i} and the end")})).collect(),
        );
        write(
            "gsm8k_test.jsonl",
            (0..4).map(|i| json!({"question": format!("{i} and {i}?"), "answer": format!("#### {}", 2 * i)})).collect(),
        );
        write(
            "gsm8k_train.jsonl",
            (5..15).map(|i| json!({"question": format!("{i} and 1?"), "answer": format!("#### {}", i + 1)})).collect(),
        );
        let program = |i: usize| {
            json!({"task_id": format!("t/{i}"), "prompt": CODE, "entry_point": "double",
                "test": "def check(f):\n    assert f(2) == 4\n", "canonical_solution": "    return 2 * x\n"})
        };
        write("humaneval_test.jsonl", (0..2).map(program).collect());
        std::fs::write(folder.path().join("tokenizer.json"), tokenizer().to_string()).unwrap();
        Self { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn command(&self, output: &str, tasks: &str) -> Command {
        let mut command = program::zaya();
        command.args(["eval", "--log-requests", "--bootstrap-iters", "1000", "--tasks", tasks, "--model"]).arg(model());
        command.arg("--tokenizer").arg(self.path("tokenizer.json")).arg("--data").arg(self.folder.path());
        command.arg("--output").arg(self.path(output));
        command
    }

    fn json(&self, name: &str) -> Value {
        serde_json::from_str(&std::fs::read_to_string(self.path(name)).unwrap()).unwrap()
    }
}

/// Byte-level BPE without merges over 256 ids.
fn tokenizer() -> Value {
    // GPT-2's letters for bytes: printable ones stand for themselves, the others follow from 256 on.
    let printable = |b: u32| (33..=126).contains(&b) || (161..=172).contains(&b) || (174..=255).contains(&b);
    let mut next = 256;
    let mut vocab = serde_json::Map::new();
    for (id, special) in ["<pad>", "<eos>", "<bos>"].iter().enumerate() {
        vocab.insert(special.to_string(), id.into());
    }
    for byte in 0..256u32 {
        let letter = if printable(byte) { byte } else { next };
        next += u32::from(!printable(byte));
        // The bytes 253 to 255 never occur in UTF-8.
        if byte < 253 {
            vocab.insert(char::from_u32(letter).unwrap().to_string(), (byte + 3).into());
        }
    }
    let added: Vec<Value> = (0..3)
        .map(|id| {
            json!({"id": id, "content": (["<pad>", "<eos>", "<bos>"][id]), "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true})
        })
        .collect();
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<bos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}], "special_tokens": {"<bos>": {"id": "<bos>", "ids": [2], "tokens": ["<bos>"]}}},
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
            "fuse_unk": false, "byte_fallback": false, "ignore_merges": false, "vocab": vocab, "merges": []}
    })
}

fn succeeded(mut command: Command) -> Output {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output
}

/// Sum of log p of `continuation`, and whether each token is the argmax, by candle.
fn reference(source: &ModelSource, context: &[u32], continuation: &[u32]) -> (f64, bool) {
    let values: Vec<Vec<f32>> = (0..source.table().specs.len()).map(|id| source.read(id).unwrap()).collect();
    let mut whole = Whole::new(source.config(), &values, Precision::F32).unwrap();
    let mut logits = whole.append(context).unwrap();
    let (mut sum, mut greedy) = (0.0, true);
    for (i, id) in continuation.iter().enumerate() {
        let max = logits.iter().fold(f32::NEG_INFINITY, |m, x| m.max(*x));
        let total: f64 = logits.iter().map(|x| f64::from(x - max).exp()).sum();
        sum += f64::from(logits[*id as usize] - max) - total.ln();
        greedy &= logits[*id as usize] == max;
        if i + 1 < continuation.len() {
            logits = whole.append(&[*id]).unwrap();
        }
    }
    (sum, greedy)
}

#[test]
fn log_probabilities_are_those_of_the_reference() {
    let bench = Bench::new();
    let mut command = bench.command("out", "arc_easy,lambada_openai");
    command.args(["--num-fewshot", "2", "--limit", "3"]);
    let output = succeeded(command);
    let table = String::from_utf8(output.stdout).unwrap();
    assert!(table.contains("arc_easy") && table.contains("perplexity"), "{table}");
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("60 of the 2376 official documents"), "{said}");
    let source = ModelSource::open(&model()).unwrap();
    let requests = records(&bench.path("out/requests.jsonl"));
    assert_eq!(requests.len(), 3 * 3 + 3);
    for (request, _) in requests {
        let (context, continuation) = (ids(&request["context_enc"]), ids(&request["continuation_enc"]));
        assert_eq!(context[0], 2);
        let (sum, greedy) = reference(&source, &context, &continuation);
        let ours = request["logprob"].as_f64().unwrap();
        assert!((ours - sum).abs() <= 1e-4 + 1e-5 * sum.abs(), "{ours} {sum}");
        assert_eq!(request["is_greedy"], json!(greedy));
    }
    let results = bench.json("out/results.json");
    let zaya = &results["zaya"];
    assert_eq!(zaya["tokenizer_sha256"], zaya_sha256(&bench.path("tokenizer.json")));
    let data = zaya["data_sha256"].as_object().unwrap();
    let test = bench.path("arc_easy_test.jsonl");
    assert_eq!(data[test.to_str().unwrap()], zaya_sha256(&test));
    assert!(zaya["tokens"]["forward"].as_u64().unwrap() > 100);
    assert!(bench.json("out/run.json")["threads"].as_u64().unwrap() >= 1);
    let page = std::fs::read_to_string(bench.path("out/report.html")).unwrap();
    assert!(page.contains("<svg") && page.contains("arc_easy") && !page.contains("src="));
}

/// The three kinds of CORE's tasks, scored again from the ids by the reference, and once more from the records.
#[test]
fn core_is_as_nanochat_computes_it() {
    let bench = Bench::new();
    // A part of the bundle, with its own opinion of chance.
    std::fs::create_dir_all(bench.path("eval_data/commonsense_reasoning")).unwrap();
    let copa: String = (0..14)
        .map(|i| {
            let choices = [format!("it was {i}"), "it was not".to_string()];
            json!({"query": format!("The number {i} came because"), "choices": choices, "gold": i % 2}).to_string() + "\n"
        })
        .collect();
    std::fs::write(bench.path("eval_data/commonsense_reasoning/copa.jsonl"), copa).unwrap();
    std::fs::write(bench.path("eval_meta_data.csv"), "Eval Task,#shots,Random baseline\ncopa,0,40\n").unwrap();
    let sentence = |i: usize| json!({"sentence": format!("Ann gave Bob {i} nuts so _ had none."), "option1": "Ann", "option2": "Bob", "answer": (["1", "2"][i % 2])});
    let lines: String = (0..9).map(|i| sentence(i).to_string() + "\n").collect();
    std::fs::write(bench.path("winogrande_val.jsonl"), lines).unwrap();
    let run = |output: &str, more: &[&str]| {
        let mut command = bench.command(output, "core");
        command.args(["--limit", "8"]).args(more);
        succeeded(command)
    };
    let said = String::from_utf8(run("out", &["--num-fewshot", "1"]).stderr).unwrap();
    assert!(said.contains("core: the mean over 4 of its 22 tasks, not comparable with the whole metric: no data of hellaswag_zeroshot, jeopardy,"), "{said}");
    let results = bench.json("out/results.json");
    assert_eq!(results["zaya"]["partial_groups"]["core"], "4 of 22 tasks");
    let source = ModelSource::open(&model()).unwrap();
    let mut requests = records(&bench.path("out/requests.jsonl")).into_iter();
    let mut centred = Vec::new();
    for (task, chance) in [("core_arc_easy", 0.25), ("core_copa", 0.4), ("core_lambada_openai", 0.0), ("core_winogrande", 0.5)] {
        let samples = records(&bench.path(&format!("out/samples_{task}.jsonl")));
        assert_eq!(samples.len(), 8, "{task}");
        let mut right = 0.0;
        for (sample, _) in samples {
            let count = sample["arguments"].as_array().unwrap().len();
            let mut scores = Vec::new();
            for (request, _) in requests.by_ref().take(count) {
                let (context, continuation) = (ids(&request["context_enc"]), ids(&request["continuation_enc"]));
                assert_eq!(context[0], 2);
                let cut = (context.len() + continuation.len()).saturating_sub(source.config().max_position_embeddings);
                let (sum, greedy) = reference(&source, &context[cut..], &continuation);
                scores.push((sum / continuation.len() as f64, greedy));
            }
            let is_right = match sample["target"].as_u64() {
                Some(gold) => scores.iter().enumerate().all(|(i, s)| i as u64 == gold || s.0 < scores[gold as usize].0),
                None => scores[0].1,
            };
            assert_eq!(sample["acc"], json!(f64::from(u8::from(is_right))), "{task} {}", sample["doc_id"]);
            right += f64::from(u8::from(is_right));
        }
        let row = &results["results"][task];
        let want = (right / 8.0 - chance) / (1.0 - chance);
        let got = row["acc_centered,none"].as_f64().unwrap();
        assert!((got - want).abs() < 1e-12 && row["acc,none"] == json!(right / 8.0), "{task}: {got} {want}");
        centred.push(got);
    }
    assert_eq!(requests.count(), 0);
    let core = results["results"]["core"]["acc_centered,none"].as_f64().unwrap();
    assert!((core - centred.iter().sum::<f64>() / 4.0).abs() < 1e-12);
    // nanochat: random.Random(1337) shuffles the documents; the shot of the first one is drawn by random.Random(1234).
    let first = &records(&bench.path("out/samples_core_copa.jsonl"))[0].0;
    assert_eq!(first["doc_id"], 6);
    let prompt = first["arguments"][0][0].as_str().unwrap();
    assert!(prompt.starts_with("The number 10 came because it was"), "{prompt}");
    // The records alone give the same scores.
    let mut score = program::zaya();
    score.args(["eval", "score", "--bootstrap-iters", "1000"]).arg(bench.path("out")).arg("--output").arg(bench.path("again"));
    succeeded(score);
    let again = bench.json("again/results.json");
    for task in ["core_arc_easy", "core_copa", "core_lambada_openai", "core_winogrande"] {
        assert_eq!(again["results"][task], results["results"][task]);
    }
    // Shots are other documents of those evaluated.
    let mut command = bench.command("few", "core");
    command.args(["--limit", "8", "--num-fewshot", "8"]);
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("raise --limit"));
}

/// The keys and values of a GPU's answers pass through host memory; within bf16's bounds of the processor's.
#[test]
fn a_gpu_answers_as_the_processor_does() {
    if !crate::hip::has_kernels() {
        return;
    }
    let bench = Bench::new();
    let run = |output: &str, backend: &str| {
        let mut command = bench.command(output, "arc_easy,gsm8k");
        command.args([
            "--num-fewshot",
            "1",
            "--limit",
            "3",
            "--gen-kwargs",
            "max_gen_toks=4",
            "--dtype",
            "bf16",
            "--backend",
            backend,
        ]);
        command.env("ZAYA_HIP_LIB", crate::hip::software_gpu()).env("ZAYA_HIPBLASLT_LIB", crate::hip::software_gpu());
        succeeded(command);
        records(&bench.path(&format!("{output}/requests.jsonl")))
    };
    let (processor, gpu) = (run("cpu", "cpu"), run("gpu", "hip"));
    assert_eq!(processor.len(), gpu.len());
    for ((a, _), (b, _)) in processor.iter().zip(&gpu) {
        assert_eq!(a["context_enc"], b["context_enc"]);
        if let (Some(a), Some(b)) = (a["logprob"].as_f64(), b["logprob"].as_f64()) {
            assert!((a - b).abs() < 0.02 * a.abs() + 0.02, "{a} {b}");
        }
    }
    assert_eq!(bench.json("gpu/results.json")["config"]["device"], "hip");
}

fn zaya_sha256(path: &Path) -> Value {
    zaya::text::sha256_hex(&std::fs::read(path).unwrap()).into()
}

const FILES: [&str; 6] = [
    "results.json",
    "samples_arc_easy.jsonl",
    "samples_lambada_openai.jsonl",
    "samples_gsm8k.jsonl",
    "requests.jsonl",
    "report.html",
];

/// All tasks with requests enough for several rounds.
fn several(bench: &Bench, output: &str) -> Command {
    let mut command = bench.command(output, "arc_easy,lambada_openai,gsm8k");
    command.args(["--num-fewshot", "4", "--gen-kwargs", "max_gen_toks=12"]);
    command
}

#[test]
fn a_killed_run_goes_on_and_ends_with_the_same_bytes() {
    let bench = Bench::new();
    let run = |output: &str| several(&bench, output);
    succeeded(run("whole"));
    for (i, at) in ["1", "2", "3"].into_iter().enumerate() {
        let output = format!("killed{i}");
        let status = run(&output).env("ZAYA_FAIL", format!("eval.log:kill@{at}")).status().unwrap();
        if status.success() {
            assert!(i > 0, "the run has one round");
            continue;
        }
        assert!(!bench.path(&format!("{output}/results.json")).exists());
        let log = bench.path(&format!("{output}/requests.log"));
        let known = std::fs::read_to_string(&log).unwrap();
        // What was being written when the run died is not whole.
        std::fs::write(&log, format!("{known}{{\"run\":\"0123\",\"requ")).unwrap();
        let mut resumed = run(&output);
        resumed.arg("--resume");
        succeeded(resumed);
        for file in FILES {
            let read = |of: &str| std::fs::read(bench.path(&format!("{of}/{file}"))).unwrap();
            assert!(read("whole") == read(&output), "{file} after a kill at round {at}");
        }
        let now = std::fs::read_to_string(&log).unwrap();
        assert!(now.starts_with(&known), "the log was not appended to");
        let lines: Vec<&str> = now.lines().collect();
        let mut distinct = lines.clone();
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!(lines.len(), distinct.len(), "a request was asked twice");
    }
}

/// B18: a cache that does not know models gives one model's answers for another's.
#[test]
fn the_log_of_another_model_is_not_used() {
    let bench = Bench::new();
    let other = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny/noskip");
    let mut first = bench.command("out", "arc_easy");
    first.args(["--limit", "4"]);
    succeeded(first);
    let before = std::fs::read_to_string(bench.path("out/requests.jsonl")).unwrap();
    let of_other = |output: &str, resume: bool| {
        let mut command = program::zaya();
        command.args(["eval", "--log-requests", "--tasks", "arc_easy", "--limit", "4", "--model"]).arg(&other);
        command.arg("--tokenizer").arg(bench.path("tokenizer.json")).arg("--data").arg(bench.folder.path());
        command.arg("--output").arg(bench.path(output)).args(resume.then_some("--resume"));
        succeeded(command);
        std::fs::read_to_string(bench.path(&format!("{output}/requests.jsonl"))).unwrap()
    };
    let alone = of_other("alone", false);
    assert_ne!(alone, before);
    assert_eq!(of_other("out", true), alone);
}

#[test]
fn runs_are_compared_scored_again_and_searched() {
    if !has_python() {
        eprintln!("skipped: no python3 in PATH");
        return;
    }
    let bench = Bench::new();
    succeeded(several(&bench, "a"));
    let before = bench.json("a/results.json");
    let mut programs = bench.command("a", "humaneval");
    programs.args(["--allow-code-exec", "--gen-kwargs", "max_gen_toks=12"]);
    succeeded(programs);
    // A right answer in the place of the model's.
    let path = bench.path("a/samples_humaneval.jsonl");
    let mut edited: Vec<Value> = records(&path).into_iter().map(|(v, _)| v).collect();
    edited[1]["resps"] = json!([["    return 2 * x\n"]]);
    std::fs::write(&path, edited.iter().map(|r| format!("{r}\n")).collect::<String>()).unwrap();
    let mut score = program::zaya();
    score
        .args(["eval", "score", "--allow-code-exec", "--bootstrap-iters", "1000"])
        .arg(bench.path("a"))
        .arg("--output")
        .arg(bench.path("again"));
    succeeded(score);
    let results = bench.json("again/results.json");
    assert_eq!(results["results"]["humaneval"]["pass@1,create_test"], 0.5);
    for task in ["arc_easy", "lambada_openai", "gsm8k"] {
        assert_eq!(results["results"][task], before["results"][task]);
        let samples = |of: &str| std::fs::read_to_string(bench.path(&format!("{of}/samples_{task}.jsonl"))).unwrap();
        assert_eq!(samples("a"), samples("again"));
    }
    let mut compare = program::zaya();
    compare.args(["eval", "compare"]).arg(bench.path("a")).arg(bench.path("again")).arg("--output").arg(bench.path("c.json"));
    let said = String::from_utf8(succeeded(compare).stdout).unwrap();
    assert!(said.contains("humaneval pass@1,create_test: A 0.0000, B 0.5000") && said.contains("flipped: 1 (0 -> 1)"), "{said}");
    let all = bench.json("c.json");
    let of_program = all["comparisons"].as_array().unwrap().iter().find(|c| c["task"] == "humaneval").unwrap().clone();
    assert_eq!((&of_program["only_b"], &of_program["p_mcnemar"]), (&json!(1), &json!(1.0)));
}

fn has_python() -> bool {
    Command::new("python3").arg("--version").output().is_ok_and(|o| o.status.success())
}

#[test]
fn other_prompts_are_not_compared() {
    let bench = Bench::new();
    for (output, shots) in [("a", "0"), ("b", "2")] {
        let mut command = bench.command(output, "arc_easy");
        command.args(["--num-fewshot", shots, "--limit", "3"]);
        succeeded(command);
    }
    let output = program::zaya().args(["eval", "compare"]).arg(bench.path("a")).arg(bench.path("b")).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("other words"));
}

#[test]
fn documents_in_training_data_are_found() {
    let bench = Bench::new();
    let long = |i: usize| {
        let words = ["apples", "pears", "plums", "figs", "nuts", "dates", "limes"];
        json!({"text": (0..16).map(|w| format!("{}{}", words[(w * i + w) % 7], w * i)).collect::<Vec<_>>().join(" ")})
    };
    let lines: String = (1..7).map(|i| format!("{}\n", long(i))).collect();
    std::fs::write(bench.path("lambada_openai_test.jsonl"), lines).unwrap();
    succeeded(bench.command("out", "lambada_openai"));
    // Documents 1 and 4 stand in the corpus, with other marks and in capitals.
    let text = |i: usize| long(i)["text"].as_str().unwrap().to_uppercase().replace(' ', ",\n ");
    let corpus =
        [json!({"text": format!("Before: {} and after", text(2))}), json!({"text": "nothing"}), json!({"text": text(5)})];
    std::fs::write(bench.path("corpus.jsonl"), corpus.iter().map(|d| format!("{d}\n")).collect::<String>()).unwrap();
    let mut tokenize = program::zaya();
    tokenize.arg("tokenize").arg("--input").arg(bench.path("corpus.jsonl")).arg("--tokenizer").arg(bench.path("tokenizer.json"));
    tokenize.arg("--output").arg(bench.path("shard"));
    succeeded(tokenize);
    let mut command = program::zaya();
    command.args(["eval", "contamination"]).arg(bench.path("out")).arg("--shards").arg(bench.path("shard"));
    command.arg("--tokenizer").arg(bench.path("tokenizer.json")).arg("--output").arg(bench.path("dirty.json"));
    succeeded(command);
    let task = &bench.json("dirty.json")["tasks"]["lambada_openai"];
    assert_eq!((&task["dirty_doc_ids"], &task["too_short"]), (&json!([1, 4]), &json!(0)));
    assert!(task["scores"]["acc,none"]["clean"].is_f64() && task["scores"]["acc,none"]["dirty"].is_f64());
}
