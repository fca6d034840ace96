//! From a record to a document's text: JSON, Unicode repair, and what to do with what cannot be used.

use std::fmt;

use serde::Deserializer as _;
use serde::de::{DeserializeSeed, IgnoredAny, MapAccess, Visitor};

use super::corpus::Layout;

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
pub struct Document {
    pub text: String,
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
        }
    }
}

/// The document in a record.
pub fn document(bytes: &[u8], layout: Layout, field: &str, on_bad: OnBad) -> Result<Document, Fault> {
    let document = match layout {
        Layout::Text => repair(bytes),
        Layout::JsonLines => repair(&json_field(bytes, field)?),
    };
    if document.replaced > 0 && on_bad != OnBad::Replace { Err(Fault::NotUnicode(document.replaced)) } else { Ok(document) }
}

/// UTF-8 with one U+FFFD for each part that is not: a lone surrogate (three bytes, as JSON's `\ud800` comes here) or, as
/// everywhere, a maximal piece of a broken sequence.
fn repair(bytes: &[u8]) -> Document {
    let mut document = Document { text: String::with_capacity(bytes.len()), replaced: 0 };
    let mut rest = bytes;
    while !rest.is_empty() {
        let Some(chunk) = rest.utf8_chunks().next() else { break };
        document.text.push_str(chunk.valid());
        rest = &rest[chunk.valid().len()..];
        let bad = chunk.invalid().len();
        if bad > 0 {
            let surrogate = matches!(rest, [0xed, 0xa0..=0xbf, 0x80..=0xbf, ..]);
            rest = &rest[if surrogate { 3 } else { bad }..];
            document.text.push(char::REPLACEMENT_CHARACTER);
            document.replaced += 1;
        }
    }
    document
}

/// Raw bytes of a top-level field of a JSON object; the last one counts if there are several. The value may hold lone
/// surrogates and bytes that are not UTF-8.
fn json_field(line: &[u8], field: &str) -> Result<Vec<u8>, Fault> {
    if line.iter().find(|b| !b.is_ascii_whitespace()) != Some(&b'{') {
        // Tell "not JSON" from "JSON, but not an object".
        return Err(match serde_json::from_slice::<IgnoredAny>(line) {
            Ok(_) => Fault::NotAnObject,
            Err(e) => Fault::NotJson(explain(&e)),
        });
    }
    let mut json = serde_json::Deserializer::from_slice(line);
    let found = json.deserialize_map(FieldVisitor(field.as_bytes()));
    match found.and_then(|found| json.end().map(|()| found)) {
        Ok(Some(text)) => Ok(text),
        Ok(None) => Err(Fault::NoField),
        Err(e) if e.is_data() => Err(Fault::NotAString(explain(&e))),
        Err(e) => Err(Fault::NotJson(explain(&e))),
    }
}

/// serde_json's message with the column alone: the line number there is always 1.
fn explain(e: &serde_json::Error) -> String {
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

/// Looks for the field of this name.
struct FieldVisitor<'a>(&'a [u8]);

impl<'de> Visitor<'de> for FieldVisitor<'_> {
    type Value = Option<Vec<u8>>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut found = None;
        while let Some(is_field) = map.next_key_seed(KeySeed(self.0))? {
            if is_field {
                found = Some(map.next_value_seed(TextSeed)?);
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(found)
    }
}

/// Compares a key with the field's name, as bytes: a key that is not Unicode is merely another key.
struct KeySeed<'a>(&'a [u8]);

impl<'de> DeserializeSeed<'de> for KeySeed<'_> {
    type Value = bool;
    fn deserialize<D: serde::Deserializer<'de>>(self, d: D) -> Result<bool, D::Error> {
        d.deserialize_bytes(self)
    }
}

impl Visitor<'_> for KeySeed<'_> {
    type Value = bool;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }
    fn visit_bytes<E>(self, v: &[u8]) -> Result<bool, E> {
        Ok(v == self.0)
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

    fn json(line: &[u8]) -> Result<Document, Fault> {
        document(line, Layout::JsonLines, "text", OnBad::Replace)
    }
    fn text(line: &[u8]) -> String {
        json(line).unwrap().text
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
            assert_eq!((got.text.as_str(), got.replaced), (expected, replaced), "{escaped}");
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
            let got = document(bytes, Layout::Text, "text", OnBad::Replace).unwrap();
            assert_eq!((got.text.as_str(), got.replaced), (expected, replaced), "{bytes:x?}");
            assert_eq!(got.text, String::from_utf8_lossy(bytes));
            for policy in [OnBad::Skip, OnBad::Fail] {
                assert_eq!(document(bytes, Layout::Text, "text", policy), Err(Fault::NotUnicode(replaced)));
            }
        }
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
