//! Several shards of one run: their sizes, their manifest, and going on after a kill.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde_json::json;
use tempfile::TempDir;
use zaya::data::companions::Companion;
use zaya::data::dataset::Dataset;
use zaya::data::manifest::Manifest;
use zaya::data::sidecar::Sidecar;
use zaya::data::upkeep::verify;

use crate::encoder::tokenizer;
use crate::tokenize::{documents, zaya, zst};

/// A folder with a tokenizer and inputs of several kinds: files that begin and end within shards, bad and empty records, duplicates.
fn corpus() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    tokenizer(dir.path(), &[]);
    let text = |i: usize| format!("the cat {} and the dog ", i % 701).repeat(1 + i * i % 13);
    let line = |i: usize| match i % 97 {
        5 => "not json\n".to_string(),
        6 => "{\"text\":\"\"}\n".into(),
        7 => "\n".into(),
        _ => json!({"text": text(i), "score": i % 10}).to_string() + "\n",
    };
    let lines = |range: std::ops::Range<usize>| range.map(line).collect::<String>();
    fs::create_dir(dir.path().join("in")).unwrap();
    fs::write(dir.path().join("in/0.jsonl"), lines(0..900)).unwrap();
    fs::write(dir.path().join("in/1.jsonl.zst"), zst(lines(900..2000).as_bytes())).unwrap();
    fs::write(dir.path().join("in/2.txt"), "one whole file ".repeat(40)).unwrap();
    fs::write(dir.path().join("in/3.jsonl"), "").unwrap();
    fs::copy(
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/parquet/zstd-v2.parquet"),
        dir.path().join("in/4.parquet"),
    )
    .unwrap();
    fs::write(dir.path().join("in/5.jsonl"), lines(2000..2300)).unwrap();
    dir
}

const SET: [&str; 9] = ["tokenize", "--tokenizer", "tok.json", "--input", "in", "--shard-tokens", "9000", "--output", "set/x"];

fn run(dir: &TempDir, args: &[&str]) -> (Option<i32>, String) {
    let output = zaya(dir.path(), args);
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

fn good(dir: &TempDir, args: &[&str]) {
    let (code, stderr) = run(dir, args);
    assert_eq!(code, Some(0), "{args:?}: {stderr}");
}

/// Every file of a folder.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(folder).unwrap().map(|e| e.unwrap());
    entries.map(|e| (e.file_name().into_string().unwrap(), fs::read(e.path()).unwrap())).collect()
}

/// Inputs may bear the names of a shard's files.
#[test]
fn what_is_read_is_never_replaced() {
    let dir = corpus();
    let text = "{\"text\":\"the cat and the dog\"}\n";
    let write = |name: &str| fs::write(dir.path().join(name), text).unwrap();
    ["web_00001.json", "web_0001.json", "web_00001.jsonl"].into_iter().for_each(write);
    let base = ["tokenize", "--tokenizer", "tok.json", "--shard-tokens", "1000000", "--output", "web"];
    for (input, more) in [("web_00001.json", None), ("web_00000.json", Some("--overwrite")), ("web_00000.json", Some("--resume"))]
    {
        write(input);
        let args: Vec<&str> = base.into_iter().chain(["--input", input]).chain(more).collect();
        let (code, stderr) = run(&dir, &args);
        assert!(code == Some(2) && stderr.contains("would replace") && stderr.contains(input), "{args:?}: {stderr}");
        assert_eq!(fs::read_to_string(dir.path().join(input)).unwrap(), text);
    }
    fs::remove_file(dir.path().join("web_00000.json")).unwrap();
    let other = [&base[..], &["--input", "web_0001.json", "web_00001.jsonl"]].concat();
    good(&dir, &other);
    assert_eq!(fs::read_to_string(dir.path().join("web_00001.jsonl")).unwrap(), text);
    // Nor is what lies beside a single shard, unless that is asked for.
    for name in ["one.csv.gz", "one.ds.index", "one.mask"] {
        fs::write(dir.path().join(name), "mine").unwrap();
        let args = ["tokenize", "--tokenizer", "tok.json", "--input", "web_0001.json", "--output", "one"];
        let (code, stderr) = run(&dir, &args);
        assert!(code == Some(2) && stderr.contains(&format!("{name} exists")), "{name}: {stderr}");
        assert_eq!(fs::read_to_string(dir.path().join(name)).unwrap(), "mine");
        good(&dir, &[&args[..], &["--overwrite"]].concat());
        assert!(!dir.path().join(name).exists());
        ["one.bin", "one.idx", "one.json"].iter().for_each(|name| fs::remove_file(dir.path().join(name)).unwrap());
    }
}

