//! Keeping a model's vocabulary from spelling special tokens.
//!
//! `tokenizers` can be told to leave special tokens in the text unmatched. Most models then cannot produce their ids any
//! more, as no merge leads to them. Some can: a word list that holds `</s>` finds it as a word, and a BPE whose merges
//! build it merges it. For those, the entry is renamed to something that no text spells, in the copy of the tokenizer
//! that encodes.

use serde_json::{Map, Value};

/// A name for vocabulary entry `content` that no text has: U+FDD0 and U+FDD1 are not characters, and never will be.
fn hidden_name(content: &str) -> String {
    format!("\u{fdd0}zaya: never from text: {content}\u{fdd1}")
}

/// Two parts of one merge, in either of the two ways that files write it.
fn parts(merge: &Value) -> Option<(&str, &str)> {
    match merge {
        Value::String(s) => s.split_once(' '),
        Value::Array(pair) => match &pair[..] {
            [Value::String(a), Value::String(b)] => Some((a, b)),
            _ => None,
        },
        _ => None,
    }
}

/// The prefix that a model has for inner pieces (`##`), if it has one.
fn inner_prefix(model: &Map<String, Value>) -> Option<&str> {
    model.get("continuing_subword_prefix").and_then(Value::as_str).filter(|prefix| !prefix.is_empty())
}

/// The merge makes the entry `content`. Models with a prefix for inner pieces drop the second part's.
fn makes(prefix: Option<&str>, (a, b): (&str, &str), content: &str) -> bool {
    let b = prefix.and_then(|prefix| b.strip_prefix(prefix)).unwrap_or(b);
    content.len() == a.len() + b.len() && content.starts_with(a) && content.ends_with(b)
}

/// Those of `contents` that the model can produce from text as entries. Vocabularies are large: each is gone through once.
fn producible<'a>(model: &Map<String, Value>, contents: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let is_entry = |content: &str| match model.get("vocab") {
        Some(Value::Object(vocab)) => vocab.contains_key(content),
        Some(Value::Array(pieces)) => pieces.iter().any(|p| p.get(0).and_then(Value::as_str) == Some(content)),
        _ => false,
    };
    let entries: Vec<&str> = contents.filter(|content| is_entry(content)).collect();
    let ignores_merges = model.get("ignore_merges").and_then(Value::as_bool).unwrap_or(false);
    match (model.get("vocab"), model.get("merges").and_then(Value::as_array)) {
        (Some(Value::Object(_)), Some(merges)) if !ignores_merges => {
            let mut made: Vec<bool> = entries.iter().map(|entry| entry.chars().count() == 1).collect();
            let prefix = inner_prefix(model);
            let merges = if made.contains(&false) { &merges[..] } else { &[] };
            for merge in merges.iter().filter_map(parts) {
                for (made, entry) in made.iter_mut().zip(&entries) {
                    *made |= makes(prefix, merge, entry);
                }
            }
            entries.into_iter().zip(made).filter(|(_, made)| *made).map(|(entry, _)| entry).collect()
        }
        // Word lists look up whole pieces of text.
        _ => entries,
    }
}

/// Name of the entry that stands for unknown text, if the model has one.
pub(super) fn unknown_token(tokenizer: &Value) -> Option<&str> {
    let model = tokenizer.get("model")?;
    if let Some(name) = model.get("unk_token").and_then(Value::as_str) {
        return Some(name);
    }
    let index = usize::try_from(model.get("unk_id")?.as_u64()?).ok()?;
    model.get("vocab")?.get(index)?.get(0)?.as_str()
}

/// The model of `tokenizer` can produce the entry `content` from text.
pub(super) fn can_spell(tokenizer: &Value, content: &str) -> bool {
    tokenizer.get("model").and_then(Value::as_object).is_some_and(|model| !producible(model, [content].into_iter()).is_empty())
}

/// `content` is one character that the model spells text with.
pub(super) fn is_letter(tokenizer: &Value, content: &str) -> bool {
    content.chars().count() == 1 && can_spell(tokenizer, content)
}

/// Hides every entry of `special` that the model could produce from text; true if there was one. Two kinds stay, as text
/// would be lost without them: the entry for unknown text, and single characters.
pub(super) fn hide(tokenizer: &mut Value, special: &[String]) -> bool {
    let unknown = unknown_token(tokenizer).map(str::to_string);
    let Some(model) = tokenizer.get_mut("model").and_then(Value::as_object_mut) else { return false };
    let others = special.iter().map(String::as_str).filter(|s| unknown.as_deref() != Some(*s) && s.chars().count() > 1);
    let hidden = producible(model, others);
    let is_hidden = |name: &str| hidden.contains(&name);
    if hidden.is_empty() {
        return false;
    }
    match model.get_mut("vocab") {
        Some(Value::Object(vocab)) => {
            let rename = |(name, id): (String, Value)| (if is_hidden(&name) { hidden_name(&name) } else { name }, id);
            *vocab = std::mem::take(vocab).into_iter().map(rename).collect();
        }
        Some(Value::Array(pieces)) => {
            for name in pieces.iter_mut().filter_map(|p| p.get_mut(0)) {
                if let Value::String(s) = name
                    && is_hidden(s)
                {
                    *s = hidden_name(s);
                }
            }
        }
        _ => {}
    }
    if let Some(Value::Array(mut merges)) = model.remove("merges") {
        let prefix = inner_prefix(model);
        merges.retain(|m| {
            parts(m).is_none_or(|(a, b)| !is_hidden(a) && !is_hidden(b) && !hidden.iter().any(|h| makes(prefix, (a, b), h)))
        });
        model.insert("merges".into(), Value::Array(merges));
    }
    for token in tokenizer.get_mut("added_tokens").and_then(Value::as_array_mut).into_iter().flatten() {
        if let Some(Value::String(content)) = token.get_mut("content")
            && is_hidden(content)
        {
            *content = hidden_name(content);
        }
    }
    true
}
