//! The engine against `tokenizers`, on vocabularies learned here.

pub mod fuzz;

use std::sync::Arc;

use serde_json::{Value, json};
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{DecoderWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper, Tokenizer, TokenizerImpl};

use super::simd::Level;
use super::split::{CL100K_PATTERN, DEEPSEEK_PATTERNS, GPT2_PATTERN, O200K_PATTERN, QWEN_PATTERN};
use super::{Cache, Engine, Worker};
use fuzz::{Random, document};

type Trained = TokenizerImpl<BPE, NormalizerWrapper, PreTokenizerWrapper, PostProcessorWrapper, DecoderWrapper>;

const CACHE_BYTES: usize = 1 << 20;

/// Text to learn from: this module's own sources, and fuzz.
fn training_text() -> Vec<String> {
    let sources =
        [include_str!("../load.rs"), include_str!("../worker.rs"), include_str!("fuzz.rs"), include_str!("../sentence.rs")];
    let mut random = Random(1);
    let fuzz = (0..400).map(|_| document(&mut random, &[]));
    sources.iter().map(|s| s.to_string()).chain(fuzz).collect()
}

/// A vocabulary of `size` entries, learned with `pre_tokenizer`; its model as JSON.
fn learn(pre_tokenizer: &Value, byte_level: bool, size: usize, text: Vec<String>) -> Value {
    let mut trainer = BpeTrainer::builder().vocab_size(size).show_progress(false);
    if byte_level {
        trainer = trainer.initial_alphabet(ByteLevel::alphabet().into_iter().collect());
    }
    let mut tokenizer = Trained::new(BPE::default());
    let pre_tokenizer: PreTokenizerWrapper = serde_json::from_value(pre_tokenizer.clone()).unwrap();
    tokenizer.with_pre_tokenizer(Some(pre_tokenizer));
    tokenizer.train(&mut trainer.build(), text.into_iter()).unwrap();
    serde_json::from_str::<Value>(&tokenizer.to_string(false).unwrap()).unwrap()["model"].take()
}

fn split(pattern: &str) -> Value {
    json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false})
}

fn byte_level(use_regex: bool) -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex})
}

fn added(content: &str, id: usize, special: bool, normalized: bool) -> Value {
    json!({"id": id, "content": content, "special": special, "normalized": normalized,
        "single_word": false, "lstrip": false, "rstrip": false})
}

/// A `tokenizer.json` of one family, with added tokens of all kinds the engine takes.
fn byte_level_file(patterns: &[&str], normalizer: Value, ignore_merges: bool) -> Value {
    const SIZE: usize = 1500;
    let mut steps: Vec<Value> = patterns.iter().map(|p| split(p)).collect();
    steps.push(byte_level(patterns.is_empty()));
    let pre_tokenizer = json!({"type": "Sequence", "pretokenizers": steps});
    let mut model = learn(&pre_tokenizer, true, SIZE, training_text());
    model["ignore_merges"] = ignore_merges.into();
    if ignore_merges {
        // An entry that no merge leads to is found as a whole piece only.
        model["vocab"]["Ġxyzzy"] = SIZE.into();
    }
    let first = model["vocab"].as_object().unwrap().len();
    let tokens = [
        ("<|endoftext|>", true, false),
        ("<think>", false, false),
        ("é<", false, true),
        ("</p>", false, true),
        ("<|im_start|>", true, true),
    ];
    let tokens = tokens.iter().enumerate().map(|(i, (text, special, normalized))| added(text, first + i, *special, *normalized));
    json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": tokens.collect::<Vec<_>>(),
        "normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "post_processor": null, "decoder": null, "model": model})
}

