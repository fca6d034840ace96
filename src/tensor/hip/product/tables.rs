//! Tables of host numbers on the device, such as where the matrices of a grouped product lie. They are nearly always those of the step
//! before, so they are kept: to bring one there waits for the device.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Result;

use crate::tensor::hip::host::upload_plain;
use crate::tensor::hip::{Buf, Hip, Kind};

/// Tables kept, at most. A model has a few for each block.
const MOST: usize = 4096;

#[derive(Default)]
pub struct Tables {
    /// By their bytes.
    known: Mutex<HashMap<Vec<u8>, Arc<Buf>>>,
}

impl Tables {
    /// The device's copy of `data`.
    pub fn get<T: bytemuck::Pod>(&self, hip: &Hip, data: &[T]) -> Result<Arc<Buf>> {
        let key: &[u8] = bytemuck::cast_slice(data);
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(table) = known.get(key) {
            return Ok(table.clone());
        }
        hip.about_to_keep("a table of addresses")?;
        let table = Arc::new(upload_plain(hip, data)?);
        if known.len() >= MOST {
            known.clear();
        }
        known.insert(key.to_vec(), table.clone());
        Ok(table)
    }
}

/// Where matrices of one kind lie, as kernels want it: numbers from the first address in memory on, so that none is negative.
pub struct Places {
    /// Of the lowest matrix; null where there is none.
    pub base: *mut f32,
    /// Of each.
    pub offsets: Vec<i64>,
}

impl Places {
    /// Of matrices of `kind` at these addresses.
    pub fn of(addresses: &[usize], kind: Kind) -> Self {
        let base = addresses.iter().copied().min().unwrap_or(0);
        let offsets = addresses.iter().map(|a| ((a - base) / kind.bytes()) as i64).collect();
        Self { base: base as *mut f32, offsets }
    }
}
