//! A Hugging Face `tokenizer.json` as pretraining uses it: plain text in, ids out, no special token by accident.

use std::cell::{Cell, OnceCell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow};
use serde_json::Value;
use tokenizers::{AddedToken, Tokenizer};

use super::engine::{Cache, Engine, Worker};
use super::guard;
use crate::error::{bad_input, did_you_mean};

/// Which token ends a document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Eod {
    /// The one among the special tokens that is known to mean it; an error if none or several are.
    Find,
    /// This one.
    Token(String),
    /// None.
    Absent,
}

/// Special tokens that end a document in one family of models or another.
const KNOWN_ENDS: [&str; 6] = ["<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>", "<｜end▁of▁sentence｜>", "<|endofdocument|>"];

/// Memory that the cache of words, which all threads share, may take.
const CACHE_BYTES: usize = 128 << 20;

thread_local! {
    /// The worker of this thread, of the encoder that it has served last.
    static WORKER: RefCell<Option<Worker>> = const { RefCell::new(None) };
}

/// Turns text into ids exactly as Hugging Face `tokenizers` does with `split_special_tokens=True` and without a
/// post-processor (no BOS): text that spells a special token is text, other added tokens match. Truncation, padding
/// and dropout that the file may ask for are off.
#[derive(Debug)]
pub struct Encoder {
    /// As the file says it: names, decoding.
    plain: Tokenizer,
    /// The copy whose model cannot spell special tokens, where `plain` could.
    guarded: Option<Tokenizer>,
    /// The engine of this project, or why it leaves this file to `tokenizers`.
    engine: Result<Engine, String>,
    /// What the engine's workers have learnt.
    cache: Arc<Cache>,
    sha256: String,
    vocab_size: usize,
    eod: Option<(String, u32)>,
    forbidden: Forbidden,
    unknown: Option<u32>,
}

/// Ids that text must not become.
#[derive(Debug)]
struct Forbidden {
    by_id: Vec<bool>,
    /// The longest row of ids that are not: all of nearly any text.
    free: std::ops::Range<u32>,
}

impl Forbidden {
    fn new(by_id: Vec<bool>) -> Self {
        let (mut free, mut from) = (0..0, 0);
        for rest in by_id.split(|forbidden| *forbidden) {
            let row = from..from + rest.len() as u32;
            from = row.end + 1;
            free = if row.len() > free.len() { row } else { free };
        }
        Self { by_id, free }
    }

    fn first_in(&self, ids: &[u32]) -> Option<u32> {
        let (from, count) = (self.free.start, self.free.len() as u32);
        // Without an early end: so vectors do it.
        if ids.iter().fold(true, |all, id| all & (id.wrapping_sub(from) < count)) {
            return None;
        }
        ids.iter().copied().find(|id| self.by_id.get(*id as usize).is_none_or(|forbidden| *forbidden))
    }
}

/// What the file itself says, as it is to be encoded with.
struct Draft {
    json: Value,
    /// Something in `json` had to be changed.
    changed: bool,
    special: Vec<String>,
    /// Special tokens that are characters which text is spelt with.
    letters: Vec<String>,
    /// A token that ends documents, and whether the file calls it special.
    eod: Option<(String, bool)>,
    unknown: Option<String>,
}

impl Draft {
    fn new(mut json: Value, eod: &Eod, path: &Path) -> Result<Self> {
        let mut special = special_tokens(&json);
        let eod = match eod {
            Eod::Absent => None,
            Eod::Find => Some(find_eod(&special).map_err(|why| bad_input(format!("tokenizer {}: {why}", path.display())))?),
            Eod::Token(token) => Some(token.clone()),
        };
        let eod = match eod {
            None => None,
            Some(token) => {
                check_eod(&token, &json, &special, path)?;
                let known = special.contains(&token);
                if !known {
                    // From here on it is one, whatever the file says.
                    special.push(token.clone());
                    mark_special(&mut json, &token);
                }
                Some((token, known))
            }
        };
        let unknown = guard::unknown_token(&json).map(str::to_string);
        let letters = special.iter().filter(|token| guard::is_letter(&json, token)).cloned().collect();
        let dropout = json["model"].get("dropout").is_some_and(|d| !d.is_null());
        if dropout {
            json["model"]["dropout"] = Value::Null;
        }
        let changed = guard::hide(&mut json, &special) || dropout;
        Ok(Self { json, changed, special, letters, eod, unknown })
    }

