//! The order of training data: bugs of other programs as inputs, whole examples in windows, masks, mixtures that change.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};

use zaya::data::dataset::Dataset;
use zaya::data::mask::MaskWriter;
use zaya::data::shard::TokenType;
use zaya::data::source::{Sample, Source};
use zaya::data::writer::ShardWriter;
use zaya::data::{Loader, LoaderConfig, SourceSpec, ValidationSet};
use zaya::parallel::Layout;
use zaya::recipe::Packing;
use zaya::tensor::backend::Batch;
use zaya::text::chat::marks::{LAST, LEARN, REASONING, TAG};

/// A shard of documents of these lengths, whose tokens count on from `first`; `marks` are a mask's.
fn shard(prefix: &Path, first: u32, lengths: &[u32], marks: Option<&[u8]>) -> PathBuf {
    let mut writer = ShardWriter::create(prefix, TokenType::I32, true).unwrap();
    let mut next = first;
    for len in lengths {
        writer.push(&(next..next + len).collect::<Vec<_>>()).unwrap();
        next += len;
    }
    writer.publish(|_| Ok("{}".into())).unwrap();
    fs::remove_file(format!("{}.json", prefix.display())).unwrap();
    if let Some(marks) = marks {
        let mut mask = MaskWriter::create(prefix).unwrap();
        mask.write(marks).unwrap();
        mask.publish().unwrap();
    }
    prefix.to_path_buf()
}

fn lengths(n: u64, most: u64, seed: u64) -> Vec<u32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % most
    };
    (0..n).map(|_| 1 + next() as u32).collect()
}

/// The same with a last document that makes their sum a multiple of `unit`: no window runs on into the next epoch.
fn even_lengths(n: u64, most: u64, seed: u64, unit: u32) -> Vec<u32> {
    let mut all = lengths(n, most, seed);
    all.push(unit - all.iter().sum::<u32>() % unit);
    all
}

fn config(packing: Packing, seq_len: usize, batch_sequences: usize) -> LoaderConfig {
    LoaderConfig {
        seed: 99,
        packing,
        seq_len,
        batch_sequences,
        document_mask: true,
        eod_mask_loss: false,
        vocab_size: 10_000_000,
    }
}

fn source(name: &str, weight: f64, path: &Path) -> SourceSpec {
    SourceSpec { name: name.into(), weight, paths: vec![path.to_path_buf()], first_sample: 0, max_epochs: None }
}

fn same(a: &Batch, b: &Batch) -> bool {
    (a.batch, a.seq, &a.ids, &a.labels, &a.doc_start, &a.valid) == (b.batch, b.seq, &b.ids, &b.labels, &b.doc_start, &b.valid)
}

/// The documents of each sequence of a packed batch, by their rows that are real.
fn documents(batch: &Batch) -> Vec<Vec<Vec<u32>>> {
    let sequence = |s: usize| {
        let rows = s * batch.seq..(s + 1) * batch.seq;
        let mut documents: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        for row in rows.filter(|row| batch.valid.is_empty() || batch.valid[*row]) {
            documents.entry(batch.doc_start[row]).or_default().push(batch.ids[row]);
        }
        documents.into_values().collect()
    };
    (0..batch.batch).map(sequence).collect()
}

/// Row 17 of the report's list: a shuffle that did nothing, and one that lost documents (allenai/dolma 139, bigscience 66).
#[test]
fn row_17_a_shuffle_is_every_token_once_and_not_the_file_s_order() {
    let dir = tempfile::tempdir().unwrap();
    let lengths = lengths(300, 40, 5);
    let total: u32 = lengths.iter().sum();
    let path = shard(&dir.path().join("a"), 0, &lengths, None);
    // Windows of one token: an epoch is exactly as many samples as tokens.
    let loader = Loader::open(config(Packing::Stream, 1, total as usize), &[source("a", 1.0, &path)]).unwrap();
    let mut orders = Vec::new();
    for epoch in 0..3 {
        let ids = loader.batch(epoch, 0..total as usize).unwrap().ids;
        let in_place = ids.iter().enumerate().filter(|(i, id)| *i as u32 == **id).count();
        assert!(in_place < total as usize / 50, "epoch {epoch}: {in_place} of {total} tokens stayed where they were");
        let mut sorted = ids.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..total).collect::<Vec<_>>(), "epoch {epoch}");
        orders.push(ids);
    }
    assert!(orders[0] != orders[1] && orders[1] != orders[2]);
}

