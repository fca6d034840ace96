//! What tasks there are, and what a task asks of one document.

use std::fmt::Write;

use anyhow::Result;
use serde_json::json;

use super::Encoding;
use crate::error::bad_input;
use crate::eval::harness::compat::Faults;
use crate::eval::harness::encode::Memo;
use crate::eval::harness::python::repr;
use crate::eval::harness::request::Request;
use crate::eval::harness::run::plan_document;
use crate::eval::harness::score::counts::Counts;
use crate::eval::harness::tasks::build::Built;
use crate::eval::harness::tasks::registry::{Node, Registry};
use crate::eval::harness::tasks::spec::TaskSpec;
use crate::eval::tokenizer::EvalTokenizer;

/// One line a task or group whose name holds `filter`; tags are groups.
pub fn list(registry: &Registry, filter: &str) -> Result<String> {
    let mut rows = vec![["name", "kind", "shots", "documents", "metrics"].map(str::to_string)];
    for name in registry.names().into_iter().filter(|n| n.contains(filter)) {
        let nodes = registry.resolve(name)?;
        rows.push(match &nodes[..] {
            [Node::Task(task)] if task.name == name => task_row(task),
            nodes => {
                let tasks: usize = nodes.iter().map(|n| n.tasks().len()).sum();
                [name.into(), format!("group of {tasks}"), String::new(), String::new(), String::new()]
            }
        });
    }
    let widths: [usize; 5] = std::array::from_fn(|i| rows.iter().map(|r| r[i].len()).max().unwrap_or(0));
    let line = |row: &[String; 5]| {
        let cells: Vec<String> = row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        cells.join("  ").trim_end().to_string() + "\n"
    };
    Ok(rows.iter().map(line).collect())
}

fn task_row(task: &TaskSpec) -> [String; 5] {
    let mut metrics: Vec<&str> = task.metrics.iter().map(|m| m.kind.name()).collect();
    metrics.dedup();
    [
        task.name.clone(),
        task.output_type.name().into(),
        task.num_fewshot.map_or("0".into(), |n| n.to_string()),
        task.official_docs.map_or(String::new(), |n| n.to_string()),
        metrics.join(", "),
    ]
}

/// The requests of document `doc` of a task: texts, and with a tokenizer ids and where context and continuation part.
///
/// # Errors
/// `BadInput`: there is no such document.
pub fn document(task: &Built, doc: usize, tokenizer: Option<(&EvalTokenizer, &Encoding)>) -> Result<String> {
    let asked = task.asked.iter().find(|a| a.doc_id == doc).ok_or_else(|| {
        bad_input(format!("{} has {} documents, counted from 0: there is no document {doc}", task.spec.name, task.original))
    })?;
    let mut out = String::new();
    let split = task.spec.evaluated_split();
    let shots = task.spec.num_fewshot.unwrap_or(0);
    writeln!(out, "{}: document {doc} of {} ({split} split), {shots} shots", task.spec.name, task.original)?;
    writeln!(out, "target: {}", repr::value(&asked.target))?;
    task.notes.iter().try_for_each(|n| writeln!(out, "note: {n}"))?;
    let faults = Faults::default();
    let plan_with = |(t, encoding): (&EvalTokenizer, &Encoding)| {
        plan_document(task, asked, &encoding.encoder(t, &faults), &mut Counts::default(), &mut Memo::default())
    };
    let planned = tokenizer.map(plan_with).transpose()?;
    for (i, request) in asked.requests.iter().enumerate() {
        writeln!(out, "\n=== request {} of {}: {}", i + 1, asked.requests.len(), kind(request))?;
        text(&mut out, request)?;
        if let (Some(planned), Some((tokenizer, _))) = (&planned, tokenizer) {
            ids(&mut out, &planned[i], tokenizer)?;
        }
    }
    Ok(out)
}

fn kind(request: &Request) -> &'static str {
    match request {
        Request::Loglikelihood { .. } => "log-likelihood of a continuation",
        Request::Rolling { .. } => "log-likelihood of a whole text",
        Request::Generate { .. } => "generation",
    }
}

fn text(out: &mut String, request: &Request) -> Result<()> {
    match request {
        Request::Loglikelihood { context, continuation } => {
            writeln!(out, "--- context\n{context}\n--- continuation\n{}", repr::value(&json!(continuation)))?;
        }
        Request::Rolling { text } => writeln!(out, "--- text\n{text}")?,
        Request::Generate { context, options } => {
            writeln!(out, "--- context\n{context}\n--- generation_kwargs\n{}", json!(options))?;
        }
    }
    Ok(())
}

fn ids(out: &mut String, planned: &crate::eval::harness::run::Planned, tokenizer: &EvalTokenizer) -> Result<()> {
    use crate::eval::harness::run::Planned;
    let spelled = |id: Option<&u32>| id.and_then(|id| tokenizer.token(*id)).unwrap_or_default();
    match planned {
        Planned::Pair { pair, cut } => {
            let (n, m) = (pair.context.len(), pair.continuation.len());
            writeln!(out, "--- ids: {n} of context, {m} of continuation\n{:?} | {:?}", pair.context, pair.continuation)?;
            let (last, first) = (spelled(pair.context.last()), spelled(pair.continuation.first()));
            writeln!(out, "split after token {n}: {last:?} | {first:?}")?;
            if *cut > 0 {
                writeln!(out, "the first {cut} tokens do not fit the model and are cut off")?;
            }
            if pair.boundary_fallback {
                writeln!(out, "a token spans the boundary: the continuation is encoded alone")?;
            }
            if pair.boundary_mismatch {
                writeln!(out, "the ids of the context are no prefix of those of context and continuation")?;
            }
        }
        Planned::Windows(windows) => {
            for (i, w) in windows.iter().enumerate() {
                let (n, m) = (w.context.len(), w.continuation.len());
                writeln!(out, "--- window {} of {}: {n} of context, {m} predicted", i + 1, windows.len())?;
                writeln!(out, "{:?} | {:?}", w.context, w.continuation)?;
            }
        }
        Planned::Generate(prompt) => {
            writeln!(out, "--- ids: {}\n{:?}", prompt.ids.len(), prompt.ids)?;
            if prompt.truncated > 0 {
                writeln!(out, "the first {} tokens leave no room for the answer and are cut off", prompt.truncated)?;
            }
        }
    }
    Ok(())
}
