//! From a record to a document's text: JSON, Unicode repair, and what to do with what cannot be used.

use std::borrow::Cow;
use std::fmt;

use serde::Deserializer as _;
use serde::de::{DeserializeSeed, IgnoredAny, MapAccess, Visitor};

use super::corpus::{Block, Content, Layout};
use super::filter::{Condition, Value};
use super::json_line;

/// What to do with a record that is not as it should be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnBad {
    /// Repair text that is not Unicode with U+FFFD; pass over records that cannot be repaired.
    Replace,
    /// Pass over either.
    Skip,
    /// Stop at either.
    Fail,
}

/// Text of one document.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Document<'a> {
    pub text: Cow<'a, str>,
    /// U+FFFD put in where the bytes were not Unicode.
    pub replaced: u64,
}

/// Why a record is no document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    NotJson(String),
    NotAnObject,
    NoField,
    NotAString(String),
    /// Text that needs this many U+FFFD, with a policy other than `replace`.
    NotUnicode(u64),
    /// For another reason, in words that follow "FILE line N ".
    Unusable(String),
    /// Bytes of a record that has more than are allowed.
    TooLong(u64),
}

impl Fault {
    /// For people, after "FILE line N ".
    pub fn explain(&self, field: &str) -> String {
        match self {
            Self::NotJson(why) => format!("is not JSON: {why}"),
            Self::NotAnObject => format!("is not a JSON object such as {{\"{field}\": \"...\"}}; one object a line is expected"),
            Self::NoField => format!("has no field `{field}`"),
            Self::NotAString(why) => format!("has a field `{field}` that is not text: {why}"),
            Self::NotUnicode(n) => format!("is not Unicode in {n} place{}", if *n == 1 { "" } else { "s" }),
            Self::Unusable(why) => why.clone(),
            Self::TooLong(n) => format!("has {n} bytes, more than a record may have (--max-record-bytes)"),
        }
    }
}

/// Bytes of a record of a block.
pub fn bytes_of(block: &Block, number: usize) -> Result<&[u8], Fault> {
    let record = &block.records[number];
    match record.content {
        Content::TooLong(n) => Err(Fault::TooLong(n)),
        Content::Null => Err(Fault::NotAString("null".into())),
        Content::Bytes(_) => Ok(block.bytes(record)),
    }
}

/// The document in a record of a block, and whether it meets all conditions. `room` is for the text where it does not lie in the block
/// as it is; to be given again for the next one.
pub fn document_of<'a>(
    block: &'a Block,
    number: usize,
    layout: Layout,
    field: &str,
    on_bad: OnBad,
    keep: &[Condition],
    room: &'a mut Vec<u8>,
) -> Result<(Document<'a>, bool), Fault> {
    let bytes = bytes_of(block, number)?;
    let (document, met) = match layout {
        Layout::Text => (repair(bytes), keep.is_empty()),
        Layout::JsonLines => {
            if keep.is_empty()
                && let Some(text) = json_line::text_of(bytes, field.as_bytes(), room)
            {
                (repair(text), true)
            } else {
                let (text, met) = json_field(bytes, field, keep)?;
                (repair_owned(text), met)
            }
        }
        Layout::Parquet => {
            let values = &block.fields[number * keep.len()..][..keep.len()];
            (repair(bytes), keep.iter().zip(values).all(|(condition, value)| condition.is_met(value)))
        }
    };
    if document.replaced > 0 && on_bad != OnBad::Replace {
        return Err(Fault::NotUnicode(document.replaced));
    }
    Ok((document, met))
}

/// As [`repair`], of bytes of one's own.
fn repair_owned(bytes: Vec<u8>) -> Document<'static> {
    match String::from_utf8(bytes) {
        Ok(text) => Document { text: text.into(), replaced: 0 },
        Err(e) => repaired(e.as_bytes()),
    }
}