/// Row 18: a second resume that went wrong, data-parallel sizes that change, tails that the ranks did not agree on
/// (huggingface/datasets 8308, litData 213 and 316, Megatron-Bridge 4565 and 5944).
#[test]
fn row_18_two_resumes_on_other_numbers_of_ranks_give_the_straight_run() {
    let dir = tempfile::tempdir().unwrap();
    let a = shard(&dir.path().join("a"), 0, &lengths(40, 30, 1), None);
    let b = shard(&dir.path().join("b"), 100_000, &lengths(11, 30, 2), None);
    let specs = [source("a", 0.7, &a), source("b", 0.3, &b)];
    for packing in [Packing::Stream, Packing::BestFit] {
        for sequences in [6, 10] {
            let open = || Loader::open(config(packing, 32, sequences), &specs).unwrap();
            let straight = open();
            let whole: Vec<Batch> = (0..30).map(|step| straight.batch(step, 0..sequences).unwrap()).collect();
            // What the ranks of a step read together, in the order of their sequences.
            let together = |loader: &Loader, step: u64, ranks: usize, micro: usize| {
                let layout = Layout::new(ranks, 1, 1, 4).unwrap();
                let mut rows: Vec<Option<Vec<u32>>> = vec![None; sequences];
                for rank in 0..ranks {
                    for part in layout.micro_batches(rank, sequences, micro).into_iter().filter(|part| !part.is_empty()) {
                        let batch = loader.batch(step, part.clone()).unwrap();
                        for (i, row) in part.enumerate() {
                            let was = rows[row].replace(batch.ids[i * 32..(i + 1) * 32].to_vec());
                            assert!(was.is_none(), "sequence {row} is read twice");
                        }
                    }
                }
                rows.into_iter().map(|row| row.expect("every sequence is read")).collect::<Vec<_>>().concat()
            };
            let mut loader = open();
            let mut step = 0;
            for (ranks, until) in [(1, 9), (3, 18), (2, 30)] {
                while step < until {
                    assert_eq!(
                        together(&loader, step, ranks, 2),
                        whole[step as usize].ids,
                        "{packing:?}, step {step}, {ranks} ranks"
                    );
                    step += 1;
                }
                // Stopped and resumed, through the text of a manifest.
                let state = serde_json::to_string(&loader.state_at(step).unwrap()).unwrap();
                loader = open();
                assert!(!loader.restore(step, &serde_json::from_str(&state).unwrap()).unwrap());
            }
        }
    }
}

/// Row 19: a mixture that asked for more samples than there are (Megatron-LM 705); and the number of windows of 16,777,218
/// tokens, which 32-bit arithmetic rounds (a finding of the report).
#[test]
fn row_19_sources_wrap_with_exact_counts() {
    let dir = tempfile::tempdir().unwrap();
    let equal = lengths(50, 20, 3);
    let a = shard(&dir.path().join("a"), 0, &equal, None);
    let b = shard(&dir.path().join("b"), 10_000, &equal, None);
    let one = shard(&dir.path().join("one"), 20_000, &[5], None);
    let off = shard(&dir.path().join("off"), 30_000, &equal, None);
    let specs = [source("a", 0.999, &a), source("b", 0.001, &b), source("one", 0.5, &one), source("off", 0.0, &off)];
    let loader = Loader::open(config(Packing::Stream, 16, 10), &specs).unwrap();
    let mut counts = [0u64; 4];
    for step in 0..600 {
        for id in loader.samples(step).unwrap() {
            assert_eq!(id.number, counts[id.source], "each source counts on");
            counts[id.source] += 1;
        }
        loader.batch(step, 0..10).unwrap();
    }
    // 0.999, 0.001 and 0.5 of 1.5, of 6,000.
    assert_eq!(counts, [3996, 4, 2000, 0]);
    let epochs = loader.epochs_at(600).unwrap();
    assert!(epochs[0] > 100.0 && epochs[2] == 2000.0 * 16.0 / 5.0, "{epochs:?}");

    let mut idx = b"MMIDIDX\0\0".to_vec();
    idx.extend(1u64.to_le_bytes());
    idx.push(8);
    idx.extend([1u64.to_le_bytes(), 2u64.to_le_bytes()].concat());
    idx.extend(16_777_218i32.to_le_bytes());
    idx.extend([0u64.to_le_bytes(), 0u64.to_le_bytes(), 1u64.to_le_bytes()].concat());
    fs::write(dir.path().join("odd.idx"), idx).unwrap();
    fs::File::create(dir.path().join("odd.bin")).unwrap().set_len(2 * 16_777_218).unwrap();
    let odd = Source::new(Dataset::open(&[dir.path().join("odd")]).unwrap(), 1, 2, 10).unwrap();
    assert_eq!((odd.epoch_of_sample(8_388_608), odd.epoch_of_sample(8_388_609)), (0, 1), "the first epoch has 8,388,609 windows");
}

