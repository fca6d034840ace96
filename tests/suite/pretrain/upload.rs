//! `checkpoint.upload` and `--resume-from`, with an S3 server on this machine and with a mirror.

use super::*;
use crate::s3_server::{S3Server, reach};
use zaya::failpoint::POINTS;

/// A lab and where its runs upload to.
struct Depot {
    lab: Lab,
    server: Option<S3Server>,
}

impl Depot {
    fn s3() -> Self {
        Self { lab: Lab::new(), server: Some(S3Server::start()) }
    }

    fn mirror() -> Self {
        Self { lab: Lab::new(), server: None }
    }

    fn both() -> [Self; 2] {
        [Self::s3(), Self::mirror()]
    }

    fn url(&self, prefix: &str) -> String {
        match &self.server {
            Some(server) => server.url(prefix),
            None => format!("file://{}", self.folder(prefix).display()),
        }
    }

    /// Where the objects of a prefix lie.
    fn folder(&self, prefix: &str) -> PathBuf {
        self.server.as_ref().map_or_else(|| self.lab.path(&format!("mirror/{prefix}")), |s| s.folder(prefix))
    }

    fn go(&self, command: &mut Command, fail: Option<&str>) -> Done {
        if let Some(server) = &self.server {
            server.known_to(command);
        }
        if let Some(fail) = fail {
            command.env("ZAYA_FAIL", fail);
        }
        finish(command)
    }

    /// Trains in the run directory `run`, uploading to a prefix of its name.
    fn run(&self, run: &str, args: &[&str]) -> Done {
        self.run_failing(run, None, args)
    }

    fn run_failing(&self, run: &str, fail: Option<&str>, args: &[&str]) -> Done {
        let upload = format!("checkpoint.upload={}", self.url(run));
        self.go(&mut self.lab.command(run, &[&["--set", &upload], args].concat()), fail)
    }

    /// Trains in the run directory `run` from what was uploaded from `of`.
    fn run_from(&self, run: &str, of: &str, fail: Option<&str>, args: &[&str]) -> Done {
        self.go(&mut self.lab.command(run, &[&["--resume-from", &self.url(of)], args].concat()), fail)
    }

    fn reshard(&self, args: &[&str]) -> Done {
        let mut command = zaya();
        command.arg("reshard").args(args);
        if let Some(server) = &self.server {
            server.known_to(&mut command);
        }
        let out = command.output().unwrap();
        let err = [out.stdout, out.stderr].concat();
        Done { code: out.status.code(), signal: None, err: String::from_utf8(err).unwrap() }
    }

    fn events(&self, run: &str, event: &str) -> Vec<Map<String, Value>> {
        self.lab.events(run).into_iter().filter(|e| e["event"] == event).collect()
    }
}

/// Files of a folder by name.
fn contents(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let files = fs::read_dir(dir).unwrap().map(|e| e.unwrap());
    files.map(|f| (f.file_name().into_string().unwrap(), fs::read(f.path()).unwrap())).collect()
}

fn number(event: &Map<String, Value>, key: &str) -> u64 {
    event[key].as_u64().unwrap_or_else(|| panic!("no {key} in {event:?}"))
}

