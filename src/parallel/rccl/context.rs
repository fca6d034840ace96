//! Context parallelism between devices: the same parcels and pieces as in [`super::super::context`], in device memory.

use std::sync::Arc;

use anyhow::{Result, ensure};

use super::super::context::{Cutting, HALO};
use super::link::{Link, Parcel};
use super::links::Links;
use crate::model::peers::ContextPeers;
use crate::tensor::Backend;
use crate::tensor::backend::{CcaIn, Halo};
use crate::tensor::hip::{Buf, Hip, Kind, Rows};

/// The context group of a rank.
pub struct DeviceContext {
    /// None = of a plan, in which nothing travels.
    links: Option<Arc<Links>>,
    cutting: Cutting,
}

/// What goes over borders: for each chunk of the rank, the rows of all its sequences.
type Parcels = Vec<Buf>;

impl DeviceContext {
    pub fn new(links: Arc<Links>, cutting: Cutting) -> Self {
        Self { links: Some(links), cutting }
    }

    /// Takes the memory that sharing takes, on a backend that only plans.
    pub fn planned(cutting: Cutting) -> Self {
        Self { links: None, cutting }
    }

    fn link(&self) -> Result<Option<&Link>> {
        let of = |links: &Arc<Links>| links.context.is_none();
        ensure!(!self.links.as_ref().is_some_and(of), "there is no context group");
        Ok(self.links.as_ref().and_then(|links| links.context.as_ref()))
    }

    /// Place in the group.
    fn place(&self) -> Result<usize> {
        Ok(self.link()?.map_or(0, Link::index))
    }

    /// A parcel for each own chunk, with room for `width` numbers of each sequence.
    fn parcels(&self, hip: &Hip, rows: &Rows, width: usize) -> Result<Parcels> {
        (0..self.cutting.per_rank()).map(|_| hip.zeros(self.cutting.sequences(rows.batch), width)).collect()
    }

    /// Sends `parcels` over the border on one side of each own chunk, and returns what came over the other. `step`: +1 to the chunk
    /// after, -1 to the one before. Chunks without a neighbour get zeros.
    fn over_borders(&self, name: &'static str, hip: &Hip, parcels: &Parcels, step: isize) -> Result<Parcels> {
        let own = self.cutting.chunks_of(self.place()?);
        let mut came = parcels.iter().map(|p| hip.zeros(p.rows(), p.cols())).collect::<Result<Parcels>>()?;
        let (mut outgoing, mut incoming) = (Vec::new(), Vec::new());
        for (chunk, parcel) in own.iter().zip(parcels) {
            let Some(to) = self.cutting.beyond(*chunk, step) else { continue };
            match own.iter().position(|c| *c == to) {
                Some(here) => hip.copy_part(&mut came[here], 0, parcel, 0..parcel.len())?,
                None => {
                    let (member, bytes) = (self.cutting.place_of(to), parcel.len() * Kind::F32.bytes());
                    outgoing.push(Parcel { member, at: parcel.address(0), bytes });
                }
            }
        }
        for (chunk, place) in own.iter().zip(&mut came) {
            if let Some(from) = self.cutting.beyond(*chunk, -step).filter(|c| !own.contains(c)) {
                let (member, bytes) = (self.cutting.place_of(from), place.len() * Kind::F32.bytes());
                incoming.push(Parcel { member, at: place.address_mut(0), bytes });
            }
        }
        if let Some(link) = self.link()? {
            // SAFETY: buffers of this backend, used in its stream alone.
            unsafe { link.exchange(name, hip.main_stream()?, &outgoing, &incoming) }?;
        }
        Ok(came)
    }
}

/// Queries, keys and delayed values of a border, with where they lie in a parcel's row.
struct Border {
    q: usize,
    k: usize,
    half: usize,
}

impl Border {
    fn of(x: &CcaIn<&Buf>) -> Self {
        Self { q: x.q.cols(), k: x.k.cols(), half: x.v_delayed.cols() }
    }

    fn width(&self) -> usize {
        HALO * (self.q + self.k) + self.half
    }

    /// Rows of a border and numbers of a row: of queries, of keys, of delayed values; where each begins in a parcel's row.
    fn parts(&self) -> [(usize, usize, usize); 3] {
        let (q, k) = (HALO * self.q, HALO * self.k);
        [(HALO, self.q, 0), (HALO, self.k, q), (1, self.half, q + k)]
    }
}