/// As Gemma's: no pre-tokenizer to speak of, spaces marked, bytes to fall back on, newlines and markup as added tokens.
fn sentence_file() -> Value {
    let words = json!({"type": "Split", "pattern": {"String": "▁"}, "behavior": "MergedWithNext", "invert": false});
    let marked = training_text().into_iter().map(|text| text.replace(' ', "▁").replace(['\n', '\t'], "▁")).collect();
    let mut model = learn(&words, false, 3000, marked);
    let learned = std::mem::take(model["vocab"].as_object_mut().unwrap());
    let mut texts = vec!["<unk>".to_string(), "<bos>".into()];
    texts.extend((0..256).map(|byte| format!("<0x{byte:02X}>")));
    // A character that is not in the vocabulary falls back on its bytes: drop some that merges do not need.
    texts.extend(
        learned.iter().map(|(text, _)| text.clone()).filter(|text| !["中", "é", "م", "x\u{301}"].contains(&text.as_str())),
    );
    let merges = model["merges"].as_array_mut().unwrap();
    let known: std::collections::HashSet<String> = texts.iter().cloned().collect();
    merges.retain(|merge| {
        let side = |i: usize| merge[i].as_str().unwrap();
        [side(0).to_string(), side(1).to_string(), format!("{}{}", side(0), side(1))].iter().all(|text| known.contains(text))
    });
    // One token with a space inside, as Gemma has.
    for (left, right) in [(">", "▁"), (">▁", "<"), (">▁<", "/")] {
        assert!(known.contains(left) || left.len() > 1);
        merges.push(json!([left, right]));
        texts.push(format!("{left}{right}"));
    }
    let vocabulary: serde_json::Map<String, Value> =
        texts.iter().enumerate().map(|(id, text)| (text.clone(), id.into())).collect();
    model["vocab"] = vocabulary.into();
    model["byte_fallback"] = true.into();
    model["fuse_unk"] = true.into();
    model["unk_token"] = "<unk>".into();
    let mut contents: Vec<String> = (1..32).map(|n| "\n".repeat(n)).collect();
    contents.extend((2..9).map(|n| "▁".repeat(n)));
    contents.extend((1..9).map(|n| "\t".repeat(n)));
    contents.extend(["<div>", "</p>", "[multimodal]", "<unused7>"].map(String::from));
    let mut tokens = vec![added("<bos>", 1, true, false)];
    let mut next = texts.len();
    for content in &contents {
        let id = texts.iter().position(|text| text == content).unwrap_or_else(|| {
            next += 1;
            next - 1
        });
        tokens.push(added(content, id, false, false));
    }
    json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": tokens,
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": false},
        "post_processor": null, "decoder": null, "model": model})
}

fn reference(file: &Value) -> Tokenizer {
    let mut reference: Tokenizer = serde_json::from_value(file.clone()).unwrap();
    reference.set_encode_special_tokens(true);
    reference
}

fn engine(file: &Value, reference: &Tokenizer, level: Level) -> Engine {
    Engine::at_level(file, |token| reference.token_to_id(token), level).unwrap()
}

/// All documents twice, the second time out of the cache, at every level of vectors this machine has.
fn check(file: &Value) {
    let reference = reference(file);
    let tokens = file["added_tokens"].as_array().unwrap().iter();
    let added: Vec<String> = tokens.map(|t| t["content"].as_str().unwrap().to_string()).collect();
    let mut random = Random(7);
    let documents: Vec<String> = (0..3000).map(|_| document(&mut random, &added)).chain(training_text()).collect();
    let expected: Vec<Vec<u32>> =
        documents.iter().map(|text| reference.encode_fast(text.as_str(), false).unwrap().get_ids().to_vec()).collect();
    for level in Level::usable() {
        let engine = engine(file, &reference, level);
        let mut worker = Worker::new(Arc::new(Cache::new(CACHE_BYTES)));
        for _ in 0..2 {
            for (text, expected) in documents.iter().zip(&expected) {
                let mut ids = vec![42];
                assert!(worker.encode(&engine, text, &mut ids));
                assert_eq!(ids[1..], expected[..], "{level:?}, {text:?}");
            }
        }
    }
    check_parts(&engine(file, &reference, Level::detect()), &documents, &expected);
}

