//! Token shards and the training order.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};

use zaya::data::dataset::Dataset;
use zaya::data::shard::{Shard, TokenType};
use zaya::data::writer::ShardWriter;
use zaya::data::{Loader, LoaderConfig, SourceSpec, ValidationSet};
use zaya::recipe::Packing;
use zaya::tensor::backend::Batch;

/// A shard of documents of these lengths. Every token is unlike any other: `first`, `first + 1`, ...
fn numbered(prefix: &Path, first: u32, lengths: &[u32]) -> PathBuf {
    let mut writer = ShardWriter::create(prefix, TokenType::I32, true).unwrap();
    let mut next = first;
    for len in lengths {
        writer.push(&(next..next + len).collect::<Vec<_>>()).unwrap();
        next += len;
    }
    writer.publish(|_| Ok(String::new())).unwrap();
    fs::remove_file(format!("{}.json", prefix.display())).unwrap();
    prefix.to_path_buf()
}

const SEVENTEEN: [u32; 17] = [9, 1, 14, 3, 22, 6, 6, 2, 31, 5, 8, 1, 17, 4, 12, 7, 20];

fn config(seq_len: usize, batch_sequences: usize) -> LoaderConfig {
    LoaderConfig {
        seed: 1234,
        packing: Packing::Stream,
        seq_len,
        batch_sequences,
        document_mask: true,
        eod_mask_loss: false,
        vocab_size: 1_000_000,
    }
}

fn source(name: &str, weight: f64, path: PathBuf) -> SourceSpec {
    SourceSpec { name: name.into(), weight, paths: vec![path], first_sample: 0, max_epochs: None }
}

fn same(a: &Batch, b: &Batch) -> bool {
    (a.batch, a.seq, &a.ids, &a.labels, &a.doc_start, &a.valid) == (b.batch, b.seq, &b.ids, &b.labels, &b.doc_start, &b.valid)
}

#[test]
fn any_cut_of_the_batch_gives_the_same_sequences() {
    let dir = tempfile::tempdir().unwrap();
    let specs = [
        source("a", 0.7, numbered(&dir.path().join("a"), 0, &SEVENTEEN)),
        source("b", 0.3, numbered(&dir.path().join("b"), 5000, &[50, 3])),
    ];
    let loader = Loader::open(config(10, 12), &specs).unwrap();
    for step in [0, 1, 7, 100] {
        let whole = loader.batch(step, 0..12).unwrap();
        assert_eq!((whole.ids.len(), whole.labels.len(), whole.doc_start.len(), whole.valid.len()), (120, 120, 120, 0));
        for micro in [1, 2, 3, 4, 5, 6, 12] {
            let mut joined = Batch { batch: 12, seq: 10, ..Batch::default() };
            for start in (0..12).step_by(micro) {
                let part = loader.batch(step, start..(start + micro).min(12)).unwrap();
                joined.ids.extend(part.ids);
                joined.labels.extend(part.labels);
                joined.doc_start.extend(part.doc_start);
            }
            assert!(same(&joined, &whole), "step {step}, micro-batch {micro}");
        }
    }
    assert!(loader.batch(0, 10..13).is_err());
}

#[test]
fn stopping_anywhere_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = numbered(&dir.path().join("a"), 0, &SEVENTEEN);
    let other = numbered(&dir.path().join("b"), 5000, &[11, 2, 7]);
    let specs = [source("a", 3.0, path), source("b", 1.0, other)];
    let open = || Loader::open(config(8, 3), &specs).unwrap();
    // Three epochs of the larger source and a little more.
    let steps = 3 * SEVENTEEN.iter().sum::<u32>() as u64 / 8 * 4 / 3 / 3 + 2;
    let straight = open();
    let all: Vec<Batch> = (0..steps).map(|step| straight.batch(step, 0..3).unwrap()).collect();
    assert!(straight.epochs_at(steps).unwrap()[0] > 3.0);
    let other_order: Vec<u64> = (0..steps).rev().collect();
    let random_access = open();
    for step in other_order {
        assert!(same(&random_access.batch(step, 0..3).unwrap(), &all[step as usize]), "step {step} out of order");
    }
    for stop in 0..steps {
        // Through the state in a checkpoint, which travels as JSON.
        let state = serde_json::to_string(&straight.state_at(stop).unwrap()).unwrap();
        let resumed = open();
        resumed.restore(stop, &serde_json::from_str(&state).unwrap()).unwrap();
        for step in stop..(stop + 3).min(steps) {
            assert!(same(&resumed.batch(step, 0..3).unwrap(), &all[step as usize]), "stopped at {stop}, step {step}");
        }
        // And a second time from the resumed one.
        let again = open();
        again.restore(stop, &resumed.state_at(stop).unwrap()).unwrap();
        assert!(same(&again.batch(stop, 0..3).unwrap(), &resumed.batch(stop, 0..3).unwrap()));
    }
}

