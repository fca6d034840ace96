//! Device memory of a run: regions that are taken from the device a few times, and blocks that are given out without asking it.
//!
//! All work of a backend is queued in one stream, so a block may be given out again as soon as its last owner is dropped: whatever
//! was queued with it is done before what the next owner queues.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result};
use hip_sys::{DeviceBuffer, Hip as Library};

use crate::tensor::places::Places;

/// Blocks begin at multiples of this: what hipBLASLt and 16-byte loads want, and a cache line.
const LINE: usize = 256;
/// A region has at least so many bytes.
const REGION_BYTES: usize = 64 << 20;

#[derive(Debug)]
pub struct Arena {
    library: &'static Library,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    /// Declared first, for nothing may outlive the memory it names.
    places: Places,
    regions: Vec<DeviceBuffer>,
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
        Arc::new(Self { library, inner: Mutex::default() })
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
                inner.grow(self.library, lines(bytes).max(REGION_BYTES))?;
                inner.places.take(lines(bytes)).context("a region just taken has no room")?
            }
        };
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