/// Every document that fits is shown once an epoch, whole; windows are as few as best-fit decreasing makes them.
#[test]
fn best_fit_shows_every_document_once_and_whole() {
    let dir = tempfile::tempdir().unwrap();
    for (documents_there, most, seq_len) in [(1, 9, 16), (7, 16, 16), (200, 40, 40), (5000, 30, 64), (9000, 100, 64)] {
        let mut lengths = lengths(documents_there, most, 7);
        if documents_there > 1 {
            lengths[1] = 0;
        }
        let path = shard(&dir.path().join("a"), 0, &lengths, None);
        let loader = Loader::open(config(Packing::BestFit, seq_len, 1), &[source("a", 1.0, &path)]).unwrap();
        let mut begin = 0;
        let mut wanted: Vec<Vec<u32>> = Vec::new();
        for len in &lengths {
            if (1..=seq_len as u32).contains(len) {
                wanted.push((begin..begin + len).collect());
            }
            begin += len;
        }
        let tokens: usize = wanted.iter().map(Vec::len).sum();
        let mut orders = Vec::new();
        let mut step = 0;
        for epoch in 0..3 {
            let (mut seen, mut windows) = (Vec::new(), 0);
            while seen.len() < wanted.len() {
                let batch = loader.batch(step, 0..1).unwrap();
                let found = documents(&batch).remove(0);
                assert!(!found.is_empty() && batch.ids.len() == seq_len);
                // Labels follow within a document, and its last token has none.
                for (row, label) in batch.labels.iter().enumerate() {
                    let next = row + 1 < seq_len && batch.doc_start[row + 1] == batch.doc_start[row];
                    let real = |row: usize| batch.valid.is_empty() || batch.valid[row];
                    let expected = if next && real(row) && real(row + 1) { i64::from(batch.ids[row + 1]) } else { -1 };
                    assert_eq!(*label, expected, "row {row}: {:?}", batch.ids);
                }
                seen.extend(found);
                (step, windows) = (step + 1, windows + 1);
            }
            orders.push(seen.clone());
            seen.sort_unstable();
            assert_eq!(seen, wanted, "epoch {epoch} of {documents_there} documents");
            // Best-fit decreasing never needs more than 11/9 of the fewest and one more, in each group of 4,096.
            let groups = documents_there.div_ceil(4096) as usize;
            assert!(
                windows <= (tokens.div_ceil(seq_len) * 11).div_ceil(9) + groups,
                "{windows} windows for {tokens} tokens of {seq_len}"
            );
        }
        let epochs = loader.epochs_at(step).unwrap()[0];
        assert_eq!(epochs, 3.0);
        assert!(documents_there < 7 || orders[0] != orders[1], "epochs have orders of their own");
        // Any sample, without a walk.
        let far = Loader::open(config(Packing::BestFit, seq_len, 1), &[source("a", 1.0, &path)]).unwrap();
        for step in [step - 1, 0, step / 2] {
            assert!(same(&far.batch(step, 0..1).unwrap(), &loader.batch(step, 0..1).unwrap()));
        }
    }
    let long = shard(&dir.path().join("long"), 0, &[50, 60], None);
    let error = format!("{:#}", Loader::open(config(Packing::BestFit, 40, 1), &[source("l", 1.0, &long)]).unwrap_err());
    assert!(error.contains("no document that fits") && error.contains("`l`"), "{error}");
}

/// Conversations that are too long lose reasoning, never an answer; which tokens are learnt travels with them.
#[test]
fn best_fit_trims_reasoning_and_keeps_answers() {
    let dir = tempfile::tempdir().unwrap();
    // 2 of a prompt, a tag, 10 of reasoning, a tag, 3 of the answer; and one whose answers alone are too long.
    let one =
        [&[0, 0][..], &[LEARN | TAG | LAST], &[LEARN | REASONING | LAST; 10], &[LEARN | TAG | LAST], &[LEARN | LAST; 3]].concat();
    let other = [&[0u8; 2][..], &[LEARN | LAST; 20]].concat();
    let marks = [one.clone(), other, one].concat();
    let path = shard(&dir.path().join("a"), 0, &[17, 22, 17], Some(&marks));
    let loader = Loader::open(config(Packing::BestFit, 12, 2), &[source("a", 1.0, &path)]).unwrap();
    let mut seen = HashSet::new();
    for step in 0..3 {
        let batch = loader.batch(step, 0..2).unwrap();
        for document in documents(&batch).concat() {
            let first = document[0];
            // Prompt, tag, 5 of 10 of the reasoning, tag, answer.
            let kept = [0..8, 13..17].into_iter().flatten().map(|i| first + i).collect::<Vec<u32>>();
            assert_eq!(document, kept);
            seen.insert(first);
        }
        // The prompt is not learnt: rows that predict the first token of it, or have no successor.
        let expected: Vec<bool> = (0..24).map(|row| (1..11).contains(&(row % 12))).collect();
        assert_eq!(batch.labels.iter().map(|l| *l >= 0).collect::<Vec<_>>(), expected);
        assert_eq!(batch.num_labels(), 20);
    }
    assert_eq!(seen, [0, 39].into(), "both examples that can be short enough, and not the third");
}

