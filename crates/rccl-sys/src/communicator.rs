//! Communicators: the ranks that take part in a collective operation.

use std::ffi::c_int;
use std::ptr::null_mut;

use crate::ffi::{self, ncclComm_t, ncclConfig_v22800, ncclUniqueId};
use crate::{Error, Rccl};

/// What the ranks of a communicator agree on to find each other.
#[derive(Debug, Clone, Copy)]
pub struct UniqueId {
    pub(crate) raw: ncclUniqueId,
}

impl UniqueId {
    pub const BYTES: usize = ffi::NCCL_UNIQUE_ID_BYTES as usize;

    pub fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        Self { raw: ncclUniqueId { internal: bytes.map(|byte| byte as _) } }
    }

    /// To be sent to the other ranks.
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        self.raw.internal.map(|c| c as u8)
    }
}

/// How far the background work of a communicator is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    Ready,
    InProgress,
}

/// This rank's part of a communicator, on the device that was current when it was made.
///
/// [`Communicator::destroy`] ends it in order. Dropped instead, as happens after an error, it is aborted: destroying would wait for
/// ranks that may never come.
#[derive(Debug)]
pub struct Communicator {
    rccl: &'static Rccl,
    raw: ncclComm_t,
}

// SAFETY: a communicator belongs to no thread. One thread at a time may use it, but for asking its state and aborting it, which
// RCCL allows beside that; so `Sync` is left to who shares it with a lock or keeps to that rule.
unsafe impl Send for Communicator {}

impl Communicator {
    /// Joins the communicator `id` as `rank` of `ranks`, and waits for the others.
    ///
    /// # Errors
    /// The library refuses, or the others cannot be reached.
    pub fn new(rccl: &'static Rccl, id: UniqueId, rank: i32, ranks: i32) -> Result<Self, Error> {
        let mut raw = null_mut();
        // SAFETY: `raw` is a place for the handle.
        let result = unsafe { (rccl.functions.ncclCommInitRank)(&mut raw, ranks, id.raw, rank) };
        rccl.check("ncclCommInitRank", result, || format!("joining a communicator as rank {rank} of {ranks}"))?;
        Ok(Self { rccl, raw })
    }

    /// As [`Communicator::new`], but this and every later call return at once, and nothing may be queued before
    /// [`Communicator::state`] is ready: so a rank that does not come can be noticed, and waiting given up.
    ///
    /// # Errors
    /// The library refuses.
    pub fn start(rccl: &'static Rccl, id: UniqueId, rank: i32, ranks: i32) -> Result<Self, Error> {
        let config = ncclConfig_v22800 { blocking: 0, ..ncclConfig_v22800::new() };
        // SAFETY: the pointers in a new configuration are null.
        unsafe { Self::with_config(rccl, id, rank, ranks, config) }
    }

    /// As [`Communicator::new`], as `config` says. If that says `blocking: 0`, this and every later call return at once, and
    /// nothing may be queued before [`Communicator::state`] is ready.
    ///
    /// # Errors
    /// The library refuses, or the others cannot be reached.
    ///
    /// # Safety
    /// Pointers in `config` must be null or point to strings that end in a zero byte.
    pub unsafe fn with_config(
        rccl: &'static Rccl,
        id: UniqueId,
        rank: i32,
        ranks: i32,
        mut config: ncclConfig_v22800,
    ) -> Result<Self, Error> {
        let mut raw = null_mut();
        // SAFETY: `raw` is a place for the handle; the library copies the configuration, for whose pointers the caller vouches.
        let result = unsafe { (rccl.functions.ncclCommInitRankConfig)(&mut raw, ranks, id.raw, rank, &mut config) };
        // The communicator exists even after some errors, and is aborted then.
        let made = (!raw.is_null()).then(|| Self { rccl, raw });
        let doing = || format!("joining a communicator as rank {rank} of {ranks}");
        rccl.check("ncclCommInitRankConfig", result, doing)?;
        made.ok_or_else(|| Error::Invalid("ncclCommInitRankConfig succeeded but made no communicator".into()))
    }

    /// Splits the communicator: ranks that give the same `color` come together, in the order of `key`. Every rank must call it; one
    /// that gives none is in none.
    ///
    /// # Errors
    /// The library refuses, or another rank failed.
    pub fn split(&self, color: Option<u16>, key: i32) -> Result<Option<Self>, Error> {
        // NCCL_SPLIT_NOCOLOR
        const NO_COLOR: c_int = -1;
        let mut raw = null_mut();
        let number = color.map_or(NO_COLOR, c_int::from);
        // SAFETY: the handle is good, `raw` is a place for another; no configuration means the parent's.
        let result = unsafe { (self.rccl.functions.ncclCommSplit)(self.raw, number, key, &mut raw, null_mut()) };
        let made = (!raw.is_null()).then(|| Self { rccl: self.rccl, raw });
        self.check("ncclCommSplit", result, || format!("splitting a communicator, color {color:?}, key {key}"))?;
        Ok(made)
    }

