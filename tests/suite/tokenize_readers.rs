//! What `zaya tokenize` reads: Parquet, directories, patterns; and which documents it takes.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::json;
use zaya::data::build::{Selection, TokenizeJob, tokenize_selected};
use zaya::data::sidecar::Sidecar;
use zaya::error::{exit_code, exit_code_of};
use zaya::text::{Encoder, Eod};

use crate::encoder::tokenizer;
use crate::tokenize::{Told, documents, gzip, job, zaya, zst};

const TABLES: [&str; 5] = ["none-plain", "snappy-dictionary", "zstd-v2", "gzip-small-pages", "snappy-delta"];

fn table(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/parquet").join(format!("{name}.parquet"))
}

/// The text of row i of the tables, as `make.py` there has it; None for a null.
fn row(i: usize) -> Option<String> {
    match i % 50 {
        13 => None,
        14 => Some(String::new()),
        _ => Some(format!("the cat {i} and the dog\n").repeat(1 + i % 5) + if i.is_multiple_of(7) { "\u{4e2d}" } else { "" }),
    }
}

/// Texts that `inputs` become with `selection`, the sidecar, and what was told.
fn select(
    inputs: &[PathBuf],
    selection: &Selection,
    change: impl Fn(&mut TokenizeJob),
) -> anyhow::Result<(Vec<String>, Sidecar, Vec<String>)> {
    let dir = tempfile::tempdir().unwrap();
    let tok = tokenizer(dir.path(), &[]);
    let prefix = dir.path().join("out");
    let mut job = job(&tok, inputs, &prefix);
    change(&mut job);
    let mut told = Told::default();
    let sidecar = tokenize_selected(&job, selection, &[], &mut told)?;
    let encoder = Encoder::load(&tok, &Eod::Find).unwrap();
    let texts = documents(&prefix).iter().map(|ids| encoder.decode(&ids[..ids.len() - 1], false).unwrap()).collect();
    Ok((texts, sidecar, told.0))
}

fn keep(conditions: &[&str]) -> Selection {
    Selection { keep: conditions.iter().map(|c| c.parse().unwrap()).collect(), ..Selection::default() }
}

#[test]
fn tables_that_arrow_wrote_are_read() {
    let expected: Vec<String> = (0..300).filter_map(row).filter(|t| !t.is_empty()).collect();
    for name in TABLES {
        let (texts, sidecar, told) = select(&[table(name)], &Selection::default(), |_| ()).unwrap();
        assert_eq!(texts, expected, "{name}");
        assert_eq!((sidecar.skipped.empty, sidecar.skipped.bad), (6, 6), "{name}");
        assert!(told[0].contains(&format!("{name}.parquet row 14 has a field `text` that is not text: null")), "{told:?}");
    }
    // Several, one after the other, in the order given.
    let all: Vec<PathBuf> = TABLES.iter().map(|name| table(name)).collect();
    let (texts, ..) = select(&all, &Selection::default(), |job| job.workers = 3).unwrap();
    assert_eq!(texts, vec![expected; 5].concat());
    // Another column.
    let (texts, ..) = select(&[table("zstd-v2")], &Selection::default(), |job| job.corpus.field = "id".into()).unwrap();
    assert_eq!(texts, (0..300).map(|i| format!("doc-{i}")).collect::<Vec<_>>());
}

#[test]
fn conditions_on_columns() {
    let some = |wanted: fn(usize) -> bool| -> Vec<String> {
        (0..300).filter(|i| wanted(*i)).filter_map(row).filter(|t| !t.is_empty()).collect()
    };
    for name in TABLES {
        let texts = |conditions: &[&str]| select(&[table(name)], &keep(conditions), |_| ()).unwrap().0;
        assert_eq!(texts(&["score>=0.5"]), some(|i| i >= 150), "{name}");
        assert_eq!(texts(&["lang==de", "ok=true"]), some(|i| i % 3 == 1 && i % 2 == 0), "{name}");
        assert_eq!(texts(&["lang!=de"]), some(|i| i % 3 == 0), "{name}: a null is not kept");
        assert_eq!(texts(&["meta.n<7"]), some(|i| i < 7), "{name}");
    }
    let (_, sidecar, _) = select(&[table("zstd-v2")], &keep(&["score>=0.5"]), |_| ()).unwrap();
    // Nulls are bad whatever their score; three of six empty ones are not reached.
    assert_eq!((sidecar.skipped.field, sidecar.skipped.bad), (150 - 6, 6));
}

