//! lm-eval's own runs over a tiny model: strings, ids, records and results are rebuilt from its log-probabilities and texts.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use serde_json::{Map, Value, json};
use zaya::eval::harness::compat::{Compat, Faults};
use zaya::eval::harness::encode::Encoder;
use zaya::eval::harness::python::json::{Style, dumps};
use zaya::eval::harness::request::Response;
use zaya::eval::harness::run::{Planned, line, plan};
use zaya::eval::harness::score::code::{CodeRunner, Verdict};
use zaya::eval::harness::score::counts::Counts;
use zaya::eval::harness::score::results::{RunInfo, Scored, results};
use zaya::eval::harness::score::samples::score;
use zaya::eval::harness::tasks::build::{Built, Options, build};
use zaya::eval::harness::tasks::documents::Library;
use zaya::eval::harness::tasks::registry::{GroupMetric, GroupSpec, Node, Registry};
use zaya::eval::harness::tasks::template::Templates;

use super::support::{Tok, assert_same, fixtures, ids, records, shared};

/// The oracle's programs are the tiny model's babble: none passes.
struct AllFail;

impl CodeRunner for AllFail {
    fn run(&self, _: &str, _: &str) -> anyhow::Result<Verdict> {
        Ok(Verdict::Fail)
    }
}

/// Our task of an oracle's key.
pub fn our_name(key: &str) -> String {
    let name = key.strip_prefix("zo_").unwrap_or(key);
    let name = name.strip_suffix("_25").or(name.strip_suffix("_5")).unwrap_or(name);
    if name == "bbh" { "bbh_cot_fewshot".into() } else { name.replace("bbh_", "bbh_cot_fewshot_") }
}

/// Responses of a document as its record tells them.
fn responses(record: &Value) -> Vec<Response> {
    let one = |r: &Value| match &r[0] {
        Value::String(_) => Response::Generated(r.as_array().unwrap().iter().map(|t| t.as_str().unwrap().into()).collect()),
        Value::Array(pair) => {
            Response::Loglikelihood { logprob: pair[0].as_f64().unwrap(), is_greedy: pair[1].as_bool().unwrap(), tokens: 0 }
        }
        number => Response::Rolling { logprob: number.as_f64().unwrap() },
    };
    record["resps"].as_array().unwrap().iter().map(one).collect()
}

/// Compares the ids of every request with requests.jsonl.
fn compare_ids(built: &Built, asked: &[(Value, String)], tok: &Tok, bos: Option<bool>, max_length: usize) -> usize {
    let faults = Faults::default();
    let encoder = Encoder { tokenizer: tok, compat: Compat::LmEval, add_special: bos, max_length, faults: &faults };
    let by_text: HashMap<(String, String), &Value> =
        asked.iter().map(|(r, _)| ((r["context"].to_string(), r["continuation"].to_string()), r)).collect();
    let mut windows = asked.iter().filter(|(r, _)| r["type"] == "rolling_window").map(|(r, _)| r);
    let planned = plan(built, &encoder, &mut Counts::default()).unwrap();
    let requests = built.asked.iter().flat_map(|a| &a.requests);
    let mut compared = 0;
    for (request, planned) in requests.zip(&planned) {
        let key = |continuation: Value| (json!(request.prompt()).to_string(), continuation.to_string());
        match planned {
            Planned::Pair { pair, .. } => {
                let theirs = by_text[&key(request.arguments()[1].clone())];
                assert_eq!(*pair.context, ids(&theirs["context_enc"]), "{request:?}");
                assert_eq!(pair.continuation, ids(&theirs["continuation_enc"]), "{request:?}");
            }
            Planned::Generate(prompt) => {
                let theirs = by_text[&key(Value::Null)];
                assert_eq!(prompt.ids, ids(&theirs["context_enc"]), "{}", request.prompt());
            }
            Planned::Windows(ours) => {
                for window in ours {
                    let theirs = windows.next().unwrap();
                    assert_eq!(*window.context, ids(&theirs["context_enc"]));
                    assert_eq!(window.continuation, ids(&theirs["continuation_enc"]));
                }
            }
        }
        compared += 1;
    }
    compared
}

