//! Faults of lm-eval that change scores without a word, on inputs that show them (section numbers B1 to B25 are those of the survey that
//! the design rests on). Each is reproduced by default and put right under `Strict`, unless it is a crash.

use serde_json::{Value, json};
use zaya::eval::harness::compat::{Compat, Fault, Faults};
use zaya::eval::harness::encode::{Encode, Encoder};
use zaya::eval::harness::request::{Request, Response};
use zaya::eval::harness::score::counts::Counts;
use zaya::eval::harness::score::samples::{TaskScore, score};
use zaya::eval::harness::tasks::build::{Built, Options, build};
use zaya::eval::harness::tasks::documents::Library;
use zaya::eval::harness::tasks::registry::{Node, Registry};
use zaya::eval::harness::tasks::template::Templates;

use super::support::Tok;

/// Builds a task from its TOML over documents in files by name.
pub fn built(definition: &str, files: &[(&str, Vec<Value>)], options: &Options) -> Built {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("t.toml"), definition).unwrap();
    for (name, docs) in files {
        let text: String = docs.iter().map(|d| format!("{d}\n")).collect();
        std::fs::write(folder.path().join(name), text).unwrap();
    }
    let mut registry = Registry::default();
    registry.add_path(&folder.path().join("t.toml")).unwrap();
    let Node::Task(spec) = registry.resolve("t").unwrap().remove(0) else { panic!("a group") };
    build(&spec, &Library::new(vec![folder.path().into()]), &Templates::default(), options).unwrap()
}

const CHOICE: &str = "task = \"t\"\noutput_type = \"multiple_choice\"\ntest_split = \"test\"\ndata_files = { test = \"t.jsonl\" }\n\
    doc_to_text = \"{{q}}\"\ndoc_to_target = \"{{a}}\"\ndoc_to_choice = \"c\"\n\
    metric_list = [{ metric = \"acc\" }, { metric = \"acc_norm\" }, { metric = \"acc_bytes\" }]\n";

fn docs(texts: &[&str]) -> Vec<Value> {
    texts.iter().map(|q| json!({"q": q, "a": 0, "c": ["x", "yy"]})).collect()
}

fn strict() -> Options {
    Options { compat: Compat::Strict, ..Options::default() }
}

fn lps(pairs: &[f64]) -> Vec<Response> {
    pairs.iter().map(|lp| Response::Loglikelihood { logprob: *lp, is_greedy: false, tokens: 0 }).collect()
}

fn scored(built: &Built, pairs: &[f64]) -> TaskScore {
    score(built, &lps(pairs), None, Counts::default(), 0).unwrap()
}

#[test]
fn b2_rolling_bos_is_doubled_by_default_and_single_in_strict() {
    let tok = Tok::load();
    let faults = Faults::default();
    let encoder = |compat| Encoder { tokenizer: &tok, compat, add_special: None, max_length: 16, faults: &faults };
    let first = |compat| encoder(compat).rolling("The").unwrap()[0].clone();
    assert_eq!((&first(Compat::LmEval).context[..], first(Compat::LmEval).continuation[0]), (&[2][..], 2));
    assert_eq!((&first(Compat::Strict).context[..], first(Compat::Strict).continuation[0]), (&[2][..], 436));
    assert!(faults.counts()[&Fault::DoubledBos] >= 2);
    // A context that spells the BOS out gets no second.
    assert_eq!(encoder(Compat::LmEval).pair("<bos>Hello", " world").unwrap().context[..2], [2, 301]);
}

#[test]
fn b4_the_document_is_not_its_own_shot_in_strict() {
    let three = docs(&["a", "b", "c"]);
    let leaks = |options: &Options| {
        let b = built(CHOICE, &[("t.jsonl", three.clone())], options);
        let leaking = b.asked.iter().filter(|a| a.requests[0].prompt().matches(a.doc["q"].as_str().unwrap()).count() > 1).count();
        (leaking, b.faults.counts().get(&Fault::FewshotLeak).copied().unwrap_or(0))
    };
    let two = |compat| Options { compat, num_fewshot: Some(2), ..Options::default() };
    let (leaking, noted) = leaks(&two(Compat::LmEval));
    assert!(leaking >= 1 && noted == leaking as u64, "{leaking} {noted}");
    assert_eq!(leaks(&two(Compat::Strict)).0, 0);
    // Duplicates in the words of the document are no shots either.
    let b = built(CHOICE, &[("t.jsonl", docs(&["a", "a", "b", "c"]))], &two(Compat::Strict));
    assert_eq!(b.asked[0].requests[0].prompt().matches("a ").count(), 0);
    assert_eq!(b.duplicates, 1);
}

#[test]
fn b7_ties_take_the_first_and_are_counted() {
    let b = built(CHOICE, &[("t.jsonl", docs(&["a", "b"]))], &Options::default());
    let s = scored(&b, &[-1.5, -1.5, -2.0, -1.0]);
    assert_eq!((s.counts.ties, s.metrics[0].value), (1, 0.5));
}

#[test]
fn b9_characters_and_bytes_are_different_lengths() {
    let doc = json!({"q": "a", "a": 0, "c": ["日本語です", "abcdefgh"]});
    let b = built(CHOICE, &[("t.jsonl", vec![doc])], &Options::default());
    // Per character -2.0 against -1.75, per byte -0.67 against -1.75.
    let s = scored(&b, &[-10.0, -14.0]);
    let by_name = |name: &str| s.metrics.iter().find(|m| m.name == name).unwrap().value;
    assert_eq!((by_name("acc"), by_name("acc_norm"), by_name("acc_bytes")), (1.0, 0.0, 1.0));
}