#[test]
fn tables_that_cannot_be_used_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |path: &Path, field: &str, conditions: &[&str]| {
        let error = select(&[path.to_path_buf()], &keep(conditions), |job| job.corpus.field = field.into()).unwrap_err();
        (exit_code_of(&error), format!("{error:#}"))
    };
    let good = table("snappy-dictionary");
    let (code, text) = refused(&good, "txt", &[]);
    assert!(
        code == exit_code::BAD_INPUT && text.contains("no column `txt` (did you mean `text`?)") && text.contains("meta.n"),
        "{text}"
    );
    let (code, text) = refused(&good, "score", &[]);
    assert!(code == exit_code::BAD_INPUT && text.contains("column `score` (--field) is DOUBLE"), "{text}");
    let (code, text) = refused(&good, "text", &["quality>1"]);
    assert!(code == exit_code::BAD_INPUT && text.contains("no column `quality`") && text.contains("--keep"), "{text}");
    let lists: Vec<&str> = vec!["meta.pages.list.element>1"];
    let (code, text) = refused(&good, "text", &lists);
    assert!(code == exit_code::BAD_INPUT && text.contains("is a list of INT32"), "{text}");
    // Cut, damaged, no table at all: never a panic, never a shard.
    let bytes = fs::read(&good).unwrap();
    let path = dir.path().join("x.parquet");
    for cut in [0, 3, 100, bytes.len() / 2, bytes.len() - 1] {
        fs::write(&path, &bytes[..cut]).unwrap();
        let (code, text) = refused(&path, "text", &[]);
        assert!(code == exit_code::FAILURE && text.contains("x.parquet"), "cut at {cut}: {text}");
    }
    fs::write(&path, "no table").unwrap();
    assert!(refused(&path, "text", &[]).1.contains("no Parquet"));
    for at in (8..bytes.len()).step_by(211) {
        let mut damaged = bytes.clone();
        damaged[at] ^= 0xff;
        fs::write(&path, &damaged).unwrap();
        // Some damage cannot be seen, as these files have no checksums; the rest gives a sentence.
        if let Err(error) = select(std::slice::from_ref(&path), &Selection::default(), |_| ()) {
            assert!(format!("{error:#}").contains("x.parquet"), "{error:#}");
        }
    }
    let packed = dir.path().join("x.parquet.gz");
    fs::write(&packed, gzip(&bytes)).unwrap();
    assert!(zaya::text::corpus::Input::find(&packed, None).unwrap_err().to_string().contains("compressed as a whole"));
}

fn lines(texts: &[(&str, f64)]) -> Vec<u8> {
    texts
        .iter()
        .map(|(t, s)| json!({"text": t, "score": s, "meta": {"lang": "en"}}).to_string() + "\n")
        .collect::<String>()
        .into_bytes()
}

#[test]
fn documents_are_chosen_by_length_and_field() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.jsonl");
    fs::write(
        &path,
        lines(&[("abc", 0.1), ("\u{4e2d}\u{6587}\u{4e2d}\u{6587}", 0.9), ("abcdefgh", 0.9), ("", 0.9), ("ab", 0.5)]),
    )
    .unwrap();
    let inputs = [path];
    let of = |selection: Selection| {
        select(&inputs, &selection, |_| ()).map(|(texts, sidecar, _)| (texts, sidecar.skipped, sidecar.selection)).unwrap()
    };
    let (texts, skipped, info) = of(Selection { min_chars: Some(3), max_chars: Some(4), ..Selection::default() });
    // Characters are counted, not bytes.
    assert_eq!(texts, ["abc", "\u{4e2d}\u{6587}\u{4e2d}\u{6587}"]);
    assert_eq!((skipped.length, skipped.empty, skipped.field), (2, 1, 0));
    assert_eq!((info.as_ref().unwrap().min_chars, info.unwrap().max_chars), (Some(3), Some(4)));
    let (texts, skipped, info) = of(keep(&["score>=0.5", "meta.lang==en"]));
    assert_eq!((texts.len(), skipped.field, skipped.empty), (3, 1, 1));
    assert_eq!(info.unwrap().keep, ["score>=0.5", "meta.lang==\"en\""]);
    let (texts, skipped, info) = of(Selection::default());
    assert_eq!((texts.len(), skipped.all(), info), (4, 1, None));
    // Text without fields.
    let plain = dir.path().join("a.txt");
    fs::write(&plain, "x").unwrap();
    let error = select(&[plain], &keep(&["score>1"]), |_| ()).unwrap_err();
    assert!(exit_code_of(&error) == exit_code::BAD_INPUT && error.to_string().contains("plain text and has none"), "{error}");
}

