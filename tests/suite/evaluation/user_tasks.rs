//! Users' own tasks: lm-eval's YAML as it is, errors that say where, all built-in tasks over the data at hand.

use serde_json::json;
use zaya::eval::harness::request::{Request, Response};
use zaya::eval::harness::score::counts::Counts;
use zaya::eval::harness::score::samples::score;
use zaya::eval::harness::tasks::build::{Options, build};
use zaya::eval::harness::tasks::documents::Library;
use zaya::eval::harness::tasks::registry::{Node, Registry};
use zaya::eval::harness::tasks::template::Templates;

use super::support::shared;

#[test]
fn lm_evals_yaml_is_read_as_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    write(
        "base.yaml",
        "task: base\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: capitals.csv\ntest_split: test\n\
         output_type: multiple_choice\ndoc_to_text: |-\n  Q: {{country}}\n  A:\ndoc_to_target: \"{{answer}}\"\n\
         doc_to_choice: \"{{[a, b]}}\"\nmetric_list:\n  - metric: acc\n  - metric: acc_mutual_info\nmetadata:\n  version: 1.0\n",
    );
    write("mine.yaml", "include: base.yaml\ntask: mine\ndescription: \"Capitals.\\n\\n\"\ntag: geo\n");
    write("group.yaml", "group: both\ntask: [base, mine]\naggregate_metric_list:\n  - metric: acc\n    weight_by_size: false\n");
    write("capitals.csv", "country,a,b,answer\nFrance,Paris,Rome,0\nItaly,Paris,Rome,1\n");
    let mut registry = Registry::built_in().unwrap();
    registry.add_path(folder.path()).unwrap();
    assert_eq!(registry.resolve("both").unwrap()[0].tasks().len(), 2);
    let Node::Task(spec) = registry.resolve("geo").unwrap().remove(0) else { panic!("a group") };
    let library = Library::new(vec![folder.path().into()]);
    let built = build(&spec, &library, &Templates::default(), &Options::default()).unwrap();
    let ask =
        |context: &str, continuation: &str| Request::Loglikelihood { context: context.into(), continuation: continuation.into() };
    let context = "Capitals.\n\nQ: Italy\nA:";
    assert_eq!(built.asked[1].requests, [ask(context, " Paris"), ask(context, " Rome"), ask("", " Paris"), ask("", " Rome")]);
    let lps = [-3.0, -2.0, -5.0, -1.0, -3.0, -2.0, -5.0, -1.0].map(|logprob| Response::Loglikelihood {
        logprob,
        is_greedy: false,
        tokens: 0,
    });
    let scored = score(&built, &lps, None, Counts::default(), 0).unwrap();
    let row: Vec<_> = scored.metrics.iter().map(|m| (m.name.as_str(), m.value)).collect();
    // The likelier choice is Rome both times; against their likelihood alone, Paris gains more.
    assert_eq!(row, [("acc", 0.5), ("acc_mutual_info", 0.5)]);
    assert_eq!((scored.samples[0]["acc"].clone(), scored.samples[0]["acc_mutual_info"].clone()), (json!(0.0), json!(1.0)));
}

#[test]
fn errors_say_where_and_what_instead() {
    let folder = tempfile::tempdir().unwrap();
    let fails = |name: &str, text: &str, parts: &[&str]| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        let e = format!("{:#}", Registry::default().add_path(&path).unwrap_err());
        parts.iter().for_each(|p| assert!(e.contains(p), "{p:?} is not in {e}"));
    };
    fails("a.yaml", "task: a\ndoc_to_text: !function utils.f\n", &["a.yaml:2", "!function"]);
    fails("b.yaml", "task: b\ntest_split: test\nmetric_lst: []\n", &["b.yaml:3", "metric_lst", "metric_list"]);
    fails(
        "c.toml",
        "task = \"c\"\ntest_split = \"test\"\n\nmetric_list = [{ metric = \"bleurt\" }]\n",
        &["c.toml", "bleurt", "acc_norm"],
    );
    fails(
        "d.toml",
        "task = \"d\"\nprocess_docs = { function = \"hellaswag_preproces\" }\ntest_split = \"test\"\n",
        &["d.toml:2", "hellaswag_preprocess"],
    );
    fails("e.toml", "task = \n", &["e.toml:1"]);
    fails(
        "f.toml",
        "task = \"f\"\ntest_split = \"test\"\nfilter_list = [{ name = \"x\", filter = [{ function = \"regex\", regex_pattern = \"(\" }] }]\n",
        &["f.toml"],
    );
    fails("g.toml", "task = \"g\"\n", &["g.toml:1", "test_split"]);
    let e = Registry::built_in().unwrap().resolve("arc_esy").unwrap_err().to_string();
    assert!(e.contains("arc_easy"), "{e}");
}

#[test]
fn all_built_in_tasks_are_there() {
    let registry = Registry::built_in().unwrap();
    let count = |name: &str| registry.resolve(name).unwrap().iter().map(|n| n.tasks().len()).sum::<usize>();
    assert_eq!((count("mmlu"), count("bbh"), count("bbh_cot_fewshot"), count("mmlu_stem")), (57, 27, 27, 19));
    assert_eq!((count("ai2_arc"), count("gsm8k_cot"), count("humaneval_64")), (2, 1, 1));
}

/// Every task builds its requests over the data at hand, with shots where it is used with shots, and says what is not whole.
#[test]
fn all_tasks_build_over_the_data_at_hand() {
    let Some(shared) = shared() else { return };
    let (registry, library, templates) =
        (Registry::built_in().unwrap(), Library::new(vec![shared.join("data/eval")]), Templates::default());
    let mut notes = Vec::new();
    for name in [
        "mmlu",
        "gsm8k",
        "humaneval",
        "hellaswag",
        "arc_easy",
        "arc_challenge",
        "piqa",
        "winogrande",
        "openbookqa",
        "lambada_openai",
        "wikitext",
    ] {
        for node in registry.resolve(name).unwrap() {
            for task in node.tasks() {
                for shots in [None, Some(2)] {
                    let options = Options { num_fewshot: shots, limit: Some(3.0), ..Options::default() };
                    let built = build(task, &library, &templates, &options).unwrap_or_else(|e| panic!("{e:#}"));
                    assert_eq!(built.asked.len(), 3);
                    // Without shots nothing of lm-eval's faults applies to these tasks.
                    assert!(shots.is_some() || built.faults.counts().is_empty(), "{name}: {:?}", built.faults);
                    notes.extend(built.notes);
                }
            }
        }
    }
    let says = |part: &str| notes.iter().any(|n| n.contains(part));
    for part in ["1000 of the 10042", "piqa: its train split", "winogrande: its train split", "hellaswag: its train split"] {
        assert!(says(part), "{part:?} is not among {notes:#?}");
    }
}