/// A mask takes labels away, in streams and in held-out data as well, and is part of what a run is known by.
#[test]
fn masks_take_labels_away() {
    let dir = tempfile::tempdir().unwrap();
    let lengths = lengths(30, 25, 4);
    let total = lengths.iter().sum::<u32>() as usize;
    let marks: Vec<u8> = (0..total).map(|t| if t % 3 == 0 { LEARN } else { REASONING }).collect();
    let path = shard(&dir.path().join("a"), 0, &lengths, Some(&marks));
    let bare = shard(&dir.path().join("b"), 0, &lengths, None);
    for document_mask in [false, true] {
        let config = LoaderConfig { document_mask, ..config(Packing::Stream, 20, 4) };
        let masked = Loader::open(config, &[source("a", 1.0, &path)]).unwrap();
        let plain = Loader::open(config, &[source("a", 1.0, &bare)]).unwrap();
        assert_ne!(masked.fingerprint(), plain.fingerprint());
        for step in 0..20 {
            let (m, p) = (masked.batch(step, 0..4).unwrap(), plain.batch(step, 0..4).unwrap());
            assert_eq!((&m.ids, &m.doc_start), (&p.ids, &p.doc_start));
            for (m, p) in m.labels.iter().zip(&p.labels) {
                assert_eq!(*m, if *p % 3 == 0 { *p } else { -1 });
            }
        }
        let set = |path: &Path| ValidationSet::open(&[path.to_path_buf()], 20, document_mask, 10_000_000).unwrap();
        let labels = |set: ValidationSet| set.batch(0..set.num_windows()).unwrap().labels;
        let expected: Vec<i64> = labels(set(&bare)).into_iter().map(|l| if l % 3 == 0 { l } else { -1 }).collect();
        assert_eq!(labels(set(&path)), expected);
    }
}

/// Weights that change where a run is resumed: no sample of a source comes twice, and the new shares hold from there.
#[test]
fn weights_change_at_a_resume_without_a_repeated_sample() {
    let dir = tempfile::tempdir().unwrap();
    let paths: Vec<PathBuf> = (0..3u32)
        .map(|i| shard(&dir.path().join(format!("s{i}")), 100_000 * i, &even_lengths(400, 60, u64::from(i), 16), None))
        .collect();
    let open = |weights: [f64; 3]| {
        let specs: Vec<SourceSpec> = (0..3).map(|i| source(&format!("s{i}"), weights[i], &paths[i])).collect();
        Loader::open(config(Packing::Stream, 16, 8), &specs).unwrap()
    };
    let mut seen: HashMap<u32, HashSet<u32>> = HashMap::new();
    let mut take = |loader: &Loader, steps: std::ops::Range<u64>| {
        for step in steps {
            let batch = loader.batch(step, 0..8).unwrap();
            for (row, id) in batch.ids.iter().enumerate() {
                // Every token within the first epoch is unlike any other.
                let source = batch.ids[row / 16 * 16] / 100_000;
                assert!(seen.entry(source).or_default().insert(*id), "step {step}: token {id} comes twice");
            }
        }
    };
    let mut loader = open([0.6, 0.3, 0.1]);
    take(&loader, 0..40);
    let mut state = loader.state_at(40).unwrap();
    assert_eq!(state.counts, [192, 96, 32]);
    for (weights, until, counts) in [([0.1, 0.1, 0.8], 60, [208, 112, 160]), ([0.0, 0.5, 0.5], 80, [208, 192, 240])] {
        let from = state.samples / 8;
        loader = open(weights);
        assert!(loader.restore(from, &state).unwrap(), "the change is told");
        take(&loader, from..until);
        state = serde_json::from_str(&serde_json::to_string(&loader.state_at(until).unwrap()).unwrap()).unwrap();
        assert_eq!(state.counts, counts, "{weights:?}");
        // Resumed with the same weights there is no change, and the order is that of going on.
        let again = open(weights);
        assert!(!again.restore(until, &state).unwrap());
        assert!(same(&again.batch(until, 0..8).unwrap(), &loader.batch(until, 0..8).unwrap()));
        assert!(again.state_at(from.saturating_sub(1)).is_err(), "what lies before the change is not to be had any more");
        assert_eq!(again.state_at(until + 7).unwrap(), loader.state_at(until + 7).unwrap());
    }
}