#[test]
fn uploaded_while_training_and_resumed_from_there() {
    for depot in Depot::both() {
        let lab = &depot.lab;
        lab.reference("whole", &[]);
        depot.run("run", &["--stop-at", "5"]).expect(0);
        let uploaded = depot.events("run", "checkpoint_uploaded");
        assert!(uploaded.iter().any(|e| number(e, "at_step") == 5), "{uploaded:?}");
        assert!(uploaded.iter().all(|e| number(e, "bytes") > 0 && number(e, "skipped_bytes") == 0), "{uploaded:?}");
        // Object by object the local folder.
        let there = contents(&depot.folder("run").join("step-00000005"));
        let mut here = contents(&lab.path("run/ckpt/step-00000005"));
        assert!(here.remove(".uploaded").is_some());
        assert!(there == here, "{:?} {:?}", there.keys(), here.keys());
        depot.reshard(&["ls", &depot.url("run")]).expect(0).says(&["training", "         5 "]);
        depot.reshard(&["verify", &depot.url("run")]).expect(0).says(&["step-00000005: valid"]);
        let copy = lab.path("fetched").display().to_string();
        depot.reshard(&["fetch", &depot.url("run"), "--output", &copy]).expect(0).says(&["every byte verified"]);
        assert!(contents(Path::new(&copy)) == here);

        // Another machine goes on; on one rank and on two.
        depot.run_from("other", "run", None, &[]).expect(0).says(&["fetched", "resuming at step 5", "finished"]);
        lab.assert_same_state("whole", "other", 8);
        let one = format!("{}/step-00000005", depot.url("run"));
        depot.go(&mut lab.command("two", &["--resume-from", &one, "--ranks", "2", "--stop-at", "6"]), None).expect(0);
        assert_eq!(lab.steps("two"), [6, 5]);
        // It is for the beginning: what a run directory holds goes first.
        depot
            .run_from("other", "run", None, &["--set", "train.steps=9"])
            .expect(0)
            .says(&["--resume-from", "resuming at step 8"]);

        // The machine is lost with its disk, and the same command started again.
        fs::remove_dir_all(lab.path("run")).unwrap();
        depot.run("run", &["--resume"]).expect(0).says(&["holds no valid checkpoint; looking for one in", "resuming at step 5"]);
        lab.assert_same_state("whole", "run", 8);
        depot.reshard(&["verify", &depot.url("run")]).expect(0).says(&["step-00000008: valid"]);
        // All is there: nothing is sent when the run is resumed.
        let before = depot.events("run", "checkpoint_uploaded").len();
        depot.run("run", &["--resume"]).expect(0).says(&["nothing left to do"]);
        assert_eq!(depot.events("run", "checkpoint_uploaded").len(), before);
    }
}

#[test]
fn a_folder_is_as_good_as_a_store() {
    let lab = Lab::new();
    lab.reference("whole", &[]);
    lab.run("run", &["--stop-at", "4"]).expect(0);
    let from = lab.path("run").display().to_string();
    lab.run("other", &["--resume-from", &from]).expect(0).says(&["fetched", "resuming at step 4"]);
    lab.assert_same_state("whole", "other", 8);
}

#[test]
fn killed_at_every_point_of_an_upload() {
    for depot in Depot::both() {
        let lab = &depot.lab;
        lab.reference("whole", &[]);
        for point in POINTS.iter().filter(|p| p.name.starts_with("upload.")) {
            for n in [1, 2, 4] {
                let run = format!("{}-{n}", point.name);
                // The first upload is done before the kill when n is large.
                let done = depot.run_failing(&run, Some(&format!("{}:kill@{n}", point.name)), &[]);
                assert!(done.signal == Some(libc::SIGKILL) || n > 1 && done.code == Some(0), "{run}: {done:?}");
                // Whatever is there is whole, or nothing.
                let copy = format!("copy-of-{run}");
                match depot.run_from(&copy, &run, None, &[]) {
                    done if done.code == Some(0) => lab.assert_same_state("whole", &copy, 8),
                    done => drop(done.expect(2).says(&["holds no valid checkpoint"])),
                }
                depot.run(&run, &["--resume"]).expect(0);
                lab.assert_same_run("whole", &run);
                let there = checkpoint::latest_valid(&depot.folder(&run)).unwrap();
                assert_eq!(there.checkpoint.unwrap().meta().step, 8, "{run}: {:?}", there.skipped);
            }
        }
    }
}