#[test]
fn a_set_is_one_shard_in_pieces() {
    let dir = corpus();
    good(&dir, &SET);
    good(&dir, &["tokenize", "--tokenizer", "tok.json", "--input", "in", "--output", "one"]);
    let prefix = dir.path().join("set/x");
    let manifest = Manifest::read(&prefix).unwrap().unwrap();
    let shards = manifest.shards_at(&prefix);
    assert!(shards.len() > 5, "{}", shards.len());
    let mut all = Vec::new();
    for (i, (shard, entry)) in shards.iter().zip(&manifest.shards).enumerate() {
        assert_eq!(entry.name, format!("x_{i:05}"));
        let here = documents(shard);
        assert!(entry.tokens <= 9000);
        // The next document would not have fitted.
        if let Some(next) = shards.get(i + 1) {
            assert!(entry.tokens + documents(next)[0].len() as u64 > 9000);
        }
        all.extend(here);
    }
    let one = Sidecar::read(&dir.path().join("one.json")).unwrap().unwrap();
    assert_eq!(all, documents(&dir.path().join("one")));
    assert_eq!((manifest.documents, manifest.tokens, manifest.text_bytes), (one.documents, one.tokens, one.text_bytes));
    assert_eq!((manifest.skipped, manifest.replaced, &manifest.sources), (one.skipped, one.replaced, &one.sources));
    assert!(manifest.skipped.bad > 20 && manifest.skipped.empty > 20);
    // Places follow one another, and lead back to the text: of the first input by bytes.
    let input = fs::read_to_string(dir.path().join("in/0.jsonl")).unwrap();
    for pair in manifest.shards.windows(2) {
        assert_eq!(pair[0].to, pair[1].from);
        let from = pair[1].from;
        if from.input == 0 {
            let line = &input[from.byte as usize..].lines().next().unwrap();
            assert_eq!(input.lines().nth(from.line as usize - 1).unwrap(), *line);
            assert!(line.starts_with("{\"text\":\"the cat"), "{line}");
        }
    }
    // The trainer reads it by a pattern, as a recipe spells it out.
    let dataset = Dataset::open(&shards).unwrap();
    assert_eq!((dataset.num_documents(), dataset.text_bytes()), (one.documents, Some(one.text_bytes)));
    assert_eq!(verify(&prefix).unwrap().problems, Vec::<String>::new());
    // The same again, whatever the threads; by bytes instead of tokens (uint16: two each).
    let by_bytes = [&SET[..5], &["--shard-bytes", "18000", "--workers", "5", "--output", "set2/x"]].concat();
    good(&dir, &by_bytes);
    let (a, b) = (files(&dir.path().join("set")), files(&dir.path().join("set2")));
    assert_eq!(a.keys().collect::<Vec<_>>(), b.keys().collect::<Vec<_>>());
    assert!(a.iter().all(|(name, bytes)| name.ends_with(".json") || bytes == &b[name]));
}

