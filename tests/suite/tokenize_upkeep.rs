//! `zaya tokenize verify|merge|stats|cat`.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use tempfile::TempDir;
use zaya::data::shard::TokenType;
use zaya::data::writer::ShardWriter;
use zaya::text::{Encoder, Eod};

use crate::encoder::tokenizer;
use crate::tokenize::zaya;

/// Three inputs and the shards a, b, c, and ab and abc of several.
fn shards() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    tokenizer(dir.path(), &[]);
    for (name, count) in [("a", 40), ("b", 0), ("c", 300)] {
        let lines: String = (0..count).map(|i| json!({"text": "the cat ".repeat(1 + i * i % 41)}).to_string() + "\n").collect();
        fs::write(dir.path().join(format!("{name}.jsonl")), lines + "not json\n{\"text\":\"caf\\ud800\"}\n").unwrap();
    }
    for (name, inputs) in [("a", &["a"][..]), ("b", &["b"]), ("c", &["c"]), ("abc", &["a", "b", "c"])] {
        let inputs = inputs.iter().map(|i| format!("{i}.jsonl")).collect::<Vec<_>>();
        let args = ["tokenize", "--tokenizer", "tok.json", "--output", name, "--input"];
        good(dir.path(), &[&args[..], &inputs.iter().map(String::as_str).collect::<Vec<_>>()].concat());
    }
    dir
}

