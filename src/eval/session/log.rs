//! `requests.log`: answers as they come, so that a run that was killed goes on where it was.
//!
//! One JSON object a line, only ever appended. Each names the run it belongs to by a hash of all that answers depend on beside the
//! request (model, tokenizer, arithmetic, longest input, seed), so an answer of another model is never taken.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::{Map, Value, json};

use crate::eval::harness::rounds::Key;
use crate::eval::harness::run::Usage;
use crate::failpoint;

/// The answer to one request as the log holds it.
#[derive(Debug, Clone, PartialEq)]
pub enum Answer {
    /// Sum of log p, nats; whether every token is the argmax.
    Scored(f64, bool),
    /// Ids that were generated.
    Ids(Vec<u32>),
}

/// The log of a run, open for appending.
#[derive(Debug)]
pub struct RequestLog {
    path: PathBuf,
    /// None = nothing is kept.
    file: Option<File>,
    run: String,
    answers: HashMap<Key, Answer>,
    rounds: HashMap<Key, Usage>,
}

impl RequestLog {
    /// Opens `path`. With `resume` the answers of the run `run` are known from there on; otherwise the file begins anew.
    pub fn open(path: &Path, run: &str, resume: bool) -> Result<Self> {
        let say = || format!("opening the log of requests {}", path.display());
        let mut file = File::options().read(true).write(true).create(true).truncate(!resume).open(path).with_context(say)?;
        let (mut answers, mut rounds) = (HashMap::new(), HashMap::new());
        let (mut good, mut damaged) = (0, 0);
        let mut reader = BufReader::new(&file);
        let mut line = Vec::new();
        while reader.read_until(b'\n', &mut line).with_context(say)? > 0 {
            // A line without an end was being written when the run died.
            if line.pop_if(|b| *b == b'\n').is_none() {
                break;
            }
            good += line.len() as u64 + 1;
            match entry(&line) {
                Some((of, Entry::Answer(key, answer))) if of == run => {
                    answers.insert(key, answer);
                }
                Some((of, Entry::Round(key, usage))) if of == run => {
                    rounds.insert(key, usage);
                }
                Some(_) => {}
                None => damaged += 1,
            }
            line.clear();
        }
        if damaged > 0 {
            tell!("warning: {}: {damaged} lines cannot be read; what they held is computed again", path.display());
        }
        file.set_len(good).with_context(say)?;
        file.seek(SeekFrom::End(0)).with_context(say)?;
        Ok(Self { path: path.to_path_buf(), file: Some(file), run: run.to_string(), answers, rounds })
    }

    /// A log that knows nothing and keeps nothing.
    pub fn none() -> Self {
        Self { path: PathBuf::new(), file: None, run: String::new(), answers: HashMap::new(), rounds: HashMap::new() }
    }

    /// The answers of a round, in its order, if all are known, and what it took.
    pub fn round(&self, keys: &[Key]) -> Option<(Vec<Answer>, Usage)> {
        let answers = keys.iter().map(|key| self.answers.get(key).cloned()).collect::<Option<Vec<_>>>()?;
        Some((answers, self.rounds.get(&round_key(keys)).copied().unwrap_or_default()))
    }

    /// Adds a round. What was appended survives the process; it is synced to disk.
    pub fn append(&mut self, keys: &[Key], answers: &[Answer], usage: Usage) -> Result<()> {
        let Some(file) = &mut self.file else { return Ok(()) };
        failpoint::hit("eval.log")?;
        let mut text = format!(
            "{}\n",
            json!({"run": self.run, "round": hex(&round_key(keys)), "forward": usage.forward, "padded": usage.padded, "reused": usage.reused})
        );
        for (key, answer) in keys.iter().zip(answers) {
            let mut line = Map::new();
            line.insert("run".into(), self.run.clone().into());
            line.insert("request".into(), hex(key).into());
            match answer {
                // A number that JSON has no word for becomes null, and is asked for again.
                Answer::Scored(logprob, is_greedy) => {
                    line.insert("logprob".into(), json!(logprob));
                    line.insert("is_greedy".into(), json!(is_greedy));
                }
                Answer::Ids(ids) => drop(line.insert("ids".into(), json!(ids))),
            }
            text += &format!("{}\n", Value::Object(line));
        }
        let say = || format!("writing to the log of requests {}", self.path.display());
        file.write_all(text.as_bytes()).with_context(say)?;
        file.sync_data().with_context(say)
    }
}

enum Entry {
    Answer(Key, Answer),
    Round(Key, Usage),
}

/// A line: the run it belongs to, and what it says.
fn entry(line: &[u8]) -> Option<(String, Entry)> {
    let v: Value = serde_json::from_slice(line).ok()?;
    let run = v["run"].as_str()?.to_string();
    if let Some(round) = v["round"].as_str() {
        let number = |key: &str| v[key].as_u64();
        let usage = Usage { forward: number("forward")?, padded: number("padded")?, reused: number("reused")? };
        return Some((run, Entry::Round(from_hex(round)?, usage)));
    }
    let key = from_hex(v["request"].as_str()?)?;
    let answer = match &v["ids"] {
        Value::Array(ids) => Answer::Ids(ids.iter().map(|i| u32::try_from(i.as_u64()?).ok()).collect::<Option<_>>()?),
        _ => Answer::Scored(v["logprob"].as_f64()?, v["is_greedy"].as_bool()?),
    };
    Some((run, Entry::Answer(key, answer)))
}

fn round_key(keys: &[Key]) -> Key {
    let mut out = [0; 16];
    out.copy_from_slice(&blake3::hash(&keys.concat()).as_bytes()[..16]);
    out
}

fn hex(key: &Key) -> String {
    format!("{:032x}", u128::from_be_bytes(*key))
}

fn from_hex(text: &str) -> Option<Key> {
    (text.len() == 32).then(|| u128::from_str_radix(text, 16).ok()).flatten().map(u128::to_be_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEYS: [Key; 2] = [[1; 16], [0xab; 16]];

    #[test]
    fn answers_come_back_for_the_same_run_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("requests.log");
        let answers = [Answer::Scored(-0.1 - 0.2, true), Answer::Ids(vec![7, 4_000_000_000])];
        let usage = Usage { forward: 5, padded: 1, reused: 9 };
        let mut log = RequestLog::open(&path, "a", false).unwrap();
        assert_eq!(log.round(&KEYS), None);
        log.append(&KEYS, &answers, usage).unwrap();
        assert_eq!(RequestLog::open(&path, "b", true).unwrap().round(&KEYS), None);
        assert_eq!(RequestLog::open(&path, "a", true).unwrap().round(&KEYS), Some((answers.to_vec(), usage)));
        assert_eq!(RequestLog::open(&path, "a", false).unwrap().round(&KEYS), None);
        assert_eq!(std::fs::read(&path).unwrap(), b"");
    }

    #[test]
    fn a_torn_line_is_cut_off_and_its_round_asked_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("requests.log");
        let answers = [Answer::Scored(-1.5, false), Answer::Scored(f64::NAN, false)];
        RequestLog::open(&path, "a", false).unwrap().append(&KEYS, &answers, Usage::default()).unwrap();
        let whole = std::fs::read(&path).unwrap();
        std::fs::write(&path, &whole[..whole.len() - 3]).unwrap();
        let log = RequestLog::open(&path, "a", true).unwrap();
        assert_eq!(log.round(&KEYS[..1]).unwrap().0, answers[..1]);
        assert_eq!(log.round(&KEYS), None);
        assert_eq!(std::fs::read(&path).unwrap().iter().filter(|b| **b == b'\n').count(), 2);
    }
}