    fn finish(self, mut plain: Tokenizer, engine: Result<Engine, String>, sha256: String, path: &Path) -> Result<Encoder> {
        let Self { json, changed, special, letters, eod, unknown } = self;
        let shown = path.display();
        let not_one = |e: &dyn std::fmt::Display| not_a_tokenizer(path, e);
        let eod = match eod {
            None => None,
            Some((token, known)) => {
                let Some(id) = plain.token_to_id(&token) else {
                    let others = &special[..special.len() - usize::from(!known)];
                    let guess = did_you_mean(&token, others.iter().map(String::as_str));
                    return Err(bad_input(format!(
                        "--eod `{token}` is not in the vocabulary of {shown}{guess}; special tokens there: {}",
                        list(others)
                    )));
                };
                if !known {
                    plain.add_special_tokens([AddedToken::from(token.as_str(), true)]).map_err(|e| not_one(&e))?;
                }
                Some((token, id))
            }
        };
        let unknown = unknown.and_then(|token| plain.token_to_id(&token));
        let ids = plain.get_vocab(true).into_values();
        let vocab_size = ids.max().map_or(0, |max| max as usize + 1);
        if vocab_size == 0 {
            return Err(bad_input(format!("tokenizer {shown} has an empty vocabulary")));
        }
        let mut forbidden = vec![false; vocab_size];
        for token in &special {
            if let Some(id) = plain.token_to_id(token) {
                forbidden[id as usize] = Some(id) != unknown && !letters.contains(token);
            }
        }
        let mut guarded: Option<Tokenizer> = if changed {
            Some(serde_json::from_value(json).map_err(|e| not_one(&e))?)
        } else {
            // A million small pieces of memory: nobody need wait until they are given back.
            std::thread::spawn(|| drop(json));
            None
        };
        for tokenizer in [Some(&mut plain), guarded.as_mut()].into_iter().flatten() {
            tokenizer.with_padding(None);
            tokenizer.with_truncation(None).map_err(|e| not_one(&e))?;
            tokenizer.set_encode_special_tokens(true);
        }
        let forbidden = Forbidden::new(forbidden);
        let cache = Arc::new(Cache::new(CACHE_BYTES));
        let encoder = Encoder { plain, guarded, engine, cache, sha256, vocab_size, eod, forbidden, unknown };
        if let Some(note) = encoder.slow_because() {
            tell!("note: {note}");
        }
        Ok(encoder)
    }
}

fn not_a_tokenizer(path: &Path, why: &dyn std::fmt::Display) -> anyhow::Error {
    bad_input(format!("tokenizer {} is not a Hugging Face tokenizer.json: {why}", path.display()))
}

