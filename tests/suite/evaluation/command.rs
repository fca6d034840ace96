//! `zaya eval` itself, on the oracle's model with the oracle's settings: every file it writes against lm-eval's own.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Output;

use serde_json::{Value, json};

use super::oracle::our_name;
use super::support::{ids, records, shared};
use crate::program;

/// Runs `zaya eval` and returns its output folder.
fn eval(folder: &Path, model: &Path, data: &[&Path], args: &[&str]) -> Output {
    let mut command = program::zaya();
    command.args(["eval", "--model"]).arg(model).arg("--output").arg(folder).args([
        "--log-requests",
        "--bootstrap-iters",
        "1000",
    ]);
    command.arg("--data").args(data).args(args);
    command.output().unwrap()
}

fn succeeded(output: &Output) {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

fn json_file(path: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))).unwrap()
}

fn close(ours: f64, theirs: f64) -> bool {
    (ours - theirs).abs() <= 1e-3 + 1e-5 * theirs.abs()
}

/// Strings, ids, flags and texts exactly; log-probabilities within 1e-3 + 1e-5 |lp|.
fn compare_requests(ours: &[Value], theirs: &[Value], what: &str) {
    assert_eq!(ours.len(), theirs.len(), "{what}");
    for (ours, theirs) in ours.iter().zip(theirs) {
        assert_eq!(keys(ours), keys(theirs), "{what}");
        for key in ["type", "context", "continuation", "context_enc", "continuation_enc", "is_greedy", "text", "gen_kwargs"] {
            assert_eq!(ours.get(key), theirs.get(key), "{what} {key} {}", theirs["context"]);
        }
        if let Some(theirs_lp) = theirs.get("logprob").and_then(Value::as_f64) {
            let ours_lp = ours["logprob"].as_f64().unwrap();
            assert!(close(ours_lp, theirs_lp), "{what}: {ours_lp} {theirs_lp}");
        }
    }
}

fn keys(v: &Value) -> Vec<&String> {
    v.as_object().unwrap().keys().collect()
}

/// Equal, where numbers with a fraction may differ as log-probabilities may.
fn nearly(ours: &Value, theirs: &Value) -> bool {
    match (ours, theirs) {
        (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| nearly(a, b)),
        (Value::Number(a), Value::Number(b)) if b.is_f64() => close(a.as_f64().unwrap(), b.as_f64().unwrap()),
        _ => ours == theirs,
    }
}

fn compare_samples(ours: &[Value], theirs: &[Value], what: &str) {
    assert_eq!(ours.len(), theirs.len(), "{what}");
    const OF_LOGPROBS: [&str; 6] =
        ["resps", "filtered_resps", "perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte"];
    for (ours, theirs) in ours.iter().zip(theirs) {
        assert_eq!(keys(ours), keys(theirs), "{what}");
        for (key, value) in theirs.as_object().unwrap() {
            let same = if OF_LOGPROBS.contains(&key.as_str()) { nearly(&ours[key], value) } else { &ours[key] == value };
            assert!(same, "{what} doc {} {key}: {} {value}", theirs["doc_id"], ours[key]);
        }
    }
}

/// Metrics exactly, standard errors to 1e-12; what is made of log-probabilities within what these may differ by.
fn compare_row(ours: &Value, theirs: &Value, what: &str) {
    for (key, value) in theirs.as_object().unwrap().iter().filter(|(key, _)| key.contains(',')) {
        let Some(theirs) = value.as_f64() else {
            assert_eq!(&ours[key], value, "{what} {key}");
            continue;
        };
        let ours = ours[key].as_f64().unwrap_or_else(|| panic!("{what}: no {key} in {ours}"));
        let allowed = match key {
            k if k.contains("perplexity") || k.contains("bits_per_byte") => 1e-3 + 1e-4 * theirs.abs(),
            k if k.contains("stderr") => 1e-12,
            _ => 0.0,
        };
        assert!((ours - theirs).abs() <= allowed, "{what} {key}: {ours} {theirs}");
    }
}