/// A source that may be gone through once gives each token once, and the others go on.
#[test]
fn max_epochs_are_kept() {
    let dir = tempfile::tempdir().unwrap();
    let a = shard(&dir.path().join("a"), 0, &even_lengths(50, 20, 1, 20), None);
    let b = shard(&dir.path().join("b"), 100_000, &even_lengths(50, 20, 2, 20), None);
    for packing in [Packing::Stream, Packing::BestFit] {
        let limited = |name: &str, path: &Path, epochs: f64| SourceSpec { max_epochs: Some(epochs), ..source(name, 0.5, path) };
        let loader = Loader::open(config(packing, 20, 4), &[limited("a", &a, 1.0), source("b", 0.5, &b)]).unwrap();
        assert_eq!(loader.ends_at().unwrap(), None);
        let mut seen = HashSet::new();
        for step in 0..100 {
            let batch = loader.batch(step, 0..4).unwrap();
            for (row, id) in batch.ids.iter().enumerate() {
                let real = batch.valid.is_empty() || batch.valid[row];
                assert!(*id >= 100_000 || !real || seen.insert(*id), "{packing:?}: token {id} comes twice");
            }
        }
        let epochs = loader.epochs_at(100).unwrap();
        assert!(epochs[0] <= 1.0 && epochs[0] > 0.9 && epochs[1] > 10.0, "{packing:?}: {epochs:?}");

        let loader = Loader::open(config(packing, 20, 4), &[limited("a", &a, 1.0), limited("b", &b, 2.5)]).unwrap();
        let end = loader.ends_at().unwrap().unwrap();
        assert!(loader.batch(end / 4 - 1, 0..4).is_ok());
        let error = format!("{:#}", loader.batch(end.div_ceil(4), 0..4).unwrap_err());
        assert!(error.contains("max_epochs"), "{error}");
    }
}

/// An index that is too large to be looked through is opened without it, and each document is looked at when it is used.
#[test]
fn a_large_index_is_looked_at_where_it_is_used() {
    let dir = tempfile::tempdir().unwrap();
    // 20 bytes a document: more than 64 MiB.
    let documents = 3_400_000u32;
    let prefix = dir.path().join("large");
    let mut writer = ShardWriter::create(&prefix, TokenType::U16, false).unwrap();
    for d in 0..documents {
        writer.push(&[d % 60_000, 1][..1 + (d % 2) as usize]).unwrap();
    }
    writer.publish(|_| Ok("{}".into())).unwrap();
    fs::remove_file(dir.path().join("large.json")).unwrap();
    let dataset = Dataset::open(std::slice::from_ref(&prefix)).unwrap();
    assert!(dataset.shards()[0].is_large());
    for d in [0, 1, 1_700_001, u64::from(documents) - 1] {
        // One and two tokens in turn.
        let start = d / 2 * 3 + d % 2;
        assert_eq!(dataset.document(d).unwrap(), (start, start + 1 + d % 2));
    }
    let every = dataset.starts_of_every(1000).unwrap();
    assert_eq!((every.len(), every[1], every[3400]), (3401, 1500, u64::from(documents) / 2 * 3));
    let mut sample = Sample::default();
    let source = Source::new(dataset, 3, 64, 60_000).unwrap();
    source.read(40_000, &mut sample).unwrap();
    assert_eq!(sample.ids.len(), 65);
    let fingerprint = source.dataset().fingerprint();
    drop(source);

    // A place in the middle that is wrong does no harm until its document is used.
    let idx = dir.path().join("large.idx");
    let mut bytes = fs::read(&idx).unwrap();
    let at = 34 + 4 * documents as usize + 8 * 1_700_001;
    bytes[at] ^= 4;
    fs::write(&idx, &bytes).unwrap();
    let dataset = Dataset::open(&[prefix]).unwrap();
    assert!(dataset.document(1_700_003).is_ok());
    for d in [1_700_000, 1_700_001] {
        let error = format!("{:#}", dataset.document(d).unwrap_err());
        assert!(error.contains("large.bin is damaged") && error.contains(&d.to_string()), "{error}");
    }
    assert_eq!(fingerprint.len(), 64);
}
