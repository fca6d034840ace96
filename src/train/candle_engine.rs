//! `--backend candle`: the reference model's autograd computes loss and gradients; weights, optimizer and checkpoints are
//! those of the CPU backend.

use std::cell::RefCell;

use anyhow::Result;
use candle_core::{DType, Device, Tensor};

use super::engine::Engine;
use crate::model::peers::Peers;
use crate::model::reference::Reference;
use crate::model::stack::MicroBatch;
use crate::model::{ModelConfig, ParamStore, ParamTable};
use crate::tensor::Backend;
use crate::tensor::backend::{Batch, Loss, Precision};
use crate::tensor::cpu::Cpu;

pub struct Candle {
    cpu: Cpu,
    config: ModelConfig,
    table: ParamTable,
    precision: Precision,
    device: Device,
    /// Made at the first use, then updated.
    reference: RefCell<Option<Reference>>,
}

/// The best device candle was built for.
pub fn device() -> Result<Device> {
    if candle_core::utils::cuda_is_available() {
        Ok(Device::new_cuda(0)?)
    } else if candle_core::utils::metal_is_available() {
        Ok(Device::new_metal(0)?)
    } else {
        Ok(Device::Cpu)
    }
}

impl Candle {
    pub fn new(config: ModelConfig, precision: Precision) -> Result<Self> {
        let table = ParamTable::new(&config);
        // The optimizer's own arithmetic is f32 in both precisions.
        let cpu = Cpu::new(Precision::F32);
        Ok(Self { cpu, config, table, precision, device: device()?, reference: RefCell::new(None) })
    }

    /// Calls `f` with the reference holding the weights of `params`.
    fn with<R>(&self, params: &ParamStore<Cpu>, f: impl FnOnce(&Reference) -> Result<R>) -> Result<R> {
        let mut slot = self.reference.borrow_mut();
        let values = || (0..params.len()).map(|id| self.cpu.download(&params[id]));
        let reference = match slot.take() {
            Some(reference) => {
                for (id, values) in values().enumerate() {
                    reference.set(id, &values?)?;
                }
                reference
            }
            None => {
                let values = values().collect::<Result<Vec<_>>>()?;
                Reference::new(self.config.clone(), &values, DType::F32, &self.device, self.precision)?
            }
        };
        f(slot.insert(reference))
    }
}

impl Engine for Candle {
    type B = Cpu;

    fn backend(&self) -> &Cpu {
        &self.cpu
    }

    fn forward_backward(
        &self,
        params: &ParamStore<Cpu>,
        grads: &mut ParamStore<Cpu>,
        batch: &Batch,
        grad_scale: f32,
        _: Peers<'_, Cpu>,
    ) -> Result<MicroBatch> {
        self.with(params, |reference| {
            let mut unseen = |_: &str, _: &Tensor| {};
            let result = reference.loss_and_grads(batch, None, grad_scale as f64, &mut unseen)?;
            for (id, grad) in result.grads.iter().enumerate() {
                let [rows, cols] = self.table.specs[id].matrix_shape();
                let values = grad.to_device(&Device::Cpu)?.flatten_all()?.to_vec1::<f32>()?;
                self.cpu.add_assign(&mut grads[id], &self.cpu.upload(&values, rows, cols)?)?;
            }
            Ok(MicroBatch { loss: result.loss, expert_counts: result.output.class_counts })
        })
    }

    fn loss(&self, params: &ParamStore<Cpu>, batch: &Batch, _: Peers<'_, Cpu>) -> Result<Loss> {
        self.with(params, |reference| reference.forward(batch, None, &mut |_, _| {})?.loss())
    }
}
