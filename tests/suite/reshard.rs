//! `zaya reshard` on checkpoints.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Output;

use zaya::checkpoint::{self, Checkpoint, Contents, Dtype, Meta, SaveOptions};
use zaya::hf;
use zaya::model::params::ParamTable;
use zaya::model::presets;
use zaya::optim::balance::Rule;

fn zaya(args: &[&str]) -> Output {
    crate::program::zaya().arg("reshard").args(args).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A run directory with two checkpoints of a small model.
fn run_dir(run: &Path) -> Vec<checkpoint::TensorInfo> {
    let mut cfg = presets::demo_6m();
    (cfg.vocab_size, cfg.hidden_size, cfg.expert_width, cfg.num_experts) = (32, 8, 4, 2);
    let tensors = checkpoint::training_tensors(&ParamTable::new(&cfg), &Rule::default());
    for step in [10, 20] {
        let meta = Meta { step, tokens_seen: step * 64, ..Meta::new(cfg.clone()) };
        let mut read = |i: usize| Ok((0..tensors[i].shape.iter().product()).map(|j| value(step, i, j)).collect());
        checkpoint::save(&run.join("ckpt"), &meta, &tensors, &mut read, &SaveOptions::default()).unwrap();
    }
    tensors
}

fn value(step: u64, i: usize, j: usize) -> f32 {
    step as f32 + i as f32 * 0.1 + j as f32 * 0.001
}

fn snapshot(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut out = BTreeMap::new();
    let mut folders = vec![dir.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                out.insert(path.display().to_string(), fs::read(&path).unwrap());
            }
        }
    }
    out
}

#[test]
fn repacks_the_newest_valid_checkpoint_and_changes_nothing() {
    let place = tempfile::tempdir().unwrap();
    let run = place.path().join("run");
    let tensors = run_dir(&run);
    let before = snapshot(&run);
    let path = |name: &str| place.path().join(name).display().to_string();

    let out = zaya(&["--from", &path("run"), "--to", "zck", "--output", &path("same")]);
    assert!(out.status.success(), "{}", text(&out.stderr));
    let c = Checkpoint::open(&place.path().join("same")).unwrap();
    c.verify().unwrap();
    c.expect(&tensors).unwrap();
    assert_eq!((c.meta().step, c.contents()), (20, Contents::Training));
    for (i, t) in tensors.iter().enumerate() {
        let want: Vec<f32> = (0..t.shape.iter().product()).map(|j| value(20, i, j)).collect();
        assert_eq!(c.read(&t.name).unwrap(), want);
    }

    let args = ["--from", &path("run/ckpt/step-00000010"), "--to", "zck", "--output", &path("small"), "--dtype", "bf16"];
    let out = zaya(&[&args[..], &["--weights-only"]].concat());
    assert!(out.status.success(), "{}", text(&out.stderr));
    let small = Checkpoint::open(&place.path().join("small")).unwrap();
    small.verify().unwrap();
    assert_eq!((small.meta().step, small.contents()), (10, Contents::Weights));
    assert!(small.tensors().iter().all(|t| !t.name.starts_with("opt/")));
    assert_eq!(small.entry("embed").unwrap().dtype, Dtype::BF16);
    assert_eq!(small.entry("layers.0.router.balancing_biases").unwrap().dtype, Dtype::F32);
    let embed = small.read("embed").unwrap();
    assert!(embed.iter().enumerate().all(|(j, x)| (x - value(10, 0, j)).abs() <= value(10, 0, j) / 256.0));
    assert_eq!(snapshot(&run), before, "the input changed");

    // Into something that is there, into the input, from nothing.
    for (from, output, why) in [
        ("run", "small", "is not empty"),
        ("run", "run/ckpt/step-00000010", "is not empty"),
        ("run", "run/new/deeper", "lies inside the input"),
        ("absent", "new", "is not a folder"),
    ] {
        let out = zaya(&["--from", &path(from), "--to", "zck", "--output", &path(output)]);
        assert_eq!(out.status.code(), Some(2), "{why}");
        assert!(text(&out.stderr).contains(why), "{}", text(&out.stderr));
    }
    assert_eq!(snapshot(&run), before, "the input changed");
    let out = zaya(&["--from", &path("run"), "--to", "zck"]);
    assert_eq!(out.status.code(), Some(2));
    assert!(text(&out.stderr).contains("--output"));
}

