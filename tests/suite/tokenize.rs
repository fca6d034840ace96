//! `zaya tokenize`: text in, Megatron-LM shards out, and a defined result for every odd input.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Output;

use serde_json::json;
use tempfile::TempDir;
use zaya::data::build::{Corpus, TokenizeJob, Watcher, tokenize};
use zaya::data::dataset::Dataset;
use zaya::data::shard::{Shard, TokenType};
use zaya::data::sidecar::Sidecar;
use zaya::data::writer::ShardWriter;
use zaya::error::{exit_code, exit_code_of};
use zaya::text::corpus::Input;
use zaya::text::record::OnBad;
use zaya::text::{Encoder, Eod};

use crate::encoder::tokenizer;

/// Keeps what is told.
#[derive(Default)]
pub struct Told(pub Vec<String>);

impl Watcher for Told {
    fn progress(&mut self, _: u64) {}
    fn warn(&mut self, text: &str) {
        self.0.push(text.into());
    }
}

pub fn job(tokenizer: &Path, inputs: &[PathBuf], output: &Path) -> TokenizeJob {
    TokenizeJob {
        corpus: Corpus {
            inputs: inputs.iter().map(|p| Input::find(p, None).unwrap()).collect(),
            field: "text".into(),
            on_bad: OnBad::Replace,
        },
        tokenizer: tokenizer.to_path_buf(),
        eod: Eod::Find,
        output: output.to_path_buf(),
        overwrite: false,
        workers: 2,
        chat: None,
    }
}

/// Documents of a shard, as ids.
pub fn documents(prefix: &Path) -> Vec<Vec<u32>> {
    let dataset = Dataset::open(&[prefix.to_path_buf()]).unwrap();
    dataset.shards()[0].check_index().unwrap();
    let read = |d| {
        let (start, end) = dataset.document(d).unwrap();
        let mut ids = Vec::new();
        dataset.read(start, end, usize::MAX, &mut ids).unwrap();
        ids
    };
    (0..dataset.num_documents()).map(read).collect()
}

/// Everything in `dir` whose name begins with "out".
pub fn outputs(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(dir)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .filter(|n| n.starts_with("out"))
        .collect();
    names.sort();
    names
}

/// Tokenizes one file of these bytes; returns the documents' texts (each must end with the end-of-document id and have no
/// other), the sidecar, and what was told.
pub fn run(name: &str, bytes: &[u8]) -> (Vec<String>, Sidecar, Vec<String>) {
    run_with(name, bytes, |_| ()).unwrap()
}

pub fn run_with(
    name: &str,
    bytes: &[u8],
    change: impl Fn(&mut TokenizeJob),
) -> anyhow::Result<(Vec<String>, Sidecar, Vec<String>)> {
    let dir = tempfile::tempdir().unwrap();
    let input = dir.path().join(name);
    fs::write(&input, bytes).unwrap();
    let tok = tokenizer(dir.path(), &[]);
    let prefix = dir.path().join("out");
    let mut job = job(&tok, &[input], &prefix);
    change(&mut job);
    let mut told = Told::default();
    let result = tokenize(&job, &mut told);
    let sidecar = match result {
        Ok(sidecar) => sidecar,
        Err(e) => {
            assert_eq!(outputs(dir.path()), Vec::<String>::new(), "a failed run left files behind");
            return Err(e);
        }
    };
    assert_eq!(outputs(dir.path()), ["out.bin", "out.idx", "out.json"]);
    assert_eq!(Sidecar::read(&dir.path().join("out.json")).unwrap().unwrap(), sidecar);
    let encoder = Encoder::load(&tok, &Eod::Find).unwrap();
    let decode = |ids: &Vec<u32>| {
        let (last, text) = ids.split_last().unwrap();
        assert_eq!(*last, 0);
        assert!(!text.contains(&0), "the end-of-document id came from text");
        encoder.decode(text, false).unwrap()
    };
    let texts: Vec<String> = documents(&prefix).iter().map(decode).collect();
    assert_eq!(sidecar.documents, texts.len() as u64);
    assert_eq!(sidecar.text_bytes, texts.iter().map(|t| t.len() as u64).sum::<u64>());
    Ok((texts, sidecar, told.0))
}

