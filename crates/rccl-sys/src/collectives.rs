//! Operations that the ranks of a communicator do together. They are queued, and happen in the stream's order.
//!
//! # Safety
//! Of every operation here: `send` and `receive` must be addresses of device memory (or memory that the device reaches) of as many
//! elements as the operation says. Until the stream has passed it they must stay allocated, `receive` must be touched by nobody,
//! `send` written by nobody. All ranks must queue the same operations in the same order, with the same counts and types.
#![expect(clippy::missing_safety_doc, reason = "the same for all, said above")]

use std::ffi::c_void;

use crate::ffi::{self, ncclDataType_t, ncclRedOp_t};
use crate::{Communicator, Error};
use hip_sys::Stream;

/// Types of elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DataType {
    F32,
    Bf16,
    I32,
    I64,
    U8,
}

impl DataType {
    pub fn bytes(self) -> usize {
        match self {
            DataType::U8 => 1,
            DataType::Bf16 => 2,
            DataType::F32 | DataType::I32 => 4,
            DataType::I64 => 8,
        }
    }

    fn raw(self) -> ncclDataType_t {
        match self {
            DataType::F32 => ffi::ncclFloat32,
            DataType::Bf16 => ffi::ncclBfloat16,
            DataType::I32 => ffi::ncclInt32,
            DataType::I64 => ffi::ncclInt64,
            DataType::U8 => ffi::ncclUint8,
        }
    }
}

/// How elements of several ranks become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    Sum,
    Product,
    Max,
    Min,
    Average,
}

impl Op {
    fn raw(self) -> ncclRedOp_t {
        match self {
            Op::Sum => ffi::ncclSum,
            Op::Product => ffi::ncclProd,
            Op::Max => ffi::ncclMax,
            Op::Min => ffi::ncclMin,
            Op::Average => ffi::ncclAvg,
        }
    }
}

impl Communicator {
    /// `receive[i]` becomes `op` over all ranks' `send[i]`, of `count` elements. In place if both are the same address.
    ///
    /// # Errors
    /// The library refuses, or earlier work has failed.
    pub unsafe fn all_reduce(
        &self,
        send: *const c_void,
        receive: *mut c_void,
        count: usize,
        kind: DataType,
        op: Op,
        stream: &Stream,
    ) -> Result<(), Error> {
        let function = self.rccl().functions().ncclAllReduce;
        // SAFETY: the handles are good, and the caller vouches for the memory.
        let result = unsafe { function(send, receive, count, kind.raw(), op.raw(), self.raw(), stream.raw()) };
        self.check("ncclAllReduce", result, || format!("{op:?} of {count} {kind:?}"))
    }

    /// As [`Communicator::all_reduce`], but only rank `root` receives it; elsewhere `receive` is not touched.
    ///
    /// # Errors
    /// The library refuses, or earlier work has failed.
    #[expect(clippy::too_many_arguments, reason = "RCCL's own")]
    pub unsafe fn reduce(
        &self,
        send: *const c_void,
        receive: *mut c_void,
        count: usize,
        kind: DataType,
        op: Op,
        root: i32,
        stream: &Stream,
    ) -> Result<(), Error> {
        let function = self.rccl().functions().ncclReduce;
        // SAFETY: the handles are good, and the caller vouches for the memory.
        let result = unsafe { function(send, receive, count, kind.raw(), op.raw(), root, self.raw(), stream.raw()) };
        self.check("ncclReduce", result, || format!("{op:?} of {count} {kind:?} for rank {root}"))
    }

    /// As [`Communicator::all_reduce`] of `count * ranks` elements, of which rank `r` receives the `r`th `count`. In place if
    /// `receive` is that part of `send`.
    ///
    /// # Errors
    /// The library refuses, or earlier work has failed.
    pub unsafe fn reduce_scatter(
        &self,
        send: *const c_void,
        receive: *mut c_void,
        count: usize,
        kind: DataType,
        op: Op,
        stream: &Stream,
    ) -> Result<(), Error> {
        let function = self.rccl().functions().ncclReduceScatter;
        // SAFETY: the handles are good, and the caller vouches for the memory.
        let result = unsafe { function(send, receive, count, kind.raw(), op.raw(), self.raw(), stream.raw()) };
        self.check("ncclReduceScatter", result, || format!("{op:?}, {count} {kind:?} for every rank"))
    }

