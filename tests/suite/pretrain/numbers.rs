//! The numbers: held-out scores, other ways to cut a batch, the other backend, weights from elsewhere, `debug forward`.

use std::collections::HashMap;

use candle_core::{Device, Tensor, safetensors};
use zaya::data::{Loader, LoaderConfig, SourceSpec, ValidationSet};
use zaya::hf::{self, SaveOptions, StoredDtype};
use zaya::model::init::initial_values;
use zaya::model::{Cx, Model, ParamStore, ParamTable};
use zaya::optim::schedule::Schedule;
use zaya::recipe::Packing;
use zaya::tensor::Backend;
use zaya::tensor::backend::Precision;
use zaya::tensor::cpu::Cpu;

use super::*;

fn losses(lab: &Lab, run: &str) -> Vec<f64> {
    lab.metrics(run).iter().map(|l| l["loss"].as_f64().unwrap()).collect()
}

#[test]
fn held_out_scores_equal_a_direct_computation() {
    let lab = Lab::new();
    let text = |i: usize| format!("the cat number {i} sat on the mat, \u{e4}nd the dog {} ate", i * 7 % 10);
    let line = |i: usize| format!("{{\"text\": \"{}\"}}\n", text(i));
    fs::write(lab.path("t.jsonl"), (0..40).map(line).collect::<String>()).unwrap();
    let text_bytes: usize = (0..40).map(|i| text(i).len()).sum();
    let input = lab.path("t.jsonl");
    let tokenize = |args: &[&str], output: &str| {
        let mut command = zaya();
        finish(command.arg("tokenize").args(args).arg("--input").arg(&input).arg("--output").arg(lab.path(output))).expect(0);
    };
    tokenize(&["--train-vocab", "300"], "tokenizer.json");
    tokenize(&["--tokenizer", lab.path("tokenizer.json").to_str().unwrap()], "text");
    let recipe = RECIPE.replace("vocab_size = 64", "vocab_size = 300").replace("path = \"b\"", "path = \"text\"");
    let held_out =
        "[[data.validation]]\nname = \"text\"\npath = \"text\"\n[[data.validation]]\npath = \"held-out\"\n[eval]\nevery = 3\n";
    fs::write(lab.path("r.toml"), format!("{recipe}{held_out}")).unwrap();
    lab.run("run", &[]).expect(0).says(&["step 3  validation text: loss", "bits per byte", "validation held-out: loss"]);

    let scored: Vec<u64> =
        lab.metrics("run").iter().filter(|l| l.contains_key("val_loss")).map(|l| l["step"].as_u64().unwrap()).collect();
    assert_eq!(scored, [3, 6, 8], "every third step, and the last");

    let recipe = lab.recipe(&[]);
    let (backend, model) = (Cpu::new(Precision::F32), Model::new(recipe.model.clone()));
    for step in [3, 8] {
        let c = lab.checkpoint("run", step);
        let params = ParamStore::from_host(&backend, &model.table, |id| c.read(&model.table.specs[id].name)).unwrap();
        let line = &lab.metrics("run")[step as usize - 1];
        for (i, name) in ["text", "held-out"].into_iter().enumerate() {
            let set = ValidationSet::open(&[lab.path(name)], 16, false, 300).unwrap();
            // One window at a time, where the run takes two.
            let (mut sum, mut count) = (0.0, 0);
            for w in 0..set.num_windows() {
                let rows = backend.rows(&set.batch(w..w + 1).unwrap()).unwrap();
                let loss = model.loss(&Cx::new(&backend, &params, &rows)).unwrap();
                (sum, count) = (sum + loss.sum, count + loss.count);
            }
            assert_eq!(count, set.dataset().num_tokens() - 1, "every token but the first is predicted once");
            let mean = sum / count as f64;
            let score = &line["validation"][name];
            assert_close(&[score["loss"].as_f64().unwrap()], &[mean], 1e-6);
            assert_eq!(score["tokens"], count);
            if i == 0 {
                let bpb = mean / std::f64::consts::LN_2 * set.dataset().num_tokens() as f64 / text_bytes as f64;
                assert_close(&[line["val_bpb"].as_f64().unwrap()], &[bpb], 1e-6);
                assert_eq!(line["val_loss"], score["loss"]);
                assert_eq!(line["val_bpb"], score["bpb"]);
            } else {
                assert!(score["bpb"].is_null(), "shards that do not say how many bytes they stand for");
            }
        }
    }
    // A part of the set: whole sequences, rounded down.
    lab.run("part", &["--set", "eval.tokens=47", "--stop-at", "3"]).expect(0);
    assert_eq!(lab.metrics("part")[2]["validation"]["text"]["tokens"], 32);
    // Held-out data alone asks for nothing.
    let text = fs::read_to_string(lab.path("r.toml")).unwrap().replace("[eval]\nevery = 3\n", "");
    fs::write(lab.path("r.toml"), text).unwrap();
    lab.run("never", &[]).expect(0);
    assert!(lab.metrics("never").iter().all(|l| !l.contains_key("val_loss")));
}

