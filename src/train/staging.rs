//! The copy of a state that a checkpoint is written from while training goes on.

use std::borrow::Cow;

use anyhow::{Result, ensure};
use rayon::prelude::*;

use crate::checkpoint::TensorInfo;
use crate::error::bad_input;

/// Numbers that a thread copies at a time.
const PIECE: usize = 1 << 20;

/// The numbers of all tensors of a state, one tensor behind the other. Kept and written over again and again.
pub struct Staging {
    tensors: Vec<TensorInfo>,
    numbers: Vec<f32>,
}

fn len(tensor: &TensorInfo) -> usize {
    tensor.shape.iter().product()
}

impl Staging {
    /// Bytes that a copy of these tensors takes.
    pub fn bytes(tensors: &[TensorInfo]) -> u64 {
        tensors.iter().map(|t| len(t) as u64 * size_of::<f32>() as u64).sum()
    }

    /// Takes the memory from the system, all of it at once: the first copy is to be as fast as the later ones.
    ///
    /// # Errors
    /// `BadInput` when the system has no room for it.
    pub fn new(tensors: Vec<TensorInfo>) -> Result<Self> {
        let bytes = Self::bytes(&tensors);
        let n = (bytes / size_of::<f32>() as u64) as usize;
        let mut numbers = Vec::new();
        if numbers.try_reserve_exact(n).is_err() {
            return Err(bad_input(format!(
                "there is no memory for the copy that checkpoints are written from, {} MiB. Set checkpoint.async = false: then training \
                 waits while a checkpoint is written",
                bytes >> 20
            )));
        }
        numbers.resize(n, 0.0);
        Ok(Self { tensors, numbers })
    }

    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The numbers of each tensor.
    pub fn slices(&self) -> Vec<&[f32]> {
        let mut rest = &self.numbers[..];
        let mut next = |t| {
            let (part, after) = rest.split_at(len(t));
            rest = after;
            part
        };
        self.tensors.iter().map(&mut next).collect()
    }

    /// Where the numbers of each tensor go.
    pub fn slices_mut(&mut self) -> Vec<&mut [f32]> {
        let mut rest = &mut self.numbers[..];
        let mut out = Vec::with_capacity(self.tensors.len());
        for t in &self.tensors {
            let (part, after) = rest.split_at_mut(len(t));
            out.push(part);
            rest = after;
        }
        out
    }

    /// Copies all tensors, on all threads of the current pool.
    ///
    /// # Errors
    /// When they are not the tensors that this copy is for.
    pub fn copy(&mut self, values: &[Cow<[f32]>]) -> Result<()> {
        let targets = self.slices_mut();
        let fits = targets.len() == values.len() && targets.iter().zip(values).all(|(t, v)| t.len() == v.len());
        ensure!(fits, "the state is not of the shape that the copy for its checkpoints was made for");
        let pieces: Vec<_> =
            targets.into_iter().zip(values).flat_map(|(t, v)| t.chunks_mut(PIECE).zip(v.chunks(PIECE))).collect();
        pieces.into_par_iter().for_each(|(to, from)| to.copy_from_slice(from));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_lie_one_behind_the_other() {
        let tensors = vec![TensorInfo::f32("a", &[2, 3]), TensorInfo::f32("b", &[]), TensorInfo::f32("c", &[PIECE + 5])];
        assert_eq!(Staging::bytes(&tensors), 4 * (6 + 1 + PIECE as u64 + 5));
        let mut staging = Staging::new(tensors).unwrap();
        let values: Vec<Vec<f32>> = [6, 1, PIECE + 5].map(|n| (0..n).map(|i| (n + i) as f32).collect()).into();
        let views: Vec<_> = values.iter().map(|v| Cow::Borrowed(&v[..])).collect();
        for _ in 0..2 {
            staging.copy(&views).unwrap();
            assert_eq!(staging.slices(), values.iter().map(|v| &v[..]).collect::<Vec<_>>());
            staging.slices_mut()[1][0] = 7.0;
            assert_eq!(staging.slices()[1], [7.0]);
        }
        assert!(staging.copy(&views[..2]).is_err());
    }
}
