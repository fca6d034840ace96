//! Conversations in several shards, merged and verified.

use std::fs;
use std::path::PathBuf;
use std::process::Output;

use serde_json::Value;

use crate::chat::{Lab, TEMPLATE, chat, read};

/// A lab with forty conversations in two files.
fn lab() -> Lab {
    let lab = Lab::new(TEMPLATE);
    for (name, numbers) in [("a.jsonl", 0..15), ("b.jsonl", 15..40)] {
        let talk = |i: usize| chat(&[("user", "the dog"), ("assistant", &"the cat ".repeat(1 + i * i % 11))]);
        fs::write(lab.path(name), numbers.map(|i| talk(i).to_string() + "\n").collect::<String>()).unwrap();
    }
    lab
}

fn run(lab: &Lab, args: &[&str]) -> Output {
    crate::program::zaya().current_dir(lab.dir.path()).arg("tokenize").args(args).output().unwrap()
}

/// `zaya tokenize --chat ...`
fn tokenize(lab: &Lab, inputs: &[&str], output: &str, args: &[&str]) -> Output {
    let tokenizer = lab.tokenizer.to_str().unwrap();
    let fixed = ["--chat", "--eod", "<|endoftext|>", "--tokenizer", tokenizer, "--output", output, "--input"];
    run(lab, &[&fixed[..], inputs, args].concat())
}

fn good(output: Output) {
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
}

fn refused(output: Output, why: &str) {
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(2) && text.contains(why), "{:?}: {text}", output.status.code());
}

/// Prefixes of the shards of the set `set`.
fn shards(lab: &Lab) -> Vec<PathBuf> {
    let manifest: Value = serde_json::from_slice(&fs::read(lab.path("set.manifest.json")).unwrap()).unwrap();
    manifest["shards"].as_array().unwrap().iter().map(|s| lab.path(s["name"].as_str().unwrap())).collect()
}

#[test]
fn a_set_is_the_shard_in_pieces_and_resumes() {
    let lab = lab();
    good(tokenize(&lab, &["a.jsonl", "b.jsonl"], "whole", &[]));
    let set = |more: &[&str]| good(tokenize(&lab, &["a.jsonl", "b.jsonl"], "set", &[&["--shard-tokens", "200"], more].concat()));
    set(&[]);
    let shards = shards(&lab);
    assert!(shards.len() > 2);
    assert_eq!(shards.iter().flat_map(|s| read(s)).collect::<Vec<_>>(), read(&lab.path("whole")));
    // A damaged mask and what follows it are written again.
    let all = || {
        shards.iter().map(|s| ["bin", "idx", "json", "mask"].map(|e| fs::read(s.with_extension(e)).unwrap())).collect::<Vec<_>>()
    };
    let before = all();
    let mask = shards[1].with_extension("mask");
    let mut bytes = fs::read(&mask).unwrap();
    *bytes.last_mut().unwrap() ^= 2;
    fs::write(&mask, bytes).unwrap();
    fs::remove_file(lab.path("set.manifest.json")).unwrap();
    set(&["--resume"]);
    assert!(all() == before);
    let other = tokenize(&lab, &["a.jsonl", "b.jsonl"], "set", &["--shard-tokens", "200", "--resume", "--learn", "last"]);
    refused(other, "--resume");
}

