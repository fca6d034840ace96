//! Batches that are refused: the run goes on as one that has never seen them, or ends.

use zaya::data::Loader;

use zaya::model::init::initial_values;
use zaya::model::{Model, ParamTable};
use zaya::optim::schedule::Schedule;
use zaya::parallel::Alone;
use zaya::tensor::Backend;
use zaya::tensor::backend::Precision;
use zaya::tensor::cpu::Cpu;
use zaya::train::config::{balance_config, loader_config, source_specs};
use zaya::train::engine::Native;
use zaya::train::state::TrainState;
use zaya::train::step::{StepConfig, Watch, step};

use super::*;

const SKIP: [&str; 2] = ["--set", "guards.non_finite=skip"];
const ROLL_BACK: [&str; 2] = ["--set", "guards.non_finite=rollback"];

fn events_of(lab: &Lab, run: &str, event: &str) -> Vec<Map<String, Value>> {
    lab.events(run).into_iter().filter(|e| e["event"] == event).collect()
}

/// Batches of a run's events `batch_refused`.
fn refused(lab: &Lab, run: &str) -> Vec<u64> {
    events_of(lab, run, "batch_refused").iter().map(|e| e["batch"].as_u64().unwrap()).collect()
}

#[test]
fn a_batch_that_is_passed_over_is_as_if_it_were_not_there() {
    let lab = Lab::new();
    lab.run("run", &["--set", "guards.skip_batches=[2, [4, 5]]"]).expect(0).says(&["finished"]);
    assert_eq!(refused(&lab, "run"), [2, 4, 5]);
    // By hand: batches 0, 1, 3, 6, ... make steps 1, 2, 3, 4, ...
    let recipe = lab.recipe(&[]);
    let (table, alone) = (ParamTable::new(&recipe.model), Alone::new(&ParamTable::new(&recipe.model)));
    let loader = Loader::open(loader_config(&recipe), &source_specs(&recipe, &[0, 0])).unwrap();
    let engine = Native { backend: Cpu::new(Precision::F32), model: Model::new(recipe.model.clone()) };
    let values = |id: usize| Ok(initial_values(&table.specs[id], &recipe.model, recipe.run.seed));
    let mut state = TrainState::new(&engine.backend, &recipe.model, &balance_config(&recipe), values).unwrap();
    for (t, batch) in [0, 1, 3, 6, 7, 8, 9, 10].into_iter().enumerate() {
        let micro_batches = [0..2, 2..4].map(|rows| loader.batch(batch, rows).unwrap());
        let lr = Schedule::of(&recipe).lr_at(t as u64);
        step(&engine, &mut state, &StepConfig::of(&recipe), &alone, &micro_batches, lr, &Watch::NONE).unwrap().done().unwrap();
    }
    let saved = lab.checkpoint("run", 8);
    for spec in &table.specs {
        let id = table.find(&spec.name).unwrap();
        let by_hand = engine.backend.download(&state.params[id]).unwrap();
        assert!(by_hand == saved.read(&spec.name).unwrap(), "{}", spec.name);
    }
    assert_eq!(saved.meta().tokens_seen, 8 * 64);
    assert_eq!(saved.meta().loader["samples"], 11 * 4);
}

