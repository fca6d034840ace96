//! A record of messages, ready for a template.

use std::collections::BTreeMap;

use minijinja::Value as Jinja;
use serde_json::{Map, Value, json};

use super::PRIVATE;
use super::special::SpecialTokens;
use crate::text::filter::Condition;
use crate::text::record::{self, Document, Fault, OnBad};

/// Role of the turns that a model learns.
pub const ASSISTANT: &str = "assistant";

/// One conversation. Text in it that spells a special token is broken up, so that only the template can make special tokens.
#[derive(Debug)]
pub struct Conversation {
    pub roles: Vec<String>,
    /// Messages as templates see them.
    pub rendered: Vec<Jinja>,
    /// Further variables of the template: `tools`, `documents`, and what `chat_template_kwargs` holds.
    pub variables: BTreeMap<String, Jinja>,
    /// U+FFFD put in where the bytes were not Unicode.
    pub replaced: u64,
    /// The record meets all conditions; if not, nothing else of it was read.
    pub met: bool,
}

impl Conversation {
    /// Reads `{"messages": [{"role": ..., "content": ...}, ...]}`, or `{"conversations": [{"from": ..., "value": ...}, ...]}`.
    /// `field`: the name of the list where it is another one.
    ///
    /// # Errors
    /// Why the record is no conversation.
    pub fn read(
        record: &[u8],
        field: Option<&str>,
        on_bad: OnBad,
        keep: &[Condition],
        special: &SpecialTokens,
        reasoning: &[String; 2],
    ) -> Result<Self, Fault> {
        let (text, replaced) = repair(record);
        if replaced > 0 && on_bad != OnBad::Replace {
            return Err(Fault::NotUnicode(replaced));
        }
        let json: Value = serde_json::from_str(&text).map_err(|e| Fault::NotJson(record::explain(&e)))?;
        let Value::Object(mut record) = json else { return Err(Fault::NotAnObject) };
        let met = keep.iter().all(|condition| condition.is_met_by(&record));
        let mut out = Self { roles: Vec::new(), rendered: Vec::new(), variables: BTreeMap::new(), replaced, met };
        if !met {
            return Ok(out);
        }
        let list = match field {
            Some(field) => record.remove(field),
            None => record.remove("messages").or_else(|| record.remove("conversations")),
        };
        let Some(Value::Array(list)) = list else { return Err(Fault::NoField) };
        for (i, message) in list.into_iter().enumerate() {
            let mut message = with_role(message).ok_or_else(|| {
                let text = "needs a `role` and a `content` (or `from` and `value`)";
                Fault::Unusable(format!("has a message that cannot be used: message {} {text}", i + 1))
            })?;
            let role = message["role"].as_str().unwrap_or_default().to_string();
            // In the assistant's own turns the tags of reasoning are what they look like.
            let spared: &[String] = if role == ASSISTANT { reasoning } else { &[] };
            break_special(&mut message, special, spared)?;
            out.rendered.push(Jinja::from_serialize(&message));
            out.roles.push(role);
        }
        let mut variables = Map::new();
        if let Some(Value::Object(more)) = record.remove("chat_template_kwargs") {
            variables.extend(more);
        }
        for name in ["tools", "documents"] {
            variables.extend(record.remove(name).filter(|v| !v.is_null()).map(|v| (name.to_string(), v)));
        }
        for (name, mut value) in variables {
            break_special(&mut value, special, &[])?;
            out.variables.insert(name, Jinja::from_serialize(&value));
        }
        Ok(out)
    }

    /// Numbers of the assistant's messages.
    pub fn answers(&self) -> impl DoubleEndedIterator<Item = usize> + '_ {
        self.roles.iter().enumerate().filter(|(_, role)| *role == ASSISTANT).map(|(i, _)| i)
    }
}

/// The message as templates expect it; `from` and `value` are another habit of naming the same.
fn with_role(message: Value) -> Option<Value> {
    let Value::Object(mut fields) = message else { return None };
    if let (None, Some(from)) = (fields.get("role"), fields.get("from")) {
        let role = match from.as_str()? {
            "human" => "user",
            "gpt" | "chatgpt" | "bot" | "model" => ASSISTANT,
            "function_response" | "observation" => "tool",
            other => other,
        };
        let (role, content) = (json!(role), fields.remove("value")?);
        fields.remove("from");
        fields.insert("role".into(), role);
        fields.insert("content".into(), content);
    }
    fields.get("role")?.is_string().then_some(Value::Object(fields))
}

fn break_special(value: &mut Value, special: &SpecialTokens, spared: &[String]) -> Result<(), Fault> {
    match value {
        Value::String(text) => {
            if let Some(c) = text.chars().find(|c| PRIVATE.contains(c)) {
                let text = "a code that Unicode keeps for programs and no text has";
                return Err(Fault::Unusable(format!("holds U+{:04X}, {text}", c as u32)));
            }
            special.break_up(text, spared);
            Ok(())
        }
        Value::Array(values) => values.iter_mut().try_for_each(|v| break_special(v, special, spared)),
        Value::Object(fields) => {
            for (mut name, mut value) in std::mem::take(fields) {
                if special.spells(&name) || name.contains(|c| PRIVATE.contains(&c)) {
                    let mut text = Value::String(name);
                    break_special(&mut text, special, spared)?;
                    name = text.as_str().unwrap_or_default().into();
                }
                break_special(&mut value, special, spared)?;
                fields.insert(name, value);
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

/// A record's JSON with U+FFFD for what is not Unicode, escaped surrogates without a partner included; and how many there are.
fn repair(bytes: &[u8]) -> (String, u64) {
    let Document { text, mut replaced } = record::repair(bytes);
    let mut out = text.into_owned();
    let mut at = 0;
    while let Some(found) = out[at..].find('\\') {
        at += found;
        let unit = |at: usize| -> Option<u16> {
            let digits = out.get(at..at + 6)?.strip_prefix("\\u")?;
            u16::from_str_radix(digits, 16).ok()
        };
        match (unit(at), unit(at + 6)) {
            (Some(0xd800..=0xdbff), Some(0xdc00..=0xdfff)) => at += 12,
            (Some(0xd800..=0xdfff), _) => {
                out.replace_range(at..at + 6, "\\ufffd");
                replaced += 1;
                at += 6;
            }
            // An escaped backslash does not begin another escape.
            _ => at += 2usize.min(out.len() - at),
        }
        while !out.is_char_boundary(at) {
            at += 1;
        }
    }
    (out, replaced)
}
