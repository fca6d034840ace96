//! A run: requests to token ids, ids to a model, answers back. The model is behind `Runner`.

use anyhow::{Context, Result};
use rayon::prelude::*;
use serde_json::{Map, Value, json};

use super::core_metric;
use super::encode::{Encode, Encoder, Memo, Pair, Prompt};
use super::python::json::{Style, dumps};
use super::request::{Asked, Request, Response};
use super::score::counts::Counts;
use super::stop;
use super::tasks::build::Built;

/// One text to generate.
#[derive(Debug, Clone, PartialEq)]
pub struct Generation {
    /// Ids of the context, already cut to leave room.
    pub prompt: Vec<u32>,
    /// Most tokens to add.
    pub max_tokens: usize,
    /// Stop strings; the end-of-text token's is among them.
    pub stops: Vec<String>,
    pub do_sample: bool,
    pub temperature: f64,
    pub top_p: f64,
    /// Which of the task's `repeats` this is: a seed of its own.
    pub repeat: usize,
}

/// Turns generated ids into text, without special tokens.
pub trait Decode {
    fn decode(&self, ids: &[u32]) -> Result<String>;
}

/// Tokens that a runner has worked on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Rows that went through the model, padding not counted.
    pub forward: u64,
    /// Rows of padding beside them.
    pub padded: u64,
    /// Tokens that were asked for and taken from a shared prefix instead.
    pub reused: u64,
}

impl std::ops::AddAssign for Usage {
    fn add_assign(&mut self, other: Self) {
        self.forward += other.forward;
        self.padded += other.padded;
        self.reused += other.reused;
    }
}

impl std::ops::Sub for Usage {
    type Output = Self;
    fn sub(self, other: Self) -> Self {
        Self { forward: self.forward - other.forward, padded: self.padded - other.padded, reused: self.reused - other.reused }
    }
}

/// What evaluation needs of a model.
///
/// Answers come in the order of the requests, whatever order they were worked in, and must not depend on batch size. The same call
/// gives the same bits.
pub trait Runner {
    /// For each pair: the sum of log p over the continuation, nats, log-softmax in f32 or wider; and whether each token of it is the
    /// argmax. Context and continuation together have at most `max_length + 1` ids; the last is no input.
    fn loglikelihood(&mut self, pairs: &[Pair]) -> Result<Vec<(f64, bool)>>;

    /// Ids generated for each request. It may end once `done(request, ids)` holds, at the end-of-text token, or at `max_tokens`;
    /// what stands behind a stop string is cut off by the caller.
    fn generate(&mut self, requests: &[Generation], done: &dyn Fn(&Generation, &[u32]) -> bool) -> Result<Vec<Vec<u32>>>;

    /// Tokens of all calls so far; zeros where nobody counts.
    fn usage(&self) -> Usage {
        Usage::default()
    }
}

/// A request in token ids, before anything is cut off: that is what records tell.
#[derive(Debug, Clone, PartialEq)]
pub enum Planned {
    /// `cut` tokens of the context do not fit the model.
    Pair {
        pair: Pair,
        cut: usize,
    },
    Windows(Vec<Pair>),
    Generate(Prompt),
}

/// Ids of all requests of a task, in order, and what was cut or flagged on the way.
pub fn plan<T: Encode + Sync + ?Sized>(task: &Built, encoder: &Encoder<T>, counts: &mut Counts) -> Result<Vec<Planned>> {
    // Documents that begin alike stand together.
    const TOGETHER: usize = 32;
    let of_documents = |together: &[Asked]| -> Result<(Vec<Planned>, Counts)> {
        let (mut planned, mut counts, mut memo) = (Vec::new(), Counts::default(), Memo::default());
        for asked in together {
            planned.extend(plan_document(task, asked, encoder, &mut counts, &mut memo)?);
        }
        Ok((planned, counts))
    };
    let all = task.asked.par_chunks(TOGETHER).map(of_documents).collect::<Result<Vec<_>>>()?;
    let mut out = Vec::with_capacity(all.len());
    for (planned, own) in all {
        out.extend(planned);
        *counts += own;
    }
    Ok(out)
}

/// As `plan`, of the requests of one document.
pub fn plan_document<T: Encode + ?Sized>(
    task: &Built,
    asked: &Asked,
    encoder: &Encoder<T>,
    counts: &mut Counts,
    memo: &mut Memo,
) -> Result<Vec<Planned>> {
    let says = || format!("{}: document {}", task.spec.name, asked.doc_id);
    if task.spec.core_chance.is_some() {
        return core_metric::plan(asked, encoder, counts).with_context(says);
    }
    let planned = asked.requests.iter().map(|r| plan_one(r, encoder, memo, counts)).collect::<Result<_>>();
    planned.with_context(says)
}

fn plan_one<T: Encode + ?Sized>(
    request: &Request,
    encoder: &Encoder<T>,
    memo: &mut Memo,
    counts: &mut Counts,
) -> Result<Planned> {
    Ok(match request {
        Request::Loglikelihood { context, continuation } => {
            let pair = encoder.pair_after(context, continuation, memo)?;
            let cut = encoder.cut(&pair)?;
            counts.truncated_requests += u64::from(cut > 0);
            counts.truncated_tokens += cut as u64;
            counts.boundary_fallbacks += u64::from(pair.boundary_fallback);
            counts.boundary_mismatches += u64::from(pair.boundary_mismatch);
            Planned::Pair { pair, cut }
        }
        Request::Rolling { text } => Planned::Windows(encoder.rolling(text)?),
        Request::Generate { context, options } => {
            let prompt = encoder.prompt(context, stop::max_gen_toks(options), memo)?;
            counts.truncated_requests += u64::from(prompt.truncated > 0);
            counts.truncated_tokens += prompt.truncated as u64;
            Planned::Generate(prompt)
        }
    })
}

