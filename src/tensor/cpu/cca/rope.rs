//! Rotary position embedding, and the tables of its angles.

use std::sync::{Arc, Mutex, PoisonError};

use super::super::rows::Rows;
use crate::tensor::backend::CcaShape;
use crate::tensor::rope::inverse_frequencies;

/// cos and sin of the angles of `len` positions from `past`, `[len, rotary_dim / 2]` each. Angles in f32, as everyone's are.
#[derive(Debug)]
pub struct RopeTable {
    key: Key,
    cos: Vec<f32>,
    sin: Vec<f32>,
    half: usize,
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct Key {
    rotary_dim: usize,
    theta: f64,
    past: usize,
    len: usize,
}

impl RopeTable {
    fn new(key: Key) -> Self {
        let half = key.rotary_dim / 2;
        let inv_freq = inverse_frequencies(key.rotary_dim, key.theta);
        let angles = || (key.past..key.past + key.len).flat_map(|pos| inv_freq.iter().map(move |f| pos as f32 * f));
        Self { key, cos: angles().map(f32::cos).collect(), sin: angles().map(f32::sin).collect(), half }
    }

    /// Rotates the first `2 * half` channels of one head at `position` of its sequence; `sign` -1 rotates back.
    #[inline(always)]
    pub fn rotate(&self, x: &mut [f32], position: usize, sign: f32) {
        let s = position - self.key.past;
        let (a, b) = x[..2 * self.half].split_at_mut(self.half);
        let (cos, sin) = (&self.cos[s * self.half..][..self.half], &self.sin[s * self.half..][..self.half]);
        for j in 0..self.half {
            let (x, y, sin) = (a[j], b[j], sign * sin[j]);
            a[j] = x * cos[j] - y * sin;
            b[j] = y * cos[j] + x * sin;
        }
    }
}

/// The tables used last: layers of one kind share one, step after step.
#[derive(Debug, Default)]
pub struct RopeTables(Mutex<Vec<Arc<RopeTable>>>);

/// Kinds of layers times lengths of sequences (training, validation) that are kept.
const KEPT: usize = 4;

impl RopeTables {
    /// For all positions that `rows` can have.
    pub fn get(&self, shape: &CcaShape, rows: &Rows) -> Arc<RopeTable> {
        let (past, len) = (rows.past, rows.keys() - rows.past);
        let key = Key { rotary_dim: shape.rotary_dim, theta: shape.rope_theta, past, len };
        let mut tables = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(table) = tables.iter().find(|t| t.key == key) {
            return table.clone();
        }
        if tables.len() == KEPT {
            tables.remove(0);
        }
        tables.push(Arc::new(RopeTable::new(key)));
        tables[tables.len() - 1].clone()
    }
}
