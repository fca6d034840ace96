//! Log-softmax and argmax of some rows: logits in chunks of rows, so that those of a whole batch never exist.

use anyhow::Result;
use rayon::prelude::*;

use crate::model::{Model, ParamStore};
use crate::tensor::backend::Backend;
use crate::tensor::cpu::level::vectorised;
use crate::tensor::cpu::math::{exp_of_score, larger};

/// Logits of a chunk at most, as long as that leaves `LEAST_ROWS`.
const CHUNK_LOGITS: usize = 1 << 23;
/// The head is read once a chunk: with few rows memory would set the pace.
const LEAST_ROWS: usize = 64;
/// Exponentials that are added up in f32 before they are in f64.
const BLOCK: usize = 1024;
const LANES: usize = 16;

/// One row of logits.
pub struct Row<'a> {
    pub logits: &'a [f32],
    /// The likeliest token, of equals the lowest.
    pub best: u32,
    log_sum: f64,
}

impl Row<'_> {
    /// log p of a token, nats.
    pub fn logprob(&self, token: u32) -> f64 {
        self.logits[token as usize] as f64 - self.log_sum
    }
}

/// Index of the largest number, of equals the lowest.
#[inline(always)]
fn largest(x: &[f32]) -> (usize, f32) {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (whole, rest) = x.as_chunks::<LANES>();
    for x in whole {
        lanes.iter_mut().zip(x).for_each(|(lane, x)| *lane = larger(*lane, *x));
    }
    let top = lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |top, x| larger(top, *x));
    (x.iter().position(|x| *x == top).unwrap_or(0), top)
}

/// Sum of e^(x - top): exponentials in f32, blocks of them added up in f64.
#[inline(always)]
fn sum_of_exponentials(x: &[f32], top: f32) -> f64 {
    let mut total = 0f64;
    for block in x.chunks(BLOCK) {
        let mut lanes = [0f32; LANES];
        let (whole, rest) = block.as_chunks::<LANES>();
        for x in whole {
            lanes.iter_mut().zip(x).for_each(|(lane, x)| *lane += exp_of_score(x - top));
        }
        lanes.iter_mut().zip(rest).for_each(|(lane, x)| *lane += exp_of_score(x - top));
        total += lanes.iter().map(|lane| *lane as f64).sum::<f64>();
    }
    total
}

fn measure(logits: &[f32]) -> (u32, f64) {
    vectorised(
        #[inline(always)]
        || {
            let (best, top) = largest(logits);
            (best as u32, top as f64 + sum_of_exponentials(logits, top).ln())
        },
    )
}

/// Calls `each(i, row)` for row `rows[i]` of the final hidden states `y`, in order.
pub fn for_rows<B: Backend>(
    backend: &B,
    model: &Model,
    params: &ParamStore<B>,
    y: &B::Buf,
    rows: &[u32],
    mut each: impl FnMut(usize, Row) -> Result<()>,
) -> Result<()> {
    let (head, vocab) = (&params[model.table.embed], model.config.vocab_size);
    let most = (CHUNK_LOGITS / vocab).max(LEAST_ROWS);
    let mut i = 0;
    for rows in rows.chunks(most) {
        let logits = backend.logits(&backend.gather_rows(y, rows)?, head)?;
        let logits = backend.view(&logits)?;
        let measured: Vec<(u32, f64)> = logits.par_chunks_exact(vocab).map(measure).collect();
        for (logits, (best, log_sum)) in logits.chunks_exact(vocab).zip(measured) {
            each(i, Row { logits, best, log_sum })?;
            i += 1;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_softmax_is_exact_enough_and_ties_go_to_the_lowest() {
        let mut logits: Vec<f32> = (0..70_001u32).map(|i| ((i.wrapping_mul(2654435761) >> 8) as f32 / 1e6).sin() * 9.0).collect();
        (logits[501], logits[69_999]) = (9.5, 9.5);
        let sum: f64 = logits.iter().map(|x| (*x as f64).exp()).sum();
        let (best, log_sum) = measure(&logits);
        assert_eq!(best, 501);
        assert!((log_sum - sum.ln()).abs() < 2e-7, "{log_sum} {}", sum.ln());
        assert_eq!(measure(&[3.0]), (0, 3.0));
        assert_eq!(measure(&[f32::NEG_INFINITY, -2.0]).0, 1);
    }
}
