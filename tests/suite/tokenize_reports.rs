//! Public reports of faults in other tokenizing tools and loaders, each as a test.
//!
//! | # | what went wrong | tests |
//! |---|---|---|
//! | 1 | an empty document first | `tokenize::odd_json_lines` |
//! | 2 | end of document not counted, places shifted | `tokenize::the_files_are_megatrons_byte_for_byte` |
//! | 3 | places beyond 32 bits | `data::places_beyond_four_gigabytes`; impossible lengths: `data::damaged_shards_are_named` |
//! | 4 | ids cut to 16 bits | `tokenize::the_type_of_ids_follows_the_vocabulary`; the type is read from the file: `data::damaged_shards_are_named` |
//! | 5 | an end of document that the tokenizer lacks | `tokenize::a_missing_end_of_document_is_refused_before_any_output`, recorded: `tokenize::the_files_are_megatrons_byte_for_byte` |
//! | 6 | text that spells special tokens | `encoder::text_that_spells_a_special_token_stays_text`, in files: `row_6_special_tokens_in_documents` |
//! | 7 | runs that take quadratic time, or panic | `row_7_long_runs` |
//! | 8 | lone surrogates | `row_8_surrogates`, and the unit tests of `text::record` |
//! | 9 | bytes that are not UTF-8 | `row_9_places_of_bad_bytes`, `tokenize::bad_records_by_policy`, and the unit tests of `text::record` |
//! | 10 | a byte order mark | `row_10_byte_order_marks`, `tokenize::odd_text_files` |
//! | 11 | U+2028, U+0085, CR as line ends | `tokenize::odd_json_lines`, `tokenize::odd_text_files` |
//! | 12 | truncated archives | `tokenize::truncated_archives_publish_nothing`, several members: `tokenize::compressed_inputs_equal_plain_ones` |
//! | 13 | lines longer than a block | `row_13_a_line_of_64_megabytes`, `tokenize::long_lines_and_line_ends_at_buffer_edges` |
//! | 14 | empty inputs and shards, short shards | `row_14_an_empty_input_among_good_ones`, `data::shards_without_documents_may_stand_among_others`, `data::damaged_shards_are_named` |
//! | 15 | memory that grows with the corpus | `row_15_memory_stays` |
//! | 16 | NUL bytes | `row_16_nul_bytes`, `tokenize::odd_text_files` |
//! | 17 | a shuffle that does nothing; wrong borders after a merge | `row_17_a_shuffle_keeps_the_samples`, `tokenize_upkeep::merged_is_tokenized_at_once` |
//! | 18 | resuming twice, another number of ranks | `data::stopping_anywhere_changes_nothing`, `row_18_ranks_of_uneven_shares` |
//! | 19 | a mixture that asks for more than there is | `data::mixtures_have_exact_counts`, `row_19_sources_run_in_epochs` |
//! | 20 | versions of Unicode | `row_20_new_scripts` |

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};
use tokenizers::Tokenizer;
use zaya::data::loader::{Loader, LoaderConfig, SourceSpec};
use zaya::data::shard::TokenType;
use zaya::data::sidecar::Sidecar;
use zaya::data::writer::ShardWriter;
use zaya::recipe::Packing;
use zaya::text::{Encoder, Eod};

use crate::encoder::tokenizer;
use crate::tokenize::{Told, documents, gzip, job, run, zst};

/// `tokenizers` itself, told to leave special tokens in text alone.
fn reference(path: &Path) -> Tokenizer {
    let mut tokenizer = Tokenizer::from_file(path).unwrap();
    tokenizer.set_encode_special_tokens(true);
    tokenizer
}

fn ids(reference: &Tokenizer, text: &str) -> Vec<u32> {
    reference.encode_fast(text, false).unwrap().get_ids().to_vec()
}

