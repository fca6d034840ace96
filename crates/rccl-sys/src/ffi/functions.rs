//! The table of RCCL's functions.

use std::ffi::{c_char, c_int, c_void};

use super::{ncclComm_t, ncclConfig_v22800, ncclDataType_t, ncclRedOp_t, ncclResult_t, ncclUniqueId};
use hip_sys::hip::ffi::hipStream_t;

hip_sys::c_functions! {
    /// RCCL's functions.
    RcclFunctions {
        fn ncclGetVersion(version: *mut c_int) -> ncclResult_t;
        fn ncclGetErrorString(result: ncclResult_t) -> *const c_char;
        fn ncclGetLastError(comm: ncclComm_t) -> *const c_char;

        fn ncclGetUniqueId(uniqueId: *mut ncclUniqueId) -> ncclResult_t;
        fn ncclCommInitRank(comm: *mut ncclComm_t, nranks: c_int, commId: ncclUniqueId, rank: c_int) -> ncclResult_t;
        fn ncclCommInitRankConfig(
            comm: *mut ncclComm_t, nranks: c_int, commId: ncclUniqueId, rank: c_int, config: *mut ncclConfig_v22800
        ) -> ncclResult_t;
        fn ncclCommSplit(
            comm: ncclComm_t, color: c_int, key: c_int, newcomm: *mut ncclComm_t, config: *mut ncclConfig_v22800
        ) -> ncclResult_t;
        fn ncclCommFinalize(comm: ncclComm_t) -> ncclResult_t;
        fn ncclCommDestroy(comm: ncclComm_t) -> ncclResult_t;
        fn ncclCommAbort(comm: ncclComm_t) -> ncclResult_t;
        fn ncclCommGetAsyncError(comm: ncclComm_t, asyncError: *mut ncclResult_t) -> ncclResult_t;
        fn ncclCommCount(comm: ncclComm_t, count: *mut c_int) -> ncclResult_t;
        fn ncclCommCuDevice(comm: ncclComm_t, device: *mut c_int) -> ncclResult_t;
        fn ncclCommUserRank(comm: ncclComm_t, rank: *mut c_int) -> ncclResult_t;

        fn ncclGroupStart() -> ncclResult_t;
        fn ncclGroupEnd() -> ncclResult_t;

        fn ncclAllReduce(
            sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t, op: ncclRedOp_t,
            comm: ncclComm_t, stream: hipStream_t
        ) -> ncclResult_t;
        fn ncclReduce(
            sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t, op: ncclRedOp_t, root: c_int,
            comm: ncclComm_t, stream: hipStream_t
        ) -> ncclResult_t;
        fn ncclReduceScatter(
            sendbuff: *const c_void, recvbuff: *mut c_void, recvcount: usize, datatype: ncclDataType_t, op: ncclRedOp_t,
            comm: ncclComm_t, stream: hipStream_t
        ) -> ncclResult_t;
        fn ncclAllGather(
            sendbuff: *const c_void, recvbuff: *mut c_void, sendcount: usize, datatype: ncclDataType_t,
            comm: ncclComm_t, stream: hipStream_t
        ) -> ncclResult_t;
        fn ncclBroadcast(
            sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t, root: c_int,
            comm: ncclComm_t, stream: hipStream_t
        ) -> ncclResult_t;
        fn ncclSend(
            sendbuff: *const c_void, count: usize, datatype: ncclDataType_t, peer: c_int, comm: ncclComm_t, stream: hipStream_t
        ) -> ncclResult_t;
        fn ncclRecv(
            recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t, peer: c_int, comm: ncclComm_t, stream: hipStream_t
        ) -> ncclResult_t;
    }
    // RCCL's own: NCCL spells it otherwise, and may become RCCL's only spelling.
    optional {
        fn ncclAllToAll(
            sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t,
            comm: ncclComm_t, stream: hipStream_t
        ) -> ncclResult_t;
    }
}
