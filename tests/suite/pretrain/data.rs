//! Training data through the program: weights and limits that change the mixture, conversations of which only answers are learnt.

use zaya::data::{Loader, LoaderConfig, SourceSpec};
use zaya::model::{Cx, Model, ParamStore};
use zaya::recipe::Packing;
use zaya::tensor::Backend;
use zaya::tensor::backend::Precision;
use zaya::tensor::cpu::Cpu;

use super::*;

fn counts(lab: &Lab, run: &str, step: u64) -> Vec<u64> {
    let loader = lab.checkpoint(run, step).meta().loader.clone();
    loader["counts"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect()
}

#[test]
fn weights_may_change_at_a_resume() {
    let lab = Lab::new();
    lab.run("run", &["--stop-at", "4"]).expect(0);
    assert_eq!(counts(&lab, "run", 4), [11, 5]);
    let changed = ["--resume", "--set", "data.sources.0.weight=0.1", "--set", "data.sources.1.weight=0.9"];
    lab.run("run", &[&changed[..], &["--stop-at", "6"]].concat()).expect(0).says(&[
        "note: `data.sources.0.weight` was 0.7 and is now 0.1",
        "mixed by new weights from here on; drawn so far, in sequences: 11 of `a`, 5 of `b`",
    ]);
    assert_eq!(counts(&lab, "run", 6), [12, 12], "of 8 more, 1 and 7");
    // A second resume with these weights goes on, and says nothing of them.
    let done = lab.run("run", &changed).expect(0);
    assert!(!done.err.contains("new weights"), "{}", done.err);
    // As many as a run that is stopped once.
    lab.run("once", &["--stop-at", "4"]).expect(0);
    lab.run("once", &changed).expect(0);
    lab.assert_same_state("run", "once", 8);
    assert_eq!(lab.lines("run")[&8], lab.lines("once")[&8]);
}

#[test]
fn data_that_may_not_be_repeated() {
    let lab = Lab::new();
    let once = ["--set", "data.sources.0.max_epochs=1", "--set", "data.sources.1.max_epochs=1"];
    let done = lab.run("short", &once).expect(2);
    done.says(&["the data end before the run does", "max_epochs"]);
    assert!(!lab.path("short").join(CKPT_DIR).exists());
    let plan = |sets: &[&str]| {
        let out = lab.command("plan", &[sets, &["--dry-run"]].concat()).output().unwrap();
        assert_eq!(out.status.code(), Some(0));
        String::from_utf8(out.stdout).unwrap()
    };
    assert!(plan(&once).contains("EXHAUSTED"));
    // One of them may go on, and takes what the other cannot give.
    let one = ["--set", "data.sources.0.max_epochs=1"];
    assert!(!plan(&one).contains("EXHAUSTED"));
    lab.run("run", &one).expect(0);
    let tokens = fs::metadata(lab.path("a.bin")).unwrap().len() / 2;
    assert_eq!(counts(&lab, "run", 8), [tokens / 16, 32 - tokens / 16]);
    for stop in ["3", "5"] {
        lab.run("pieces", &[&one[..], &["--resume", "--stop-at", stop]].concat()).expect(0);
    }
    lab.run("pieces", &[&one[..], &["--resume"]].concat()).expect(0);
    lab.assert_same_run("run", "pieces");
}

/// Conversations from the program's own shards: the loss is the mean over exactly the tokens of answers, and it falls.
#[test]
fn conversations_teach_their_answers_alone() {
    let lab = Lab::new();
    fs::write(lab.path("t.txt"), varied_text(60)).unwrap();
    let run = |args: &[&str]| finish(zaya().current_dir(lab.dir.path()).args(args)).expect(0);
    run(&[
        "tokenize",
        "--train-vocab",
        "300",
        "--special",
        "<|start|>",
        "--special",
        "<|end|>",
        "--input",
        "t.txt",
        "--output",
        "tok.json",
    ]);
    let template = "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}";
    fs::write(lab.path("chat_template.jinja"), template).unwrap();
    let mut random = Random(3);
    let words = ["river", "silver", "morning", "evening", "winter"];
    let mut records = String::new();
    let mut answers = 0;
    for _ in 0..40 {
        let word = words[random.below(5) as usize];
        let think = "matter ".repeat(random.below(12) as usize);
        let answer = format!("<think>{think}</think>{word} {word}");
        answers += 1;
        let record =
            serde_json::json!({"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": answer}]});
        records += &format!("{record}\n");
    }
    fs::write(lab.path("chat.jsonl"), records).unwrap();
    run(&["tokenize", "--chat", "--tokenizer", "tok.json", "--input", "chat.jsonl", "--output", "chat"]);
    let sets = [
        "data.sources=[{path=\"chat\"}]",
        "data.packing=best-fit",
        "data.document_mask=true",
        "model.vocab_size=300",
        "train.seq_len=48",
        "train.global_batch_tokens=192",
        "train.steps=30",
        "checkpoint.every=1000",
        "schedule.lr=2e-2",
    ];
    let args: Vec<&str> = sets.iter().flat_map(|s| ["--set", s]).collect();
    let done = lab.run("run", &args).expect(0);
    assert!(!done.err.contains("never shown"), "{}", done.err);
    let lines = lab.metrics("run");

    // The first step's loss, from the reference's own pieces: the model at step 0 on the rows that are answers.
    let config = LoaderConfig {
        seed: 7,
        packing: Packing::BestFit,
        seq_len: 48,
        batch_sequences: 4,
        document_mask: true,
        eod_mask_loss: false,
        vocab_size: 300,
    };
    let spec = SourceSpec { name: "chat".into(), weight: 1.0, paths: vec![lab.path("chat")], first_sample: 0, max_epochs: None };
    let loader = Loader::open(config, &[spec]).unwrap();
    let tokenizer = tokenizers::Tokenizer::from_file(lab.path("tok.json")).unwrap();
    let id = |text: &str| tokenizer.token_to_id(text).unwrap();
    let (start, end) = (id("<|start|>"), id("<|end|>"));
    // What begins the assistant's turn, in ids.
    let header = tokenizer.encode("<|start|>assistant\n", false).unwrap().get_ids().to_vec();
    assert_eq!(header[0], start);
    let model = Model::new(lab.recipe(&sets).model);
    let backend = Cpu::new(Precision::F32);
    let recipe = lab.recipe(&sets);
    let params = ParamStore::from_host(&backend, &model.table, |p| {
        Ok(zaya::model::init::initial_values(&model.table.specs[p], &recipe.model, 7))
    })
    .unwrap();
    for step in 0..3 {
        let batch = loader.batch(step, 0..4).unwrap();
        // By hand: after a header everything is learnt up to and with the token that ends the turn.
        let mut by_hand = 0;
        for sequence in batch.ids.chunks(48) {
            let mut learning = false;
            for at in 0..48 {
                by_hand += u64::from(learning);
                learning &= sequence[at] != end;
                learning |= sequence[..=at].ends_with(&header);
            }
        }
        assert_eq!(lines[step as usize]["loss_tokens"], by_hand, "step {step}");
        if step == 0 {
            let rows = backend.rows(&batch).unwrap();
            let loss = model.loss(&Cx::new(&backend, &params, &rows)).unwrap();
            assert_eq!(loss.count, by_hand);
            assert_close(&[lines[0]["loss"].as_f64().unwrap()], &[loss.sum / by_hand as f64], 1e-6);
        }
    }
    let loss = |i: usize| lines[i]["loss"].as_f64().unwrap();
    assert!(loss(29) < 0.7 * loss(0), "{} to {}", loss(0), loss(29));
    assert_eq!(answers, 40);
}
