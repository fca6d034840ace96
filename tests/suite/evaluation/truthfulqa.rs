//! TruthfulQA: a preamble that is data, two metrics.

use serde_json::{Value, json};
use zaya::eval::harness::request::{Request, Response};
use zaya::eval::harness::score::counts::Counts;
use zaya::eval::harness::score::samples::score;
use zaya::eval::harness::tasks::build::{Built, Options, build};
use zaya::eval::harness::tasks::documents::{Library, MissingData};
use zaya::eval::harness::tasks::registry::{Node, Registry};
use zaya::eval::harness::tasks::template::Templates;

fn built(task: &str, files: &[(&str, Value)]) -> anyhow::Result<Built> {
    let folder = tempfile::tempdir()?;
    for (name, line) in files {
        std::fs::write(folder.path().join(name), format!("{line}\n"))?;
    }
    let Node::Task(spec) = Registry::built_in()?.resolve(task)?.remove(0) else { panic!("a group") };
    build(&spec, &Library::new(vec![folder.path().into()]), &Templates::default(), &Options::default())
}

#[test]
fn the_preamble_stands_before_each_question_and_mass_is_counted() {
    let document = json!({
        "question": "Why?",
        "mc1_targets": {"choices": ["so", "not"], "labels": [1, 0]},
        "mc2_targets": {"choices": ["so", "thus", "not"], "labels": [1, 1, 0]},
    });
    let preamble = json!({"text": "Q: Who?\nA: Me."});
    let data = [("truthfulqa_mc_from_csv.jsonl", document.clone()), ("truthfulqa_preamble.jsonl", preamble)];
    let mc2 = built("truthfulqa_mc2", &data).unwrap();
    let ask =
        |c: &str| Request::Loglikelihood { context: "Q: Who?\nA: Me.\n\nQ: Why?\nA:".into(), continuation: format!(" {c}") };
    assert_eq!(mc2.asked[0].requests, [ask("so"), ask("thus"), ask("not")]);
    assert!(mc2.notes.iter().any(|n| n.contains("TruthfulQA.csv")) && mc2.notes.iter().any(|n| n.contains("1 of the 817")));
    let answers = |ps: &[f64]| -> Vec<Response> {
        ps.iter().map(|p| Response::Loglikelihood { logprob: p.ln(), is_greedy: false, tokens: 0 }).collect()
    };
    let value = |b: &Built, ps: &[f64]| score(b, &answers(ps), None, Counts::default(), 0).unwrap().metrics[0].value;
    assert!((value(&mc2, &[0.1, 0.2, 0.3]) - 0.5).abs() < 1e-12);
    let mc1 = built("truthfulqa_mc1", &data).unwrap();
    assert_eq!((value(&mc1, &[0.2, 0.1]), value(&mc1, &[0.1, 0.2])), (1.0, 0.0));
    let e = built("truthfulqa_mc1", &data[..1]).unwrap_err();
    assert!(e.downcast_ref::<MissingData>().is_some_and(|m| m.0.contains("truthfulqa_preamble")), "{e}");
}