#[test]
fn a_killed_run_goes_on_to_the_same_bytes() {
    let dir = corpus();
    let with = |more: &[&'static str], output: &'static str| [&SET[..8], &[output], more].concat();
    let selected = ["--dedup", "--keep", "score>=2", "--sidecars", "ds,olmo", "--on-bad", "skip"];
    for (options, straight, killed) in [(&[][..], "straight0/x", "killed0/x"), (&selected[..], "straight1/x", "killed1/x")] {
        if options.contains(&"--keep") {
            // Plain text has no score, and the table's are below one.
            fs::remove_file(dir.path().join("in/2.txt")).unwrap();
        }
        good(&dir, &with(options, straight));
        let expected = files(dir.path().join(straight).parent().unwrap());
        let folder = dir.path().join(killed).parent().unwrap().to_path_buf();
        let mut kills = 0;
        for (point, hit) in
            [("shard.before_publish", 3), ("shard.before_index", 2), ("shard.before_index", 1), ("shard.before_publish", 2)]
        {
            let args = with(&[options, if kills == 0 { &[] } else { &["--resume"] }].concat(), killed);
            let output = crate::program::zaya()
                .current_dir(dir.path())
                .env("ZAYA_FAIL", format!("{point}:kill@{hit}"))
                .args(&args)
                .output()
                .unwrap();
            if output.status.code().is_some() {
                assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
                break;
            }
            kills += 1;
            assert!(!folder.join("x.manifest.json").exists());
            let error = verify(&dir.path().join(killed)).map(|_| ()).unwrap_err().to_string();
            assert!(error.contains("--resume") || error.contains("there is no token shard"), "{error}");
        }
        assert!(kills >= 2, "the run was killed {kills} times only");
        // Without --resume it is not touched.
        let (code, stderr) = run(&dir, &with(options, killed));
        assert!(code == Some(2) && stderr.contains("--resume"), "{stderr}");
        good(&dir, &with(&[options, &["--resume"]].concat(), killed));
        assert_same(&files(&folder), &expected);
        // Once more: everything is there.
        good(&dir, &with(&[options, &["--resume"]].concat(), killed));
        assert_same(&files(&folder), &expected);
    }
}

fn assert_same(found: &BTreeMap<String, Vec<u8>>, expected: &BTreeMap<String, Vec<u8>>) {
    assert_eq!(found.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
    for (name, bytes) in found {
        assert!(bytes == &expected[name], "{name} differs from the undisturbed run's");
    }
}

#[test]
fn resuming_refuses_another_job_and_repairs_damage() {
    let dir = corpus();
    good(&dir, &SET);
    let folder = dir.path().join("set");
    let expected = files(&folder);
    for other in [&["--field", "id"][..], &["--dedup"], &["--on-bad", "fail"], &["--min-chars", "3"], &["--no-eod"]] {
        let (code, stderr) = run(&dir, &[&SET[..], &["--resume"], other].concat());
        assert!(code == Some(2) && stderr.contains("other options"), "{other:?}: {stderr}");
    }
    let (code, stderr) = run(&dir, &["tokenize", "--tokenizer", "tok.json", "--input", "in", "--output", "set/x", "--resume"]);
    assert!(code == Some(2) && stderr.contains("--shard-tokens"), "{stderr}");
    assert_same(&files(&folder), &expected);
    // A shard that was damaged meanwhile, and one that is gone: written again.
    let mut bytes = expected["x_00002.bin"].clone();
    bytes[100] ^= 1;
    fs::write(folder.join("x_00002.bin"), &bytes).unwrap();
    let (code, stderr) = run(&dir, &[&SET[..], &["--resume"]].concat());
    assert!(code == Some(0) && stderr.contains("x_00002.bin is damaged") && stderr.contains("written again"), "{stderr}");
    assert_same(&files(&folder), &expected);
    fs::remove_file(folder.join("x_00004.idx")).unwrap();
    good(&dir, &[&SET[..], &["--resume"]].concat());
    assert_same(&files(&folder), &expected);
    // A set of fewer shards takes the place of one of more.
    good(
        &dir,
        &[
            "tokenize",
            "--tokenizer",
            "tok.json",
            "--input",
            "in/0.jsonl",
            "--shard-tokens",
            "9000",
            "--output",
            "set/x",
            "--overwrite",
        ],
    );
    let left = files(&folder);
    let shards = Manifest::read(&folder.join("x")).unwrap().unwrap().shards.len();
    assert_eq!(left.len(), 3 * shards + 1, "{:?}", left.keys());
}

#[test]
fn inputs_without_text_make_one_empty_shard() {
    let dir = corpus();
    fs::write(dir.path().join("empty.jsonl"), "{\"text\":\"\"}\n").unwrap();
    good(&dir, &["tokenize", "--tokenizer", "tok.json", "--input", "empty.jsonl", "--shard-tokens", "10", "--output", "e"]);
    let manifest = Manifest::read(&dir.path().join("e")).unwrap().unwrap();
    assert_eq!((manifest.shards.len(), manifest.documents, manifest.skipped.empty), (1, 0, 1));
    assert_eq!(verify(&dir.path().join("e")).unwrap().problems, Vec::<String>::new());
    // A document larger than the bound gets a shard of its own.
    fs::write(dir.path().join("two.jsonl"), "{\"text\":\"a b c d e f g h\"}\n{\"text\":\"x\"}\n").unwrap();
    good(&dir, &["tokenize", "--tokenizer", "tok.json", "--input", "two.jsonl", "--shard-tokens", "3", "--output", "t"]);
    assert_eq!(Manifest::read(&dir.path().join("t")).unwrap().unwrap().shards.len(), 2);
}

#[test]
fn files_for_other_programs_say_what_the_index_says() {
    let dir = corpus();
    good(&dir, &["tokenize", "--tokenizer", "tok.json", "--input", "in", "--output", "c", "--sidecars", "olmo,ds"]);
    let prefix = dir.path().join("c");
    let documents = documents(&prefix);
    let mut end = 0u64;
    let ends: Vec<u64> = documents
        .iter()
        .map(|d| {
            end += d.len() as u64;
            end
        })
        .collect();
    let index: Vec<u8> = ends.iter().flat_map(|e| e.to_le_bytes()).collect();
    assert_eq!(fs::read(dir.path().join("c.ds.index")).unwrap(), index);
    let metadata = fs::read_to_string(dir.path().join("c.ds.metadata")).unwrap();
    assert_eq!(metadata.lines().take(2).collect::<Vec<_>>(), ["tok.json|2".to_string(), end.to_string()]);
    let mut csv = String::new();
    std::io::Read::read_to_string(
        &mut flate2::read::GzDecoder::new(fs::File::open(dir.path().join("c.csv.gz")).unwrap()),
        &mut csv,
    )
    .unwrap();
    let rows: Vec<Vec<&str>> = csv.lines().map(|l| l.split(',').collect()).collect();
    assert_eq!(rows.len(), documents.len());
    for (i, row) in rows.iter().enumerate() {
        let start = if i == 0 { 0 } else { ends[i - 1] };
        assert_eq!(row[..3], [start.to_string(), ends[i].to_string(), i.to_string()]);
    }
    assert_eq!(rows[0][3..], ["in/0.jsonl", "1"]);
    assert_eq!(rows[5][3..], ["in/0.jsonl", "9"], "lines 6 to 8 are bad, empty and blank");
    let whole = rows.iter().find(|r| r[3] == "in/2.txt").unwrap();
    assert_eq!(whole[4], "0");
    // The ids themselves, read as datatrove and OLMo read them: unsigned.
    let bin = fs::read(dir.path().join("c.bin")).unwrap();
    let ids: Vec<u32> = bin.as_chunks::<2>().0.iter().map(|b| u16::from_le_bytes(*b).into()).collect();
    assert_eq!(ids, documents.concat());
    // Merged from pieces: the same files.
    good(&dir, &[&SET[..], &["--sidecars", "ds,olmo"]].concat());
    good(&dir, &["tokenize", "merge", "m", "set/x", "--sidecars", "ds,olmo"]);
    for suffix in ["bin", "idx", "json", "ds.index", "ds.metadata", "csv.gz"] {
        let [a, b] = ["c", "m"].map(|p| fs::read(dir.path().join(format!("{p}.{suffix}"))).unwrap());
        assert!(a == b, ".{suffix} of the merged shard");
    }
    // They do not outlive the shard they belong to.
    good(&dir, &["tokenize", "--tokenizer", "tok.json", "--input", "in/0.jsonl", "--output", "c", "--overwrite"]);
    for companion in [Companion::Ds, Companion::Olmo] {
        for suffix in companion.suffixes() {
            assert!(!dir.path().join(format!("c{suffix}")).exists(), "{suffix}");
        }
    }
}