    /// Every rank's `count` elements of `send`, rank after rank. In place if `send` is this rank's part of `receive`.
    ///
    /// # Errors
    /// The library refuses, or earlier work has failed.
    pub unsafe fn all_gather(
        &self,
        send: *const c_void,
        receive: *mut c_void,
        count: usize,
        kind: DataType,
        stream: &Stream,
    ) -> Result<(), Error> {
        let function = self.rccl().functions().ncclAllGather;
        // SAFETY: the handles are good, and the caller vouches for the memory.
        let result = unsafe { function(send, receive, count, kind.raw(), self.raw(), stream.raw()) };
        self.check("ncclAllGather", result, || format!("{count} {kind:?} of every rank"))
    }

    /// `count` elements of rank `root`'s `send`. In place if both are the same address.
    ///
    /// # Errors
    /// The library refuses, or earlier work has failed.
    pub unsafe fn broadcast(
        &self,
        send: *const c_void,
        receive: *mut c_void,
        count: usize,
        kind: DataType,
        root: i32,
        stream: &Stream,
    ) -> Result<(), Error> {
        let function = self.rccl().functions().ncclBroadcast;
        // SAFETY: the handles are good, and the caller vouches for the memory.
        let result = unsafe { function(send, receive, count, kind.raw(), root, self.raw(), stream.raw()) };
        self.check("ncclBroadcast", result, || format!("{count} {kind:?} of rank {root}"))
    }

    /// Sends `count` elements to rank `peer`, which receives as many. Several of them need a [group](crate::Rccl::group).
    ///
    /// # Errors
    /// The library refuses, or earlier work has failed.
    pub unsafe fn send(
        &self,
        send: *const c_void,
        count: usize,
        kind: DataType,
        peer: i32,
        stream: &Stream,
    ) -> Result<(), Error> {
        let function = self.rccl().functions().ncclSend;
        // SAFETY: the handles are good, and the caller vouches for the memory.
        let result = unsafe { function(send, count, kind.raw(), peer, self.raw(), stream.raw()) };
        self.check("ncclSend", result, || format!("{count} {kind:?} to rank {peer}"))
    }

    /// Receives `count` elements from rank `peer`, which sends as many. Several of them need a [group](crate::Rccl::group).
    ///
    /// # Errors
    /// The library refuses, or earlier work has failed.
    pub unsafe fn receive(
        &self,
        receive: *mut c_void,
        count: usize,
        kind: DataType,
        peer: i32,
        stream: &Stream,
    ) -> Result<(), Error> {
        let function = self.rccl().functions().ncclRecv;
        // SAFETY: the handles are good, and the caller vouches for the memory.
        let result = unsafe { function(receive, count, kind.raw(), peer, self.raw(), stream.raw()) };
        self.check("ncclRecv", result, || format!("{count} {kind:?} from rank {peer}"))
    }

    /// Rank `r` receives, from every rank in turn, the `r`th `count` elements of its `send`. Not in place. Where the library has no
    /// such function it is a group of sends and receives.
    ///
    /// # Errors
    /// The library refuses, or earlier work has failed.
    pub unsafe fn all_to_all(
        &self,
        send: *const c_void,
        receive: *mut c_void,
        count: usize,
        kind: DataType,
        stream: &Stream,
    ) -> Result<(), Error> {
        if let Some(function) = self.rccl().functions().ncclAllToAll {
            // SAFETY: the handles are good, and the caller vouches for the memory.
            let result = unsafe { function(send, receive, count, kind.raw(), self.raw(), stream.raw()) };
            return self.check("ncclAllToAll", result, || format!("{count} {kind:?} from every rank to every rank"));
        }
        let ranks = self.ranks()?;
        self.rccl().group(|| {
            for peer in 0..ranks {
                let offset = peer.unsigned_abs() as usize * count * kind.bytes();
                let from = send.cast::<u8>().wrapping_add(offset).cast();
                let to = receive.cast::<u8>().wrapping_add(offset).cast();
                // SAFETY: the caller vouches for `count * ranks` elements at both addresses.
                unsafe {
                    self.send(from, count, kind, peer, stream)?;
                    self.receive(to, count, kind, peer, stream)?;
                }
            }
            Ok(())
        })
    }
}
