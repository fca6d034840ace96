//! The devices: their memory budget, their sticky error, and the lock under which their kernels run one at a time.

use std::cell::Cell;
use std::collections::HashSet;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use super::stream::Stream;
use super::{Failure, INVALID_DEVICE, NO_DEVICE, SUCCESS, Status, failure};
use crate::memory::Owner;
use crate::settings::settings;

#[derive(Debug)]
pub struct Device {
    pub number: usize,
    /// Bytes in live allocations.
    pub used: Mutex<usize>,
    /// Devices whose memory this one may access.
    pub peers: Mutex<HashSet<usize>>,
    /// First error of a kernel or copy; everything after it fails with it.
    sticky: AtomicI32,
    running: Mutex<()>,
    /// The null stream, and all others that live.
    default_stream: OnceLock<Arc<Stream>>,
    streams: Mutex<Vec<Weak<Stream>>>,
}

impl Device {
    fn new(number: usize) -> Self {
        Self {
            number,
            used: Mutex::new(0),
            peers: Mutex::new(HashSet::new()),
            sticky: AtomicI32::new(SUCCESS),
            running: Mutex::new(()),
            default_stream: OnceLock::new(),
            streams: Mutex::new(Vec::new()),
        }
    }

    /// Taken while a kernel, product or copy runs: work of several streams takes turns.
    pub fn running(&self) -> MutexGuard<'_, ()> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn fail(&self, status: Status, text: &str) {
        eprintln!("swgpu: device {}: {text}", self.number);
        // Only the first error is kept.
        let _ = self.sticky.compare_exchange(SUCCESS, status, Ordering::SeqCst, Ordering::SeqCst);
    }

    /// The sticky error, as the failure of a call.
    pub fn check(&self) -> Result<(), Failure> {
        match self.sticky.load(Ordering::SeqCst) {
            SUCCESS => Ok(()),
            status => Err(status.into()),
        }
    }

    pub fn may_access(&self, owner: Owner) -> bool {
        match owner {
            Owner::Host => true,
            Owner::Module(device) => device == self.number,
            Owner::Device(device) => {
                device == self.number || self.peers.lock().unwrap_or_else(PoisonError::into_inner).contains(&device)
            }
        }
    }

    pub fn default_stream(&self) -> &Arc<Stream> {
        self.default_stream.get_or_init(|| Stream::new(self.number, true))
    }

    pub fn add_stream(&self, stream: &Arc<Stream>) {
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        streams.retain(|stream| stream.strong_count() > 0);
        streams.push(Arc::downgrade(stream));
    }

    /// All live streams but the null stream.
    pub fn streams(&self) -> Vec<Arc<Stream>> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner).iter().filter_map(Weak::upgrade).collect()
    }

    /// Waits for everything queued so far.
    pub fn synchronize(&self) -> Result<(), Failure> {
        for stream in self.streams() {
            stream.drain();
        }
        self.default_stream().drain();
        self.check()
    }
}

fn devices() -> &'static [Device] {
    static DEVICES: OnceLock<Vec<Device>> = OnceLock::new();
    DEVICES.get_or_init(|| (0..settings().devices).map(Device::new).collect())
}

pub fn count() -> usize {
    devices().len()
}

pub fn device(number: i32) -> Result<&'static Device, Failure> {
    if devices().is_empty() {
        return failure(NO_DEVICE, "there is no device (SWGPU_DEVICES=0)");
    }
    let found = usize::try_from(number).ok().and_then(|number| devices().get(number));
    found.map_or_else(|| failure(INVALID_DEVICE, format!("device {number} of {} (SWGPU_DEVICES)", count())), Ok)
}

thread_local! {
    static CURRENT: Cell<i32> = const { Cell::new(0) };
}

pub fn set_current(number: i32) -> Result<(), Failure> {
    device(number)?;
    CURRENT.set(number);
    Ok(())
}

/// This thread's device.
pub fn current() -> Result<&'static Device, Failure> {
    device(CURRENT.get())
}