#[test]
fn b13_stops_do_not_hide_a_number_before_a_newline() {
    use zaya::eval::harness::stop::cut;
    assert_eq!(cut("12.5", &[".".to_string()]), "12");
    assert_eq!(cut("10\n\nPassage", &["\n\n".to_string()]), "10");
}

#[test]
fn b19_equal_tokens_with_another_split_are_two_requests() {
    let tok = Tok::load();
    let faults = Faults::default();
    let encoder = Encoder { tokenizer: &tok, compat: Compat::LmEval, add_special: None, max_length: 64, faults: &faults };
    let (a, b) = (encoder.pair("a b", " c d").unwrap(), encoder.pair("a b c", " d").unwrap());
    let whole = |p: &zaya::eval::harness::encode::Pair| [&p.context[..], &p.continuation].concat();
    assert_eq!(whole(&a), whole(&b));
    assert_ne!(a.context.len(), b.context.len());
}

#[test]
fn b22_seed_changes_prompts_and_limit_does_not() {
    let pool: Vec<String> = (0..40).map(|i| format!("q{i}")).collect();
    let pool = docs(&pool.iter().map(String::as_str).collect::<Vec<_>>());
    let definition = format!("{CHOICE}fewshot_split = \"train\"\n")
        .replace("{ test = \"t.jsonl\" }", "{ test = \"t.jsonl\", train = \"p.jsonl\" }");
    let files = [("t.jsonl", docs(&["a", "b", "c"])), ("p.jsonl", pool)];
    let prompts = |seed: u64, limit: Option<f64>| -> Vec<String> {
        let options = Options { num_fewshot: Some(3), fewshot_seed: seed, limit, ..Options::default() };
        built(&definition, &files, &options).asked.iter().map(|a| a.requests[0].prompt().to_string()).collect()
    };
    assert_ne!(prompts(1234, None), prompts(1235, None));
    assert_eq!(prompts(1234, Some(2.0)), prompts(1234, None)[..2]);
    assert_eq!(prompts(1234, Some(0.5)).len(), 2);
}

#[test]
fn digits_in_the_first_document_swallow_questions_by_default_only() {
    let all = docs(&["1", "what is this?"]);
    let b = built(CHOICE, &[("t.jsonl", all.clone())], &Options::default());
    assert!(b.multiple_input && b.asked[1].requests.iter().all(|r| !r.prompt().contains("what")));
    assert!(b.faults.counts().contains_key(&Fault::DigitsAsIndex));
    let b = built(CHOICE, &[("t.jsonl", all)], &strict());
    assert!(!b.multiple_input && b.asked[1].requests.iter().all(|r| r.prompt() == "what is this?"));
}

#[test]
fn targets_like_lists_stay_texts_in_strict() {
    let definition = "task = \"t\"\noutput_type = \"generate_until\"\ntest_split = \"test\"\ndata_files = { test = \"t.jsonl\" }\n\
        doc_to_text = \"{{q}}\"\ndoc_to_target = \"{{a}}\"\n";
    let files = [("t.jsonl", vec![json!({"q": "x", "a": "[1, 2]"})])];
    assert_eq!(built(definition, &files, &Options::default()).asked[0].target, json!([1, 2]));
    assert_eq!(built(definition, &files, &strict()).asked[0].target, json!("[1, 2]"));
}

#[test]
fn shots_of_last_word_tasks_have_one_space_in_strict() {
    let definition = "task = \"t\"\noutput_type = \"loglikelihood\"\ntest_split = \"test\"\nfewshot_split = \"train\"\nnum_fewshot = 1\n\
        data_files = { test = \"t.jsonl\", train = \"p.jsonl\" }\ndoc_to_text = \"{{q}}\"\ndoc_to_target = \"{{' ' + a}}\"\n";
    let files = [("t.jsonl", vec![json!({"q": "a b", "a": "c"})]), ("p.jsonl", vec![json!({"q": "d e", "a": "f"})])];
    let prompt = |o: &Options| built(definition, &files, o).asked[0].requests[0].clone();
    let ask = |context: &str| Request::Loglikelihood { context: context.into(), continuation: " c".into() };
    assert_eq!(prompt(&Options::default()), ask("d e  f\n\na b"));
    assert_eq!(prompt(&strict()), ask("d e f\n\na b"));
}

#[test]
fn white_space_contexts_and_merges_never_crash() {
    /// No BOS, and "ab" is one token.
    struct Merging;
    impl Encode for Merging {
        fn encode(&self, text: &str, _: bool) -> anyhow::Result<Vec<u32>> {
            Ok(text.replace("ab", "\u{1}").chars().map(|c| c as u32).collect())
        }
        fn bos(&self) -> Option<(u32, &str)> {
            None
        }
        fn eos(&self) -> Option<(u32, &str)> {
            Some((0, "<eos>"))
        }
    }
    let faults = Faults::default();
    let encoder = |compat| Encoder { tokenizer: &Merging, compat, add_special: None, max_length: 9, faults: &faults };
    let pair = encoder(Compat::LmEval).pair("  ", "x").unwrap();
    assert_eq!((&pair.context[..], pair.continuation), (&[0][..], vec![32, 32, 120]));
    // "xa" + "b": lm-eval scores nothing and stops; we score "b" and say so.
    let pair = encoder(Compat::LmEval).pair("xa", "b").unwrap();
    assert!(pair.boundary_fallback && pair.continuation == [98]);
    // "xa" + "bc": lm-eval would score nothing of "b". Strict scores all of it.
    assert_eq!(encoder(Compat::LmEval).pair("xa", "bcd").unwrap().continuation, [99, 100]);
    let strict = encoder(Compat::Strict).pair("xa", "bcd").unwrap();
    assert!(strict.boundary_mismatch && strict.continuation == [98, 99, 100]);
    assert!(faults.counts().contains_key(&Fault::BoundaryMismatch));
}
