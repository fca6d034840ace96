//! A run: requests to token ids, ids to a model, answers back. The model is behind `Runner`.

use anyhow::Result;
use serde_json::{Map, Value, json};

use super::encode::{Encode, Encoder, Pair, Prompt};
use super::python::json::{Style, dumps};
use super::request::{Request, Response};
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

/// What evaluation needs of a model.
///
/// Answers come in the order of the requests, whatever order they were worked in, and must not depend on batch size.
pub trait Runner {
    /// For each pair: the sum of log p over the continuation, nats, log-softmax in f32 or wider; and whether each token of it is the
    /// argmax. Context and continuation together have at most `max_length + 1` ids; the last is no input.
    fn loglikelihood(&mut self, pairs: &[Pair]) -> Result<Vec<(f64, bool)>>;

    /// Ids generated for each request. It may end once `done(request, ids)` holds, at the end-of-text token, or at `max_tokens`;
    /// what stands behind a stop string is cut off by the caller.
    fn generate(&mut self, requests: &[Generation], done: &dyn Fn(&Generation, &[u32]) -> bool) -> Result<Vec<Vec<u32>>>;
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
pub fn plan<T: Encode + ?Sized>(task: &Built, encoder: &Encoder<T>, counts: &mut Counts) -> Result<Vec<Planned>> {
    let requests = task.asked.iter().flat_map(|a| &a.requests);
    requests
        .map(|request| {
            Ok(match request {
                Request::Loglikelihood { context, continuation } => {
                    let pair = encoder.pair(context, continuation)?;
                    let (_, cut) = encoder.truncate(&pair)?;
                    counts.truncated_requests += u64::from(cut > 0);
                    counts.truncated_tokens += cut as u64;
                    counts.boundary_fallbacks += u64::from(pair.boundary_fallback);
                    counts.boundary_mismatches += u64::from(pair.boundary_mismatch);
                    Planned::Pair { pair, cut }
                }
                Request::Rolling { text } => Planned::Windows(encoder.rolling(text)?),
                Request::Generate { context, options } => {
                    let prompt = encoder.prompt(context, stop::max_gen_toks(options))?;
                    counts.truncated_requests += u64::from(prompt.truncated > 0);
                    counts.truncated_tokens += prompt.truncated as u64;
                    Planned::Generate(prompt)
                }
            })
        })
        .collect()
}

/// The responses to `task`'s requests, in order, and the lines of requests.jsonl that tell them.
pub fn respond(
    task: &Built,
    planned: &[Planned],
    eos_text: Option<&str>,
    decoder: &dyn Decode,
    runner: &mut dyn Runner,
) -> Result<(Vec<Response>, Vec<Value>)> {
    let mut pairs = Vec::new();
    for planned in planned {
        match planned {
            Planned::Pair { pair, cut } => pairs.push(Pair { context: pair.context[*cut..].to_vec(), ..pair.clone() }),
            Planned::Windows(windows) => pairs.extend_from_slice(windows),
            Planned::Generate(_) => {}
        }
    }
    let mut scored = runner.loglikelihood(&pairs)?.into_iter();
    let requests: Vec<&Request> = task.asked.iter().flat_map(|a| &a.requests).collect();
    let mut generations = Vec::new();
    for (request, planned) in requests.iter().zip(planned) {
        if let (Request::Generate { options, .. }, Planned::Generate(prompt)) = (request, planned) {
            generations.extend((0..task.spec.repeats).map(|repeat| generation(prompt, options, eos_text, repeat)));
        }
    }
    let done = |g: &Generation, ids: &[u32]| decoder.decode(ids).is_ok_and(|text| stop::is_done(&text, &g.stops));
    let mut generated = runner.generate(&generations, &done)?.into_iter().zip(&generations);
    let mut next = || scored.next().ok_or_else(|| anyhow::anyhow!("the model answered fewer requests than were asked"));
    let mut log = Vec::new();
    let mut responses = Vec::with_capacity(requests.len());
    for (request, planned) in requests.iter().zip(planned) {
        responses.push(match planned {
            Planned::Pair { pair, .. } => {
                let (logprob, is_greedy) = next()?;
                log.push(pair_record("loglikelihood", Some(request), pair, logprob, is_greedy));
                Response::Loglikelihood { logprob, is_greedy }
            }
            Planned::Windows(windows) => {
                let mut total = 0.0;
                for window in windows {
                    let (logprob, is_greedy) = next()?;
                    log.push(pair_record("rolling_window", None, window, logprob, is_greedy));
                    total += logprob;
                }
                Response::Rolling { logprob: total }
            }
            Planned::Generate(prompt) => {
                let mut texts = Vec::new();
                for (ids, g) in generated.by_ref().take(task.spec.repeats) {
                    let text = stop::cut(&decoder.decode(&ids)?, &g.stops).to_string();
                    log.push(generation_record(request, prompt, &text));
                    texts.push(text);
                }
                Response::Generated(texts)
            }
        });
    }
    Ok((responses, log))
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
        Some(Request::Loglikelihood { context, continuation }) => (json!(context), json!(continuation)),
        _ => (Value::Null, Value::Null),
    };
    json!({
        "type": kind,
        "context": context,
        "continuation": continuation,
        "context_enc": pair.context,
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
