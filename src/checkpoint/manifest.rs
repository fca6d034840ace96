//! `manifest.json`: what a checkpoint holds, and the hash of everything, its own included.
//!
//! The last line of the file is `"checksum"`: the blake3 hash of every byte before it. The file is read as bytes first, so a
//! flipped bit anywhere, in a number as well as in a space, is seen before any of it is believed.

use std::collections::{BTreeMap, HashMap, HashSet};

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::bits::Bits;
use super::layout::{Dtype, part_key, rows_of};
use crate::model::config::ModelConfig;

pub(super) const FORMAT: &str = "zck";
pub(super) const VERSION: u32 = 1;

/// What a checkpoint is good for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Contents {
    /// Everything that a run needs to go on as if it had never stopped.
    Training,
    /// The model alone: to evaluate, to generate, to start another run from.
    Weights,
}

/// Everything of a training state that is not a tensor. Captured by value at the step it belongs to.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Meta {
    /// Optimizer steps taken.
    pub step: u64,
    /// Tokens of the global batches of those steps.
    pub tokens_seen: u64,
    pub model: ModelConfig,
    /// Hash of the tokenizer file of the run.
    pub tokenizer_hash: Option<String>,
    /// Identifies the data sources and their mixture.
    pub data_fingerprint: Option<String>,
    /// Position of the loader, in its own words.
    pub loader: Value,
    /// What the guards of the run judge by, in their own words; null = nothing.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub guards: Value,
    /// Named numbers, such as an optimizer's count of updates. See [`Meta::set_u64`] and [`Meta::set_f64`].
    pub scalars: BTreeMap<String, Value>,
    /// The resolved recipe, as TOML text.
    pub recipe: String,
}

impl Meta {
    /// Step 0 of a model, nothing else known.
    pub fn new(model: ModelConfig) -> Self {
        Self {
            step: 0,
            tokens_seen: 0,
            model,
            tokenizer_hash: None,
            data_fingerprint: None,
            loader: Value::Null,
            guards: Value::Null,
            scalars: BTreeMap::new(),
            recipe: String::new(),
        }
    }

    pub fn set_u64(&mut self, name: &str, value: u64) {
        self.scalars.insert(name.into(), value.into());
    }

    /// # Errors
    /// When the checkpoint has no such whole number.
    pub fn get_u64(&self, name: &str) -> Result<u64> {
        self.scalars.get(name).and_then(Value::as_u64).with_context(|| format!("the checkpoint has no whole number `{name}`"))
    }

    /// Stores a number together with its bits: decimal text alone may come back changed in the last place.
    pub fn set_f64(&mut self, name: &str, value: f64) {
        self.scalars.insert(name.into(), json!({"value": value, "bits": Bits(value)}));
    }

    /// # Errors
    /// When the checkpoint has no such number.
    pub fn get_f64(&self, name: &str) -> Result<f64> {
        self.scalars
            .get(name)
            .and_then(|v| Some(Bits::deserialize(v.get("bits")?).ok()?.0))
            .with_context(|| format!("the checkpoint has no number `{name}`"))
    }
}

/// Identifies a model shape: equal exactly when every field is. Compare this on resume rather than the parsed fields.
pub fn model_hash(model: &ModelConfig) -> Result<String> {
    Ok(blake3::hash(serde_json::to_string(model)?.as_bytes()).to_hex().to_string())
}

/// One row block of a tensor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    pub file: String,
    /// First row and the row after the last; a scalar is one row.
    pub rows: [u64; 2],
    /// First byte and the byte after the last, counted from the start of the file.
    pub bytes: [u64; 2],
    /// xxh3-128 of those bytes, 32 hexadecimal digits.
    pub xxh3: String,
}

/// One logical tensor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    /// In row order, without gaps.
    pub parts: Vec<Part>,
}

/// One safetensors file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    pub name: String,
    pub size: u64,
    pub blake3: String,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    pub format: String,
    pub version: u32,
    /// The program that wrote it, with its version.
    pub tool: String,
    pub written_unix_s: u64,
    pub contents: Contents,
    pub model_hash: String,
    #[serde(flatten)]
    pub meta: Meta,
    pub entries: Vec<Entry>,
    pub files: Vec<FileEntry>,
    pub complete: bool,
}

const CHECKSUM_KEY: &str = ",\n\"checksum\": \"";