#[test]
fn what_has_arrived_is_not_sent_again() {
    for depot in Depot::both() {
        // One checkpoint, whose upload is killed when all of its files have arrived, or all but one.
        for (run, point, all) in [("all", "upload.before_manifest:kill", true), ("one", "upload.file:kill@2", false)] {
            let rarely = ["--set", "checkpoint.every=100"];
            let done = depot.run_failing(run, Some(point), &rarely);
            assert_eq!(done.signal, Some(libc::SIGKILL), "{}", done.err);
            depot
                .run(run, &[&rarely[..], &["--resume"]].concat())
                .expect(0)
                .says(&["nothing left to do", "waiting for the upload"]);
            let uploaded = depot.events(run, "checkpoint_uploaded");
            assert_eq!(uploaded.len(), 1);
            let (bytes, skipped) = (number(&uploaded[0], "bytes"), number(&uploaded[0], "skipped_bytes"));
            assert!(if all { skipped == bytes } else { 0 < skipped && skipped < bytes }, "{run}: {skipped} of {bytes}");
            depot.reshard(&["verify", &depot.url(run)]).expect(0);
        }
        // An object that was changed since is sent again. (The test's S3 server would not notice.)
        if depot.server.is_some() {
            continue;
        }
        let done = depot.run_failing("changed", Some("upload.before_manifest:kill"), &["--set", "checkpoint.every=100"]);
        assert_eq!(done.signal, Some(libc::SIGKILL));
        let victim = depot.folder("changed").join("step-00000008/weights-00000.safetensors");
        let mut bytes = fs::read(&victim).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(&victim, bytes).unwrap();
        depot.run("changed", &["--resume"]).expect(0);
        depot.reshard(&["verify", &depot.url("changed")]).expect(0);
    }
}

#[test]
fn killed_at_every_point_of_a_fetch() {
    for depot in Depot::both() {
        let lab = &depot.lab;
        lab.reference("whole", &[]);
        depot.run("run", &["--stop-at", "3"]).expect(0);
        for point in POINTS.iter().filter(|p| p.name.starts_with("fetch.")) {
            let run = point.name.to_string();
            let done = depot.run_from(&run, "run", Some(&format!("{}:kill", point.name)), &[]);
            assert_eq!(done.signal, Some(libc::SIGKILL), "{}", done.err);
            assert_eq!(lab.steps(&run), [] as [u64; 0]);
            depot.run_from(&run, "run", None, &[]).expect(0).says(&["resuming at step 3"]);
            lab.assert_same_state("whole", &run, 8);
            let names = fs::read_dir(lab.path(&run).join(CKPT_DIR)).unwrap().map(|e| e.unwrap().file_name());
            assert!(names.into_iter().all(|n| !n.to_string_lossy().contains("tmp")), "{run}");
        }
    }
}

#[test]
fn what_is_damaged_there_is_passed_over() {
    for depot in Depot::both() {
        let lab = &depot.lab;
        // With nothing in flight that could be skipped, every step is there.
        let args = ["--set", "checkpoint.keep_every=1", "--set", "checkpoint.keep_last=9"];
        depot.run("run", &[&args[..], &["--stop-at", "5"]].concat()).expect(0);
        lab.reference("whole", &args);
        let step = |n: u64| depot.folder("run").join(checkpoint::step_dir(n));
        flip_a_bit(&step(5).join("optimizer-00000.safetensors"));
        let weights = step(4).join("weights-00000.safetensors");
        let bytes = fs::read(&weights).unwrap();
        fs::write(&weights, &bytes[..bytes.len() - 4]).unwrap();
        fs::remove_file(step(3).join("manifest.json")).unwrap();
        depot.run_from("other", "run", None, &args).expect(0).says(&[
            "step-00000005: ",
            "is damaged",
            "step-00000004: ",
            "weights-00000.safetensors has",
            "step-00000003 has no manifest.json",
            "resuming at step 2",
        ]);
        lab.assert_same_state("whole", "other", 8);
        depot.reshard(&["verify", &depot.url("run")]).expect(1).says(&["step-00000005: NOT VALID", "step-00000002: valid"]);
        // A local folder of that name that is no checkpoint stays, under another name.
        fs::create_dir_all(lab.path("third/ckpt/step-00000002")).unwrap();
        fs::write(lab.path("third/ckpt/step-00000002/manifest.json"), "{}").unwrap();
        depot.run_from("third", "run", None, &["--stop-at", "3"]).expect(0).says(&["resuming at step 2", "is called"]);
        // Nothing is left that could be gone on from: the run does not begin anew beside it.
        for n in [1, 2] {
            fs::write(step(n).join("manifest.json"), "{}").unwrap();
        }
        depot.run_from("fourth", "run", None, &[]).expect(2).says(&["holds no valid checkpoint (see the warnings)"]);
        fs::remove_dir_all(lab.path("run")).unwrap();
        depot.run("run", &["--resume"]).expect(1).says(&["none of them is valid"]);
    }
}

