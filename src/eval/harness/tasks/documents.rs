//! Documents of a split, read from local files: JSON lines, JSON arrays, CSV, plain or compressed, and Parquet.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::io::{BufRead, Read};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use anyhow::{Context, Result};
use rayon::prelude::*;
use serde_json::{Map, Value, json};

use super::parquet;
use crate::error::bad_input;
use crate::text::corpus::unpacked;

/// Folders of data files, and what was read from them.
#[derive(Debug, Default)]
pub struct Library {
    folders: Vec<PathBuf>,
    read: Mutex<BTreeMap<PathBuf, Arc<Vec<Value>>>>,
    parts: Mutex<HashMap<PartsOf, Arc<Parts>>>,
}

/// A file, and names of fields.
type PartsOf = (PathBuf, Vec<String>);

/// Indices of documents by their values of some fields, as JSON: a file may hold the documents of many tasks.
type Parts = HashMap<String, Vec<usize>>;

/// A task's data is not at hand. Other tasks can go on.
#[derive(Debug)]
pub struct MissingData(pub String);

impl std::fmt::Display for MissingData {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for MissingData {}

const FORMATS: [&str; 5] = ["jsonl", "json", "ndjson", "csv", "parquet"];
/// Some editors put it at a file's start.
const BOM: char = '\u{feff}';
const PACKINGS: [&str; 3] = ["", ".zst", ".gz"];

impl Library {
    /// `folders` are searched in order.
    pub fn new(folders: Vec<PathBuf>) -> Self {
        Self { folders, ..Self::default() }
    }

    /// One file `name` whose documents are known.
    pub fn of(name: PathBuf, documents: Vec<Value>) -> Self {
        Self { read: Mutex::new([(name, Arc::new(documents))].into()), ..Self::default() }
    }

    /// The first file that exists: each of `names` is a path with its extension, or a stem without (`arc_easy_test`, and also
    /// `arc_easy/test`).
    pub fn find(&self, names: &[String]) -> Option<PathBuf> {
        if let Some(known) = names.iter().map(PathBuf::from).find(|name| self.lock().contains_key(name)) {
            return Some(known);
        }
        names.iter().find_map(|name| self.folders.iter().find_map(|folder| find_one(folder, name)))
    }

    /// As `find`; the error says what was looked for.
    pub fn require(&self, task: &str, split: &str, names: &[String]) -> Result<PathBuf> {
        self.find(names).ok_or_else(|| {
            let folders: Vec<_> = self.folders.iter().map(|f| f.display().to_string()).collect();
            MissingData(format!(
                "{task}: no file with its {split} split in {}: looked for {} (.jsonl, .json, .csv or .parquet, plain, .zst or .gz)",
                folders.join(", "),
                names.join(", ")
            ))
            .into()
        })
    }

    /// Reads the files of many tasks ahead of them, each once. What cannot be read is left for whoever asks for it.
    pub fn read_ahead<'a>(&self, names: impl Iterator<Item = &'a [String]>) {
        let paths: BTreeSet<PathBuf> = names.filter_map(|names| self.find(names)).collect();
        paths.into_par_iter().for_each(|path| drop(self.documents(&path)));
    }

    /// The documents of `path`, read once.
    pub fn documents(&self, path: &Path) -> Result<Arc<Vec<Value>>> {
        if let Some(known) = self.lock().get(path) {
            return Ok(known.clone());
        }
        let documents = Arc::new(read(path)?);
        self.lock().insert(path.to_path_buf(), documents.clone());
        Ok(documents)
    }

