//! The bf16 copy of a weight over an update.

use std::sync::Arc;

use anyhow::{Result, bail};

use crate::tensor::hip::Buf;

/// The bf16 copy of a weight, if it has one, taken out while an update writes both: it need not be made again, and stays where it is.
pub struct KeptHalf(Option<Buf>);

impl KeptHalf {
    pub fn take(weight: &mut Buf) -> Self {
        let half = weight.half(|| bail!("this weight has no bf16 copy")).ok();
        // The weight forgets its copy as it is asked where it can be changed.
        weight.at_mut();
        // One that somebody else still reads is left alone.
        Self(half.and_then(Arc::into_inner))
    }

    /// Where it is; null = there is none.
    pub fn at_mut(&mut self) -> *mut f32 {
        self.0.as_mut().map_or(std::ptr::null_mut(), Buf::at_mut)
    }

    /// After the update is queued.
    pub fn put_back(self, weight: &Buf) -> Result<()> {
        match self.0 {
            Some(half) => weight.half(|| Ok(half)).map(drop),
            None => Ok(()),
        }
    }
}