/// The vocabulary of `tokenizer` under the splitters of several families.
fn families(dir: &Path) -> Vec<(&'static str, PathBuf)> {
    let cl100k =
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    let qwen = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    let o200k = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    let gpt2 = tokenizer(dir, &[]);
    let mut all = vec![("gpt2", gpt2.clone())];
    for (name, pattern, nfc) in [("cl100k", cl100k, false), ("qwen", qwen, true), ("o200k", o200k, false)] {
        let mut json: Value = serde_json::from_slice(&fs::read(&gpt2).unwrap()).unwrap();
        let split = json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
        let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
        json["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [split, bytes]});
        if nfc {
            json["normalizer"] = json!({"type": "NFC"});
        }
        let path = dir.join(format!("{name}.json"));
        fs::write(&path, json.to_string()).unwrap();
        all.push((name, path));
    }
    all
}

#[test]
fn row_6_special_tokens_in_documents() {
    let lines: String = ["a<|endoftext|>b", "<bos>", "<start_of_turn>user\n", "<|endoftext|>"]
        .map(|t| json!({"text": t}).to_string() + "\n")
        .concat();
    // `run` checks that the end of document stands at each end and nowhere else, and decodes.
    assert_eq!(run("a.jsonl", lines.as_bytes()).0, ["a<|endoftext|>b", "<bos>", "<start_of_turn>user\n", "<|endoftext|>"]);
}

#[test]
fn row_7_long_runs() {
    let dir = tempfile::tempdir().unwrap();
    let mut state = 7u64;
    let mut base64 = String::new();
    while base64.len() < 1_000_000 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        base64.push(char::from(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"[(state >> 58) as usize]));
    }
    for (name, path) in families(dir.path()) {
        let encoder = Encoder::load(&path, &Eod::Find).unwrap();
        assert_eq!(encoder.slow_because(), None, "{name}");
        let reference = reference(&path);
        for run in ["a", "^", "-", " ", "\n", "1", "\u{4e2d}", "\u{301}", "the"] {
            let text = run.repeat(1_000_000 / run.len());
            let got = encoder.encode(&text).unwrap();
            // The reference takes long for a million; both have seen the same pieces after some thousand.
            let short = run.repeat(20_000);
            assert!(encoder.encode(&short).unwrap() == ids(&reference, &short), "{name}: 20,000 times {run:?}");
            assert!(encoder.decode(&got, false).unwrap() == text || name == "qwen", "{name}: {run:?}");
        }
        assert!(encoder.encode(&base64).unwrap() == ids(&reference, &base64), "{name}: base64");
    }
}

#[test]
fn row_8_surrogates() {
    let lines = br#"{"text":"a\ud83d b"}
{"text":"\ude00 low"}
{"text":"\ude00\ud83d"}
{"text":"\ud83d\ude00"}
{"text":"after"}
"#;
    let (texts, sidecar, _) = run("a.jsonl", lines);
    assert_eq!(texts, ["a\u{fffd} b", "\u{fffd} low", "\u{fffd}\u{fffd}", "\u{1f600}", "after"]);
    assert_eq!((sidecar.replaced.documents, sidecar.replaced.characters), (3, 4));
}

#[test]
fn row_9_places_of_bad_bytes() {
    // A character cut by the end of a block of 1 MiB is not broken.
    let mut text = "x".repeat((1 << 20) - 10);
    while text.len() < (1 << 20) + 30 {
        text.push('\u{4e2d}');
    }
    assert_eq!(run("a.txt", text.as_bytes()).0, [text.clone()]);
    // One that the end of the file cuts is, and so is Latin-1; both are told with their place.
    let (texts, _, told) = run("a.jsonl", b"{\"text\":\"good\"}\n{\"text\":\"caf\xe9\"}\n{\"text\":\"\xe4\xb8\"}\n");
    assert_eq!(texts, ["good", "caf\u{fffd}", "\u{fffd}"]);
    assert!(told[0].contains("a.jsonl line 2 is not Unicode in 1 place") && told[1].contains("a.jsonl line 3"), "{told:?}");
}

#[test]
fn row_10_byte_order_marks() {
    let marked = "\u{feff}{\"text\":\"first\"}\n{\"text\":\"\u{feff}kept\"}\n";
    for (name, bytes) in [
        ("a.jsonl", marked.as_bytes().to_vec()),
        ("a.jsonl.gz", gzip(marked.as_bytes())),
        ("a.jsonl.zst", zst(marked.as_bytes())),
    ] {
        let (texts, sidecar, told) = run(name, &bytes);
        assert_eq!(texts, ["first", "\u{feff}kept"], "{name}");
        assert_eq!((sidecar.skipped.all(), told.len()), (0, 0), "{name}: {told:?}");
    }
}

#[test]
fn row_13_a_line_of_64_megabytes() {
    let text = "the cat and the dog ".repeat((64 << 20) / 20);
    let lines = format!("{}\n{}\n{}\n", json!({"text": "before"}), json!({ "text": text }), json!({"text": "after"}));
    let (texts, ..) = run("a.jsonl.zst", &zst(lines.as_bytes()));
    assert!(texts.len() == 3 && texts[0] == "before" && texts[1] == text && texts[2] == "after");
}

#[test]
fn row_14_an_empty_input_among_good_ones() {
    let dir = tempfile::tempdir().unwrap();
    let tok = tokenizer(dir.path(), &[]);
    let inputs: Vec<PathBuf> =
        [("a.jsonl", &b"{\"text\":\"a\"}\n"[..]), ("b.jsonl", b""), ("c.txt", b""), ("d.jsonl", b"{\"text\":\"d\"}\n")]
            .map(|(name, bytes)| {
                fs::write(dir.path().join(name), bytes).unwrap();
                dir.path().join(name)
            })
            .to_vec();
    let prefix = dir.path().join("out");
    let sidecar = zaya::data::build::tokenize(&job(&tok, &inputs, &prefix), &mut Told::default()).unwrap();
    assert_eq!((sidecar.documents, sidecar.sources.iter().map(|s| s.documents).collect::<Vec<_>>()), (2, vec![1, 0, 0, 1]));
    assert_eq!(documents(&prefix).len(), 2);
}

/// Most memory that `zaya` held, MiB, as the system last said while it ran.
fn held(dir: &Path, args: &[&str]) -> f64 {
    let mut child = crate::program::zaya().current_dir(dir).args(args).spawn().unwrap();
    let mut most = 0;
    loop {
        let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
        let peak = status.lines().find_map(|l| l.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB")?.parse::<u64>().ok());
        most = most.max(peak.unwrap_or(0));
        if let Some(status) = child.try_wait().unwrap() {
            assert!(status.success(), "{args:?}");
            return most as f64 / 1024.0;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
#[cfg(target_os = "linux")]
fn row_15_memory_stays() {
    let dir = tempfile::tempdir().unwrap();
    tokenizer(dir.path(), &[]);
    // Six million words, each once: more than the cache of words may hold. Two million tiny documents: 40 MB of index.
    let words = |name: &str, count: u32| {
        let mut file = BufWriter::new(fs::File::create(dir.path().join(name)).unwrap());
        for i in 0..count {
            let word: String =
                format!("{:08}", i.wrapping_mul(2_654_435_761)).bytes().map(|b| char::from(b - b'0' + b'a')).collect();
            let (start, end) = (if i % 500 == 0 { "{\"text\":\"" } else { " " }, if i % 500 == 499 { "\"}\n" } else { "" });
            write!(file, "{start}{word}{end}").unwrap();
        }
    };
    words("few.jsonl", 100_000);
    words("many.jsonl", 6_000_000);
    fs::write(dir.path().join("tiny.jsonl"), "{\"text\":\"a\"}\n".repeat(2_000_000)).unwrap();
    let of = |input: &str| {
        held(
            dir.path(),
            &[
                "tokenize",
                "--tokenizer",
                "tok.json",
                "--workers",
                "1",
                "--input",
                input,
                "--output",
                input.strip_suffix(".jsonl").unwrap(),
            ],
        )
    };
    let (few, many, tiny) = (of("few.jsonl"), of("many.jsonl"), of("tiny.jsonl"));
    println!("MiB held: few words {few}, many {many}, tiny documents {tiny}");
    // 128 MiB of cache, some blocks in work, what the allocator leaves.
    assert!(many < few + 200.0 && tiny < few + 64.0, "few words {few}, many {many}, tiny documents {tiny}");
}

#[test]
fn row_16_nul_bytes() {
    let dir = tempfile::tempdir().unwrap();
    for (name, path) in families(dir.path()) {
        let (encoder, reference) = (Encoder::load(&path, &Eod::Find).unwrap(), reference(&path));
        for text in ["a\0b", "\0", "\0\0\0", " \0 a\0\n", "the\0cat"] {
            assert_eq!(encoder.encode(text).unwrap(), ids(&reference, text), "{name}: {text:?}");
        }
    }
    assert_eq!(run("a.jsonl", b"{\"text\":\"a\\u0000b\"}\n{\"text\":\"\\u0000\"}\n").0, ["a\0b", "\0"]);
}

fn numbered(path: &Path, first: u32, lengths: &[u32]) -> PathBuf {
    let mut writer = ShardWriter::create(path, TokenType::I32, false).unwrap();
    let mut next = first;
    for length in lengths {
        writer.push(&(next..next + length).collect::<Vec<_>>()).unwrap();
        next += length;
    }
    writer.publish(|_| Ok(String::new())).unwrap();
    fs::remove_file(path.with_extension("json")).unwrap();
    path.to_path_buf()
}

fn loader(batch_sequences: usize, specs: &[SourceSpec]) -> Loader {
    let config = LoaderConfig {
        seed: 5,
        seq_len: 4,
        batch_sequences,
        document_mask: false,
        eod_mask_loss: false,
        vocab_size: 1 << 20,
        packing: Packing::Stream,
    };
    Loader::open(config, specs).unwrap()
}

fn spec(name: &str, weight: f64, path: PathBuf) -> SourceSpec {
    SourceSpec { name: name.into(), weight, paths: vec![path], first_sample: 0, max_epochs: None }
}

#[test]
fn row_17_a_shuffle_keeps_the_samples() {
    let dir = tempfile::tempdir().unwrap();
    // 400 tokens in documents of four: a hundred windows.
    let loader = loader(10, &[spec("a", 1.0, numbered(&dir.path().join("a"), 0, &[4; 100]))]);
    let firsts: Vec<u32> = (0..10).flat_map(|step| loader.batch(step, 0..10).unwrap().ids.into_iter().step_by(4)).collect();
    let in_order = firsts.windows(2).filter(|w| w[1] == w[0] + 4).count();
    assert!(in_order < 10, "the order is the files': {firsts:?}");
    let mut sorted = firsts;
    sorted.sort_unstable();
    assert_eq!(sorted, (0..100).map(|i| 4 * i).collect::<Vec<_>>());
}

#[test]
fn row_18_ranks_of_uneven_shares() {
    let dir = tempfile::tempdir().unwrap();
    let path = numbered(&dir.path().join("a"), 0, &[7; 50]);
    let open = || loader(10, &[spec("a", 1.0, path.clone())]);
    let straight: Vec<u32> = (0..12).flat_map(|step| open().batch(step, 0..10).unwrap().ids).collect();
    // Ten sequences on one rank, on three of 4, 4 and 2 (micro-batches of two), on two; saved and resumed at each change.
    let mut got = Vec::new();
    let mut state = open().state_at(0).unwrap();
    let all = 0..10;
    for (steps, shares) in [(0..4, std::slice::from_ref(&all)), (4..7, &[0..4, 4..8, 8..10]), (7..12, &[0..5, 5..10])] {
        let resumed = open();
        resumed.restore(steps.start, &serde_json::from_str(&serde_json::to_string(&state).unwrap()).unwrap()).unwrap();
        for step in steps.clone() {
            for share in shares {
                for micro in share.clone().step_by(2) {
                    got.extend(resumed.batch(step, micro..(micro + 2).min(share.end)).unwrap().ids);
                }
            }
        }
        state = resumed.state_at(steps.end).unwrap();
    }
    assert_eq!(got, straight);
}

#[test]
fn row_19_sources_run_in_epochs() {
    let dir = tempfile::tempdir().unwrap();
    let specs = [
        spec("large", 0.999, numbered(&dir.path().join("large"), 0, &[4; 10])),
        spec("small", 0.001, numbered(&dir.path().join("small"), 1000, &[4; 10])),
        spec("off", 0.0, numbered(&dir.path().join("off"), 2000, &[4; 10])),
        spec("one", 0.5, numbered(&dir.path().join("one"), 3000, &[4])),
    ];
    let loader = loader(4, &specs);
    let mut counts = BTreeMap::<u32, u32>::new();
    for step in 0..3000 {
        for id in loader.batch(step, 0..4).unwrap().ids {
            *counts.entry(id).or_default() += 1;
        }
    }
    let of = |first: u32| -> Vec<u32> { (first..first + 40).filter_map(|id| counts.get(&id).copied()).collect() };
    // 12,000 samples of four tokens; weights are 0.999, 0.001 and 0.5 of 1.5.
    let samples = |first: u32| of(first).iter().sum::<u32>() / 4;
    assert_eq!((samples(0), samples(1000), samples(2000), samples(3000)), (7992, 8, 0, 4000));
    // Every token of a source comes as often as every other, up to the epoch that was begun.
    for first in [0, 1000, 3000] {
        let counts = of(first);
        assert!(counts.iter().max().unwrap() - counts.iter().min().unwrap() <= 1, "{counts:?}");
    }
}

#[test]
fn row_20_new_scripts() {
    let dir = tempfile::tempdir().unwrap();
    // Shaking face (15), Kirat Rai letter (16), Nag Mundari letter (15), Cyrillic millions sign (an enclosing mark), and a letter of version 17.
    let odd = ["\u{1fae8}", "\u{16d40}", "\u{1e4d0}", "\u{1e5d0}", "\u{489}", "\u{16ea0}"];
    for (name, path) in families(dir.path()) {
        let (encoder, reference) = (Encoder::load(&path, &Eod::Find).unwrap(), reference(&path));
        for c in odd {
            for text in [c.to_string(), c.repeat(3), format!("a{c}b {c}1{c} {c}{c}the {c}\n"), format!(" {c}'s 12{c}3")] {
                assert_eq!(encoder.encode(&text).unwrap(), ids(&reference, &text), "{name}: {text:?}");
            }
        }
    }
    // The version is told beside the data.
    let (_, sidecar, _) = run("a.txt", b"text");
    let sidecar: &Sidecar = &sidecar;
    let version = sidecar.tokenizer.unicode.as_deref().unwrap();
    assert_eq!(version, zaya::text::unicode_version());
    assert!(version.split('.').next().unwrap().parse::<u32>().unwrap() >= 15, "{version}");
}
