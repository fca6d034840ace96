//! Single pairs, windows and extractions of lm-eval's own classes.

use serde_json::{Value, json};
use zaya::eval::harness::compat::{Compat, Faults};
use zaya::eval::harness::encode::Encoder;
use zaya::eval::harness::request::Response;
use zaya::eval::harness::score::filters::{Answer, apply};
use zaya::eval::harness::tasks::registry::{Node, Registry};
use zaya::eval::harness::tasks::spec::TaskSpec;
use zaya::eval::harness::tasks::spec_parts::{Filter, RegexStep, Step};

use super::support::{Tok, fixtures, ids, records};

#[test]
fn pairs_truncation_and_windows() {
    let tok = Tok::load();
    let faults = Faults::default();
    let encoder =
        |max_length: usize| Encoder { tokenizer: &tok, compat: Compat::LmEval, add_special: None, max_length, faults: &faults };
    let (mut pairs, mut rolling) = (0, 0);
    for (case, _) in records(&fixtures().join("edge_zaya_gm.jsonl")) {
        let text = |key: &str| case[key].as_str().unwrap_or_default();
        match text("case") {
            "rolling" => {
                let e = encoder(case["max_length"].as_u64().unwrap() as usize);
                let windows = e.rolling(text("text")).unwrap();
                let shape: Vec<Value> = windows.iter().map(|w| json!([w.context.len(), w.continuation.len()])).collect();
                assert_eq!(json!(shape), case["windows"], "{case}");
                let head: Vec<u32> = windows[0].context.iter().chain(&windows[0].continuation).copied().collect();
                assert!(head.starts_with(&ids(&case["first_window_head"])), "{case}");
                rolling += 1;
            }
            "truncation" => {
                let e = encoder(case["max_length"].as_u64().unwrap() as usize);
                let whole = e.pair(text("context"), text("continuation")).unwrap();
                match e.truncate(&whole) {
                    Ok((cut, over)) => {
                        assert!(case.get("error").is_none(), "{case}");
                        assert!(cut.context.len() + cut.continuation.len() <= e.max_length + 1);
                        assert_eq!(over > 0, whole.context.len() + whole.continuation.len() > e.max_length + 1);
                        assert_eq!(cut.continuation, whole.continuation);
                    }
                    Err(_) => assert!(case.get("error").is_some(), "{case}"),
                }
            }
            _ if case.get("context_enc").is_some() => {
                let pair = encoder(2048).pair(text("context"), text("continuation")).unwrap();
                assert_eq!(*pair.context, ids(&case["context_enc"]), "{case}");
                let theirs = ids(&case["continuation_enc"]);
                // B1: lm-eval stops with an assertion where we encode the continuation alone.
                assert_eq!(pair.boundary_fallback, case.get("error").is_some(), "{case}");
                if !pair.boundary_fallback {
                    assert_eq!(pair.continuation, theirs, "{case}");
                }
                assert!(!pair.continuation.is_empty());
                pairs += 1;
            }
            _ => {}
        }
    }
    assert!(pairs >= 20 && rolling >= 25, "{pairs} {rolling}");
}

fn spec(name: &str) -> TaskSpec {
    match Registry::built_in().unwrap().resolve(name).unwrap().remove(0) {
        Node::Task(t) => *t,
        Node::Group { .. } => panic!("{name} is a group"),
    }
}

fn filtered(filter: &Filter, text: &str, doc: &Value) -> String {
    match apply(filter, &Response::Generated(vec![text.into()]), doc).unwrap().0 {
        Answer::Text(t) => t,
        Answer::Texts(t) => t[0].clone(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn extractions_are_lm_evals() {
    let (gsm8k, cot, bbh) = (spec("gsm8k"), spec("gsm8k_cot"), spec("bbh_cot_fewshot_navigate"));
    let strict = RegexStep { pattern: r"(\([A-Z]\))".into(), group_select: 0, fallback: "[invalid]".into() };
    let multi = Filter {
        name: "m".into(),
        steps: vec![Step::MultiChoiceRegex {
            regex: strict,
            ignore_case: true,
            ignore_punctuation: false,
            regexes_to_ignore: vec![],
        }],
    };
    let mut compared = 0;
    for (case, _) in records(&fixtures().join("extraction_vectors.jsonl")) {
        let text = case["text"].as_str().unwrap();
        let doc = json!({"choices": case["choices"]});
        let mut agree = |key: &str, ours: String| {
            assert_eq!(json!(ours), case[key], "{key} of {case}");
            compared += 1;
        };
        match case["kind"].as_str().unwrap() {
            "gsm8k" => {
                agree("strict-match", filtered(&gsm8k.filters[0], text, &doc));
                agree("flexible-extract", filtered(&gsm8k.filters[1], text, &doc));
                agree("cot-strict", filtered(&cot.filters[0], text, &doc));
            }
            "bbh_cot_fewshot" => agree("get-answer", filtered(&bbh.filters[0], text, &doc)),
            _ => agree("out", filtered(&multi, text, &doc)),
        }
    }
    assert!(compared > 90, "{compared}");
}
