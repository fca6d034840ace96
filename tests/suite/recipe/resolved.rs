//! What a recipe resolves to, what is written back, what may change on resuming, stages.

use zaya::model::config::{AttentionKind, SkipMode};
use zaya::optim::schedule::Schedule;
use zaya::recipe::schema::{self, KEYS};
use zaya::recipe::{Balance, Precision, ScheduleKind};

use super::*;

#[test]
fn complete_is_resolved_to_the_letter() {
    let r = recipe::load(&root("tests/fixtures/recipe/complete.toml"), &["stages=[]".into()]).unwrap();
    let here = root("tests/fixtures/recipe").canonicalize().unwrap();
    assert_eq!(r.run.dir, here.join("runs/complete"));
    assert_eq!((r.run.seed, r.run.time_limit.unwrap().as_secs()), (7, 5400));
    assert_eq!(r.model.attention, [AttentionKind::Full, AttentionKind::Sliding]);
    assert_eq!((r.model.sliding_window, r.model.skip_mode), (Some(64), SkipMode::Identity));
    assert_eq!((r.model.rope.theta, r.model.rope_sliding.theta), (20_000.0, 500.0));
    assert_eq!((r.model.rope.partial_rotary_factor, r.model.rope_sliding.partial_rotary_factor), (0.25, 1.0));
    assert_eq!((r.model.pad_token_id, r.model.bos_token_id, r.model.eos_token_id), (Some(3), Some(4), None));
    assert_eq!(r.data.sources[0].shards, [here.join("shards/web-1"), here.join("shards/web-2")]);
    assert_eq!(r.data.sources[1].shards, [here.parent().unwrap().join("elsewhere/code")]);
    assert_eq!((r.train.precision, r.router.balance), (Precision::Bf16, Balance::Pid));
    assert_eq!((r.train.sequences_per_step(), r.train.micro_batches_per_step(), r.train.total_tokens()), (16, 4, 61_440));
    assert_eq!(r.router.freeze_tokens, 4096);
    let (s, b) = (&r.schedule, &r.router.balance_betas);
    assert_eq!((s.kind, s.lr, s.min_lr, s.warmup_steps, s.decay_steps), (ScheduleKind::Wsd, 1e-2, 1e-5, 4, 10));
    assert_eq!(b, &[0.5, 0.6]);
}

#[test]
fn resolved_toml_holds_every_key_and_reads_back_equal() {
    let mut paths = shipped();
    paths.push(root("tests/fixtures/recipe/complete.toml"));
    let dir = tempfile::tempdir().unwrap();
    for path in &paths {
        let first = recipe::load(path, &[]).unwrap();
        let text = first.to_toml();
        let copy = dir.path().join("resolved.toml");
        std::fs::write(&copy, &text).unwrap();
        let second = recipe::load(&copy, &[]).unwrap();
        assert_eq!(first, second, "{}", path.display());
        let plain = |mut r: Recipe| {
            r.warnings.clear();
            format!("{r:?}")
        };
        assert_eq!(plain(first), plain(second.clone()), "{}", path.display());
        assert_eq!(second.to_toml(), text);
    }
    // The last recipe names every key, so its resolved form does too (tokens having become steps).
    let document: toml_edit::DocumentMut = std::fs::read_to_string(dir.path().join("resolved.toml")).unwrap().parse().unwrap();
    for key in KEYS
        .iter()
        .filter(|k| !["tokens", "warmup_tokens"].contains(&k.path.rsplit('.').next().unwrap()) || k.path == "eval.tokens")
    {
        let mut item = document.as_item();
        for part in key.path.split('.') {
            item = match part {
                "*" => item.as_array_of_tables().map(|_| item.get(0).unwrap()).unwrap(),
                name => item.get(name).unwrap_or_else(|| panic!("{} is not in the resolved recipe", key.path)),
            };
        }
    }
}

