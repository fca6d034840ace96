//! Context parallelism (spec 4.4): a sequence is cut into chunks of equal length, and each rank of a context group holds one
//! (contiguous) or two of them (zigzag). Keys and values of whole sequences are gathered, since CCA makes them small; what the
//! convolutions and the value shift need of the chunk before travels as a halo.

use std::ops::Range;
use std::sync::Arc;

use anyhow::{Result, ensure};

use super::mesh::Mesh;
use crate::error::bad_input;
use crate::model::peers::ContextPeers;
use crate::tensor::backend::{Backend, Batch, CcaIn, Chunks, Halo};
use crate::tensor::cpu::elementwise::add;
use crate::tensor::cpu::{Buf, Cpu, Rows};

/// Rows before a chunk that its first rows look at.
pub(super) const HALO: usize = 2;

/// Which chunks a rank holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cut {
    /// Rank r holds chunk r of `cp`. The last ranks have the most keys to look at.
    Contiguous,
    /// Rank r holds chunks r and 2 cp - 1 - r of `2 cp`: as much to look at for all.
    Zigzag,
}

/// Sequences from this length on are cut in zigzag unless a recipe says otherwise.
const ZIGZAG_FROM: usize = 32_768;

/// How sequences are cut among the `cp` ranks of a context group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cutting {
    pub cp: usize,
    pub cut: Cut,
    /// Tokens of a sequence.
    pub seq: usize,
}

impl Cut {
    /// The usual one for sequences of `seq` tokens.
    pub fn auto(seq: usize) -> Self {
        if seq >= ZIGZAG_FROM { Self::Zigzag } else { Self::Contiguous }
    }
}

impl Cutting {
    /// # Errors
    /// Chunks that are shorter than the halo.
    pub fn new(cp: usize, cut: Cut, seq: usize) -> Result<Self> {
        let cutting = Self { cp, cut, seq };
        if cp > 1 && cutting.chunk() < HALO {
            return Err(bad_input(format!(
                "parallel.cp = {cp} cuts sequences of {seq} tokens into {} chunks of {}: the convolutions look {HALO} tokens back, and a \
                 chunk may not be shorter than that. Make parallel.cp smaller or train.seq_len longer",
                cutting.chunks(),
                cutting.chunk()
            )));
        }
        Ok(cutting)
    }

    /// Chunks of a rank.
    pub fn per_rank(&self) -> usize {
        match self.cut {
            Cut::Contiguous => 1,
            Cut::Zigzag => 2,
        }
    }

    /// Chunks of a sequence.
    pub fn chunks(&self) -> usize {
        self.cp * self.per_rank()
    }

    /// Tokens of a chunk. A sequence that does not divide is filled up with padding at its end.
    pub fn chunk(&self) -> usize {
        self.seq.div_ceil(self.chunks())
    }

    /// Chunks of the rank at `place` of the context group, rising.
    pub fn chunks_of(&self, place: usize) -> Vec<usize> {
        match self.cut {
            Cut::Contiguous => vec![place],
            Cut::Zigzag => vec![place, 2 * self.cp - 1 - place],
        }
    }

    /// Place of the rank that holds a chunk.
    pub fn place_of(&self, chunk: usize) -> usize {
        if chunk < self.cp { chunk } else { 2 * self.cp - 1 - chunk }
    }

    /// The chunk `step` further on in its sequence.
    pub(super) fn beyond(&self, chunk: usize, step: isize) -> Option<usize> {
        chunk.checked_add_signed(step).filter(|c| *c < self.chunks())
    }

    /// Sequences of a rank's micro-batch of `chunks` chunks.
    pub(super) fn sequences(&self, chunks: usize) -> usize {
        chunks / self.per_rank()
    }

    /// Sequence and own chunk (its number among the rank's) of the chunks of a batch, in order.
    pub(super) fn chunk_places(&self, chunks: usize) -> impl Iterator<Item = (usize, usize)> + use<> {
        let per_rank = self.per_rank();
        (0..chunks).map(move |i| (i / per_rank, i % per_rank))
    }

    /// Numbers of each member in an exchange of keys and values of `tokens` rows each: its keys, then its values.
    pub(super) fn pieces(&self, tokens: usize, width: usize) -> Vec<Range<usize>> {
        let len = 2 * tokens * width;
        (0..self.cp).map(|m| m * len..(m + 1) * len).collect()
    }

