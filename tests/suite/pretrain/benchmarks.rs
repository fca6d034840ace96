//! `[[eval.tasks]]`: benchmark tasks on the weights in training.

use super::*;

const TASKS: &str = r#"
[tokenizer]
path = "tokenizer.json"
[[eval.tasks]]
task = "lambada_openai"
data = "tasks"
every = 3
[[eval.tasks]]
task = "piqa"
data = "tasks"
num_fewshot = 0
limit = 5
"#;

/// A recipe whose model takes text, and documents of two tasks.
fn lab() -> Lab {
    let recipe = RECIPE.replace("vocab_size = 64", "vocab_size = 320");
    let lab = Lab::with(&format!("{recipe}{TASKS}"));
    fs::write(lab.path("plain.toml"), &recipe).unwrap();
    fs::write(lab.path("words.txt"), varied_text(60)).unwrap();
    let mut learn = zaya();
    learn.args(["tokenize", "--train-vocab", "300", "--input"]).arg(lab.path("words.txt"));
    finish(learn.arg("--output").arg(lab.path("tokenizer.json"))).expect(0);
    fs::create_dir(lab.path("tasks")).unwrap();
    let json = |text: &str| serde_json::to_string(text).unwrap();
    let lines = varied_text(24);
    let lambada: String = lines.lines().map(|line| format!("{{\"text\": {}}}\n", json(line))).collect();
    fs::write(lab.path("tasks/lambada_openai_test.jsonl"), lambada).unwrap();
    let piqa = |(i, line): (usize, &str)| {
        let words: Vec<&str> = line.split(' ').collect();
        let [goal, one, two] = [&words[..3], &words[3..5], &words[5..7]].map(|part| json(&part.join(" ")));
        format!("{{\"goal\": {goal}, \"sol1\": {one}, \"sol2\": {two}, \"label\": {}}}\n", i % 2)
    };
    fs::write(lab.path("tasks/piqa_val.jsonl"), lines.lines().take(8).enumerate().map(piqa).collect::<String>()).unwrap();
    lab
}

/// Of each evaluation: its step, and the metrics of its tasks.
fn curves(lab: &Lab, run: &str) -> Vec<(u64, Value)> {
    let events = lab.events(run).into_iter().filter(|e| e["event"] == "benchmarks");
    events.map(|e| (e["at_step"].as_u64().unwrap(), e["tasks"].clone())).collect()
}

#[test]
fn tasks_change_no_bit_of_a_run_and_say_what_zaya_eval_says() {
    let lab = lab();
    let mut plain = zaya();
    plain.arg("pretrain").arg("--recipe").arg(lab.path("plain.toml")).args(["--set", "run.dir=plain"]);
    finish(&mut plain).expect(0);
    lab.run("run", &[]).expect(0).says(&["step 3  lambada_openai: perplexity"]);
    lab.assert_same_run("plain", "run");

    let curves = curves(&lab, "run");
    assert_eq!(curves.iter().map(|(step, _)| *step).collect::<Vec<_>>(), [3, 6, 8]);
    let names = |i: usize| curves[i].1.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    assert_eq!((names(0), names(2)), (vec!["lambada_openai".into()], vec!["lambada_openai".into(), "piqa".into()]));
    assert_ne!(curves[0].1, curves[1].1, "the weights have moved");
    for (step, tasks, limit) in [(3, "lambada_openai", "24"), (8, "lambada_openai", "24"), (8, "piqa", "5")] {
        let mut eval = zaya();
        eval.args(["eval", "--tasks", tasks, "--limit", limit, "--data"]).arg(lab.path("tasks"));
        eval.arg("--model").arg(lab.checkpoint("run", step).dir()).arg("--output").arg(lab.path("out"));
        finish(&mut eval).expect(0);
        let results: Value = serde_json::from_slice(&fs::read(lab.path("out/results.json")).unwrap()).unwrap();
        let curve = &curves.iter().find(|(s, _)| *s == step).unwrap().1[tasks];
        for (name, value) in curve.as_object().unwrap() {
            assert_eq!(*value, results["results"][tasks][name], "{tasks} {name} at step {step}");
        }
        assert!(curve["acc,none"].is_number(), "{curve}");
    }
}

#[test]
fn ranks_share_the_requests_and_agree() {
    let lab = lab();
    let bits = ["--set", "train.deterministic=layout"];
    lab.run("one", &bits).expect(0);
    lab.run("two", &[&bits[..], &["--ranks", "2"]].concat()).expect(0);
    lab.assert_same_run("one", "two");
    assert_eq!(curves(&lab, "one"), curves(&lab, "two"));
    lab.run("three", &["--ranks", "3", "--set", "parallel.cp=3"]).expect(0);
    assert_eq!(curves(&lab, "three").len(), 3);
}

#[test]
fn tasks_that_a_signal_cut_short_are_made_up_for() {
    let lab = lab();
    lab.reference("whole", &[]);
    let mut running = Running::start(lab.command("run", &[]).env("ZAYA_FAIL", "benchmarks:sleep=300ms"));
    // Of the last step's two tasks the first one is at work.
    (0..3).for_each(|_| running.wait_for("failpoint benchmarks"));
    running.signal(libc::SIGTERM);
    running.finish().expect(143);
    assert_eq!(curves(&lab, "run"), curves(&lab, "whole")[..2]);
    lab.run("run", &["--resume"]).expect(0);
    lab.assert_same_run("whole", "run");
    assert_eq!(curves(&lab, "whole"), curves(&lab, "run"));
}

#[test]
fn what_cannot_be_asked_is_said_before_training() {
    let lab = lab();
    for (sets, says) in [
        (&["eval.tasks.0.task=lambada_opnai"][..], &["lambada_openai"][..]),
        (&["eval.tasks.1.data=nowhere"], &["piqa", "nowhere", "is not a folder"]),
        (&["eval.tasks.0.task=arc_easy"], &["arc_easy"]),
        (&["eval.tasks.0.task=humaneval"], &["runs programs", "zaya eval --allow-code-exec"]),
        (&["parallel.ep=2"], &["all experts on each rank"]),
        (&["eval.tasks.0.limit=0"], &["eval.tasks.0.limit"]),
        (&["eval.tasks.0.num_fewshots=3"], &["num_fewshot`"]),
    ] {
        let args: Vec<&str> = sets.iter().flat_map(|s| ["--set", *s]).collect();
        lab.run("none", &args).expect(2).says(says);
        assert!(!lab.path("none/ckpt").exists());
    }
    fs::write(lab.path("r.toml"), fs::read_to_string(lab.path("r.toml")).unwrap().replace("[tokenizer]\npath", "# path"))
        .unwrap();
    lab.run("none", &[]).expect(2).says(&["tokenizer.path"]);
}