/// A store or a disk that fails for a moment is no reason to go on from an older checkpoint.
#[test]
fn trouble_on_the_way_is_not_damage() {
    for depot in Depot::both() {
        let lab = &depot.lab;
        let args = ["--set", "checkpoint.keep_every=1", "--set", "checkpoint.keep_last=9"];
        depot.run("run", &[&args[..], &["--stop-at", "3"]].concat()).expect(0);
        for fail in ["fetch.file:error", "fetch.before_commit:enospc"] {
            depot.run_from("other", "run", Some(fail), &args).expect(1).says(&["step-00000003"]);
            assert_eq!(lab.steps("other"), [] as [u64; 0], "{fail}");
        }
        depot.run_from("other", "run", None, &["--stop-at", "4"]).expect(0).says(&["resuming at step 3"]);
        // Of another run nothing is fetched at all.
        let other = ["--set", "run.seed=8"];
        depot.run_from("third", "run", None, &other).expect(2).says(&["`run.seed` was 7 and is now 8"]);
        assert!(!lab.path("third").exists());
    }
}

#[test]
fn another_runs_place_is_not_taken() {
    for depot in Depot::both() {
        let lab = &depot.lab;
        depot.run("run", &["--stop-at", "3"]).expect(0);
        let before = snapshot(&depot.folder("run"));
        let upload = format!("checkpoint.upload={}", depot.url("run"));
        let begin = |args: &[&str]| depot.go(&mut lab.command("new", &[&["--set", &upload], args].concat()), None);
        begin(&[]).expect(2).says(&["already holds a checkpoint of step 3", "--resume, or choose another place"]);
        assert!(!lab.path("new").exists());
        // A run that was begun elsewhere, on other data, does not write over it either.
        lab.run("new", &["--stop-at", "2", "--set", "data.sources=[{name=\"a\", path=\"b\"}]"]).expect(0);
        begin(&["--resume", "--stop-at", "3", "--set", "data.sources=[{name=\"a\", path=\"b\"}]"])
            .expect(0)
            .says(&["there is a checkpoint of this step of another model, or trained on other data"]);
        let after = snapshot(&depot.folder("run"));
        assert!(before.iter().all(|(path, bytes)| after.get(path) == Some(bytes)));
        depot.reshard(&["verify", &depot.url("run")]).expect(0);
    }
}

/// Saved again after a resume, a step takes the place of its earlier version, there too.
#[test]
fn a_step_that_is_saved_again_is_uploaded_again() {
    for depot in Depot::both() {
        let lab = &depot.lab;
        depot.run("run", &["--set", "checkpoint.every=100", "--stop-at", "4"]).expect(0);
        let damaged = lab.path("run/ckpt/step-00000004/weights-00000.safetensors");
        flip_a_bit(&damaged);
        // The local one is damaged: the one that was uploaded is fetched, and goes on from there.
        depot.run("run", &["--resume", "--stop-at", "5"]).expect(0).says(&["is damaged", "fetched", "resuming at step 4"]);
        // Another learning rate makes another step 5, of other files.
        fs::remove_dir_all(lab.path("run/ckpt/step-00000005")).unwrap();
        depot.run("run", &["--resume", "--stop-at", "5", "--set", "schedule.lr=1e-3"]).expect(0);
        depot.reshard(&["verify", &depot.url("run")]).expect(0).says(&["step-00000005: valid"]);
        let (mut here, there) =
            (contents(&lab.path("run/ckpt/step-00000005")), contents(&depot.folder("run").join("step-00000005")));
        here.remove(".uploaded");
        assert!(here == there, "{:?} {:?}", here.keys(), there.keys());
    }
}

