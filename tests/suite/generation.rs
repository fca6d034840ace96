//! Decoding with caches: the logits of `transformers`, and those of whole sequences, within 1e-5.

use std::path::{Path, PathBuf};

use zaya::checkpoint::ModelSource;
use zaya::eval::generate::{Cached, Continue, Sampling, Whole, generate};
use zaya::model::{Cx, Model};
use zaya::tensor::Backend;
use zaya::tensor::backend::{Batch, Precision};
use zaya::tensor::cpu::Cpu;

use crate::fixtures::{host, read, relative_error};

fn fixture(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(case)
}

/// Two sequences at once: 20 tokens, then one at a time.
#[test]
fn cached_decoding_equals_transformers() {
    let io = read("decode", "io.safetensors");
    let source = ModelSource::open(&fixture("tiny/fp32")).unwrap();
    let (cpu, model) = (Cpu::default(), Model::new(source.config().clone()));
    let params = source.params(&cpu).unwrap();
    let ids: Vec<u32> = host(&io["input_ids"]).iter().map(|v| *v as u32).collect();
    let (seq, vocab) = (ids.len() / 2, 256);
    let mut cache = model.cache();
    let mut got = [vec![], vec![]];
    let mut past = 0;
    for n in std::iter::once(20).chain(std::iter::repeat_n(1, seq - 20)) {
        let part = [&ids[past..past + n], &ids[seq + past..seq + past + n]].concat();
        let rows = cpu.rows(&Batch { batch: 2, seq: n, past, ids: part, ..Batch::default() }).unwrap();
        let y = model.decode(&Cx::new(&cpu, &params, &rows), 2, &mut cache).unwrap();
        let logits = cpu.download(&cpu.logits(&y, &params[model.table.embed]).unwrap()).unwrap();
        got[0].extend_from_slice(&logits[..n * vocab]);
        got[1].extend_from_slice(&logits[n * vocab..]);
        past += n;
    }
    let got = got.concat();
    for name in ["logits_cached", "logits_full"] {
        let expected: Vec<f32> = host(&io[name]).iter().map(|v| *v as f32).collect();
        let e = relative_error(&got, &expected);
        assert!(e <= 1e-5, "{name}: {e:.2e}");
    }
}

#[test]
fn greedy_continuation_equals_transformers() {
    let io = read("decode", "io.safetensors");
    let source = ModelSource::open(&fixture("tiny/fp32")).unwrap();
    let (cpu, model) = (Cpu::default(), Model::new(source.config().clone()));
    let params = source.params(&cpu).unwrap();
    let values: Vec<Vec<f32>> = (0..source.table().specs.len()).map(|id| source.read(id).unwrap()).collect();
    let rows = |name: &str, n: usize| -> Vec<Vec<u32>> {
        host(&io[name]).chunks(n).map(|row| row.iter().map(|v| *v as u32).collect()).collect()
    };
    let greedy = Sampling { temperature: 0.0, top_p: 1.0, seed: 0 };
    for (prompt, expected) in rows("greedy_prompt", 20).iter().zip(rows("greedy_out", 36)) {
        let continued = |model: &mut dyn Continue| {
            let mut ids = prompt.clone();
            generate(model, prompt, 16, 256, None, greedy, |id| {
                ids.push(id);
                Ok(())
            })
            .unwrap();
            ids
        };
        assert_eq!(continued(&mut Cached::new(&cpu, &model, &params)), expected);
        assert_eq!(continued(&mut Whole::new(source.config(), &values, Precision::F32).unwrap()), expected);
    }
}

/// Every unusual shape, cut into pieces of every size, equals the whole sequence (sliding windows among them).
#[test]
fn any_cutting_gives_the_logits_of_the_whole() {
    for entry in std::fs::read_dir(fixture("shapes")).unwrap() {
        let dir = entry.unwrap().path();
        if !dir.is_dir() {
            continue;
        }
        let source = ModelSource::open(&dir).unwrap();
        let (cpu, model) = (Cpu::default(), Model::new(source.config().clone()));
        let params = source.params(&cpu).unwrap();
        let ids: Vec<u32> = (0..23).map(|i| (i * 7 + 3) % source.config().vocab_size as u32).collect();
        let whole = Batch { batch: 1, seq: ids.len(), ids: ids.clone(), ..Batch::default() };
        let rows = cpu.rows(&whole).unwrap();
        let logits = cpu.download(&model.logits(&Cx::new(&cpu, &params, &rows)).unwrap()).unwrap();
        for piece in [1, 2, 3, 5, 23] {
            let mut decoder = Cached::new(&cpu, &model, &params);
            let mut end = 0;
            for part in ids.chunks(piece) {
                let got = decoder.append(part).unwrap();
                end += part.len();
                let expected = &logits[(end - 1) * got.len()..end * got.len()];
                let e = relative_error(&got, expected);
                assert!(e <= 1e-5, "{} in pieces of {piece}, token {end}: {e:.2e}", dir.display());
            }
        }
    }
}