/// One run of the oracle against one or more commands of ours; each command has its tasks and arguments.
fn whole_run(run: &str, commands: &[(&str, &[&str])], more_data: Option<&Path>) {
    let Some(shared) = shared() else { return };
    let oracle = shared.join("oracle/eval/zaya_a");
    let data = shared.join("data/eval");
    let theirs = json_file(&oracle.join(run).join("results.json"));
    let read = |path: PathBuf| -> Vec<Value> { records(&path).into_iter().map(|(v, _)| v).collect() };
    let (mut requests, mut rows) = (Vec::new(), serde_json::Map::new());
    let mut samples: BTreeMap<&String, Vec<Value>> = BTreeMap::new();
    let scratch = tempfile::tempdir().unwrap();
    for (i, (tasks, args)) in commands.iter().enumerate() {
        let out = scratch.path().join(i.to_string());
        let mut folders = vec![data.as_path()];
        folders.extend(more_data);
        succeeded(&eval(&out, &oracle.join("model"), &folders, &[&["--tasks", tasks], *args].concat()));
        requests.extend(read(out.join("requests.jsonl")));
        let ours = json_file(&out.join("results.json"));
        for key in theirs.as_object().unwrap().keys().filter(|k| *k != "groups") {
            assert!(ours.get(key).is_some(), "{run}: results.json has no {key}");
        }
        rows.extend(ours["results"].as_object().unwrap().clone());
        for key in theirs["configs"].as_object().unwrap().keys() {
            let file = out.join(format!("samples_{}.jsonl", our_name(key)));
            if file.is_file() {
                samples.insert(key, read(file));
            }
        }
    }
    let mut asked = read(oracle.join(run).join("requests.jsonl"));
    // Our groups of MMLU have their subjects in another order than the oracle's. Windows, which have no text, stay as they are.
    let text = |r: &Value| (r["context"].to_string(), r["continuation"].to_string());
    requests.sort_by_key(text);
    asked.sort_by_key(text);
    compare_requests(&requests, &asked, run);
    for (key, row) in theirs["results"].as_object().unwrap() {
        compare_row(&rows[&our_name(key)], row, &format!("{run} {key}"));
    }
    // Theirs lie in the order of the tasks' names.
    let mut theirs = read(oracle.join(run).join("samples.jsonl")).into_iter();
    for ours in samples.values() {
        compare_samples(ours, &theirs.by_ref().take(ours.len()).collect::<Vec<_>>(), run);
    }
    assert!(theirs.next().is_none(), "{run}: records are left over");
}

#[test]
fn multiple_choice_without_shots() {
    let tasks = "arc_easy,arc_challenge,hellaswag,piqa,openbookqa,winogrande";
    whole_run("mc0", &[(tasks, &["--num-fewshot", "0", "--limit", "40"])], None);
}

#[test]
fn multiple_choice_with_drawn_shots() {
    let few = |k: &'static str| -> Vec<&'static str> { vec!["--num-fewshot", k, "--limit", "10", "--seed", "1234"] };
    whole_run("few", &[("winogrande", &few("5")), ("arc_challenge", &few("25"))], None);
}

#[test]
fn mmlu_and_its_groups() {
    whole_run("mmlu", &[("mmlu", &["--num-fewshot", "5", "--limit", "1"])], None);
}

#[test]
fn arithmetic_is_generated_and_extracted() {
    whole_run("gsm8k", &[("gsm8k", &["--num-fewshot", "5", "--limit", "8"])], None);
}

#[test]
fn last_words() {
    whole_run("lambada", &[("lambada_openai", &["--limit", "60"])], None);
}

#[test]
fn pages_in_windows() {
    whole_run("wikitext_bos0", &[("wikitext", &["--limit", "3", "--max-length", "512", "--add-bos-token", "false"])], None);
}

#[test]
fn programs() {
    whole_run("humaneval", &[("humaneval", &["--limit", "5", "--gen-kwargs", "max_gen_toks=96", "--allow-code-exec"])], None);
}