#[test]
fn an_epoch_shows_every_token_once_and_no_sample_twice() {
    let dir = tempfile::tempdir().unwrap();
    let total = SEVENTEEN.iter().sum::<u32>();
    assert_eq!(total, 168);
    let specs = [source("a", 1.0, numbered(&dir.path().join("a"), 0, &SEVENTEEN))];
    // 168 = 3 * 56: an epoch is exactly 3 windows of 56, or 21 of 8.
    for (seq_len, per_epoch) in [(8, 21), (56, 3)] {
        let loader = Loader::open(config(seq_len, 1), &specs).unwrap();
        let mut orders = HashSet::new();
        for epoch in 0..4 {
            let mut seen = Vec::new();
            for step in epoch * per_epoch..(epoch + 1) * per_epoch {
                seen.extend(loader.batch(step, 0..1).unwrap().ids);
            }
            orders.insert(seen.clone());
            seen.sort_unstable();
            assert_eq!(seen, (0..total).collect::<Vec<_>>(), "L = {seq_len}, epoch {epoch}");
        }
        assert_eq!(orders.len(), 4, "epochs have orders of their own");
    }
}

#[test]
fn labels_and_document_starts() {
    let dir = tempfile::tempdir().unwrap();
    let lengths = [4, 3, 1, 6];
    let path = numbered(&dir.path().join("a"), 100, &lengths);
    let begins: HashSet<u32> = [100, 104, 107, 108].into();
    let ends: HashSet<u32> = [103, 106, 107, 113].into();
    let masked = Loader::open(config(5, 4), &[source("a", 1.0, path.clone())]).unwrap();
    let plain = Loader::open(LoaderConfig { document_mask: false, ..config(5, 4) }, &[source("a", 1.0, path)]).unwrap();
    for step in 0..30 {
        let (m, p) = (masked.batch(step, 0..4).unwrap(), plain.batch(step, 0..4).unwrap());
        assert_eq!(m.ids, p.ids);
        assert!(p.doc_start.is_empty() && p.labels.iter().all(|l| *l >= 0));
        for row in 0..20 {
            let (id, position) = (m.ids[row], row % 5);
            let ends_here = ends.contains(&id);
            assert_eq!(m.labels[row], if ends_here { -1 } else { i64::from(id) + 1 }, "step {step}, row {row}");
            if !ends_here {
                assert_eq!(p.labels[row], m.labels[row]);
            }
            if position < 4 {
                assert_eq!(p.labels[row], i64::from(m.ids[row + 1]), "labels are the next ids");
            }
            let start = (0..=position).rev().find(|s| begins.contains(&m.ids[row - position + s])).unwrap_or(0);
            assert_eq!(m.doc_start[row] as usize, start, "step {step}, row {row}: {:?}", m.ids);
        }
    }
}

#[test]
fn mixtures_have_exact_counts() {
    let dir = tempfile::tempdir().unwrap();
    let specs: Vec<SourceSpec> = [("a", 0.999), ("b", 0.001), ("off", 0.0)]
        .iter()
        .enumerate()
        .map(|(i, (name, weight))| source(name, *weight, numbered(&dir.path().join(name), 1000 * i as u32, &[30, 2])))
        .collect();
    let loader = Loader::open(config(8, 4), &specs).unwrap();
    let mut counts = [0u64; 3];
    for step in 0..1000 {
        for id in loader.samples(step).unwrap() {
            // Each source counts its own samples through, with no gap.
            assert_eq!(id.number, counts[id.source]);
            counts[id.source] += 1;
        }
        assert_eq!(loader.state_at(step + 1).unwrap().counts, counts);
        let n = (step + 1) as f64 * 4.0;
        assert!((counts[0] as f64 - 0.999 * n).abs() <= 1.0 && (counts[1] as f64 - 0.001 * n).abs() <= 1.0);
    }
    assert_eq!(counts, [3996, 4, 0]);
    // The ids say the same.
    let batch = loader.batch(3, 0..4).unwrap();
    for (row, id) in loader.samples(3).unwrap().iter().enumerate() {
        assert_eq!(batch.ids[row * 8] / 1000, id.source as u32);
    }
}

