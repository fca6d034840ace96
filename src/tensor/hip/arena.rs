//! Device memory of a run: regions that are taken from the device a few times, and blocks that are given out without asking it.
//!
//! All work of a backend is queued in one stream, so a block may be given out again as soon as its last owner is dropped: whatever
//! was queued with it is done before what the next owner queues.
//!
//! A run's first region is sized for a whole step before it begins (`reserve`); how large that is tells a step on an arena that has no
//! memory (`planning`).

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result};
use hip_sys::{DeviceBuffer, Hip as Library};

use crate::tensor::places::Places;

/// Blocks begin at multiples of this: what hipBLASLt and 16-byte loads want, and a cache line.
const LINE: usize = 256;
/// A region that was not planned has at least so many bytes.
const REGION_BYTES: usize = 64 << 20;
/// Made-up address of a planning arena's only region.
const PLANNED_BASE: usize = LINE;

#[derive(Debug)]
pub struct Arena {
    /// None = planning.
    library: Option<&'static Library>,
    inner: Mutex<Inner>,
}

/// What an arena has done so far, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ArenaUse {
    /// Taken from the device.
    pub reserved: usize,
    /// Largest extent in use at any time, the gaps between blocks included.
    pub peak: usize,
    /// In use now.
    pub used: usize,
    /// Regions taken from the device; 1 where the plan was right.
    pub regions: usize,
}

#[derive(Debug, Default)]
struct Inner {
    /// Declared first, for nothing may outlive the memory it names.
    places: Places,
    regions: Vec<DeviceBuffer>,
    /// Largest extent of the first region in use at any time.
    peak: usize,
    /// Where the first region begins.
    base: usize,
}

/// A stretch of device memory. Holds whatever was there before.
#[derive(Debug)]
pub struct Block {
    arena: Arc<Arena>,
    address: usize,
    bytes: usize,
}

impl Arena {
    pub fn new(library: &'static Library) -> Arc<Self> {
        Arc::new(Self { library: Some(library), inner: Mutex::default() })
    }

    /// An arena without memory, whose addresses mean nothing.
    pub fn planning() -> Arc<Self> {
        let mut places = Places::default();
        places.add(PLANNED_BASE, usize::MAX / 2 / LINE * LINE);
        Arc::new(Self { library: None, inner: Mutex::new(Inner { places, base: PLANNED_BASE, ..Inner::default() }) })
    }

    pub fn usage(&self) -> ArenaUse {
        let inner = self.lock();
        ArenaUse {
            reserved: inner.regions.iter().map(DeviceBuffer::bytes).sum(),
            peak: inner.peak,
            used: inner.places.used(),
            regions: inner.regions.len(),
        }
    }

    /// Makes room for `bytes` in one region, where there is not yet.
    ///
    /// # Errors
    /// When the device has no room.
    pub fn reserve(&self, bytes: usize) -> Result<()> {
        let mut inner = self.lock();
        match self.library {
            Some(library) if !inner.places.has_room(bytes) => inner.grow(library, lines(bytes)),
            _ => Ok(()),
        }
    }

    /// A block of `bytes`.
    ///
    /// # Errors
    /// When the device has no room.
    pub fn block(self: &Arc<Self>, bytes: usize) -> Result<Block> {
        let mut inner = self.lock();
        let address = match inner.places.take(lines(bytes)) {
            Some(address) => address,
            None => {
                let library = self.library.context("a plan of device memory has no room for a block")?;
                // Where the device has no room for a whole region, the block alone may fit.
                let region = inner.grow(library, lines(bytes).max(REGION_BYTES));
                region.or_else(|_| inner.grow(library, lines(bytes)))?;
                inner.places.take(lines(bytes)).context("a region just taken has no room")?
            }
        };
        // Blocks of further regions count as if they followed the first.
        let extent = if inner.regions.len() > 1 { inner.places.used() } else { address + lines(bytes) - inner.base };
        inner.peak = inner.peak.max(extent);
        Ok(Block { arena: self.clone(), address, bytes })
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Nothing panics while holding the lock with the lists in disorder.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Bytes of whole lines, at least one.
fn lines(bytes: usize) -> usize {
    bytes.div_ceil(LINE).max(1) * LINE
}

impl Inner {
    fn grow(&mut self, library: &'static Library, bytes: usize) -> Result<()> {
        // One more line, for a region need not begin at one.
        let region = DeviceBuffer::new(library, bytes + LINE).context("taking working memory from the device")?;
        let begin = (region.pointer() as usize).next_multiple_of(LINE);
        let end = (region.pointer() as usize + region.bytes()) / LINE * LINE;
        self.places.add(begin, end - begin);
        if self.regions.is_empty() {
            self.base = begin;
        }
        self.regions.push(region);
        Ok(())
    }
}

impl Block {
    /// The device's address.
    pub fn address(&self) -> usize {
        self.address
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.arena.lock().places.give_back(self.address, lines(self.bytes));
    }
}
