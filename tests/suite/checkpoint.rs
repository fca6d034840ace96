//! Checkpoints on disk: round trips, damage of every kind, strange neighbours, retention, other readers.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::json;
use sha2::{Digest, Sha256};
use zaya::checkpoint::{self, Checkpoint, Dtype, Meta, RetainPolicy, SaveOptions, Saved, TensorInfo};
use zaya::model::params::ParamTable;
use zaya::model::presets;
use zaya::optim::balance::Rule;

/// Limits so small that tensors are cut and several files are needed.
pub fn tiny() -> SaveOptions {
    SaveOptions { max_part_bytes: 64, max_file_bytes: 160, ..SaveOptions::default() }
}

pub fn toy_tensors() -> Vec<TensorInfo> {
    vec![
        TensorInfo::f32("embed", &[13, 3]),
        TensorInfo::f32("layers.0.conv", &[4, 2, 2]),
        TensorInfo::f32("scalar", &[]),
        TensorInfo::f32("nothing", &[0, 5]),
        TensorInfo::f32("opt/embed/m", &[13, 3]),
        TensorInfo::f32("opt/layers.0.conv/mom", &[4, 2, 2]),
    ]
}

/// Data of tensor `index` in version `version` of a state: different everywhere, odd bit patterns included.
pub fn toy_values(info: &TensorInfo, index: usize, version: u64) -> Vec<f32> {
    let n: usize = info.shape.iter().product();
    let mut values: Vec<f32> = (0..n).map(|i| (i as f32 + 1.0) * 0.1 + 1000.0 * index as f32 + 1e5 * version as f32).collect();
    if let [first, second, ..] = values.as_mut_slice() {
        (*first, *second) = (-0.0, f32::MIN_POSITIVE / 8.0);
    }
    values
}

pub fn toy_meta(step: u64, version: u64) -> Meta {
    let mut meta = Meta { step, tokens_seen: step * 1000, ..Meta::new(presets::demo_6m()) };
    meta.recipe = "[run]\nseed = 1 # \"quoted\"\n".into();
    meta.loader = json!({"samples_consumed": u64::MAX - step});
    meta.set_u64("version", version);
    meta.set_f64("third", 1.0 / 3.0);
    meta
}

pub fn save_toy(root: &Path, step: u64, version: u64) -> anyhow::Result<PathBuf> {
    Ok(save_toy_with(root, step, version, &tiny())?.dir)
}

pub fn save_toy_with(root: &Path, step: u64, version: u64, options: &SaveOptions) -> anyhow::Result<Saved> {
    let tensors = toy_tensors();
    let mut read = |i: usize| Ok(toy_values(&tensors[i], i, version));
    checkpoint::save(root, &toy_meta(step, version), &tensors, &mut read, options)
}

/// Hashes of the objects in a pool, sorted.
pub fn objects(root: &Path) -> Vec<String> {
    let folders = fs::read_dir(root.join("objects")).unwrap().map(|e| e.unwrap());
    let mut out = Vec::new();
    for folder in folders {
        for file in fs::read_dir(folder.path()).unwrap() {
            let name = file.unwrap().file_name().into_string().unwrap();
            let hash = name.strip_suffix(".safetensors").unwrap().to_string();
            assert!(hash.starts_with(folder.file_name().to_str().unwrap()) && hash.len() == 64, "{name}");
            out.push(hash);
        }
    }
    out.sort();
    out
}

/// Is every tensor of this checkpoint, to the bit, that of one version?
pub fn assert_is_toy(c: &Checkpoint, version: u64) {
    c.expect(&toy_tensors()).unwrap();
    for (i, info) in toy_tensors().iter().enumerate() {
        let bits = |v: Vec<f32>| v.into_iter().map(f32::to_bits).collect::<Vec<_>>();
        assert_eq!(bits(c.read(&info.name).unwrap()), bits(toy_values(info, i, version)), "{}", info.name);
    }
}

fn newest(root: &Path) -> Option<u64> {
    checkpoint::latest_valid(root).unwrap().checkpoint.map(|c| c.meta().step)
}