#[test]
fn to_hugging_face_and_back_is_bit_exact() {
    let place = tempfile::tempdir().unwrap();
    let run = place.path().join("run");
    let tensors = run_dir(&run);
    let path = |name: &str| place.path().join(name).display().to_string();
    for (from, to, output) in [
        ("run", "hf", "model"),
        ("model", "zck", "back"),
        ("model", "hf", "again"),
        ("run", "hf-legacy", "old"),
        ("old", "hf-legacy", "old-again"),
        ("old", "zck", "old-back"),
    ] {
        let out = zaya(&["--from", &path(from), "--to", to, "--output", &path(output)]);
        assert!(out.status.success(), "{from} to {output}: {}", text(&out.stderr));
    }
    let back = Checkpoint::open(&place.path().join("back")).unwrap();
    back.verify().unwrap();
    assert_eq!((back.meta().step, back.contents()), (0, Contents::Weights));
    let original = checkpoint::locate(&run).unwrap().checkpoint.unwrap();
    for t in tensors.iter().filter(|t| !checkpoint::is_optimizer(&t.name)) {
        assert_eq!(back.read(&t.name).unwrap(), original.read(&t.name).unwrap(), "{}", t.name);
    }
    assert_eq!(back.manifest().model_hash, original.manifest().model_hash);
    let old_back = Checkpoint::open(&place.path().join("old-back")).unwrap();
    for t in back.tensors() {
        assert_eq!(old_back.read(&t.name).unwrap(), back.read(&t.name).unwrap(), "{}", t.name);
    }
    for (one, other) in [("model", "again"), ("old", "old-again")] {
        let read = |name: &str| fs::read(place.path().join(name).join("model.safetensors")).unwrap();
        assert_eq!(read(one), read(other));
    }
    assert_eq!(hf::load(&place.path().join("old")).unwrap().layout, hf::Layout::Legacy);
    // bf16: half the bytes.
    let out = zaya(&["--from", &path("run"), "--to", "hf", "--output", &path("half"), "--dtype", "bf16"]);
    assert!(out.status.success() && text(&out.stdout).contains("BF16"));
    let out = zaya(&["--from", &path("run"), "--to", "hf", "--output", &path("model")]);
    assert_eq!(out.status.code(), Some(2));
}

