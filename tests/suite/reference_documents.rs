//! What document masking means, checked on the reference: documents packed into one row behave as if each were alone.

use candle_core::{DType, Device, Tensor};
use zaya::model::ModelConfig;
use zaya::model::config::{AttentionKind, SkipMode};
use zaya::model::reference::{LossAndGrads, Precision, Reference};
use zaya::tensor::backend::Batch;

use crate::fixtures::{host, read, tiny_config, values};

fn model(config: ModelConfig) -> Reference {
    let values = values(&config, &read("fp32", "model.safetensors"));
    Reference::new(config, &values, DType::F64, &Device::Cpu, Precision::F32).unwrap()
}

fn run(model: &Reference, batch: &Batch) -> LossAndGrads {
    model.loss_and_grads(batch, None, 1.0, &mut |_: &str, _: &Tensor| {}).unwrap()
}

/// Deterministic tokens, none of them padding.
fn tokens(n: usize, salt: usize) -> Vec<u32> {
    (0..n).map(|i| 2 + ((i * 97 + salt * 41 + i * i * 13) % 250) as u32).collect()
}

fn distance(a: &[f64], b: &[f64]) -> f64 {
    let size = b.iter().map(|x| x * x).sum::<f64>().sqrt();
    a.iter().zip(b).map(|(x, y)| (x - y).powi(2)).sum::<f64>().sqrt() / size.max(1e-30)
}

/// Lengths of the documents of one row, the one-token document included.
const LENGTHS: [usize; 5] = [6, 1, 2, 9, 3];

/// The documents packed into one row, and each in a batch of its own.
fn packed_and_alone() -> (Batch, Vec<Batch>) {
    let alone: Vec<Batch> = LENGTHS
        .iter()
        .enumerate()
        .map(|(salt, n)| {
            let text = tokens(n + 1, salt);
            let labels = text[1..].iter().map(|id| i64::from(*id)).collect();
            Batch { batch: 1, seq: *n, ids: text[..*n].to_vec(), labels, ..Batch::default() }
        })
        .collect();
    let mut packed = Batch { batch: 1, seq: LENGTHS.iter().sum(), ..Batch::default() };
    for one in &alone {
        let start = packed.ids.len() as u32;
        packed.ids.extend(&one.ids);
        packed.labels.extend(&one.labels);
        packed.doc_start.extend(one.ids.iter().map(|_| start));
    }
    (packed, alone)
}

fn configs() -> [ModelConfig; 2] {
    use AttentionKind::{Full, Sliding};
    let sliding = ModelConfig {
        attention: vec![Sliding, Full, Sliding],
        sliding_window: Some(4),
        skip_mode: SkipMode::Identity,
        ..tiny_config()
    };
    [tiny_config(), sliding]
}

/// RoPE sees differences of positions only, so positions need no reset.
#[test]
fn packed_documents_are_as_if_alone() {
    let (packed, alone) = packed_and_alone();
    for config in configs() {
        let model = model(config);
        let together = run(&model, &packed);
        let mut logits = Vec::new();
        let mut loss = 0.0;
        let mut grads: Vec<Vec<f64>> = together.grads.iter().map(|g| vec![0.0; g.elem_count()]).collect();
        for one in &alone {
            let part = run(&model, one);
            logits.extend(host(&part.output.logits));
            loss += part.loss.sum;
            for (sum, grad) in grads.iter_mut().zip(&part.grads) {
                sum.iter_mut().zip(host(grad)).for_each(|(s, g)| *s += g);
            }
        }
        // Angles are f32 products, so that differences of positions agree to f32 rounding only.
        assert!(distance(&host(&together.output.logits), &logits) < 1e-5);
        assert!((together.loss.sum - loss).abs() < 1e-5 * loss);
        for (spec, (got, want)) in model.table().specs.iter().zip(together.grads.iter().zip(&grads)) {
            if want.iter().any(|g| *g != 0.0) {
                let e = distance(&host(got), want);
                assert!(e < 2e-5, "{}: {e:.2e}", spec.name);
            }
        }
        let unmasked = run(&model, &Batch { doc_start: Vec::new(), ..packed.clone() });
        assert!(distance(&host(&unmasked.output.logits), &logits) > 1e-2, "the mask must matter");
    }
}

/// What stands in one document changes nothing in another, but for the rounding of experts' differently cut products.
#[test]
fn a_document_does_not_see_its_neighbours() {
    let (packed, _) = packed_and_alone();
    for config in configs() {
        let model = model(config);
        let vocab = model.config().vocab_size;
        let before = host(&run(&model, &packed).output.logits);
        let mut changed = packed.clone();
        changed.ids[7..9].copy_from_slice(&[77, 78]); // the third document
        let after = host(&run(&model, &changed).output.logits);
        let rows = |x: &[f64], from: usize, to: usize| x[from * vocab..to * vocab].to_vec();
        for (from, to, own) in [(0, 7, false), (7, 8, true), (8, 9, true), (9, 21, false)] {
            let change = distance(&rows(&after, from, to), &rows(&before, from, to));
            assert!(if own { change > 1e-3 } else { change < 1e-13 }, "rows {from}..{to} change by {change:.2e}");
        }
    }
}

/// A window as long as the sequence is none; one of a single token leaves only the token's own value.
#[test]
fn windows_of_every_length() {
    let text = tokens(12, 3);
    let batch = Batch { batch: 1, seq: 12, ids: text, ..Batch::default() };
    let logits = |window: Option<usize>| {
        let kind = if window.is_some() { AttentionKind::Sliding } else { AttentionKind::Full };
        let base = tiny_config();
        let config = ModelConfig { attention: vec![kind; 3], sliding_window: window, rope_sliding: base.rope, ..base };
        let mut weights = Vec::new();
        let mut probe = |name: &str, t: &Tensor| {
            if name.ends_with("attn.weights") {
                weights.push(host(t));
            }
        };
        let output = model(config).forward(&batch, None, &mut probe).unwrap();
        (host(&output.logits), weights)
    };
    assert_eq!(logits(None), logits(Some(12)));
    assert_eq!(logits(None), logits(Some(1000)));
    assert_ne!(logits(None).0, logits(Some(11)).0);
    let (_, weights) = logits(Some(1));
    for (i, weight) in weights[0].iter().enumerate() {
        let (query, key) = (i / 12 % 12, i % 12);
        assert_eq!(*weight, if query == key { 1.0 } else { 0.0 });
    }
}
