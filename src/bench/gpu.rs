//! A GPU: what it says of itself, and what its memory gives.

use anyhow::Result;
use serde::Serialize;

use super::timing;
use crate::tensor::hip::{DeviceFacts, Hip, Pattern, Streams};

/// Bytes of one array: of a GPU, more than twice any cache of it; of the software GPU as little as shows that it works.
const ARRAY_BYTES: usize = 1 << 30;
const SOFTWARE_ARRAY_BYTES: usize = 64 << 10;

#[derive(Debug, Clone, Serialize)]
pub struct Gpu {
    #[serde(flatten)]
    pub facts: DeviceFacts,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<GpuMemory>,
}

#[derive(Debug, Clone, Serialize)]
pub struct GpuMemory {
    pub buffer_bytes: usize,
    pub patterns: Vec<PatternLine>,
}

#[derive(Debug, Clone, Serialize)]
pub struct PatternLine {
    pub name: &'static str,
    #[serde(flatten)]
    pub times: timing::Times,
    /// Best of the rounds; bytes are those that the kernel reads and writes.
    pub gbytes_per_s: f64,
}

/// Every pattern.
pub fn memory(hip: &Hip, facts: &DeviceFacts, seconds: f64, progress: &dyn Fn(&str)) -> Result<GpuMemory> {
    let mut streams = Streams::new(hip, if facts.software { SOFTWARE_ARRAY_BYTES } else { ARRAY_BYTES })?;
    let mut patterns = Vec::new();
    for pattern in Pattern::ALL {
        progress(&format!("memory of the GPU: {}", pattern.name()));
        let times = timing::measure_until(seconds, || streams.pass(pattern), || hip.synchronize())?;
        let bytes = (pattern.arrays() * streams.array_bytes()) as f64;
        patterns.push(PatternLine { name: pattern.name(), gbytes_per_s: bytes / times.best_s / 1e9, times });
    }
    Ok(GpuMemory { buffer_bytes: streams.array_bytes(), patterns })
}
