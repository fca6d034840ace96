//! `zaya extend-context` on a tiny model: 16 to 64 tokens.

use super::*;
use zaya::checkpoint::ModelSource;
use zaya::data::ValidationSet;
use zaya::model::{Cx, Model};
use zaya::tensor::Backend;
use zaya::tensor::backend::Precision;
use zaya::tensor::cpu::Cpu;

/// Six steps at four times the length.
const LONGER: [&str; 5] = [
    "train.seq_len=64",
    "train.micro_batch=1",
    "train.steps=6",
    "model.rope_theta=40000",
    "data.validation=[{name=\"v\", path=\"held-out\"}]",
];

fn extend(lab: &Lab, from: &str, run: &str, sets: &[&str], args: &[&str]) -> Done {
    finish(&mut command(lab, from, run, sets, args))
}

fn command(lab: &Lab, from: &str, run: &str, sets: &[&str], args: &[&str]) -> Command {
    let mut command = zaya();
    command.arg("extend-context").arg("--from").arg(lab.path(from)).arg("--recipe").arg(lab.path("r.toml"));
    command.arg("--set").arg(format!("run.dir={run}"));
    command.args(LONGER.iter().chain(sets).flat_map(|set| ["--set", set])).args(args);
    command
}

fn trained() -> Lab {
    let lab = Lab::new();
    lab.run("short", &["--set", "checkpoint.every=100"]).expect(0);
    lab
}

fn reports(lab: &Lab, run: &str) -> Vec<Map<String, Value>> {
    lab.events(run).into_iter().filter(|e| e["event"] == "context_report").collect()
}

fn losses(report: &Map<String, Value>) -> Vec<f64> {
    report["loss_by_position"]["v"].as_array().unwrap().iter().map(|b| b["loss"].as_f64().unwrap()).collect()
}

/// Mean loss of the held-out tokens that each eighth of a window's positions predicts, from logits.
fn by_hand(lab: &Lab, from: &str, theta: f64) -> (Vec<f64>, Vec<u64>) {
    let source = ModelSource::open(&lab.path(from)).unwrap();
    let mut config = source.config().clone();
    config.rope.theta = theta;
    let (cpu, vocab) = (Cpu::new(Precision::F32), config.vocab_size);
    let params = source.params(&cpu).unwrap();
    let model = Model::new(config);
    let set = ValidationSet::open(&[lab.path("held-out")], 64, false, vocab).unwrap();
    let (mut sums, mut counts) = (vec![0.0; 8], vec![0; 8]);
    for w in 0..set.num_windows() {
        let batch = set.batch(w..w + 1).unwrap();
        let rows = cpu.rows(&batch).unwrap();
        let logits = cpu.download(&model.logits(&Cx::new(&cpu, &params, &rows)).unwrap()).unwrap();
        for (position, label) in batch.labels.iter().enumerate().filter(|(_, label)| **label >= 0) {
            let row: Vec<f64> = logits[position * vocab..][..vocab].iter().map(|x| f64::from(*x)).collect();
            let max = row.iter().copied().fold(f64::MIN, f64::max);
            let log_sum = max + row.iter().map(|x| (x - max).exp()).sum::<f64>().ln();
            sums[position / 8] += log_sum - row[*label as usize];
            counts[position / 8] += 1;
        }
    }
    (sums.iter().zip(&counts).map(|(s, c)| s / *c as f64).collect(), counts)
}