    /// Indices of the documents of `path` whose fields have the values of `only`.
    pub fn chosen(&self, path: &Path, only: &Map<String, Value>) -> Result<Vec<usize>> {
        let documents = self.documents(path)?;
        if only.is_empty() {
            return Ok((0..documents.len()).collect());
        }
        let key = (path.to_path_buf(), only.keys().cloned().collect::<Vec<_>>());
        let known = self.parts.lock().unwrap_or_else(|e| e.into_inner()).get(&key).cloned();
        let parts = known.unwrap_or_else(|| {
            let mut parts = Parts::new();
            for (i, doc) in documents.iter().enumerate() {
                let values: Option<Vec<&Value>> = key.1.iter().map(|name| doc.get(name)).collect();
                values.into_iter().for_each(|v| parts.entry(json!(v).to_string()).or_default().push(i));
            }
            let parts = Arc::new(parts);
            self.parts.lock().unwrap_or_else(|e| e.into_inner()).insert(key, parts.clone());
            parts
        });
        Ok(parts.get(&json!(only.values().collect::<Vec<_>>()).to_string()).cloned().unwrap_or_default())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<PathBuf, Arc<Vec<Value>>>> {
        self.read.lock().unwrap_or_else(|e| e.into_inner())
    }
}

fn find_one(folder: &Path, name: &str) -> Option<PathBuf> {
    let exact = folder.join(name);
    if format_of(&exact).is_some() {
        // With an extension: that file, or the same one packed.
        return PACKINGS.iter().map(|p| folder.join(format!("{name}{p}"))).find(|p| p.is_file());
    }
    let in_folder = name.rsplit_once('_').map(|(set, split)| format!("{set}/{split}"));
    [Some(name.to_string()), in_folder].into_iter().flatten().find_map(|stem| {
        FORMATS
            .iter()
            .find_map(|format| PACKINGS.iter().map(|p| folder.join(format!("{stem}.{format}{p}"))).find(|p| p.is_file()))
    })
}

/// The format that the name tells, without its packing.
fn format_of(path: &Path) -> Option<&'static str> {
    let name = path.file_name()?.to_str()?;
    let name = name.strip_suffix(".zst").or_else(|| name.strip_suffix(".gz")).unwrap_or(name);
    let extension = name.rsplit_once('.')?.1;
    FORMATS.iter().find(|f| **f == extension).copied()
}

/// All documents of a file. Errors name file and line.
pub fn read(path: &Path) -> Result<Vec<Value>> {
    let format = format_of(path).ok_or_else(|| {
        bad_input(format!("{}: the name does not tell a format: .jsonl, .json, .csv or .parquet is expected", path.display()))
    })?;
    let documents = match format {
        "csv" => csv(path)?,
        "parquet" => parquet::read(path)?,
        "json" => json(path)?,
        _ => json_lines(path, &text(path)?)?,
    };
    if documents.is_empty() {
        return Err(bad_input(format!("{} holds no documents", path.display())));
    }
    Ok(documents)
}

fn open(path: &Path) -> Result<Box<dyn BufRead>> {
    let file = File::open(path).with_context(|| format!("opening {}", path.display()))?;
    unpacked(path, file).with_context(|| format!("reading {}", path.display()))
}

fn text(path: &Path) -> Result<String> {
    let mut bytes = Vec::new();
    open(path)?.read_to_end(&mut bytes).with_context(|| format!("reading {}", path.display()))?;
    let mut text = String::from_utf8(bytes).map_err(|e| {
        let line = e.as_bytes()[..e.utf8_error().valid_up_to()].iter().filter(|b| **b == b'\n').count() + 1;
        bad_input(format!("{}:{line}: this is not UTF-8", path.display()))
    })?;
    if text.starts_with(BOM) {
        text.drain(..BOM.len_utf8());
    }
    Ok(text)
}

fn json_lines(path: &Path, text: &str) -> Result<Vec<Value>> {
    let lines: Vec<_> = text.split('\n').enumerate().filter(|(_, line)| !line.trim().is_empty()).collect();
    lines
        .into_par_iter()
        .map(|(i, line)| {
            let at = || format!("{}:{}", path.display(), i + 1);
            let value: Value = serde_json::from_str(line).map_err(|e| bad_input(format!("{}: not a JSON object: {e}", at())))?;
            object(value, &at)
        })
        .collect::<Vec<_>>()
        .into_iter()
        .collect()
}