/// Cut wherever that may be, documents have the same ids.
fn check_parts(engine: &Engine, documents: &[String], expected: &[Vec<u32>]) {
    let mut worker = Worker::new(Arc::new(Cache::new(CACHE_BYTES)));
    let mut cuts = 0;
    for (text, expected) in documents.iter().zip(expected) {
        let spaces: Vec<usize> = text.match_indices(' ').map(|(at, _)| at).collect();
        let (mut ids, mut from) = (Vec::new(), 0);
        for at in spaces {
            if text[..at].chars().next_back().is_some_and(|left| engine.parts_before_space(left)) {
                assert!(worker.encode(engine, &text[from..at], &mut ids));
                (from, cuts) = (at, cuts + 1);
            }
        }
        assert!(worker.encode(engine, &text[from..], &mut ids));
        assert_eq!(ids, *expected, "{text:?}");
    }
    assert!(cuts > documents.len() / 2, "{cuts} cuts");
}

#[test]
fn gpt2_is_as_tokenizers_says() {
    check(&byte_level_file(&[], Value::Null, false));
    check(&byte_level_file(&[GPT2_PATTERN], Value::Null, false));
}

#[test]
fn cl100k_is_as_tokenizers_says() {
    check(&byte_level_file(&[CL100K_PATTERN], Value::Null, false));
}

#[test]
fn llama3_is_as_tokenizers_says() {
    check(&byte_level_file(&[CL100K_PATTERN], Value::Null, true));
}

#[test]
fn qwen_is_as_tokenizers_says() {
    check(&byte_level_file(&[QWEN_PATTERN], json!({"type": "NFC"}), false));
}

#[test]
fn o200k_is_as_tokenizers_says() {
    check(&byte_level_file(&[O200K_PATTERN], Value::Null, false));
}

#[test]
fn deepseek_is_as_tokenizers_says() {
    check(&byte_level_file(&DEEPSEEK_PATTERNS, json!({"type": "Sequence", "normalizers": []}), false));
}

#[test]
fn gemma_is_as_tokenizers_says() {
    check(&sentence_file());
}

/// Newlines and tabs that are not all runs: a token holds one among others, a length is missing, one stays text.
#[test]
fn added_tokens_that_are_no_runs_are_as_tokenizers_says() {
    let whole = sentence_file();
    for change in 0..3 {
        let mut file = whole.clone();
        let tokens = file["added_tokens"].as_array_mut().unwrap();
        match change {
            0 => tokens.push(added("<br>\n", 100_000, false, false)),
            1 => tokens.retain(|t| t["content"] != "\n\n" && t["content"] != "\t"),
            _ => tokens.iter_mut().filter(|t| t["content"] == "\t\t").for_each(|t| t["special"] = true.into()),
        }
        check(&file);
    }
}

/// Gemma's way of writing, and a pre-tokenizer whose cuts no merge goes across.
#[test]
fn pre_tokenizers_that_change_nothing_are_known() {
    let mut file = sentence_file();
    let split =
        |pattern: Value, behavior: &str| json!({"type": "Split", "pattern": pattern, "behavior": behavior, "invert": false});
    let steps = [
        split(json!({"Regex": "\\n"}), "Isolated"),
        split(json!({"String": "▁"}), "MergedWithNext"),
        json!({"type": "Digits", "individual_digits": true}),
    ];
    file["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": steps});
    let refusal = |file: &Value| Engine::from_json(file, |_| Some(1)).map(|_| ()).unwrap_err();
    // Tokens with a space inside, and numbers.
    let merges = |file: &mut Value, keeps: &dyn Fn(&str) -> bool| {
        let merges = file["model"]["merges"].as_array_mut().unwrap();
        merges.retain(|m| keeps(&format!("{}{}", m[0].as_str().unwrap(), m[1].as_str().unwrap())));
    };
    assert!(refusal(&file).contains("which its pre-tokenizer cuts"));
    merges(&mut file, &|token| !token.chars().skip(1).any(|c| c == '▁') && !token.contains(char::is_numeric));
    // What is made of merges that are gone goes too.
    let mut known: std::collections::HashSet<String> = Default::default();
    for merge in file["model"]["merges"].as_array_mut().unwrap().iter_mut() {
        let side = |i: usize| merge[i].as_str().unwrap().to_string();
        let is_made = |text: &String| text.chars().count() == 1 || known.contains(text);
        if is_made(&side(0)) && is_made(&side(1)) {
            known.insert(side(0) + &side(1));
        } else {
            *merge = Value::Null;
        }
    }
    file["model"]["merges"].as_array_mut().unwrap().retain(|m| !m.is_null());
    check(&file);
    let mut numbers = file.clone();
    numbers["model"]["merges"].as_array_mut().unwrap().push(json!(["1", "2"]));
    let id = numbers["model"]["vocab"].as_object().unwrap().len() + 1000;
    numbers["model"]["vocab"]["12"] = id.into();
    assert!(refusal(&numbers).contains("its merges make `12`, which its pre-tokenizer cuts"));
    file["pre_tokenizer"]["pretokenizers"][0]["behavior"] = "Removed".into();
    assert!(refusal(&file).contains("pre-tokenizer"));
}

