//! Working memory of a step: everything a verb returns or works in lies in one region that is taken from the system once.
//!
//! A step makes and drops its buffers in the same order every time, so an arena that is empty between steps places them alike
//! in each. `Arena::planning` has no memory at all: running a step on it tells how much one needs.

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use memmap2::MmapMut;

use crate::tensor::places::Places;

/// Blocks start at multiples of this: a cache line, and an AVX-512 vector.
const LINE: usize = 64;
/// A region that was not planned is at least this large.
const GROWTH_BYTES: usize = 1 << 24;
/// Made-up address of a planning arena's only region.
const PLANNED_BASE: usize = LINE;

#[derive(Debug)]
pub struct Arena {
    inner: Mutex<Inner>,
    planning: bool,
}

#[derive(Debug, Default)]
struct Inner {
    regions: Vec<MmapMut>,
    places: Places,
    /// Largest extent of the first region in use at any time.
    peak: usize,
    /// Where the first region begins.
    base: usize,
}

/// What an arena has done so far, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ArenaUse {
    /// Taken from the system.
    pub reserved: usize,
    /// Largest extent in use, the gaps between blocks included.
    pub peak: usize,
    /// Regions taken from the system; 1 where the plan was right.
    pub regions: usize,
}

/// `len` elements in an arena. Holds whatever was there before.
#[derive(Debug)]
pub struct Block<T> {
    arena: Arc<Arena>,
    address: usize,
    len: usize,
    element: PhantomData<T>,
}

/// Kinds of numbers that any bit pattern is one of.
pub trait Element: Copy + Send + Sync {}
impl Element for f32 {}
impl Element for u32 {}
impl Element for f64 {}

impl Arena {
    /// Takes `bytes` from the system now, and more when they do not do.
    pub fn new(bytes: usize) -> std::io::Result<Arc<Self>> {
        let mut inner = Inner::default();
        if bytes > 0 {
            inner.grow(bytes, true)?;
        }
        Ok(Arc::new(Self { inner: Mutex::new(inner), planning: false }))
    }

    /// Takes nothing yet, and more whenever it does not do.
    pub fn growing() -> Arc<Self> {
        Arc::new(Self { inner: Mutex::default(), planning: false })
    }

    /// An arena without memory, whose blocks may not be looked into.
    pub fn planning() -> Arc<Self> {
        let mut places = Places::default();
        places.add(PLANNED_BASE, usize::MAX / 2 / LINE * LINE);
        Arc::new(Self { inner: Mutex::new(Inner { places, base: PLANNED_BASE, ..Inner::default() }), planning: true })
    }

    pub fn is_planning(&self) -> bool {
        self.planning
    }

    pub fn usage(&self) -> ArenaUse {
        let inner = self.lock();
        ArenaUse { reserved: inner.regions.iter().map(|r| r.len()).sum(), peak: inner.peak, regions: inner.regions.len() }
    }

    /// Makes room for `bytes` in one region, where there is not yet. Only an arena without blocks in use is moved.
    pub fn reserve(&self, bytes: usize) -> std::io::Result<()> {
        let mut inner = self.lock();
        if self.planning || inner.places.has_room(bytes) {
            return Ok(());
        }
        if inner.places.used() == 0 {
            (inner.regions, inner.places) = Default::default();
        }
        inner.grow(bytes, true)
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Nothing panics while holding the lock with the lists in disorder.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A block of `len` elements.
    pub fn block<T: Element>(self: &Arc<Self>, len: usize) -> std::io::Result<Block<T>> {
        let bytes = lines(len * size_of::<T>());
        let mut inner = self.lock();
        let address = match inner.places.take(bytes) {
            Some(address) => address,
            None => {
                inner.grow(bytes, false)?;
                inner.places.take(bytes).ok_or(std::io::ErrorKind::OutOfMemory)?
            }
        };
        // Blocks of further regions count as if they followed the first.
        let extent = if inner.regions.len() > 1 { inner.places.used() } else { address + bytes - inner.base };
        inner.peak = inner.peak.max(extent);
        Ok(Block { arena: self.clone(), address, len, element: PhantomData })
    }
}

/// Bytes of whole lines, at least one.
fn lines(bytes: usize) -> usize {
    bytes.div_ceil(LINE).max(1) * LINE
}

impl Inner {
    fn grow(&mut self, bytes: usize, planned: bool) -> std::io::Result<()> {
        let region = MmapMut::map_anon(lines(bytes).max(if planned { 0 } else { GROWTH_BYTES }))?;
        // Large pages where the system gives them; it works without.
        #[cfg(target_os = "linux")]
        let _ = region.advise(memmap2::Advice::HugePage);
        // Pages are aligned to more than a line. Two regions that happen to touch may grow together: both live as long.
        let address = region.as_ptr() as usize;
        self.places.add(address, region.len() / LINE * LINE);
        if self.regions.is_empty() {
            self.base = address;
        }
        self.regions.push(region);
        Ok(())
    }
}

impl<T> Block<T> {
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl<T: Element> Deref for Block<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        assert!(!self.arena.planning, "a planned block has no memory");
        // SAFETY: the block lies in a region that lives as long as the arena, is aligned, was zero at first and holds numbers
        // since; no other block overlaps it.
        unsafe { std::slice::from_raw_parts(self.address as *const T, self.len) }
    }
}

impl<T: Element> DerefMut for Block<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        assert!(!self.arena.planning, "a planned block has no memory");
        // SAFETY: as above, and the block is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.address as *mut T, self.len) }
    }
}

impl<T> Drop for Block<T> {
    fn drop(&mut self) {
        self.arena.lock().places.give_back(self.address, lines(self.len * size_of::<T>()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_is_what_a_run_uses() {
        let run = |arena: &Arc<Arena>| {
            let a = arena.block::<f32>(1000).unwrap();
            let b = arena.block::<u32>(17).unwrap();
            drop(a);
            let c = arena.block::<f32>(500).unwrap();
            let d = arena.block::<f32>(600).unwrap();
            drop((c, b));
            let e = arena.block::<f32>(700).unwrap();
            drop((d, e));
        };
        let plan = Arena::planning();
        run(&plan);
        let bytes = plan.usage().peak;
        assert_eq!(bytes, lines(4000) + lines(68) + lines(2400));
        let real = Arena::new(bytes).unwrap();
        for _ in 0..3 {
            run(&real);
        }
        assert_eq!((real.usage().regions, real.lock().places.used()), (1, 0));
        assert_eq!(real.lock().places.stretches(), 1, "freed blocks grow together again");
    }

    #[test]
    fn blocks_do_not_overlap_and_an_arena_grows() {
        let arena = Arena::new(0).unwrap();
        let mut blocks: Vec<Block<u32>> = (0..50).map(|i| arena.block(i * 37).unwrap()).collect();
        for (i, b) in blocks.iter_mut().enumerate() {
            b.fill(i as u32);
        }
        blocks.retain(|b| b.len() % 2 == 0);
        let mut more: Vec<Block<u32>> = (0..50).map(|i| arena.block(i * 11).unwrap()).collect();
        more.iter_mut().for_each(|b| b.fill(u32::MAX));
        assert!(blocks.iter().all(|b| b.iter().all(|x| *x as usize * 37 == b.len())));
        assert!(more.iter().all(|b| (b.as_ptr() as usize).is_multiple_of(LINE)));
    }
}