/// UTF-8 with one U+FFFD for each part that is not: a lone surrogate (three bytes, as JSON's `\ud800` comes here) or, as
/// everywhere, a maximal piece of a broken sequence.
pub(super) fn repair(bytes: &[u8]) -> Document<'_> {
    match simdutf8::basic::from_utf8(bytes) {
        Ok(text) => Document { text: text.into(), replaced: 0 },
        Err(_) => repaired(bytes),
    }
}

fn repaired(bytes: &[u8]) -> Document<'static> {
    let (mut text, mut replaced) = (String::with_capacity(bytes.len()), 0);
    let mut rest = bytes;
    while !rest.is_empty() {
        let Some(chunk) = rest.utf8_chunks().next() else { break };
        text.push_str(chunk.valid());
        rest = &rest[chunk.valid().len()..];
        let bad = chunk.invalid().len();
        if bad > 0 {
            let surrogate = matches!(rest, [0xed, 0xa0..=0xbf, 0x80..=0xbf, ..]);
            rest = &rest[if surrogate { 3 } else { bad }..];
            text.push(char::REPLACEMENT_CHARACTER);
            replaced += 1;
        }
    }
    Document { text: text.into(), replaced }
}

/// Raw bytes of a top-level field of a JSON object, and whether the object meets all conditions; the last one counts if a field
/// stands there several times. The value may hold lone surrogates and bytes that are not UTF-8.
pub(super) fn json_field(line: &[u8], field: &str, keep: &[Condition]) -> Result<(Vec<u8>, bool), Fault> {
    if line.iter().find(|b| !b.is_ascii_whitespace()) != Some(&b'{') {
        // Tell "not JSON" from "JSON, but not an object".
        return Err(match serde_json::from_slice::<IgnoredAny>(line) {
            Ok(_) => Fault::NotAnObject,
            Err(e) => Fault::NotJson(explain(&e)),
        });
    }
    let mut json = serde_json::Deserializer::from_slice(line);
    let found = json.deserialize_map(FieldVisitor { field, keep });
    match found.and_then(|found| json.end().map(|()| found)) {
        Ok((Some(text), values)) => {
            let met = keep.iter().zip(&values).all(|(condition, value)| condition.is_met(value));
            Ok((text, met))
        }
        Ok((None, _)) => Err(Fault::NoField),
        Err(e) if e.is_data() => Err(Fault::NotAString(explain(&e))),
        Err(e) => Err(Fault::NotJson(explain(&e))),
    }
}

/// serde_json's message with the column alone: the line number there is always 1.
pub(super) fn explain(e: &serde_json::Error) -> String {
    let text = e.to_string();
    match text.rfind(" at line ") {
        Some(at) => format!("{} at column {}", &text[..at], e.column()),
        None => text,
    }
}

/// Names of the top-level fields of an object, for a message; nothing if it is not one.
pub fn field_names(line: &[u8]) -> Vec<String> {
    match serde_json::from_slice(line) {
        Ok(serde_json::Value::Object(map)) => map.keys().cloned().collect(),
        _ => Vec::new(),
    }
}

/// Looks for the text, and for what conditions ask about.
struct FieldVisitor<'a> {
    field: &'a str,
    keep: &'a [Condition],
}

impl<'de> Visitor<'de> for FieldVisitor<'_> {
    type Value = (Option<Vec<u8>>, Vec<Value>);

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut text = None;
        let mut values = vec![Value::Absent; self.keep.len()];
        let keys = KeySeed { field: self.field.as_bytes(), keep: self.keep };
        while let Some(key) = map.next_key_seed(keys)? {
            match key {
                Key::Other => drop(map.next_value::<IgnoredAny>()?),
                Key::Text => {
                    let bytes = map.next_value_seed(TextSeed)?;
                    for (condition, value) in self.keep.iter().zip(&mut values).filter(|(c, _)| c.field() == self.field) {
                        *value = condition.look(self.field, &String::from_utf8_lossy(&bytes).into()).unwrap_or_default();
                    }
                    text = Some(bytes);
                }
                Key::Asked(key) => {
                    let root: serde_json::Value = map.next_value()?;
                    for (condition, value) in self.keep.iter().zip(&mut values).filter(|(c, _)| c.concerns(key.as_bytes())) {
                        *value = condition.look(&key, &root).unwrap_or_default();
                    }
                }
            }
        }
        Ok((text, values))
    }
}