fn run(dir: &Path, args: &[&str]) -> (Option<i32>, String, String) {
    let output = zaya(dir, args);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

fn good(dir: &Path, args: &[&str]) -> String {
    let (code, stdout, stderr) = run(dir, args);
    assert_eq!(code, Some(0), "{args:?}: {stderr}");
    stdout
}

#[test]
fn merged_is_tokenized_at_once() {
    let dir = shards();
    good(dir.path(), &["tokenize", "merge", "m", "a", "b.bin", "c.idx"]);
    for suffix in ["bin", "idx", "json"] {
        let [whole, merged] = ["abc", "m"].map(|p| fs::read(dir.path().join(format!("{p}.{suffix}"))).unwrap());
        assert!(whole == merged, ".{suffix}");
    }
    // In two steps, and from sets.
    good(dir.path(), &["tokenize", "merge", "ab", "a", "b"]);
    good(
        dir.path(),
        &["tokenize", "--tokenizer", "tok.json", "--input", "c.jsonl", "--shard-tokens", "500", "--output", "c-set"],
    );
    good(dir.path(), &["tokenize", "merge", "m", "ab", "c-set", "--overwrite"]);
    for suffix in ["bin", "idx", "json"] {
        let [whole, merged] = ["abc", "m"].map(|p| fs::read(dir.path().join(format!("{p}.{suffix}"))).unwrap());
        assert!(whole == merged, ".{suffix} from a set");
    }
}

#[test]
fn what_cannot_be_merged_is_refused() {
    let dir = shards();
    let refused = |args: &[&str]| {
        let (code, _, stderr) = run(dir.path(), &[&["tokenize", "merge"], args].concat());
        assert!(!dir.path().join("m.bin").exists() && !dir.path().join("m.bin.tmp").exists());
        (code.unwrap(), stderr)
    };
    good(dir.path(), &["tokenize", "--tokenizer", "tok.json", "--input", "a.jsonl", "--output", "bare", "--no-eod"]);
    let (code, text) = refused(&["m", "a", "bare"]);
    assert!(code == 2 && text.contains("different ends of documents"), "{text}");
    fs::write(dir.path().join("tok2.json"), fs::read_to_string(dir.path().join("tok.json")).unwrap() + "\n").unwrap();
    good(dir.path(), &["tokenize", "--tokenizer", "tok2.json", "--input", "a.jsonl", "--output", "other"]);
    let (code, text) = refused(&["m", "a", "other"]);
    assert!(code == 2 && text.contains("different tokenizers"), "{text}");
    let (code, text) = refused(&["m", "a", "gone"]);
    assert!(code == 2 && text.contains("no token shard gone.idx"), "{text}");
    let (code, text) = refused(&["a", "b", "c"]);
    assert!(code == 2 && text.contains("a.idx exists"), "{text}");
    let (code, text) = refused(&["a", "b", "a", "--overwrite"]);
    assert!(code == 2 && text.contains("would replace a.bin"), "{text}");
    let mut writer = ShardWriter::create(&dir.path().join("foreign"), TokenType::U16, false).unwrap();
    writer.push(&[1, 2]).unwrap();
    writer.publish(|_| Ok("{}".into())).unwrap();
    let (code, text) = refused(&["m", "a", "foreign"]);
    assert!(code == 2 && text.contains("foreign.bin has no sidecar"), "{text}");
    let mut bytes = fs::read(dir.path().join("c.bin")).unwrap();
    bytes[7] ^= 1;
    fs::write(dir.path().join("c.bin"), bytes).unwrap();
    let (code, text) = refused(&["m", "a", "c"]);
    assert!(code == 1 && text.contains("c.bin is damaged"), "{text}");
}

#[test]
fn damage_of_every_kind_is_found() {
    let dir = shards();
    let out = good(dir.path(), &["tokenize", "verify", "a", "b", "c", "abc"]);
    // "caf?" at the end of each input is a document of its own.
    assert!(out.starts_with("a: good: 1 shard, 41 documents, ") && out.contains("abc: good: 1 shard, 343 documents"), "{out}");
    let bad = |prefix: &str, expected: &str| {
        let (code, stdout, stderr) = run(dir.path(), &["tokenize", "verify", "a", prefix]);
        assert_eq!(code, Some(1), "{stderr}");
        assert!(stdout.contains("a: good") && stdout.contains(&format!("{prefix}: DAMAGED")), "{stdout}");
        assert!(stderr.contains(expected), "{expected}: {stderr}");
    };
    // One bit anywhere.
    for (file, at) in [("abc.bin", 1000), ("abc.idx", 40), ("abc.idx", 3000)] {
        let intact = fs::read(dir.path().join(file)).unwrap();
        let mut bytes = intact.clone();
        bytes[at] ^= 4;
        fs::write(dir.path().join(file), &bytes).unwrap();
        bad("abc", "damaged");
        fs::write(dir.path().join(file), &bytes[..bytes.len() - 2]).unwrap();
        bad("abc", "abc.");
        fs::write(dir.path().join(file), intact).unwrap();
    }
    // A sidecar that fits the files, of which the files are wrong: as another program may have written them.
    let rewrite = |name: &str, documents: &[&[u32]]| {
        let mut sidecar: Value = serde_json::from_slice(&fs::read(dir.path().join("a.json")).unwrap()).unwrap();
        let mut writer = ShardWriter::create(&dir.path().join(name), TokenType::U16, true).unwrap();
        documents.iter().for_each(|d| writer.push(d).unwrap());
        writer
            .publish(|written| {
                sidecar["documents"] = written.documents.into();
                sidecar["tokens"] = written.tokens.into();
                sidecar["bin_bytes"] = written.bin_bytes.into();
                sidecar["bin_xxh3_64"] = written.bin_xxh3_64.clone().into();
                sidecar["idx_bytes"] = written.idx_bytes.into();
                sidecar["idx_xxh3_64"] = written.idx_xxh3_64.clone().into();
                Ok(sidecar.to_string())
            })
            .unwrap();
    };
    rewrite("w", &[&[5, 6, 0], &[7, 0]]);
    good(dir.path(), &["tokenize", "verify", "w"]);
    rewrite("w", &[&[5, 6, 0], &[7]]);
    bad("w", "document 1: it does not end with `<|endoftext|>` (id 0)");
    rewrite("w", &[&[5, 6, 0], &[]]);
    bad("w", "document 1: it does not end with");
    rewrite("w", &[&[5, 0, 6, 0]]);
    bad("w", "document 0: `<|endoftext|>` (id 0) stands within it, at token 1");
    rewrite("w", &[&[5, 0], &[290, 0]]);
    bad("w", "document 1: id 290 is beyond the vocabulary of 290 (token 2)");
    rewrite("w", &[&[1][..]; 20]);
    bad("w", "15 further documents like this");
}

#[test]
fn damaged_sets_are_found() {
    let dir = shards();
    let make = || {
        let options = ["--shard-tokens", "600", "--output", "s", "--sidecars", "ds,olmo", "--overwrite"];
        good(dir.path(), &[&["tokenize", "--tokenizer", "tok.json", "--input", "a.jsonl", "c.jsonl"], &options[..]].concat());
    };
    make();
    let out = good(dir.path(), &["tokenize", "verify", "s.manifest.json"]);
    assert!(out.contains("good: ") && !out.contains("good: 1 shard"), "{out}");
    let bad = |expected: &str| {
        let (code, _, stderr) = run(dir.path(), &["tokenize", "verify", "s"]);
        assert!(code == Some(1) && stderr.contains(expected), "{expected}: {stderr}");
        make();
        good(dir.path(), &["tokenize", "verify", "s"]);
    };
    for name in ["s_00001.idx", "s_00002.bin"] {
        fs::remove_file(dir.path().join(name)).unwrap();
        bad(name);
    }
    fs::copy(dir.path().join("s_00000.ds.index"), dir.path().join("s_00001.ds.index")).unwrap();
    bad("s_00001.ds.index does not say where the documents");
    fs::copy(dir.path().join("s_00000.csv.gz"), dir.path().join("s_00001.csv.gz")).unwrap();
    bad("s_00001.csv.gz does not say where the documents");
    // Two shards that changed places are each whole.
    for suffix in ["bin", "idx", "json", "ds.index", "csv.gz"] {
        let path = |n: &str| dir.path().join(format!("s_0000{n}.{suffix}"));
        fs::rename(path("1"), path("x")).unwrap();
        fs::rename(path("2"), path("1")).unwrap();
        fs::rename(path("x"), path("2")).unwrap();
    }
    bad("the manifest and the sidecar of s_00001 do not say the same");
}

#[test]
fn stats_and_documents_are_shown() {
    let dir = shards();
    let stats: Value = serde_json::from_str(&good(dir.path(), &["tokenize", "stats", "a", "c", "--json"])).unwrap();
    let whole: Value = serde_json::from_str(&good(dir.path(), &["tokenize", "stats", "abc", "--json"])).unwrap();
    assert_eq!((&stats["documents"], &stats["shards"]), (&json!(342), &json!(2)));
    assert_eq!(whole["documents"], 343);
    let of_buckets = |key: &str| stats["histogram"].as_array().unwrap().iter().map(|b| b[key].as_u64().unwrap()).sum::<u64>();
    assert_eq!((of_buckets("documents"), of_buckets("tokens")), (342, stats["tokens"].as_u64().unwrap()));
    let ratio = stats["text_bytes"].as_f64().unwrap() / stats["tokens"].as_f64().unwrap();
    assert_eq!(stats["bytes_per_token"].as_f64().unwrap(), ratio);
    let table = good(dir.path(), &["tokenize", "stats", "a", "c"]);
    assert!(table.contains("documents  342\n") && table.contains(&format!("{ratio:.3} a token")), "{table}");

    let encoder = Encoder::load(&dir.path().join("tok.json"), &Eod::Find).unwrap();
    let texts = |range: &str| -> Vec<Value> {
        let out = good(dir.path(), &["tokenize", "cat", "abc", "--doc", range, "--tokenizer", "tok.json"]);
        out.lines().map(|l| serde_json::from_str(l).unwrap()).collect()
    };
    let text = |i: usize| "the cat ".repeat(1 + i * i % 41) + "<|endoftext|>";
    assert_eq!(
        texts("7"),
        [json!({"document": 7, "tokens": encoder.encode(&"the cat ".repeat(9)).unwrap().len() + 1, "text": text(7)})]
    );
    assert_eq!(
        texts("38..41").iter().map(|d| d["text"].as_str().unwrap().to_string()).collect::<Vec<_>>(),
        [text(38), text(39), "caf\u{fffd}<|endoftext|>".into()]
    );
    assert_eq!((texts("..").len(), texts("340..").len(), texts("..2").len(), texts("3..3").len()), (343, 3, 2, 0));
    let ids: Value = serde_json::from_str(&good(dir.path(), &["tokenize", "cat", "abc", "--doc", "0"])).unwrap();
    assert_eq!(ids["ids"], json!([encoder.encode("the cat ").unwrap(), vec![0]].concat()));
    let (code, _, stderr) = run(dir.path(), &["tokenize", "cat", "abc", "--doc", "340..344"]);
    assert!(code == Some(2) && stderr.contains("343 documents"), "{stderr}");
    // What was possible before still is, and the two do not mix.
    let (code, _, stderr) = run(dir.path(), &["tokenize", "--output", "x", "stats", "a"]);
    assert_eq!(code, Some(2), "{stderr}");
}