#[test]
fn defaults_of_the_schema_are_values_of_their_keys() {
    for key in KEYS {
        if let schema::Default::Value(text) = key.default {
            let (table, leaf) = key.path.rsplit_once('.').unwrap();
            let (table, array) = (table.trim_end_matches(".*"), key.path.contains('*'));
            if array {
                continue; // `weight`, whose default the small recipe relies on
            }
            let (with, _) = small_with(table, &format!("{leaf} = {text}"));
            let (a, b) = (load(&with, &[]).unwrap(), load(SMALL, &[]).unwrap());
            let strip = |mut r: Recipe| {
                r.run.dir = PathBuf::new();
                r.data.sources.clear();
                match key.path {
                    "train.micro_batch" => r.train.micro_batch = 0,
                    "schedule.lr" => r.schedule.lr = 0.0,
                    _ => {}
                }
                r
            };
            assert_eq!(strip(a), strip(b), "{}", key.path);
        }
    }
    assert_eq!(load(SMALL, &[]).unwrap().data.sources[0].weight, 1.0);
}

/// The learning rates of a run that is stopped and resumed anywhere: each piece reads the recipe that the one before wrote
/// into the run's directory, and knows only how many steps are done.
#[test]
fn pieces_of_a_run_have_the_learning_rates_of_the_whole() {
    let dir = tempfile::tempdir().unwrap();
    let written = dir.path().join("recipe.toml");
    for kind in ["cosine", "linear", "constant", "wsd"] {
        let kind = format!("schedule.kind={kind}");
        let sets = [&kind, "schedule.lr=0.0007", "schedule.min_lr=1.3e-5", "schedule.warmup_steps=3", "schedule.decay_steps=5"];
        let mut recipe = load(SMALL, &sets).unwrap();
        let whole: Vec<u64> = (0..20).map(|t| Schedule::of(&recipe).lr_at(t).to_bits()).collect();
        let mut pieces = Vec::new();
        for start in [0, 1, 3, 4, 11, 19] {
            std::fs::write(&written, recipe.to_toml()).unwrap();
            recipe = recipe::load(&written, &[]).unwrap();
            pieces.truncate(start as usize);
            pieces.extend((start..20).map(|t| Schedule::of(&recipe).lr_at(t).to_bits()));
            assert_eq!(pieces, whole, "{kind}");
        }
        assert!(whole.windows(2).filter(|w| w[0] != w[1]).count() >= 2, "{kind}");
    }
}

#[test]
fn resume_tells_what_changed_and_what_may_not() {
    let path = root("tests/fixtures/recipe/complete.toml");
    let with = |sets: &[&str]| {
        let mut all = vec!["stages=[]".to_string()];
        all.extend(sets.iter().map(|s| s.to_string()));
        recipe::load(&path, &all).unwrap()
    };
    let old = with(&[]);
    assert_eq!(old.resume_differences(&old), recipe::ResumeDifferences::default());
    for (sets, allowed) in [
        (&["train.steps=60"][..], true),
        (&["train.micro_batch=8"], true),
        (&["train.threads=1"], true),
        (&["checkpoint.every=10"], true),
        (&["eval.every=3"], true),
        (&["metrics.every=9"], true),
        (&["schedule.lr=5e-3"], true),
        (&["optimizer.clip=2"], true),
        (&["run.dir=/somewhere/else"], true),
        (&["tokenizer.path=/somewhere/else/tokenizer.json"], true),
        (&["data.sources.1.path=/somewhere/else/code"], true),
        (&["data.validation.0.path=other"], true),
        (&["run.seed=8"], false),
        (&["train.seq_len=64"], false),
        (&["train.global_batch_tokens=4096"], false),
        (&["train.precision=f32"], false),
        (&["model.hidden_size=80"], false),
        (&["model.rope_theta=1e6"], false),
        (&["tokenizer.path=other.json"], false),
        (&["data.sources.1.path=shards/other"], false),
        (&["data.sources.1.weight=1"], true),
        (&["data.sources=[{path=\"shards/web-1\"}]"], false),
        (&["data.document_mask=false"], false),
        (&["router.balance=sign"], false),
    ] {
        let new = with(sets);
        let d = new.resume_differences(&old);
        let key = sets[0].split('=').next().unwrap();
        assert_eq!(d.refused.is_empty(), allowed, "{sets:?}: {d:?}");
        assert!(d.allowed.iter().chain(&d.refused).any(|s| s.contains(&format!("`{key}"))), "{sets:?}: {d:?}");
        if allowed {
            assert_eq!(d.allowed.len(), 1, "{sets:?}: {d:?}");
            assert!(d.allowed[0].contains(" was ") && d.allowed[0].contains(" and is now "), "{d:?}");
        }
    }
    // A key that is no longer given is a change as well.
    let fewer = with(&["data.sources=[{name=\"web\", path=[\"shards/web-1\", \"shards/web-2\"], weight=3}]"]);
    let d = fewer.resume_differences(&old);
    assert!(d.refused.iter().any(|s| s.contains("`data.sources.1.path`") && s.contains("is now not given")), "{d:?}");
}

