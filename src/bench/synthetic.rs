//! Numbers and tokens out of counters: the same on every machine.

use anyhow::Result;
use rayon::prelude::*;

use crate::data::order::hash;
use crate::tensor::backend::{Backend, Batch, PinnedRoutes};

/// A matrix of numbers spread evenly over -1..1; each `stream` has its own.
pub fn matrix<B: Backend>(b: &B, stream: u64, rows: usize, cols: usize) -> Result<B::Buf> {
    let number = |i: usize| ((hash(stream, &[i as u64]) >> 40) as f32 - 8_388_608.0) / 8_388_608.0;
    let values: Vec<f32> = (0..rows * cols).into_par_iter().map(number).collect();
    b.upload(&values, rows, cols)
}

/// The same with numbers as large as weights are.
pub fn weights<B: Backend>(b: &B, stream: u64, rows: usize, cols: usize) -> Result<B::Buf> {
    let scale = 1.0 / (cols as f32).sqrt();
    let values: Vec<f32> = b.download(&matrix(b, stream, rows, cols)?)?.iter().map(|x| x * scale).collect();
    b.upload(&values, rows, cols)
}

/// Tokens of one micro-batch, each with a label, one document a sequence.
pub fn batch(stream: u64, vocab: usize, sequences: usize, seq: usize) -> Batch {
    let token = |i: usize| (hash(stream, &[i as u64]) % vocab as u64) as u32;
    let ids: Vec<u32> = (0..sequences * seq).map(token).collect();
    let labels = (0..ids.len()).map(|i| token(i + 1) as i64).collect();
    Batch { batch: sequences, seq, ids, labels, ..Batch::default() }
}

/// Routes that give every expert the same number of tokens, none skipped, in no order.
pub fn even_routes(stream: u64, tokens: usize, experts: usize) -> PinnedRoutes {
    let mut routes: Vec<u32> = (0..tokens).map(|t| (t % experts) as u32).collect();
    // Fisher-Yates.
    for i in (1..tokens).rev() {
        routes.swap(i, (hash(stream, &[i as u64]) % (i as u64 + 1)) as usize);
    }
    PinnedRoutes(routes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routes_are_even_and_labels_are_the_next_tokens() {
        let PinnedRoutes(routes) = even_routes(1, 1000, 16);
        let counts = (0..16).map(|e| routes.iter().filter(|r| **r == e).count());
        assert!(counts.clone().all(|n| n == 62 || n == 63) && counts.sum::<usize>() == 1000);
        assert!(routes.windows(2).filter(|w| w[1] == (w[0] + 1) % 16).count() < 200);
        let batch = batch(3, 50, 2, 8);
        assert!(batch.ids.iter().all(|id| *id < 50));
        assert!((0..15).all(|i| batch.labels[i] == batch.ids[i + 1] as i64));
    }
}
