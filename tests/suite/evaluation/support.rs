//! What the tests of evaluation share.

use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow};
use serde_json::Value;
use tokenizers::Tokenizer;
use zaya::eval::harness::encode::Encode;

pub fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/eval")
}

/// `shared/` with the whole oracle and the data, beside this repository or above it; a sentence and `None` where it is not.
pub fn shared() -> Option<PathBuf> {
    let found =
        Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().map(|a| a.join("shared")).find(|s| s.join("oracle/eval").is_dir());
    if found.is_none() {
        eprintln!("skipped: no folder shared/oracle/eval beside the repository, so only the fixtures were compared");
    }
    found
}

/// The records of a .jsonl file and their lines.
pub fn records(path: &Path) -> Vec<(Value, String)> {
    let text = std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    text.lines().map(|l| (serde_json::from_str(l).unwrap(), l.to_string())).collect()
}

/// The oracle's tokenizer: 4,096 tokens, adds a BOS.
pub struct Tok(Tokenizer);

impl Tok {
    pub fn load() -> Self {
        let packed = std::fs::read(fixtures().join("tokenizer.json.zst")).unwrap();
        Self(Tokenizer::from_bytes(zstd::decode_all(&packed[..]).unwrap()).unwrap())
    }

    /// Text of generated ids, without special tokens.
    pub fn decode(&self, ids: &[u32]) -> String {
        self.0.decode(ids, true).unwrap()
    }
}

impl Encode for Tok {
    fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>> {
        Ok(self.0.encode(text, special).map_err(|e| anyhow!("{e}"))?.get_ids().to_vec())
    }

    fn bos(&self) -> Option<(u32, &str)> {
        Some((2, "<bos>"))
    }

    fn eos(&self) -> Option<(u32, &str)> {
        Some((1, "<eos>"))
    }
}

/// Ids of a JSON list.
pub fn ids(v: &Value) -> Vec<u32> {
    v.as_array().unwrap().iter().map(|i| i.as_u64().unwrap() as u32).collect()
}

/// Equal, or a panic that shows where two long texts part.
pub fn assert_same(ours: &str, theirs: &str, what: &str) {
    if ours != theirs {
        let at = ours.bytes().zip(theirs.bytes()).take_while(|(a, b)| a == b).count();
        let near = |s: &str| String::from_utf8_lossy(&s.as_bytes()[at.saturating_sub(60)..(at + 60).min(s.len())]).into_owned();
        panic!("{what}: at byte {at} ours is ...{:?}, theirs ...{:?}", near(ours), near(theirs));
    }
}