/// Of row blocks that are read in pieces, the hash is known at the end: nothing may be visible before.
#[test]
fn a_damaged_row_block_is_refused_on_every_way_out() {
    let place = tempfile::tempdir().unwrap();
    run_dir(&place.path().join("run"));
    let path = |name: &str| place.path().join(name).display().to_string();
    let small = SaveOptions { max_part_bytes: 256, max_file_bytes: 4096, ..SaveOptions::default() };
    let options = checkpoint::repack::RepackOptions { save: small, ..Default::default() };
    let source = checkpoint::locate(&place.path().join("run")).unwrap().checkpoint.unwrap();
    checkpoint::repack::repack(&source, Path::new(&path("blocks")), &options).unwrap();
    let whole = Checkpoint::open(Path::new(&path("blocks"))).unwrap();
    // Every kind of place: the first, a middle and the last block of a tensor, its first and its last byte; another tensor's.
    let parts = |name: &str| whole.entry(name).unwrap().parts.clone();
    let embed = parts("embed");
    assert!(embed.len() > 2, "{embed:?}");
    let last = parts("final_norm");
    for part in [&embed[0], &embed[1], &embed[embed.len() - 1], &last[0]] {
        let file = Path::new(&path("blocks")).join(&part.file);
        let before = fs::read(&file).unwrap();
        for at in [part.bytes[0], part.bytes[1] - 1] {
            let mut bytes = before.clone();
            bytes[at as usize] ^= 1;
            fs::write(&file, bytes).unwrap();
            for (to, more) in [("zck", &[][..]), ("zck", &["--dtype", "bf16", "--weights-only"]), ("hf", &[]), ("hf-legacy", &[])]
            {
                let out = zaya(&[&["--from", &path("blocks"), "--to", to, "--output", &path("out")], more].concat());
                let said = text(&out.stderr);
                assert!(!out.status.success() && said.contains("is damaged: rows"), "{to} {more:?}: {said}");
                let left = fs::read_dir(place.path().join("out")).map_or(0, |entries| entries.count());
                assert_eq!(left, 0, "{to} {more:?} left files");
                // Nor a temporary folder beside it.
                let names = fs::read_dir(place.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
                assert!(names.into_iter().all(|n| ["run", "blocks", "out"].contains(&n.as_str())), "{to} {more:?}");
            }
            let out = zaya(&["diff", &path("blocks"), &path("run")]);
            assert!(text(&out.stderr).contains("is damaged: rows"), "{}", text(&out.stderr));
        }
        fs::write(&file, before).unwrap();
    }
    assert_eq!(zaya(&["diff", &path("blocks"), &path("run")]).status.code(), Some(0));
}

#[test]
fn lists_inspects_and_verifies() {
    let place = tempfile::tempdir().unwrap();
    let run = place.path().join("run");
    run_dir(&run);
    let run_path = run.display().to_string();
    let out = zaya(&["ls", &run_path]);
    let shown = text(&out.stdout);
    assert!(out.status.success() && shown.contains("1,280") && shown.contains("training"), "{shown}");
    assert!(shown.find("        20").unwrap() < shown.find("        10").unwrap());

    let out = zaya(&["inspect", &run_path, "--tensors"]);
    let shown = text(&out.stdout);
    for part in ["step         20", "opt/embed/m", "layers.3.experts.1.down", "contents     training"] {
        assert!(shown.contains(part), "{part} in {shown}");
    }
    assert_eq!(zaya(&["verify", &run_path]).status.code(), Some(0));

    // One bit of the newest: verify names it, inspect takes the one before.
    let file = run.join("ckpt/step-00000020/weights-00000.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&file, bytes).unwrap();
    let out = zaya(&["verify", &run_path]);
    let shown = text(&out.stdout);
    assert_eq!(out.status.code(), Some(1));
    assert!(shown.contains("NOT VALID") && shown.contains("tensor final_norm"), "{shown}");
    assert!(shown.contains("step-00000010: valid"), "{shown}");
    assert_eq!(zaya(&["verify", &format!("{run_path}/ckpt/step-00000020")]).status.code(), Some(1));
    assert_eq!(zaya(&["verify", &format!("{run_path}/ckpt/step-00000010")]).status.code(), Some(0));
    let out = zaya(&["inspect", &run_path]);
    assert!(text(&out.stdout).contains("step         10"));
    assert!(text(&out.stderr).contains("skipped"));
    assert_eq!(zaya(&["verify", &place.path().display().to_string()]).status.code(), Some(2));
}

#[test]
fn a_malformed_zaya_fail_is_refused_at_the_start() {
    let out = crate::program::zaya().args(["reshard", "ls", "."]).env("ZAYA_FAIL", "ckpt.befor_manifest:kill").output().unwrap();
    assert_eq!(out.status.code(), Some(2));
    assert!(text(&out.stderr).contains("did you mean `ckpt.before_manifest`?"), "{}", text(&out.stderr));
}

#[test]
fn diff_says_in_what_two_checkpoints_differ() {
    let place = tempfile::tempdir().unwrap();
    let run = place.path().join("run");
    let tensors = run_dir(&run);
    let before = snapshot(&run);
    let path = |name: &str| place.path().join(name).display().to_string();
    let (ten, twenty) = (path("run/ckpt/step-00000010"), path("run/ckpt/step-00000020"));
    let diff = |a: &str, b: &str| {
        let out = zaya(&["diff", a, b]);
        (out.status.code(), text(&out.stdout))
    };
    // A run directory is its newest checkpoint; other row blocks are no difference.
    assert_eq!(diff(&path("run"), &twenty).0, Some(0));
    let small = SaveOptions { max_part_bytes: 64, max_file_bytes: 256, ..SaveOptions::default() };
    let source = Checkpoint::open(Path::new(&twenty)).unwrap();
    let options = checkpoint::repack::RepackOptions { save: small, ..Default::default() };
    checkpoint::repack::repack(&source, Path::new(&path("small")), &options).unwrap();
    let (code, out) = diff(&twenty, &path("small"));
    assert_eq!(code, Some(0), "{out}");
    assert!(out.ends_with(&format!("{} tensors compared, 0 differ or are in one only\nequal\n", tensors.len())), "{out}");

    let (code, out) = diff(&ten, &twenty);
    assert_eq!(code, Some(1), "{out}");
    for piece in
        ["step: A 10, B 20", "tokens seen: A 640, B 1280", &format!("{}: max abs 1.000e1, relative norm ", tensors[0].name)]
    {
        assert!(out.contains(piece), "no `{piece}` in {out}");
    }
    assert!(out.contains(&format!("{0} tensors compared, {0} differ", tensors.len())), "{out}");

    // One number of one tensor, and a key of the recipe.
    let mut meta = source.meta().clone();
    meta.recipe = "[train]\nsteps = 7\n".into();
    let read = |i: usize| -> anyhow::Result<Vec<f32>> {
        let mut values = source.read(&tensors[i].name)?;
        if i == 3 {
            values[0] += 0.5;
        }
        Ok(values)
    };
    checkpoint::save(&place.path().join("other"), &meta, &tensors, &mut { read }, &SaveOptions::default()).unwrap();
    let (code, out) = diff(&twenty, &path("other"));
    assert_eq!(code, Some(1));
    assert!(
        out.contains("recipe: B [train] steps = 7") && out.contains(&format!("{}: max abs 5.000e-1", tensors[3].name)),
        "{out}"
    );
    assert!(out.contains("1 differ"), "{out}");

    zaya(&["--from", &twenty, "--to", "zck", "--output", &path("weights"), "--weights-only", "--dtype", "bf16"]);
    let (code, out) = diff(&twenty, &path("weights"));
    assert_eq!(code, Some(1));
    assert!(
        out.contains("only in A: opt/") && out.contains("F32 in A, BF16 in B") && out.contains("contents: A training, B weights"),
        "{out}"
    );
    assert_eq!(zaya(&["diff", &ten, &path("nothing")]).status.code(), Some(2));
    assert_eq!(snapshot(&run), before);
}

#[test]
fn a_checkpoint_is_dealt_to_the_files_of_its_readers_and_merged_again() {
    let place = tempfile::tempdir().unwrap();
    let run = place.path().join("run");
    run_dir(&run);
    let path = |name: &str| place.path().join(name).display().to_string();
    let to = |from: &str, name: &str, readers: &str| {
        let out = zaya(&["--from", from, "--to", "zck", "--output", &path(name), "--for", readers]);
        (out.status.code(), text(&out.stdout) + &text(&out.stderr))
    };
    let (code, out) = to(&path("run"), "dealt", "dp=2,ep=2");
    assert_eq!(code, Some(0), "{out}");
    // Of weights and of optimizer state: what all have, and two places.
    assert!(
        out.contains("for 2 ranks (dp 2, cp 1, ep 2): a rank finds what it needs in 4 of 6 files; in the input it was in 2 of 2"),
        "{out}"
    );
    let dealt = Checkpoint::open(Path::new(&path("dealt"))).unwrap();
    dealt.verify().unwrap();
    for file in &dealt.manifest().files {
        let inside = dealt.manifest().entries.iter().filter(|e| e.parts.iter().any(|p| p.file == file.name));
        let experts: std::collections::BTreeSet<Option<&str>> =
            inside.map(|e| e.name.split("experts.").nth(1).map(|rest| rest.split('.').next().unwrap())).collect();
        assert_eq!(experts.len(), 1, "{} {experts:?}", file.name);
    }
    assert_eq!(zaya(&["diff", &path("run"), &path("dealt")]).status.code(), Some(0));
    assert_eq!(to(&path("dealt"), "merged", "dp=1").0, Some(0));
    for file in ["weights-00000.safetensors", "optimizer-00000.safetensors"] {
        let read = |name: &str| fs::read(place.path().join(name).join(file)).unwrap();
        assert_eq!(read("merged"), read("run/ckpt/step-00000020"), "{file}");
    }
    for (readers, why) in
        [("dp=3,ep=2", "does not divide"), ("dp=4,ep=4", "the model has 2 experts"), ("tp=2", "expected dp, cp and ep")]
    {
        let (code, out) = to(&path("run"), "no", readers);
        assert_eq!(code, Some(2), "{out}");
        assert!(out.contains(why), "{out}");
    }
    let out = zaya(&["--from", &path("run"), "--to", "hf", "--output", &path("no"), "--for", "dp=1"]);
    assert_eq!(out.status.code(), Some(2));
}