#[test]
fn a_skipped_batch_leaves_nothing_behind() {
    let lab = Lab::new();
    for ranks in ["1", "2", "3"] {
        let of = |args: &[&'static str]| [args, &["--ranks", ranks]].concat();
        let unseen = format!("unseen-{ranks}");
        lab.run(&unseen, &of(&["--set", "guards.skip_batches=[3]"])).expect(0);
        // On all ranks; on one of them; in the gradients alone, which the ranks have reduced by then.
        let one = if ranks == "1" { "" } else { "/rank1" };
        for (i, fail) in ["loss:nan@3".to_string(), format!("loss:nan@3{one}"), format!("gradient:nan@3{one}")].iter().enumerate()
        {
            let run = format!("skipped-{ranks}-{i}");
            lab.run_failing(&run, fail, &of(&SKIP)).expect(0).says(&[
                "step 4: the loss (",
                "is not a finite number",
                "nothing of batch 3 was applied",
                "goes on with the next batch",
                "finished",
            ]);
            lab.assert_same_run(&unseen, &run);
            let events = events_of(&lab, &run, "batch_refused");
            assert_eq!(events.len(), 1);
            assert_eq!(
                (&events[0]["at_step"], &events[0]["batch"], &events[0]["policy"]),
                (&3.into(), &3.into(), &"skip".into())
            );
        }
        // Killed before and after.
        for kill in [2, 3, 4, 6] {
            let run = format!("killed-{ranks}-{kill}");
            let done = lab.run_failing(&run, &format!("gradient:nan@3,step:kill@{kill}"), &of(&SKIP));
            assert_eq!(done.signal, Some(libc::SIGKILL), "{}", done.err);
            lab.run_failing(&run, "gradient:nan@3", &of(&["--resume", SKIP[0], SKIP[1]])).expect(0);
            lab.assert_same_run(&unseen, &run);
        }
    }
}

#[test]
fn a_run_that_ends_behind_a_refused_batch_knows_of_it() {
    let lab = Lab::new();
    lab.run("unseen", &["--set", "guards.skip_batches=[3]"]).expect(0);
    // Batch 3 is refused, and a signal comes before another step is made: step 3 is saved again.
    let mut command = lab.command("run", &SKIP);
    let mut running = Running::start(command.env("ZAYA_FAIL", "loss:nan@3,step:sleep=300ms"));
    running.wait_for("nothing of batch 3 was applied");
    running.signal(libc::SIGTERM);
    running.finish();
    assert_eq!(lab.checkpoint("run", lab.steps("run")[0]).meta().loader["refused"], serde_json::json!([[3, 3]]));
    lab.run("run", &["--resume"]).expect(0);
    lab.assert_same_state("unseen", "run", 8);
}

#[test]
fn going_back_passes_over_all_batches_since_the_checkpoint() {
    for lab in Lab::both() {
        let every = ["--set", "checkpoint.every=3"];
        for ranks in ["1", "2"] {
            let of = |args: &[&'static str]| [args, &every[..], &["--ranks", ranks]].concat();
            let unseen = format!("unseen-{ranks}");
            lab.run(&unseen, &of(&["--set", "guards.skip_batches=[[3, 5], [9, 9]]"])).expect(0);
            // After step 3, saved, batch 5 is bad; after step 6, made of batch 8 and saved, batch 9 is.
            let fail = "loss:nan@5,gradient:nan@9/rank0";
            let run = format!("back-{ranks}");
            lab.run_failing(&run, fail, &of(&ROLL_BACK)).expect(0).says(&[
                "goes back from step 5 to step 3, and on with batch 6",
                "goes back from step 6 to step 6, and on with batch 10",
                "finished",
            ]);
            lab.assert_same_run(&unseen, &run);
            let spans: Vec<Value> = events_of(&lab, &run, "rolled_back").into_iter().map(|e| e["batches"].clone()).collect();
            assert_eq!(spans, [serde_json::json!([3, 5]), serde_json::json!([9, 9])]);
            // Killed on the way back, and resumed.
            let run = format!("killed-{ranks}");
            let done = lab.run_failing(&run, &format!("{fail},guard.rollback:kill@2"), &of(&ROLL_BACK));
            assert_eq!(done.signal, Some(libc::SIGKILL), "{}", done.err);
            lab.run_failing(&run, fail, &of(&["--resume", ROLL_BACK[0], ROLL_BACK[1]])).expect(0);
            lab.assert_same_run(&unseen, &run);
        }
    }
}

#[test]
fn without_a_checkpoint_to_go_back_to_the_batch_is_skipped() {
    let lab = Lab::new();
    let every = ["--set", "checkpoint.every=3"];
    lab.run("unseen", &[&every[..], &["--set", "guards.skip_batches=[1]"]].concat()).expect(0);
    lab.run_failing("run", "loss:nan@1", &[ROLL_BACK, every].concat()).expect(0).says(&["There is no checkpoint of this stage"]);
    lab.assert_same_run("unseen", "run");
}

/// The newest checkpoint is damaged: the one before it is what the run goes back to.
#[test]
fn a_damaged_checkpoint_is_passed_over_on_the_way_back() {
    let lab = Lab::new();
    let background = ["--set", "checkpoint.async=false"];
    lab.run("unseen", &[&background[..], &["--set", "guards.skip_batches=[[3, 4]]"]].concat()).expect(0);
    // A checkpoint has 2 files; the 4th save's first piece is damaged as it is written.
    let first_pieces = {
        lab.run("count", &[&background[..], &["--stop-at", "1"]].concat()).expect(0);
        lab.checkpoint("count", 1).manifest().entries.len()
    };
    let fail = format!("loss:nan@4,ckpt.write:bitflip@{}", 3 * first_pieces + 1);
    lab.run_failing("run", &fail, &[ROLL_BACK, background].concat()).expect(0).says(&[
        "skipped",
        "is damaged",
        "goes back from step 4 to step 3, and on with batch 5",
    ]);
    lab.assert_same_run("unseen", "run");
}

#[test]
fn by_default_the_run_ends() {
    let lab = Lab::new();
    for (run, ranks) in [("one", "1"), ("two", "2")] {
        lab.run_failing(run, "gradient:nan@3", &["--ranks", ranks]).expect(1).says(&[
            "step 4: the loss (",
            "nothing of batch 3 was applied",
            "guards.non_finite = \"skip\" or \"rollback\"",
        ]);
        assert_eq!(lab.steps(run)[0], 3);
        lab.run(run, &["--resume", "--ranks", ranks]).expect(0).says(&["finished"]);
    }
}

#[test]
fn too_many_refusals_end_the_run() {
    let lab = Lab::new();
    lab.run_failing("run", "loss:nan", &[&SKIP[..], &["--set", "guards.limit=2"]].concat())
        .expect(1)
        .says(&["3 batches were refused without 128 accepted steps", "guards.limit"]);
    assert_eq!(refused(&lab, "run"), [0, 1, 2]);
}

/// A window that is full after few steps, and a threshold that this run's ordinary steps stay below.
const SPIKES: [&str; 6] = ["--set", "guards.spike_window=8", "--set", "guards.spike_threshold=40", "--set", "train.steps=12"];

#[test]
fn a_spike_is_refused_and_judged_alike_after_a_resume() {
    let lab = Lab::new();
    let skip = [&SPIKES[..], &["--set", "guards.spike=skip"]].concat();
    lab.run("calm", &skip).expect(0);
    assert_eq!(refused(&lab, "calm"), [] as [u64; 0], "this run has no spikes of its own");
    lab.run("unseen", &[&skip[..], &["--set", "guards.skip_batches=[6, 9]"]].concat()).expect(0);
    let fail = "gradient:spike@6,loss:spike@9";
    lab.run_failing("whole", fail, &skip).expect(0).says(&[
        "step 7: the gradient norm, ",
        "stands out from the last 6 steps",
        "step 9: the loss, ",
        "from the last 8 steps",
    ]);
    lab.assert_same_run("unseen", "whole");
    let guards = |run: &str| lab.checkpoint(run, 12).meta().guards.clone();
    assert_eq!(guards("whole")["window"].as_array().unwrap().len(), 8);
    for k in [5, 6, 7, 8] {
        let run = format!("pieces-{k}");
        lab.run_failing(&run, fail, &[&skip[..], &["--stop-at", &k.to_string()]].concat()).expect(0);
        lab.run_failing(&run, fail, &[&skip[..], &["--resume"]].concat()).expect(0);
        lab.assert_same_run("whole", &run);
        assert_eq!(guards(&run), guards("whole"), "{k}");
    }
    // Several ranks judge the same sums.
    let two = [&skip[..], &["--ranks", "2"]].concat();
    lab.run("unseen-two", &[&two[..], &["--set", "guards.skip_batches=[6]"]].concat()).expect(0);
    lab.run_failing("two", "gradient:spike@6/rank1", &two).expect(0);
    lab.assert_same_run("unseen-two", "two");
}

#[test]
fn a_spike_may_only_be_told() {
    let lab = Lab::new();
    let tell = [&SPIKES[..], &["--set", "guards.spike=tell"]].concat();
    lab.run_failing("told", "loss:spike@6", &tell).expect(0).says(&["it was applied, as guards.spike = \"tell\" says"]);
    let events = events_of(&lab, "told", "spike");
    assert_eq!((events.len(), &events[0]["at_step"]), (1, &7.into()));
    // The loss alone was wrong, so that nothing else differs.
    lab.run("calm", &SPIKES).expect(0);
    lab.assert_same_state("calm", "told", 12);
}

#[test]
fn refused_batches_around_the_borders_of_stages() {
    let stages = "[[stages]]\nname = \"a\"\nsteps = 3\n[[stages]]\nname = \"b\"\nsteps = 2\nseq_len = 32\nmicro_batch = 1\n\
                  weights = { a = 0.25, b = 0.75 }\n[[stages]]\nname = \"c\"\nsteps = 3\n";
    let lab = Lab::with(&format!("{RECIPE}{stages}"));
    for bad in [2, 3, 4, 5] {
        let (unseen, fail) = (format!("unseen-{bad}"), format!("loss:nan@{bad}"));
        lab.run(&unseen, &["--set", &format!("guards.skip_batches=[{bad}]")]).expect(0);
        for (name, policy) in [("skip", SKIP), ("back", ROLL_BACK)] {
            let run = format!("{name}-{bad}");
            // With a checkpoint after every step, going back passes over the bad batch alone.
            lab.run_failing(&run, &fail, &policy).expect(0).says(&["finished"]);
            lab.assert_same_run(&unseen, &run);
        }
        for k in 1..8 {
            let run = format!("pieces-{bad}-{k}");
            lab.run_failing(&run, &fail, &[&SKIP[..], &["--stop-at", &k.to_string()]].concat()).expect(0);
            lab.run_failing(&run, &fail, &[&SKIP[..], &["--resume"]].concat()).expect(0);
            lab.assert_same_run(&unseen, &run);
        }
        // Batch 5 is the third stage's first one; the others were drawn by the stages before.
        let samples = |run: &str| lab.checkpoint(run, 8).meta().loader["samples"].as_u64().unwrap();
        assert_eq!(samples(&unseen), 4 * if bad == 5 { 4 } else { 3 });
    }
}

#[test]
fn clipped_experts_are_the_same_on_any_ranks() {
    let lab = Lab::new();
    let clip = ["--set", "optimizer.expert_clip=0.002", "--set", "train.deterministic=layout"];
    lab.run("one", &clip).expect(0);
    let clipped: Vec<u64> = lab.metrics("one").iter().filter_map(|l| l.get("clipped_experts")?.as_u64()).collect();
    assert!(!clipped.is_empty() && clipped.iter().all(|n| *n <= 8), "{clipped:?}");
    for (run, args) in [("two", &["--ranks", "2"][..]), ("three", &["--ranks", "3", "--set", "parallel.ep=3"])] {
        lab.run(run, &[&clip[..], args].concat()).expect(0);
        lab.assert_same_run("one", run);
    }
    lab.run("unclipped", &clip[2..]).expect(0);
    assert!(lab.metrics("unclipped").iter().all(|l| !l.contains_key("clipped_experts")));
    assert_ne!(State::of(&lab.checkpoint("one", 8)).tensors, State::of(&lab.checkpoint("unclipped", 8)).tensors);
}

#[test]
fn mistakes_are_named() {
    let lab = Lab::new();
    for (set, says) in [
        ("guards.non_finite=skp", "did you mean `skip`?"),
        (
            "guards.skip_batches=7",
            "expected an array of integers of at least 0 and of pairs [first, last] of them, got the integer 7",
        ),
        ("guards.skip_batches=[[5, 3]]", "the pair [5, 3] ends before it begins"),
        ("guards.skip_batches=[1, \"2\"]", "one of its entries is the text \"2\""),
        ("guards.spike_windw=8", "did you mean"),
    ] {
        lab.run("run", &["--set", set]).expect(2).says(&[says]);
    }
}