/// What a key of the object is.
enum Key {
    Text,
    /// Conditions ask about it.
    Asked(String),
    Other,
}

/// Compares a key with names, as bytes: a key that is not Unicode is merely another key.
#[derive(Clone, Copy)]
struct KeySeed<'a> {
    field: &'a [u8],
    keep: &'a [Condition],
}

impl<'de> DeserializeSeed<'de> for KeySeed<'_> {
    type Value = Key;
    fn deserialize<D: serde::Deserializer<'de>>(self, d: D) -> Result<Key, D::Error> {
        d.deserialize_bytes(self)
    }
}

impl Visitor<'_> for KeySeed<'_> {
    type Value = Key;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }
    fn visit_bytes<E>(self, v: &[u8]) -> Result<Key, E> {
        Ok(match std::str::from_utf8(v) {
            _ if v == self.field => Key::Text,
            Ok(key) if self.keep.iter().any(|condition| condition.concerns(v)) => Key::Asked(key.to_string()),
            _ => Key::Other,
        })
    }
}

/// A string's bytes. `deserialize_bytes` makes serde_json hand over strings that are not Unicode.
struct TextSeed;

impl<'de> DeserializeSeed<'de> for TextSeed {
    type Value = Vec<u8>;
    fn deserialize<D: serde::Deserializer<'de>>(self, d: D) -> Result<Vec<u8>, D::Error> {
        d.deserialize_bytes(self)
    }
}

