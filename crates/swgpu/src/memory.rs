//! Device and pinned memory: live allocations with a shadow byte per byte that says whether it was ever written.
//!
//! Device addresses have bit 47 set. No user-space pointer of this machine has that bit, so host code that dereferences a device
//! pointer crashes, as it does beside a real GPU, and a kernel that is handed a host pointer is caught. They are handed out
//! upwards, each once, with gaps between them: running over an end never hits a neighbour, and freed memory is never live again.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

/// Set in every device address.
pub const DEVICE_BIT: u64 = 1 << 47;
const GAP_BYTES: u64 = 64 << 10;
static NEXT_DEVICE_ADDRESS: AtomicU64 = AtomicU64::new(DEVICE_BIT + (1 << 32));

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// Memory of the device with this number.
    Device(usize),
    /// Pinned host memory; every device sees it at its host address.
    Host,
    /// Code and constants of a module on this device; kernels may not write its code.
    Module(usize),
}

/// One live allocation.
#[derive(Debug)]
pub struct Allocation {
    /// Address as the device sees it.
    pub address: u64,
    pub bytes: usize,
    pub owner: Owner,
    data: *mut u8,
    /// One byte per byte of data, 1 = written. Null: always written.
    written: *mut u8,
}

// SAFETY: the pointers are to mappings that live as long as the allocation; what is read and written through them is raw
// bytes, whose races are those of the program under test.
unsafe impl Send for Allocation {}
// SAFETY: as above.
unsafe impl Sync for Allocation {}

fn map(bytes: usize) -> io::Result<*mut u8> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a fresh anonymous mapping touches no existing memory.
    let place = unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, -1, 0) };
    if place == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    Ok(place.cast())
}

impl Allocation {
    /// Maps memory. `tracked`: nothing counts as written yet; otherwise everything does.
    pub fn new(bytes: usize, owner: Owner, tracked: bool) -> io::Result<Arc<Self>> {
        let bytes = bytes.max(1);
        let data = map(bytes)?;
        let written = if tracked { map(bytes)? } else { std::ptr::null_mut() };
        let address = match owner {
            Owner::Host => data as u64,
            _ => NEXT_DEVICE_ADDRESS.fetch_add((bytes as u64).next_multiple_of(GAP_BYTES) + GAP_BYTES, Ordering::Relaxed),
        };
        Ok(Arc::new(Self { address, bytes, owner, data, written }))
    }

    pub fn segment(&self) -> Segment {
        Segment { start: self.address, end: self.address + self.bytes as u64, data: self.data, written: self.written }
    }

    fn describe(&self) -> String {
        format!("{:#x}..{:#x} ({} bytes, {:?})", self.address, self.address + self.bytes as u64, self.bytes, self.owner)
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        for place in [self.data, self.written] {
            if !place.is_null() {
                // SAFETY: mapped by `map` with this length, and nobody else holds this allocation any more.
                unsafe { libc::munmap(place.cast(), self.bytes) };
            }
        }
    }
}

/// A range of addresses with its backing memory. Copyable, so that an access keeps the last one it used.
#[derive(Clone, Copy, Debug)]
pub struct Segment {
    pub start: u64,
    pub end: u64,
    pub data: *mut u8,
    pub written: *mut u8,
}

impl Segment {
    pub const EMPTY: Self = Self { start: 1, end: 0, data: std::ptr::null_mut(), written: std::ptr::null_mut() };

    #[inline(always)]
    pub fn contains(&self, address: u64, bytes: usize) -> bool {
        address >= self.start && address.checked_add(bytes as u64).is_some_and(|end| end <= self.end)
    }

    /// Backing memory of an address that the segment contains.
    #[inline(always)]
    pub fn place(&self, address: u64) -> *mut u8 {
        self.data.wrapping_add((address - self.start) as usize)
    }

    /// Whether all of `bytes` (which the segment contains) were written.
    #[inline(always)]
    pub fn is_written(&self, address: u64, bytes: usize) -> bool {
        if self.written.is_null() {
            return true;
        }
        let place = self.written.wrapping_add((address - self.start) as usize);
        // SAFETY: the segment contains the range, and `written` is as long as the data.
        unsafe {
            match bytes {
                4 => place.cast::<u32>().read_unaligned() == 0x0101_0101,
                2 => place.cast::<u16>().read_unaligned() == 0x0101,
                _ => std::slice::from_raw_parts(place, bytes).iter().all(|&byte| byte == 1),
            }
        }
    }

    /// Marks a range that the segment contains as written (1) or never written (0).
    #[inline(always)]
    pub fn mark(&self, address: u64, bytes: usize, value: u8) {
        if !self.written.is_null() {
            let place = self.written.wrapping_add((address - self.start) as usize);
            // SAFETY: as in `is_written`.
            unsafe { std::ptr::write_bytes(place, value, bytes) }
        }
    }

    /// First address of the range that was never written.
    pub fn first_unwritten(&self, address: u64, bytes: usize) -> Option<u64> {
        (address..address + bytes as u64).find(|&place| !self.is_written(place, 1))
    }
}

static LIVE: RwLock<BTreeMap<u64, Arc<Allocation>>> = RwLock::new(BTreeMap::new());

/// Makes an allocation visible to devices and copies.
pub fn register(allocation: &Arc<Allocation>) {
    LIVE.write().unwrap_or_else(PoisonError::into_inner).insert(allocation.address, allocation.clone());
}

/// Ends an allocation that starts exactly at `address`.
pub fn release(address: u64) -> Option<Arc<Allocation>> {
    LIVE.write().unwrap_or_else(PoisonError::into_inner).remove(&address)
}

/// The live allocation that holds all of the range.
pub fn find(address: u64, bytes: usize) -> Option<Arc<Allocation>> {
    let live = LIVE.read().unwrap_or_else(PoisonError::into_inner);
    let (_, allocation) = live.range(..=address).next_back()?;
    allocation.segment().contains(address, bytes).then(|| allocation.clone())
}

/// The allocations that a kernel may touch, fixed for the length of its run.
#[derive(Debug)]
pub struct View {
    allocations: Vec<Arc<Allocation>>,
}

impl View {
    /// What `visible` admits of all live allocations, and `extra` ones.
    pub fn new(extra: &[Arc<Allocation>], visible: impl Fn(Owner) -> bool) -> Self {
        let live = LIVE.read().unwrap_or_else(PoisonError::into_inner);
        let mut allocations: Vec<_> = live.values().filter(|allocation| visible(allocation.owner)).cloned().collect();
        allocations.extend_from_slice(extra);
        allocations.sort_by_key(|allocation| allocation.address);
        Self { allocations }
    }

    /// The segment that holds all of the range, or a sentence about where it points instead.
    pub fn locate(&self, address: u64, bytes: usize) -> Result<Segment, String> {
        let after = self.allocations.partition_point(|allocation| allocation.address <= address);
        let below = after.checked_sub(1).map(|index| &self.allocations[index]);
        if let Some(allocation) = below.filter(|allocation| allocation.segment().contains(address, bytes)) {
            return Ok(allocation.segment());
        }
        let live_elsewhere = find(address, bytes).map(|allocation| allocation.describe());
        let nearest = below.or(self.allocations.get(after)).map_or("none".into(), |allocation| allocation.describe());
        Err(match live_elsewhere {
            Some(other) => format!("address {address:#x} (+{bytes}) is in {other}, which this device may not access"),
            None => format!("address {address:#x} (+{bytes}) is outside every live allocation; nearest: {nearest}"),
        })
    }
}