pub fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// As the `zstd` program writes it: with a checksum.
pub fn zst(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = zstd::stream::write::Encoder::new(Vec::new(), 3).unwrap();
    encoder.include_checksum(true).unwrap();
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

#[test]
fn the_files_are_megatrons_byte_for_byte() {
    let dir = tempfile::tempdir().unwrap();
    let tok = tokenizer(dir.path(), &[]);
    let encoder = Encoder::load(&tok, &Eod::Find).unwrap();
    let input = dir.path().join("three.jsonl");
    let texts = ["the cat", "x", "and the dog\n"];
    fs::write(&input, texts.map(|t| json!({ "text": t }).to_string() + "\n").concat()).unwrap();
    let sidecar = tokenize(&job(&tok, &[input], &dir.path().join("out")), &mut Told::default()).unwrap();

    let ids: Vec<Vec<u32>> = texts.iter().map(|t| [encoder.encode(t).unwrap(), vec![0]].concat()).collect();
    let bin: Vec<u8> = ids.concat().iter().flat_map(|id| (*id as u16).to_le_bytes()).collect();
    let mut idx = b"MMIDIDX\0\0".to_vec();
    idx.extend(1u64.to_le_bytes());
    idx.push(8);
    idx.extend(3u64.to_le_bytes());
    idx.extend(4u64.to_le_bytes());
    idx.extend(ids.iter().flat_map(|d| (d.len() as i32).to_le_bytes()));
    let places = [0, ids[0].len(), ids[0].len() + ids[1].len()];
    idx.extend(places.iter().flat_map(|p| (2 * *p as i64).to_le_bytes()));
    idx.extend([0i64, 1, 2, 3].iter().flat_map(|d| d.to_le_bytes()));
    assert_eq!(fs::read(dir.path().join("out.bin")).unwrap(), bin);
    assert_eq!(fs::read(dir.path().join("out.idx")).unwrap(), idx);

    assert_eq!((sidecar.bin_bytes, sidecar.idx_bytes), (bin.len() as u64, idx.len() as u64));
    assert_eq!(sidecar.bin_xxh3_64, format!("{:016x}", xxhash_rust::xxh3::xxh3_64(&bin)));
    assert_eq!(sidecar.idx_xxh3_64, format!("{:016x}", xxhash_rust::xxh3::xxh3_64(&idx)));
    assert_eq!((sidecar.documents, sidecar.tokens, sidecar.dtype.as_str()), (3, bin.len() as u64 / 2, "uint16"));
    let eod = sidecar.eod.unwrap();
    assert_eq!((eod.token.as_str(), eod.id), ("<|endoftext|>", 0));
}

#[test]
fn the_type_of_ids_follows_the_vocabulary() {
    use TokenType::{I32, U16};
    for (vocab_size, token_type) in [(10, U16), (65_499, U16), (65_500, I32), (65_536, I32), (65_537, I32), (262_144, I32)] {
        assert_eq!(TokenType::for_vocab(vocab_size), token_type, "{vocab_size}");
    }
    let dir = tempfile::tempdir().unwrap();
    let prefix = dir.path().join("wide");
    let mut writer = ShardWriter::create(&prefix, I32, false).unwrap();
    writer.push(&[65_535, 65_536, 262_143, i32::MAX as u32]).unwrap();
    writer.publish(|_| Ok("".into())).unwrap();
    fs::remove_file(dir.path().join("wide.json")).unwrap();
    assert_eq!(documents(&prefix), [[65_535, 65_536, 262_143, i32::MAX as u32]]);
    let mut writer = ShardWriter::create(&dir.path().join("narrow"), U16, false).unwrap();
    let error = writer.push(&[1, 65_536]).unwrap_err().to_string();
    assert!(error.contains("65536 does not fit into uint16"), "{error}");
    drop(writer);
    assert!(!dir.path().join("narrow.bin.tmp").exists());
}

#[test]
fn a_missing_end_of_document_is_refused_before_any_output() {
    let error = run_with("a.txt", b"text", |job| job.eod = Eod::Token("<eos>".into())).unwrap_err();
    assert_eq!(exit_code_of(&error), exit_code::BAD_INPUT);
}

#[test]
fn no_eod_leaves_documents_bare() {
    let dir = tempfile::tempdir().unwrap();
    let tok = tokenizer(dir.path(), &[]);
    let input = dir.path().join("a.txt");
    fs::write(&input, "the cat").unwrap();
    let mut job = job(&tok, &[input], &dir.path().join("out"));
    job.eod = Eod::Absent;
    let sidecar = tokenize(&job, &mut Told::default()).unwrap();
    assert_eq!(sidecar.eod, None);
    let encoder = Encoder::load(&tok, &Eod::Find).unwrap();
    assert_eq!(documents(&dir.path().join("out")), [encoder.encode("the cat").unwrap()]);
}

#[test]
fn odd_text_files() {
    let cases: [(&[u8], &[&str]); 9] = [
        (b"", &[]),
        (b" \n\t ", &[" \n\t "]),
        (b"\xef\xbb\xbfthe cat", &["the cat"]),
        ("a\u{feff}b".as_bytes(), &["a\u{feff}b"]),
        (b"a\r\nb\r", &["a\r\nb\r"]),
        (b"a\0b\0", &["a\0b\0"]),
        (b"\0", &["\0"]),
        ("a\u{2028}b\u{85}c\u{b}d".as_bytes(), &["a\u{2028}b\u{85}c\u{b}d"]),
        (b"no final newline <|endoftext|>", &["no final newline <|endoftext|>"]),
    ];
    for (bytes, expected) in cases {
        let (texts, sidecar, told) = run("a.txt", bytes);
        assert_eq!(texts, expected, "{bytes:?}");
        assert_eq!(sidecar.skipped.empty, u64::from(bytes.is_empty()));
        assert_eq!(sidecar.replaced.characters, 0);
        assert_eq!(told.len(), usize::from(bytes.is_empty()), "{told:?}");
    }
    // Only a byte order mark: nothing is left.
    assert_eq!(run("a.txt", b"\xef\xbb\xbf").1.skipped.empty, 1);
}

#[test]
fn odd_json_lines() {
    // Lines end at 0x0A alone; blank ones are no records; the last needs no end.
    let lines = "\u{feff}{\"text\":\"a\u{2028}b\u{85}c\"}\r\n\n \t\r\n{\"text\":\"\"}\n{\"text\":\" \"}\n{\"text\":\"x\\r\\ny\\u0000z\\ufeff\"}";
    let (texts, sidecar, told) = run("a.jsonl", lines.as_bytes());
    assert_eq!(texts, ["a\u{2028}b\u{85}c", " ", "x\r\ny\0z\u{feff}"]);
    assert_eq!((sidecar.skipped.empty, sidecar.skipped.bad), (1, 0));
    assert!(told.is_empty());
    assert_eq!(run("a.jsonl", b"").0.len(), 0);
    assert_eq!(run("a.jsonl", b"\n\n").0.len(), 0);
    // Empty documents first, in the middle and last.
    let lines = b"{\"text\":\"\"}\n{\"text\":\"a\"}\n{\"text\":\"\"}\n{\"text\":\"b\"}\n{\"text\":\"\"}\n";
    let (texts, sidecar, _) = run("a.jsonl", lines);
    assert_eq!((texts, sidecar.skipped.empty), (vec!["a".to_string(), "b".into()], 3));
    let (texts, sidecar, told) = run("a.jsonl", b"{\"text\":\"\"}\n");
    assert_eq!((texts.len(), sidecar.skipped.empty, told.len()), (0, 1, 1));
}

#[test]
fn bad_records_by_policy() {
    let lines = b"{\"text\":\"good\"}\n{\"text\":\"caf\xe9\"}\nnot json\n{\"txt\":\"x\"}\n{\"text\":7}\n{\"text\":\"\\ud83d!\"}\n[]\n{\"text\":\"cut";
    let (texts, sidecar, told) = run("a.jsonl", lines);
    assert_eq!(texts, ["good", "caf\u{fffd}", "\u{fffd}!"]);
    assert_eq!((sidecar.replaced.documents, sidecar.replaced.characters), (2, 2));
    assert_eq!(sidecar.skipped.bad, 5);
    assert_eq!(sidecar.sources[0].skipped.bad, 5);
    assert!(told[0].contains("a.jsonl line 2 is not Unicode"), "{told:?}");
    assert!(told[1].contains("a.jsonl line 3 is not JSON"), "{told:?}");
    assert!(told[2].contains("a.jsonl line 4 has no field `text`"), "{told:?}");
    assert!(told[3].contains("a.jsonl line 5 has a field `text` that is not text"), "{told:?}");
    assert!(told.last().unwrap().contains("only counted"), "{told:?}");

    let (texts, sidecar, _) = run_with("a.jsonl", lines, |job| job.corpus.on_bad = OnBad::Skip).unwrap();
    assert_eq!((texts, sidecar.skipped.bad, sidecar.replaced.characters), (vec!["good".to_string()], 7, 0));

    let error = run_with("a.jsonl", lines, |job| job.corpus.on_bad = OnBad::Fail).unwrap_err();
    assert_eq!(exit_code_of(&error), exit_code::BAD_INPUT);
    assert!(format!("{error:#}").contains("a.jsonl line 2 is not Unicode in 1 place"), "{error:#}");

    let (texts, sidecar, told) = run("a.txt", b"\xff\xfet\0e\0");
    assert_eq!((texts, sidecar.replaced.characters), (vec!["\u{fffd}\u{fffd}t\0e\0".to_string()], 2));
    assert!(told[0].contains("UTF-16"), "{told:?}");
}

#[test]
fn a_wrong_field_is_an_error_not_an_empty_shard() {
    let lines = b"{\"txt\":\"x\",\"id\":1}\n{\"txt\":\"y\",\"id\":2}\n";
    let error = run_with("a.jsonl", lines, |_| ()).unwrap_err();
    let text = format!("{error:#}");
    assert!(text.contains("none of the 2 records") && text.contains("txt, id") && text.contains("did you mean `txt`?"), "{text}");
    let (texts, ..) = run_with("a.jsonl", lines, |job| job.corpus.field = "txt".into()).unwrap();
    assert_eq!(texts, ["x", "y"]);
}

#[test]
fn compressed_inputs_equal_plain_ones() {
    let lines: String = (0..500).map(|i| json!({"text": format!("the cat {i} and the dog")}).to_string() + "\n").collect();
    let expected = run("a.jsonl", lines.as_bytes()).0;
    assert_eq!(expected.len(), 500);
    let (head, tail) = lines.as_bytes().split_at(7000);
    for (name, bytes) in [
        ("a.jsonl.gz", gzip(lines.as_bytes())),
        ("a.jsonl.zst", zst(lines.as_bytes())),
        ("a.JSONL.GZ", gzip(lines.as_bytes())),
        // Several members or frames in a row, cut in the middle of a line.
        ("b.jsonl.gz", [gzip(head), gzip(b""), gzip(tail)].concat()),
        ("b.jsonl.zst", [zst(head), zst(tail)].concat()),
        ("c.jsonl.gz", gzip(&[b"\xef\xbb\xbf", lines.as_bytes()].concat())),
    ] {
        assert_eq!(run(name, &bytes).0, expected, "{name}");
    }
    assert_eq!(run("a.txt.gz", &gzip(b"the cat\n")).0, ["the cat\n"]);
    assert_eq!(run("a.md.zst", &zst(b"the cat\n")).0, ["the cat\n"]);
    assert_eq!(run("a.txt.gz", &gzip(b"")).1.skipped.empty, 1);
}

#[test]
fn truncated_archives_publish_nothing() {
    let lines: String =
        (0..20_000).map(|i| json!({"text": format!("the cat {i} {}", i * 7919 % 10007)}).to_string() + "\n").collect();
    for (name, whole) in [("a.jsonl.gz", gzip(lines.as_bytes())), ("a.jsonl.zst", zst(lines.as_bytes()))] {
        for cut in [0, 1, 4, whole.len() / 2, whole.len() - 1] {
            let error = run_with(name, &whole[..cut], |_| ()).unwrap_err();
            let text = format!("{error:#}");
            assert_eq!(exit_code_of(&error), exit_code::FAILURE, "{text}");
            assert!(
                text.contains(name) && text.contains("is truncated") && text.contains("nothing was written"),
                "{name} cut at {cut}: {text}"
            );
            let before = text.split("; ").last().unwrap().split(' ').next().unwrap().parse::<u64>().unwrap();
            match cut {
                0..=4 => assert_eq!(before, 0, "{text}"),
                c if c == whole.len() - 1 => assert_eq!(before, 20_000, "{text}"),
                _ => assert!((1..20_000).contains(&before), "{text}"),
            }
        }
        let mut damaged = whole.clone();
        damaged[whole.len() / 2] ^= 0x55;
        assert!(run_with(name, &damaged, |_| ()).is_err(), "{name}");
        let error = run_with(name, &[&whole[..], b"garbage"].concat(), |_| ()).unwrap_err();
        assert!(format!("{error:#}").contains("damaged") || format!("{error:#}").contains("truncated"), "{error:#}");
    }
}

#[test]
fn long_lines_and_line_ends_at_buffer_edges() {
    // Buffers are 2^18 bytes: lines that end one before, at and one after an edge.
    for length in [(1 << 18) - 1, 1 << 18, (1 << 18) + 1] {
        let frame = json!({ "text": "" }).to_string().len() + 1;
        let first = "a".repeat(length - frame);
        let (texts, ..) = run("a.jsonl", format!("{}\n{}\n", json!({ "text": first }), json!({"text": "b"})).as_bytes());
        assert_eq!(texts, [first, "b".into()]);
    }
    let long = "the cat and the dog ".repeat(100_000);
    let (texts, ..) = run("a.jsonl.zst", &zst(format!("{}\n{}\n", json!({"text": long}), json!({"text": "b"})).as_bytes()));
    assert!(texts[0] == long && texts[1] == "b" && texts.len() == 2);
}

/// Many documents of very different sizes in several files.
fn mixed_inputs(dir: &Path) -> Vec<PathBuf> {
    let documents: Vec<String> = (0..1200usize).map(|i| "the cat and dog \u{4e2d} ".repeat(1 + i * i % 97)).collect();
    let lines = |range: std::ops::Range<usize>| {
        documents[range].iter().map(|d| json!({ "text": d }).to_string() + "\n").collect::<String>()
    };
    let files: [(&str, Vec<u8>); 4] = [
        ("2.jsonl", lines(0..600).into_bytes()),
        ("1.jsonl.zst", zst(lines(600..1200).as_bytes())),
        ("z.md", b"# one file, one document\n".to_vec()),
        ("a.rs", b"fn main() {}\n".to_vec()),
    ];
    files
        .map(|(name, bytes)| {
            let path = dir.join(name);
            fs::write(&path, bytes).unwrap();
            path
        })
        .to_vec()
}

#[test]
fn workers_change_nothing_and_order_is_the_order_given() {
    let dir = tempfile::tempdir().unwrap();
    let tok = tokenizer(dir.path(), &[]);
    let inputs = mixed_inputs(dir.path());
    let write = |name: &str, workers: usize, inputs: &[PathBuf]| {
        let prefix = dir.path().join(name);
        tokenize(&TokenizeJob { workers, ..job(&tok, inputs, &prefix) }, &mut Told::default()).unwrap();
        ["bin", "idx", "json"].map(|e| fs::read(prefix.with_extension(e)).unwrap())
    };
    let one = write("one", 1, &inputs);
    for workers in [2, 3, 8] {
        assert!(write(&format!("w{workers}"), workers, &inputs) == one, "{workers} workers write other bytes");
    }
    // The whole is the parts in a row.
    for (i, input) in inputs.iter().enumerate() {
        write(&format!("part{i}"), 2, std::slice::from_ref(input));
    }
    let parts: Vec<Vec<u32>> = (0..4).flat_map(|i| documents(&dir.path().join(format!("part{i}")))).collect();
    assert_eq!(documents(&dir.path().join("one")), parts);
    assert_eq!(parts.len(), 1202);
}

pub fn zaya(dir: &Path, args: &[&str]) -> Output {
    crate::program::zaya().current_dir(dir).args(args).output().unwrap()
}

fn program_dir() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    tokenizer(dir.path(), &[]);
    fs::write(dir.path().join("a.txt"), "the cat").unwrap();
    fs::write(dir.path().join("b.txt"), "the dog").unwrap();
    fs::create_dir(dir.path().join("folder")).unwrap();
    dir
}

