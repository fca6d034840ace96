//! `checkpoint.incremental`: what did not change is not written again, and no checkpoint depends on another.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use zaya::checkpoint::{self, Checkpoint, RetainPolicy, SaveOptions, Saved, step_dir};

use super::checkpoint::{objects, save_toy_with, tiny, toy_meta, toy_tensors, toy_values};

fn pooled() -> SaveOptions {
    // The embedding and its moments apart from the rest.
    SaveOptions { pool: true, groups: vec![0, 1, 1, 1, 0, 1], ..tiny() }
}

/// A step whose embedding (and its moments) is of one version, and everything else of another.
fn save(root: &Path, step: u64, embedding: u64, rest: u64) -> Saved {
    let tensors = toy_tensors();
    let mut read = |i: usize| Ok(toy_values(&tensors[i], i, if pooled().groups[i] == 0 { embedding } else { rest }));
    checkpoint::save(root, &toy_meta(step, 0), &tensors, &mut read, &pooled()).unwrap()
}

fn open(root: &Path, step: u64) -> Checkpoint {
    let c = Checkpoint::open(&root.join(step_dir(step))).unwrap();
    c.verify().unwrap();
    c
}

fn files_of(c: &Checkpoint) -> Vec<String> {
    c.manifest().files.iter().map(|f| f.blake3.clone()).collect()
}

#[test]
fn what_did_not_change_is_not_written_again() {
    let run = tempfile::tempdir().unwrap();
    let root = run.path().join("ckpt");
    let first = save(&root, 100, 1, 1);
    assert_eq!(first.reused_bytes, 0);
    let second = save(&root, 200, 1, 2);
    let (a, b) = (open(&root, 100), open(&root, 200));
    let shared: Vec<_> = b.manifest().files.iter().filter(|f| files_of(&a).contains(&f.blake3)).collect();
    assert!(shared.len() > 1 && shared.len() < b.manifest().files.len());
    assert_eq!(second.reused_bytes, shared.iter().map(|f| f.size).sum::<u64>());
    for file in &b.manifest().files {
        let meta = fs::metadata(b.dir().join(&file.name)).unwrap();
        // A name in each folder, and one in the pool.
        assert_eq!(meta.nlink(), if shared.iter().any(|s| s.name == file.name) { 3 } else { 2 }, "{}", file.name);
    }
    // The bytes are those of a save without a pool.
    let plain = run.path().join("plain");
    let tensors = toy_tensors();
    let mut read = |i: usize| Ok(toy_values(&tensors[i], i, if pooled().groups[i] == 0 { 1 } else { 2 }));
    let options = SaveOptions { pool: false, ..pooled() };
    checkpoint::save(&plain, &toy_meta(200, 0), &tensors, &mut read, &options).unwrap();
    assert_eq!(open(&plain, 200).manifest().files, b.manifest().files);
    assert!(!plain.join("objects").exists());
    // The whole state once more, and in the folder that is there already.
    assert_eq!(save(&root, 300, 1, 2).reused_bytes, second.bytes);
    assert_eq!(save(&root, 300, 1, 2).reused_bytes, second.bytes);
    assert_eq!(files_of(&open(&root, 300)), files_of(&b));
}

#[test]
fn garbage_is_what_no_valid_checkpoint_holds() {
    let run = tempfile::tempdir().unwrap();
    let root = run.path().join("ckpt");
    for (step, embedding, rest) in [(100, 1, 1), (200, 1, 2), (300, 3, 3)] {
        save(&root, step, embedding, rest);
    }
    let mut all: Vec<String> = [100, 200, 300].iter().flat_map(|s| files_of(&open(&root, *s))).collect();
    all.sort();
    all.dedup();
    assert_eq!(objects(&root), all);
    assert_eq!(checkpoint::collect_garbage(&root).unwrap(), [] as [String; 0]);
    assert_eq!(objects(&root), all, "nothing is garbage yet");
    // A file that is not the pool's stays.
    let foreign = root.join("objects").join("notes.txt");
    fs::write(&foreign, "mine").unwrap();
    checkpoint::retain(&root, &RetainPolicy { keep_last: 2, ..RetainPolicy::default() }).unwrap();
    // Step 200 loses its manifest: it is no checkpoint any more, and keeps its files all the same.
    fs::rename(root.join("step-00000200/manifest.json"), root.join("step-00000200/manifest.json.bad")).unwrap();
    checkpoint::collect_garbage(&root).unwrap();
    fs::remove_file(&foreign).unwrap();
    let mut held = files_of(&open(&root, 300));
    held.sort();
    assert_eq!(objects(&root), held);
    fs::rename(root.join("step-00000200/manifest.json.bad"), root.join("step-00000200/manifest.json")).unwrap();
    open(&root, 200);
    // The pool is only a help: without it every checkpoint is what it was.
    fs::remove_dir_all(root.join("objects")).unwrap();
    open(&root, 200);
    open(&root, 300);
    assert_eq!(save(&root, 400, 3, 3).reused_bytes, 0);
}

#[test]
fn a_damaged_object_is_not_passed_on() {
    let run = tempfile::tempdir().unwrap();
    let root = run.path().join("ckpt");
    save(&root, 100, 1, 1);
    let victim = files_of(&open(&root, 100)).into_iter().next().unwrap();
    let path = root.join("objects").join(&victim[..2]).join(format!("{victim}.safetensors"));
    let mut bytes = fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&path, bytes).unwrap();
    assert!(Checkpoint::open(&root.join("step-00000100")).unwrap().verify().is_err(), "it is the same file");
    let again = save(&root, 200, 1, 1);
    assert!(again.notes.iter().any(|n| n.contains("is of no use") && n.contains("written anew")), "{:?}", again.notes);
    assert!(again.reused_bytes > 0 && again.reused_bytes < again.bytes);
    open(&root, 200);
    // Which has put a good one in its place.
    assert_eq!(save(&root, 300, 1, 1).reused_bytes, again.bytes);
    open(&root, 300);
}

#[test]
fn a_save_that_is_tried_again_takes_what_the_first_one_wrote() {
    let run = tempfile::tempdir().unwrap();
    let root = run.path().join("ckpt");
    let tensors = toy_tensors();
    // The disk fails at the last tensor.
    let mut read = |i: usize| match i {
        5 => anyhow::bail!("the last tensor cannot be read"),
        i => Ok(toy_values(&tensors[i], i, 7)),
    };
    assert!(checkpoint::save(&root, &toy_meta(100, 7), &tensors, &mut read, &SaveOptions { pool: true, ..tiny() }).is_err());
    let again = save_toy_with(&root, 100, 7, &SaveOptions { pool: true, ..tiny() }).unwrap();
    assert!(again.reused_bytes > again.bytes / 2, "{again:?}");
    open(&root, 100);
}

#[test]
fn a_pool_that_cannot_be_used_costs_no_checkpoint() {
    let run = tempfile::tempdir().unwrap();
    let root = run.path().join("ckpt");
    fs::create_dir_all(&root).unwrap();
    // In place of the folder there is a file.
    fs::write(root.join("objects"), "").unwrap();
    let saved = save(&root, 100, 1, 1);
    assert!(saved.notes.iter().any(|n| n.contains("could not be put into the pool")), "{:?}", saved.notes);
    open(&root, 100);
    assert_eq!(checkpoint::collect_garbage(&root).unwrap(), [] as [String; 0]);
}
