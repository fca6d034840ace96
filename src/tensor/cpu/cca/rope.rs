//! A table of angles of rotary position embedding, and the rotation.

use std::sync::Arc;

use anyhow::Result;

use super::super::Cpu;
use super::super::rows::Rows;
use crate::tensor::backend::CcaShape;
use crate::tensor::rope::Span;

/// cos and sin of the angles of `len` positions from `past`, `[len, rotary_dim / 2]` each. Angles in f32, as everyone's are.
#[derive(Debug)]
pub struct RopeTable {
    span: Span,
    cos: Vec<f32>,
    sin: Vec<f32>,
    half: usize,
}

impl RopeTable {
    fn new(span: Span) -> Self {
        let half = span.rotary_dim / 2;
        let inv_freq = span.inverse_frequencies();
        let angles = || (span.past..span.past + span.len).flat_map(|pos| inv_freq.iter().map(move |f| pos as f32 * f));
        Self { span, cos: angles().map(f32::cos).collect(), sin: angles().map(f32::sin).collect(), half }
    }

    /// Rotates the first `2 * half` channels of one head at `position` of its sequence; `sign` -1 rotates back.
    #[inline(always)]
    pub fn rotate(&self, x: &mut [f32], position: usize, sign: f32) {
        let s = position - self.span.past;
        let (a, b) = x[..2 * self.half].split_at_mut(self.half);
        let (cos, sin) = (&self.cos[s * self.half..][..self.half], &self.sin[s * self.half..][..self.half]);
        for j in 0..self.half {
            let (x, y, sin) = (a[j], b[j], sign * sin[j]);
            a[j] = x * cos[j] - y * sin;
            b[j] = y * cos[j] + x * sin;
        }
    }
}

/// The table of all positions that `rows` can have.
pub fn table(cpu: &Cpu, shape: &CcaShape, rows: &Rows) -> Result<Arc<RopeTable>> {
    let span = match &rows.tree {
        // Powers of two, so that few tables serve batches of many lengths.
        Some(tree) => Span::of(shape, 0, tree.end.next_power_of_two().max(256)),
        None => Span::of(shape, rows.past, rows.keys()),
    };
    cpu.rope.get(span, || Ok(RopeTable::new(span)))
}