#[test]
fn a_model_goes_on_at_four_times_the_length() {
    let lab = trained();
    let done = extend(&lab, "short", "long", &[], &[]).expect(0);
    // Training itself does not score the held-out set, and that is no reason to warn.
    assert!(!done.err.contains("never used"), "{}", done.err);
    done.says(&["starting at step 0 of 6", "context before: held-out `v`", "context after", "tokens back", "finished"]);
    let lines = lab.metrics("long");
    assert_eq!((lines.len(), &lines[0]["tokens_seen"], lines[0].contains_key("stage")), (6, &64.into(), false));
    let reports_of_run = reports(&lab, "long");
    let places: Vec<_> = reports_of_run.iter().map(|r| (r["when"].as_str().unwrap(), r["at_step"].as_u64().unwrap())).collect();
    assert_eq!(places, [("before", 0), ("after", 6)]);
    // Before: the old weights at the new length. After: what was saved.
    for (report, from) in reports_of_run.iter().zip(["short", "long"]) {
        let (expected, counts) = by_hand(&lab, from, 4e4);
        assert_close(&losses(report), &expected, 1e-5);
        let buckets = report["loss_by_position"]["v"].as_array().unwrap();
        let tokens: Vec<u64> = buckets.iter().map(|b| b["tokens"].as_u64().unwrap()).collect();
        assert_eq!(tokens, counts);
        let ends: Vec<_> = buckets.iter().map(|b| (b["from"].as_u64().unwrap(), b["to"].as_u64().unwrap())).collect();
        assert_eq!(ends, (0..8).map(|i| (8 * i, 8 * i + 8)).collect::<Vec<_>>());
        // Pairs of 4 and 4 tokens: the farthest begins at the first token, and its key comes again at the 58th.
        let retrieval = report["retrieval"].as_array().unwrap();
        let distances: Vec<u64> = retrieval.iter().map(|r| r["distance"].as_u64().unwrap()).collect();
        assert_eq!(distances, [14, 28, 42, 57]);
        for r in retrieval {
            let (log_probability, top1) = (r["log_probability"].as_f64().unwrap(), r["top1"].as_f64().unwrap());
            assert!(log_probability < 0.0 && (0.0..=1.0).contains(&top1), "{r}");
            assert_eq!((top1 * 32.0).fract(), 0.0, "of 8 sequences with 4 tokens");
        }
    }
    assert_ne!(losses(&reports_of_run[0]), losses(&reports_of_run[1]));
    // Moments are kept, unless empty ones are asked for.
    let updates = |run: &str| lab.checkpoint(run, 6).meta().scalars["optimizer.updates"].clone();
    assert_eq!(updates("long"), 14);
    extend(&lab, "short/ckpt/step-00000008", "reset", &[], &["--reset-optimizer"]).expect(0);
    assert_eq!(updates("reset"), 6);
    assert_eq!(reports(&lab, "reset")[0], reports_of_run[0]);
    // Again, and with sequences shared by two ranks.
    extend(&lab, "short", "again", &[], &[]).expect(0);
    lab.assert_same_run("long", "again");
    assert_eq!(reports(&lab, "again"), reports_of_run);
    extend(&lab, "short", "shared", &["parallel.cp=2", "train.recompute=all"], &["--ranks", "2"]).expect(0);
    for (a, b) in reports(&lab, "shared").iter().zip(&reports_of_run) {
        assert_close(&losses(a), &losses(b), 1e-3);
    }
    // Stopped on the way it goes on as any run does.
    let done = finish(command(&lab, "short", "stopped", &[], &[]).env("ZAYA_FAIL", "step:kill@3"));
    assert_eq!(done.signal, Some(libc::SIGKILL), "{done:?}");
    // From step 3, or from 2 where the kill came before the checkpoint was written.
    extend(&lab, "short", "stopped", &[], &["--resume"]).expect(0).says(&["resuming at step ", " of 6, ", "context after"]);
    lab.assert_same_run("long", "stopped");
    assert_eq!(reports(&lab, "stopped"), reports_of_run);
}

