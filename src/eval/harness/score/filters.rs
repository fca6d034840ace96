//! lm-eval's filters on generated texts.

use anyhow::Result;
use serde_json::Value;

use super::super::python::regex::{Found, Pattern, escape};
use super::super::python::{repr, text};
use super::super::request::Response;
use super::super::tasks::builtin::{Function, string};
use super::super::tasks::spec_parts::{Filter, RegexStep, Step};
use crate::error::bad_input;

/// The answer of a request after a filter.
#[derive(Debug, Clone, PartialEq)]
pub enum Answer {
    Loglikelihood { logprob: f64, is_greedy: bool, tokens: usize },
    Rolling(f64),
    Text(String),
    Texts(Vec<String>),
}

/// `filter` on the response of one request. Also returned: how often nothing could be extracted.
pub fn apply(filter: &Filter, response: &Response, doc: &Value) -> Result<(Answer, u64)> {
    let texts = match response {
        Response::Loglikelihood { logprob, is_greedy, tokens } => {
            return Ok((Answer::Loglikelihood { logprob: *logprob, is_greedy: *is_greedy, tokens: *tokens }, 0));
        }
        Response::Rolling { logprob } => return Ok((Answer::Rolling(*logprob), 0)),
        Response::Generated(texts) => texts.clone(),
    };
    let mut invalid = 0;
    let mut answer = Answer::Texts(texts);
    for step in &filter.steps {
        let Answer::Texts(texts) = answer else {
            return Err(bad_input(format!("the filter {}: a step follows take_first, which leaves one answer", filter.name)));
        };
        answer = apply_step(step, texts, doc, &mut invalid)?;
    }
    Ok((answer, invalid))
}

fn apply_step(step: &Step, texts: Vec<String>, doc: &Value, invalid: &mut u64) -> Result<Answer> {
    let each = |f: &dyn Fn(&str) -> String| Answer::Texts(texts.iter().map(|t| f(t)).collect());
    Ok(match step {
        Step::TakeFirst => Answer::Text(texts.into_iter().next().unwrap_or_default()),
        Step::TakeFirstK(k) if *k > texts.len() => {
            return Err(bad_input(format!(
                "take_first_k wants {k} answers of each document, there are {}: raise `repeats`",
                texts.len()
            )));
        }
        Step::TakeFirstK(k) => Answer::Texts(texts[..*k].to_vec()),
        Step::MajorityVote => Answer::Texts(vec![majority(&texts)]),
        Step::Lowercase => each(&|t| t.to_lowercase()),
        Step::Uppercase => each(&|t| t.to_uppercase()),
        Step::RemoveWhitespace => each(&|t| text::strip(t).to_string()),
        Step::Map { mapping, default } => each(&|t| repr::str_of(mapping.get(t).unwrap_or(default))),
        Step::Regex(regex) => {
            let pattern = Pattern::new(&regex.pattern)?;
            let out: Vec<_> = texts.iter().map(|t| extract(&pattern, regex, t)).collect();
            *invalid += out.iter().filter(|found| found.is_none()).count() as u64;
            Answer::Texts(out.into_iter().map(|found| found.unwrap_or_else(|| regex.fallback.clone())).collect())
        }
        Step::MultiChoiceRegex { regex, ignore_case, ignore_punctuation, regexes_to_ignore } => {
            let ignore = Ignore::new(*ignore_case, *ignore_punctuation, regexes_to_ignore)?;
            let choices =
                doc["choices"].as_array().ok_or_else(|| bad_input("multi_choice_regex needs documents with a list `choices`"))?;
            let choices: Vec<String> = choices.iter().map(repr::str_of).collect();
            let out = texts.iter().map(|t| multi_choice(regex, &ignore, &choices, t)).collect::<Result<Vec<_>>>()?;
            *invalid += out.iter().filter(|found| found.is_none()).count() as u64;
            Answer::Texts(out.into_iter().map(|found| found.unwrap_or_else(|| regex.fallback.clone())).collect())
        }
        Step::Function(Function::HumanevalPrograms) => {
            let prompt = string(doc, "prompt")?;
            each(&|t| format!("{prompt}{t}"))
        }
        Step::Function(f) => return Err(bad_input(format!("the built-in function `{}` is no filter", f.name()))),
    })
}