fn object(value: Value, at: &dyn Fn() -> String) -> Result<Value> {
    if value.is_object() { Ok(value) } else { Err(bad_input(format!("{}: a document is a JSON object, this is {value}", at()))) }
}

/// `[...]`, `{"examples": [...]}` (or another only list), or JSON lines under the name .json.
fn json(path: &Path) -> Result<Vec<Value>> {
    let text = text(path)?;
    let items = match serde_json::from_str::<Value>(&text) {
        Ok(Value::Array(items)) => items,
        Ok(Value::Object(mut map)) => {
            let lists: Vec<String> = map.iter().filter(|(_, v)| v.is_array()).map(|(k, _)| k.clone()).collect();
            let key = if map.get("examples").is_some_and(Value::is_array) { Some("examples".to_string()) } else { None };
            // A single document with one list of choices has other fields too.
            match key.or_else(|| (lists.len() == 1 && map.len() == 1).then(|| lists[0].clone())).and_then(|key| map.remove(&key))
            {
                Some(Value::Array(items)) => items,
                _ => vec![Value::Object(map)],
            }
        }
        Ok(_) => Vec::new(),
        // Several objects, one a line.
        Err(e) if e.is_syntax() && text.trim_start().starts_with('{') => return json_lines(path, &text),
        Err(e) => return Err(bad_input(format!("{}:{}: not JSON: {e}", path.display(), e.line()))),
    };
    items.into_iter().enumerate().map(|(i, v)| object(v, &|| format!("{}, item {i}", path.display()))).collect()
}

/// Rows of a CSV file. A first row of names gives the fields; rows without names (hendrycks' MMLU: question, A, B, C, D, letter) are
/// given those of MMLU.
fn csv(path: &Path) -> Result<Vec<Value>> {
    let text = text(path)?;
    let mut reader = csv::ReaderBuilder::new().has_headers(false).flexible(true).from_reader(text.as_bytes());
    let mut rows = Vec::new();
    for row in reader.records() {
        let row = row.map_err(|e| {
            let line = e.position().map_or(String::new(), |p| format!(":{}", p.line()));
            bad_input(format!("{}{line}: not CSV: {e}", path.display()))
        })?;
        let line = row.position().map_or(0, |p| p.line());
        rows.push((line, row.iter().map(str::to_string).collect::<Vec<_>>()));
    }
    let letters = |row: &[String]| row.len() == 6 && matches!(row[5].as_str(), "A" | "B" | "C" | "D");
    if rows.first().is_some_and(|(_, row)| letters(row)) {
        return Ok(rows.into_iter().map(|(_, row)| mmlu_row(row)).collect());
    }
    let Some((_, names)) = rows.first().cloned() else { return Ok(Vec::new()) };
    rows.into_iter()
        .skip(1)
        .map(|(line, row)| {
            if row.len() != names.len() {
                return Err(bad_input(format!(
                    "{}:{line}: {} fields, but {} names above",
                    path.display(),
                    row.len(),
                    names.len()
                )));
            }
            Ok(fields(&names, row))
        })
        .collect()
}

fn mmlu_row(row: Vec<String>) -> Value {
    let answer = "ABCD".find(row[5].as_str());
    serde_json::json!({"question": row[0], "choices": row[1..5], "answer": answer})
}

