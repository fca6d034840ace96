//! Number formats of stored tensors.

use half::{bf16, f16};
use safetensors::Dtype;

/// Format of a stored tensor that can be read. In memory everything is f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoredDtype {
    F32,
    Bf16,
    F16,
}

impl StoredDtype {
    pub fn of(dtype: Dtype) -> Option<Self> {
        match dtype {
            Dtype::F32 => Some(Self::F32),
            Dtype::BF16 => Some(Self::Bf16),
            Dtype::F16 => Some(Self::F16),
            _ => None,
        }
    }

    /// Its name in a safetensors header.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::Bf16 => "BF16",
            Self::F16 => "F16",
        }
    }

    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }

    /// Little-endian `bytes` of this format into `out`, whose length fits.
    pub fn decode(self, bytes: &[u8], out: &mut [f32]) {
        match self {
            Self::F32 => out.iter_mut().zip(bytes.as_chunks().0).for_each(|(x, b)| *x = f32::from_le_bytes(*b)),
            Self::Bf16 => out.iter_mut().zip(bytes.as_chunks().0).for_each(|(x, b)| *x = bf16::from_le_bytes(*b).to_f32()),
            Self::F16 => out.iter_mut().zip(bytes.as_chunks().0).for_each(|(x, b)| *x = f16::from_le_bytes(*b).to_f32()),
        }
    }

    /// Appends `values`, rounded to nearest even where the format is narrower.
    pub fn encode(self, values: &[f32], out: &mut Vec<u8>) {
        match self {
            Self::F32 => values.iter().for_each(|x| out.extend(x.to_le_bytes())),
            Self::Bf16 => values.iter().for_each(|x| out.extend(bf16::from_f32(*x).to_le_bytes())),
            Self::F16 => values.iter().for_each(|x| out.extend(f16::from_f32(*x).to_le_bytes())),
        }
    }
}