#[test]
fn a_later_stage_goes_on_where_the_earlier_one_stopped() {
    let dir = tempfile::tempdir().unwrap();
    let path = numbered(&dir.path().join("a"), 0, &SEVENTEEN);
    let one = Loader::open(config(8, 2), &[source("a", 1.0, path.clone())]).unwrap();
    let two = Loader::open(config(8, 2), &[SourceSpec { first_sample: 10, ..source("a", 1.0, path) }]).unwrap();
    assert!(same(&two.batch(0, 0..2).unwrap(), &one.batch(5, 0..2).unwrap()));
}

#[test]
fn tokens_beyond_the_model_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let specs = [source("web", 1.0, numbered(&dir.path().join("web"), 0, &[40]))];
    let loader = Loader::open(LoaderConfig { vocab_size: 40, ..config(8, 1) }, &specs).unwrap();
    (0..20).for_each(|step| drop(loader.batch(step, 0..1).unwrap()));
    let loader = Loader::open(LoaderConfig { vocab_size: 39, ..config(8, 1) }, &specs).unwrap();
    let error = (0..20).find_map(|step| loader.batch(step, 0..1).err()).unwrap();
    let text = format!("{error:#}");
    assert!(text.contains("data source `web`") && text.contains("web.bin, token 39") && text.contains("id 39"), "{text}");
    let validation = ValidationSet::open(&[dir.path().join("web")], 8, true, 39).unwrap();
    assert!(validation.batch(4..5).is_err());
}

#[test]
fn impossible_loaders_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let good = source("good", 1.0, numbered(&dir.path().join("good"), 0, &[5]));
    let empty = source("empty", 1.0, numbered(&dir.path().join("empty"), 0, &[]));
    let text = |specs: &[SourceSpec]| format!("{:#}", Loader::open(config(8, 2), specs).unwrap_err());
    assert!(text(&[good.clone(), empty.clone()]).contains("data source `empty`"));
    assert!(text(&[empty]).contains("no tokens"));
    assert!(text(&[source("gone", 1.0, dir.path().join("gone"))]).contains("gone.idx: there is no such file"));
    assert!(text(&[SourceSpec { weight: -1.0, ..good.clone() }]).contains("weight -1"));
    assert!(text(&[SourceSpec { weight: 0.0, ..good.clone() }]).contains("sum to 0"));
    assert!(text(&[]).contains("sum to 0"));
    assert!(Loader::open(config(0, 2), std::slice::from_ref(&good)).is_err());
    assert!(Loader::open(config(8, 0), std::slice::from_ref(&good)).is_err());
    let loader = Loader::open(config(8, 2), &[good]).unwrap();
    let mut state = loader.state_at(5).unwrap();
    assert!(loader.restore(4, &state).is_err());
    state.counts.push(0);
    assert!(loader.restore(5, &state).is_err());
}

#[test]
fn the_fingerprint_follows_the_data_not_the_path() {
    let dir = tempfile::tempdir().unwrap();
    let of = |paths: &[PathBuf]| {
        let spec = SourceSpec { paths: paths.to_vec(), ..source("a", 1.0, PathBuf::new()) };
        Loader::open(config(8, 2), &[spec]).unwrap().fingerprint()
    };
    let a = numbered(&dir.path().join("a"), 0, &[5, 6]);
    let copy = numbered(&dir.path().join("elsewhere"), 0, &[5, 6]);
    let other = numbered(&dir.path().join("other"), 0, &[6, 5]);
    assert_eq!(of(std::slice::from_ref(&a)), of(&[copy]));
    assert_ne!(of(std::slice::from_ref(&a)), of(std::slice::from_ref(&other)));
    assert_ne!(of(&[a.clone(), other.clone()]), of(&[other, a]));
}