#[test]
fn the_first_token_of_a_document_can_be_left_out_of_the_loss() {
    let lab = Lab::new();
    let set = ValidationSet::open(&[lab.path("held-out")], 16, false, 64).unwrap().eod_mask_loss(true);
    let all = set.batch(0..set.num_windows()).unwrap();
    assert!(all.doc_start.is_empty());
    let tokens = set.dataset().num_tokens();
    assert_eq!(all.num_labels(), tokens - set.dataset().num_documents());
    let masked = ValidationSet::open(&[lab.path("held-out")], 16, true, 64).unwrap();
    assert_eq!(masked.batch(0..masked.num_windows()).unwrap().labels, all.labels);

    let open = |document_mask, eod_mask_loss| {
        let config = LoaderConfig {
            seed: 7,
            packing: Packing::Stream,
            seq_len: 16,
            batch_sequences: 4,
            document_mask,
            eod_mask_loss,
            vocab_size: 64,
        };
        let spec = SourceSpec { name: "a".into(), weight: 1.0, paths: vec![lab.path("a")], first_sample: 0, max_epochs: None };
        Loader::open(config, &[spec]).unwrap()
    };
    let (plain, eod, mask) = (open(false, false), open(false, true), open(true, false));
    let mut left_out = 0;
    for step in 0..10 {
        let [plain, eod, mask] = [&plain, &eod, &mask].map(|l| l.batch(step, 0..4).unwrap());
        assert_eq!(plain.num_labels(), 64);
        assert_eq!((&plain.ids, &plain.doc_start), (&eod.ids, &eod.doc_start));
        assert_eq!(eod.labels, mask.labels);
        for ((all, some), i) in plain.labels.iter().zip(&eod.labels).zip(0..) {
            assert!(all == some || *some == -1);
            // The rows without a label are those before the border of a document.
            let border = i % 16 < 15 && mask.doc_start[i + 1] == (i % 16 + 1) as u32;
            assert!(i % 16 == 15 || border == (*some == -1), "row {i} of step {step}");
        }
        left_out += plain.num_labels() - eod.num_labels();
    }
    assert!(left_out > 10);
    // The program does what the key says: the loss changes, the labels are fewer.
    lab.run("plain", &["--stop-at", "1"]).expect(0);
    lab.run("eod", &["--stop-at", "1", "--set", "data.eod_mask_loss=true"]).expect(0);
    assert_ne!(losses(&lab, "plain"), losses(&lab, "eod"));
}

#[test]
fn how_a_batch_is_cut_does_not_matter() {
    let lab = Lab::new();
    for micro in ["1", "2", "4"] {
        lab.run(micro, &["--set", &format!("train.micro_batch={micro}")]).expect(0);
        assert_close(&losses(&lab, micro), &losses(&lab, "1"), 5e-6);
        assert_eq!(lab.metrics(micro)[0]["expert_load"], lab.metrics("1")[0]["expert_load"]);
    }
}

#[test]
fn the_reference_backend_trains_the_same() {
    let lab = Lab::new();
    lab.run("cpu", &["--set", "train.steps=5"]).expect(0);
    lab.run("candle", &["--set", "train.steps=5", "--backend", "candle"]).expect(0);
    assert_close(&losses(&lab, "cpu"), &losses(&lab, "candle"), 1e-4);
    let norms = |run: &str| lab.metrics(run).iter().map(|l| l["grad_norm"].as_f64().unwrap()).collect::<Vec<_>>();
    assert_close(&norms("cpu"), &norms("candle"), 1e-3);
    assert_eq!(lab.metrics("cpu")[0]["expert_load"], lab.metrics("candle")[0]["expert_load"]);
}

/// A Hugging Face directory of the recipe's model.
fn hf_model(lab: &Lab, name: &str, sets: &[&str], seed: u64) -> PathBuf {
    let config = lab.recipe(sets).model;
    let table = ParamTable::new(&config);
    let options = SaveOptions { dtype: StoredDtype::F32, ..SaveOptions::default() };
    let dir = lab.path(name);
    hf::save(&dir, &config, &options, |id| Ok(initial_values(&table.specs[id], &config, seed))).unwrap();
    dir
}