#[test]
fn the_first_of_equal_texts_stays_whatever_the_threads() {
    let dir = tempfile::tempdir().unwrap();
    // 40,000 documents of 7,000 different texts, over three files.
    let text = |i: usize| format!("the cat {} and the dog", i * i * 31 % 7001 * (1 + i % 3));
    let paths: Vec<PathBuf> = (0..3)
        .map(|f| {
            let path = dir.path().join(format!("{f}.jsonl.zst"));
            let all: String = (0..13_000).map(|i| json!({"text": text(f * 13_000 + i)}).to_string() + "\n").collect();
            fs::write(&path, zst(all.as_bytes())).unwrap();
            path
        })
        .collect();
    let mut seen = std::collections::HashSet::new();
    let expected: Vec<String> = (0..39_000).map(text).filter(|t| seen.insert(t.clone())).collect();
    for workers in [1, 4] {
        let selection = Selection { dedup: true, ..Selection::default() };
        let (texts, sidecar, _) = select(&paths, &selection, |job| job.workers = workers).unwrap();
        assert!(texts == expected, "{workers} workers");
        assert_eq!(sidecar.skipped.duplicate, 39_000 - expected.len() as u64);
        assert!(sidecar.selection.unwrap().dedup);
    }
}

#[test]
fn records_have_a_longest_length() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.jsonl");
    fs::write(&path, lines(&[("short", 1.0), (&"x".repeat(5000), 1.0), ("short too", 1.0)])).unwrap();
    let whole = dir.path().join("b.txt");
    fs::write(&whole, "y".repeat(5000)).unwrap();
    let selection = Selection { max_record_bytes: 1000, ..Selection::default() };
    let (texts, sidecar, told) = select(&[path, whole], &selection, |_| ()).unwrap();
    assert_eq!((texts, sidecar.skipped.bad), (vec!["short".to_string(), "short too".into()], 2));
    assert!(
        told[0].contains("a.jsonl line 2 has 5044 bytes, more than a record may have") && told[1].contains("b.txt has 5000"),
        "{told:?}"
    );
}

#[test]
fn the_program_reads_directories_and_patterns() {
    let dir = tempfile::tempdir().unwrap();
    tokenizer(dir.path(), &[]);
    for name in ["in/b/2.jsonl", "in/b/1.jsonl.gz", "in/a.txt", "in/c.parquet", "in/notes.csv", "in/.hidden.jsonl"] {
        let path = dir.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        match name {
            "in/c.parquet" => drop(fs::copy(table("zstd-v2"), &path).unwrap()),
            "in/a.txt" => fs::write(&path, "file a").unwrap(),
            name if name.ends_with(".gz") => fs::write(&path, gzip(b"{\"text\":\"line 1\"}\n")).unwrap(),
            _ => fs::write(&path, "{\"text\":\"line 2\"}\n").unwrap(),
        }
    }
    let run = |name: &str, inputs: &[&str]| {
        let args = [&["tokenize", "--tokenizer", "tok.json", "--output", name, "--input"], inputs].concat();
        let output = zaya(dir.path(), &args);
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(0), "{stderr}");
        let sidecar = Sidecar::read(&dir.path().join(name).with_extension("json")).unwrap().unwrap();
        let sources: Vec<String> = sidecar.sources.iter().map(|s| s.path.clone()).collect();
        (sources, sidecar.documents, stderr)
    };
    let (sources, documents, stderr) = run("folder", &["in"]);
    assert_eq!(sources, ["in/a.txt", "in/b/1.jsonl.gz", "in/b/2.jsonl", "in/c.parquet"]);
    assert_eq!(documents, 3 + 288);
    assert!(stderr.contains("1 file is passed over in directories (1 .csv)"), "{stderr}");
    let (sources, documents, _) = run("pattern", &["in/**/*.jsonl*", "in/a.txt"]);
    assert_eq!(sources, ["in/.hidden.jsonl", "in/b/1.jsonl.gz", "in/b/2.jsonl", "in/a.txt"]);
    assert_eq!(documents, 4);
    let output = zaya(dir.path(), &["tokenize", "--tokenizer", "tok.json", "--output", "x", "--input", "in/*.jsonl.zst"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("fits no file"));
    let output = zaya(dir.path(), &["tokenize", "--tokenizer", "tok.json", "--output", "x", "--input", "in", "--keep", "score"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("has no operator"));
}