impl Manifest {
    pub(super) fn new(meta: &Meta, contents: Contents, entries: Vec<Entry>, files: Vec<FileEntry>) -> Result<Self> {
        let written = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        Ok(Self {
            format: FORMAT.into(),
            version: VERSION,
            tool: concat!("zaya ", env!("CARGO_PKG_VERSION")).into(),
            written_unix_s: written.map_or(0, |d| d.as_secs()),
            contents,
            model_hash: model_hash(&meta.model)?,
            meta: meta.clone(),
            entries,
            files,
            complete: true,
        })
    }

    /// The file's text: one line a field, one line an entry, so that `grep` and `diff` are of use; the checksum last.
    pub(super) fn to_text(&self) -> Result<String> {
        let Value::Object(map) = serde_json::to_value(self)? else { bail!("a manifest is a JSON object") };
        let mut out = String::from("{\n");
        for (i, (key, value)) in map.iter().enumerate() {
            if i > 0 {
                out.push_str(",\n");
            }
            out.push_str(&format!("{}: ", Value::from(key.as_str())));
            match value {
                Value::Array(items) if key == "entries" || key == "files" => {
                    let lines: Vec<String> = items.iter().map(Value::to_string).collect();
                    out.push_str(&format!("[\n{}\n]", lines.join(",\n")));
                }
                value => out.push_str(&value.to_string()),
            }
        }
        let checksum = blake3::hash(out.as_bytes()).to_hex();
        out.push_str(&format!("{CHECKSUM_KEY}{checksum}\"\n}}\n"));
        Ok(out)
    }