/// The worked examples are other people's text; here they are taken back out of the oracle's own prompts.
#[test]
fn big_bench_hard() {
    let Some(shared) = shared() else { return };
    let folder = tempfile::tempdir().unwrap();
    for (record, _) in records(&shared.join("oracle/eval/zaya_a/bbh/samples.jsonl")) {
        let shots = shots(record["arguments"][0][0].as_str().unwrap());
        assert_eq!(shots.len(), 3);
        let task = task_of(&shared, &record);
        let text: String = shots.iter().map(|s| format!("{s}\n")).collect();
        std::fs::write(folder.path().join(format!("bbh_{task}_shots.jsonl")), text).unwrap();
    }
    whole_run("bbh", &[("bbh_cot_fewshot", &["--limit", "1", "--gen-kwargs", "max_gen_toks=64"])], Some(folder.path()));
}

/// The task whose first document a record holds.
fn task_of(shared: &Path, record: &Value) -> String {
    let known = json_file(&shared.join("oracle/eval/zaya_a/bbh/results.json"));
    let names = known["configs"].as_object().unwrap().keys().map(|k| k.strip_prefix("zo_bbh_").unwrap().to_string());
    let first = |task: &String| -> Value {
        let packed = std::fs::read(shared.join(format!("data/eval/bbh_{task}.jsonl.zst"))).unwrap();
        let text = String::from_utf8(zstd::decode_all(&packed[..]).unwrap()).unwrap();
        serde_json::from_str(text.lines().next().unwrap()).unwrap()
    };
    names.into_iter().find(|task| first(task) == record["doc"]).unwrap()
}

/// Question and answer of each worked example of a prompt.
fn shots(prompt: &str) -> Vec<Value> {
    const THINK: &str = "\nA: Let's think step by step.\n";
    let pieces: Vec<&str> = prompt.split(THINK).collect();
    let next = |piece: &str| -> (String, String) {
        let (before, question) = piece.split_once("\n\nQ: ").unwrap();
        (before.to_string(), question.to_string())
    };
    let mut question = next(pieces[0]).1;
    let mut out = Vec::new();
    for piece in &pieces[1..pieces.len() - 1] {
        let (answer, following) = next(piece);
        out.push(json!({"input": question, "target": answer}));
        question = following;
    }
    out
}

#[test]
fn what_is_not_at_hand_is_said_and_other_tasks_go_on() {
    let Some(shared) = shared() else { return };
    let out = tempfile::tempdir().unwrap();
    let (model, data) = (shared.join("oracle/eval/zaya_a/model"), shared.join("data/eval"));
    let output = eval(out.path(), &model, &[&data], &["--tasks", "gsm8k_cot,piqa", "--limit", "2"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(3), "{said}");
    assert!(said.contains("scripts/eval-shots.sh") && said.contains("gsm8k_cot_shots"), "{said}");
    let results = json_file(&out.path().join("results.json"));
    assert!(results["zaya"]["skipped"]["gsm8k_cot"].as_str().unwrap().contains("gsm8k_cot_shots"));
    assert!(results["results"]["piqa"]["acc,none"].is_f64());
    let output = eval(out.path(), &model, &[&data], &["--tasks", "gsm8k_cot"]);
    assert_eq!(output.status.code(), Some(2));
    let output = eval(out.path(), &model, &[&data], &["--tasks", "humaneval"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("--allow-code-exec"));
}

#[test]
fn show_tells_prompt_ids_and_split() {
    let Some(shared) = shared() else { return };
    let (model, data) = (shared.join("oracle/eval/zaya_a/model"), shared.join("data/eval"));
    let theirs: Vec<Value> =
        records(&shared.join("oracle/eval/zaya_a/few/requests.jsonl")).into_iter().map(|(v, _)| v).skip(20).collect();
    let mut command = program::zaya();
    command
        .args(["eval", "show", "arc_challenge", "--doc", "7", "--num-fewshot", "25", "--model"])
        .arg(model)
        .arg("--data")
        .arg(data);
    let output = command.output().unwrap();
    succeeded(&output);
    let text = String::from_utf8(output.stdout).unwrap();
    let request = &theirs[4 * 7];
    assert!(text.contains(request["context"].as_str().unwrap()));
    let (context, continuation) = (ids(&request["context_enc"]), ids(&request["continuation_enc"]));
    assert!(text.contains(&format!("{context:?} | {continuation:?}")), "{text}");
    assert!(text.contains(&format!("split after token {}", context.len())));
}