#[test]
fn retention_waits_for_uploads() {
    for depot in Depot::both() {
        let slow = Some("upload.file:sleep=150ms");
        depot.run_failing("run", slow, &["--set", "checkpoint.keep_last=1", "--set", "checkpoint.keep_every=2"]).expect(0);
        assert_eq!(depot.events("run", "upload_failed").len(), 0);
        let mut steps: Vec<u64> = depot.events("run", "checkpoint_uploaded").iter().map(|e| number(e, "at_step")).collect();
        steps.retain(|s| s % 2 == 0);
        steps.sort();
        assert_eq!(steps, [2, 4, 6, 8], "those that are kept are all uploaded");
        depot.reshard(&["verify", &depot.url("run")]).expect(0);
    }
}

/// Files that travel in several pieces, some 100 MB of them.
#[test]
fn large_files_travel_in_pieces() {
    let depot = Depot::s3();
    let large = ["model.vocab_size=65536", "model.hidden_size=128", "checkpoint.every=100"].map(|set| ["--set", set]).concat();
    depot.run("run", &[&large[..], &["--stop-at", "1"]].concat()).expect(0);
    let uploaded = depot.events("run", "checkpoint_uploaded");
    assert!(uploaded.len() == 1 && number(&uploaded[0], "bytes") > 80 << 20, "{uploaded:?}");
    depot.run_from("other", "run", None, &[&large[..], &["--stop-at", "1"]].concat()).expect(0);
    depot.lab.assert_same_state("run", "other", 1);
}

#[test]
fn training_goes_on_without_the_store() {
    let depot = Depot::s3();
    let lab = &depot.lab;
    lab.reference("whole", &[]);
    let retry = ["--set", "checkpoint.upload_retry=1s"];
    // Nobody listens there; the key is a wrong one.
    let nobody = reach(&mut lab.command("nobody", &retry), "http://127.0.0.1:9")
        .arg("--set")
        .arg("checkpoint.upload=s3://bucket/x")
        .output();
    let nobody = nobody.unwrap();
    assert_eq!(nobody.status.code(), Some(0), "{}", String::from_utf8_lossy(&nobody.stderr));
    let mut command = lab.command("key", &[&retry[..], &["--set", "checkpoint.upload=s3://bucket/x"]].concat());
    depot.server.as_ref().unwrap().known_to(&mut command).env("AWS_SECRET_ACCESS_KEY", "wrong");
    finish(&mut command).expect(0).says(&["warning: the checkpoint of step 8 is not in s3://bucket/x", "finished"]);
    for run in ["nobody", "key"] {
        let failed = depot.events(run, "upload_failed");
        assert_eq!(number(failed.last().unwrap(), "at_step"), 8);
        assert_eq!(number(failed.last().unwrap(), "upload_failures"), failed.len() as u64);
        lab.assert_same_run("whole", run);
    }
    // But a run that is to go on from there does not begin anew when the store cannot be asked.
    let mut command = lab.command("new", &[&retry[..], &["--resume-from", "s3://bucket/x"]].concat());
    finish(reach(&mut command, "http://127.0.0.1:9")).expect(1).says(&["listing the checkpoints of s3://bucket/x"]);
    assert!(!lab.path("new/recipe.toml").exists());
}

#[test]
fn urls_that_are_none() {
    let lab = Lab::new();
    for (url, says) in [
        ("/mnt/backup", "write \"file:///mnt/backup\""),
        ("ftp://host/x", "expected s3://BUCKET/PREFIX"),
        ("s3://key:secret@b/x", "environment"),
    ] {
        lab.run("run", &["--set", &format!("checkpoint.upload={url}")]).expect(2).says(&[says]);
        lab.run("run", &["--dry-run", "--set", &format!("checkpoint.upload={url}")]).expect(2).says(&[says]);
    }
    lab.run("run", &["--resume-from", "ftp://host/x"]).expect(2).says(&["expected s3://BUCKET/PREFIX"]);
    lab.run("run", &["--resume-from", "no-such-folder"]).expect(2).says(&["holds no valid checkpoint"]);
    assert!(!lab.path("run").exists() || lab.steps("run").is_empty());
}