    /// Whether background work is still going on.
    ///
    /// # Errors
    /// Some operation failed, perhaps because of another rank. The communicator can then only be aborted.
    pub fn state(&self) -> Result<State, Error> {
        let mut background = ffi::ncclSuccess;
        // SAFETY: the handle is good, and `background` is a place for the result.
        let result = unsafe { (self.rccl.functions.ncclCommGetAsyncError)(self.raw, &mut background) };
        self.check("ncclCommGetAsyncError", result, || "asking a communicator for errors".into())?;
        self.check("ncclCommGetAsyncError", background, || "an operation in the background".into())?;
        Ok(if background == ffi::ncclInProgress { State::InProgress } else { State::Ready })
    }

    /// How many ranks there are.
    ///
    /// # Errors
    /// The communicator is broken.
    pub fn ranks(&self) -> Result<i32, Error> {
        let mut ranks = 0;
        // SAFETY: the handle is good, and `ranks` is a place for the number.
        let result = unsafe { (self.rccl.functions.ncclCommCount)(self.raw, &mut ranks) };
        self.check("ncclCommCount", result, || "asking for the number of ranks".into())?;
        Ok(ranks)
    }

    /// Which rank this is.
    ///
    /// # Errors
    /// The communicator is broken.
    pub fn rank(&self) -> Result<i32, Error> {
        let mut rank = 0;
        // SAFETY: the handle is good, and `rank` is a place for the number.
        let result = unsafe { (self.rccl.functions.ncclCommUserRank)(self.raw, &mut rank) };
        self.check("ncclCommUserRank", result, || "asking for the rank".into())?;
        Ok(rank)
    }

    /// Which device it is on.
    ///
    /// # Errors
    /// The communicator is broken.
    pub fn device(&self) -> Result<i32, Error> {
        let mut device = 0;
        // SAFETY: the handle is good, and `device` is a place for the number.
        let result = unsafe { (self.rccl.functions.ncclCommCuDevice)(self.raw, &mut device) };
        self.check("ncclCommCuDevice", result, || "asking for the device".into())?;
        Ok(device)
    }

    /// Lets all that was queued come to its end, with the other ranks; after it the communicator can only be destroyed. With
    /// `blocking: 0` that is so once [`Communicator::state`] is ready.
    ///
    /// # Errors
    /// Some operation failed.
    pub fn finalize(&self) -> Result<(), Error> {
        // SAFETY: the handle is good.
        let result = unsafe { (self.rccl.functions.ncclCommFinalize)(self.raw) };
        self.check("ncclCommFinalize", result, || "finishing a communicator's work".into())
    }

    /// Ends it in order, with the other ranks.
    ///
    /// # Errors
    /// Some operation failed.
    pub fn destroy(self) -> Result<(), Error> {
        let (rccl, raw) = self.into_raw();
        // SAFETY: made here, owned, and not used again.
        let result = unsafe { (rccl.functions.ncclCommDestroy)(raw) };
        rccl.check("ncclCommDestroy", result, || "ending a communicator".into())
    }

    /// Ends it at once: operations that still run are stopped, and leave their targets as they are.
    ///
    /// # Errors
    /// The library refuses.
    pub fn abort(self) -> Result<(), Error> {
        let (rccl, raw) = self.into_raw();
        // SAFETY: made here, owned, and not used again.
        let result = unsafe { (rccl.functions.ncclCommAbort)(raw) };
        rccl.check("ncclCommAbort", result, || "aborting a communicator".into())
    }

    /// The handle, for functions that the safe layer lacks.
    pub fn raw(&self) -> ncclComm_t {
        self.raw
    }

    pub fn rccl(&self) -> &'static Rccl {
        self.rccl
    }

    pub(crate) fn check(
        &self,
        function: &'static str,
        result: ffi::ncclResult_t,
        doing: impl FnOnce() -> String,
    ) -> Result<(), Error> {
        self.rccl.check(function, result, doing)
    }

    fn into_raw(self) -> (&'static Rccl, ncclComm_t) {
        let this = std::mem::ManuallyDrop::new(self);
        (this.rccl, this.raw)
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        // SAFETY: made here, and owned. The error that led here is the one to report.
        unsafe { (self.rccl.functions.ncclCommAbort)(self.raw) };
    }
}