/// Strings, ids and records of the fixtures: the first documents of every kind of task without shots.
#[test]
fn fixtures_are_rebuilt() {
    let registry = Registry::built_in().unwrap();
    let tok = Tok::load();
    let asked = records(&fixtures().join("requests.jsonl"));
    let mut compared = 0;
    for key in ["arc_easy", "arc_challenge", "hellaswag", "piqa", "openbookqa", "winogrande", "lambada_openai", "humaneval"] {
        let theirs = records(&fixtures().join(format!("samples_{key}.jsonl")));
        let folder = tempfile::tempdir().unwrap();
        let nodes = registry.resolve(key).unwrap();
        let Node::Task(spec) = &nodes[0] else { panic!("{key} is a group") };
        let data: String = theirs.iter().map(|(r, _)| line(&r["doc"])).collect();
        let name = &spec.data_files[spec.evaluated_split()][0];
        std::fs::write(folder.path().join(format!("{name}.jsonl")), data).unwrap();
        let mut options = Options { num_fewshot: Some(0), ..Options::default() };
        if key == "humaneval" {
            options.generation.insert("max_gen_toks".into(), 96.into());
        }
        let built = build(spec, &Library::new(vec![folder.path().into()]), &Templates::default(), &options).unwrap();
        assert!(built.notes.iter().any(|n| n.contains("official documents")), "{:?}", built.notes);
        let answers: Vec<Response> = theirs.iter().flat_map(|(r, _)| responses(r)).collect();
        let scored = score(&built, &answers, Some(&AllFail), Counts::default(), 0).unwrap();
        assert_eq!(scored.samples.len(), theirs.len(), "{key}");
        for (ours, (_, theirs)) in scored.samples.iter().zip(&theirs) {
            assert_same(line(ours).trim_end(), theirs, key);
        }
        compared += compare_ids(&built, &asked, &tok, None, 2048);
    }
    assert!(compared > 60, "{compared}");
}

/// All runs of the oracle, whole.
#[test]
fn whole_oracle_is_rebuilt() {
    let Some(shared) = shared() else { return };
    let library = Library::new(vec![shared.join("data/eval")]);
    for run in ["mc0", "few", "mmlu", "gsm8k", "lambada", "humaneval", "wikitext_bos0"] {
        whole_run(&shared.join("oracle/eval/zaya_a").join(run), run, &library);
    }
}

fn whole_run(folder: &Path, run: &str, library: &Library) {
    let registry = Registry::built_in().unwrap();
    let templates = Templates::default();
    let tok = Tok::load();
    let theirs: Value = serde_json::from_str(&std::fs::read_to_string(folder.join("results.json")).unwrap()).unwrap();
    let samples = records(&folder.join("samples.jsonl"));
    let asked = records(&folder.join("requests.jsonl"));
    let max_length = theirs["max_length"].as_u64().unwrap() as usize;
    let bos = (run == "wikitext_bos0").then_some(false);
    let mut scored: BTreeMap<String, Scored> = BTreeMap::new();
    let mut next = samples.iter();
    let mut ids_compared = 0;
    // Records lie in the order of the tasks' names.
    for key in theirs["configs"].as_object().unwrap().keys() {
        let name = our_name(key);
        let nodes = registry.resolve(&name).unwrap();
        let Node::Task(spec) = &nodes[0] else { panic!("{name} is a group") };
        let config = &theirs["configs"][key];
        let generation = theirs["config"]["gen_kwargs"].as_object().cloned().unwrap_or_default();
        let options = Options {
            num_fewshot: config["num_fewshot"].as_u64().map(|n| n as usize),
            limit: theirs["config"]["limit"].as_f64(),
            generation,
            ..Options::default()
        };
        let built = build(spec, library, &templates, &options).unwrap();
        let count = built.asked.len() * built.spec.filters.len();
        let own: Vec<_> = next.by_ref().take(count).collect();
        let answers: Vec<Response> = own[..built.asked.len()].iter().flat_map(|(r, _)| responses(r)).collect();
        let iters = theirs["config"]["bootstrap_iters"].as_u64().unwrap() as usize;
        let task = score(&built, &answers, Some(&AllFail), Counts::default(), iters).unwrap();
        assert_eq!(task.samples.len(), own.len(), "{run} {key}");
        for (ours, (_, theirs)) in task.samples.iter().zip(&own) {
            assert_same(line(ours).trim_end(), theirs, &format!("{run} {key}"));
        }
        ids_compared += compare_ids(&built, &asked, &tok, bos, max_length);
        scored.insert(name, (built.into(), task));
    }
    assert!(next.next().is_none(), "{run}: records are left over");
    compare_results(run, &registry, &theirs, &scored);
    eprintln!("{run}: {} records and {ids_compared} requests agree", samples.len());
}