#[test]
fn shards_without_documents_may_stand_among_others() {
    let dir = tempfile::tempdir().unwrap();
    let paths: Vec<PathBuf> = [(0, &[][..]), (0, &[3, 2]), (5, &[]), (5, &[]), (5, &[4]), (9, &[])]
        .iter()
        .enumerate()
        .map(|(i, (first, lengths))| numbered(&dir.path().join(format!("s{i}")), *first, lengths))
        .collect();
    assert_eq!(fs::metadata(dir.path().join("s0.bin")).unwrap().len(), 0);
    let dataset = Dataset::open(&paths).unwrap();
    assert_eq!((dataset.num_documents(), dataset.num_tokens()), (3, 9));
    let starts: Vec<u64> = (0..=3).map(|d| dataset.document_start(d).unwrap()).collect();
    assert_eq!(starts, [0, 3, 5, 9]);
    let of_tokens: Vec<u64> = (0..9).map(|t| dataset.document_of_token(t).unwrap()).collect();
    assert_eq!(of_tokens, [0, 0, 0, 1, 1, 2, 2, 2, 2]);
    let mut ids = Vec::new();
    dataset.read(0, 9, 100, &mut ids).unwrap();
    assert_eq!(ids, (0..9).collect::<Vec<_>>());
    let specs = [SourceSpec { paths, ..source("a", 1.0, PathBuf::new()) }];
    let loader = Loader::open(config(9, 1), &specs).unwrap();
    let mut ids = loader.batch(0, 0..1).unwrap().ids;
    ids.sort_unstable();
    assert_eq!(ids, (0..9).collect::<Vec<_>>());
}

/// An index with several sequences a document, as Megatron-LM may write, and the parts of it that tests change.
fn index(code: u8, lengths: &[i32], item: i64, borders: &[i64]) -> Vec<u8> {
    let mut idx = b"MMIDIDX\0\0".to_vec();
    idx.extend(1u64.to_le_bytes());
    idx.push(code);
    idx.extend((lengths.len() as u64).to_le_bytes());
    idx.extend((borders.len() as u64).to_le_bytes());
    idx.extend(lengths.iter().flat_map(|l| l.to_le_bytes()));
    let mut place = 0i64;
    for len in lengths {
        idx.extend(place.to_le_bytes());
        place += i64::from(*len) * item;
    }
    idx.extend(borders.iter().flat_map(|b| b.to_le_bytes()));
    idx
}

#[test]
fn documents_of_several_sequences_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let prefix = dir.path().join("m.v2");
    fs::write(dir.path().join("m.v2.idx"), index(8, &[2, 3, 1, 4], 2, &[0, 2, 2, 4])).unwrap();
    fs::write(dir.path().join("m.v2.bin"), (0..10u16).flat_map(u16::to_le_bytes).collect::<Vec<_>>()).unwrap();
    for path in [prefix.clone(), dir.path().join("m.v2.bin"), dir.path().join("m.v2.idx")] {
        let shard = Shard::open(&path).unwrap();
        shard.check_index().unwrap();
        assert_eq!((shard.num_documents(), shard.num_tokens(), shard.token_type()), (3, 10, TokenType::U16));
        let starts: Vec<u64> = (0..=3).map(|d| shard.document_start(d).unwrap()).collect();
        assert_eq!(starts, [0, 5, 5, 10]);
    }
    // An empty document does no harm.
    let loader = Loader::open(config(5, 2), &[source("m", 1.0, prefix)]).unwrap();
    let mut ids = loader.batch(0, 0..2).unwrap().ids;
    ids.sort_unstable();
    assert_eq!(ids, (0..10).collect::<Vec<_>>());
}