impl Encoder {
    /// Reads `path`. Everything that could be wrong with the tokenizer or the choice of `eod` is found here.
    pub fn load(path: &Path, eod: &Eod) -> Result<Self> {
        let shown = path.display();
        let bytes = std::fs::read(path).map_err(|e| bad_input(format!("tokenizer {shown} cannot be read: {e}")))?;
        let not_one = |e: &dyn std::fmt::Display| not_a_tokenizer(path, e);
        std::thread::scope(|scope| {
            // Large vocabularies take their time, so that `tokenizers` reads the file beside this thread. It is asked late.
            let reading = Cell::new(Some(scope.spawn(|| Tokenizer::from_bytes(&bytes).map_err(|e| not_one(&e)))));
            let join = || reading.take().map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)));
            let read = OnceCell::new();
            let json: Value = serde_json::from_slice(&bytes).map_err(|e| not_one(&e))?;
            let drafted = Draft::new(json, eod, path).map(|draft| {
                let id_of = |token: &str| read.get_or_init(join).as_ref()?.as_ref().ok()?.token_to_id(token);
                let engine = Engine::from_json(&draft.json, id_of);
                (draft, engine)
            });
            // What `tokenizers` says of the file comes before what is wrong with the rest.
            let plain = read.into_inner().unwrap_or_else(join).context("reading a tokenizer.json")??;
            let (draft, engine) = drafted?;
            draft.finish(plain, engine, super::sha256_hex(&bytes), path)
        })
    }

    /// SHA-256 of the file, hexadecimal.
    pub fn sha256(&self) -> &str {
        &self.sha256
    }
    /// Largest id + 1.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }
    /// The token that ends a document, and its id.
    pub fn eod(&self) -> Option<(&str, u32)> {
        self.eod.as_ref().map(|(token, id)| (token.as_str(), *id))
    }
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.plain.token_to_id(token)
    }
    /// Id of the entry that stands for text the vocabulary cannot spell, if the model has one.
    pub fn unknown(&self) -> Option<u32> {
        self.unknown
    }

    /// Version of the Unicode tables by which text is cut, where the engine does it.
    pub fn unicode_version(&self) -> Option<&'static str> {
        self.engine.is_ok().then(super::unicode_version)
    }

    /// A sentence for the user if the fast engine does not take this tokenizer.
    pub fn slow_because(&self) -> Option<String> {
        let why = self.engine.as_ref().err()?;
        Some(format!("the tokenizer is encoded by `tokenizers`, which is slower than the engine of its own, as {why}"))
    }

    /// Ids of `text`, without anything added.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let mut ids = Vec::new();
        self.encode_into(text, &mut ids)?;
        Ok(ids)
    }

    /// Appends the ids of `text` to `ids`; what is appended before an error means nothing.
    pub fn encode_into(&self, text: &str, ids: &mut Vec<u32>) -> Result<()> {
        let first = ids.len();
        let done = self.engine.as_ref().is_ok_and(|engine| self.by_engine(engine, text, ids));
        if !done {
            ids.extend_from_slice(self.by_tokenizers(text, false)?.get_ids());
        }
        if let Some(id) = self.forbidden.first_in(&ids[first..]) {
            let token = self.plain.id_to_token(id).unwrap_or_default();
            return Err(anyhow!("the tokenizer made the special token `{token}` (id {id}) from plain text"));
        }
        Ok(())
    }

    /// Forgets the words that were met: what is measured next is a first pass.
    pub fn forget(&self) {
        self.cache.clear();
    }

    /// The first place from `from` on where `text` can be cut, whatever stands in it elsewhere: its ids are those of the two parts, one
    /// behind the other. None where there is no such place, or it cannot be told.
    pub fn cut_after(&self, text: &str, from: usize) -> Option<usize> {
        let engine = self.engine.as_ref().ok()?;
        let spaces = memchr::memchr_iter(b' ', text.as_bytes().get(from..)?).map(|at| from + at);
        spaces.into_iter().find(|at| text[..*at].chars().next_back().is_some_and(|left| engine.parts_before_space(left)))
    }

    /// Appends ids by the engine; false, and nothing appended, if the text is too long for it.
    fn by_engine(&self, engine: &Engine, text: &str, ids: &mut Vec<u32>) -> bool {
        WORKER.with_borrow_mut(|slot| {
            if slot.as_ref().is_none_or(|worker| !worker.has(&self.cache)) {
                *slot = Some(Worker::new(self.cache.clone()));
            }
            slot.as_mut().is_some_and(|worker| worker.encode(engine, text, ids))
        })
    }

    /// `places`: with the bytes of `text` that each id stands for.
    fn by_tokenizers(&self, text: &str, places: bool) -> Result<tokenizers::Encoding> {
        let tokenizer = self.guarded.as_ref().unwrap_or(&self.plain);
        let encode = || if places { tokenizer.encode(text, false) } else { tokenizer.encode_fast(text, false) };
        // A tokenizer that panics on one document out of a billion should not take the run's name for it with it.
        catch_unwind(AssertUnwindSafe(encode))
            .map_err(|_| anyhow!("the tokenizer panicked on this text ({} bytes)", text.len()))?
            .map_err(|e| anyhow!("the tokenizer cannot encode this text ({} bytes): {e}", text.len()))
    }

    /// Spelling of the entry `id`.
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.plain.id_to_token(id)
    }

    /// As [`Encoder::encode`], with the bytes of `text` that each id stands for; slower.
    pub fn encode_with_places(&self, text: &str) -> Result<Vec<(u32, std::ops::Range<usize>)>> {
        let encoding = self.by_tokenizers(text, true)?;
        let places = encoding.get_offsets().iter().map(|(start, end)| *start..*end);
        Ok(encoding.get_ids().iter().copied().zip(places).collect())
    }

    /// Text of `ids`. Special tokens are spelt out unless `skip_special`.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        self.plain.decode(ids, skip_special).map_err(|e| anyhow!("the tokenizer cannot decode {} ids: {e}", ids.len()))
    }
}