fn compare_results(run: &str, registry: &Registry, theirs: &Value, scored: &BTreeMap<String, Scored>) {
    let groups = theirs["group_subtasks"].as_object().unwrap();
    let task = |key: &str| registry.resolve(&our_name(key)).unwrap().remove(0);
    let nodes: Vec<Node> = match groups.iter().next() {
        // The oracle's groups are flat.
        Some((group, members)) => {
            let children: Vec<Node> = members.as_array().unwrap().iter().map(|m| task(m.as_str().unwrap())).collect();
            let metric = if run == "mmlu" { "acc" } else { "exact_match" };
            let spec = GroupSpec {
                name: our_name(group),
                alias: None,
                members: Vec::new(),
                metrics: vec![GroupMetric { metric: metric.into(), weight_by_size: true, filters: None }],
                version: if run == "mmlu" { json!(2) } else { json!(3.0) },
            };
            vec![Node::Group { spec, children }]
        }
        None => theirs["results"].as_object().unwrap().keys().map(|k| task(k)).collect(),
    };
    let ours = results(&nodes, scored, &RunInfo::default());
    let print = |v: &Value| dumps(v, Style { indent: Some(1), ascii: false });
    for key in ["results", "groups", "group_subtasks", "versions", "n-shot", "higher_is_better", "n-samples"] {
        let their_part = renamed(&theirs[key]);
        let mut our_part = ours.get(key).cloned().unwrap_or(Value::Null);
        if key == "results" || key == "groups" {
            aliases_of(&mut our_part, &their_part);
        }
        assert_same(&print(&our_part), &print(&their_part), &format!("{run} {key}"));
    }
    for (key, config) in theirs["configs"].as_object().unwrap() {
        let (ours, theirs) = (plain(&ours["configs"][our_name(key)]), plain(&renamed(config)));
        assert_same(&print(&ours), &print(&theirs), &format!("{run} {key}"));
    }
}

/// The oracle's names replaced by ours.
fn renamed(v: &Value) -> Value {
    match v {
        Value::String(s) if s.starts_with("zo_") => our_name(s).into(),
        Value::Array(items) => items.iter().map(renamed).collect::<Vec<_>>().into(),
        Value::Object(map) => {
            let name = |k: &String| if k.starts_with("zo_") { our_name(k) } else { k.clone() };
            Value::Object(map.iter().map(|(k, v)| (name(k), renamed(v))).collect())
        }
        other => other.clone(),
    }
}

/// Aliases are the oracle's own.
fn aliases_of(ours: &mut Value, theirs: &Value) {
    for (name, row) in ours.as_object_mut().into_iter().flatten() {
        row["alias"] = theirs[name]["alias"].clone();
    }
}

/// A configuration without paths, what stands for Python functions, and what the oracle's own definitions lack.
fn plain(config: &Value) -> Value {
    let mut out: Map<String, Value> = config.as_object().unwrap().clone();
    let dropped = [
        "dataset_kwargs",
        "tag",
        "process_docs",
        "process_results",
        "doc_to_text",
        "doc_to_target",
        "doc_to_choice",
        "training_split",
        "validation_split",
        "fewshot_config",
        "fewshot_split",
        "filter_list",
        "metric_list",
        "unsafe_code",
        "task_alias",
    ];
    dropped.iter().for_each(|k| drop(out.shift_remove(*k)));
    if let Some(g) = out.get_mut("generation_kwargs").and_then(Value::as_object_mut) {
        g.shift_remove("until");
    }
    Value::Object(out)
}