#[test]
fn the_program_refuses_and_says_why() {
    let dir = program_dir();
    fs::write(dir.path().join("bad.json"), "{}").unwrap();
    fs::write(dir.path().join("cut.txt.gz"), &gzip(b"some text")[..12]).unwrap();
    let cases: [(&[&str], i32, &str); 11] = [
        (&["--tokenizer", "tok.json", "--input", "folder", "--output", "o"], 2, "folder is a directory without any file"),
        (&["--tokenizer", "tok.json", "--input", "none.txt", "--output", "o"], 2, "none.txt cannot be read"),
        (&["--tokenizer", "none.json", "--input", "a.txt", "--output", "o"], 2, "none.json cannot be read"),
        (&["--tokenizer", "bad.json", "--input", "a.txt", "--output", "o"], 2, "not a Hugging Face tokenizer.json"),
        (&["--tokenizer", "tok.json", "--output", "o"], 2, "nothing to read"),
        (&["--tokenizer", "tok.json", "--input", "a.txt", "--output", "folder"], 2, "is a directory"),
        (&["--tokenizer", "tok.json", "--input", "a.txt", "--output", "a.txt/o"], 2, "a.txt"),
        (
            &["--tokenizer", "tok.json", "--input", "a.txt", "--output", "o", "--eod", "<eos>"],
            2,
            "`<eos>` is not in the vocabulary",
        ),
        (&["--tokenizer", "tok.json", "--input", "a.txt", "--output", "tok", "--overwrite"], 2, "would replace tok.json"),
        (&["--input", "a.txt", "--output", "o"], 2, "--tokenizer"),
        (&["--tokenizer", "tok.json", "--input", "a.txt", "cut.txt.gz", "--output", "o"], 1, "cut.txt.gz is truncated"),
    ];
    for (args, code, text) in cases {
        let before = fs::read_dir(dir.path()).unwrap().count();
        let output = zaya(dir.path(), &[&["tokenize"], args].concat());
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {stderr}");
        assert!(stderr.contains(text), "{args:?}: {stderr}");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), before, "{args:?} left files behind");
    }
}