#[test]
fn weights_from_a_hugging_face_directory() {
    let lab = Lab::new();
    let dir = hf_model(&lab, "hf", &[], 4711);
    let from = format!("hf:{}", dir.display());
    lab.run("run", &["--init-from", &from, "--stop-at", "0"]).expect(0).says(&["starting at step 0"]);
    let c = lab.checkpoint("run", 0);
    let model = hf::load(&dir).unwrap();
    for (id, spec) in model.table.specs.iter().enumerate() {
        assert_eq!(c.read(&spec.name).unwrap(), model.read(id).unwrap(), "{}", spec.name);
    }
    let moments = c.tensors().into_iter().filter(|t| t.name.starts_with("opt/"));
    assert!(moments.into_iter().all(|t| c.read(&t.name).unwrap().iter().all(|x| *x == 0.0)));
    assert_eq!((c.meta().step, c.meta().tokens_seen), (0, 0));
    // Step, learning rate and data begin anew: only the weights differ from a fresh run.
    lab.run("fresh", &[]).expect(0);
    let done = lab.run("run", &["--resume", "--init-from", &from]).expect(0);
    done.says(&["note: --init-from is for step 0 only"]);
    lab.run("whole", &["--init-from", &from]).expect(0);
    lab.assert_same_run("whole", "run");
    assert_eq!(lab.checkpoint("run", 8).meta().loader, lab.checkpoint("fresh", 8).meta().loader);
    assert_ne!(losses(&lab, "run")[0], losses(&lab, "fresh")[0]);
    assert_eq!(lab.metrics("run")[0]["lr"].as_f64(), Some(Schedule::of(&lab.recipe(&[])).lr_at(0)));

    for (set, piece) in [("model.expert_width=24", "experts.0.gate_up"), ("model.num_blocks=3", "parameter tensors")] {
        let other = hf_model(&lab, &format!("hf-{set}"), &[set], 1);
        let done = lab.run("other", &["--init-from", &format!("hf:{}", other.display())]).expect(2);
        done.says(&["another shape than the recipe's `model`", piece]);
    }
    lab.run("other", &["--init-from", &format!("hf:{}", lab.path("nowhere").display())]).expect(2).says(&["nowhere"]);
    assert!(!lab.path("other").exists());
}

#[test]
fn debug_forward_gives_the_first_loss_of_training() {
    let lab = Lab::new();
    // Documents as long as a sequence: with their first tokens left out of the loss no row of a batch predicts beyond its own
    // sequence, which is how Hugging Face reads labels.
    let mut writer = ShardWriter::create(&lab.path("a"), TokenType::U16, true).unwrap();
    let mut random = Random(5);
    for _ in 0..9 {
        writer.push(&(0..16).map(|_| random.below(64) as u32).collect::<Vec<_>>()).unwrap();
    }
    writer.publish(|_| Ok("{}".into())).unwrap();
    fs::remove_file(lab.path("a.json")).unwrap();
    let sets = ["data.sources=[{path=\"a\"}]", "data.eod_mask_loss=true", "train.micro_batch=4"];
    let args: Vec<&str> = sets.iter().flat_map(|s| ["--set", s]).collect();
    let dir = hf_model(&lab, "hf", &[], 12);

    let recipe = lab.recipe(&sets);
    let config = LoaderConfig {
        seed: 7,
        packing: Packing::Stream,
        seq_len: 16,
        batch_sequences: 4,
        document_mask: false,
        eod_mask_loss: true,
        vocab_size: 64,
    };
    let spec = SourceSpec {
        name: "a".into(),
        weight: 1.0,
        paths: recipe.data.sources[0].shards.clone(),
        first_sample: 0,
        max_epochs: None,
    };
    let batch = Loader::open(config, &[spec]).unwrap().batch(0, 0..4).unwrap();
    assert_eq!(batch.num_labels(), 4 * 15);
    let ids: Vec<i64> = batch.ids.iter().map(|id| i64::from(*id)).collect();
    let ids = Tensor::from_vec(ids, (4, 16), &Device::Cpu).unwrap();
    let file = lab.path("batch.safetensors");
    safetensors::save(&HashMap::from([("input_ids", ids.clone()), ("labels", ids)]), &file).unwrap();

    for backend in ["cpu", "candle"] {
        let from = format!("hf:{}", dir.display());
        let run = format!("run-{backend}");
        lab.run(&run, &[&args[..], &["--init-from", &from, "--stop-at", "1", "--backend", backend]].concat()).expect(0);
        let out = lab.path(&format!("{backend}.safetensors"));
        let mut forward = zaya();
        forward.args(["debug", "forward", "--backend", backend]).arg("--model").arg(&dir).arg("--ids").arg(&file);
        finish(forward.arg("--out").arg(&out)).expect(0);
        let loss = safetensors::load(&out, &Device::Cpu).unwrap()["loss"].to_vec1::<f32>().unwrap()[0];
        let trained = losses(&lab, &run)[0] as f32;
        assert_eq!(loss.to_bits(), trained.to_bits(), "{backend}: {loss} and {trained}");
    }
}
