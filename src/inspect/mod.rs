//! Every intermediate tensor of a forward pass under the name that parity checks use, and every gradient under its Hugging
//! Face name.
//!
//! The verbs are those that training runs. What lives only inside a fused verb (CCA's convolutions, the attention weights)
//! is recomputed beside it by the candle reference, from what really went into the verb.

mod input;
mod recorder;

use std::collections::BTreeMap;

use anyhow::Result;
use candle_core::{DType, Device, Tensor};

use crate::hf::Layout;
use crate::hf::names::file_tensors;
use crate::model::params::{OptimKind, ParamTable};
use crate::model::peers::Peers;
use crate::model::reference::Reference;
use crate::model::{Cx, Model, ModelConfig, ParamStore};
use crate::tensor::backend::{Backend, Batch, PinnedRoutes, Precision};
pub use input::{Input, read_input, read_pinned_routes};
use recorder::Recorder;

/// Tensors by name.
pub type Tensors = BTreeMap<String, Tensor>;

/// What a traced pass gives.
pub struct Trace {
    pub tensors: Tensors,
    /// By Hugging Face name; empty unless asked for, or without labels.
    pub grads: Tensors,
}

/// What to trace.
pub struct Request<'a> {
    pub config: &'a ModelConfig,
    /// Weights in table order.
    pub values: &'a [Vec<f32>],
    pub batch: &'a Batch,
    pub pinned: Option<&'a [PinnedRoutes]>,
    pub precision: Precision,
    pub want_grads: bool,
}

/// The hand-written model on a backend.
pub fn trace_native<B: Backend>(backend: &B, r: &Request) -> Result<Trace> {
    let model = Model::new(r.config.clone());
    let params = ParamStore::from_host(backend, &model.table, |id| Ok(r.values[id].clone()))?;
    let rows = backend.rows(r.batch)?;
    let recorder = Recorder::new(backend, r)?;
    let cx = Cx { backend, params: &params, rows: &rows, probe: Some(&recorder), pinned: r.pinned, peers: Peers::none() };
    let labels = r.batch.num_labels();
    let mut grads = Tensors::new();
    let mut loss = None;
    let y = if r.want_grads && labels > 0 {
        let mut g = ParamStore::zeros(backend, &model.table)?;
        let (result, y) = model.forward_backward(&cx, &mut g, (1.0 / labels as f64) as f32)?;
        let downloaded = (0..g.len()).map(|id| backend.download(&g[id])).collect::<Result<Vec<_>>>()?;
        grads = stack_grads(&model.table, &downloaded)?;
        loss = Some(result.loss);
        y
    } else {
        let y = model.hidden(&cx)?;
        if !r.batch.labels.is_empty() {
            loss = Some(backend.cross_entropy(&rows, &y, &params[model.table.embed])?);
        }
        y
    };
    let logits = backend.download(&backend.logits(&y, &params[model.table.embed])?)?;
    let mut tensors = recorder.finish()?;
    let shape = (r.batch.batch, r.batch.seq, r.config.vocab_size);
    tensors.insert("logits".into(), Tensor::from_vec(logits, shape, &Device::Cpu)?);
    if let Some(loss) = loss {
        let mean = if loss.count == 0 { 0.0 } else { loss.sum / loss.count as f64 };
        tensors.insert("loss".into(), Tensor::new(&[mean as f32], &Device::Cpu)?);
    }
    Ok(Trace { tensors, grads })
}

/// The candle reference with its autograd.
pub fn trace_candle(r: &Request) -> Result<Trace> {
    let device = crate::train::candle_engine::device()?;
    let reference = Reference::new(r.config.clone(), r.values, DType::F32, &device, r.precision)?;
    let mut seen = Vec::new();
    let mut probe = |name: &str, t: &Tensor| seen.push((name.to_string(), t.detach()));
    let labels = r.batch.num_labels();
    let mut grads = Tensors::new();
    if r.want_grads && labels > 0 {
        let result = reference.loss_and_grads(r.batch, r.pinned, 1.0 / labels as f64, &mut probe)?;
        let values = result.grads.iter().map(|g| Ok(g.to_device(&Device::Cpu)?.flatten_all()?.to_vec1()?));
        grads = stack_grads(reference.table(), &values.collect::<Result<Vec<Vec<f32>>>>()?)?;
    } else {
        reference.forward(r.batch, r.pinned, &mut probe)?;
    }
    let tensors = seen.into_iter().map(|(name, t)| Ok((name, t.to_device(&Device::Cpu)?.contiguous()?)));
    Ok(Trace { tensors: tensors.collect::<Result<_>>()?, grads })
}

/// Gradients in table order -> tensors of a native file. Balancing biases have none.
fn stack_grads(table: &ParamTable, grads: &[Vec<f32>]) -> Result<Tensors> {
    let trained = file_tensors(table, Layout::Native)
        .into_iter()
        .filter(|t| t.params.iter().all(|id| table.specs[*id].optim != OptimKind::Balance));
    trained
        .map(|t| {
            let values: Vec<f32> = t.params.iter().flat_map(|id| &grads[*id]).copied().collect();
            Ok((t.name, Tensor::from_vec(values, t.shape, &Device::Cpu)?))
        })
        .collect()
}