/// The most frequent answer, the first of equals.
fn majority(texts: &[String]) -> String {
    let count = |t: &String| texts.iter().filter(|o| *o == t).count();
    let most = texts.iter().map(count).max().unwrap_or(0);
    texts.iter().find(|t| count(t) == most).cloned().unwrap_or_default()
}

/// The match that `group_select` names, its first group that is not empty, without white space around. `None`: no match, or all its
/// groups are empty. lm-eval would crash where `group_select` is beyond the matches; here that is no match.
fn select(pattern: &Pattern, group_select: i64, text: &str) -> Option<String> {
    let mut found = pattern.findall(text);
    let at = if group_select < 0 { found.len() as i64 + group_select } else { group_select };
    let at = usize::try_from(at).ok().filter(|at| *at < found.len())?;
    Some(match found.swap_remove(at) {
        Found::One(s) => s,
        Found::Groups(groups) => groups.into_iter().find(|g| !g.is_empty())?,
    })
}

fn extract(pattern: &Pattern, step: &RegexStep, text: &str) -> Option<String> {
    select(pattern, step.group_select, text).map(|s| text::strip(&s).to_string())
}

/// What is passed over when choices are looked for.
struct Ignore {
    patterns: Vec<Pattern>,
    case: bool,
    punctuation: bool,
}

impl Ignore {
    fn new(case: bool, punctuation: bool, patterns: &[String]) -> Result<Self> {
        Ok(Self { patterns: patterns.iter().map(|p| Pattern::new(p)).collect::<Result<_>>()?, case, punctuation })
    }

    fn apply(&self, text: &str) -> Result<String> {
        let mut text = self.patterns.iter().fold(text.to_string(), |t, p| p.sub("", &t));
        if self.case {
            text = text.to_lowercase();
        }
        if self.punctuation {
            text = Pattern::new(r"\p{P}")?.sub("", &text);
        }
        Ok(text)
    }
}

/// The letter of a choice: by the pattern, else by a choice's text, else by a letter behind a colon.
fn multi_choice(step: &RegexStep, ignore: &Ignore, choices: &[String], text: &str) -> Result<Option<String>> {
    let by_pattern = select(&Pattern::new(&step.pattern)?, step.group_select, text).map(|s| text::strip(&s).to_string());
    if let Some(found) = by_pattern.filter(|s| !s.is_empty()) {
        return Ok(Some(found));
    }
    let letter = |i: usize| char::from_u32('A' as u32 + i as u32).unwrap_or('?');
    let plain = choices.iter().map(|c| ignore.apply(text::strip(c))).collect::<Result<Vec<_>>>()?;
    let mut branches: Vec<String> = plain.iter().map(|c| escape(c)).collect();
    // A choice that begins another must not hide it.
    branches.sort_by_key(|b| std::cmp::Reverse(text::len(b)));
    let by_text = select(&Pattern::new(&branches.join("|"))?, step.group_select, &ignore.apply(text)?);
    if let Some(found) = by_text.map(|s| text::strip(&s).to_string()).filter(|s| !s.is_empty()) {
        // The last of equal choices gives the letter, as in a dict.
        let place = plain.iter().rposition(|c| *c == found);
        return Ok(Some(place.map_or(found, |i| format!("({})", letter(i)))));
    }
    let letters: Vec<String> = (0..choices.len()).map(|i| letter(i).to_string()).collect();
    let by_letter = select(&Pattern::new(&format!(r":[\s]*({})", letters.join("|")))?, step.group_select, text);
    Ok(by_letter.map(|l| format!("({l})")))
}