#[test]
fn damaged_shards_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let good = index(8, &[2, 3], 2, &[0, 1, 2]);
    let bin = vec![1u8; 10];
    let open = |idx: &[u8], bin: &[u8]| {
        fs::write(dir.path().join("x.idx"), idx).unwrap();
        fs::write(dir.path().join("x.bin"), bin).unwrap();
        format!("{:#}", Shard::open(&dir.path().join("x")).map(|_| ()).unwrap_err())
    };
    let changed = |at: usize, bytes: &[u8]| {
        let mut idx = good.clone();
        idx[at..at + bytes.len()].copy_from_slice(bytes);
        idx
    };
    fs::write(dir.path().join("x.idx"), &good).unwrap();
    fs::write(dir.path().join("x.bin"), &bin).unwrap();
    assert!(Shard::open(&dir.path().join("x")).is_ok());

    let text = open(&good, &bin[..8]);
    assert!(text.contains("x.bin has 8 bytes, but the index speaks of 10") && text.contains("cut"), "{text}");
    assert!(open(&good, &[1; 12]).contains("do not belong together"));
    assert!(open(&good[..20], &bin).contains("less than a header"));
    assert!(open(&good[..good.len() - 1], &bin).contains("was cut"));
    assert!(open(b"", &bin).contains("0 bytes"));
    assert!(open(&changed(0, b"TMP"), &bin).contains("magic"));
    assert!(open(&changed(9, &[2]), &bin).contains("version is 2"));
    assert!(open(&changed(17, &[5]), &bin).contains("int64; zaya reads uint16 and int32"));
    assert!(open(&changed(17, &[77]), &bin).contains("type code is 77"));
    assert!(open(&changed(18, &[0xff; 8]), &bin).contains("was cut or is damaged"));
    assert!(open(&changed(26, &[0; 8]), &bin).contains("was cut or is damaged"));
    assert!(open(&[&good[..], &[0, 0]].concat(), &bin).contains("multimodal"));
    // The last sequence's length, and the last document border.
    assert!(open(&changed(38, &[0xff; 4]), &bin).contains("impossible length"));
    assert!(open(&changed(good.len() - 8, &[9]), &bin).contains("0 to 9 instead of 0 to 2"));

    // Damage in the middle is found when it is met, without a panic.
    let idx = changed(34 + 8 + 8, &[0xf0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f]);
    let text = open(&idx, &bin);
    assert!(text.contains("impossible") || text.contains("index speaks of"), "{text}");
    let three = index(8, &[2, 2, 1], 2, &[0, 1, 2, 3]);
    let mut damaged = three.clone();
    damaged[34 + 12 + 8..34 + 12 + 16].copy_from_slice(&3i64.to_le_bytes());
    fs::write(dir.path().join("x.idx"), &damaged).unwrap();
    let shard = Shard::open(&dir.path().join("x")).unwrap();
    assert!(shard.check_index().is_err());
    let text = format!("{:#}", shard.document_start(1).unwrap_err());
    assert!(text.contains("x.bin is damaged") && text.contains("document 1"), "{text}");
    drop(shard);
    let loader = Loader::open(config(5, 1), &[source("x", 1.0, dir.path().join("x"))]);
    assert!(loader.and_then(|l| l.batch(0, 0..1)).is_err());
}

#[test]
fn places_beyond_four_gigabytes() {
    let dir = tempfile::tempdir().unwrap();
    let lengths = [600_000_000; 5];
    fs::write(dir.path().join("big.idx"), index(8, &lengths, 2, &[0, 1, 2, 3, 4, 5])).unwrap();
    // A sparse file: it takes no space.
    fs::File::create(dir.path().join("big.bin")).unwrap().set_len(6_000_000_000).unwrap();
    let dataset = Dataset::open(&[dir.path().join("big")]).unwrap();
    assert_eq!((dataset.num_tokens(), dataset.document(4).unwrap()), (3_000_000_000, (2_400_000_000, 3_000_000_000)));
    let mut ids = Vec::new();
    dataset.read(2_999_999_990, 3_000_000_000, 1, &mut ids).unwrap();
    assert_eq!(ids, [0; 10]);
    let loader = Loader::open(config(4096, 2), &[source("big", 1.0, dir.path().join("big"))]).unwrap();
    assert_eq!(loader.batch(100_000, 0..2).unwrap().ids.len(), 8192);
}