fn copy_dir(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

#[test]
fn a_state_comes_back_to_the_bit() {
    let run = tempfile::tempdir().unwrap();
    let root = run.path().join("ckpt");
    let dir = save_toy(&root, 100, 1).unwrap();
    assert_eq!(dir, root.join("step-00000100"));
    let c = Checkpoint::open(&dir).unwrap();
    c.verify().unwrap();
    assert_eq!(*c.meta(), toy_meta(100, 1));
    assert_eq!(c.meta().get_f64("third").unwrap().to_bits(), (1.0f64 / 3.0).to_bits());
    assert_is_toy(&c, 1);
    assert!(c.entry("embed").unwrap().parts.len() > 1, "the test should cut this one");
    assert!(c.manifest().files.len() > 3);
    assert_eq!(fs::read_to_string(root.join("LATEST")).unwrap(), "step-00000100\n");
    // Nothing but the checkpoint, the hint and the lock is left.
    let mut names: Vec<String> = fs::read_dir(&root).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names, [".lock", "LATEST", "step-00000100"]);
    // A copy is as good as the original.
    let copy = run.path().join("elsewhere");
    copy_dir(&dir, &copy);
    let c = Checkpoint::open(&copy).unwrap();
    c.verify().unwrap();
    assert_is_toy(&c, 1);
    assert_eq!(checkpoint::locate(&copy).unwrap().checkpoint.unwrap().meta().step, 100);
    assert_eq!(checkpoint::locate(run.path()).unwrap().checkpoint.unwrap().meta().step, 100);
    assert_eq!(checkpoint::locate(&root).unwrap().checkpoint.unwrap().meta().step, 100);
}

#[test]
fn other_tensors_than_expected_are_named() {
    let run = tempfile::tempdir().unwrap();
    let c = Checkpoint::open(&save_toy(run.path(), 1, 1).unwrap()).unwrap();
    let mut wanted = toy_tensors();
    wanted[0].shape = vec![3, 13];
    wanted[1].name = "layers.0.convolution".into();
    let text = c.expect(&wanted).unwrap_err().to_string();
    for part in
        ["embed has shape [13, 3] where [3, 13] is expected", "layers.0.convolution is missing", "layers.0.conv is not expected"]
    {
        assert!(text.contains(part), "{text}");
    }
    assert!(c.read("layers.0.convolution").unwrap_err().to_string().contains("no tensor"));
    assert!(c.read_shaped("embed", &[39]).is_err());
}

#[test]
fn a_flipped_bit_anywhere_is_refused() {
    let run = tempfile::tempdir().unwrap();
    save_toy(run.path(), 1, 1).unwrap();
    let dir = save_toy(run.path(), 2, 2).unwrap();
    let files: Vec<PathBuf> = fs::read_dir(&dir).unwrap().map(|e| e.unwrap().path()).collect();
    let mut kinds = [0; 3];
    for path in &files {
        let good = fs::read(path).unwrap();
        let header = if path.extension().is_some_and(|e| e == "safetensors") {
            8 + u64::from_le_bytes(good[..8].try_into().unwrap()) as usize
        } else {
            0
        };
        // Every byte of the header, and places all over the data.
        let places = (0..header).chain((header..good.len()).step_by(7)).chain([good.len() - 1]);
        for at in places.filter(|at| *at < good.len()) {
            let mut bad = good.clone();
            bad[at] ^= 1 << (at % 8);
            fs::write(path, &bad).unwrap();
            let found = checkpoint::latest_valid(run.path()).unwrap();
            assert_eq!(found.checkpoint.unwrap().meta().step, 1, "byte {at} of {}", path.display());
            assert_eq!(found.skipped.len(), 1);
            assert!(found.skipped[0].contains("step-00000002"), "{}", found.skipped[0]);
            // A tensor with a wrong byte is refused also without verifying the whole.
            if header > 0
                && at >= header
                && let Ok(c) = Checkpoint::open(&dir)
            {
                let refused = toy_tensors().iter().filter(|t| c.read(&t.name).is_err()).count();
                assert_eq!(refused, 1);
            }
            kinds[if header == 0 { 0 } else { 1 + usize::from(at >= header) }] += 1;
        }
        fs::write(path, &good).unwrap();
    }
    assert!(kinds.iter().all(|k| *k > 10), "{kinds:?}");
    assert_eq!(newest(run.path()), Some(2));
}