    /// Runs of `chunk` rows in such an exchange: the member, where its run begins among its rows, and where among those of the whole
    /// sequences.
    pub(super) fn runs(&self, sequences: usize) -> impl Iterator<Item = (usize, usize, usize)> {
        let (len, keys, each) = (self.chunk(), self.chunk() * self.chunks(), self.per_rank());
        let places = (0..self.cp).flat_map(move |member| (0..sequences).map(move |s| (member, s)));
        places.flat_map(move |(member, s)| {
            let chunks = self.chunks_of(member).into_iter().enumerate();
            chunks.map(move |(i, chunk)| (member, (s * each + i) * len, s * keys + chunk * len))
        })
    }

    /// The chunks at `place` of whole sequences of `seq` tokens, which `batch` holds.
    pub fn cut(&self, batch: &Batch, place: usize) -> Result<Batch> {
        ensure!(
            batch.seq == self.seq && batch.past == 0,
            "sequences of {} tokens are cut as if they had {}",
            batch.seq,
            self.seq
        );
        let (len, own) = (self.chunk(), self.chunks_of(place));
        let keys = len * self.chunks();
        let padded = keys > self.seq;
        let row = |sequence: usize, position: usize| (position < self.seq).then_some(sequence * self.seq + position);
        let rows: Vec<Option<usize>> = (0..batch.batch)
            .flat_map(|s| own.iter().flat_map(move |c| (c * len..(c + 1) * len).map(move |p| row(s, p))))
            .collect();
        let is_real = |row: &Option<usize>| row.is_some_and(|r| batch.valid.is_empty() || batch.valid[r]);
        let hides = padded || !batch.valid.is_empty();
        let all = (0..batch.batch).flat_map(|s| (0..keys).map(move |p| row(s, p)));
        Ok(Batch {
            batch: batch.batch * own.len(),
            seq: len,
            past: 0,
            ids: rows.iter().map(|r| r.map_or(0, |r| batch.ids[r])).collect(),
            labels: match batch.labels.is_empty() {
                true => Vec::new(),
                false => rows.iter().map(|r| r.map_or(-1, |r| batch.labels[r])).collect(),
            },
            valid: if hides { rows.iter().map(is_real).collect() } else { Vec::new() },
            doc_start: match batch.doc_start.is_empty() {
                true => Vec::new(),
                false => rows.iter().map(|r| r.map_or(0, |r| batch.doc_start[r])).collect(),
            },
            chunks: Some(Chunks {
                start: (0..batch.batch).flat_map(|_| own.iter().map(|c| c * len)).collect(),
                per_sequence: own.len(),
                keys,
                key_valid: if hides { all.map(|r| is_real(&r)).collect() } else { Vec::new() },
            }),
        })
    }
}

/// The context group of a rank.
pub struct Context {
    mesh: Arc<Mesh>,
    cutting: Cutting,
}

/// Numbers of a halo of one chunk: two rows of queries, two of keys, one of delayed values.
#[derive(Clone, Copy)]
struct Widths {
    q: usize,
    k: usize,
    half: usize,
}

impl Widths {
    fn of(x: &CcaIn<&Buf>, backend: &Cpu) -> Self {
        let cols = |b: &Buf| backend.shape(b)[1];
        Self { q: cols(x.q), k: cols(x.k), half: cols(x.v_delayed) }
    }

    fn halo(&self) -> usize {
        HALO * (self.q + self.k) + self.half
    }

    /// Queries, keys and delayed values of sequence `s` in the parcel of a chunk.
    fn parts<'a>(&self, parcel: &'a [f32], s: usize) -> [&'a [f32]; 3] {
        let (q, rest) = parcel[s * self.halo()..(s + 1) * self.halo()].split_at(HALO * self.q);
        let (k, v) = rest.split_at(HALO * self.k);
        [q, k, v]
    }
}

impl Context {
    pub fn new(mesh: Arc<Mesh>, cutting: Cutting) -> Self {
        Self { mesh, cutting }
    }

    fn place(&self) -> usize {
        self.mesh.context.index()
    }