#[test]
fn stages_say_what_differs() {
    let text = format!("{SMALL}{STAGES}");
    let r = load(&text, &[]).unwrap();
    assert_eq!(r.num_stages(), 2);
    let (first, long) = (r.stage(0).unwrap(), r.stage(1).unwrap());
    assert_eq!((r.train.steps, r.schedule.lr), (20, 2e-3), "the recipe itself describes its first stage");
    assert_eq!((first.train.steps, first.train.seq_len, first.schedule.lr), (20, 256, 2e-3));
    assert_eq!((long.train.steps, long.train.seq_len, long.schedule.lr), (20, 512, 1e-3));
    assert_eq!((long.model.rope.theta, long.schedule.kind), (1e6, ScheduleKind::Constant));
    let weights = |r: &Recipe| r.data.sources.iter().map(|s| s.weight).collect::<Vec<_>>();
    assert_eq!((weights(&first), weights(&long)), (vec![1.0, 1.0], vec![0.2, 0.8]));
    assert!(r.stage(2).is_none() && load(SMALL, &[]).unwrap().stage(0).is_some());

    let dir = tempfile::tempdir().unwrap();
    let copy = dir.path().join("resolved.toml");
    std::fs::write(&copy, r.to_toml()).unwrap();
    assert_eq!(recipe::load(&copy, &[]).unwrap(), r);

    for (old, new, words) in [
        ("code = 0.8", "cod = 0.8", "did you mean `code`"),
        (", code = 0.8", "", "leaves out `code`"),
        ("code = 0.8", "code = \"0.8\"", "`code` is the text"),
        ("seq_len = 512", "seq_len = 300", "stage `long`: `train.global_batch_tokens`"),
        ("seq_len = 512", "seq_len = 4096", "stage `long`: `train.seq_len` (4096) is longer"),
        ("name = \"long\"", "name = \"first\"", "two stages are named `first`"),
        ("tokens = 40960", "tokens = 40960\nsteps = 3", "`stages.1.steps` and `stages.1.tokens` are both given"),
        ("name = \"long\"\n", "", "the key `stages.1.name` is missing"),
        ("rope_theta = 1e6", "rope_thta = 1e6", "did you mean `stages.1.rope_theta`"),
    ] {
        assert!(text.contains(old));
        let error = refusal(&text.replacen(old, new, 1), &[]);
        assert!(error.contains(words), "{new}: expected `{words}` in\n{error}");
    }
    // What is wrong in all stages is told once, as no stage's fault.
    let error = refusal(&text, &["model.head_dim=10"]);
    assert!(!error.contains("stage `") && !error.contains("problems"), "{error}");
    // The length may be the stages' own affair.
    load(&text.replacen("steps = 20\n", "", 1).replacen("lr = 2e-3", "steps = 4", 1), &[]).unwrap();
    let error = refusal(&text.replacen("steps = 20\n", "", 1), &[]);
    assert!(error.contains("the length of the run is missing"), "{error}");
}