impl Visitor<'_> for TextSeed {
    type Value = Vec<u8>;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("text")
    }
    fn visit_bytes<E>(self, v: &[u8]) -> Result<Vec<u8>, E> {
        Ok(v.to_vec())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn document(bytes: &[u8], layout: Layout, keep: &[&str], on_bad: OnBad) -> Result<(Document<'static>, bool), Fault> {
        let keep: Vec<Condition> = keep.iter().map(|c| c.parse().unwrap()).collect();
        let own = |(document, met): (Document<'_>, bool)| {
            (Document { text: document.text.into_owned().into(), replaced: document.replaced }, met)
        };
        document_of(&Block::of_one(bytes), 0, layout, "text", on_bad, &keep, &mut Vec::new()).map(own)
    }
    fn json(line: &[u8]) -> Result<Document<'static>, Fault> {
        document(line, Layout::JsonLines, &[], OnBad::Replace).map(|(document, _)| document)
    }
    fn text(line: &[u8]) -> String {
        json(line).unwrap().text.into_owned()
    }

    #[test]
    fn takes_the_field_wherever_it_stands() {
        assert_eq!(text(br#"{"text":"a"}"#), "a");
        assert_eq!(text(br#" {"id": [1, {"text": "no"}], "text" : "yes", "z": null} "#), "yes");
        assert_eq!(text(br#"{"te\u0078t":"escaped key"}"#), "escaped key");
        assert_eq!(text(b"{\"\xff\":1,\"text\":\"a\"}\r"), "a");
        assert_eq!(text(br#"{"text":"first","text":"last"}"#), "last");
        assert_eq!(text(br#"{"text":""}"#), "");
    }

    #[test]
    fn keeps_odd_characters() {
        assert_eq!(text(br#"{"text":"a\u0000b\ufeffc"}"#), "a\0b\u{feff}c");
        assert_eq!(text("{\"text\":\"a\u{2028}b\u{85}c\"}".as_bytes()), "a\u{2028}b\u{85}c");
        // A raw control character is not allowed in JSON, but what it means is clear.
        assert_eq!(text(b"{\"text\":\"a\tb\0c\"}"), "a\tb\0c");
    }

    #[test]
    fn lone_surrogates_become_one_replacement_each() {
        let cases: [(&str, &str, u64); 6] = [
            (r"a\ud83d b", "a\u{fffd} b", 1),
            (r"\ude00", "\u{fffd}", 1),
            (r"\ude00\ud83d", "\u{fffd}\u{fffd}", 2),
            (r"\ud83d\ude00", "\u{1f600}", 0),
            (r"\ud83d\ud83d\ude00", "\u{fffd}\u{1f600}", 1),
            (r"\ud83d\n", "\u{fffd}\n", 1),
        ];
        for (escaped, expected, replaced) in cases {
            let got = json(format!("{{\"text\":\"{escaped}\"}}").as_bytes()).unwrap();
            assert_eq!((&*got.text, got.replaced), (expected, replaced), "{escaped}");
        }
    }

    #[test]
    fn broken_utf8_is_replaced_piece_by_piece() {
        for (bytes, expected, replaced) in [
            (&b"a\xffb"[..], "a\u{fffd}b", 1),
            (b"\xe4\xb8", "\u{fffd}", 1),
            (b"\xe4\xb8x\xe4\xb8\xad", "\u{fffd}x\u{4e2d}", 1),
            (b"caf\xe9 au lait", "caf\u{fffd} au lait", 1),
            (b"\xf0\x9f\x98", "\u{fffd}", 1),
            (b"\xc0\x80", "\u{fffd}\u{fffd}", 2),
        ] {
            let got = document(bytes, Layout::Text, &[], OnBad::Replace).unwrap().0;
            assert_eq!((&*got.text, got.replaced), (expected, replaced), "{bytes:x?}");
            assert_eq!(got.text, String::from_utf8_lossy(bytes));
            for policy in [OnBad::Skip, OnBad::Fail] {
                assert_eq!(document(bytes, Layout::Text, &[], policy), Err(Fault::NotUnicode(replaced)));
            }
        }
    }

    #[test]
    fn conditions_look_at_the_record() {
        let met = |line: &str, keep: &[&str]| document(line.as_bytes(), Layout::JsonLines, keep, OnBad::Replace).unwrap().1;
        let line = r#"{"score":0.7,"text":"abc","meta":{"lang":"en","n":[1]},"score":0.2,"dup":"\ud83d"}"#;
        for (keep, expected) in [
            (&[][..], true),
            (&["score<0.5"], true),
            (&["score>0.5"], false),
            (&["score<0.5", "meta.lang==en"], true),
            (&["score<0.5", "meta.lang==de"], false),
            (&["text==abc"], true),
            (&["text==abd"], false),
            (&["absent!=1"], false),
            (&["meta.n!=1"], false),
        ] {
            assert_eq!(met(line, keep), expected, "{keep:?}");
        }
        // Plain text has no fields.
        assert!(!document(b"abc", Layout::Text, &["a>1"], OnBad::Replace).unwrap().1);
    }

    #[test]
    fn faults_say_what_is_wrong() {
        let fault = |line: &[u8]| json(line).unwrap_err().explain("text");
        assert_eq!(fault(b"{\"a\":1}"), "has no field `text`");
        assert_eq!(fault(b"{}"), "has no field `text`");
        assert!(fault(b"{\"text\":3}").starts_with("has a field `text` that is not text: invalid type: integer `3`"));
        assert!(fault(b"{\"text\":null}").contains("invalid type: null"));
        assert!(fault(b"{\"text\":[\"a\"]}").contains("sequence"));
        assert!(fault(b"{\"text\":{}}").contains("map"));
        assert!(fault(b"[1]").starts_with("is not a JSON object"));
        assert!(fault(b"\"abc\"").starts_with("is not a JSON object"));
        for malformed in
            [&b"{\"text\":\"a\""[..], b"{\"text\":\"a", b"{\"text\":\"a\"} x", b"abc", b"{'text':'a'}", b"{\"text\":\"\\q\"}"]
        {
            assert!(fault(malformed).starts_with("is not JSON: "), "{}", fault(malformed));
        }
    }
}