    /// Sends `parcels`, one for each own chunk, over the border on one side of the chunk, and returns what came over the other
    /// border of each own chunk. `step`: +1 to the chunk after, -1 to the one before. Chunks without a neighbour get zeros.
    fn over_borders(&self, name: &'static str, parcels: Vec<Vec<f32>>, step: isize) -> Result<Vec<Vec<f32>>> {
        let own = self.cutting.chunks_of(self.place());
        let mut came: Vec<Vec<f32>> = parcels.iter().map(|p| vec![0.0; p.len()]).collect();
        let (mut outgoing, mut incoming) = (Vec::new(), Vec::new());
        for (i, chunk) in own.iter().enumerate() {
            if let Some(to) = self.cutting.beyond(*chunk, step) {
                match own.iter().position(|c| *c == to) {
                    Some(here) => came[here].copy_from_slice(&parcels[i]),
                    None => outgoing.push((self.cutting.place_of(to), &parcels[i][..])),
                }
            }
        }
        for (chunk, place) in own.iter().zip(&mut came) {
            let from = self.cutting.beyond(*chunk, -step).filter(|c| !own.contains(c));
            incoming.extend(from.map(|from| (self.cutting.place_of(from), &mut place[..])));
        }
        self.mesh.context.point_to_point(name, &outgoing, incoming)?;
        Ok(came)
    }
}

impl ContextPeers<Cpu> for Context {
    fn halo(&self, backend: &Cpu, rows: &Rows, x: CcaIn<&Buf>) -> Result<Halo<Buf>> {
        let (w, len) = (Widths::of(&x, backend), rows.seq);
        let mut halo = Halo {
            q: backend.matrix(rows.batch * HALO, w.q)?,
            k: backend.matrix(rows.batch * HALO, w.k)?,
            v_delayed: backend.matrix(rows.batch, w.half)?,
        };
        if backend.is_planning() {
            return Ok(halo);
        }
        let mut parcels = vec![Vec::with_capacity(self.cutting.sequences(rows.batch) * w.halo()); self.cutting.per_rank()];
        for (i, (_, own)) in self.cutting.chunk_places(rows.batch).enumerate() {
            let end = (i + 1) * len;
            parcels[own].extend_from_slice(&x.q.data()[(end - HALO) * w.q..end * w.q]);
            parcels[own].extend_from_slice(&x.k.data()[(end - HALO) * w.k..end * w.k]);
            parcels[own].extend_from_slice(&x.v_delayed.data()[(end - 1) * w.half..end * w.half]);
        }
        let came = self.over_borders("halo of chunks", parcels, 1)?;
        for (i, (s, own)) in self.cutting.chunk_places(rows.batch).enumerate() {
            let [q, k, v] = w.parts(&came[own], s);
            halo.q.data_mut()[i * q.len()..][..q.len()].copy_from_slice(q);
            halo.k.data_mut()[i * k.len()..][..k.len()].copy_from_slice(k);
            halo.v_delayed.data_mut()[i * v.len()..][..v.len()].copy_from_slice(v);
        }
        Ok(halo)
    }

    fn return_halo(&self, backend: &Cpu, rows: &Rows, d_halo: Halo<Buf>, d: &mut CcaIn<Buf>) -> Result<()> {
        if backend.is_planning() {
            return Ok(());
        }
        let (w, len) = (Widths::of(&d.as_ref(), backend), rows.seq);
        let mut parcels = vec![Vec::with_capacity(self.cutting.sequences(rows.batch) * w.halo()); self.cutting.per_rank()];
        for (i, (_, own)) in self.cutting.chunk_places(rows.batch).enumerate() {
            parcels[own].extend_from_slice(&d_halo.q.data()[i * HALO * w.q..][..HALO * w.q]);
            parcels[own].extend_from_slice(&d_halo.k.data()[i * HALO * w.k..][..HALO * w.k]);
            parcels[own].extend_from_slice(&d_halo.v_delayed.data()[i * w.half..][..w.half]);
        }
        let came = self.over_borders("gradients of halos", parcels, -1)?;
        for (i, (s, own)) in self.cutting.chunk_places(rows.batch).enumerate() {
            let [q, k, v] = w.parts(&came[own], s);
            let end = (i + 1) * len;
            add(&mut d.q.data_mut()[(end - HALO) * w.q..end * w.q], q);
            add(&mut d.k.data_mut()[(end - HALO) * w.k..end * w.k], k);
            add(&mut d.v_delayed.data_mut()[(end - 1) * w.half..end * w.half], v);
        }
        Ok(())
    }