#[test]
fn the_program_reads_lists_and_replaces_only_when_told() {
    let dir = program_dir();
    fs::write(dir.path().join("list"), "b.txt\n\na.txt\r\n").unwrap();
    let base =
        ["tokenize", "--tokenizer", "tok.json", "--input", "a.txt", "--input-list", "list", "--output", "new/folder/shard.v1"];
    let output = zaya(dir.path(), &base);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let summary = String::from_utf8(output.stdout).unwrap();
    assert!(summary.starts_with("3 documents, ") && summary.contains("new/folder/shard.v1.bin"), "{summary}");
    let prefix = dir.path().join("new/folder/shard.v1");
    let encoder = Encoder::load(&dir.path().join("tok.json"), &Eod::Find).unwrap();
    let text = |ids: Vec<u32>| encoder.decode(&ids, true).unwrap();
    assert_eq!(documents(&prefix).into_iter().map(text).collect::<Vec<_>>(), ["the cat", "the dog", "the cat"]);

    let again = zaya(dir.path(), &base);
    assert_eq!(again.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&again.stderr).contains("exists"));
    fs::write(dir.path().join("list"), "b.txt\n").unwrap();
    assert_eq!(zaya(dir.path(), &[&base[..], &["--overwrite"]].concat()).status.code(), Some(0));
    assert_eq!(documents(&prefix).len(), 2);
    // A run that fails leaves the older shard as it was.
    let before = fs::read(prefix.with_extension("v1.bin")).unwrap();
    fs::write(dir.path().join("bad.txt"), b"\xff").unwrap();
    let failed = zaya(dir.path(), &[&base[..], &["--overwrite", "--on-bad", "fail", "--input", "bad.txt"]].concat());
    assert_eq!(failed.status.code(), Some(2));
    assert_eq!(fs::read(prefix.with_extension("v1.bin")).unwrap(), before);
    assert!(Shard::open(&prefix).is_ok());
}

#[test]
fn two_writers_of_one_shard_do_not_meet() {
    let dir = tempfile::tempdir().unwrap();
    let prefix = dir.path().join("out");
    let first = ShardWriter::create(&prefix, TokenType::U16, false).unwrap();
    let second = ShardWriter::create(&prefix, TokenType::U16, false).err().unwrap().to_string();
    assert!(second.contains("being written by another process"), "{second}");
    drop(first);
    // What a killed run left is taken over.
    fs::write(dir.path().join("out.bin.tmp"), "left over").unwrap();
    let mut third = ShardWriter::create(&prefix, TokenType::U16, false).unwrap();
    third.push(&[1, 2]).unwrap();
    third.publish(|_| Ok("{}".into())).unwrap();
    assert_eq!(fs::read(dir.path().join("out.bin")).unwrap(), [1, 0, 2, 0]);
}