/// 16 to 32 to 64 tokens, the second stage with sequences shared by two ranks.
#[test]
fn the_length_grows_in_steps() {
    let lab = trained();
    let stages = "stages=[{name=\"half\", seq_len=32, steps=3, rope_theta=20000, micro_batch=1}, {name=\"full\", steps=2, cp=2, recompute=\"all\"}]";
    let done = extend(&lab, "short", "long", &[stages], &["--ranks", "2"]).expect(0);
    done.says(&["stage 1 of 2, `half`", "stage 2 of 2, `full`: steps 4 to 5, 1 sequences of 64 tokens", "finished"]);
    let told = |run: &str| -> Vec<(String, u64, String, u64)> {
        let one = |r: &Map<String, Value>| {
            let text = |key: &str| r[key].as_str().unwrap().to_string();
            (text("stage"), r["at_step"].as_u64().unwrap(), text("when"), r["seq_len"].as_u64().unwrap())
        };
        reports(&lab, run).iter().map(one).collect()
    };
    let expected = [("half", 0, "before", 32), ("half", 3, "after", 32), ("full", 3, "before", 64), ("full", 5, "after", 64)];
    assert_eq!(told("long"), expected.map(|(stage, step, when, length)| (stage.to_string(), step, when.to_string(), length)));
    let theta = |step| lab.checkpoint("long", step).meta().model.rope.theta;
    assert_eq!([1, 3, 4, 5].map(theta), [2e4, 2e4, 4e4, 4e4]);
    // Moments go on all the way: 8 steps and 5.
    assert_eq!(lab.checkpoint("long", 5).meta().scalars["optimizer.updates"], 13);
    // Killed in the second stage, and resumed.
    let mut killed = command(&lab, "short", "killed", &[stages], &["--ranks", "2"]);
    assert_eq!(finish(killed.env("ZAYA_FAIL", "step:kill@4")).signal, Some(libc::SIGKILL));
    extend(&lab, "short", "killed", &[stages], &["--ranks", "2", "--resume"]).expect(0).says(&["resuming at step "]);
    lab.assert_same_run("long", "killed");
    assert_eq!(reports(&lab, "killed").last(), reports(&lab, "long").last());
}

#[test]
fn what_makes_no_longer_context_is_refused() {
    let lab = trained();
    let before = snapshot(lab.dir.path());
    let refused = |sets: &[&str], says: &[&str]| {
        extend(&lab, "short", "long", sets, &[]).expect(2).says(says);
    };
    refused(&["model.vocab_size=65"], &["its vocabulary has 64 ids", "65"]);
    refused(&["model.expert_width=24"], &["another shape", "[", "in the recipe"]);
    refused(&["train.seq_len=16"], &["`train.seq_len` is 16", "trained at 16 tokens already", "--allow-shorter"]);
    refused(&["train.seq_len=8"], &["--allow-shorter"]);
    refused(&["model.rope_theta=500"], &["`model.rope_theta` is 500, smaller than the 10000"]);
    refused(&["train.seq_len=128", "train.global_batch_tokens=128"], &["`train.seq_len` (128) is longer"]);
    refused(&["model.skip_mode=identity"], &["changes more than the context", "`model.skip_mode`"]);
    refused(&["router.balance=sign"], &["`router.balance`"]);
    refused(&["stages=[{name=\"a\"}, {name=\"b\", seq_len=32}]"], &["`stages.1.seq_len` is 32", "trained at 64 tokens already"]);
    refused(
        &["stages=[{name=\"a\"}, {name=\"b\", rope_theta=30000}]"],
        &["`stages.1.rope_theta` is 30000, smaller than the 40000"],
    );
    refused(&["stages=[{name=\"a\", seq_len=16}, {name=\"b\"}]"], &["`stages.0.seq_len` is 16"]);
    refused(&["run.dir=short"], &["already holds a checkpoint of step 8"]);
    extend(&lab, "nowhere", "long", &[], &[]).expect(2).says(&["is not a folder"]);
    let after = snapshot(lab.dir.path());
    assert!(before.iter().all(|(path, text)| path.ends_with(".lock") || after.get(path) == Some(text)));
    assert!(!lab.path("long").exists());
    // A plan writes nothing; a shorter length may be asked for.
    extend(&lab, "short", "long", &[], &["--dry-run"]).expect(0);
    assert!(!lab.path("long").exists());
    extend(&lab, "short", "long", &["train.seq_len=16"], &["--allow-shorter"]).expect(0);
}