#[test]
fn validation_predicts_every_token_once() {
    let dir = tempfile::tempdir().unwrap();
    let lengths = [5, 1, 9, 4];
    let paths = [numbered(&dir.path().join("a"), 0, &lengths[..2]), numbered(&dir.path().join("b"), 6, &lengths[2..])];
    let firsts: HashSet<i64> = [0, 5, 6, 15].into();
    for seq_len in [1, 3, 6, 9, 18, 50] {
        for document_mask in [false, true] {
            let set = ValidationSet::open(&paths, seq_len, document_mask, 100).unwrap();
            assert_eq!(set.num_windows(), 18u64.div_ceil(seq_len as u64));
            let mut predicted: HashMap<i64, u32> = HashMap::new();
            for w in (0..set.num_windows()).step_by(2) {
                let batch = set.batch(w..(w + 2).min(set.num_windows())).unwrap();
                for row in 0..batch.tokens() {
                    let valid = batch.valid.get(row).copied().unwrap_or(true);
                    let label = batch.labels[row];
                    if label >= 0 {
                        assert!(valid && label == i64::from(batch.ids[row]) + 1);
                        *predicted.entry(label).or_default() += 1;
                    }
                    if document_mask && valid {
                        let start = batch.doc_start[row] as usize;
                        let position = row % seq_len;
                        let first = batch.ids[row - position + start];
                        assert!(start <= position && (start == 0 || firsts.contains(&i64::from(first))));
                        assert!((start + 1..=position).all(|p| !firsts.contains(&i64::from(batch.ids[row - position + p]))));
                    }
                }
            }
            let expected: HashMap<i64, u32> = (1..19).filter(|t| !document_mask || !firsts.contains(t)).map(|t| (t, 1)).collect();
            assert_eq!(predicted, expected, "L = {seq_len}, mask {document_mask}");
        }
    }
    let set = ValidationSet::open(&paths, 8, false, 100).unwrap();
    assert_eq!(set.bytes_per_token(), None, "no sidecar, no bytes");
    assert!(set.batch(2..4).is_err());
    let one = numbered(&dir.path().join("one"), 0, &[1]);
    assert!(ValidationSet::open(&[one], 8, false, 100).is_err());
}

#[test]
fn a_million_documents_open_at_once_and_seek_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let prefix = dir.path().join("many");
    let mut writer = ShardWriter::create(&prefix, TokenType::U16, false).unwrap();
    // More than 2^20, so that documents are shuffled in blocks.
    let documents = 1_100_000u32;
    for d in 0..documents {
        writer.push(&[d % 60_000, d / 60_000, 7][..1 + (d % 3) as usize]).unwrap();
    }
    writer.publish(|_| Ok(String::new())).unwrap();
    fs::remove_file(dir.path().join("many.json")).unwrap();
    let loader = Loader::open(config(64, 8), &[source("many", 1.0, prefix)]).unwrap();
    let begin = std::time::Instant::now();
    let far = loader.batch(4_000_000, 0..8).unwrap();
    assert!(begin.elapsed().as_secs_f64() < 10.0, "a seek took {:?}", begin.elapsed());
    assert_eq!(far.ids.len(), 512);
    // Neighbours in a sequence come from all over the file.
    let firsts: Vec<i64> = far.ids.iter().map(|id| i64::from(*id)).collect();
    let close = firsts.windows(2).filter(|w| (w[1] - w[0]).abs() == 1).count();
    assert!(close < 60, "{close} of 511 neighbours are neighbours in the file");
}

/// A bit anywhere in an index is found before anything trains on it.
#[test]
fn a_damaged_index_is_refused_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let prefix = numbered(&dir.path().join("a"), 0, &SEVENTEEN);
    let idx = dir.path().join("a.idx");
    let intact = fs::read(&idx).unwrap();
    Dataset::open(std::slice::from_ref(&prefix)).unwrap();
    for at in 9..intact.len() {
        let mut bytes = intact.clone();
        bytes[at] ^= 2;
        fs::write(&idx, &bytes).unwrap();
        let refused = Dataset::open(std::slice::from_ref(&prefix));
        // Documents may be joined to their neighbours: an empty one is legal.
        let documents = intact.len() - 8 * 18;
        assert!(refused.is_err() || at >= documents, "byte {at} of {}", intact.len());
    }
}