    fn gather(&self, backend: &Cpu, rows: &Rows, k: &Buf, v: &Buf) -> Result<(Buf, Buf)> {
        let (width, own, n) = (backend.shape(k)[1], rows.batch * rows.seq, self.cutting.cp);
        let mut all = backend.matrix(2 * n * own, width)?;
        let (mut all_k, mut all_v) = (backend.matrix(n * own, width)?, backend.matrix(n * own, width)?);
        if backend.is_planning() {
            return Ok((all_k, all_v));
        }
        let pieces = self.cutting.pieces(own, width);
        let (own_k, own_v) = all.data_mut()[pieces[self.place()].clone()].split_at_mut(own * width);
        own_k.copy_from_slice(k.data());
        own_v.copy_from_slice(v.data());
        self.mesh.context.all_gather("all-gather of keys and values", all.data_mut(), &pieces)?;
        let run = self.cutting.chunk() * width;
        let (all, k, v) = (all.data(), all_k.data_mut(), all_v.data_mut());
        for (member, from, to) in self.cutting.runs(self.cutting.sequences(rows.batch)) {
            let at = pieces[member].start + from * width;
            k[to * width..][..run].copy_from_slice(&all[at..][..run]);
            v[to * width..][..run].copy_from_slice(&all[at + own * width..][..run]);
        }
        Ok((all_k, all_v))
    }

    fn scatter(&self, backend: &Cpu, rows: &Rows, dk: Buf, dv: Buf) -> Result<(Buf, Buf)> {
        let (width, own, n) = (backend.shape(&dk)[1], rows.batch * rows.seq, self.cutting.cp);
        let mut all = backend.matrix(2 * n * own, width)?;
        let (mut own_k, mut own_v) = (backend.matrix(own, width)?, backend.matrix(own, width)?);
        if backend.is_planning() {
            return Ok((own_k, own_v));
        }
        let pieces = self.cutting.pieces(own, width);
        let run = self.cutting.chunk() * width;
        let (to, k, v) = (all.data_mut(), dk.data(), dv.data());
        for (member, at, from) in self.cutting.runs(self.cutting.sequences(rows.batch)) {
            let at = pieces[member].start + at * width;
            to[at..][..run].copy_from_slice(&k[from * width..][..run]);
            to[at + own * width..][..run].copy_from_slice(&v[from * width..][..run]);
        }
        self.mesh.context.reduce_scatter("reduce-scatter of key and value gradients", all.data_mut(), &pieces)?;
        let (k, v) = all.data()[pieces[self.place()].clone()].split_at(own * width);
        own_k.data_mut().copy_from_slice(k);
        own_v.data_mut().copy_from_slice(v);
        Ok((own_k, own_v))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_token_is_on_one_rank_and_padding_fills_the_end() {
        for (cp, cut, seq) in [(2, Cut::Contiguous, 12), (3, Cut::Contiguous, 16), (2, Cut::Zigzag, 16), (3, Cut::Zigzag, 25)] {
            let cutting = Cutting::new(cp, cut, seq).unwrap();
            let ids: Vec<u32> = (0..2 * seq as u32).collect();
            let labels: Vec<i64> = ids.iter().map(|i| *i as i64 + 1).collect();
            let whole = Batch { batch: 2, seq, ids, labels, ..Batch::default() };
            let mut seen = vec![0; 2 * seq];
            for place in 0..cp {
                let part = cutting.cut(&whole, place).unwrap();
                let chunks = part.chunks.clone().unwrap();
                for t in 0..part.tokens() {
                    let (chunk, s) = (t / part.seq, t % part.seq);
                    let (sequence, position) = (chunk / chunks.per_sequence, chunks.start[chunk] + s);
                    if position < seq {
                        assert_eq!(part.ids[t] as usize, sequence * seq + position);
                        assert_eq!(part.labels[t], part.ids[t] as i64 + 1);
                        seen[sequence * seq + position] += 1;
                    } else {
                        assert!(part.labels[t] < 0 && !part.valid[t]);
                    }
                }
                assert_eq!(chunks.key_valid.is_empty(), seq.is_multiple_of(cutting.chunks()));
                assert!(chunks.key_valid.iter().filter(|v| **v).count() == if chunks.key_valid.is_empty() { 0 } else { 2 * seq });
            }
            assert!(seen.iter().all(|n| *n == 1), "cp {cp}, {cut:?}: {seen:?}");
        }
    }

    #[test]
    fn chunks_shorter_than_the_halo_are_refused() {
        assert!(Cutting::new(4, Cut::Zigzag, 16).is_ok());
        let text = Cutting::new(4, Cut::Zigzag, 8).unwrap_err().to_string();
        assert!(text.contains("parallel.cp = 4 cuts sequences of 8 tokens into 8 chunks of 1"), "{text}");
        assert!(Cutting::new(1, Cut::Contiguous, 1).is_ok());
    }
}
