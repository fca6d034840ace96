//! Scores of saved answers, without a model: filters, metrics and programs run again over the records of an earlier run.

use std::path::PathBuf;

use anyhow::{Context, Result};
use serde_json::{Map, Value};

use super::harness::request::{Request, Response};
use super::harness::score::code::CodeRunner;
use super::harness::score::counts::Counts;
use super::harness::score::results::Scored;
use super::harness::score::samples::{CHANCE, CONTINUATION_TOKENS, score};
use super::harness::tasks::build::{Built, Options, build};
use super::harness::tasks::documents::Library;
use super::harness::tasks::spec::TaskSpec;
use super::harness::tasks::template::Templates;
use super::session::records::TaskRecords;
use crate::error::bad_input;

/// The task as `records` tell it, with its definition of today: documents, requests and answers are those of the records.
///
/// # Errors
/// `BadInput`: a record does not fit the task.
pub fn rescore(spec: &TaskSpec, records: &TaskRecords, code: Option<&dyn CodeRunner>, bootstrap_iters: usize) -> Result<Scored> {
    let first = records.records.first().map(|r| &r["filter"]);
    // Every filter has the same answers.
    let own: Vec<&Value> = records.records.iter().filter(|r| Some(&r["filter"]) == first).collect();
    let mut built = rebuild(spec, records, &own)?;
    // Documents of CORE were shuffled.
    built.asked.sort_by_key(|a| a.doc_id);
    let mut responses = Vec::new();
    for (asked, record) in built.asked.iter_mut().zip(&own) {
        let says = || format!("{}: document {}", records.path.display(), record["doc_id"]);
        asked.doc_id = record["doc_id"].as_u64().unwrap_or_default() as usize;
        asked.requests = requests(record).with_context(says)?;
        let answers = record["resps"].as_array().map(Vec::as_slice).unwrap_or_default();
        if answers.len() != asked.requests.len() {
            let text = format!("{} answers to {} requests", answers.len(), asked.requests.len());
            return Err(bad_input(text)).with_context(says);
        }
        let pairs = asked.requests.iter().zip(answers);
        let read = pairs.enumerate().map(|(i, (request, v))| {
            let tokens = record[CONTINUATION_TOKENS][i].as_u64().unwrap_or_default() as usize;
            response(request, v, tokens)
        });
        responses.extend(read.collect::<Result<Vec<_>>>().with_context(says)?);
    }
    let score = score(&built, &responses, code, Counts::default(), bootstrap_iters)?;
    Ok((built.into(), score))
}

/// Documents of the records in the place of the task's data.
fn rebuild(spec: &TaskSpec, records: &TaskRecords, own: &[&Value]) -> Result<Built> {
    let mut spec = spec.clone();
    // Documents were processed and chosen before they were recorded.
    spec.process_docs = None;
    spec.only = Map::new();
    spec.official_docs = None;
    spec.preamble = Vec::new();
    spec.core_chance = own.first().and_then(|r| r[CHANCE].as_f64()).or(spec.core_chance);
    let name = PathBuf::from(records.path.file_name().unwrap_or_default());
    spec.data_files = [(spec.evaluated_split().to_string(), vec![name.display().to_string()])].into();
    let library = Library::of(name, own.iter().map(|r| r["doc"].clone()).collect());
    let options = Options { num_fewshot: Some(0), ..Options::default() };
    let built = build(&spec, &library, &Templates::default(), &options);
    built.with_context(|| format!("rebuilding {} from {}", spec.name, records.path.display()))
}

/// Entries of a list, or, as lm-eval's own files have them, of an object with numbered names.
fn entries(v: &Value) -> Vec<&Value> {
    match v {
        Value::Array(list) => list.iter().collect(),
        Value::Object(fields) => fields.values().collect(),
        _ => Vec::new(),
    }
}

/// The requests that lm-eval's `arguments` tell.
fn requests(record: &Value) -> Result<Vec<Request>> {
    let text = |v: &Value| v.as_str().map(str::to_string).ok_or_else(|| bad_input(format!("an argument is {v}, not a text")));
    entries(&record["arguments"])
        .into_iter()
        .map(|arguments| match entries(arguments)[..] {
            [one] => Ok(Request::Rolling { text: text(one)? }),
            [context, Value::Object(options)] => Ok(Request::Generate { context: text(context)?, options: options.clone() }),
            [context, continuation] => {
                Ok(Request::Loglikelihood { context: text(context)?.into(), continuation: text(continuation)? })
            }
            _ => Err(bad_input(format!("`arguments` holds {arguments}"))),
        })
        .collect()
}

/// One entry of lm-eval's `resps`, whose own files have numbers and truth values as texts.
fn response(request: &Request, v: &Value, tokens: usize) -> Result<Response> {
    let wrong = || bad_input(format!("`resps` holds {v}, which is no answer"));
    let list = v.as_array().ok_or_else(wrong)?;
    let number = |v: &Value| v.as_f64().or_else(|| v.as_str()?.parse().ok()).ok_or_else(wrong);
    let truth = |v: &Value| match v.as_str() {
        Some("True") => Ok(true),
        Some("False") => Ok(false),
        _ => v.as_bool().ok_or_else(wrong),
    };
    match (request, &list[..]) {
        (Request::Loglikelihood { .. }, [Value::Array(pair)]) => match &pair[..] {
            [logprob, is_greedy] => {
                Ok(Response::Loglikelihood { logprob: number(logprob)?, is_greedy: truth(is_greedy)?, tokens })
            }
            _ => Err(wrong()),
        },
        (Request::Rolling { .. }, [logprob]) => Ok(Response::Rolling { logprob: number(logprob)? }),
        (Request::Generate { .. }, texts) => {
            let texts = texts.iter().map(|t| t.as_str().map(str::to_string)).collect::<Option<_>>();
            Ok(Response::Generated(texts.ok_or_else(wrong)?))
        }
        _ => Err(wrong()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn both_forms_of_records_are_read() {
        // As tasks hold them, and as lm-eval writes them into its files.
        let plain = json!({"arguments": [["a", " b"], ["c"], ["d", {"until": ["."]}]]});
        let written = json!({"arguments": {
            "gen_args_0": {"arg_0": "a", "arg_1": " b"},
            "gen_args_1": {"arg_0": "c"},
            "gen_args_2": {"arg_0": "d", "arg_1": {"until": ["."]}},
        }});
        let asked = requests(&plain).unwrap();
        assert_eq!(asked, requests(&written).unwrap());
        assert!(matches!(&asked[..], [Request::Loglikelihood { .. }, Request::Rolling { .. }, Request::Generate { .. }]));
        for answers in [[json!([[-12.5, false]]), json!([-3.25])], [json!([["-12.5", "False"]]), json!(["-3.25"])]] {
            let read: Vec<_> = asked.iter().zip(&answers).map(|(request, v)| response(request, v, 2).unwrap()).collect();
            let want =
                [Response::Loglikelihood { logprob: -12.5, is_greedy: false, tokens: 2 }, Response::Rolling { logprob: -3.25 }];
            assert_eq!(read, want);
        }
        let text = response(&asked[2], &json!(["-7"]), 0).unwrap();
        assert_eq!(text, Response::Generated(vec!["-7".into()]));
        for (request, v) in [(0, json!([["x", "False"]])), (0, json!(["text"])), (1, json!([1, 2])), (2, json!([1]))] {
            assert!(response(&asked[request], &v, 0).is_err(), "{v}");
        }
    }
}