/// All that a run asks of the model, the tasks one behind the other.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Work {
    pub pairs: Vec<Pair>,
    pub generations: Vec<Generation>,
}

impl Work {
    /// Adds the requests of a task, cut to what the model takes.
    pub fn add(&mut self, task: &Built, planned: &[Planned], eos_text: Option<&str>) {
        let requests = task.asked.iter().flat_map(|a| &a.requests);
        for (request, planned) in requests.zip(planned) {
            match planned {
                Planned::Pair { pair, cut } => self.pairs.push(pair.without(*cut)),
                Planned::Windows(windows) => self.pairs.extend_from_slice(windows),
                Planned::Generate(prompt) => {
                    if let Request::Generate { options, .. } = request {
                        let repeats = 0..task.spec.repeats;
                        self.generations.extend(repeats.map(|repeat| generation(prompt, options, eos_text, repeat)));
                    }
                }
            }
        }
    }
}

/// The answers to a run's `Work`, in its order.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Answers {
    pub scored: Vec<(f64, bool)>,
    /// Texts, stop strings already cut off.
    pub texts: Vec<String>,
}

/// Hands answers back to the tasks, in the order in which `Work::add` took them.
#[derive(Debug)]
pub struct HandOut<'a> {
    scored: std::slice::Iter<'a, (f64, bool)>,
    texts: std::slice::Iter<'a, String>,
    log: bool,
}

impl<'a> HandOut<'a> {
    /// With `log` the lines of requests.jsonl are made, which take much memory.
    pub fn new(answers: &'a Answers, log: bool) -> Self {
        Self { scored: answers.scored.iter(), texts: answers.texts.iter(), log }
    }

    fn scored(&mut self) -> Result<(f64, bool)> {
        self.scored.next().copied().context("the model answered fewer requests than were asked")
    }

    /// The responses to `task`'s requests, in order, and the lines of requests.jsonl that tell them.
    pub fn task(&mut self, task: &Built, planned: &[Planned]) -> Result<(Vec<Response>, Vec<String>)> {
        let requests = task.asked.iter().flat_map(|a| &a.requests);
        let (mut responses, mut lines) = (Vec::with_capacity(planned.len()), Vec::new());
        let wanted = self.log;
        let mut log = |record: &dyn Fn() -> Value| {
            if wanted {
                lines.push(line(&record()));
            }
        };
        for (request, planned) in requests.zip(planned) {
            responses.push(match planned {
                Planned::Pair { pair, .. } => {
                    let (logprob, is_greedy) = self.scored()?;
                    log(&|| pair_record("loglikelihood", Some(request), pair, logprob, is_greedy));
                    Response::Loglikelihood { logprob, is_greedy, tokens: pair.continuation.len() }
                }
                Planned::Windows(windows) => {
                    let mut total = 0.0;
                    for window in windows {
                        let (logprob, is_greedy) = self.scored()?;
                        log(&|| pair_record("rolling_window", None, window, logprob, is_greedy));
                        total += logprob;
                    }
                    Response::Rolling { logprob: total }
                }
                Planned::Generate(prompt) => {
                    let texts: Vec<String> = self.texts.by_ref().take(task.spec.repeats).cloned().collect();
                    texts.iter().for_each(|text| log(&|| generation_record(request, prompt, text)));
                    Response::Generated(texts)
                }
            });
        }
        Ok((responses, lines))
    }
}

fn generation(prompt: &Prompt, options: &Map<String, Value>, eos_text: Option<&str>, repeat: usize) -> Generation {
    let number = |key: &str| options.get(key).and_then(Value::as_f64);
    let temperature = number("temperature").unwrap_or(0.0);
    Generation {
        prompt: prompt.input().to_vec(),
        max_tokens: stop::max_gen_toks(options),
        stops: stop::stops(options, eos_text),
        do_sample: options.get("do_sample").and_then(Value::as_bool).unwrap_or(temperature > 0.0) && temperature > 0.0,
        temperature,
        top_p: number("top_p").unwrap_or(1.0),
        repeat,
    }
}

/// A line of requests.jsonl for one scored pair.
pub fn pair_record(kind: &str, request: Option<&Request>, pair: &Pair, logprob: f64, is_greedy: bool) -> Value {
    let (context, continuation) = match request {
        Some(Request::Loglikelihood { context, continuation }) => (json!(**context), json!(continuation)),
        _ => (Value::Null, Value::Null),
    };
    json!({
        "type": kind,
        "context": context,
        "continuation": continuation,
        "context_enc": pair.context[..],
        "continuation_enc": pair.continuation,
        "logprob": logprob,
        "is_greedy": is_greedy,
    })
}

/// A line of requests.jsonl for one generated text.
pub fn generation_record(request: &Request, prompt: &Prompt, text: &str) -> Value {
    let (context, options) = match request {
        Request::Generate { context, options } => (context.as_str(), options.clone()),
        _ => ("", Map::new()),
    };
    json!({"type": "generate_until", "context": context, "context_enc": prompt.ids, "gen_kwargs": options, "text": text})
}

/// A record as a line of a .jsonl file, as Python prints it.
pub fn line(record: &Value) -> String {
    dumps(record, Style::default()) + "\n"
}
