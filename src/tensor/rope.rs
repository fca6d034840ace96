//! Rotary position embedding (spec 1.4), alike on all backends: the angles, and the tables of them that a backend keeps.

use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Result;

use super::backend::CcaShape;

/// Positions whose angles are wanted.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Span {
    pub rotary_dim: usize,
    pub theta: f64,
    /// The first of them.
    pub past: usize,
    pub len: usize,
}

impl Span {
    /// Of rows behind `past` others, `keys` in all.
    pub fn of(shape: &CcaShape, past: usize, keys: usize) -> Self {
        Self { rotary_dim: shape.rotary_dim, theta: shape.rope_theta, past, len: keys - past }
    }

    /// Angle of position 1 for each pair of channels: `theta^(-2j / rotary_dim)`. In f32, as everyone's are.
    pub fn inverse_frequencies(self) -> Vec<f32> {
        (0..self.rotary_dim / 2).map(|j| 1.0 / self.theta.powf((2 * j) as f64 / self.rotary_dim as f64) as f32).collect()
    }
}

/// Kinds of layers times lengths of sequences (training, validation) that are kept.
const KEPT: usize = 4;

/// The tables made last: layers of one kind share one, step after step.
#[derive(Debug)]
pub struct Tables<T>(Mutex<Vec<(Span, Arc<T>)>>);

impl<T> Default for Tables<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T> Tables<T> {
    /// The table of `span`, made by `make` where it is not kept.
    ///
    /// # Errors
    /// Those of `make`.
    pub fn get(&self, span: Span, make: impl FnOnce() -> Result<T>) -> Result<Arc<T>> {
        let mut tables = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, table)) = tables.iter().find(|(s, _)| *s == span) {
            return Ok(table.clone());
        }
        let table = Arc::new(make()?);
        if tables.len() == KEPT {
            tables.remove(0);
        }
        tables.push((span, table.clone()));
        Ok(table)
    }
}
