//! `metrics.jsonl`: one JSON object a line, only ever appended to.
//!
//! A line reaches the file in one write, so a killed run leaves at most one torn line, at the end; the next writer begins on a
//! fresh line, and readers pass over what does not parse. After a resume some steps stand twice: the later line holds.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde::Serialize;
use serde_json::{Map, Value};

/// Name of the file in a run directory.
pub const METRICS_FILE: &str = "metrics.jsonl";

/// Appends to a metrics file.
#[derive(Debug)]
pub struct MetricsWriter {
    file: File,
    path: PathBuf,
    /// The last line has no end: it was cut off by a crash or a full disk.
    torn: bool,
}

impl MetricsWriter {
    /// Opens or creates the file; what is there stays.
    ///
    /// # Errors
    /// When the file cannot be opened.
    pub fn append(path: &Path) -> Result<Self> {
        let what = || format!("opening {}", path.display());
        let mut file = File::options().create(true).append(true).read(true).open(path).with_context(what)?;
        let mut last = [b'\n'];
        if file.metadata().with_context(what)?.len() > 0 {
            file.seek(SeekFrom::End(-1)).with_context(what)?;
            file.read_exact(&mut last).with_context(what)?;
        }
        Ok(Self { file, path: path.to_path_buf(), torn: last != [b'\n'] })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Appends one object (a `serde_json::Value`, a map, a struct). Numbers that are not finite become null.
    ///
    /// # Errors
    /// When the line is not an object, or cannot be written; the next one then starts on a fresh line.
    pub fn write(&mut self, line: &impl Serialize) -> Result<()> {
        self.write_text(&serde_json::to_string(line).context("a line of metrics as JSON")?)
    }

    /// Appends one object that is text already.
    ///
    /// # Errors
    /// As [`MetricsWriter::write`].
    pub fn write_text(&mut self, line: &str) -> Result<()> {
        ensure!(line.starts_with('{') && !line.contains('\n'), "a line of metrics must be a JSON object on one line");
        let text = format!("{}{line}\n", if self.torn { "\n" } else { "" }).into_bytes();
        // One write: a reader that follows the file sees whole lines.
        let written = self.file.write(&text).with_context(|| format!("writing {}", self.path.display()))?;
        self.torn = written < text.len();
        if self.torn {
            let rest = self.file.write_all(&text[written..]);
            self.torn = rest.is_err();
            rest.with_context(|| format!("writing {}", self.path.display()))?;
        }
        Ok(())
    }

    /// Waits until everything written is on the disk.
    ///
    /// # Errors
    /// When the disk fails.
    pub fn sync(&self) -> Result<()> {
        self.file.sync_data().with_context(|| format!("syncing {}", self.path.display()))
    }
}

/// A metrics file as it is to be understood.
#[derive(Debug, Default)]
pub struct Metrics {
    /// The line of each step; where a step stands twice, the later one.
    pub steps: BTreeMap<u64, Map<String, Value>>,
    /// Lines without a `step`: events, in the order of the file.
    pub events: Vec<Map<String, Value>>,
    /// Lines that are not JSON objects: torn by a crash.
    pub torn_lines: usize,
}

impl Metrics {
    /// `(step, value)` of one field, in step order, where it is a number.
    pub fn series(&self, field: &str) -> Vec<(u64, f64)> {
        self.steps.iter().filter_map(|(step, line)| Some((*step, line.get(field)?.as_f64()?))).collect()
    }
}

/// Reads a metrics file.
///
/// # Errors
/// When the file cannot be read. Torn lines are counted, not an error.
pub fn read_metrics(path: &Path) -> Result<Metrics> {
    let file = File::open(path).with_context(|| format!("opening {}", path.display()))?;
    let mut out = Metrics::default();
    for line in BufReader::new(file).split(b'\n') {
        let line = line.with_context(|| format!("reading {}", path.display()))?;
        if line.is_empty() {
            continue;
        }
        match serde_json::from_slice::<Map<String, Value>>(&line) {
            Ok(object) => match object.get("step").and_then(Value::as_u64) {
                Some(step) => {
                    out.steps.insert(step, object);
                }
                None => out.events.push(object),
            },
            Err(_) => out.torn_lines += 1,
        }
    }
    Ok(out)
}

/// The line of the last step in a metrics file, as [`last_line`] finds it.
///
/// # Errors
/// When the file cannot be read.
pub fn last_step(path: &Path) -> Result<Option<(String, Map<String, Value>)>> {
    last_line(path, |line| line.get("step").is_some_and(Value::is_u64))
}

/// The last line of a metrics file that is `wanted`, as text and as an object, looked for from the file's end without reading the rest;
/// None where there is none.
///
/// # Errors
/// When the file cannot be read.
pub fn last_line(path: &Path, wanted: impl Fn(&Map<String, Value>) -> bool) -> Result<Option<(String, Map<String, Value>)>> {
    /// Longer than any line and the events behind it.
    const TAIL_BYTES: u64 = 8 << 20;
    let what = || format!("reading {}", path.display());
    let mut file = File::open(path).with_context(what)?;
    let end = file.seek(SeekFrom::End(0)).with_context(what)?;
    file.seek(SeekFrom::Start(end.saturating_sub(TAIL_BYTES))).with_context(what)?;
    let mut tail = Vec::new();
    file.take(TAIL_BYTES).read_to_end(&mut tail).with_context(what)?;
    Ok(tail.rsplit(|byte| *byte == b'\n').find_map(|line| {
        let object: Map<String, Value> = serde_json::from_slice(line).ok()?;
        let text = String::from_utf8(line.to_vec()).ok()?;
        wanted(&object).then_some((text, object))
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn later_lines_hold_and_torn_lines_hurt_nobody() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(METRICS_FILE);
        let mut w = MetricsWriter::append(&path).unwrap();
        for step in 1..=3 {
            w.write(&json!({"step": step, "loss": 10 - step})).unwrap();
        }
        w.write(&json!({"event": "checkpoint_failed", "at_step": 3})).unwrap();
        drop(w);
        // The run is killed in the middle of a line.
        let mut text = std::fs::read(&path).unwrap();
        text.extend(b"{\"step\":4,\"lo");
        std::fs::write(&path, &text).unwrap();
        assert_eq!(read_metrics(&path).unwrap().torn_lines, 1);

        let mut w = MetricsWriter::append(&path).unwrap();
        w.write(&json!({"step": 3, "loss": 0.5})).unwrap();
        w.write(&json!({"step": 4, "loss": f64::NAN, "grad_norm": f32::INFINITY})).unwrap();
        w.sync().unwrap();
        // Reopened after a clean end: no empty line.
        MetricsWriter::append(&path).unwrap().write(&json!({"step": 5, "text": "two\nlines"})).unwrap();

        let m = read_metrics(&path).unwrap();
        assert_eq!(m.steps.keys().copied().collect::<Vec<_>>(), [1, 2, 3, 4, 5]);
        assert_eq!(m.series("loss"), [(1, 9.0), (2, 8.0), (3, 0.5)]);
        assert_eq!(m.steps[&4]["loss"], Value::Null);
        assert_eq!(m.steps[&4]["grad_norm"], Value::Null);
        assert_eq!((m.events.len(), m.torn_lines), (1, 1));
        assert_eq!(last_step(&path).unwrap().unwrap().1["step"], 5);
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.lines().all(|l| !l.is_empty()) && text.ends_with('\n'));
    }

    #[test]
    fn structs_and_maps_are_lines_other_things_are_not() {
        #[derive(Serialize)]
        struct Line {
            step: u64,
            loss: f32,
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.jsonl");
        let mut w = MetricsWriter::append(&path).unwrap();
        w.write(&Line { step: 1, loss: f32::NAN }).unwrap();
        assert!(w.write(&7).is_err());
        assert!(w.write(&[1, 2]).is_err());
        w.write(&Line { step: 2, loss: 0.1 }).unwrap();
        let m = read_metrics(&path).unwrap();
        assert_eq!((m.steps.len(), m.torn_lines), (2, 0));
        assert_eq!(m.steps[&1]["loss"], Value::Null);
        assert!(read_metrics(&dir.path().join("absent")).is_err());
        // Events and torn lines behind the last step are passed over.
        w.write(&json!({"event": "x", "at_step": 2})).unwrap();
        drop(w);
        std::fs::write(&path, [std::fs::read(&path).unwrap(), b"{\"step\":3,".to_vec()].concat()).unwrap();
        assert_eq!(last_step(&path).unwrap().unwrap().1["step"], 2);
        std::fs::write(&path, "").unwrap();
        assert_eq!(last_step(&path).unwrap(), None);
    }
}