#[test]
fn cut_grown_missing_and_swapped_files_are_refused() {
    let run = tempfile::tempdir().unwrap();
    save_toy(run.path(), 1, 1).unwrap();
    let dir = save_toy(run.path(), 2, 2).unwrap();
    for entry in fs::read_dir(&dir).unwrap() {
        let path = entry.unwrap().path();
        let good = fs::read(&path).unwrap();
        for bad in [&good[..0], &good[..7], &good[..good.len() - 1], &[good.as_slice(), b"\0"].concat()] {
            fs::write(&path, bad).unwrap();
            assert_eq!(newest(run.path()), Some(1), "{}", path.display());
        }
        fs::remove_file(&path).unwrap();
        assert_eq!(newest(run.path()), Some(1), "{}", path.display());
        fs::write(&path, &good).unwrap();
    }
    // A good file of another checkpoint, of the same size.
    let old = run.path().join("step-00000001");
    let name = "optimizer-00000.safetensors";
    let good = fs::read(dir.join(name)).unwrap();
    fs::copy(old.join(name), dir.join(name)).unwrap();
    assert_eq!(newest(run.path()), Some(1));
    fs::write(dir.join(name), good).unwrap();
    assert_eq!(newest(run.path()), Some(2));
    // A folder under another step's name.
    copy_dir(&old, &run.path().join("step-00000009"));
    let found = checkpoint::latest_valid(run.path()).unwrap();
    assert!(found.skipped[0].contains("its manifest is of step 1"), "{:?}", found.skipped);
    assert_eq!(found.checkpoint.unwrap().meta().step, 2);
}

#[test]
fn strange_neighbours_are_neither_selected_nor_touched() {
    let run = tempfile::tempdir().unwrap();
    let root = run.path();
    let planted = ["step-100.backup", "step-5.tmp-x", "xstep-7", "step-00000007.tmp-mine", "step-000000099"];
    let valid = save_toy(root, 1, 1).unwrap();
    for name in planted {
        copy_dir(&valid, &root.join(name));
    }
    fs::write(root.join("LATEST"), "step-100.backup\n").unwrap();
    fs::create_dir(root.join("step-00000200")).unwrap();
    fs::create_dir(root.join("step-00000300")).unwrap();
    fs::write(root.join("step-00000300/manifest.json"), "{}").unwrap();
    assert_eq!(newest(root), Some(1));

    for step in 2..=4 {
        save_toy(root, step, step).unwrap();
        checkpoint::retain(root, &RetainPolicy { keep_last: 2, ..RetainPolicy::default() }).unwrap();
    }
    // The two unfinished newer folders count for nothing: the two newest valid ones live.
    assert_eq!(checkpoint::list(root).unwrap(), [300, 200, 4, 3]);
    assert_eq!(newest(root), Some(4));
    for name in planted {
        Checkpoint::open(&root.join(name)).unwrap().verify().unwrap();
    }
}

#[test]
fn retention_keeps_what_it_promises() {
    let run = tempfile::tempdir().unwrap();
    let root = run.path();
    for step in 1..=12 {
        save_toy(root, step, step).unwrap();
    }
    fs::write(root.join("step-00000007").join(checkpoint::PIN), "").unwrap();
    let policy = RetainPolicy { keep_last: 2, keep_every: 4, protected: vec![5] };
    let done = checkpoint::retain(root, &policy).unwrap();
    assert_eq!(checkpoint::list(root).unwrap(), [12, 11, 8, 7, 5, 4]);
    assert_eq!(done.deleted, [10, 9, 6, 3, 2, 1]);
    assert!(done.notes.is_empty(), "{:?}", done.notes);
    // Again, and with a folder taken away by hand: nothing to complain about.
    fs::remove_dir_all(root.join("step-00000008")).unwrap();
    assert!(checkpoint::retain(root, &policy).unwrap().deleted.is_empty());
    // The newest has a wrong bit: it does not count, so the next two are the newest.
    let data = root.join("step-00000012/optimizer-00000.safetensors");
    let mut bytes = fs::read(&data).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&data, bytes).unwrap();
    let policy = RetainPolicy { keep_last: 1, ..RetainPolicy::default() };
    let done = checkpoint::retain(root, &policy).unwrap();
    assert_eq!(done.deleted, [5, 4]);
    assert_eq!(checkpoint::list(root).unwrap(), [12, 11, 7]);
    assert!(done.notes[0].contains("does not count step-00000012"), "{:?}", done.notes);
    assert_eq!(newest(root), Some(11));
    // keep_last = 0 still keeps one.
    checkpoint::retain(root, &RetainPolicy::default()).unwrap();
    assert_eq!(newest(root), Some(11));
    assert!(checkpoint::retain(&root.join("absent"), &policy).unwrap().deleted.is_empty());
}

