//! What a run leaves in its directory, and that it is the same every time.

use super::*;
use zaya::optim::schedule::Schedule;

#[test]
fn a_run_lives_in_one_directory() {
    let lab = Lab::new();
    let tokenizer = lab.path("tokenizer.json");
    fs::write(lab.path("text.txt"), varied_text(60)).unwrap();
    let vocab = ["tokenize", "--train-vocab", "280", "--input"];
    finish(zaya().args(vocab).arg(lab.path("text.txt")).arg("--output").arg(&tokenizer)).expect(0);
    let sets = ["--set", "tokenizer.path=tokenizer.json", "--set", "model.vocab_size=280", "--set", "train.steps=20"];
    lab.run("run", &[&sets[..], &["--set", "checkpoint.every=7"]].concat()).expect(0).says(&[
        "starting at step 0 of 20",
        "step 20/20",
        "tokens/s",
        "finished",
    ]);
    assert_eq!(lab.steps("run"), [20, 14, 7]);
    for file in ["recipe.toml", "metrics.jsonl", "tokenizer.json", "ckpt/step-00000020/manifest.json"] {
        assert!(lab.path("run").join(file).is_file(), "{file}");
    }
    assert_eq!(fs::read(lab.path("run/tokenizer.json")).unwrap(), fs::read(&tokenizer).unwrap());
    // The resolved recipe is a recipe, and says the same.
    let resolved = recipe::load(&lab.path("run/recipe.toml"), &[]).unwrap();
    let sets = ["tokenizer.path=tokenizer.json", "model.vocab_size=280", "train.steps=20", "checkpoint.every=7"];
    assert_eq!(resolved, lab.recipe(&sets));
    assert_eq!(resolved.run.dir, lab.path("run").canonicalize().unwrap());
    lab.checkpoint("run", 14).verify().unwrap();

    let lines = lab.metrics("run");
    let schedule = Schedule::of(&resolved);
    assert_eq!(lines.len(), 20);
    for (i, line) in lines.iter().enumerate() {
        let number = |key: &str| line[key].as_f64().unwrap_or_else(|| panic!("{key} in {line:?}"));
        assert_eq!(line["step"], i + 1);
        assert_eq!(line["tokens_seen"], 64 * (i + 1));
        assert_close(&[number("lr")], &[schedule.lr_at(i as u64)], LAST_DIGIT);
        for key in ["loss", "grad_norm", "tokens_per_s", "step_time_s", "mfu", "unix_time"] {
            assert!(number(key) > 0.0, "{key} in {line:?}");
        }
        assert!(number("data_time_s") < number("step_time_s"));
        let mfu = number("tokens_per_s") * zaya::plan::Plan::of(&resolved).flops.per_token() / 1e12;
        assert!((number("mfu") - mfu).abs() < 1e-9 * mfu);
        let per_block: Vec<Vec<f64>> = serde_json::from_value(line["expert_load"].clone()).unwrap();
        assert_eq!(per_block.len(), 2);
        for load in per_block {
            assert_eq!(load.len(), 5, "four experts and the skip class");
            assert!((load.iter().sum::<f64>() - 1.0).abs() < 1e-12);
        }
        let entropy: Vec<f64> = serde_json::from_value(line["expert_entropy"].clone()).unwrap();
        assert!(entropy.len() == 2 && entropy.iter().all(|h| (0.0..=1.0 + 1e-12).contains(h)), "{entropy:?}");
    }
    let loss: Vec<f64> = lines.iter().map(|l| l["loss"].as_f64().unwrap()).collect();
    assert!((loss[0] - 280f64.ln()).abs() < 0.3, "a fresh model knows nothing: {}", loss[0]);
    let (first, last) = (loss[..4].iter().sum::<f64>() / 4.0, loss[16..].iter().sum::<f64>() / 4.0);
    assert!(last < first - 0.5, "the loss falls: {loss:?}");
}

#[test]
fn the_same_recipe_gives_the_same_bits() {
    let lab = Lab::new();
    lab.reference("one", &[]);
    lab.run("again", &[]).expect(0);
    lab.assert_same_run("one", "again");
    for threads in ["1", "3"] {
        let run = format!("threads-{threads}");
        lab.run(&run, &["--threads", threads]).expect(0);
        lab.assert_same_run("one", &run);
    }
    // Whatever differs between equal runs is a time, or the folder's name in the recipe.
    let fields = |run: &str| lab.metrics(run)[3].keys().cloned().collect::<Vec<_>>();
    assert_eq!(fields("one"), fields("again"));
    let manifest = |run: &str| {
        let text = fs::read_to_string(lab.path(run).join("ckpt/step-00000008/manifest.json")).unwrap();
        let mut object: Map<String, Value> = serde_json::from_str(&text).unwrap();
        object.remove("written_unix_s");
        object.remove("checksum");
        let recipe = object["recipe"].as_str().unwrap().replace(&format!("/{run}\""), "/RUN\"");
        object.insert("recipe".into(), recipe.into());
        object
    };
    assert_eq!(manifest("one"), manifest("again"));
    // And another seed is another run.
    lab.run("seed", &["--set", "run.seed=8"]).expect(0);
    assert_ne!(lab.lines("one")[&1], lab.lines("seed")[&1]);
}

#[test]
fn lines_of_metrics_may_be_rarer() {
    let lab = Lab::new();
    lab.run("run", &["--set", "metrics.every=3", "--set", "checkpoint.every=100"]).expect(0);
    assert_eq!(lab.lines("run").into_keys().collect::<Vec<_>>(), [3, 6, 8]);
    assert_eq!(lab.steps("run"), [8], "one checkpoint at the end");
}

#[test]
fn metrics_that_cannot_be_written_do_not_end_a_run() {
    if !Path::new("/dev/full").exists() {
        return;
    }
    let lab = Lab::new();
    lab.reference("one", &[]);
    fs::create_dir(lab.path("full")).unwrap();
    std::os::unix::fs::symlink("/dev/full", lab.path("full/metrics.jsonl")).unwrap();
    lab.run("full", &[]).expect(0).says(&["warning: writing ", "No space left", "without this line of metrics"]);
    lab.assert_same_state("one", "full", 8);
}