#[test]
fn masks_are_merged_and_verified() {
    let lab = lab();
    good(tokenize(&lab, &["a.jsonl", "b.jsonl"], "whole", &[]));
    good(tokenize(&lab, &["a.jsonl"], "a", &[]));
    good(tokenize(&lab, &["b.jsonl"], "set", &["--shard-tokens", "200"]));
    good(run(&lab, &["merge", "merged", "a", "set"]));
    for suffix in ["bin", "idx", "mask", "json"] {
        let [whole, merged] = ["whole", "merged"].map(|p| fs::read(lab.path(&format!("{p}.{suffix}"))).unwrap());
        assert!(whole == merged, ".{suffix}");
    }
    good(tokenize(&lab, &["a.jsonl"], "last", &["--learn", "last"]));
    refused(run(&lab, &["merge", "bad", "a", "last"]), "kinds of documents");
    fs::write(lab.path("plain.jsonl"), "{\"text\": \"the cat\"}\n").unwrap();
    let tokenizer = lab.tokenizer.to_str().unwrap();
    good(run(&lab, &["--tokenizer", tokenizer, "--eod", "<|endoftext|>", "--input", "plain.jsonl", "--output", "plain"]));
    refused(run(&lab, &["merge", "bad", "a", "plain"]), "kinds of documents");

    good(run(&lab, &["verify", "merged", "set"]));
    let mut mask = fs::read(lab.path("merged.mask")).unwrap();
    mask[20] ^= 1;
    fs::write(lab.path("merged.mask"), mask).unwrap();
    let found = run(&lab, &["verify", "merged"]);
    let text = [found.stdout, found.stderr].map(|t| String::from_utf8_lossy(&t).into_owned()).concat();
    assert!(found.status.code() == Some(1) && text.contains("merged.mask is damaged"), "{text}");
}

/// Conversations are chosen by fields, by length and by being new; what is left is what a file of the chosen ones gives.
#[test]
fn conversations_are_chosen() {
    let lab = lab();
    let scored = |text: &str, score: f64| {
        let mut record = chat(&[("user", "the dog"), ("assistant", text)]);
        record["meta"] = serde_json::json!({"score": score});
        record.to_string() + "\n"
    };
    let (short, long) = ("the cat ", "the cat ".repeat(40));
    let lines = [
        scored(short, 0.9),
        scored("the dog ", 0.9),
        scored(short, 0.2),
        // No conversation, but nobody wants it.
        "{\"meta\":{\"score\":0.1}}\n".into(),
        scored(&long, 0.9),
        // The same once more, with other fields.
        scored(short, 0.8),
        scored("the dog the cat ", 0.7),
    ];
    fs::write(lab.path("all.jsonl"), lines.concat()).unwrap();
    fs::write(lab.path("some.jsonl"), [0, 1, 6].map(|i| lines[i].as_str()).concat()).unwrap();
    let choice = ["--keep", "meta.score>=0.5", "--dedup", "--max-chars", "200", "--on-bad", "fail"];
    good(tokenize(&lab, &["all.jsonl"], "chosen", &choice));
    good(tokenize(&lab, &["some.jsonl"], "plain", &[]));
    for suffix in ["bin", "idx", "mask"] {
        let [chosen, plain] = ["chosen", "plain"].map(|p| fs::read(lab.path(&format!("{p}.{suffix}"))).unwrap());
        assert!(chosen == plain, ".{suffix}");
    }
    let sidecar: Value = serde_json::from_slice(&fs::read(lab.path("chosen.json")).unwrap()).unwrap();
    let skipped = &sidecar["skipped"];
    let counts = ["field", "length", "duplicate", "bad"].map(|why| skipped[why].as_u64().unwrap_or(0));
    assert_eq!(counts, [2, 1, 1, 0], "{skipped}");
    // In a set, what a shard that is kept holds is not taken again.
    let set = |more: &[&str]| {
        good(tokenize(&lab, &["all.jsonl"], "set", &[&choice[..], &["--shard-tokens", "1"], more].concat()));
        shards(&lab)
    };
    let first = set(&[]);
    assert_eq!(first.iter().flat_map(|s| read(s)).collect::<Vec<_>>(), read(&lab.path("plain")));
    fs::remove_file(lab.path("set.manifest.json")).unwrap();
    fs::remove_file(first[2].with_extension("idx")).unwrap();
    assert_eq!(set(&["--resume"]).iter().flat_map(|s| read(s)).collect::<Vec<_>>(), read(&lab.path("plain")));
}

#[test]
fn what_chat_does_not_take_is_refused() {
    let lab = lab();
    for format in ["text", "parquet"] {
        refused(tokenize(&lab, &["a.jsonl"], "out", &["--format", format]), "--chat reads JSON lines");
    }
    fs::write(lab.path("x.parquet"), "PAR1").unwrap();
    refused(tokenize(&lab, &["x.parquet"], "out", &[]), "--chat reads JSON lines");
    assert!(!lab.path("out.bin.tmp").exists() && !lab.path("out.mask.tmp").exists());
}
