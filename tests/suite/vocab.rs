//! `zaya tokenize --train-vocab`.

use std::fs;
use std::path::Path;
use std::process::Output;

use zaya::text::{Encoder, Eod, vocab};

fn corpus() -> Vec<String> {
    let words = ["alpha", "beta", "gamma", "delta", "epsilon", "théta", "漢字", "0123", "don't", "xylophone", "quartz"];
    let word = |i: usize| words[(i * i + i / 7) % words.len()];
    (0..200).map(|d| (0..40).map(|i| word(d * 31 + i)).collect::<Vec<_>>().join(if d % 5 == 0 { "\n" } else { " " })).collect()
}

fn learn(size: usize, documents: &[String]) -> anyhow::Result<String> {
    vocab::train(size, &vocab::special_tokens(&["<pad>".into()]), documents.iter().map(|d| Ok(d.clone())))
}

#[test]
fn it_has_the_size_asked_for_and_gives_text_back() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tokenizer.json");
    for size in [258, 259, 280, 300] {
        fs::write(&path, learn(size, &corpus()).unwrap()).unwrap();
        let encoder = Encoder::load(&path, &Eod::Find).unwrap();
        assert_eq!(encoder.vocab_size(), size);
        assert_eq!((encoder.eod(), encoder.token_to_id("<pad>")), (Some(("<|endoftext|>", 0)), Some(1)));
        let every_byte: String =
            (0..=0x24f_u32).chain([0x4e2d, 0xfeff, 0xfffd, 0x1f600, 0x10ffff]).filter_map(char::from_u32).collect();
        for text in corpus().iter().map(String::as_str).chain(["", " ", "  a  b\t\r\n\n ", "<|endoftext|><pad>", &every_byte]) {
            let ids = encoder.encode(text).unwrap();
            assert_eq!(encoder.decode(&ids, false).unwrap(), text);
            assert!(ids.iter().all(|id| (2..size as u32).contains(id)), "{text:?}: {ids:?}");
        }
    }
    // Merges were learnt: a frequent word is few tokens.
    let encoder = Encoder::load(&path, &Eod::Find).unwrap();
    assert!(encoder.encode(" gamma").unwrap().len() <= 2);
    // Loaded by `tokenizers` itself, special tokens match.
    let plain = tokenizers::Tokenizer::from_file(&path).unwrap();
    assert_eq!(plain.encode("a<|endoftext|>", false).unwrap().get_ids().last(), Some(&0));
}

#[test]
fn the_same_corpus_gives_the_same_file() {
    let once = learn(300, &corpus()).unwrap();
    for _ in 0..3 {
        assert!(learn(300, &corpus()).unwrap() == once);
    }
    let mut reversed = corpus();
    reversed.reverse();
    assert!(learn(300, &reversed).unwrap() == once);
    let single = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    assert!(single.install(|| learn(300, &corpus()).unwrap()) == once);
}

#[test]
fn the_first_merges_are_the_most_frequent_pairs() {
    // "aaab" and "ab": pairs (a,a) 2 and (a,b) 2 in two words; equals go by smaller ids, and a < b.
    let json = vocab::train(259, &vocab::special_tokens(&[]), ["aaab ab"].iter().map(|d| Ok(d.to_string()))).unwrap();
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["model"]["merges"], serde_json::json!([["a", "a"], ["a", "b"]]));
    assert_eq!(json["model"]["vocab"]["aa"], 257);
    assert_eq!(json["model"]["vocab"]["ab"], 258);
}

#[test]
fn what_cannot_be_learnt_is_refused() {
    let text = |e: anyhow::Error| e.to_string();
    let small = text(learn(100_000, &corpus()).unwrap_err());
    assert!(small.contains("too small for a vocabulary of 100000"), "{small}");
    // The number it names works.
    let most: usize = small.split("--train-vocab ").nth(1).unwrap().split(',').next().unwrap().parse().unwrap();
    assert!(learn(most, &corpus()).is_ok());
    assert!(text(learn(257, &corpus()).unwrap_err()).contains("256 bytes and 2 special tokens take 258"));
    let failing = [Ok("a a".to_string()), Err(anyhow::anyhow!("the disk is gone"))];
    assert_eq!(text(vocab::train(257, &vocab::special_tokens(&[]), failing.into_iter()).unwrap_err()), "the disk is gone");
}

fn zaya(dir: &Path, args: &[&str]) -> Output {
    crate::program::zaya().current_dir(dir).args(args).output().unwrap()
}

/// Very long records exist one at a time: the next one is read when the one before is done with.
#[test]
fn very_long_texts_do_not_wait_for_each_other() {
    let dir = tempfile::tempdir().unwrap();
    let text = "the quick brown fox ".repeat((17 << 20) / 20);
    for name in ["a.txt", "b.txt"] {
        fs::write(dir.path().join(name), &text).unwrap();
    }
    let mut learn = crate::program::zaya();
    learn.current_dir(dir.path()).args(["tokenize", "--train-vocab", "262", "--input", "a.txt", "b.txt", "--output", "t.json"]);
    let mut child = learn.spawn().unwrap();
    let begun = std::time::Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if begun.elapsed().as_secs() > 300 {
            child.kill().unwrap();
            panic!("it hangs");
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
    };
    assert!(status.success());
    assert!(dir.path().join("t.json").exists());
}

#[test]
fn the_program_learns_and_then_tokenizes() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("a.txt"), corpus().concat()).unwrap();
    let learn = ["tokenize", "--train-vocab", "300", "--input", "a.txt", "--output", "v/tokenizer.json", "--special", "<pad>"];
    let output = zaya(dir.path(), &learn);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(String::from_utf8_lossy(&output.stdout).starts_with("learned 300 entries from 1 documents"));
    assert_eq!(zaya(dir.path(), &learn).status.code(), Some(2));
    let output = zaya(dir.path(), &["tokenize", "--tokenizer", "v/tokenizer.json", "--input", "a.txt", "--output", "shard"]);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(dir.path().join("shard.idx").exists());

    let refused = |args: &[&str]| {
        let output = zaya(dir.path(), args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let error = refused(&["tokenize", "--train-vocab", "200", "--input", "a.txt", "--output", "x.json"]);
    assert!(error.contains("--train-vocab 200 is too small"), "{error}");
    let error = refused(&["tokenize", "--train-vocab", "300", "--input", "a.txt", "--output", "a.txt", "--overwrite"]);
    assert!(error.contains("would replace a.txt"), "{error}");
    let error =
        refused(&["tokenize", "--train-vocab", "300", "--tokenizer", "v/tokenizer.json", "--input", "a.txt", "--output", "x"]);
    assert!(error.contains("cannot be used with"), "{error}");
    assert!(!dir.path().join("x.json").exists());
}
