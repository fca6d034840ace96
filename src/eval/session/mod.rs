//! A run of tasks over a model: what is asked, the answers, the scores, the files that tell them. `zaya eval` is a thin shell around it.

pub mod files;
pub mod html;
pub mod identity;
pub mod log;
pub mod progress;
pub mod records;
pub mod show;
pub mod table;
pub mod work;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use anyhow::{Context, Result};
use rayon::prelude::*;

use crate::error::bad_input;
use crate::eval::harness::compat::{Compat, Faults};
use crate::eval::harness::core_metric;
use crate::eval::harness::encode::{Encode, Encoder};
use crate::eval::harness::request::Response;
use crate::eval::harness::run::{Answers, HandOut, Planned, Work, plan};
use crate::eval::harness::score::code::CodeRunner;
use crate::eval::harness::score::counts::Counts;
use crate::eval::harness::score::results::Scored;
use crate::eval::harness::score::samples::score;
use crate::eval::harness::tasks::build::{Built, Options, build};
use crate::eval::harness::tasks::documents::{Library, MissingData};
use crate::eval::harness::tasks::registry::{Node, Registry};
use crate::eval::harness::tasks::spec::TaskSpec;
use crate::eval::harness::tasks::template::Templates;

/// What the names on the command line stand for, each once, in their order.
///
/// # Errors
/// `BadInput`: there is no such task.
pub fn select(registry: &Registry, names: &[String]) -> Result<Vec<Node>> {
    let mut nodes: Vec<Node> = Vec::new();
    for name in names {
        for node in registry.resolve(name.trim())? {
            if nodes.iter().all(|n| n.name() != node.name()) {
                nodes.push(node);
            }
        }
    }
    Ok(nodes)
}

/// The tasks of a run with their requests in text.
#[derive(Debug)]
pub struct Tasks {
    pub nodes: Vec<Node>,
    /// In the order of the nodes, each task once.
    pub built: Vec<Arc<Built>>,
    /// Tasks whose data is not at hand, and a sentence of each.
    pub skipped: Vec<(String, String)>,
    /// What a user should know of a group.
    pub remarks: Vec<String>,
}

impl Tasks {
    /// Reads documents and builds requests. Tasks without data are left out, with a sentence.
    ///
    /// # Errors
    /// `BadInput`: no task has data; or what is wrong with a definition or a document.
    pub fn build(nodes: Vec<Node>, library: &Library, options: &Options) -> Result<Self> {
        let mut seen = BTreeSet::new();
        let specs: Vec<&TaskSpec> = nodes.iter().flat_map(Node::tasks).filter(|t| seen.insert(t.name.clone())).collect();
        library.read_ahead(specs.iter().flat_map(|spec| spec.files(options.num_fewshot)));
        let all: Vec<_> = specs.par_iter().map(|spec| build(spec, library, &Templates::default(), options)).collect();
        let core = nodes.iter().find(|n| n.name() == core_metric::GROUP).map(Node::tasks).unwrap_or_default();
        let (mut built, mut skipped, mut missing) = (Vec::new(), Vec::new(), Vec::new());
        for (spec, one) in specs.iter().zip(all) {
            match one {
                Ok(one) => built.push(Arc::new(one)),
                Err(e) => match e.downcast_ref::<MissingData>() {
                    // Few have all of CORE's data: its value says how much of it there is.
                    Some(_) if core.iter().any(|t| t.name == spec.name) => missing.push(spec.name.clone()),
                    Some(missing) => {
                        let hint = spec.how_to_get.as_ref().map_or(String::new(), |h| format!("; {h}"));
                        skipped.push((spec.name.clone(), format!("{}{hint}", missing.0)));
                    }
                    None => return Err(e),
                },
            }
        }
        if built.is_empty() {
            if skipped.is_empty() {
                return Err(bad_input(format!("no task has its data: none of {}", missing.join(", "))));
            }
            let says: Vec<&str> = skipped.iter().take(3).map(|(_, s)| s.as_str()).collect();
            let more = if skipped.len() > 3 { format!("; and {} tasks more", skipped.len() - 3) } else { String::new() };
            return Err(bad_input(format!("no task has its data: {}{more}", says.join("; "))));
        }
        let remarks = if missing.is_empty() { Vec::new() } else { vec![core_metric::remark(&missing, core.len())] };
        Ok(Self { nodes, built, skipped, remarks })
    }

    /// Bytes of all prompts.
    pub fn text_bytes(&self) -> usize {
        self.built.iter().flat_map(|b| &b.asked).flat_map(|a| &a.requests).map(|r| r.prompt().len()).sum()
    }

    /// What a user should know of the data, each sentence once.
    pub fn notes(&self) -> Vec<&str> {
        let mut seen = BTreeSet::new();
        self.built.iter().flat_map(|b| &b.notes).chain(&self.remarks).map(String::as_str).filter(|n| seen.insert(*n)).collect()
    }
}

/// A task's requests in ids, and what was counted on the way.
#[derive(Debug)]
pub struct TaskPlan {
    pub planned: Vec<Planned>,
    pub counts: Counts,
}

/// How texts become ids.
#[derive(Debug, Clone, Copy)]
pub struct Encoding {
    pub compat: Compat,
    /// Whether special tokens are added; by default as the tokenizer does it.
    pub add_special: Option<bool>,
    pub max_length: usize,
}

impl Encoding {
    pub fn encoder<'a, T: Encode + ?Sized>(&self, tokenizer: &'a T, faults: &'a Faults) -> Encoder<'a, T> {
        Encoder { tokenizer, compat: self.compat, add_special: self.add_special, max_length: self.max_length, faults }
    }
}

/// The ids of all tasks, and all that is asked of the model.
pub fn plan_all<T: Encode + Sync + ?Sized>(
    built: &[Arc<Built>],
    tokenizer: &T,
    encoding: &Encoding,
) -> Result<(Vec<TaskPlan>, Work)> {
    let mut work = Work::default();
    let eos = tokenizer.eos().map(|(_, text)| text);
    let mut plans = Vec::with_capacity(built.len());
    for task in built {
        let mut counts = Counts::default();
        let planned = plan(task, &encoding.encoder(tokenizer, &task.faults), &mut counts)?;
        work.add(task, &planned, eos);
        plans.push(TaskPlan { planned, counts });
    }
    Ok((plans, work))
}

/// Scores of all tasks by name, and with `log_requests` the lines of requests.jsonl.
pub fn score_all(
    built: &[Arc<Built>],
    plans: &[TaskPlan],
    answers: &Answers,
    code: Option<&dyn CodeRunner>,
    bootstrap_iters: usize,
    log_requests: bool,
) -> Result<(BTreeMap<String, Scored>, Vec<String>)> {
    let mut hand_out = HandOut::new(answers, log_requests);
    let (mut scored, mut requests) = (BTreeMap::new(), Vec::new());
    for (task, plan) in built.iter().zip(plans) {
        let (responses, lines): (Vec<Response>, _) = hand_out.task(task, &plan.planned)?;
        requests.extend(lines);
        let score = score(task, &responses, code, plan.counts, bootstrap_iters);
        let score = score.with_context(|| format!("scoring {}", task.spec.name))?;
        scored.insert(task.spec.name.clone(), (task.clone(), score));
    }
    Ok((scored, requests))
}
