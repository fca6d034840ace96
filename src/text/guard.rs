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

/// The merge makes the entry `content`. Models with a prefix for inner pieces (`##`) drop the second part's.
fn makes(model: &Map<String, Value>, (a, b): (&str, &str), content: &str) -> bool {
    let prefix = model.get("continuing_subword_prefix").and_then(Value::as_str).unwrap_or("");
    content.strip_prefix(a) == Some(b.strip_prefix(prefix).unwrap_or(b))
}

/// The model can produce the entry `content` from text.
fn can_produce(model: &Map<String, Value>, content: &str) -> bool {
    match (model.get("vocab"), model.get("merges").and_then(Value::as_array)) {
        (Some(Value::Object(vocab)), Some(merges)) => {
            let ignore_merges = model.get("ignore_merges").and_then(Value::as_bool).unwrap_or(false);
            vocab.contains_key(content)
                && (ignore_merges
                    || content.chars().count() == 1
                    || merges.iter().filter_map(parts).any(|m| makes(model, m, content)))
        }
        // Word lists look up whole pieces of text.
        (Some(Value::Object(vocab)), None) => vocab.contains_key(content),
        (Some(Value::Array(pieces)), _) => pieces.iter().any(|p| p.get(0).and_then(Value::as_str) == Some(content)),
        _ => false,
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
    tokenizer.get("model").and_then(Value::as_object).is_some_and(|model| can_produce(model, content))
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
    let hidden: Vec<&String> =
        special.iter().filter(|s| unknown.as_deref() != Some(s) && s.chars().count() > 1 && can_produce(model, s)).collect();
    let is_hidden = |name: &str| hidden.iter().any(|h| *h == name);
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
        merges.retain(|m| {
            parts(m).is_none_or(|(a, b)| !is_hidden(a) && !is_hidden(b) && !hidden.iter().any(|h| makes(model, (a, b), h)))
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
