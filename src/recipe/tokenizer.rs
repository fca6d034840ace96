//! The largest id of a `tokenizer.json`, without building the tokenizer (Gemma's file takes seconds to build).

use std::fmt;
use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use serde::Deserialize;
use serde::de::{IgnoredAny, MapAccess, SeqAccess, Visitor};

#[derive(Deserialize)]
struct TokenizerFile {
    model: Model,
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
}

#[derive(Deserialize)]
struct Model {
    #[serde(default)]
    vocab: LargestId,
}

#[derive(Deserialize)]
struct AddedToken {
    id: u64,
}

/// Vocabularies are maps from piece to id (BPE, WordPiece) or arrays in the order of ids (Unigram).
#[derive(Default)]
struct LargestId(Option<u64>);

impl<'de> Deserialize<'de> for LargestId {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct Ids;
        impl<'de> Visitor<'de> for Ids {
            type Value = LargestId;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a vocabulary: a map from piece to id, or an array of pieces")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<LargestId, A::Error> {
                let mut largest = None;
                while let Some((IgnoredAny, id)) = map.next_entry::<IgnoredAny, u64>()? {
                    largest = largest.max(Some(id));
                }
                Ok(LargestId(largest))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<LargestId, A::Error> {
                let mut count: u64 = 0;
                while seq.next_element::<IgnoredAny>()?.is_some() {
                    count += 1;
                }
                Ok(LargestId(count.checked_sub(1)))
            }
        }
        d.deserialize_any(Ids)
    }
}

/// The largest id that the tokenizer can produce; None for an empty vocabulary. The error says what is wrong with the file.
pub fn max_id(path: &Path) -> Result<Option<u64>, String> {
    let file = File::open(path).map_err(|e| format!("cannot open {}: {e}", path.display()))?;
    let parsed: TokenizerFile = serde_json::from_reader(BufReader::new(file))
        .map_err(|e| format!("{} is not a Hugging Face tokenizer.json: {e}", path.display()))?;
    Ok(parsed.added_tokens.iter().map(|t| t.id).max().max(parsed.model.vocab.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(json: &str) -> Result<Option<u64>, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokenizer.json");
        std::fs::write(&path, json).unwrap();
        max_id(&path)
    }

    #[test]
    fn largest_id_of_maps_arrays_and_added_tokens() {
        assert_eq!(of(r#"{"model":{"type":"BPE","vocab":{"a":0,"c":7,"b":3},"merges":[]}}"#), Ok(Some(7)));
        assert_eq!(of(r#"{"model":{"vocab":{"a":0}},"added_tokens":[{"id":12,"content":"<eos>"}]}"#), Ok(Some(12)));
        assert_eq!(of(r#"{"model":{"vocab":[["a",-1.0],["b",-2.0]]}}"#), Ok(Some(1)));
        assert_eq!(of(r#"{"model":{}}"#), Ok(None));
        for broken in ["", "[]", "{}", r#"{"model":{"vocab":{"a":-1}}}"#, r#"{"model":{"vocab":7}}"#] {
            assert!(of(broken).is_err_and(|e| e.contains("tokenizer.json")), "{broken}");
        }
    }
}