#[test]
fn saving_a_step_again_replaces_it() {
    let run = tempfile::tempdir().unwrap();
    let root = run.path();
    for version in 1..=3 {
        let dir = save_toy(root, 5, version).unwrap();
        let c = Checkpoint::open(&dir).unwrap();
        c.verify().unwrap();
        assert_is_toy(&c, version);
        // Nothing of the earlier versions is left.
        assert_eq!(fs::read_dir(&dir).unwrap().count(), c.manifest().files.len() + 1);
    }
    assert_eq!(checkpoint::list(root).unwrap(), [5]);
    // Also over a folder that is no checkpoint.
    fs::create_dir(root.join("step-00000006")).unwrap();
    fs::write(root.join("step-00000006/notes.txt"), "mine").unwrap();
    save_toy(root, 6, 4).unwrap();
    assert_eq!(newest(root), Some(6));
    assert!(root.join("step-00000006/notes.txt").exists());
}

#[test]
fn what_cannot_be_saved_leaves_the_old_ones_alone() {
    let run = tempfile::tempdir().unwrap();
    let root = run.path();
    save_toy(root, 1, 1).unwrap();
    // More than any disk holds: refused before anything is written.
    let huge = [TensorInfo::f32("huge", &[1 << 44])];
    let error = checkpoint::save(root, &toy_meta(2, 2), &huge, &mut |_| panic!("not read"), &tiny()).unwrap_err();
    assert!(format!("{error:#}").contains("not enough space"), "{error:#}");
    // The data cannot be read, or has another size than its shape.
    let tensors = toy_tensors();
    let mut read = |i: usize| if i == 4 { anyhow::bail!("device lost") } else { Ok(toy_values(&tensors[i], i, 2)) };
    let error = checkpoint::save(root, &toy_meta(2, 2), &tensors, &mut read, &tiny()).unwrap_err();
    assert!(format!("{error:#}").contains("opt/embed/m") && format!("{error:#}").contains("device lost"), "{error:#}");
    let error = checkpoint::save(root, &toy_meta(2, 2), &tensors, &mut |_| Ok(vec![0.0]), &tiny()).unwrap_err();
    assert!(format!("{error:#}").contains("embed has 1 numbers"), "{error:#}");
    // Another process is saving.
    let lock = fs::File::create(root.join(".lock")).unwrap();
    lock.lock().unwrap();
    let error = save_toy(root, 2, 2).unwrap_err();
    assert!(format!("{error:#}").contains("another process is saving"), "{error:#}");
    drop(lock);
    assert_eq!(checkpoint::list(root).unwrap(), [1]);
    assert_eq!(fs::read_dir(root).unwrap().count(), 3);
    // The folder of checkpoints is a file.
    let file = run.path().join("file");
    fs::write(&file, "").unwrap();
    assert!(save_toy(&file, 2, 2).is_err());
    // The folder vanished: it is made anew.
    let gone = root.join("gone/ckpt");
    assert_eq!(newest(&gone), None);
    save_toy(&gone, 2, 2).unwrap();
    assert_eq!(newest(&gone), Some(2));
}

