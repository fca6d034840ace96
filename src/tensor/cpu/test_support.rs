//! What tests of several kernels need.

use super::level::Level;
use super::packed::{Core, Format, Layout, Source, pack_all};
use crate::tensor::backend::{Batch, Chunks};

/// Numbers that look random, from -1 to 1.
pub fn series(n: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2654435761).wrapping_add(12345);
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state as f32 / u32::MAX as f32 * 2.0 - 1.0
    };
    (0..n).map(next).collect()
}

/// Runs `f` on a pool of so many threads.
pub fn on<R: Send>(threads: usize, f: impl FnOnce() -> R + Send) -> R {
    super::par::pool(Some(threads)).unwrap().install(f)
}

/// Every kernel of this machine, with every format it has.
pub fn all_cores() -> Vec<Core> {
    let formats = |level: Level| {
        let pairs = (level >= Level::Avx512Bf16).then_some(Format::Bf16);
        [Format::F32, Format::RoundedF32].into_iter().chain(pairs).map(move |format| Core::at(level, format))
    };
    Level::available().flat_map(formats).collect()
}

/// `source` `[k, n]` as a packed right operand, in room that held something else.
pub fn pack_right(core: &Core, source: Source, k: usize, n: usize) -> (Layout, Vec<u32>) {
    let layout = Layout::new(core, k, n);
    let mut data = vec![u32::MAX; layout.len()];
    pack_all(core, layout, source, &mut data);
    (layout, data)
}

/// How the sequences of a batch are spread over ranks.
#[derive(Debug, Clone, Copy)]
pub struct Split {
    pub ranks: usize,
    /// Rank r has chunks r and 2 ranks - 1 - r, in place of chunk r.
    pub zigzag: bool,
    /// Rows of a chunk.
    pub len: usize,
}

impl Split {
    pub fn all(lens: &[usize]) -> impl Iterator<Item = Self> {
        let ways = [(2, false), (3, false), (4, false), (1, true), (2, true), (3, true)];
        lens.iter().flat_map(move |len| ways.map(|(ranks, zigzag)| Self { ranks, zigzag, len: *len }))
    }

    fn pieces(&self) -> usize {
        if self.zigzag { 2 * self.ranks } else { self.ranks }
    }

    /// Two whole sequences. Documents begin at chunks' first rows, one and two after them and one before; the second sequence has
    /// other ones than the first. Padding stands in the middle and at the end.
    pub fn whole(&self, documents: bool, padding: bool) -> Batch {
        let (batch, seq) = (2, self.pieces() * self.len);
        let mut whole = Batch { batch, seq, ids: vec![0; batch * seq], ..Batch::default() };
        if documents {
            for b in 0..batch {
                let begins = |s: usize| {
                    (0..self.pieces()).any(|c| {
                        let at = c * self.len;
                        match (c + b) % 5 {
                            1 => s == at,
                            2 => s == at + 1,
                            3 => s == at + 2,
                            4 => s + 1 == at,
                            _ => false,
                        }
                    })
                };
                let mut start = 0;
                for s in 0..seq {
                    start = if begins(s) { s as u32 } else { start };
                    whole.doc_start.push(start);
                }
            }
        }
        if padding {
            let real = |b: usize, s: usize| !(3..5).contains(&((s + b) % 11)) && s + 2 + b * self.len / 2 < seq;
            whole.valid = (0..batch * seq).map(|t| real(t / seq, t % seq)).collect();
        }
        whole
    }

    /// What each rank has of it.
    pub fn parts(&self, whole: &Batch) -> Vec<Part> {
        (0..self.ranks)
            .map(|rank| {
                let of = if self.zigzag { vec![rank, 2 * self.ranks - 1 - rank] } else { vec![rank] };
                let (mut start, mut rows) = (vec![], vec![]);
                for b in 0..whole.batch {
                    for c in &of {
                        start.push(c * self.len);
                        rows.extend((0..self.len).map(|s| b * whole.seq + c * self.len + s));
                    }
                }
                let batch = Batch {
                    batch: start.len(),
                    seq: self.len,
                    ids: vec![0; rows.len()],
                    valid: gather(&whole.valid, &rows, 1),
                    doc_start: gather(&whole.doc_start, &rows, 1),
                    chunks: Some(Chunks { start, per_sequence: of.len(), keys: whole.seq, key_valid: whole.valid.clone() }),
                    ..Batch::default()
                };
                Part { batch, rows }
            })
            .collect()
    }
}

/// One rank's chunks, and which row of the whole batch each row is.
pub struct Part {
    pub batch: Batch,
    pub rows: Vec<usize>,
}

/// Some rows of `width` numbers; nothing of nothing.
pub fn gather<T: Copy>(x: &[T], rows: &[usize], width: usize) -> Vec<T> {
    if x.is_empty() { vec![] } else { rows.iter().flat_map(|t| x[t * width..][..width].iter().copied()).collect() }
}

/// The other way round; adds.
pub fn scatter(x: &[f32], rows: &[usize], width: usize, to: &mut [f32]) {
    for (x, t) in x.chunks_exact(width).zip(rows) {
        to[t * width..][..width].iter_mut().zip(x).for_each(|(to, x)| *to += x);
    }
}

/// |a - b| / |b|; infinite where only b is zero.
pub fn relative(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    let error = norm(&mut a.iter().zip(b).map(|(a, b)| *a as f64 - *b as f64));
    if error == 0.0 { 0.0 } else { error / norm(&mut b.iter().map(|b| *b as f64)) }
}