#[test]
fn what_is_not_known_is_refused_with_the_reason() {
    let file = byte_level_file(&[CL100K_PATTERN], Value::Null, false);
    let refusal = |change: &dyn Fn(&mut Value)| {
        let mut changed = file.clone();
        change(&mut changed);
        Engine::from_json(&changed, |_| Some(1)).map(|_| ()).unwrap_err()
    };
    assert!(refusal(&|f| f["model"]["type"] = "WordPiece".into()).contains("WordPiece"));
    assert!(refusal(&|f| f["model"]["dropout"] = 0.1.into()).contains("dropout"));
    assert!(refusal(&|f| f["model"]["end_of_word_suffix"] = "</w>".into()).contains("end_of_word_suffix"));
    assert!(refusal(&|f| f["normalizer"] = json!({"type": "Lowercase"})).contains("Lowercase"));
    assert!(
        refusal(&|f| f["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\w+".into()).contains("regular expression")
    );
    assert!(refusal(&|f| f["pre_tokenizer"]["pretokenizers"][1]["add_prefix_space"] = true.into()).contains("prefixed space"));
    assert!(refusal(&|f| f["added_tokens"][1]["lstrip"] = true.into()).contains("<think>"));
    assert!(
        refusal(&|f| f["model"]["vocab"].as_object_mut().unwrap().remove("Ġ").map_or((), |_| ()))
            .contains("not in the vocabulary")
    );
}

/// CPU time of this thread.
fn cpu_seconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is valid for writing.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) }, 0);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// Row 7 of the list of public bugs: long runs. The reference is asked about shorter ones, as it takes its time.
#[test]
fn long_runs_take_no_more_than_their_share() {
    for file in [
        byte_level_file(&[CL100K_PATTERN], Value::Null, true),
        byte_level_file(&[O200K_PATTERN], Value::Null, false),
        sentence_file(),
    ] {
        let reference = reference(&file);
        let engine = engine(&file, &reference, Level::detect());
        let mut worker = Worker::new(Arc::new(Cache::new(CACHE_BYTES)));
        for part in ["a", "A", "^", "-", " ", "\n", "中", "é", "0", "\u{301}", "a中", "> ", "中A", "QUJD/x+9"] {
            let short = part.repeat(3000);
            let mut ids = Vec::new();
            worker.encode(&engine, &short, &mut ids);
            assert_eq!(ids, reference.encode_fast(short.as_str(), false).unwrap().get_ids(), "{part:?}");
            let long = part.repeat(1_000_000 / part.chars().count());
            let start = cpu_seconds();
            ids.clear();
            worker.encode(&engine, &long, &mut ids);
            let seconds = cpu_seconds() - start;
            // 1 MB/s is asked for, and a quadratic way takes hours; half of that leaves room for a machine busy with other work.
            assert!(seconds < long.len() as f64 / 0.5e6, "{part:?}: {seconds} s for {} bytes", long.len());
            assert!(!ids.is_empty());
        }
    }
}
