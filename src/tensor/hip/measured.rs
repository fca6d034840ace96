//! What `zaya bench` measures of a device beside verbs: patterns of memory traffic (`kernels/stream.zk.cpp`) and plain products.

use anyhow::{Result, ensure};

use super::product::{Form, Gemm, Numbers};
use super::{Buf, Hip, int};
use crate::tensor::backend::Backend as _;

/// Vectors of 4 numbers that a workgroup moves, and numbers of a piece that the random pattern reads.
const GROUP_VECTORS: usize = 1024;
const PIECE: usize = 16;
const ITEMS: u32 = 256;

/// How memory is gone through. Bytes are those that the program reads and writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pattern {
    Read,
    Write,
    /// `c = a`
    Copy,
    /// `c = a + s b`
    Triad,
    /// Reads pieces of 64 bytes at places without a pattern.
    Random,
}

impl Pattern {
    pub const ALL: [Self; 5] = [Self::Read, Self::Write, Self::Copy, Self::Triad, Self::Random];

    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Copy => "copy",
            Self::Triad => "triad",
            Self::Random => "random, 64 bytes",
        }
    }

    /// Arrays that are read or written.
    pub fn arrays(self) -> usize {
        match self {
            Self::Read | Self::Write | Self::Random => 1,
            Self::Copy => 2,
            Self::Triad => 3,
        }
    }
}

/// Three arrays to go through.
pub struct Streams {
    hip: Hip,
    arrays: [Buf; 3],
    sums: Buf,
    /// Numbers of each array: a power of two.
    numbers: usize,
}

impl Streams {
    /// Of the largest power of two of at most `bytes` bytes each, at least 4 KiB.
    ///
    /// # Errors
    /// When the device has no room.
    pub fn new(hip: &Hip, bytes: usize) -> Result<Self> {
        let numbers = 1usize << (bytes / size_of::<f32>()).max(1024).ilog2();
        let groups = (numbers / 4).div_ceil(GROUP_VECTORS);
        let array = || hip.zeros(1, numbers);
        Ok(Self { hip: hip.clone(), arrays: [array()?, array()?, array()?], sums: hip.f32s(groups, 4)?, numbers })
    }

    /// Bytes of each array.
    pub fn array_bytes(&self) -> usize {
        self.numbers * size_of::<f32>()
    }

    /// Queues one pass.
    ///
    /// # Errors
    /// When the device fails.
    pub fn pass(&mut self, pattern: Pattern) -> Result<()> {
        let (hip, vectors) = (&self.hip, self.numbers / 4);
        let (groups, count) = (vectors.div_ceil(GROUP_VECTORS), vectors as i64);
        let [a, b, c] = &mut self.arrays;
        match pattern {
            Pattern::Read => launch!(hip, "stream_read", [groups], ITEMS; a.at(), self.sums.at_mut(), count),
            Pattern::Write => launch!(hip, "stream_write", [groups], ITEMS; c.at_mut(), 1.0f32, count),
            Pattern::Copy => launch!(hip, "stream_copy", [groups], ITEMS; a.at(), c.at_mut(), count),
            Pattern::Triad => launch!(hip, "stream_triad", [groups], ITEMS; a.at(), b.at(), c.at_mut(), 0.5f32, count),
            Pattern::Random => {
                let mask = int(self.numbers / PIECE) - 1;
                launch!(hip, "stream_random", [groups], ITEMS; a.at(), self.sums.at_mut(), count, mask)
            }
        }
    }
}

/// Operands of products of any shape up to a size: bf16, the result f32.
pub struct Operands {
    hip: Hip,
    /// Both operands are read from its beginning and its end.
    numbers: Buf,
    result: Buf,
}

impl Operands {
    /// `values`: as many numbers as both operands of the largest product have. `result`: numbers of the largest result.
    ///
    /// # Errors
    /// When the device has no room.
    pub fn new(hip: &Hip, values: &Buf, result: usize) -> Result<Self> {
        Ok(Self { hip: hip.clone(), numbers: hip.rounded(values)?, result: hip.f32s(1, result)? })
    }

    /// Queues `y = x wᵀ`, x `[m, k]`, w `[n, k]`.
    ///
    /// # Errors
    /// When the shape is larger than what was prepared, or the device fails.
    pub fn multiply(&mut self, m: usize, n: usize, k: usize) -> Result<()> {
        ensure!(
            (m + n) * k <= self.numbers.len() && m * n <= self.result.len(),
            "a product of {m} x {n} x {k} is larger than the operands that were prepared"
        );
        let (a, b) = (self.numbers.at(), self.numbers.at().wrapping_byte_add(2 * m * k));
        let to = self.result.at_mut();
        Gemm::new(Form::Nt, Numbers::Bf16ToF32, m, n, k).queue(&self.hip, a, b, to)
    }
}

/// What a device says of itself.
#[derive(Debug, Clone, serde::Serialize)]
pub struct DeviceFacts {
    pub name: String,
    pub arch: String,
    pub compute_units: usize,
    pub memory_bytes: usize,
    /// Whether this is no device but a program that takes its place: its times say nothing about any GPU.
    pub software: bool,
}

impl Hip {
    /// Of the calling thread's device.
    ///
    /// # Errors
    /// When the library does not say.
    pub fn facts(local_rank: usize) -> Result<DeviceFacts> {
        let (library, count) = super::library()?;
        let properties = library.device_properties((local_rank % count as usize) as i32)?;
        let name = properties.name();
        Ok(DeviceFacts {
            software: name.contains("in software"),
            name,
            arch: properties.arch(),
            compute_units: properties.compute_units() as usize,
            memory_bytes: properties.memory_bytes(),
        })
    }
}