impl ContextPeers<Hip> for DeviceContext {
    fn halo(&self, hip: &Hip, rows: &Rows, x: CcaIn<&Buf>) -> Result<Halo<Buf>> {
        let border = Border::of(&x);
        let sources = [x.q, x.k, x.v_delayed];
        ensure!(sources.iter().all(|b| b.kind() == Kind::F32), "what goes over borders of chunks is f32");
        let mut parcels = self.parcels(hip, rows, border.width())?;
        for (i, (s, own)) in self.cutting.chunk_places(rows.batch).enumerate() {
            for ((n, width, at), from) in border.parts().into_iter().zip(sources) {
                let end = (i + 1) * rows.seq;
                hip.copy_part(&mut parcels[own], s * border.width() + at, from, (end - n) * width..end * width)?;
            }
        }
        let came = self.over_borders("halo of chunks", hip, &parcels, 1)?;
        let room = |rows, cols| hip.room(rows, cols, Kind::F32);
        let mut halo = [room(rows.batch * HALO, border.q)?, room(rows.batch * HALO, border.k)?, room(rows.batch, border.half)?];
        for (i, (s, own)) in self.cutting.chunk_places(rows.batch).enumerate() {
            for ((n, width, at), to) in border.parts().into_iter().zip(&mut halo) {
                let from = s * border.width() + at;
                hip.copy_part(to, i * n * width, &came[own], from..from + n * width)?;
            }
        }
        let [q, k, v_delayed] = halo;
        Ok(Halo { q, k, v_delayed })
    }

    fn return_halo(&self, hip: &Hip, rows: &Rows, d_halo: Halo<Buf>, d: &mut CcaIn<Buf>) -> Result<()> {
        let border = Border::of(&d.as_ref());
        let mut parcels = self.parcels(hip, rows, border.width())?;
        for (i, (s, own)) in self.cutting.chunk_places(rows.batch).enumerate() {
            for ((n, width, at), from) in border.parts().into_iter().zip([&d_halo.q, &d_halo.k, &d_halo.v_delayed]) {
                hip.copy_part(&mut parcels[own], s * border.width() + at, from, i * n * width..(i + 1) * n * width)?;
            }
        }
        let came = self.over_borders("gradients of halos", hip, &parcels, -1)?;
        for (i, (s, own)) in self.cutting.chunk_places(rows.batch).enumerate() {
            for ((n, width, at), to) in border.parts().into_iter().zip([&mut d.q, &mut d.k, &mut d.v_delayed]) {
                let (from, end) = (s * border.width() + at, (i + 1) * rows.seq);
                hip.add_part(to, (end - n) * width, &came[own], from..from + n * width)?;
            }
        }
        Ok(())
    }

    fn gather(&self, hip: &Hip, rows: &Rows, k: &Buf, v: &Buf) -> Result<(Buf, Buf)> {
        ensure!(k.kind() == v.kind(), "keys are {:?}, values {:?}", k.kind(), v.kind());
        let (width, own, n, kind) = (k.cols(), rows.tokens(), self.cutting.cp, k.kind());
        let (place, pieces) = (self.place()?, self.cutting.pieces(own, width));
        let mut all = hip.room(2 * n * own, width, kind)?;
        let at = pieces[place].start;
        hip.copy_part(&mut all, at, k, 0..k.len())?;
        hip.copy_part(&mut all, at + own * width, v, 0..v.len())?;
        let address = all.address_mut(0);
        if let Some(link) = self.link()? {
            // SAFETY: the buffer has all pieces, and is used in this backend's stream alone.
            unsafe { link.all_gather("all-gather of keys and values", hip.main_stream()?, address, kind, &pieces) }?;
        }
        let (mut all_k, mut all_v) = (hip.room(n * own, width, kind)?, hip.room(n * own, width, kind)?);
        let run = self.cutting.chunk() * width;
        for (member, from, to) in self.cutting.runs(self.cutting.sequences(rows.batch)) {
            let at = pieces[member].start + from * width;
            hip.copy_part(&mut all_k, to * width, &all, at..at + run)?;
            hip.copy_part(&mut all_v, to * width, &all, at + own * width..at + own * width + run)?;
        }
        Ok((all_k, all_v))
    }

    fn scatter(&self, hip: &Hip, rows: &Rows, dk: Buf, dv: Buf) -> Result<(Buf, Buf)> {
        ensure!(dk.kind() == Kind::F32 && dv.kind() == Kind::F32, "gradients of keys and values are f32");
        let (width, own, n) = (dk.cols(), rows.tokens(), self.cutting.cp);
        let (place, pieces) = (self.place()?, self.cutting.pieces(own, width));
        let mut all = hip.room(2 * n * own, width, Kind::F32)?;
        let run = self.cutting.chunk() * width;
        for (member, at, from) in self.cutting.runs(self.cutting.sequences(rows.batch)) {
            let (at, from) = (pieces[member].start + at * width, from * width..from * width + run);
            hip.copy_part(&mut all, at, &dk, from.clone())?;
            hip.copy_part(&mut all, at + own * width, &dv, from)?;
        }
        let address = all.address_mut(0);
        if let Some(link) = self.link()? {
            // SAFETY: as above.
            unsafe { link.reduce_scatter("reduce-scatter of key and value gradients", hip.main_stream()?, address, &pieces) }?;
        }
        let (mut own_k, mut own_v) = (hip.room(own, width, Kind::F32)?, hip.room(own, width, Kind::F32)?);
        let at = pieces[place].start;
        hip.copy_part(&mut own_k, 0, &all, at..at + own * width)?;
        hip.copy_part(&mut own_v, 0, &all, at + own * width..at + 2 * own * width)?;
        Ok((own_k, own_v))
    }
}