/// Contents of the special added tokens, in the file's order.
fn special_tokens(json: &Value) -> Vec<String> {
    let tokens = json.get("added_tokens").and_then(Value::as_array).into_iter().flatten();
    let special = tokens.filter(|t| t.get("special").and_then(Value::as_bool) == Some(true));
    special.filter_map(|t| t.get("content")?.as_str()).map(str::to_string).collect()
}

fn mark_special(json: &mut Value, token: &str) {
    for added in json.get_mut("added_tokens").and_then(Value::as_array_mut).into_iter().flatten() {
        if added.get("content").and_then(Value::as_str) == Some(token) {
            added["special"] = Value::Bool(true);
        }
    }
}

fn list(tokens: &[String]) -> String {
    const SHOWN: usize = 12;
    let mut text = tokens.iter().take(SHOWN).map(|t| format!("`{t}`")).collect::<Vec<_>>().join(", ");
    if tokens.len() > SHOWN {
        text += &format!(" and {} more", tokens.len() - SHOWN);
    }
    if tokens.is_empty() { "none".into() } else { text }
}

fn find_eod(special: &[String]) -> Result<String, String> {
    let ends: Vec<String> = special.iter().filter(|t| KNOWN_ENDS.contains(&t.as_str())).cloned().collect();
    match &ends[..] {
        [one] => Ok(one.clone()),
        [] => Err(format!("no token is known to end a document; name one with --eod (special tokens: {})", list(special))),
        several => Err(format!("several tokens may end a document ({}); name one with --eod", list(several))),
    }
}

/// Whether text can be kept from spelling the token that is to end documents.
fn check_eod(token: &str, json: &Value, special: &[String], path: &Path) -> Result<()> {
    let shown = path.display();
    if guard::unknown_token(json) == Some(token) {
        return Err(bad_input(format!(
            "--eod `{token}` is also what {shown} gives for unknown text, so it could come from text; choose another token"
        )));
    }
    let mut added = json.get("added_tokens").and_then(Value::as_array).into_iter().flatten();
    let is_added = added.any(|t| t.get("content").and_then(Value::as_str) == Some(token));
    // An ordinary entry is part of how text is spelt: hiding it would change how words are cut.
    if guard::is_letter(json, token) || (!is_added && guard::can_spell(json, token)) {
        return Err(bad_input(format!(
            "--eod `{token}` is an ordinary entry of {shown}, which text can spell; choose a special token: {}",
            list(special)
        )));
    }
    Ok(())
}