#[test]
fn a_whole_training_state_of_a_real_model() {
    let mut cfg = presets::demo_6m();
    cfg.vocab_size = 64;
    cfg.hidden_size = 16;
    cfg.expert_width = 8;
    cfg.num_experts = 11;
    let table = ParamTable::new(&cfg);
    let tensors = checkpoint::training_tensors(&table, &Rule::default());
    for name in [
        "embed",
        "opt/embed/v",
        "opt/layers.0.attn.q/mom",
        "opt/layers.3.router.balancing_biases/m",
        "layers.1.experts.10.gate_up",
    ] {
        assert!(tensors.iter().any(|t| t.name == name), "{name}");
    }
    assert!(!tensors.iter().any(|t| t.name == "opt/layers.0.attn.q/m"));
    let run = tempfile::tempdir().unwrap();
    let meta = Meta { step: 3, ..Meta::new(cfg) };
    let values = |i: usize| vec![i as f32 + 0.5; tensors[i].shape.iter().product()];
    let saved = checkpoint::save(run.path(), &meta, &tensors, &mut |i| Ok(values(i)), &SaveOptions::default()).unwrap();
    let c = checkpoint::latest_valid(run.path()).unwrap().checkpoint.unwrap();
    c.expect(&tensors).unwrap();
    assert_eq!(c.manifest().files.len(), 2, "weights and optimizer state");
    assert_eq!(saved.bytes, c.manifest().total_bytes());
    for (i, t) in tensors.iter().enumerate() {
        assert_eq!(c.read_shaped(&t.name, &t.shape).unwrap(), values(i));
    }
    // candle, as any other reader, opens the files.
    let map = candle_core::safetensors::load(saved.dir.join("weights-00000.safetensors"), &candle_core::Device::Cpu).unwrap();
    assert_eq!(map["layers.1.experts.10.gate_up"].dims(), [16, 16]);
}

#[test]
fn bf16_weights_are_rounded_to_nearest() {
    let run = tempfile::tempdir().unwrap();
    let tensors = [TensorInfo { dtype: Dtype::BF16, ..TensorInfo::f32("a", &[5]) }, TensorInfo::f32("b", &[1])];
    let values = [vec![1.0, 1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, -3.25, 1e30], vec![0.1]];
    checkpoint::save(run.path(), &toy_meta(1, 1), &tensors, &mut |i| Ok(values[i].clone()), &tiny()).unwrap();
    let c = checkpoint::latest_valid(run.path()).unwrap().checkpoint.unwrap();
    let a = c.read("a").unwrap();
    // 1 + 1/256 lies between two bf16 numbers and goes to the even one below, 1 + 3/256 to the even one above.
    assert_eq!(a[..4], [1.0, 1.0, 1.0 + 4.0 / 256.0, -3.25]);
    assert!((a[4] / 1e30 - 1.0).abs() < 1.0 / 256.0);
    assert_eq!(c.read("b").unwrap(), [0.1]);
}

/// The reader that `docs/CHECKPOINT.md` shows: safetensors and numpy, no zaya. Needs them in `python3` (or in the
/// interpreter that `ZAYA_TEST_PYTHON` names).
#[test]
fn python_reads_it() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/python/read_checkpoint.py");
    let doc = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/CHECKPOINT.md")).unwrap();
    assert!(doc.contains(fs::read_to_string(&script).unwrap().trim()), "docs/CHECKPOINT.md shows another script");

    let python = std::env::var("ZAYA_TEST_PYTHON").unwrap_or_else(|_| "python3".into());
    let ready = std::process::Command::new(&python).args(["-c", "import numpy, safetensors"]).output();
    if !ready.is_ok_and(|o| o.status.success()) {
        eprintln!("SKIPPED: {python} with numpy and safetensors is not here");
        return;
    }
    let run = tempfile::tempdir().unwrap();
    let dir = save_toy(run.path(), 5, 1).unwrap();
    let out = std::process::Command::new(&python).arg(&script).arg(&dir).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let mut want = "step 5\n".to_string();
    for (i, t) in toy_tensors().iter().enumerate() {
        let bytes: Vec<u8> = toy_values(t, i, 1).iter().flat_map(|x| x.to_le_bytes()).collect();
        let hash: String = Sha256::digest(&bytes).iter().map(|b| format!("{b:02x}")).collect();
        want += &format!("{} {hash}\n", t.name);
    }
    assert_eq!(String::from_utf8(out.stdout).unwrap(), want);
}