    /// Reads and checks a manifest's bytes.
    ///
    /// # Errors
    /// When a byte differs from what was written, when a newer program wrote it, or when it contradicts itself.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self> {
        let text = std::str::from_utf8(bytes).ok().context("the manifest is damaged: it is not UTF-8 text")?;
        let (body, tail) = text.rsplit_once(CHECKSUM_KEY).context("the manifest is damaged: it does not end in a checksum")?;
        let checksum = blake3::hash(body.as_bytes()).to_hex();
        ensure!(
            tail == format!("{checksum}\"\n}}\n"),
            "the manifest is damaged: its checksum does not match its text (if it was edited by hand, the checksum line must be made anew)"
        );
        #[derive(Deserialize)]
        struct Head {
            format: String,
            version: u32,
        }
        let head: Head = serde_json::from_str(text).context("the manifest is not a checkpoint's: no format and version")?;
        ensure!(head.format == FORMAT, "the manifest is of format {:?}, not {FORMAT:?}", head.format);
        ensure!(
            head.version == VERSION,
            "the manifest is of version {}, this program reads version {VERSION}: use the program that wrote it, or a newer one",
            head.version
        );
        let manifest: Self = serde_json::from_str(text).context("the manifest does not have the fields of its version")?;
        manifest.check()?;
        Ok(manifest)
    }

    /// Does every tensor consist of rows that lie inside the files, once each?
    fn check(&self) -> Result<()> {
        ensure!(self.complete, "the manifest says that the checkpoint is not complete");
        let mut sizes = HashMap::new();
        for f in &self.files {
            // A name with a path in it could reach outside the folder.
            let plain = !f.name.is_empty() && !f.name.contains(['/', '\\', '\0']) && f.name != "." && f.name != "..";
            ensure!(plain, "the manifest names the file {:?}, which is not a plain file name", f.name);
            ensure!(sizes.insert(f.name.as_str(), f.size).is_none(), "the manifest names the file {} twice", f.name);
        }
        let mut names = HashSet::new();
        let mut spans: Vec<(&str, [u64; 2], &str)> = Vec::new();
        for e in &self.entries {
            ensure!(names.insert(e.name.as_str()), "the manifest names the tensor {} twice", e.name);
            let (rows, row) = rows_of(&e.shape).with_context(|| format!("tensor {} has an impossible shape", e.name))?;
            let mut next = 0;
            for p in &e.parts {
                ensure!(
                    p.rows[0] == next && p.rows[1] >= p.rows[0],
                    "tensor {}: rows {}..{} where {next} is the next",
                    e.name,
                    p.rows[0],
                    p.rows[1]
                );
                next = p.rows[1];
                let size = sizes.get(p.file.as_str()).with_context(|| {
                    format!("tensor {} lies in {}, which is not in the manifest's list of files", e.name, p.file)
                })?;
                let wanted = (p.rows[1] - p.rows[0]).checked_mul(row * e.dtype.bytes());
                ensure!(
                    p.bytes[0] <= p.bytes[1] && p.bytes[1] <= *size && Some(p.bytes[1] - p.bytes[0]) == wanted,
                    "tensor {}: rows {}..{} cannot lie in bytes {}..{} of {} ({size} bytes)",
                    e.name,
                    p.rows[0],
                    p.rows[1],
                    p.bytes[0],
                    p.bytes[1],
                    p.file
                );
                spans.push((&p.file, p.bytes, &e.name));
            }
            ensure!(next == rows && !e.parts.is_empty(), "tensor {} has {rows} rows, but its parts end at {next}", e.name);
        }
        spans.sort_unstable();
        for pair in spans.windows(2) {
            let overlap = pair[0].0 == pair[1].0 && pair[0].1[1] > pair[1].1[0];
            ensure!(!overlap, "tensors {} and {} overlap in {}", pair[0].2, pair[1].2, pair[0].0);
        }
        Ok(())
    }

    /// Bytes of all files.
    pub fn total_bytes(&self) -> u64 {
        self.files.iter().map(|f| f.size).sum()
    }

    /// Row blocks of one file, in byte order, each with its entry and its key in the safetensors header.
    pub(super) fn parts_of(&self, file: &str) -> Vec<(&Entry, &Part, String)> {
        let all = self.entries.iter().flat_map(|e| e.parts.iter().map(move |p| (e, p)));
        let mut out: Vec<_> = all
            .filter(|(_, p)| p.file == file)
            .map(|(e, p)| (e, p, part_key(&e.name, &e.shape, &(p.rows[0]..p.rows[1]))))
            .collect();
        out.sort_by_key(|(_, p, _)| p.bytes);
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::presets;

    fn manifest() -> Manifest {
        let mut meta = Meta { step: 7, recipe: "a = \"b\"\n".into(), ..Meta::new(presets::demo_6m()) };
        meta.set_u64("adam.t", u64::MAX);
        meta.set_f64("loss", 0.1 + 0.2);
        let part = Part { file: "weights-00000.safetensors".into(), rows: [0, 2], bytes: [64, 88], xxh3: "0".into() };
        let entry = Entry { name: "a".into(), dtype: Dtype::F32, shape: vec![2, 3], parts: vec![part] };
        let file = FileEntry { name: "weights-00000.safetensors".into(), size: 88, blake3: "0".into() };
        Manifest::new(&meta, Contents::Training, vec![entry], vec![file]).unwrap()
    }

    #[test]
    fn text_comes_back_as_it_was() {
        let m = manifest();
        let back = Manifest::parse(m.to_text().unwrap().as_bytes()).unwrap();
        assert_eq!(back, m);
        assert_eq!(back.meta.get_u64("adam.t").unwrap(), u64::MAX);
        assert_eq!(back.meta.get_f64("loss").unwrap().to_bits(), (0.1f64 + 0.2).to_bits());
        assert!(back.meta.get_f64("adam.t").is_err());
        // Ordinary JSON for everybody else.
        let value: Value = serde_json::from_str(&m.to_text().unwrap()).unwrap();
        assert_eq!(value["step"], 7);
        assert_eq!(value["complete"], true);
    }

    #[test]
    fn every_single_bit_counts() {
        let text = manifest().to_text().unwrap().into_bytes();
        for at in 0..text.len() {
            for bit in [0, 5] {
                let mut bad = text.clone();
                bad[at] ^= 1 << bit;
                assert!(Manifest::parse(&bad).is_err(), "bit {bit} of byte {at}");
            }
        }
        for cut in [0, 1, text.len() / 2, text.len() - 1] {
            assert!(Manifest::parse(&text[..cut]).is_err());
        }
        assert!(Manifest::parse(&[text.as_slice(), b" "].concat()).is_err());
    }

    #[test]
    fn contradictions_are_refused() {
        type Change = fn(&mut Manifest);
        let changes: [(&str, Change); 10] = [
            ("not complete", |m| m.complete = false),
            ("version 2", |m| m.version = 2),
            ("of format", |m| m.format = "tar".into()),
            ("plain file name", |m| m.files[0].name = "../evil".into()),
            ("not in the manifest's list", |m| m.entries[0].parts[0].file = "other".into()),
            ("parts end at", |m| m.entries[0].shape = vec![3, 3]),
            ("cannot lie in bytes", |m| m.entries[0].parts[0].bytes = [72, 96]),
            ("impossible shape", |m| m.entries[0].shape = vec![usize::MAX, 3]),
            ("twice", |m| m.entries.push(m.entries[0].clone())),
            ("overlap", |m| m.entries.push(Entry { name: "b".into(), ..m.entries[0].clone() })),
        ];
        for (sentence, change) in changes {
            let mut m = manifest();
            change(&mut m);
            let error = Manifest::parse(m.to_text().unwrap().as_bytes()).expect_err(sentence);
            assert!(error.to_string().contains(sentence), "{error:#}");
        }
    }
}