/// A row as an object: `choice0`, `choice1`, ... become the list `choices`, whole numbers under `answer` and `label` numbers.
fn fields(names: &[String], row: Vec<String>) -> Value {
    let mut map = Map::new();
    let mut choices = Vec::new();
    for (name, cell) in names.iter().zip(row) {
        if name.strip_prefix("choice").is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit())) {
            choices.push(Value::String(cell));
        } else if let (true, Ok(n)) = (name == "answer" || name == "label", cell.parse::<i64>()) {
            map.insert(name.clone(), n.into());
        } else {
            map.insert(name.clone(), cell.into());
        }
    }
    if !choices.is_empty() {
        map.insert("choices".into(), choices.into());
    }
    Value::Object(map)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use serde_json::json;

    fn file(folder: &Path, name: &str, bytes: &[u8]) -> PathBuf {
        let path = folder.join(name);
        File::create(&path).unwrap().write_all(bytes).unwrap();
        path
    }

    #[test]
    fn reads_every_format() {
        let dir = tempfile::tempdir().unwrap();
        let d = dir.path();
        let want = vec![json!({"a": "x", "answer": 1}), json!({"a": "y, \"z\"\n", "answer": 0})];
        let lines = "{\"a\": \"x\", \"answer\": 1}\n\n{\"a\": \"y, \\\"z\\\"\\n\", \"answer\": 0}\n";
        assert_eq!(read(&file(d, "a.jsonl", lines.as_bytes())).unwrap(), want);
        assert_eq!(read(&file(d, "lines.json", lines.as_bytes())).unwrap(), want);
        assert_eq!(read(&file(d, "b.jsonl.zst", &zstd::encode_all(lines.as_bytes(), 1).unwrap())).unwrap(), want);
        let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gz.write_all(lines.as_bytes()).unwrap();
        assert_eq!(read(&file(d, "c.jsonl.gz", &gz.finish().unwrap())).unwrap(), want);
        assert_eq!(read(&file(d, "d.json", json!(want).to_string().as_bytes())).unwrap(), want);
        assert_eq!(read(&file(d, "e.json", json!({"canary": "c", "examples": want}).to_string().as_bytes())).unwrap(), want);
        assert_eq!(read(&file(d, "f.csv", b"a,answer\nx,1\n\"y, \"\"z\"\"\n\",0\n")).unwrap(), want);
        let rows = read(&file(d, "g.csv", b"q?,w,x,y,z,C\nr?,1,2,3,4,A\n")).unwrap();
        assert_eq!(rows[0], json!({"question": "q?", "choices": ["w", "x", "y", "z"], "answer": 2}));
        let rows = read(&file(d, "h.csv", b"question,choice0,choice1,answer\nq,a,b,1\n")).unwrap();
        assert_eq!(rows[0], json!({"question": "q", "answer": 1, "choices": ["a", "b"]}));
    }

    #[test]
    fn errors_name_file_and_line() {
        let dir = tempfile::tempdir().unwrap();
        let d = dir.path();
        let says = |name: &str, bytes: &[u8], part: &str| {
            let e = read(&file(d, name, bytes)).unwrap_err().to_string();
            assert!(e.contains(part), "{e}");
        };
        says("a.jsonl", b"{\"a\": 1}\n{\"a\": \n", "a.jsonl:2");
        says("b.jsonl", b"{\"a\": 1}\n[1]\n", "b.jsonl:2");
        says("c.jsonl", b"{\"a\": 1}\n\xff\n", "c.jsonl:2");
        says("d.csv", b"a,b\n1,2\n3\n", "d.csv:3");
        says("e.jsonl", b"\n", "no documents");
        says("f.parquet", b"PAR1", "f.parquet");
    }

    #[test]
    fn finds_packed_files_and_folders() {
        let dir = tempfile::tempdir().unwrap();
        let d = dir.path();
        std::fs::create_dir(d.join("piqa")).unwrap();
        file(d, "piqa/val.csv", b"a\n");
        file(d, "arc_test.jsonl.zst", b"");
        let library = Library::new(vec![d.to_path_buf()]);
        let find = |name: &str| library.find(&[name.to_string()]);
        assert_eq!(find("piqa_val"), Some(d.join("piqa/val.csv")));
        assert_eq!(find("arc_test"), Some(d.join("arc_test.jsonl.zst")));
        assert_eq!(find("arc_test.jsonl"), Some(d.join("arc_test.jsonl.zst")));
        assert_eq!(find("arc_train"), None);
        let e = library.require("arc", "train", &["arc_train".into()]).unwrap_err().to_string();
        assert!(e.contains("arc_train") && e.contains("train split"), "{e}");
    }
}
